"""N steps asked are N steps taken, whatever JAX does to the program; a wrong handle takes none."""

from contextlib import contextmanager

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize(
    "seed", [np.uint8(255), np.int8(126), np.int32(2**31 - 2), np.uint32(2**32 - 1)], ids=repr
)
def test_seeds_count_up_beyond_the_dtype_of_the_first(make, seed):
    envs = make(CountingEnv, 3, backend="serial")
    for reset in (jaxvec.reset, jax.jit(lambda envs, seed: jaxvec.reset(envs, seed=seed), static_argnums=0)):
        jax.block_until_ready(reset(envs, seed=jnp.asarray(seed)))
        assert [info["seed"] for info in envs.infos()] == [int(seed) + i for i in range(3)]


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

    with pool_moves(envs), raises(envs, ValueError, r"seed -2 of env 1 is out of range .*seed % 2\*\*191"):
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
