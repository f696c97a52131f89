"""Errors of compiled programs: wrong handles, wrong actions, failing envs."""

import dataclasses
import gc
import itertools
import re
import traceback
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from support import probe
from support.disasters import RaisingEnv
from support.scripts import run_python
from test_steps import ONES, envs, pool, pool_moves, raises, scan  # noqa: F401

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

pytestmark = pytest.mark.jax_version

# --- wrong handles ----------------------------------------------------------------------------


def step(handle, action=...):
    """A function of this file's own, as `jax.jit(jaxvec.step)` would be shared by all tests."""
    return jaxvec.step(handle, jnp.ones(handle.num_envs, int) if action is ... else action)


def reset(handle):
    return jaxvec.reset(handle)


STALE = r"(?s)stale handle.*call {}\b.*call {}\b"


@pytest.mark.parametrize("verb", [step, reset])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_handle_used_twice_is_refused_with_both_counts(envs, verb, jit):
    call = jax.jit(verb) if jit else verb
    handle, _ = jaxvec.reset(envs)
    count = probe.num_moves(envs, handle.token[:, 2])[0]
    newer, _ = call(handle)
    with pool_moves(envs), raises(envs, jaxvec.StaleHandleError, STALE.format(count, count + 1)):
        call(handle)
    with pool_moves(envs, steps=1):
        step(newer)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_stepping_on_the_host_makes_handles_stale_and_is_named(envs, jit):
    handle, _ = jaxvec.reset(envs)
    envs.step(np.ones(3, int))
    count = probe.num_moves(envs, handle.token[:, 2])[0]
    stale = STALE.format(count, count + 1) + ".*VectorEnv.step on the host"
    with pool_moves(envs), raises(envs, jaxvec.StaleHandleError, stale):
        (jax.jit(step) if jit else step)(handle)
    with pool_moves(envs, steps=1, resets=1):
        step(jaxvec.reset(envs)[0])


CHECKPOINT = """
import pathlib, pickle, sys
import cloudpickle, flax.serialization, jax, jaxvec
from jaxvec.testing import CountingEnv

folder = pathlib.Path(sys.argv[2])
step = jax.jit(jaxvec.step) if sys.argv[3] == "jit" else jaxvec.step
formats = {"pickle": pickle, "cloudpickle": cloudpickle}
with jaxvec.make(CountingEnv, 2, backend="serial") as envs:
    handle, timestep = step(jaxvec.reset(envs, seed=0)[0], jax.numpy.zeros(2, int))
    if sys.argv[1] == "save":
        for name, module in formats.items():
            (folder / name).write_bytes(module.dumps((handle, timestep.obs)))
        (folder / "flax").write_bytes(flax.serialization.to_bytes(jax.tree.leaves((handle, timestep.obs))))
    else:
        states = [module.loads((folder / name).read_bytes()) for name, module in formats.items()]
        tree = jax.tree.structure((handle, timestep.obs))
        leaves = jax.tree.leaves((handle, timestep.obs))
        restored = flax.serialization.from_bytes(leaves, (folder / "flax").read_bytes())
        for foreign, _ in [*states, jax.tree.unflatten(tree, restored)]:
            assert foreign.token[0, 0] == handle.token[0, 0]
            for call in (lambda: step(foreign, jax.numpy.zeros(2, int)), lambda: jaxvec.reset(foreign)):
                try:
                    jax.block_until_ready(call())
                except (RuntimeError, jaxvec.JaxvecError) as error:
                    assert "made by another process" in str(error), error
                    assert "envs.pack_states()" in str(error), error
                    print("refused")
        assert envs.get_attr("steps") == (1, 1)
        own = pickle.loads(pickle.dumps(handle))
        jax.block_until_ready(step(own, jax.numpy.zeros(2, int)))
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("jit", ["eager", "jit"])
def test_a_handle_from_a_checkpoint_of_another_process_is_refused(tmp_path, jit):
    """Even after equally many calls: the envs would go on from another observation than the program."""
    pytest.importorskip("flax")
    script = tmp_path / "program.py"
    script.write_text(CHECKPOINT)
    for mode, output in (("save", ""), ("load", "refused\n" * 6)):
        assert run_python(str(script), mode, str(tmp_path), jit).stdout == output


def test_debug_nans_is_named_as_the_cause_of_a_stale_handle(envs):
    @jax.jit
    def program(handle):
        handle, timestep = jaxvec.step(handle, ONES)
        return handle, jnp.log(timestep.reward - 1000)

    handle, _ = jaxvec.reset(envs)
    with jax.debug_nans(True), pytest.raises(jaxvec.StaleHandleError, match="jax_debug_nans is on") as caught:
        program(handle)
    assert "the NaN is the error to look for" in str(caught.value)


def test_a_program_that_uses_a_handle_twice_takes_one_step(envs):
    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=1), raises(envs, jaxvec.StaleHandleError, "stale handle"):
        jax.block_until_ready(jax.jit(lambda h: (jaxvec.step(h, ONES), jaxvec.step(h, ONES)))(handle))


def test_a_program_that_succeeds_makes_an_earlier_error_old_news(envs):
    program = jax.jit(step)
    handle, _ = jaxvec.reset(envs)
    newer, _ = program(handle)
    with pytest.raises(RuntimeError, match="stale handle"):
        jax.block_until_ready(program(handle))
    jax.block_until_ready(program(newer))
    envs.raise_if_failed()


def foreign(handle, other):
    return dataclasses.replace(handle, token=other.token)


class RenamedEnv(CountingEnv):
    """Has arrays of the same shapes and dtypes under another name."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict({"a": self.observation_space})

    def _observe(self, action):
        return {"a": super()._observe(action)}


