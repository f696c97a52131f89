"""The same data as `gymnasium.vector.SyncVectorEnv`, bit for bit, in every autoreset mode."""

from __future__ import annotations

from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

import jaxvec
from jaxvec.testing import NestedEnv

MODES = list(AutoresetMode)
STATISTICS = {"env_id", "episode_return", "episode_length"}
SEED = 11
ENVS = {  # 5 envs each, so that 2 workers hold slices of different size
    **{
        name: [partial(gymnasium.make, name)] * 5
        for name in (
            "CartPole-v1",
            "MountainCarContinuous-v0",
            "Pendulum-v1",
            "Blackjack-v1",
            "FrozenLake-v1",
            "Taxi-v4",
        )
    },
    "NestedEnv": [partial(NestedEnv, length) for length in (3, 7, 5, 1, 4)],
}

modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def canonical(tree):
    """Returns the tree in the dtypes that JAX gives it."""
    return jax.tree.map(
        lambda x: np.asarray(x).astype(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)), tree
    )


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def sample_actions(env_fns, num_steps):
    """Returns `[num_steps, num_envs, ...]` actions: as JAX holds them, and as the envs then get them."""
    space = SyncVectorEnv(env_fns).action_space
    space.seed(SEED)
    raw = stack([space.sample() for _ in range(num_steps)])
    actions = canonical(raw)
    return actions, jax.tree.map(lambda action, as_sampled: action.astype(as_sampled.dtype), actions, raw)


def oracle_steps(env_fns, mode, actions, num_steps, keys=()):
    """Yields after the reset, each step and each masked reset what jaxvec should return, uncast.

    Only Gymnasium's own results are used; the episode statistics are added up here.
    """
    oracle = SyncVectorEnv(env_fns, autoreset_mode=mode)
    n = oracle.num_envs
    returns, lengths, over = np.zeros(n), np.zeros(n, np.int32), np.zeros(n, bool)

    def expected(obs, reward, terminated, truncated, infos):
        info = {
            "env_id": np.arange(n, dtype=np.int32),
            "episode_return": returns.copy(),
            "episode_length": lengths.copy(),
        }
        if mode is AutoresetMode.SAME_STEP:
            info |= {"final_obs": final_obs(oracle, infos), "_final_obs": over.copy()}
            assert np.array_equal(infos.get("_final_obs", np.zeros(n, bool)), over)
            if keys:
                info["final_info"] = declared(infos.get("final_info", {}), keys, n)
        return jaxvec.TimeStep(obs, reward, terminated, truncated, info | declared(infos, keys, n))

    obs, infos = oracle.reset(seed=SEED)
    yield expected(obs, np.zeros(n), over, over, infos), np.ones(n, bool)
    for t in range(num_steps):
        running = ~over if mode is AutoresetMode.NEXT_STEP else np.ones(n, bool)
        returns, lengths = np.where(over, 0, returns), np.where(over, 0, lengths)
        action = jax.tree.map(lambda leaf, t=t: leaf[t], actions)
        obs, reward, terminated, truncated, infos = oracle.step(action)
        over = terminated | truncated
        returns, lengths = np.where(running, returns + reward, 0), lengths + running
        yield expected(obs, reward, terminated, truncated, infos), np.ones(n, bool)
        if mode is AutoresetMode.DISABLED and over.any():
            mask = over.copy()
            obs, infos = oracle.reset(options={"reset_mask": mask.copy()})
            over = np.zeros(n, bool)
            returns, lengths = np.where(mask, 0, returns), np.where(mask, 0, lengths)
            none = terminated & False
            yield expected(obs, np.where(mask, 0, reward), none, none, infos), mask
    oracle.close()


def final_obs(oracle, infos):
    """Batches Gymnasium's object array of last observations, with zeros where there is none."""
    space, n = oracle.single_observation_space, oracle.num_envs
    zeros = create_empty_array(space, n, np.zeros)
    found = infos.get("final_obs", [None] * n)
    rows = [
        zero if row is None else row
        for zero, row in zip(iterate(oracle.observation_space, zeros), found, strict=True)
    ]
    return concatenate(space, rows, create_empty_array(space, n, np.zeros))


