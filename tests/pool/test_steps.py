"""N steps asked are N steps taken, whatever JAX does to the program; a wrong handle takes none."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
from contextlib import contextmanager

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

pytestmark = pytest.mark.jax_version

ONES = jnp.ones(3, jnp.int32)
RESETS, STEPS, EPISODE_STEPS, ACTION = range(4)  # columns of CountingEnv's observation


@pytest.fixture(scope="module")
def pool():
    """One pool for all tests of this file that leave it usable: no test may break it."""
    with jaxvec.make(CountingEnv, 3, num_workers=2) as envs:
        yield envs


@pytest.fixture
def envs(pool):
    yield pool
    jax.effects_barrier()
    with pool_moves(pool, steps=1, resets=1):
        handle, _ = jaxvec.reset(pool)
        jaxvec.step(handle, ONES)


@contextmanager
def pool_moves(envs, *, steps=0, resets=0):
    """Checks by the envs' own counters that the block takes just so many steps and resets."""

    def counters():
        jax.effects_barrier()
        return np.array([envs.get_attr("steps"), envs.get_attr("resets")])

    before = counters()
    yield
    np.testing.assert_array_equal((counters() - before).T, [[steps, resets]] * envs.num_envs)


def scan(handle, length, action=ONES):
    """Steps `length` times with the same action."""
    return jax.lax.scan(lambda h, _: jaxvec.step(h, action), handle, length=length)


def steps_of(timestep):
    return np.asarray(timestep.obs)[..., STEPS]


# --- N steps asked, N steps taken -------------------------------------------------------------


def test_twenty_equal_actions_in_a_scan_are_twenty_steps(make, backend):
    envs = make(CountingEnv, 3, backend=backend)
    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=20):
        handle, timesteps = jax.jit(lambda h: scan(h, 20))(handle)
    np.testing.assert_array_equal(steps_of(timesteps), np.arange(1, 21)[:, None].repeat(3, 1))
    np.testing.assert_array_equal(timesteps.obs[..., ACTION], 1)
    with pool_moves(envs, steps=20):
        jax.jit(lambda h: scan(h, 20))(handle)


UNUSED = {
    "time steps": lambda handle, timesteps: handle,
    "handle": lambda handle, timesteps: timesteps,
    "all but one leaf": lambda handle, timesteps: timesteps.reward,
    "everything": lambda handle, timesteps: 0,
}


@pytest.mark.parametrize("kept", UNUSED.values(), ids=UNUSED)
def test_unused_outputs_drop_no_step(envs, kept):
    with pool_moves(envs, resets=1):
        handle, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=5):
        jax.jit(lambda h: kept(*scan(h, 5)))(handle)
    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=1):
        jax.jit(lambda h: kept(*jaxvec.step(h, ONES)))(handle)
    with pool_moves(envs, resets=1):
        jax.jit(lambda: kept(*jaxvec.reset(envs)))()


def test_cond_steps_only_where_it_is_taken(envs):
    program = jax.jit(
        lambda h, taken: jax.lax.cond(taken, lambda h: jaxvec.step(h, ONES)[0], lambda h: h, h),
        donate_argnums=(),
    )
    handle, _ = jaxvec.reset(envs)
    for taken in (True, False, False, True):
        with pool_moves(envs, steps=int(taken)):
            handle = program(handle, taken)


def test_switch_steps_its_branch_alone(envs):
    branches = [lambda h, n=n: scan(h, n)[0] for n in (1, 2, 4)]
    program = jax.jit(lambda h, i: jax.lax.switch(i, branches, h))
    handle, _ = jaxvec.reset(envs)
    for index, steps in ((2, 4), (0, 1), (1, 2)):
        with pool_moves(envs, steps=steps):
            handle = program(handle, index)


def test_while_loop_runs_until_done(make):
    envs = make(lambda: CountingEnv(7), 3, num_workers=2, autoreset_mode="DISABLED")

    @jax.jit
    def episode(handle, timestep):
        return jax.lax.while_loop(
            lambda carry: ~carry[1].terminated.any(),
            lambda carry: jaxvec.step(carry[0], ONES),
            (handle, timestep),
        )

    for _ in range(2):
        handle, timestep = jaxvec.reset(envs)
        with pool_moves(envs, steps=7):
            handle, timestep = episode(handle, timestep)
        assert timestep.terminated.all()
        np.testing.assert_array_equal(timestep.info["episode_length"], 7)


