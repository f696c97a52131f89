"""JAX's transformations of the verbs: the table in docs/contract.md, whose last row is in test_steps.py."""

import inspect
import math
import textwrap
import time
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax import export
from jax.experimental import io_callback
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.probe import _call, _io_callback, _primitive
from support.scripts import run_python

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

pytestmark = pytest.mark.jax_version

ACTION = jnp.arange(8)


def split(tree, *shape):
    """Splits the env axis of every leaf."""
    return jax.tree.map(lambda x: x.reshape(*shape, len(x) // math.prod(shape), *x.shape[1:]), tree)


def rollout(handle, action, length=5):
    return jax.lax.scan(lambda h, _: jaxvec.step(h, action), handle, length=length)


@pytest.fixture(params=["auto", "io_callback"])
def envs(request, make):
    return make(CountingEnv, 8, num_workers=2, transport=request.param)


@pytest.fixture
def hand_offs(monkeypatch):
    """The verbs of the calls that reach a pool, once each: C++ may answer a callback, or ask Python."""
    calls, in_callback = [], []
    answer, callback = _call.answer, _io_callback._Callback.__call__

    def counting(call, *args, **kwargs):
        if not in_callback:
            calls.append(call.verb.function)
        return answer(call, *args, **kwargs)

    def counting_callback(self, *pieces):
        calls.append(self.call.verb.function)
        in_callback.append(self)
        try:
            return callback(self, *pieces)
        finally:
            in_callback.remove(self)

    for module in (_call, _io_callback, _primitive):
        monkeypatch.setattr(module, "answer", counting)
    monkeypatch.setattr(_io_callback._Callback, "__call__", counting_callback)
    return calls


# --- vmap -------------------------------------------------------------------------------------


@pytest.fixture
def serial(make):
    """A pool whose every call comes by `_call.answer`, without the C++ engine."""
    return make(CountingEnv, 8, backend="serial", dispatch="portable")


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("lanes", [(2,), (2, 2), (2, 2, 2), (1,), (8,)])
def test_vmap_makes_one_call_for_all_lanes_however_nested(serial, hand_offs, jit, lanes):
    handle, _ = jaxvec.reset(serial, seed=0)
    program = rollout
    for _ in lanes:
        program = jax.vmap(program)
    hand_offs.clear()
    _, timestep = (jax.jit(program) if jit else program)(split(handle, *lanes), split(ACTION, *lanes))
    assert hand_offs == ["jaxvec.step"] * 5
    assert serial.get_attr("steps") == (5,) * 8
    assert timestep.obs.shape == (*lanes, 5, 8 // int(np.prod(lanes)), 4)
    at_last = jnp.take(timestep.obs, 4, axis=len(lanes))
    np.testing.assert_array_equal(at_last.reshape(8, 4)[:, 3], ACTION)


@pytest.mark.slow(but=1)
def test_vmap_of_a_jitted_rollout_equals_the_rollout_of_all(make, transport):
    """Also of nested observations, and in another axis than the first."""
    pools = [make(NestedEnv, 6, num_workers=2, transport=transport) for _ in range(2)]
    pools[0].action_space.seed(1)
    action = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, pools[0].action_space.sample()))
    handles = [jaxvec.reset(envs, seed=3)[0] for envs in pools]
    whole = jax.jit(rollout)(handles[0], action)[1]
    lanes = jax.vmap(jax.jit(rollout), in_axes=(0, 1), out_axes=1)(
        split(handles[1], 2), jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), split(action, 2))
    )[1]
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_array_equal(ours.reshape(theirs.shape), theirs), lanes, whole
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("nested", [False, True])
def test_training_over_seeds_by_vmap_resets_the_pools_envs_once_each(serial, hand_offs, nested):
    """`jax.vmap(train)(keys)` with a pool of seeds x envs."""

    def train(key):
        handle, _ = jaxvec.reset(serial, num_envs=2, seed=key)
        _, timestep = rollout(handle, jnp.zeros(2, int))
        return timestep.obs[-1], timestep.info["env_id"][-1]

    keys = jax.random.split(jax.random.key(0), 4)
    if nested:
        last, env_id = jax.jit(jax.vmap(jax.vmap(train)))(keys.reshape(2, 2))
    else:
        last, env_id = jax.jit(jax.vmap(train))(keys)
    assert hand_offs == ["jaxvec.reset"] + ["jaxvec.step"] * 5
    assert serial.get_attr("resets") == (1,) * 8
    np.testing.assert_array_equal(env_id.reshape(8), range(8))
    np.testing.assert_array_equal(last.reshape(8, 4)[:, 1], 5)
    seeds = serial.get_attr("np_random_seed")
    assert len(set(seeds)) == 8
    alone = [jax.random.bits(key, (2,), np.uint32) >> 1 for key in keys]
    np.testing.assert_array_equal(seeds, np.concatenate(alone))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_sizes_that_do_not_fit_are_named(serial, jit):
    keys = jax.random.split(jax.random.key(0), 3)
    wrong = jax.vmap(lambda key: jaxvec.reset(serial, num_envs=2, seed=key))
    with pytest.raises(jaxvec.EnvIdError, match="reset of 6 envs, but the pool has 8"):
        (jax.jit(wrong) if jit else wrong)(keys)
    alone = lambda: jaxvec.reset(serial, num_envs=2)  # noqa: E731
    with pytest.raises(jaxvec.EnvIdError, match="reset of 2 envs, but the pool has 8"):
        (jax.jit(alone) if jit else alone)()
    same = jax.vmap(lambda _: jaxvec.reset(serial, num_envs=2, seed=0))  # of which vmap makes a single reset
    with pytest.raises(jaxvec.EnvIdError, match="an unbatched reset runs only once"):
        (jax.jit(same) if jit else same)(jnp.arange(4))
    handle, _ = jaxvec.reset(serial)
    with pytest.raises(jaxvec.ActionError, match=r"(?s)\(8,\).*\(4|\(4,\).*8"):
        jax.vmap(jaxvec.step, in_axes=(None, 0))(handle, split(ACTION, 2))
    assert serial.get_attr("steps") == (0,) * 8


