"""Running statistics inside jit, against Gymnasium's and Stable-Baselines3's."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.wrappers.utils import RunningMeanStd as Theirs
from gymnasium.wrappers.vector import NormalizeObservation

import jaxvec
from jaxvec.logging import Run
from jaxvec.normalize import RunningMeanStd


def _batches(*shape):
    return np.random.default_rng(0).normal([3, -1], [2, 5], (*shape, 2)).astype(np.float32)


def test_it_has_gymnasium_s_figures_after_each_batch():
    stats, theirs = RunningMeanStd.create(np.zeros(2)), Theirs(shape=(2,))
    for batch in _batches(5, 7):
        stats = jax.jit(RunningMeanStd.update)(stats, batch)
        theirs.update(batch)
        np.testing.assert_allclose(stats.mean, theirs.mean, rtol=1e-5)
        np.testing.assert_allclose(stats.var, theirs.var, rtol=1e-5)
        np.testing.assert_allclose(stats.count, theirs.count, rtol=1e-6)


def test_a_scan_s_batch_is_that_of_all_its_steps():
    values = _batches(4, 6, 3)
    stats = RunningMeanStd.create(jax.ShapeDtypeStruct((2,), np.float32), count=0)
    stats, _ = jax.lax.scan(lambda stats, batch: (stats.update(batch), None), stats, values)
    np.testing.assert_allclose(stats.mean, values.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(stats.var, values.var((0, 1, 2)), rtol=1e-5)
    assert stats.count == 72


def test_observations_in_jit_are_those_of_gymnasium_s_wrapper():
    reference = NormalizeObservation(gymnasium.make_vec("Pendulum-v1", 4, "sync"), epsilon=1e-8)
    actions = np.random.default_rng(1).uniform(-2, 2, (300, 4, 1)).astype(np.float32)
    with jaxvec.make("Pendulum-v1", 4, autoreset_mode="NEXT_STEP", backend="serial") as envs:
        handle, timestep = jaxvec.reset(envs, seed=0)
        stats = RunningMeanStd.create(timestep.obs[0]).update(timestep.obs)

        @jax.jit
        def play(handle, stats, actions):
            def step(carry, action):
                handle, stats = carry
                handle, timestep = jaxvec.step(handle, action)
                stats = stats.update(timestep.obs)
                return (handle, stats), stats.normalize(timestep.obs, clip=jnp.inf)

            return jax.lax.scan(step, (handle, stats), actions)

        first = stats.normalize(timestep.obs, clip=jnp.inf)
        _, rows = play(handle, stats, actions)
    np.testing.assert_allclose(first, reference.reset(seed=0)[0], rtol=1e-4, atol=1e-5)
    for row, action in zip(rows, actions, strict=True):
        np.testing.assert_allclose(row, reference.step(action)[0], rtol=1e-3, atol=1e-4)
    reference.close()


def _vec_normalize(values, dones, gamma):
    """Yields what Stable-Baselines3's `VecNormalize` makes of rewards, by its formula."""
    returns, stats = np.zeros(values.shape[1]), Theirs(shape=())
    for reward, done in zip(values, dones, strict=True):
        returns = returns * gamma + reward
        stats.update(returns)
        yield np.clip(reward / np.sqrt(stats.var + 1e-8), -10, 10)
        returns[done] = 0


def test_rewards_are_scaled_as_by_vecnormalize():
    generator = np.random.default_rng(2)
    rewards = generator.normal(4, 2, (50, 3)).astype(np.float32)
    dones = generator.random((50, 3)) < 0.1

    def step(carry, row):
        stats, returns = carry
        reward, done = row
        returns = 0.9 * returns + reward
        stats = stats.update(returns)
        return (stats, jnp.where(done, 0, returns)), stats.scale(reward)

    start = (RunningMeanStd.create(0.0), jnp.zeros(3))
    _, scaled = jax.lax.scan(step, start, (rewards, dones))
    np.testing.assert_allclose(scaled, list(_vec_normalize(rewards, dones, 0.9)), rtol=1e-4)