def test_while_loop_over_observations_that_decide_the_actions(envs):
    handle, timestep = jaxvec.reset(envs)
    program = jax.jit(
        lambda *carry: jax.lax.while_loop(
            lambda carry: carry[1].obs[0, EPISODE_STEPS] < 4,
            lambda carry: jaxvec.step(carry[0], carry[1].obs[:, ACTION] + 1),
            carry,
        )
    )
    with pool_moves(envs, steps=4):
        _, timestep = program(handle, timestep)
    np.testing.assert_array_equal(timestep.obs[:, ACTION], 3)  # -1 after the reset, then 0, 1, 2, 3


@pytest.mark.parametrize("traced", [False, True], ids=["static bound", "traced bound"])
def test_fori_loop_steps_as_often_as_its_bounds_say(envs, traced):
    def program(handle, n):
        return jax.lax.fori_loop(0, n, lambda _, h: jaxvec.step(h, ONES)[0], handle)

    jitted = jax.jit(program, static_argnums=() if traced else 1)
    handle, _ = jaxvec.reset(envs)
    for n in (6, 0, 3):
        with pool_moves(envs, steps=n):
            handle = jitted(handle, n)


def test_nested_scans_multiply(envs):
    program = jax.jit(lambda h: jax.lax.scan(lambda h, a: scan(h, 3, a), h, jnp.arange(12).reshape(4, 3)))
    handle, first = jaxvec.reset(envs)
    with pool_moves(envs, steps=12):
        _, timesteps = program(handle)
    np.testing.assert_array_equal(
        steps_of(timesteps)[..., 0] - steps_of(first)[0], np.arange(1, 13).reshape(4, 3)
    )
    np.testing.assert_array_equal(timesteps.obs[..., ACTION], np.arange(12).reshape(4, 1, 3).repeat(3, 1))


def test_unrolled_scans_and_equal_calls_side_by_side_are_all_taken(envs):
    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=10):
        unrolled = jax.jit(lambda h: jax.lax.scan(lambda h, _: jaxvec.step(h, ONES), h, length=10, unroll=4))
        handle, timesteps = unrolled(handle)
    assert len(set(steps_of(timesteps)[:, 0].tolist())) == 10

    @jax.jit
    def straight(handle):
        for _ in range(4):
            handle, _ = jaxvec.step(handle, ONES)
        return handle

    with pool_moves(envs, steps=4):
        straight(handle)


@pytest.mark.parametrize("constant", [False, True], ids=["sampled actions", "constant action"])
def test_the_gradient_of_a_loss_over_a_rollout_steps_once_per_step(envs, constant):
    def loss(logits, handle):
        def body(carry, key):
            handle, total = carry
            action = ONES if constant else jax.random.categorical(key, logits, shape=(3,))
            handle, timestep = jaxvec.step(handle, action)
            return (handle, total + (jax.nn.log_softmax(logits)[action] * timestep.reward).sum()), timestep

        (handle, total), timesteps = jax.lax.scan(body, (handle, 0.0), jax.random.split(jax.random.key(0), 6))
        return total, (handle, timesteps)

    handle, _ = jaxvec.reset(envs)
    program = jax.jit(jax.value_and_grad(loss, has_aux=True))
    with pool_moves(envs, steps=6):
        (total, (_, timesteps)), gradient = program(jnp.zeros(4), handle)
    np.testing.assert_array_equal(timesteps.reward, np.arange(1, 7)[:, None].repeat(3, 1))
    np.testing.assert_allclose(total, 3 * 21 * np.log(1 / 4), rtol=1e-5)
    weights = np.bincount(timesteps.obs[..., ACTION].ravel(), timesteps.reward.ravel(), minlength=4)
    np.testing.assert_allclose(gradient, weights - 3 * 21 / 4, rtol=1e-5)


class ContinuousEnv(CountingEnv):
    """Rewards with its action, a float."""

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(-9, 9, (2,), np.float32)

    def step(self, action):
        obs, _, *rest = super().step(0)
        return obs, float(action.sum()), *rest