def declared(infos, keys, n):
    """Picks the keys and masks out of Gymnasium's infos, zeros where no env has the key."""
    picked = {}
    for key, space in keys.items() if keys else ():
        zeros = create_empty_array(space, n, np.zeros)
        value = infos.get(key, zeros)
        if isinstance(space, spaces.Dict):
            value = {name: value.get(name, zeros[name]) for name in space}
        picked |= {key: value, f"_{key}": infos.get(f"_{key}", np.zeros(n, bool))}
    return picked


def rollout(envs, actions):
    """Returns what one jitted scan got: after the reset, each step and, if needed, each masked reset."""
    disabled = envs.autoreset_mode is AutoresetMode.DISABLED

    @jax.jit
    def run(handle, actions):
        def body(handle, action):
            handle, timestep = jaxvec.step(handle, action)
            over = timestep.terminated | timestep.truncated
            if not disabled:
                return handle, (timestep, timestep)
            handle, after = jax.lax.cond(
                over.any(),
                lambda handle: jaxvec.reset(handle, mask=over),
                lambda handle: (handle, timestep),
                handle,
            )
            return handle, (timestep, after)

        return jax.lax.scan(body, handle, actions)

    handle, first = jaxvec.reset(envs, seed=SEED)
    _, (stepped, after) = jax.tree.map(np.asarray, run(handle, actions))
    got = [jax.tree.map(np.asarray, first)]
    for t in range(len(stepped.reward)):
        got.append(jax.tree.map(lambda leaf, t=t: leaf[t], stepped))
        if disabled and (stepped.terminated[t] | stepped.truncated[t]).any():
            got.append(jax.tree.map(lambda leaf, t=t: leaf[t], after))
    return got


def host_loop(envs, actions, num_steps):
    got = [envs.reset(seed=SEED)]
    for t in range(num_steps):
        got.append(envs.step(jax.tree.map(lambda leaf, t=t: leaf[t], actions)))
        over = got[-1].terminated | got[-1].truncated
        if envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
            got.append(envs.reset(mask=over))
    return got


def assert_same(got, oracle):
    """Compares structure, dtype, shape and bits of every leaf; returns how many episodes ended."""
    ended, before = 0, None
    for index, (actual, (expected, mask)) in enumerate(zip(got, oracle, strict=True)):
        expected = canonical(expected)
        if not mask.all():
            # Gymnasium's infos of a masked reset are of the envs reset; other rows must stay as they were.
            kept = {key: value for key, value in before.info.items() if key not in STATISTICS}
            fresh = {key: expected.info[key] for key in kept}
            expected.info.update(jax.tree.map(partial(merge, mask), fresh, kept))
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        leaves, expected_leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, expected))
        for (path, leaf), (_, expected_leaf) in zip(leaves, expected_leaves, strict=True):
            where = f"result {index}{jax.tree_util.keystr(path)}"
            assert (leaf.dtype, leaf.shape) == (expected_leaf.dtype, expected_leaf.shape), where
            assert leaf.tobytes() == expected_leaf.tobytes(), f"{where}: got {leaf}, expected {expected_leaf}"
        ended += int((actual.terminated | actual.truncated).sum())
        before = actual
    return ended


def merge(mask, fresh, kept):
    return np.where(mask.reshape(-1, *[1] * (fresh.ndim - 1)), fresh, kept)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(
            name,
            mode,
            marks=() if name in ("CartPole-v1", "NestedEnv") or i % 3 == j else pytest.mark.nightly,
            id=f"{name}-{mode.name}",
        )
        for i, name in enumerate(ENVS)
        for j, mode in enumerate(MODES)
    ],
)
def test_a_thousand_jitted_steps_equal_gymnasiums(make, name, mode):
    env_fns = ENVS[name]
    actions, raw = sample_actions(env_fns, 1_000)
    envs = make(env_fns, num_workers=2, autoreset_mode=mode)
    ended = assert_same(rollout(envs, actions), oracle_steps(env_fns, mode, raw, 1_000))
    assert ended >= 5  # every env's episode, or the comparison would say little