def test_the_formula_above_is_vecnormalize_s():
    vec_env = pytest.importorskip(
        "stable_baselines3.common.vec_env", reason="stable-baselines3 is not installed"
    )
    generator = np.random.default_rng(2)
    rewards, dones = generator.normal(4, 2, (50, 3)).astype(np.float32), generator.random((50, 3)) < 0.1

    class Played(vec_env.VecEnvWrapper):
        def reset(self):
            self.steps = iter(zip(rewards, dones, strict=True))
            return self.venv.reset()

        def step_wait(self):
            obs, _, _, infos = self.venv.step_wait()
            return obs, *next(self.steps), infos

    below = Played(vec_env.DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")] * 3))
    envs = vec_env.VecNormalize(below, norm_obs=False, gamma=0.9)
    envs.reset()
    for expected in _vec_normalize(rewards, dones, 0.9):
        with np.errstate(all="ignore"):
            _, reward, _, _ = envs.step(np.zeros((3, 1), np.float32))
        np.testing.assert_allclose(reward, expected, rtol=1e-5)


def test_values_are_clipped_and_nested_ones_normalised_leaf_by_leaf():
    value = {"a": np.zeros(2, np.uint8), "b": (np.float32(0),)}
    batch = {"a": np.array([[0, 4], [2, 4]], np.uint8), "b": (np.array([1, 5], np.float32),)}
    stats = RunningMeanStd.create(value, count=0).update(batch)
    assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, (stats.mean, stats.var))) == (
        {"a": [1, 4], "b": (3,)},
        {"a": [1, 0], "b": (4,)},
    )
    normal = stats.normalize(batch, epsilon=0.0001, clip=0.75)
    np.testing.assert_array_equal(normal["a"], [[-0.75, 0], [0.75, 0]])
    assert {leaf.dtype for leaf in jax.tree.leaves((stats, normal))} == {np.dtype(np.float32)}


def test_statistics_are_float32_whatever_the_values_are():
    values = np.array([1, 2, 4], np.float16)  # whose mean is none of float16's numbers
    stats = RunningMeanStd.create(values[0], count=0).update(values)
    np.testing.assert_allclose((stats.mean, stats.var), (7 / 3, 14 / 9), rtol=1e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {
        np.dtype(np.float32)
    }  # as a scan's carry wants


def test_strict_promotion_is_possible():
    stats = RunningMeanStd.create(jnp.zeros(3))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        stats = stats.update(jnp.ones((5, 3)))
        for values in (jnp.ones((5, 3)), jnp.ones((5, 3), jnp.uint8)):
            assert stats.normalize(values).shape == stats.scale(values).shape == (5, 3)


@pytest.mark.parametrize(("start", "batch"), [(2**24, 1), (2**27, 8), (2**32 - 512, 3000), (2**40, 8)])
def test_the_count_goes_on_in_very_long_runs(start, batch):
    """In float32 alone, it would stand still at 2**24 with batches of 1."""
    stats, values = RunningMeanStd.create(0.0, count=start), jnp.ones(batch)
    stats = jax.jit(lambda stats: jax.lax.fori_loop(0, 1001, lambda _, s: s.update(values), stats))(stats)
    number = 1001 * batch
    assert int(stats.count) + int(stats.remainder) == start + number
    assert stats.count == np.float32(start + number)
    np.testing.assert_allclose(stats.mean, number / (start + number), rtol=1e-4)
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {np.dtype(np.float32)}


def test_the_initial_weight_is_part_of_the_count():
    stats = RunningMeanStd.create(0.0)
    for number in (3, 2**20, 2**24 - 1, 2):
        stats = jax.jit(RunningMeanStd.update)(stats, jnp.zeros(number))
    assert float(stats.count) + float(stats.remainder) == pytest.approx(2**24 + 2**20 + 4 + 1e-4, abs=1e-3)


def test_the_whole_count_is_in_a_checkpoint(tmp_path):
    stats = RunningMeanStd.create(0.0, count=2**33).update(jnp.ones(1))
    with Run(tmp_path, progress=False) as run:
        run.log(1)
        run.save(stats)
    with Run(tmp_path, resume=True, progress=False) as run:
        loaded, _ = run.load(RunningMeanStd.create(0.0))
    loaded = loaded.update(jnp.ones(3))
    assert int(loaded.count) + int(loaded.remainder) == 2**33 + 4


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (np.zeros(2), r"expected leading axes followed by \(2,\), got shape \(2,\)"),
        (np.zeros((5, 3)), r"got shape \(5, 3\)"),
    ],
)
def test_a_batch_of_another_shape_is_an_error(batch, text):
    with pytest.raises(ValueError, match=text):
        RunningMeanStd.create(np.zeros(2)).update(batch)
    pair = RunningMeanStd.create((np.zeros(2), 0.0))
    with pytest.raises(ValueError, match="all leaves of a batch need the same leading axes"):
        pair.update((np.zeros((4, 2)), np.zeros(3)))