def test_gradient_through_an_env_is_zero_and_loses_no_step(make):
    envs = make(ContinuousEnv, 2, backend="serial")

    def loss(x, handle):
        handle, timesteps = scan(handle, 5, jnp.broadcast_to(x, (2, 2)))
        return timesteps.reward.sum() * x, handle

    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=5):
        (value, handle), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(3.0, handle)
    assert (value, gradient) == (5 * 4 * 3 * 3, 5 * 4 * 3)  # rewards count as constants
    with pool_moves(envs, steps=1):
        _, tangent = jax.jvp(
            lambda x: jaxvec.step(handle, x)[1].reward, [jnp.ones((2, 2))], [jnp.ones((2, 2))]
        )
    np.testing.assert_array_equal(tangent, 0)


def test_two_pools_interleaved_in_one_program(envs, make):
    other = make(CountingEnv, 2, backend="serial")

    @jax.jit
    def program(one, two):
        def body(handles, action):
            one, first = jaxvec.step(handles[0], jnp.full(3, action))
            two, second = jaxvec.step(handles[1], first.obs[:2, ACTION] + 1)
            two, third = jaxvec.step(two, second.obs[:, ACTION] + 1)
            return (one, two), (first.obs[0, ACTION], second.obs[0, ACTION], third.obs[0, ACTION])

        return jax.lax.scan(body, (one, two), jnp.arange(0, 30, 3))

    handles = jaxvec.reset(envs)[0], jaxvec.reset(other)[0]
    with pool_moves(envs, steps=10), pool_moves(other, steps=20):
        _, actions = program(*handles)
    np.testing.assert_array_equal(jnp.stack(actions, 1).ravel(), np.arange(30))


def test_a_program_that_resets_a_pool_it_closes_over(envs):
    @jax.jit
    def episode():
        handle, _ = jaxvec.reset(envs, seed=3)
        return scan(handle, 5)

    for _ in range(3):
        with pool_moves(envs, steps=5, resets=1):
            _, timesteps = episode()
        np.testing.assert_array_equal(timesteps.obs[:, 0, EPISODE_STEPS], np.arange(1, 6))


def test_a_handle_of_the_latest_reset_goes_on_after_a_program(envs):
    handle, _ = jax.jit(lambda: jaxvec.reset(envs))()
    with pool_moves(envs, steps=2):
        handle, _ = jaxvec.step(handle, ONES)
        jax.jit(jaxvec.step)(handle, ONES)


def test_reset_of_some_envs_inside_a_scan(make, backend):
    envs = make(
        [CountingEnv, lambda: CountingEnv(2), lambda: CountingEnv(3)],
        backend=backend,
        autoreset_mode="DISABLED",
    )

    @jax.jit
    def program(handle):
        def body(handle, _):
            handle, timestep = jaxvec.step(handle, ONES)
            handle, after = jaxvec.reset(handle, mask=timestep.terminated | timestep.truncated)
            return handle, (timestep, after)

        return jax.lax.scan(body, handle, length=6)

    handle, _ = jaxvec.reset(envs)
    _, (stepped, after) = program(handle)
    episode_steps = np.stack([np.arange(1, 7), [1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]], 1)
    over = episode_steps == [99, 2, 3]
    np.testing.assert_array_equal(stepped.obs[..., EPISODE_STEPS], episode_steps)
    np.testing.assert_array_equal(stepped.terminated, over)
    np.testing.assert_array_equal(after.obs[..., EPISODE_STEPS], np.where(over, 0, episode_steps))
    np.testing.assert_array_equal(after.reward, np.where(over, 0, episode_steps))
    assert not after.terminated.any()
    assert (envs.get_attr("steps"), envs.get_attr("resets")) == ((6, 6, 6), (1, 4, 3))


def test_a_reset_of_some_envs_leaves_the_others_to_be_reset(make, backend):
    envs = make(lambda: CountingEnv(1), 2, backend=backend, autoreset_mode="DISABLED")
    handle, _ = jaxvec.reset(envs)
    handle, _ = jaxvec.step(handle, jnp.zeros(2, int))
    handle, _ = jaxvec.reset(handle, mask=jnp.array([True, False]))
    with pool_moves(envs), pytest.raises(jaxvec.ResetNeededError, match=r"envs \[1\] have ended"):
        jaxvec.step(handle, jnp.zeros(2, int))


