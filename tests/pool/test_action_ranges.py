"""Integers of programs that do not fit into actions or reset options: refused before anything is stepped."""

from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from test_steps import raises

import jaxvec

INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
LIMITS = {dtype: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for dtype in INTEGERS}
EDGES = sorted({5, *(edge + by for edges in LIMITS.values() for edge in edges for by in (-1, 0, 1))})
STORED = [dtype for dtype in INTEGERS if dtype.itemsize < 8]
OPTIONS = spaces.Dict(level=spaces.Box(0, 255, (), np.uint8), scale=spaces.Box(0, 1, (), np.float32))


class Echo(gymnasium.Env):
    """Returns its action, and counts steps."""

    def __init__(self, space):
        self.observation_space = self.action_space = space
        self.steps = 0
        self.options = None

    def reset(self, *, seed=None, options=None):
        self.options = options
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return action, 0.0, False, False, {}


BYTES = spaces.Box(0, 255, (1,), np.uint8)
NUMBERS = spaces.Dict({dtype.name: spaces.Box(*LIMITS[dtype], (2,), dtype) for dtype in STORED})
FFI, PACKED, PYTHON = ("ffi", "native"), ("io_callback", "native"), ("io_callback", "portable")


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("given", "way"),
    [
        *((each, FFI) for each in INTEGERS),
        *((np.dtype(name), PACKED) for name in ("int16", "int64", "uint64")),
        *((np.dtype(name), PYTHON) for name in ("int8", "uint32", "int64")),
    ],
    ids=str,
)
def test_integers_pass_exactly_or_name_env_leaf_and_value(make, no_jax_log, given, way):
    transport, dispatch = way
    envs = make(partial(Echo, NUMBERS), 2, backend="serial", transport=transport, dispatch=dispatch)
    handle, _ = jaxvec.reset(envs, seed=0)
    zeros = {dtype.name: np.zeros((2, 2), given) for dtype in STORED}
    with jax.enable_x64(given.itemsize == 8):
        step = jax.jit(lambda handle, action: jaxvec.step(handle, action))
        steps = 0
        for stored in STORED:
            for value in [edge for edge in EDGES if LIMITS[given][0] <= edge <= LIMITS[given][1]]:
                action = {**zeros, stored.name: np.array([[0, 0], [0, value]], given)}
                if LIMITS[stored][0] <= value <= LIMITS[stored][1]:
                    handle, timestep = step(handle, action)
                    steps += 1
                    assert timestep.obs[stored.name].tolist() == [[0, 0], [0, value]]
                else:
                    text = rf"action\['{stored.name}'\]: {value} for env 1 doesn't fit into {stored.name}"
                    with raises(envs, jaxvec.ActionError, text):
                        step(handle, action)
    assert envs.get_attr("steps") == (steps, steps)


WRONG = jnp.array([[1], [300], [2], [-1]])
TEXT = "action: 300 for env 1 doesn't fit into uint8"


def jitted(function):
    return jax.jit(lambda *args: function(*args))


def in_vmap(handle, action):
    halves = jax.tree.map(lambda leaf: leaf.reshape(2, 2, 3), handle)
    return jax.vmap(lambda handle, action: jaxvec.step(handle, action))(halves, action.reshape(2, 2, 1))


def in_scan(handle, action):
    return jax.lax.scan(jaxvec.step, handle, jnp.stack([action, action]))


def in_shards(handle, action):
    mesh = jax.sharding.Mesh(jax.devices()[:1], "i")
    part = jax.sharding.PartitionSpec("i")
    return jax.shard_map(jaxvec.step, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)(
        handle, action
    )


PROGRAMS = {
    "eager": jaxvec.step,
    "eager numpy": lambda handle, action: jaxvec.step(handle, np.asarray(action)),
    "jit": jitted(jaxvec.step),
    "constant": jitted(lambda handle, action: jaxvec.step(handle, WRONG)),
    "scan": jitted(in_scan),
    "vmap": jitted(in_vmap),
    "shard_map": jitted(in_shards),
    "host": None,
}


@pytest.mark.parametrize("transport", ["auto", "io_callback"])
def test_every_transformation_refuses_before_any_step(make, no_jax_log, transport):
    envs = make(partial(Echo, BYTES), 4, num_workers=2, transport=transport)
    handle, _ = jaxvec.reset(envs, seed=0)
    for name, program in PROGRAMS.items():
        if program is None:
            with pytest.raises(jaxvec.ActionError, match=TEXT):
                envs.step(np.asarray(WRONG))
            continue
        with raises(envs, jaxvec.ActionError, TEXT):
            program(handle, WRONG)
            pytest.fail(name)
    assert envs.get_attr("steps") == (0,) * 4
    with raises(envs, jaxvec.ActionError, "action: -1 for env 3 doesn't fit into uint8"):
        PROGRAMS["jit"](handle[2:], WRONG[2:])
    handle, timestep = PROGRAMS["jit"](handle, jnp.array([[1], [255], [2], [0]]))
    assert timestep.info["episode_length"].tolist() == [1] * 4


def test_constants_beyond_32_bits_are_refused_when_traced(make):
    envs = make(partial(Echo, BYTES), 2, backend="serial")
    handle, _ = jaxvec.reset(envs, seed=0)
    for action in (np.array([[1], [2**32 + 1]]), [[1], [2**32 + 1]]):
        with pytest.raises(jaxvec.ActionError, match="action: 4294967297 for row 1 doesn't fit into uint8"):
            jax.jit(lambda handle, action=action: jaxvec.step(handle, action))(handle)
        with pytest.raises(jaxvec.ActionError, match="action: 4294967297 for env 1 doesn't fit into uint8"):
            jaxvec.step(handle, action)
    with pytest.raises(jaxvec.ActionError, match="action: expected uint8 of shape .*; got list: .*too large"):
        jaxvec.step(handle, [[1], [2**70]])