def test_lanes_that_share_a_handle_are_refused(envs):
    handle, _ = jaxvec.reset(envs)
    with pytest.raises(jaxvec.EnvIdError, match="duplicate env_id 0; nothing was stepped"):
        jax.vmap(jaxvec.step, in_axes=(None, 0))(handle, jnp.stack([ACTION, ACTION]))
    with pytest.raises(jaxvec.EnvIdError, match="duplicate env_id 0"), envs:
        jax.jit(jax.vmap(jaxvec.step, in_axes=(None, 0)))(handle, jnp.stack([ACTION, ACTION]))


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("reset", jaxvec.reset),
        ("step", lambda handle: jaxvec.step(handle, ACTION[:2])),
        ("send", lambda handle: jaxvec.send(handle, ACTION[:2])),
        ("recv", jaxvec.recv),
        ("get_attr", lambda handle: jaxvec.get_attr(handle, "steps", int)),
        ("call", lambda handle: jaxvec.call(handle, "reset")),
        ("save", jaxvec.save),
        ("restore", lambda handle: jaxvec.restore(handle, None)),
    ],
)
def test_a_handle_split_for_vmap_is_refused_without_vmap(envs, verb, call, jit):
    """The io_callback transport would read the other rows of the token as seeds, masks or actions."""
    call = jax.jit(call) if jit else call
    handle, _ = jaxvec.reset(envs)
    for wrong in (split(handle, 2), handle[0], jax.tree.map(lambda x: x.astype(float), handle)):
        with pytest.raises(
            TypeError, match=rf"{verb} got a handle with a token of .*; the handle of one env is"
        ):
            call(wrong)
    assert envs.get_attr("steps") == (0,) * 8
    assert envs.get_attr("resets") == (1,) * 8
    jaxvec.step(handle, ACTION)  # which is still the latest


@pytest.mark.slow(but=1)
def test_part_of_a_handle_steps_its_envs_and_leaves_the_others(envs):
    handle, _ = jaxvec.reset(envs)
    odd, even = (jax.tree.map(lambda x, first=first: x[first::2], handle) for first in (1, 0))
    odd, timestep = jax.jit(rollout)(odd, jnp.ones(4, int))
    np.testing.assert_array_equal(timestep.info["env_id"][0], [1, 3, 5, 7])
    assert envs.get_attr("steps") == (0, 5) * 4
    with pytest.raises(jaxvec.StaleHandleError, match="from call 1 to env 1 .* is call 6"):
        jaxvec.step(handle, ACTION)
    jaxvec.step(even, jnp.ones(4, int))
    back = jax.tree.map(lambda x: x[::-1], odd)  # in any order
    _, timestep = jaxvec.step(back, jnp.array([70, 50, 30, 10]))
    np.testing.assert_array_equal(timestep.info["env_id"], [7, 5, 3, 1])
    np.testing.assert_array_equal(timestep.obs[:, 3], [70, 50, 30, 10])
    assert envs.get_attr("steps") == (1, 6) * 4


