"""What an env returns and can't be stored: the error names env and leaf."""

import os
import sys
from functools import partial

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from support.disasters import assert_broken, wait_until_dead
from support.probe import _native

import jaxvec
from jaxvec.testing import CountingEnv

WRONG_DATA = {
    "shape": (lambda obs: obs[:2], r"obs: expected shape \(4,\), got \(2,\)"),
    "dtype": (lambda obs: obs * 0.5, "obs: expected int32, got float64"),
    "NaN": (lambda obs: np.full(4, np.nan), "obs: expected int32, got float64"),
    "strings": (lambda obs: np.full(4, "x"), "obs: expected int32, got <U1"),
    "None": (lambda obs: None, r"obs: expected shape \(4,\), got \(\)"),
    "Nones": (lambda obs: [None] * 4, "obs: expected int32, got list"),
    "structure": (lambda obs: {"x": obs}, r"obs: expected shape \(4,\), got \(\)"),
    "ragged": (lambda obs: [1, [2]], "obs: expected shape .*ragged"),
}


class WrongEnv(CountingEnv):
    """Env 2 returns other observations from `where`, in step on the action 7 only."""

    def __init__(self, env_id, where, change):
        super().__init__()
        self._where = where if env_id == 2 else None
        self._change = change

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return (self._change(obs) if self._where == "reset" else obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return (self._change(obs) if self._where == "step" and action == 7 else obs), *rest


def wrong(where, change):
    return lambda env_id: WrongEnv(env_id, where, change)


@pytest.mark.parametrize("name", WRONG_DATA)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_wrong_observations_name_env_and_leaf(make, backend, name, where):
    change, text = WRONG_DATA[name]
    envs = make(wrong(where, change), 4, backend=backend)
    with pytest.raises(jaxvec.EnvDataError, match=f"env 2 .*{where}.*{text}"):
        envs.reset()
        envs.step(np.full(4, 7))
    with pytest.raises(jaxvec.PoolBrokenError):
        envs.reset()


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_wrong_shape_breaks_the_pool_in_every_way(drive, where):
    change, text = WRONG_DATA["shape"]
    driver = drive(wrong(where, change))
    with pytest.raises(jaxvec.EnvDataError, match=f"env 2 .worker 1. .*{where}.*{text}") as caught:
        driver.reset()
        driver.step(0, times=3)
        driver.step(7)
    assert (caught.value.env_id, caught.value.worker, caught.value.operation) == (2, 1, where)
    assert caught.value.action == ("np.int64(7)" if where == "step" else None)
    assert_broken(driver, caught.value)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ((np.zeros(4, np.int32), 0.0, False, {}), "a tuple of 4"),
        (None, "NoneType"),
        ((np.zeros(4, np.int32), None, False, False, {}), "reward: expected a number"),
        ((np.zeros(4, np.int32), np.zeros(2), False, False, {}), "reward: .*reward_space"),
        ((np.zeros(4, np.int32), 0.0, False, False, None), "info as a dict, got NoneType"),
    ],
)
def test_wrong_results_of_step_say_what_is_expected(make, backend, result, text):
    class Wrong(CountingEnv):
        def step(self, action):
            return result

    envs = make(Wrong, 2, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match=text):
        envs.step(np.zeros(2, int))


# --- Out of the space ---------------------------------------------------------------------------


class OutsideEnv(gymnasium.Env):
    """Its nested observation is in its space, but for one leaf of env 1 where `value` is put."""

    observation_space = spaces.Dict(
        {"pose": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3))), "seen": spaces.MultiBinary(2)}
    )
    action_space = spaces.Discrete(8)

    def __init__(self, env_id, where, leaf, value):
        self._change = (where, leaf, value) if env_id == 1 else None

    def _observe(self, where):
        leaves = {"position": np.zeros(2, np.float32), "kind": 1, "seen": np.zeros(2, np.int8)}
        if self._change is not None and self._change[0] == where:
            leaves[self._change[1]] = self._change[2]
        return {"pose": (leaves["position"], leaves["kind"]), "seen": leaves["seen"]}

    def reset(self, *, seed=None, options=None):
        return self._observe("reset"), {}

    def step(self, action):
        return self._observe("step" if action == 7 else ""), 0.0, False, False, {}