@modes
@pytest.mark.parametrize("name", ["CartPole-v1", "NestedEnv"])
def test_host_steps_equal_gymnasiums(make, backend, name, mode):
    env_fns = ENVS[name]
    actions, raw = sample_actions(env_fns, 200)
    local = backend == "serial"  # and through all wrappers
    envs = make(
        env_fns, num_workers=1 if local else 2, backend=backend, autoreset_mode=mode, wrapper_bypass=not local
    )
    got = host_loop(envs, actions, 200)
    assert assert_same(got, oracle_steps(env_fns, mode, raw, 200)) >= 25


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@modes
def test_with_x64_nothing_is_rounded(make, x64, mode):
    env_fns = ENVS["NestedEnv"]
    actions, raw = sample_actions(env_fns, 100)
    assert actions["arm"][0].dtype == np.float64
    assert actions["turn"].dtype == np.int64
    envs = make(env_fns, num_workers=2, autoreset_mode=mode)
    assert assert_same(rollout(envs, actions), oracle_steps(env_fns, mode, raw, 100)) >= 50


class SparseInfoEnv(gymnasium.Env):
    """Its info has each key on some calls only."""

    observation_space = spaces.Discrete(1_000)
    action_space = spaces.Discrete(2)

    def __init__(self, env_id):
        self._id, self._calls, self._steps = env_id, env_id, 0

    def _info(self):
        self._calls += 1
        calls = self._calls
        info = {"never declared": "text"}
        if calls % 2:
            info["lives"] = calls
        if calls % 3 == 0:
            info["where"] = np.array([calls, 1 / calls])
        if calls % 5 == 0:
            info["nested"] = {"flag": bool(calls % 2), "speed": calls / 7}
        return info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._calls, self._info()

    def step(self, action):
        self._steps += 1
        return self._calls, 1 / self._calls, self._steps > 3 + self._id, self._steps > 5, self._info()


SPARSE = {
    "lives": spaces.Discrete(1_000),
    "where": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "nested": spaces.Dict(
        {"flag": spaces.Box(0, 1, (), np.bool_), "speed": spaces.Box(0, 99, (), np.float64)}
    ),
}


@modes
def test_declared_info_equals_gymnasiums_infos_and_masks(make, mode):
    env_fns = [partial(SparseInfoEnv, i) for i in range(4)]
    actions, raw = sample_actions(env_fns, 100)
    declarations = SPARSE | {"lives": int, "where": (np.float64, (2,))}  # dtypes do as well as spaces
    envs = make(env_fns, num_workers=2, autoreset_mode=mode, info=declarations)
    got = rollout(envs, actions)
    assert assert_same(got, oracle_steps(env_fns, mode, raw, 100, SPARSE)) >= 60
    masks = np.stack([timestep.info[f"_{key}"] for timestep in got for key in SPARSE])
    assert masks.any(axis=0).all()
    assert not masks.all(axis=0).any()


class InPlaceEnv(gymnasium.Env):
    """Reuses the memory of its observation and of its info, in reset too: `[episode, step]`."""

    observation_space = spaces.Box(0, 1_000, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, length):
        self._length = length
        self._obs = np.zeros(2)
        self._info = {"seen": np.zeros(2, int)}

    def _result(self):
        self._info["seen"][:] = self._obs
        return self._obs, self._info

    def reset(self, *, seed=None, options=None):
        self._obs += [1, 0]
        self._obs[1] = 0
        return self._result()

    def step(self, action):
        self._obs[1] += 1
        obs, info = self._result()
        return obs, 1.0, bool(obs[1] == self._length), False, info


def test_final_obs_and_info_survive_an_env_that_reuses_its_memory(make, backend):
    lengths = np.array([2, 3, 5])
    envs = make(
        [partial(InPlaceEnv, length) for length in lengths], backend=backend, info={"seen": (int, (2,))}
    )
    handle, _ = jaxvec.reset(envs)
    scan = jax.jit(
        lambda handle: jax.lax.scan(lambda h, a: jaxvec.step(h, a), handle, jnp.zeros((30, 3), int))
    )
    _, timestep = scan(handle)
    episode, step = np.divmod(np.arange(30)[:, None], lengths)
    over = step == lengths - 1
    final = np.stack([episode + 1, step + 1], -1)
    np.testing.assert_array_equal(timestep.terminated, over)
    np.testing.assert_array_equal(timestep.info["_final_obs"], over)
    np.testing.assert_array_equal(timestep.info["final_obs"], np.where(over[..., None], final, 0))
    np.testing.assert_array_equal(timestep.info["final_info"]["seen"], np.where(over[..., None], final, 0))
    now = np.where(over[..., None], np.stack([episode + 2, 0 * step], -1), final)
    np.testing.assert_array_equal(timestep.obs, now)
    np.testing.assert_array_equal(timestep.info["seen"], now)