def conditionally(kind, go, handle, action):
    """A step where `go` is true."""

    def step(handle):
        return jaxvec.step(handle, action)[0]

    match kind:
        case "cond":
            return jax.lax.cond(go, step, lambda handle: handle, handle)
        case "switch":
            return jax.lax.switch(jnp.where(go, 2, 0), [lambda h: h, lambda h: step(step(h)), step], handle)
        case "while_loop":
            loop = jax.lax.while_loop(
                lambda carry: carry[0], lambda carry: (False, step(carry[1])), (go, handle)
            )
            return loop[1]
        case _:
            never = jax.lax.while_loop(lambda carry: carry[0], lambda _: (False, 1), (go, 0))[1]
            return jax.lax.cond(never == 1, lambda: jax.jit(step)(handle), lambda: handle)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind", ["cond", "switch", "while_loop", "nested"])
def test_a_predicate_that_is_the_same_for_all_lanes(envs, hand_offs, kind):
    handle, _ = jaxvec.reset(envs)
    program = partial(conditionally, kind)
    lanes, actions = split(handle, 2, 2), split(ACTION, 2, 2)
    for number, go in enumerate((True, False, True)):
        for jit in (jax.jit, lambda function: function):
            lanes = jit(jax.vmap(jax.vmap(program, (None, 0, 0)), (None, 0, 0)))(go, lanes, actions)
        assert envs.get_attr("steps") == (2, 2, 4)[number : number + 1] * 8
    if envs.transport == "io_callback":
        assert hand_offs.count("jaxvec.step") == 4  # each of all lanes
    jaxvec.step(jax.tree.map(jnp.concatenate, jax.tree.map(jnp.concatenate, lanes)), ACTION)
    assert envs.get_attr("steps") == (5,) * 8


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("kind", ["cond", "switch", "while_loop"])
@pytest.mark.parametrize("outer", [False, True], ids=["inner", "outer"])
def test_a_predicate_that_differs_between_lanes_is_refused(envs, kind, outer):
    """JAX would run all branches, or all lanes until the last is done, and select."""
    handle, _ = jaxvec.reset(envs)
    program = jax.vmap(partial(conditionally, kind), (None if outer else 0, 0, 0))
    if outer:
        program = jax.vmap(program)
    lanes, actions = (split(each, *([2, 2] if outer else [2])) for each in (handle, ACTION))
    with pytest.raises(
        NotImplementedError, match=r"jaxvec call .* a predicate that differs .* one predicate"
    ):
        jax.jit(program)(jnp.array([True, False]), lanes, actions)
    assert envs.get_attr("steps") == (0,) * 8


def test_other_programs_batch_conditions_as_ever():
    go, x = jnp.array([True, False]), jnp.array([1, 2])
    cond = jax.vmap(lambda go, x: jax.lax.cond(go, lambda: x, lambda: -x))
    np.testing.assert_array_equal(cond(go, x), [1, -2])
    loop = jax.vmap(lambda x: jax.lax.while_loop(lambda x: x < 5, lambda x: x * 2, x))
    np.testing.assert_array_equal(loop(jnp.array([1, 7])), [8, 7])
    with pytest.raises(Exception, match=r"(?i)^unordered io effects not supported in while_loop"):
        jax.vmap(lambda x: jax.lax.while_loop(lambda x: x < 5, called_back, x))(x)
    with pytest.raises(NotImplementedError, match="IO effect not supported in vmap-of-cond"):
        jax.vmap(lambda x: jax.lax.cond(True, called_back, lambda x: x, x))(x)


def called_back(x):
    io_callback(lambda: None, None)
    return x + 1