class WiderEnv(CountingEnv):
    """Takes the same actions but observes more."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-1, 2**31 - 1, (5,), np.int32)

    def _observe(self, action):
        return np.append(super()._observe(action), np.int32(0))


OTHERS = {
    "other names": lambda make: make(RenamedEnv, 3, backend="serial"),
    "wider observations": lambda make: make(WiderEnv, 3, backend="serial"),
    "other autoreset mode": lambda make: make(CountingEnv, 3, backend="serial", autoreset_mode="NEXT_STEP"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("verb", [step, reset])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_handle_with_another_specifications_token_is_refused(envs, make, other, verb, jit):
    other = OTHERS[other](make)
    handle, _ = jaxvec.reset(envs)
    theirs, _ = jaxvec.reset(other)
    with pool_moves(envs), pool_moves(other), raises(other, jaxvec.StaleHandleError, "foreign handle"):
        jax.block_until_ready((jax.jit(verb) if jit else verb)(foreign(handle, theirs)))
    with pool_moves(envs, steps=1), pool_moves(other, steps=1):
        step(handle)
        step(theirs)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_token_of_envs_that_the_pool_does_not_have_is_refused(envs, make, jit):
    other = make(CountingEnv, 2, backend="serial")
    handle, _ = jaxvec.reset(envs)
    theirs, _ = jaxvec.reset(other)
    wrong = dataclasses.replace(handle, token=handle.token.at[:, 0].set(theirs.token[0, 0]))
    with (
        pool_moves(envs),
        pool_moves(other),
        raises(other, jaxvec.EnvIdError, "env_id 2 is out of range for pool"),
    ):
        jax.block_until_ready((jax.jit(step) if jit else step)(wrong))


@pytest.mark.parametrize("num_envs", [1, 3, 4])
def test_a_token_of_an_equal_pool_is_that_pools_handle(envs, make, num_envs):
    other = make(CountingEnv, num_envs, backend="serial")
    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs), pool_moves(other, resets=1, steps=1):
        step(foreign(handle, jaxvec.reset(other)[0]))


@pytest.mark.parametrize("verb", [step, reset])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_closed_pool_says_so(make, verb, jit):
    envs = make(CountingEnv, 3, backend="serial")
    handle, _ = jaxvec.reset(envs)
    envs.close()
    with pytest.raises(
        (jaxvec.PoolClosedError, RuntimeError), match="PoolClosedError|pool .* is closed"
    ) as caught:
        jax.block_until_ready((jax.jit(verb) if jit else verb)(handle))
    assert "is closed" in str(caught.value)
    if jit:
        with pytest.raises(jaxvec.PoolClosedError, match="is closed"):
            envs.raise_if_failed()
    for call in (
        lambda: jaxvec.reset(envs),
        envs.reset,
        lambda: envs.step(np.ones(3, int)),
        lambda: envs.infos(),
    ):
        with pytest.raises(jaxvec.PoolClosedError, match="is closed"):
            call()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_handle_without_its_pool_says_so(jit):
    handle, _ = jaxvec.reset(jaxvec.make(CountingEnv, 3, backend="serial"))
    gc.collect()
    with pytest.raises(
        (jaxvec.PoolClosedError, RuntimeError), match="garbage collected.*keep the VectorEnv alive"
    ):
        jax.block_until_ready((jax.jit(step) if jit else step)(handle))


# --- wrong actions ----------------------------------------------------------------------------


WRONG = {
    "too few envs": (jnp.ones(2, int), r"action: .*\(3,\), env axis first; got .*\(2,\)"),
    "no env axis": (jnp.int32(1), r"action"),
    "another axis": (jnp.ones((3, 1), int), r"action"),
    "float": (
        jnp.ones(3),
        r"action: expected int32 of shape \(3,\), env axis first; got float32 of shape \(3,\); cast it by",
    ),
    "tuple": ((ONES, ONES), "action"),
    "dict": ({"a": ONES}, "action"),
    "none": (None, "action"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_wrong_action_is_an_action_error_and_steps_nothing(envs, name, jit):
    action, match = WRONG[name]
    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs), pytest.raises(jaxvec.ActionError, match=f"(?s){match}"):
        (jax.jit(step) if jit else step)(handle, action)
    with pool_moves(envs, steps=1):
        step(handle)


def test_a_masked_action_is_refused(envs):
    action = np.ma.array(np.ones(3, int), mask=[True, False, False])
    handle, _ = jaxvec.reset(envs)
    for call in (
        lambda: step(handle, action),
        jax.jit(lambda: step(handle, action)),
        lambda: envs.step(action),
    ):
        with pool_moves(envs), pytest.raises(jaxvec.ActionError, match=r"masked array; .*np\.ma\.filled"):
            call()


def change(**changes):
    return lambda action: {**action, **changes}


NESTED_WRONG = {
    "shape": (lambda a: {**a, "arm": (a["arm"][0][:, :1], *a["arm"][1:])}, "action['arm'][0]"),
    "env axis": (lambda a: {**a, "keys": a["keys"][0]}, "action['keys']"),
    "scalar's shape": (lambda a: {**a, "arm": (*a["arm"][:2], jnp.ones((2, 1)))}, "action['arm'][2]"),
    "dtype": (change(keys=jnp.ones((2, 2))), "action['keys']"),
    "bool for a sign": (lambda a: {**a, "turn": jnp.ones(2, jnp.complex64)}, "action['turn']"),
    "missing key": (lambda a: {k: v for k, v in a.items() if k != "turn"}, "turn"),
    "extra key": (change(leg=jnp.ones(2)), "leg"),
    "short tuple": (lambda a: {**a, "arm": a["arm"][:2]}, "action['arm']"),
    "leaf for a tuple": (change(arm=jnp.ones(2)), "action['arm']"),
    "tuple for a leaf": (change(turn=(ONES, ONES)), "action['turn']"),
}


@pytest.mark.parametrize("name", NESTED_WRONG)
@pytest.mark.parametrize("how", ["eager", "jit", "host"])
def test_a_wrong_nested_action_names_its_leaf(make, name, how):
    envs = make(NestedEnv, 2, backend="serial")
    wrong, leaf = NESTED_WRONG[name]
    action = jax.tree.map(jnp.asarray, envs.action_space.sample())
    handle, _ = jaxvec.reset(envs)
    call = {
        "eager": step,
        "jit": jax.jit(step),
        "host": lambda _, action: envs.step(jax.tree.map(np.asarray, action)),
    }
    with pytest.raises(jaxvec.ActionError, match=re.escape(leaf)):
        call[how](handle, wrong(action))
    assert envs.get_attr("_steps") == (0, 0)
    _, timestep = step(handle, action)
    np.testing.assert_array_equal(timestep.info["episode_length"], 1)


@pytest.mark.parametrize("env", [NestedEnv, CountingEnv, "Pendulum-v1"])
def test_on_the_host_each_env_may_have_its_own_sample(make, env):
    one, other = (make(env, 3, backend="serial") for _ in range(2))
    space = one.single_action_space
    space.seed(0)
    samples = [space.sample() for _ in range(3)]
    one.reset(seed=0), other.reset(seed=0)
    batch = batch_space(space, 3)
    batched = concatenate(space, samples, create_empty_array(space, 3))
    assert batched in batch
    expected = other.step(batched)
    jax.tree.map(np.testing.assert_array_equal, one.step(tuple(samples)), expected)
    one.send(samples[:2], [2, 0])  # whose they are
    one.send(samples[2:], [1])
    jax.tree.map(
        np.testing.assert_array_equal,
        one.recv(),
        other.step(concatenate(space, [samples[i] for i in (1, 2, 0)], create_empty_array(space, 3))),
    )


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_in_a_program_each_env_may_have_its_own_sample(make, how):
    one, other = (make(NestedEnv, 2, backend="serial") for _ in range(2))
    space = one.single_action_space
    space.seed(0)
    samples = [space.sample() for _ in range(2)]
    batched = concatenate(space, samples, create_empty_array(space, 2))
    handle, _ = jaxvec.reset(one, seed=0)
    other.reset(seed=0)
    step = jax.jit(jaxvec.step) if how == "jit" else jaxvec.step
    _, timestep = step(handle, jax.tree.map(jnp.asarray, samples))
    expected = other.step(batched)
    jax.tree.map(np.testing.assert_array_equal, timestep.obs["last"], expected.obs["last"])
    np.testing.assert_array_equal(timestep.reward, expected.reward)


def test_a_wrong_sample_names_its_place(make):
    envs = make(NestedEnv, 2, backend="serial")
    envs.reset()
    good = envs.single_action_space.sample()
    for action, match in (
        ([good], "a list of 2 dicts, one per env, got 1"),
        ([good, {**good, "leg": 1}], "item 1 of the list: action: expected a dict with keys"),
        ([good, {**good, "turn": np.ones(3)}], r"action\['turn'\]: expected int32 of shape \(2,\).*ragged"),
        ([good, 3], "item 1 of the list: action: expected a dict"),
    ):
        with pytest.raises(jaxvec.ActionError, match=f"(?s){match}"):
            envs.step(action)
    assert envs.get_attr("_steps") == (0, 0)


def test_actions_are_widened_from_bool_to_int_to_float(make):
    envs = make(NestedEnv, 2, backend="serial")
    action = {
        "turn": jnp.array([True, False]),
        "arm": (jnp.ones((2, 2, 3), jnp.int8), jnp.ones((2, 4), bool), jnp.zeros(2, jnp.bfloat16)),
        "keys": jnp.ones((2, 2), jnp.uint8),
    }
    handle, _ = jaxvec.reset(envs)
    _, timestep = jax.jit(step)(handle, action)
    np.testing.assert_array_equal(timestep.reward, [1 + 6 + 4 + 2, 6 + 4 + 2])
    chex.assert_trees_all_equal_dtypes(
        timestep.obs["last"], jaxvec.reset(handle := None or envs)[1].obs["last"]
    )


def test_step_wants_a_handle_and_says_so(envs):
    with (
        pool_moves(envs),
        pytest.raises(TypeError, match="handle that jaxvec.reset or jaxvec.step returned, got VectorEnv"),
    ):
        jaxvec.step(envs, ONES)


# --- errors of programs -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["with", "raise_if_failed"])
def test_program_error_is_jaxs_with_text_and_typed_from_the_pool(make, how):
    envs = make(RaisingEnv, 3, num_workers=2)
    handle, _ = jaxvec.reset(envs)
    program = jax.jit(lambda h: jax.lax.scan(jaxvec.step, h, jnp.arange(5, 10)[:, None].repeat(3, 1)))
    if how == "with":
        with pytest.raises(jaxvec.EnvError, match="bad luck") as caught, envs:
            jax.block_until_ready(program(handle))
        assert isinstance(caught.value.__cause__, ValueError)
        assert isinstance(caught.value.__context__, RuntimeError)  # JAX's own
        assert envs.closed
        return
    with pytest.raises(RuntimeError, match="bad luck") as from_program:
        jax.block_until_ready(program(handle))
    assert from_program.type.__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    with pytest.raises(jaxvec.EnvError, match="bad luck") as caught:
        envs.raise_if_failed()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RuntimeError, match=r"PoolBrokenError(?s:.*)bad luck"):
        jax.block_until_ready(program(handle))
    with pytest.raises(jaxvec.PoolBrokenError, match="bad luck"):
        jaxvec.reset(envs)


def test_with_leaves_other_errors_alone(make):
    with pytest.raises(KeyError, match="mine"), make(CountingEnv, 2, backend="serial") as envs:
        jaxvec.reset(envs)
        raise KeyError("mine")
    assert envs.closed


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_a_handle_to_envs_in_any_order_gets_each_its_own_row(make, backend):
    """Whichever leaf it is, and whichever way it takes into the segment: small ones go together."""

    class Named(CountingEnv):
        def __init__(self, env_id):
            super().__init__()
            self.env_id = env_id

        def _observe(self, action):
            return np.array([self.env_id, self.steps, self.env_id, action], np.int32)

    envs = make(Named, 4, num_workers=1, backend=backend)
    handle, _ = jaxvec.reset(envs)
    step = jax.jit(jaxvec.step)
    for steps, order in enumerate(itertools.permutations(range(4)), 1):
        places = np.array(order)
        handle = jax.tree.map(lambda leaf: leaf[places], handle)
        handle, timestep = step(handle, places)
        ids = timestep.info["env_id"]
        np.testing.assert_array_equal(timestep.obs, np.stack([ids, [steps] * 4, ids, places], axis=1))


def test_what_is_no_pool_is_refused_by_name():
    with pytest.raises(TypeError, match=r"not str; .*: jaxvec.make\('CartPole-v1', num_envs\)"):
        jaxvec.reset("CartPole-v1")
    with pytest.raises(TypeError, match="reset takes the pool that jaxvec.make returned, .* not CountingEnv"):
        jaxvec.reset(CountingEnv())


# --- Methods and `make` inside of programs ------------------------------------------------------------------

METHODS = {
    "step": (lambda envs, state, x: envs.step(x), "jaxvec.step(handle, action)"),
    "send": (lambda envs, state, x: envs.send(x), "jaxvec.send(handle, action, env_id)"),
    "reset": (lambda envs, state, x: envs.reset(seed=x[0]), "jaxvec.reset(envs, seed=..."),
    "reset, mask": (lambda envs, state, x: envs.reset(mask=x > 0), "jaxvec.reset(envs, seed=..."),
    "restore": (lambda envs, state, x: envs.restore(state[x]), "jaxvec.restore(handle, state)"),
    "simulate": (lambda envs, state, x: envs.simulate(state, x), "jaxvec.simulate(envs, state, action)"),
    "call": (lambda envs, state, x: envs.call("f", x), "jaxvec.call(handle, name, *args)"),
    "set_attr": (lambda envs, state, x: envs.set_attr("x", x), "Call it outside jit"),
    "save": (lambda envs, state, x: envs.save(indices=x), "Call it outside jit"),
}


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: lambda x: jax.lax.map(f, x[None])])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_in_a_program_names_the_function(make, name, transform):
    method, inside = METHODS[name]
    envs = make(CountingEnv, 2, states=4, num_workers=1)
    envs.reset(seed=0)
    state = envs.save()
    state = jaxvec.EnvState(jnp.asarray(state.ids))
    x = jnp.zeros((2, 2) if transform is jax.vmap else 2, int)
    with pytest.raises(TypeError, match=rf"VectorEnv.{name.split(',')[0]} got a traced array.*") as caught:
        transform(lambda x: method(envs, state, x))(x)
    assert inside in str(caught.value)
    assert envs.step(np.zeros(2, int)).obs[:, 2].tolist() == [1, 1]


@pytest.mark.parametrize(
    "call", [lambda envs: envs.step(np.zeros(2, int)).reward, lambda envs: envs.reset().reward]
)
def test_a_method_with_constants_in_a_program_names_the_function(make, call):
    envs = make(CountingEnv, 2, num_workers=1)
    envs.reset(seed=0)
    with pytest.raises(
        TypeError, match=r"would run now, once, and not when the program runs\. Inside jit, write"
    ):
        jax.jit(lambda x: x + call(envs))(jnp.zeros(2))
    assert envs.step(np.zeros(2, int)).obs[:, 2].tolist() == [1, 1]


def test_make_in_a_program_says_to_make_it_outside(make):
    def program(x):
        envs = jaxvec.make(CountingEnv, 1, num_workers=1)
        return jaxvec.reset(envs)[1].reward + x

    for traced in (jax.jit(program), lambda x: jax.lax.scan(lambda c, _: (program(c)[0], 0), x, None, 2)):
        with pytest.raises(RuntimeError, match="Make the pool outside: envs = jaxvec.make"):
            traced(1.0)

    def on_the_host(x):
        envs = make(CountingEnv, 1, backend="serial")
        envs.reset()
        return (x * envs.step(np.zeros(1, int)).reward).sum()

    assert jax.grad(on_the_host)(2.0) == 1
    assert jax.vmap(on_the_host)(jnp.arange(2.0)).tolist() == [0, 1]


def test_errors_of_envs_show_no_frames_of_the_package(make, backend):
    envs = make(RaisingEnv, 1, backend=backend)
    envs.reset()
    for call in (lambda: envs.step([7]), lambda: jaxvec.make(CountingEnv, 1, backend=backend, length=3)):
        with pytest.raises(jaxvec.EnvError) as caught:
            call()
        text = "".join(traceback.format_exception(caught.value))
        folder = str(Path(jaxvec.__file__).parent)
        assert sum(folder in line for line in text.splitlines()) <= 3