def test_an_empty_mask_resets_nothing_and_still_moves_the_handle(envs):
    handle, first = jaxvec.reset(envs)
    with pool_moves(envs):
        newer, timestep = jax.jit(lambda h: jaxvec.reset(h, mask=jnp.zeros(3, bool)))(handle)
    chex.assert_trees_all_equal(timestep, first)
    with pytest.raises(jaxvec.StaleHandleError):
        jaxvec.step(handle, ONES)
    with pool_moves(envs, steps=1):
        jaxvec.step(newer, ONES)


SEEDS = {
    "int": (5, [5, 6, 7]),
    "one for each": ([9, 0, 2**31 - 1], [9, 0, 2**31 - 1]),
    "none": (None, [-1, -1, -1]),
    "array": (np.array([3, 1, 2]), [3, 1, 2]),
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_reach_the_envs_alike_eagerly_and_in_programs(make, name):
    envs = make(CountingEnv, 3, backend="serial", info={"seed": int})
    seed, expected = SEEDS[name]
    programs = [lambda: jaxvec.reset(envs, seed=seed), jax.jit(lambda: jaxvec.reset(envs, seed=seed))]
    if seed is not None:
        programs.append(lambda: jax.jit(lambda s: jaxvec.reset(envs, seed=s))(jnp.asarray(seed)))
    for program in programs:
        _, timestep = program()
        np.testing.assert_array_equal(timestep.info["seed"], expected)
        np.testing.assert_array_equal(timestep.info["_seed"], True)


@pytest.mark.parametrize(
    "seed", [np.uint8(255), np.int8(126), np.int32(2**31 - 2), np.uint32(2**32 - 1)], ids=repr
)
def test_seeds_count_up_beyond_the_dtype_of_the_first(make, seed):
    envs = make(CountingEnv, 3, backend="serial")
    for reset in (jaxvec.reset, jax.jit(lambda envs, seed: jaxvec.reset(envs, seed=seed), static_argnums=0)):
        jax.block_until_ready(reset(envs, seed=jnp.asarray(seed)))
        assert [info["seed"] for info in envs.infos()] == [int(seed) + i for i in range(3)]


def test_a_key_gives_each_env_a_seed_of_its_own(make):
    envs = make(CountingEnv, 3, backend="serial", info={"seed": int})
    seeds = []
    for key in (jax.random.key(1), jax.random.PRNGKey(1), jax.random.key(2)):
        eager = jaxvec.reset(envs, seed=key)[1].info["seed"]
        traced = jax.jit(lambda k: jaxvec.reset(envs, seed=k)[1].info["seed"])(key)
        np.testing.assert_array_equal(eager, traced)
        seeds.append(eager.tolist())
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 6
    assert min(seeds[0] + seeds[2]) >= 0


def test_options_reach_the_envs(make, backend):
    envs = make(CountingEnv, 2, backend=backend)
    options = {"level": [1, "two"]}
    jax.block_until_ready(jax.jit(lambda: jaxvec.reset(envs, options=options))())
    assert [info["options"] for info in envs.infos()] == [options] * 2
    jaxvec.reset(envs)
    assert [info["options"] for info in envs.infos()] == [None] * 2


# --- one compiled program, many pools ---------------------------------------------------------


def test_a_second_pool_of_the_same_specification_does_not_retrace(envs, make):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def program(handle):
        return scan(handle, 4)

    program(jaxvec.reset(envs)[0])
    for backend in ("serial", "process"):
        other = make(lambda: CountingEnv(1_000), 3, backend=backend)
        with pool_moves(envs), pool_moves(other, steps=4, resets=1):
            _, timesteps = program(jaxvec.reset(other)[0])
        np.testing.assert_array_equal(steps_of(timesteps)[-1], 4)
    with pytest.raises(AssertionError, match="traced"):  # two envs are another specification
        program(jaxvec.reset(make(CountingEnv, 2, backend="serial"))[0])


def test_eager_steps_step(envs):
    handle, first = jaxvec.reset(envs)
    for n in range(1, 4):
        with pool_moves(envs, steps=1):
            handle, timestep = jaxvec.step(handle, ONES)
        np.testing.assert_array_equal(steps_of(timestep) - steps_of(first), n)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((handle, timestep)))


def test_eager_and_jitted_results_have_the_same_types(make):
    envs = make(NestedEnv, 2, backend="serial")
    action = jax.tree.map(jnp.asarray, envs.action_space.sample())
    handle, first = jaxvec.reset(envs, seed=1)
    _, eager = jaxvec.step(handle, action)
    handle, again = jax.jit(lambda: jaxvec.reset(envs, seed=1))()
    _, jitted = jax.jit(jaxvec.step)(handle, action)
    chex.assert_trees_all_equal((first, eager), (again, jitted), strict=True)