OUTSIDE = {
    "above": (
        "position",
        np.array([0, 2], np.float32),
        r"obs\['pose'\]\[0\]: array.* is not in Box\(-1.0, 1.0",
    ),
    "NaN": ("position", np.array([0, np.nan], np.float32), r"obs\['pose'\]\[0\]: array.*nan.* is not in Box"),
    "no such kind": ("kind", 3, r"obs\['pose'\]\[1\]: 3 is not in Discrete\(3\)"),
    "no bit": ("seen", np.array([0, 2], np.int8), r"obs\['seen'\]: array.* is not in MultiBinary\(2\)"),
    "shape": ("position", np.zeros(3, np.float32), r"obs\['pose'\]\[0\]: expected shape \(2,\), got \(3,\)"),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_strict_refuses_what_is_not_in_the_space(make, backend, name, where):
    leaf, value, text = OUTSIDE[name]
    envs = make(lambda env_id: OutsideEnv(env_id, where, leaf, value), 2, backend=backend, check="strict")
    with pytest.raises(jaxvec.EnvDataError, match=f"env 1 .*{where}.*{text}"):
        envs.reset()
        envs.step([0, 7])


@pytest.mark.parametrize("name", [name for name in OUTSIDE if name != "shape"])
def test_by_default_only_the_structure_is_looked_at(make, backend, name):
    leaf, value, _ = OUTSIDE[name]
    envs = make(lambda env_id: OutsideEnv(env_id, "step", leaf, value), 2, backend=backend)
    envs.reset()
    envs.step([0, 7])


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_strict_takes_all_that_is_in_the_space(make, mode):
    envs = make("CartPole-v1", 3, check="strict", autoreset_mode=mode)
    envs.reset(seed=0)
    for _ in range(60):
        envs.step([1, 0, 1])
    assert envs.stats().total.episodes > 6


def test_an_unknown_check_is_refused():
    with pytest.raises(ValueError, match="check must be one of cast, structure, strict"):
        jaxvec.make(CountingEnv, 1, check="everything")


class Odd(gymnasium.Env):
    """Env 1 returns `values` as observation, reward and the info `score` of its first step."""

    action_space = spaces.Discrete(2)

    def __init__(self, env_id, values, shape=(2, 4, 3)):
        self.observation_space = spaces.Box(-np.inf, np.inf, shape, np.float32)
        self._values = values if env_id == 1 else {}

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        obs = self._values.get("obs", np.zeros(self.observation_space.shape, np.float32))
        return obs, self._values.get("reward", 0.0), False, False, {"score": self._values.get("score", 0.0)}


MASKED = np.ma.array(7.0, mask=True)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"obs": np.zeros((3, 2, 4))},
            r"obs: expected shape \(2, 4, 3\), got \(3, 2, 4\); change the order of",
        ),
        ({"obs": np.zeros(24)}, r"obs: expected shape \(2, 4, 3\), got \(24,\); give a value of the space"),
        ({"obs": None}, r"obs: expected float32, got None"),
        ({"obs": np.full((2, 4, 3), None)}, r"obs: expected float32, got None"),
        ({"obs": np.ma.zeros((2, 4, 3)) + np.ma.masked}, "obs: got a masked array; give each"),
        ({"reward": MASKED}, "reward: got a masked array"),
        ({"reward": np.ma.masked}, "reward: got a masked array"),
        ({"score": MASKED}, r"info\['score'\]: got a masked array"),
    ],
)
def test_no_number_is_invented_by_a_cast(drive, values, text):
    """NumPy's casts would scramble the axes, make NaN of `None`, and show the number under a mask."""
    driver = drive(lambda env_id: Odd(env_id, values), check="cast", info={"score": float})
    driver.reset()
    with pytest.raises(jaxvec.EnvDataError, match=f"env 1 .*step.*{text}"):
        driver.step(0)