@pytest.mark.slow(but=1)
def test_training_over_seeds_evaluates_now_and_then(make, transport):
    """`lax.cond` around an evaluation, whose envs it resets, within `vmap` over seeds."""
    training = make(CountingEnv, 6, num_workers=2, transport=transport)
    evaluation = make(CountingEnv, 4, num_workers=2, transport=transport)

    def evaluate(key):
        handle, _ = jaxvec.reset(evaluation, num_envs=2, seed=key)
        _, timestep = rollout(handle, jnp.zeros(2, int), 5)
        return timestep.obs[-1, :, 1], timestep.info["env_id"][-1]

    def train(key):
        handle, _ = jaxvec.reset(training, num_envs=3, seed=key)

        def update(carry, number):
            handle, seen = carry
            handle, timestep = jaxvec.step(handle, jnp.zeros(3, int))
            seen = jax.lax.cond(
                number % 3 == 2, lambda: evaluate(jax.random.fold_in(key, number)), lambda: seen
            )
            return (handle, seen), (timestep.obs[:, 1], seen)

        nothing = (jnp.zeros(2, jnp.int32), jnp.full(2, -1, jnp.int32))
        return jax.lax.scan(update, (handle, nothing), jnp.arange(7))[1]

    steps, (seen, env_id) = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), 2))
    np.testing.assert_array_equal(steps, np.broadcast_to(np.arange(1, 8)[:, None], (2, 7, 3)))
    assert seen[:, :, 0].tolist() == [[0, 0, 5, 5, 5, 10, 10]] * 2
    assert env_id[:, 1].tolist() == [[-1, -1]] * 2
    assert env_id[:, -1].tolist() == [[0, 1], [2, 3]]
    assert evaluation.get_attr("steps") == (10,) * 4
    assert (training.stats().total.steps, evaluation.stats().total.steps) == (42, 40)


# --- Derivatives ------------------------------------------------------------------------------


def loss(weight, handle):
    """Of five steps, whose actions don't depend on anything but are equal."""

    def body(handle, _):
        handle, timestep = jaxvec.step(handle, ACTION)
        return handle, (weight * timestep.obs[:, 1].astype(float) * timestep.reward).sum()

    return jax.lax.scan(body, handle, length=5)[1].sum()


EXPECTED = 8 * (1 + 4 + 9 + 16 + 25)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("mode", ["grad", "jvp", "jacfwd", "jacrev", "value_and_grad", "vjp"])
def test_derivatives_take_what_envs_return_for_constant_and_step_once(envs, mode, jit):
    handle, _ = jaxvec.reset(envs)
    modes = {
        "grad": lambda w: jax.grad(loss)(w, handle),
        "jvp": lambda w: jax.jvp(lambda w: loss(w, handle), (w,), (1.0,))[1],
        "jacfwd": lambda w: jax.jacfwd(loss)(w, handle),
        "jacrev": lambda w: jax.jacrev(loss)(w, handle),
        "value_and_grad": lambda w: jax.value_and_grad(loss)(w, handle)[1],
        "vjp": lambda w: jax.vjp(lambda w: loss(w, handle), w)[1](1.0)[0],
    }
    derivative = modes[mode]
    assert (jax.jit(derivative) if jit else derivative)(2.0) == EXPECTED
    assert envs.get_attr("steps") == (5,) * 8


class EchoEnv(CountingEnv):
    """Takes a real number, so that a derivative could come by it, and returns it as the reward."""

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(-10, 10, (), np.float32)

    def step(self, action):
        obs, _, *rest = super().step(0)
        return obs, float(action), *rest


def test_the_derivative_through_an_action_is_zero(make, transport):
    envs = make(EchoEnv, 2, transport=transport)
    handle, _ = jaxvec.reset(envs)

    def loss(weight):
        _, timestep = jaxvec.step(handle, weight * jnp.ones(2))
        return timestep.reward.sum() + 3 * weight

    assert jax.jit(jax.value_and_grad(loss))(2.0) == (4 + 6, 3)


def test_a_gradient_under_vmap_and_a_vmap_under_gradient(serial, hand_offs):
    handle, _ = jaxvec.reset(serial)

    def lane_loss(weight, handle):
        _, timestep = jaxvec.step(handle, jnp.zeros(4, int))
        return (weight * timestep.obs[:, 1].astype(float)).sum()

    hand_offs.clear()
    grads = jax.vmap(jax.grad(lane_loss))(jnp.ones(2), split(handle, 2))
    np.testing.assert_array_equal(grads, [4, 4])
    handle, _ = jaxvec.reset(serial)
    total = jax.grad(lambda w: jax.vmap(lane_loss, in_axes=(None, 0))(w, split(handle, 2)).sum())(1.0)
    assert total == 16
    assert hand_offs == ["jaxvec.step", "jaxvec.reset", "jaxvec.step"]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_checkpoint_never_steps_twice(envs, jit):
    """JAX refuses: it would run the step again for the backward pass."""
    handle, _ = jaxvec.reset(envs)
    derivative = jax.grad(jax.checkpoint(loss))
    advice = r"Effects not supported.*jaxvec\.step.*outside of jax\.checkpoint.*docs/contract\.md"
    with pytest.raises(NotImplementedError, match=advice):
        (jax.jit(derivative) if jit else derivative)(2.0, handle)
    assert envs.get_attr("steps") == (0,) * 8