def test_disable_jit_steps_as_often(envs):
    handle, _ = jaxvec.reset(envs)
    with jax.disable_jit(), pool_moves(envs, steps=6):
        handle, timesteps = jax.jit(lambda h: scan(h, 6))(handle)
    assert len(set(steps_of(timesteps)[:, 0].tolist())) == 6
    with pool_moves(envs, steps=1):
        jaxvec.step(handle, ONES)


def test_tracing_lowering_and_compiling_step_nothing(envs):
    handle, timestep = jaxvec.reset(envs)

    def program(handle):
        return scan(jaxvec.reset(handle)[0], 4)

    with pool_moves(envs):
        shapes = jax.eval_shape(program, handle)
        jax.make_jaxpr(program)(handle)
        compiled = jax.jit(program).lower(handle).compile()
    chex.assert_trees_all_equal_shapes_and_dtypes(
        shapes[1], jax.tree.map(lambda leaf: jnp.zeros((4, *leaf.shape), leaf.dtype), timestep)
    )
    with pool_moves(envs, steps=4, resets=1):
        handle, _ = compiled(handle)
    with pool_moves(envs, steps=4, resets=1):
        compiled(handle)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_of_seeds_out_of_range_the_first_is_named_with_its_env(envs, jit):
    def program(seeds):
        return jaxvec.reset(envs, seed=seeds)

    with pool_moves(envs), raises(envs, ValueError, "seed -2 of env 1 is out of range"):
        jax.block_until_ready((jax.jit(program) if jit else program)(jnp.array([1, -2, -3])))


def test_a_donated_handle_is_gone_and_its_successor_works(envs):
    donating = jax.jit(jaxvec.step, donate_argnums=0)
    old, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=2):
        new, _ = donating(old, ONES)
        newer, _ = donating(new, ONES)
    with pool_moves(envs), pytest.raises(RuntimeError, match=r"deleted|donated"):
        jaxvec.step(old, ONES)
    with pool_moves(envs, steps=1):
        jaxvec.step(newer, ONES)


# --- wrong handles ----------------------------------------------------------------------------


def step(handle, action=...):
    """A function of this file's own, as `jax.jit(jaxvec.step)` would be shared by all tests."""
    return jaxvec.step(handle, jnp.ones(handle.num_envs, int) if action is ... else action)


def reset(handle):
    return jaxvec.reset(handle)


@contextmanager
def raises(envs, error, match):
    """Expects the error itself eagerly; of a program JAX's error with its text, and itself from the pool."""
    envs.raise_if_failed()
    with pytest.raises((error, RuntimeError), match=match) as caught:
        yield
        jax.effects_barrier()
    if caught.type.__module__.startswith("jax."):
        assert caught.type.__name__ == "JaxRuntimeError"
    if caught.type.__module__.startswith(("jax.", "jaxlib.")):
        assert error.__name__ in str(caught.value)
        with pytest.raises(error, match=match):
            envs.raise_if_failed()
        envs.raise_if_failed()  # once is enough
    else:
        assert caught.type is error


STALE = r"(?s)stale handle.*call {}\b.*call {}\b"


@pytest.mark.parametrize("verb", [step, reset])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_handle_used_twice_is_refused_with_both_counts(envs, verb, jit):
    call = jax.jit(verb) if jit else verb
    handle, _ = jaxvec.reset(envs)
    count = int(handle.token[0, 2])
    newer, _ = call(handle)
    with pool_moves(envs), raises(envs, jaxvec.StaleHandleError, STALE.format(count, count + 1)):
        call(handle)
    with pool_moves(envs, steps=1):
        step(newer)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_stepping_on_the_host_makes_handles_stale_and_is_named(envs, jit):
    handle, _ = jaxvec.reset(envs)
    envs.step(np.ones(3, int))
    count = int(handle.token[0, 2])
    stale = STALE.format(count, count + 1) + ".*VectorEnv.step on the host"
    with pool_moves(envs), raises(envs, jaxvec.StaleHandleError, stale):
        (jax.jit(step) if jit else step)(handle)
    with pool_moves(envs, steps=1, resets=1):
        step(jaxvec.reset(envs)[0])