@pytest.mark.parametrize("transport", ["auto", "io_callback"])
def test_sent_actions_name_the_env_they_are_for(make, no_jax_log, transport):
    envs = make(partial(Echo, BYTES), 4, num_workers=2, batch_size=2, recv_order="sent", transport=transport)
    handle, timestep = jaxvec.reset(envs, seed=0)
    assert timestep.info["env_id"].tolist() == [0, 2]
    send = jax.jit(jaxvec.send)
    with raises(envs, jaxvec.ActionError, "action: 300 for env 2 doesn't fit into uint8"):
        send(handle, jnp.array([[1], [300]]), timestep.info["env_id"])
    with pytest.raises(jaxvec.ActionError, match="action: 300 for env 2 doesn't fit into uint8"):
        envs.send([[1], [300]], [0, 2])
    with raises(envs, jaxvec.EnvIdError, "out of range"):  # and not env 1
        jaxvec.send(handle, jnp.array([[1], [3]]), np.array([0, 2**32 + 1]))
    handle = send(handle, jnp.array([[1], [3]]), timestep.info["env_id"])
    handle, _ = jaxvec.recv(handle)
    assert sum(envs.get_attr("steps")) <= 2


def test_simulated_actions_name_their_state(make, no_jax_log):
    envs = make(partial(Echo, BYTES), 2, num_workers=1, states=4)
    handle, _ = jaxvec.reset(envs, seed=0)
    handle, state = jaxvec.save(handle)
    text = "action: -1 for state 1 doesn't fit into uint8"
    with raises(envs, jaxvec.ActionError, text):
        jax.jit(jaxvec.simulate)(handle, state, jnp.array([[1], [-1]]))
    with pytest.raises(jaxvec.ActionError, match=text):
        envs.simulate(envs.save(), [[1], [-1]])


@pytest.mark.parametrize("transport", ["auto", "io_callback"])
def test_reset_options_never_wrap(make, no_jax_log, transport):
    envs = make(partial(Echo, BYTES), 2, num_workers=1, reset_options=OPTIONS, transport=transport)
    handle, _ = jaxvec.reset(envs, seed=0, options={"level": 7, "scale": 1})
    action, options = jnp.ones((2, 1), int), {"level": jnp.array([1, 300]), "scale": 0}
    text = r"reset_options\['level'\]: 300 for env 1 doesn't fit into uint8"

    def reset(handle, options):
        return jaxvec.reset(handle, options=options)

    for call in (reset, lambda handle, options: jaxvec.step(handle, action, reset_options=options)):
        for program in (call, jax.jit(call)):
            with raises(envs, ValueError, text):
                program(handle, options)
    for refused in (
        lambda options: envs.reset(options=options),
        lambda options: envs.step(np.ones((2, 1), int), reset_options=options),
    ):
        with pytest.raises(ValueError, match=text):
            refused({**options, "level": np.array([1, 300])})
    assert envs.get_attr("steps") == (0, 0)
    jax.jit(reset)(handle, {"level": jnp.array([1, 255]), "scale": 0})
    assert [int(one["level"]) for one in envs.get_attr("options")] == [1, 255]


def test_a_batched_env_names_its_own_env(make, no_jax_log):
    def batched():
        return SyncVectorEnv([partial(Echo, BYTES)] * 2, autoreset_mode="SameStep")

    envs = make(batched, 4, envs_per_instance=2, num_workers=2, final_obs=False)
    handle, _ = jaxvec.reset(envs, seed=0)
    with raises(envs, jaxvec.ActionError, "action: 300 for env 3 doesn't fit into uint8"):
        PROGRAMS["jit"](handle, jnp.array([[1], [2], [3], [300]]))
    _, timestep = PROGRAMS["jit"](handle, jnp.array([[1], [2], [3], [30]]))
    assert timestep.info["episode_length"].tolist() == [1] * 4


def test_integers_for_floats_are_rounded_as_numpy_does(make):
    space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    envs = make(partial(Echo, space), 2, backend="serial")
    handle, _ = jaxvec.reset(envs, seed=0)
    _, timestep = PROGRAMS["jit"](handle, jnp.array([[2**24 + 1], [True]]))
    assert timestep.obs.tolist() == [[2**24], [1]]
    envs.reset(seed=0)
    assert envs.step(np.array([[1e39], [2**24 + 1]])).obs.tolist() == [[np.inf], [2**24]]


@pytest.mark.parametrize("transport", ["auto", "io_callback"])
def test_arguments_and_results_of_calls_never_wrap(make, no_jax_log, transport):
    envs = make(partial(Echo, BYTES), 2, num_workers=1, transport=transport)
    handle, _ = jaxvec.reset(envs, seed=0)
    with pytest.raises(
        ValueError, match="call of set_steps: 4294967297 in an argument doesn't fit into int32"
    ):
        jaxvec.call(handle, "set_steps", np.array([1, 2**32 + 1]))
    bytes_of_env = jax.ShapeDtypeStruct((1,), np.int8)
    envs.set_attr("steps", [np.array([1]), np.array([300])])
    with raises(
        envs, jaxvec.EnvDataError, "env 1 returned wrong data from steps: .*300 doesn't fit into int8"
    ):
        jaxvec.get_attr(handle, "steps", bytes_of_env)
    envs.set_attr("steps", [np.array([1]), np.array([-128])])
    assert jaxvec.get_attr(handle, "steps", bytes_of_env).tolist() == [[1], [-128]]