# --- Devices ----------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("d",))


def over(mesh, function, **kwargs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("d"), **kwargs))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("sharded", [False, True])
def test_under_shard_map_each_device_steps_its_own_envs(envs, mesh, sharded):
    arguments = jaxvec.reset(envs)[0], ACTION
    if sharded:
        arguments = jax.device_put(arguments, NamedSharding(mesh, P("d")))
    program = over(mesh, rollout, out_specs=(P("d"), P(None, "d")))
    handle, timestep = program(*arguments)
    np.testing.assert_array_equal(timestep.info["env_id"], [range(8)] * 5)
    np.testing.assert_array_equal(timestep.obs[:, :, 3], np.broadcast_to(ACTION, (5, 8)))
    jax.block_until_ready(program(handle, ACTION))
    assert envs.get_attr("steps") == (10,) * 8


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["shard_map", "pmap"])
def test_devices_step_at_the_same_time(make, transport, kind, tmp_path, mesh):
    """Each env waits in its step until one of each device has begun its own."""

    class MeetingEnv(CountingEnv):
        def __init__(self, index):
            super().__init__()
            self.index = index

        def step(self, action):
            (tmp_path / f"{self.index}-{self.steps}").touch()
            deadline = time.monotonic() + 20
            while len(list(tmp_path.glob(f"*-{self.steps}"))) < 4:
                if time.monotonic() > deadline:
                    raise TimeoutError("not all have begun")
                time.sleep(0.001)
            return super().step(action)

    envs = make(MeetingEnv, 4, num_workers=4, transport=transport)
    handle, _ = jaxvec.reset(envs)
    if kind == "shard_map":
        program = over(mesh, rollout, out_specs=(P("d"), P(None, "d")))
        jax.block_until_ready(program(handle, jnp.zeros(4, int)))
    else:
        jax.block_until_ready(jax.pmap(rollout)(split(handle, 4), split(jnp.zeros(4, int), 4)))
    assert envs.get_attr("steps") == (5,) * 4


def test_each_device_can_reset_its_own_envs(envs, mesh):
    handle, _ = jaxvec.reset(envs)

    def program(handle):
        return jaxvec.reset(handle, seed=7)

    jax.block_until_ready(over(mesh, program, out_specs=P("d"))(handle))
    assert envs.get_attr("resets") == (2,) * 8
    assert [info["seed"] for info in envs.infos()] == [7, 8] * 4
    with pytest.raises(jaxvec.EnvIdError, match="pass each device a handle"):
        over(mesh, lambda _: jaxvec.reset(envs), out_specs=P("d"))(ACTION)
    assert envs.get_attr("resets") == (2,) * 8


