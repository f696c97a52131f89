"""The same data as `gymnasium.vector.SyncVectorEnv`, bit for bit, in every autoreset mode."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support.oracle import (
    SEED,
    assert_same,
    canonical,
    host_loop,
    oracle_steps,
    rollout,
    sample_actions,
    stack,
)

import jaxvec
from jaxvec.testing import NestedEnv

MODES = list(AutoresetMode)
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


@pytest.mark.slow(but=2)
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


@pytest.mark.slow(but=3)
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


@pytest.mark.slow(but=1)
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


INFO_WAYS = {
    "ffi": {},
    "io_callback": {"transport": "io_callback"},
    "portable": {"dispatch": "portable"},
    "serial": {"backend": "serial", "num_workers": 1},
    "host": {},
    "batched": {"num_workers": 1},
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("way", INFO_WAYS)
@modes
def test_declared_info_equals_gymnasiums_infos_and_masks(make, mode, way):
    env_fns = [partial(SparseInfoEnv, i) for i in range(4)]
    actions, raw = sample_actions(env_fns, 100)
    declarations = SPARSE | {"lives": int, "where": (np.float64, (2,))}  # dtypes do as well as spaces
    options = {"num_workers": 2, "info": declarations} | INFO_WAYS[way]
    if way == "batched":
        envs = make(SyncVectorEnv(env_fns, autoreset_mode=mode), **options)
    else:
        envs = make(env_fns, autoreset_mode=mode, **options)
    got = host_loop(envs, raw, 100) if way == "host" else rollout(envs, actions)
    assert assert_same(got, oracle_steps(env_fns, mode, raw, 100, SPARSE)) >= 60
    masks = np.stack([timestep.info[f"_{key}"] for timestep in got for key in SPARSE])
    assert masks.any(axis=0).all()
    assert not masks.all(axis=0).any()


class DefaultsEnv(gymnasium.Env):
    """Its reset has defaults of its own, which it observes."""

    observation_space = spaces.Box(-1, 9, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=5, options={"level": 2}):  # noqa: B006 - read only
        self._steps, self._arguments = 0, (seed or -1, (options or {"level": -1})["level"])
        return np.array([*self._arguments, 0]), {}

    def step(self, action):
        self._steps += 1
        return np.array([*self._arguments, self._steps]), 1.0, self._steps == 4, False, {}


@modes
def test_autoreset_leaves_an_env_its_own_defaults(make, backend, mode):
    env_fns = [DefaultsEnv, lambda: gymnasium.wrappers.TimeLimit(DefaultsEnv(), 3)]
    actions, raw = sample_actions(env_fns, 12)
    envs = make(env_fns, backend=backend, autoreset_mode=mode)
    assert assert_same(host_loop(envs, actions, 12), oracle_steps(env_fns, mode, raw, 12)) >= 5


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


class TellingEnv(NestedEnv):
    """Also says the number of its step: a text, which is padded, inside of a Dict and a Tuple."""

    def __init__(self, episode_length):
        super().__init__(episode_length)
        told = spaces.Tuple([spaces.Text(4, charset="0123456789")])
        self.observation_space = spaces.Dict({**self.observation_space.spaces, "told": told})

    def _observe(self, action):
        return super()._observe(action) | {"told": (str(3**self._steps % 9973),)}


LAST_ENVS = [  # of a terminated, a truncated, and a terminated and truncated episode
    lambda length=length: gymnasium.wrappers.TimeLimit(TellingEnv(length), 4) for length in (2, 9, 4)
]


def ends_of_steps(make_env, mode, seed, actions):
    """Yields what Gymnasium's env itself returns: (last observation, discount, whether it is the end)."""
    env = make_env()
    obs, _ = env.reset(seed=seed)
    over, terminated = False, False
    for action in actions:
        if over and mode == "EPISODIC":  # idle
            yield obs, 1 - terminated, True
            continue
        if over and mode == "NEXT_STEP":
            obs, _ = env.reset()
            over = terminated = False
        else:
            obs, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        yield obs, 1 - terminated, over
        if over and mode in ("SAME_STEP", "DISABLED"):
            env.reset()


@pytest.mark.slow(but=1)
@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("mode", "batched"),
    [*product(["SAME_STEP", "NEXT_STEP", "DISABLED"], [False, True]), ("EPISODIC", False)],
)
def test_last_obs_and_discount_are_those_of_plain_envs(make, mode, batched):
    actions, raw = sample_actions(LAST_ENVS, 14)
    if batched:
        envs = make(SyncVectorEnv(LAST_ENVS, autoreset_mode=AutoresetMode[mode]))
    else:
        envs = make(LAST_ENVS, num_workers=2, autoreset_mode=mode)

    def properties(timestep):
        return timestep.last_obs, timestep.discount, timestep.done

    @jax.jit
    def play(handle, actions):
        def body(handle, action):
            handle, timestep = jaxvec.step(handle, action)
            found = properties(timestep)
            if mode == "DISABLED":
                handle, _ = jaxvec.reset(handle, mask=timestep.done)
            return handle, (timestep, found)

        _, (timesteps, found) = jax.lax.scan(body, handle, actions)
        return timesteps, found, properties(timesteps), jax.vmap(properties)(timesteps)

    timesteps, *programs = play(jaxvec.reset(envs, seed=SEED)[0], actions)
    on_host, timestep = [], envs.reset(seed=SEED)
    for t in range(14):
        timestep = envs.step(jax.tree.map(lambda leaf, t=t: leaf[t], actions))
        on_host.append(properties(timestep))
        if mode == "DISABLED" and timestep.done.any():
            envs.reset(mask=timestep.done)
    host = jax.tree.map(lambda *leaves: np.stack(leaves), *on_host)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(on_host))
    found = [host, *programs, properties(jax.device_get(timesteps))]
    for i, make_env in enumerate(LAST_ENVS):
        own = [jax.tree.map(lambda leaf, t=t: leaf[t][i], raw) for t in range(14)]
        obs, *rest = stack([*ends_of_steps(make_env, mode, SEED + i, own)])
        obs["told"] = (jaxvec.spaces.encode(obs["told"][0].tolist(), 4),)
        for got in found:
            mine = jax.tree.map(lambda leaf, i=i: leaf[:, i], got)
            jax.tree.map(np.testing.assert_array_equal, mine, (canonical(obs), *rest))
            assert mine[1].dtype == np.float32
    both = np.asarray(timesteps.terminated & timesteps.truncated)
    assert (both.any(), (timesteps.done & ~timesteps.terminated).any()) == (True, True)