@pytest.mark.parametrize("shape", [(1, 2, 3), (2, 1, 3), (2, 3, 1)])
def test_a_cast_adds_and_removes_axes_of_size_1(make, shape):
    values = np.arange(6.0).reshape(shape)
    envs = make(lambda env_id: Odd(env_id, {"obs": values}, (2, 3)), 2, backend="serial", check="cast")
    envs.reset()
    assert envs.step([0, 0]).obs[1].tolist() == values.reshape(2, 3).tolist()


@pytest.mark.parametrize("envs_per_instance", [2, None])
def test_a_masked_reward_of_a_batched_env_is_refused(make, envs_per_instance):
    class Batch(gymnasium.vector.SyncVectorEnv):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return obs, np.ma.array(reward, mask=[False, True]), *rest

    batch = partial(Batch, [CountingEnv] * 2)
    envs = make(batch, 2, envs_per_instance=2) if envs_per_instance else make(batch())
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match="reward: got a masked array"):
        envs.step([0, 0])


# --- Numbers out of the range of the stored dtype -----------------------------------------------


class Large(gymnasium.Env):
    """Env 1 returns `value` as observation, reward and info on action 1, and ends the episode on action 2."""

    action_space = spaces.Discrete(3)

    def __init__(self, env_id, value, shape, dtype, rewards=()):
        self.observation_space = spaces.Box(-np.inf, np.inf, shape, dtype)
        self.reward_space = spaces.Box(-np.inf, np.inf, rewards, np.float64)
        self.env_id, self.value = env_id, value

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action):
        value = self.value if self.env_id == 1 and action else 2.0
        reward = np.full(self.reward_space.shape, value) if self.reward_space.shape else np.float64(value)
        obs = np.full(self.observation_space.shape, value, np.float64)
        return obs, reward, action == 2, False, {"score": value}


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("rewards", [(), (2,)], ids=["scalar", "vector"])
@pytest.mark.parametrize(("shape", "dtype"), [((2,), np.float64), ((1000,), np.float32), ((), np.float64)])
def test_floats_too_large_for_the_stored_dtype_are_infinite(
    make, monkeypatch, compiled, shape, dtype, rewards
):
    """As NumPy, JAX and Gymnasium cast them, but without a warning of NumPy, which may be an error."""
    if not compiled:
        monkeypatch.setattr(_native, "ext", None)
    fn = partial(Large, value=-1.7e308, shape=shape, dtype=dtype, rewards=rewards)
    envs = make(lambda env_id: fn(env_id), 2, backend="serial", dispatch="portable", info={"score": float})
    envs.reset(seed=0)
    for action in (1, 1, 2):
        obs, reward, *_, info = envs.step([action] * 2)
        row = obs, info["score"]
        if action == 2:
            row = info["final_obs"], info["final_info"]["score"]
            assert info["_final_obs"].all()
        for each in (*row, reward, info["episode_return"]):
            assert np.isneginf(each[1]).all()
            assert action == 2 or np.isfinite(each[0]).all()


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("rewards", [(), (2,)], ids=["scalar", "vector"])
def test_fractions_of_rewards_are_kept_in_an_integer_space(make, monkeypatch, compiled, rewards):
    class Env(Large):
        def __init__(self):
            super().__init__(1, 0.5, (), np.float32, rewards)
            self.reward_space = spaces.Box(0, 9, rewards, np.int32)

    if not compiled:
        monkeypatch.setattr(_native, "ext", None)
    envs = make(Env, 2, backend="serial", dispatch="portable")
    envs.reset(seed=0)
    timestep = envs.step([1, 1])
    for each in (timestep.reward, timestep.info["episode_return"]):
        np.testing.assert_array_equal(each, np.full((2, *rewards), 0.5, np.float32))