def test_a_program_that_uses_a_handle_twice_takes_one_step(envs):
    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=1), raises(envs, jaxvec.StaleHandleError, "stale handle"):
        jax.block_until_ready(jax.jit(lambda h: (jaxvec.step(h, ONES), jaxvec.step(h, ONES)))(handle))


def test_scan_without_carried_handle_fails_at_its_second_step(envs):
    handle, _ = jaxvec.reset(envs)
    with pool_moves(envs, steps=1), raises(envs, jaxvec.StaleHandleError, "stale handle"):
        forgetful = jax.jit(lambda h: jax.lax.scan(lambda h, _: (h, jaxvec.step(h, ONES)[1]), h, length=5))
        jax.block_until_ready(forgetful(handle))


def test_a_program_that_succeeds_makes_an_earlier_error_old_news(envs):
    program = jax.jit(step)
    handle, _ = jaxvec.reset(envs)
    newer, _ = program(handle)
    with pytest.raises(RuntimeError, match="stale handle"):
        jax.block_until_ready(program(handle))
    jax.block_until_ready(program(newer))
    envs.raise_if_failed()


def test_resetting_the_pool_makes_its_old_handles_stale(envs):
    old, _ = jaxvec.reset(envs)
    new, _ = jaxvec.reset(envs)
    with pool_moves(envs), raises(envs, jaxvec.StaleHandleError, "stale handle"):
        step(old)
    with pool_moves(envs, steps=1):
        step(new)


def foreign(handle, other):
    return dataclasses.replace(handle, token=other.token)


class WiderEnv(CountingEnv):
    """Takes the same actions but observes more."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-1, 2**31 - 1, (5,), np.int32)

    def _observe(self, action):
        return np.append(super()._observe(action), np.int32(0))


OTHERS = {
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
    "too few envs": (jnp.ones(2, int), r"action: .*\(2,\).*\(3.*env axis first"),
    "no env axis": (jnp.int32(1), r"action"),
    "another axis": (jnp.ones((3, 1), int), r"action"),
    "float": (jnp.ones(3), "action: expected int32, got float32"),
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


def change(**changes):
    return lambda action: {**action, **changes}


def test_host_actions_beyond_32_bits_are_refused_and_not_wrapped(envs):
    envs.reset()
    with pool_moves(envs), pytest.raises(jaxvec.ActionError, match="action: .* don't fit into int32"):
        envs.step(np.full(3, 2**32 + 1))
    with pool_moves(envs, steps=1):
        envs.step(np.ones(3, np.int64))


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
    class Failing(CountingEnv):
        def step(self, action):
            if action == 7:
                raise ValueError("seven is bad luck")
            return super().step(action)

    envs = make(Failing, 3, num_workers=2)
    handle, _ = jaxvec.reset(envs)
    program = jax.jit(lambda h: jax.lax.scan(jaxvec.step, h, jnp.arange(5, 10)[:, None].repeat(3, 1)))
    if how == "with":
        with pytest.raises(jaxvec.EnvError, match="seven is bad luck") as caught, envs:
            jax.block_until_ready(program(handle))
        assert isinstance(caught.value.__cause__, RuntimeError)  # JAX's own
        assert envs.closed
        return
    with pytest.raises(RuntimeError, match="seven is bad luck") as from_program:
        jax.block_until_ready(program(handle))
    assert from_program.type.__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    with pytest.raises(jaxvec.EnvError, match="seven is bad luck") as caught:
        envs.raise_if_failed()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RuntimeError, match=r"PoolBrokenError(?s:.*)seven is bad luck"):
        jax.block_until_ready(program(handle))
    with pytest.raises(jaxvec.PoolBrokenError, match="seven is bad luck"):
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


def test_messages_are_in_our_words_and_short(envs):
    handle, _ = jaxvec.reset(envs)
    with pytest.raises(jaxvec.ActionError) as caught:
        jaxvec.step(handle, jnp.zeros(4, int))
    assert str(caught.value).startswith("action: got shape (4,), expected (3,), env axis first")
    with pytest.raises(TypeError) as mixed:  # JAX's own, which names the handle
        jax.lax.scan(lambda carry, _: (carry.token, None), handle, length=1)
    assert "PoolSpec of 3 envs" in repr(handle)
    assert len(repr(handle)) < 300
    assert len(str(mixed.value)) < 2_000