def test_last_obs_without_final_obs_is_an_error(make):
    envs = make("CartPole-v1", 2, num_workers=1, final_obs=False)
    handle, timestep = jaxvec.reset(envs)
    with pytest.raises(ValueError, match="last_obs: this time step has no final_obs and _final_obs in its"):
        envs.step([0, 1]).last_obs  # noqa: B018
    with pytest.raises(ValueError, match=r"Make the pool with final_obs=True"):
        jax.jit(lambda handle: jaxvec.step(handle, jnp.zeros(2, int))[1].last_obs)(handle)
    other = make("CartPole-v1", 2, num_workers=1, final_obs=False, autoreset_mode="NEXT_STEP")
    timestep = other.reset(seed=0)._replace(info={})
    np.testing.assert_array_equal(timestep.last_obs, timestep.obs)
    made = jaxvec.TimeStep(timestep.obs, timestep.reward, timestep.terminated, timestep.truncated, {})
    with pytest.raises(ValueError, match="has no final_obs"):
        made.last_obs  # noqa: B018


def test_last_info_without_final_obs_or_declared_keys(make):
    env_fns = [partial(SparseInfoEnv, i) for i in range(3)]
    pools = [make(env_fns, num_workers=1, info=SPARSE, final_obs=final_obs) for final_obs in (True, False)]
    handles = [jaxvec.reset(envs, seed=SEED)[0] for envs in pools]
    # In the second, no other result is read.
    play = jax.jit(
        lambda handle: jax.lax.scan(
            lambda handle, _: (lambda handle, timestep: (handle, timestep.last_info))(
                *jaxvec.step(handle, jnp.zeros(3, int))
            ),
            handle,
            length=20,
        )[1]
    )
    jax.tree.map(np.testing.assert_array_equal, *map(play, handles))
    timestep = pools[1].step([0, 0, 0])
    assert timestep.last_info.keys() == timestep.info["final_info"].keys()
    for mode in ("SAME_STEP", "NEXT_STEP", "EPISODIC"):
        envs = make("CartPole-v1", 2, backend="serial", autoreset_mode=mode, on_fault="restart")
        assert envs.reset(seed=0).last_info == envs.step([0, 1]).last_info == {}


def test_last_info_of_a_replaced_info_is_an_error(make):
    envs = make(partial(SparseInfoEnv, 0), 2, num_workers=1, info=SPARSE)
    timestep = envs.reset(seed=0)
    info = timestep.info
    for name in ("final_info", "lives", "_lives"):
        kept = {key: value for key, value in info.items() if key != name}
        with pytest.raises(ValueError, match="last_info: info has the declared keys .*, but final_info"):
            timestep._replace(info=kept).last_info  # noqa: B018
    with pytest.raises(ValueError, match=r"last_info: info\['lives'\] is .*float64"):
        timestep._replace(info={**info, "lives": info["lives"] / 2}).last_info  # noqa: B018
    added = timestep._replace(info={**info, "mine": 1}, obs=None, terminated=None)
    jax.tree.map(np.testing.assert_array_equal, added.last_info, timestep.last_info)
    assert timestep._replace(info={}).last_info == timestep._replace(info=None).last_info == {}


class Pair(NamedTuple):
    image: np.ndarray
    half: np.ndarray


def test_last_obs_of_replaced_obs_or_info_is_an_error(make):
    timestep = make(NestedEnv, 2, num_workers=1).reset(seed=0)
    obs, info = timestep.obs, timestep.info
    for broken, message in (
        (timestep._replace(info={}), "no final_obs and _final_obs"),
        (timestep._replace(info={"final_obs": obs}), "no _final_obs in its info"),
        (timestep._replace(obs={**obs, "image": obs["image"] / 255}), r"obs\['image'\] is \(.*float64"),
        (timestep._replace(obs={**obs, "half": obs["half"][:, :1]}), r"obs\['half'\] is \(.*\(2, 1\)"),
        (timestep._replace(obs={**obs, "clock": obs["clock"][0]}), r"obs\['clock'\] is "),
        (timestep._replace(obs={"image": obs["image"]}), "last_obs: obs is "),
        (timestep._replace(obs=None), "last_obs: obs is "),
    ):
        with pytest.raises(ValueError, match=message):
            broken.last_obs  # noqa: B018
    pair = lambda tree: Pair(tree["image"], tree["half"])  # noqa: E731
    named = timestep._replace(obs=pair(obs), info=info | {"final_obs": pair(info["final_obs"])})
    assert isinstance(named.last_obs, Pair)
    np.testing.assert_array_equal(named.last_obs.half, obs["half"])
    whole = jax.tree.map(lambda leaf: leaf.astype(np.float32), timestep)
    assert whole.last_obs["image"].dtype == np.float32
    jax.tree.map(np.testing.assert_array_equal, timestep._replace(reward=info).last_obs, obs)