@pytest.mark.parametrize(
    ("shape", "rewards", "leaf"),
    [((2,), (), "obs"), ((), (), "reward"), ((), (2,), "reward")],
    ids=["obs", "reward", "rewards"],
)
def test_strict_refuses_floats_too_large_for_the_stored_dtype(make, shape, rewards, leaf):
    class Env(Large):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return (obs if leaf == "obs" else np.zeros(shape)), (0.0 if leaf == "obs" else reward), *rest

    fn = partial(Env, value=1e39, shape=shape, dtype=np.float64, rewards=rewards)
    envs = make(lambda env_id: fn(env_id), 2, num_workers=1, check="strict")
    envs.reset(seed=0)
    envs.step([0, 0])
    with pytest.raises(
        jaxvec.EnvDataError, match=rf"env 1 .*{leaf}: 1e\+39 doesn't fit into float32, .*float64"
    ):
        envs.step([1, 1])


def test_strict_refuses_returns_and_infos_that_are_too_large(make):
    for value, leaf in ((3e38, "episode_return"), (1e39, "score")):

        class Env(Large):
            def step(self, action, leaf=leaf):
                _, reward, *rest, info = super().step(action)
                return np.zeros(()), (reward if leaf == "episode_return" else 0.0), *rest, info

        fn = partial(Env, value=value, shape=(), dtype=np.float64)
        envs = make(
            lambda env_id, fn=fn: fn(env_id), 2, backend="serial", check="strict", info={"score": float}
        )
        envs.reset(seed=0)
        with pytest.raises(
            jaxvec.EnvDataError, match=rf"env 1 .*info\['{leaf}'\]: .* doesn't fit into float32"
        ):
            envs.step([1, 1])
            envs.step([1, 1])


def test_what_is_infinite_from_the_start_is_no_error(make):
    fn = partial(Large, value=np.inf, shape=(), dtype=np.float64)
    envs = make(lambda env_id: fn(env_id), 2, backend="serial", check="strict")
    envs.reset(seed=0)
    assert envs.step([1, 1]).reward.tolist() == [2, np.inf]


class ForkingEverywhere(CountingEnv):
    """Forks at `place`. Its children wait until the FIFO `release` is opened."""

    def __init__(self, place, release):
        super().__init__()
        self.place, self.release = place, release
        self.children = []
        self.fork("constructor")

    def fork(self, place):
        if place != self.place:
            return
        self.children.append(os.fork())
        if not self.children[-1]:
            os.open(self.release, os.O_RDONLY)
            if place.endswith("raises"):
                sys.exit(0)

    def reset(self, **kwargs):
        self.fork("reset raises")
        return super().reset(**kwargs)

    def step(self, action):
        self.fork("step")
        self.fork("step raises")
        return super().step(action)

    def forks(self, number):
        self.fork("call")
        self.fork("call raises")
        return number


@pytest.mark.parametrize(
    "place", ["constructor", "reset raises", "step", "step raises", "call", "call raises"]
)
def test_forks_that_come_back_from_code_of_an_env_are_ended(make, capfd, tmp_path, place):
    """Otherwise the child would write into rows, or a call could get the answer of another."""
    release = tmp_path / "release"
    os.mkfifo(release)
    fns = [partial(ForkingEverywhere, place if env_id == 1 else "", str(release)) for env_id in range(3)]
    envs = make(fns, num_workers=1)
    envs.reset(seed=0)
    for number in range(3):
        assert envs.call("forks", number) == (number,) * 3
        assert envs.step([7, 7, 7]).obs[:, 1].tolist() == [number + 1] * 3
    children = [psutil.Process(pid) for pid in envs.get_attr("children")[1]]
    writer = os.open(release, os.O_RDWR)
    for child in children:
        wait_until_dead(child)
    os.close(writer)
    assert envs.call("forks", 5) == (5,) * 3
    assert envs.step([7, 7, 7]).obs[:, 1].tolist() == [4] * 3
    envs.close()
    where = {"call": "forks"}.get(place.split()[0], place.split()[0])
    env_id = "0 or 1 or 2" if place == "step raises" else "1"
    said = capfd.readouterr().err
    assert said.count(f"env {env_id} has forked in {where}, and the new process") >= len(children) > 0