def test_handles_that_cannot_be_divided_are_refused(envs, mesh):
    handle, _ = jaxvec.reset(envs)
    six = jax.tree.map(lambda x: x[:6], handle)
    with pytest.raises(ValueError, match="(?i)divi"):
        over(mesh, rollout, out_specs=(P("d"), P(None, "d")))(six, ACTION[:6])
    replicated = jax.shard_map(jaxvec.step, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    with pytest.raises(jaxvec.ActionError, match="split the handle like the action"):
        jax.jit(replicated)(handle, ACTION)
    assert envs.get_attr("steps") == (0,) * 8


def test_a_program_that_xla_shards_by_itself_steps_once(envs, mesh):
    """All envs on one device, by a callback; FFI calls can't be there, and say so."""
    handle, _ = jaxvec.reset(envs)
    sharded = jax.device_put((handle, ACTION), NamedSharding(mesh, P("d")))
    _, timestep = jax.jit(rollout)(*sharded)
    np.testing.assert_array_equal(timestep.obs[-1, :, 3], ACTION)
    assert envs.get_attr("steps") == (5,) * 8


EXPLICIT = {
    "step": jaxvec.step,
    "scan": rollout,
    "while_loop": lambda handle, action: jax.lax.while_loop(
        lambda carry: carry[1].info["episode_length"].min() < 3,
        lambda carry: jaxvec.step(carry[0], action),
        jaxvec.reset(handle),
    ),
    "cond": lambda handle, action: jax.lax.cond(
        action.sum() > 0, jaxvec.step, lambda handle, _: jaxvec.reset(handle), handle, action
    ),
    "mask": lambda handle, action: jaxvec.reset(handle, mask=action > 3, seed=action),
    "vmap": lambda handle, action: jax.vmap(rollout)(split(handle, 4), split(action, 4)),
}


def explicit_mesh(devices):
    axis_types = (AxisType.Explicit,)  # the default of `jax.make_mesh` in jax 0.10
    return jax.make_mesh((devices,), ("d",), axis_types=axis_types, devices=jax.devices()[:devices])


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("transport", ["auto", "io_callback"])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("kind", EXPLICIT)
def test_explicit_shardings_follow_the_handle(make, transport, kind, devices):
    """One device steps all envs, as with automatic shardings, and a loop may carry the handle."""
    program = jax.jit(EXPLICIT[kind])
    _, expected = program(jaxvec.reset(make(CountingEnv, 8))[0], ACTION)
    arguments = jaxvec.reset(make(CountingEnv, 8, transport=transport))[0], ACTION
    arguments = jax.device_put(arguments, NamedSharding(explicit_mesh(devices), P("d")))
    handle, timestep = program(*arguments)
    chex.assert_trees_all_equal(timestep, expected)
    assert "d" in jax.typeof(timestep.reward).sharding.spec
    assert "d" in jax.typeof(handle.token).sharding.spec


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transport", ["auto", "io_callback"])
def test_explicit_shardings_of_saved_states(make, transport):
    envs = make(CountingEnv, 8, states=100, transport=transport)
    handle, state = jaxvec.save(jaxvec.reset(envs)[0])
    arguments = jax.device_put((handle, state, ACTION), NamedSharding(explicit_mesh(4), P("d")))

    @jax.jit
    def program(handle, state, action):
        handle, _ = jaxvec.restore(handle, state)
        after, simulated = jaxvec.simulate(handle, state, action)
        _, timestep = jaxvec.step(handle, action)
        return after, simulated, timestep

    after, simulated, timestep = program(*arguments)
    chex.assert_trees_all_equal(simulated, timestep)
    np.testing.assert_array_equal(timestep.obs[:, 3], ACTION)
    assert jax.typeof(after.ids).sharding.spec[0] == "d"


def test_the_ffi_by_name_refuses_a_program_that_xla_shards(make, mesh):
    envs = make(CountingEnv, 8, transport="ffi")
    sharded = jax.device_put((jaxvec.reset(envs)[0], ACTION), NamedSharding(mesh, P("d")))
    with pytest.raises(NotImplementedError, match=r"over 4 devices; use jax\.shard_map"):
        jax.jit(rollout)(*sharded)
    assert envs.get_attr("steps") == (0,) * 8


def test_an_import_leaves_jax_as_it_was():
    """The first `make` installs the batching rules that reject such programs."""
    script = """
        import sys
        import jax
        from jax.interpreters import batching

        rules = batching.fancy_primitive_batchers
        before = {**rules}
        import jaxvec
        jaxvec.Handle, jaxvec.step, jaxvec.VectorEnv
        assert {name: rules[name] for name in before} == before
        with jaxvec.make("CartPole-v1", 1, backend="serial"):
            pass
        changed = {name for name in before if rules[name] is not before[name]}
        assert changed == {jax.lax.cond_p, jax.lax.while_p}, changed
        after = {**rules}
        with jaxvec.make("CartPole-v1", 1, backend="serial"):
            pass
        assert rules == after
    """
    run_python("-c", textwrap.dedent(script), check=True)


# --- Compilation ------------------------------------------------------------------------------


def on_host(fun):
    if "out_memory_spaces" in inspect.signature(compute_on).parameters:  # since jax 0.12
        return compute_on(fun, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    return compute_on("device_host")(jax.jit(fun))


def test_the_host_computations_of_a_program_on_the_cpu(make, transport):
    envs = make(CountingEnv, 8, num_workers=2, transport=transport)
    handle, timestep = jaxvec.reset(envs)
    step = on_host(jaxvec.step)

    def body(carry, _):
        handle, obs = carry
        handle, timestep = step(handle, obs[:, 3] + 1)
        return (handle, timestep.obs), timestep

    (handle, _), timesteps = jax.jit(lambda c: jax.lax.scan(body, c, length=6))((handle, timestep.obs))
    np.testing.assert_array_equal(timesteps.obs[:, :, 3], np.tile(np.arange(6)[:, None], 8))
    np.testing.assert_array_equal(jaxvec.step(handle, ACTION)[1].obs[:, 2], [7] * 8)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("read", [False, True])
def test_the_host_computations_of_another_program_are_refused(make, transport, platform, read):
    """XLA would end the process when it compiles them for CUDA, and can't for TPUs."""
    handle, _ = jaxvec.reset(make(CountingEnv, 8, backend="serial", transport=transport))
    program = on_host(lambda h: jaxvec.get_attr(h, "steps", int) if read else jaxvec.step(h, ACTION))
    traced = jax.jit(program).trace(handle)
    with pytest.raises(NotImplementedError, match=f"compute_on.*program for {platform}.*outside"):
        traced.lower(lowering_platforms=(platform,))


CACHED = """
import sys, jax, jax.numpy as jnp, jaxvec, logging
from jaxvec.testing import CountingEnv
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_cpu_enable_async_dispatch", sys.argv[2] == "asynchronous")
with jaxvec.make(CountingEnv, 2) as envs:
    handle, _ = jaxvec.reset(envs)
    program = jax.jit(lambda h: jax.lax.scan(lambda h, _: jaxvec.step(h, jnp.zeros(2, int)), h, length=7))
    print(program(handle)[1].obs[-1].tolist(), envs.get_attr("steps"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["asynchronous", "synchronous"])
def test_the_persistent_compilation_cache_works_across_program_runs(tmp_path, dispatch):
    """Up to jax 0.10 JAX itself keeps programs with host callbacks out of it; they work all the same."""
    for _ in range(2):
        done = run_python("-c", CACHED, str(tmp_path), dispatch)
        assert done.stdout == "[[1, 7, 7, 0], [1, 7, 7, 0]] (7, 7)\n", done.stderr
        if dispatch == "synchronous":  # without a host callback
            assert len([*tmp_path.glob("jit__lambda-*-cache")]) == 1


# --- Reads and first-ready batches ------------------------------------------------------------


def level(handle):
    return jaxvec.get_attr(handle, "steps", int)


@pytest.mark.slow(but=1)
def test_reads_under_the_transformations(envs, mesh):
    handle, _ = jaxvec.reset(envs)
    handle, _ = jaxvec.step(handle, ACTION)
    expected = np.ones(8)
    np.testing.assert_array_equal(over(mesh, level, out_specs=P("d"))(handle), expected)
    np.testing.assert_array_equal(jax.pmap(level)(split(handle, 4)).reshape(8), expected)
    sharded = jax.device_put(handle, NamedSharding(mesh, P("d")))
    np.testing.assert_array_equal(jax.jit(level)(sharded), expected)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(level))(split(handle, 2, 2)).reshape(8), expected)
    conditional = jax.vmap(lambda go, h: jax.lax.cond(go, lambda: level(h), lambda: jnp.zeros(4, int)))
    np.testing.assert_array_equal(conditional(jnp.array([True, False]), split(handle, 2)), [[1] * 4, [0] * 4])
    assert jax.grad(lambda w: (w * level(handle).astype(float)).sum())(3.0) == 8
    assert jax.grad(jax.checkpoint(lambda w, h: (w * level(h).astype(float)).sum()))(3.0, handle) == 8
    jaxvec.step(handle, ACTION)  # the handle is fresh after all these


def test_a_read_that_nobody_uses_is_not_made(serial, hand_offs):
    handle, _ = jaxvec.reset(serial)
    hand_offs.clear()
    jax.block_until_ready(jax.jit(lambda h: (level(h), h.token)[1])(handle))
    assert hand_offs == []


def test_calls_under_shard_map_ask_each_devices_own_envs(envs, mesh):
    handle, _ = jaxvec.reset(envs)

    def program(handle, by):
        return jaxvec.call(handle, "_observe", by, result_shape_dtypes=jax.ShapeDtypeStruct((4,), int))

    _, observed = over(mesh, program, out_specs=P("d"))(handle, ACTION)
    np.testing.assert_array_equal(observed[:, 3], ACTION)


@pytest.fixture
def halves(make, transport):
    return make(CountingEnv, 8, num_workers=2, batch_size=4, recv_order="sent", transport=transport)


def turn(handle, action):
    return jaxvec.recv(jaxvec.send(handle, action, jnp.arange(0, 8, 2)))


@pytest.mark.slow(but=1)
def test_first_ready_batches_under_the_transformations(halves, mesh):
    handle, _ = jaxvec.reset(halves)
    handle, _ = jaxvec.recv(handle)  # now all are received

    def loss(weight, handle):
        handle, timestep = turn(handle, jnp.ones(4, int))
        return (weight * timestep.obs[:, 1].astype(float)).sum(), handle

    for step, derivative in enumerate((jax.grad(loss, has_aux=True), jax.jit(jax.grad(loss, has_aux=True)))):
        grad, handle = derivative(2.0, handle)
        assert grad == 4 * (step + 1)
    assert halves.get_attr("steps") == (2, 0) * 4
    steps = halves.get_attr("steps")
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.grad(jax.checkpoint(lambda w, h: loss(w, h)[0]))(2.0, handle)
    with pytest.raises(jaxvec.EnvIdError, match="can't be split over vmapped instances or devices"):
        over(mesh, jaxvec.recv, out_specs=P("d"))(handle)
    with pytest.raises(NotImplementedError, match="can't be split over vmapped instances"):
        jax.vmap(jaxvec.recv)(jax.tree.map(lambda x: x[None], handle))
    assert halves.get_attr("steps") == steps


@pytest.mark.parametrize("explicit", [False, True])
def test_first_ready_batches_of_a_program_that_xla_shards(make, mesh, explicit):
    mesh = explicit_mesh(4) if explicit else mesh
    envs = make(CountingEnv, 8, num_workers=2, batch_size=4, recv_order="sent")
    handle, _ = jaxvec.reset(envs)
    handle, _ = jaxvec.recv(handle)
    handle = jax.device_put(handle, NamedSharding(mesh, P("d")))
    action = jax.device_put(jnp.arange(4), NamedSharding(mesh, P("d")))
    _, timestep = jax.jit(turn)(handle, action)
    np.testing.assert_array_equal(timestep.obs[:, 3], range(4))


@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
def test_a_mesh_with_automatic_axes_is_refused(make, transport):
    envs = make(CountingEnv, 2, transport=transport)
    handle, _ = jaxvec.reset(envs, seed=0)
    mesh = jax.make_mesh((1, 1), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = jax.shard_map(jaxvec.step, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    with pytest.raises(NotImplementedError, match=r"^leave out axis_names .*JAX shards \['m'\] by itself"):
        jax.jit(step)(handle, jnp.zeros(2, int))


@pytest.mark.jax_version
@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
def test_a_program_with_a_step_can_not_be_exported(make, transport):
    envs = make(CountingEnv, 2, transport=transport)
    handle, _ = jaxvec.reset(envs, seed=0)
    advice = r"^jax\.export can't store jaxvec\.step, .*export the function of the policy alone"
    with pytest.raises(NotImplementedError, match=advice):
        export.export(jax.jit(jaxvec.step))(handle, jnp.zeros(2, int))


def test_sequential_vmap_allows_predicates_that_differ(make):
    envs = make(CountingEnv, 4, num_workers=1)
    handle, _ = jaxvec.reset(envs, seed=0)

    @jax.custom_batching.sequential_vmap
    def step_if(token, predicate):
        def step():
            return jaxvec.step(handle.next(token), jnp.zeros(1, int))[0].token

        return jax.lax.cond(predicate, step, lambda: token)

    predicates = jnp.array([True, False, True, False])
    jax.block_until_ready(jax.jit(jax.vmap(step_if))(handle.token[:, None], predicates))
    assert envs.get_attr("steps") == (1, 0, 1, 0)


def test_values_that_envs_and_programs_cannot_exchange_are_named(make):
    envs = make(CountingEnv, 2)
    handle, _ = jaxvec.reset(envs, seed=0)
    keys = jax.random.split(jax.random.key(0), 2)
    for value in (keys, keys[0], jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int4)):
        with pytest.raises(TypeError, match="^call of close: an argument is .*cast it.*key_data"):
            jax.jit(lambda handle, value: jaxvec.call(handle, "close", value))(handle, value)
    with pytest.raises(TypeError, match="^result_shape_dtypes: a leaf is .*bfloat16"):
        jaxvec.get_attr(handle, "x", jnp.bfloat16)
    with pytest.raises(jaxvec.ActionError, match=r"^action: expected .* got key<fry> of shape \(2,\)"):
        jaxvec.step(handle, keys)
    with pytest.raises(TypeError, match=r"^write jaxvec.step\(handle, action\)"):
        jaxvec.step(keys[0], handle, np.zeros(2, int))
