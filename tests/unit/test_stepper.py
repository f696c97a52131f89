"""The compiled stepping loop does what Python's does, and nobody can tell which wrappers it passes by."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from support import probe

import jaxvec
from jaxvec import _native
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.envs import EnvFailure
from jaxvec._envs.slot_envs import WrapperBypass
from jaxvec._leaves import as_is, as_jax
from jaxvec._memory import rows as _rows
from jaxvec._memory import segment
from jaxvec._memory.segment import make_layout
from jaxvec._options import PoolConfig
from jaxvec._spec import Autoreset, EnvSpaces, make_spec

pytestmark = pytest.mark.skipif(_native.ext is None, reason=f"not compiled: {_native.reason_unavailable()}")

SPACE = spaces.Dict(
    a=spaces.Box(-9, 9, (2, 3), np.float32),
    b=spaces.Discrete(7),
    c=spaces.Tuple([spaces.Box(0, 255, (4,), np.uint8), spaces.Box(-9, 9, (), np.float64)]),
    d=spaces.MultiDiscrete([3, 3]),
)
NUM_ENVS = 3
FIRST = 5


class Scripted(gymnasium.Env):
    """Returns what is drawn: mostly what is ordinary, else all that an env may return, or must not."""

    observation_space = SPACE
    action_space = spaces.Discrete(2)

    def __init__(self, seed: int, odd: float) -> None:
        self.random = np.random.default_rng(seed)
        self.odd = odd

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs(), self.one_of({}, {"k": 1})

    def step(self, action: Any) -> Any:
        if self.random.random() < self.odd / 8:
            raise RuntimeError(f"action {action}")
        reward = self.reward()
        flags = (
            self.one_of(False, True, np.False_, np.True_, 0, 1, None, np.array(True), np.zeros(2))
            for _ in range(2)
        )
        result = (
            self.obs(),
            reward,
            *flags,
            self.one_of({}, {"k": 1.5}, {"k": 2, "l": "x"}, OrderedDict(), None),
        )
        return self.one_of(result, list(result), result[:4], None)

    def reward(self) -> Any:
        return self.one_of(
            1.5, np.float64(0.1), np.float32(0.1), 3, True, np.array([2.0]), 2**70, 10**400, "1", None
        )

    def obs(self) -> Any:
        number = self.random.normal
        a = self.one_of(
            number(size=(2, 3)).astype(np.float32),
            number(size=(2, 3)),
            number(size=(3, 2)).T,
            np.eye(2, 3) * 1e300,
            np.full((2, 3), -np.inf),
            number(size=(2, 3)).astype(">f4"),
            number(size=(2, 3)).tolist(),
            number(size=(2, 3)).astype(np.float32).view(np.recarray),
            number(size=6),
            np.zeros((2, 3), int),
            None,
        )
        b = self.one_of(3, np.int64(2), np.uint8(1), np.array(4), True, 2**40, -(2**31), 1.0, np.array([1]))
        c = self.one_of(np.arange(4, dtype=np.uint8), np.arange(8, dtype=np.uint8)[::2], np.arange(4))
        d = self.one_of(np.array([1, 2]), np.array([1, 2], np.int32), np.array([2**40, 0]), [1, 2])
        e = self.one_of(
            *(number(), np.float32(0.1), np.float64(0.1), np.array(0.5), np.float16(1), np.longdouble(0.1)),
            *(1e300, -1e300, np.inf, -np.inf, np.nan, np.float32(-np.inf), 1, True, 2**70, 1j, "1", None),
        )
        pair = self.one_of((c, e), [c, e], (c,), "c")
        obs = {"a": a, "b": b, "c": pair, "d": d}
        return self.one_of(obs, OrderedDict(obs), {**obs, "e": 1}, {"a": a}, list(obs.values()), a)

    def one_of(self, ordinary: Any, *odd: Any) -> Any:
        return odd[self.random.integers(len(odd))] if self.random.random() < self.odd / len(odd) else ordinary


class Several(Scripted):
    """Returns a reward for each of two agents."""

    reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def reward(self) -> Any:
        x = self.random.normal(size=2)
        arrays = x, x.astype(np.float32), x.astype(">f8"), np.stack([x, x])[:, 0], x.view(np.recarray)
        lists = x.tolist(), tuple(x), [1, 2.5], (np.float32(0.1), 2**60 + 1), [3, 4], [True, 0.5], list("12")
        huge = [2**70, 1], [10**400, 1.0], np.array([1e300, 1.0]), [-np.inf, 1.0], [np.inf, np.nan]
        wrong = np.zeros(3), [1.0], [x, x], [None, 1.0], x[:, None], 1.5, np.array([2, 3]), "12", None
        usual = self.random.integers(3)
        return self.one_of([x, arrays[1], lists[0]][usual], *arrays, *lists, *huge, *wrong)


class Matrices(Several):
    """Returns a small array of rewards, which has rows in float32."""

    reward_space = spaces.Box(-9, 9, (2, 1), np.float32)

    def reward(self) -> Any:
        reward = super().reward()
        return reward.reshape(2, 1) if isinstance(reward, np.ndarray) and reward.size == 2 else reward


class Halves(Several):
    """Returns rewards that have rows in float16, which the compiled loop leaves to Python."""

    reward_space = spaces.Box(-9, 9, (2,), np.float16)


def make_slice(
    envs: list[gymnasium.Env], *, mode: Autoreset, policy: Any = as_jax, config: PoolConfig | None = None
) -> tuple[EnvSlice, dict[Any, Any]]:
    spec = make_spec(
        EnvSpaces(envs[0].observation_space, envs[0].action_space, getattr(envs[0], "reward_space", None)),
        num_envs=FIRST + len(envs),
        autoreset=mode,
        final_obs=True,
        fault=True,
        declared={"k": float},
        policy=policy,
    )
    arrays = segment.private_segment(make_layout(spec, 2))
    env_slice = EnvSlice(
        envs, [], first=FIRST, worker=1, spec=spec, arrays=arrays, config=config or PoolConfig()
    )
    return env_slice, arrays


def outcome(
    call: Callable[..., None], slots: Any, arrays: dict[Any, Any], first_ready: bool
) -> tuple[Any, ...]:
    """Returns what a call told of, and how it failed; a row that is told of is written, as others read it."""
    told: list[tuple[int, int]] = []
    rows: list[list[bytes]] = []

    def row(slot: int) -> list[bytes]:
        return [array[slot].tobytes() for array in arrays.values() if len(array) == FIRST + NUM_ENVS]

    def done(slot: int, count: int) -> None:
        told.append((slot, count))
        rows.append(row(slot))

    try:
        call(np.array(slots), done if first_ready else None)
    except EnvFailure as failure:
        cause = failure.__cause__
        return told, failure.env_id, failure.operation, failure.action, failure.completed, repr(cause)
    finally:
        assert rows == [row(slot) for slot, _ in told]
    return (told,)


def play(
    seed: int, mode: Autoreset, policy: Any, first_ready: bool, kind: type[Scripted] = Scripted
) -> list[Any]:
    """Returns all that can be seen of a slice's life."""
    env_slice, arrays = make_slice(
        [kind(100 * seed + i, 0.1) for i in range(NUM_ENVS)], mode=mode, policy=policy
    )
    random = np.random.default_rng(seed)
    seen: list[Any] = []
    for number in range(60):
        slots = FIRST + random.permutation(NUM_ENVS)[: random.integers(1, NUM_ENVS + 1)]
        call = env_slice.step if number and random.random() < 0.95 else env_slice.reset
        slots = slots if number else FIRST + np.arange(NUM_ENVS)
        arrays["requested",][slots] += 2
        arrays["action",][slots] = random.integers(2, size=len(slots))
        for _ in range(20):
            seen.append(outcome(call, slots, arrays, first_ready))
            seen.append({path: array.tobytes() for path, array in arrays.items() if path != ("stats",)})
            seen.append((arrays["stats",][1, :4].tolist(), repr(probe.slice_infos(env_slice))))
            if len(seen[-3]) == 1:
                break
            slots = [slot for slot in slots if slot not in seen[-3][4]]
    return seen


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("mode", Autoreset)
@pytest.mark.parametrize("policy", [as_is, as_jax], ids=["as_is", "as_jax"])
@pytest.mark.parametrize("first_ready", [False, True], ids=["together", "one by one"])
def test_it_does_what_python_does(mode, policy, first_ready, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(8):
            compiled = play(seed, mode, policy, first_ready)
            with monkeypatch.context() as without:
                without.setattr(_native, "ext", None)
                expected = play(seed, mode, policy, first_ready)
            assert len(compiled) == len(expected)
            for number, (a, b) in enumerate(zip(compiled, expected, strict=True)):
                assert a == b, f"seed {seed}, {number}"


def test_what_is_kept_of_a_row_counts_once_all_of_it_is_there(monkeypatch):
    """Else a worker that dies in between would leave a part of the row for the whole of it."""

    class Deadly:
        def __getitem__(self, index: Any) -> Any:
            raise KeyboardInterrupt

    env_slice, arrays = make_slice([Scripted(0, 0.0)], mode=Autoreset.SAME_STEP)
    slots = np.array([FIRST])
    env_slice.reset(slots)
    for path in tuple(probe.committed_rows(env_slice)):
        arrays["requested",][slots] += 2
        with monkeypatch.context() as deadly, pytest.raises(KeyboardInterrupt):
            deadly.setitem(probe.committed_rows(env_slice), path, Deadly())
            env_slice.step(slots)
        assert arrays["kept_for",][slots] != arrays["requested",][slots]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("kind", [Several, Matrices, Halves])
@pytest.mark.parametrize("policy", [as_is, as_jax], ids=["as_is", "as_jax"])
def test_vector_rewards_are_as_in_python(kind, policy, monkeypatch):
    for seed in range(12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled = play(seed, Autoreset.SAME_STEP, policy, False, kind)
        with monkeypatch.context() as without, warnings.catch_warnings(record=True) as expected_warnings:
            without.setattr(_native, "ext", None)
            warnings.simplefilter("always")
            expected = play(seed, Autoreset.SAME_STEP, policy, False, kind)
        assert len(compiled) == len(expected)
        for number, (a, b) in enumerate(zip(compiled, expected, strict=True)):
            assert a == b, f"seed {seed}, {number}"
        for text in ("invalid value", "in cast"):
            assert count_of(text, caught) == count_of(text, expected_warnings)


def count_of(text: str, caught: list[warnings.WarningMessage]) -> int:
    return sum(text in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    "reward", [np.array([1.5, -1.0]), np.array([1.5, -1.0], np.float32), [1.5, -1], (1.5, np.float32(-1))]
)
def test_an_ordinary_step_with_two_rewards_is_not_pythons(monkeypatch, reward):
    class Ordinary(Several):
        def reward(self) -> Any:
            return reward

    env_slice, arrays = make_slice([Ordinary(0, 0.0)] * 2, mode=Autoreset.SAME_STEP)
    slots = np.array([FIRST, FIRST + 1])
    env_slice.reset(slots)
    monkeypatch.setattr(EnvSlice, "_finish_step", None)
    for _ in range(5):
        env_slice.step(slots)
    for slot in slots:
        assert arrays["reward",][slot].tolist() == [1.5, -1]
        assert arrays["info", "episode_return"][slot].tolist() == [7.5, -5]


@pytest.mark.parametrize("kind", [float, np.float32])
def test_an_ordinary_step_is_not_pythons(monkeypatch, kind):
    """Else all that is said here would be of Python's loop alone."""

    class Ordinary(Scripted):
        def one_of(self, ordinary: Any, *odd: Any) -> Any:
            return kind(ordinary) if isinstance(ordinary, float) else ordinary

    env_slice, arrays = make_slice([Ordinary(0, 0.0)], mode=Autoreset.SAME_STEP)
    env_slice.reset(np.array([FIRST]))
    monkeypatch.setattr(EnvSlice, "_finish_step", None)
    monkeypatch.setattr(_rows, "conform", None)
    for slots in [np.array([FIRST])] * 5:
        env_slice.step(slots)
    assert arrays["info", "episode_length"][FIRST] == 5
    assert arrays["info", "episode_return"][FIRST] == 7.5


def test_after_a_trace_envs_are_stepped_as_before_it():
    env_slice, _ = make_slice([Scripted(0, 0.0)], mode=Autoreset.SAME_STEP)
    slots = np.array([FIRST])
    env_slice.reset(slots)
    env_slice.start_trace(9)
    env_slice.step(slots)
    record = env_slice.stop_trace()
    assert record is not None
    assert [each.what for each in record.spans] == [f"step env {FIRST}"]
    env_slice.step(slots)
    assert probe.slots(env_slice).targets.envs == probe.slots(env_slice).envs


def test_it_keeps_no_references():
    class Same(gymnasium.Env):
        observation_space = spaces.Tuple([spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(10**6)])
        action_space = spaces.Discrete(2)
        result = (np.zeros(2, np.float32), 999_999), 1.25, False, False, {"k": 1.0}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.result[0], {}

        def step(self, action: Any) -> Any:
            return self.result

    env = TimeLimit(Same(), 10**6)
    env_slice, _ = make_slice([env], mode=Autoreset.SAME_STEP)
    slots = np.array([FIRST])
    env_slice.reset(slots)
    env_slice.step(slots)
    objects = [
        env_slice,
        env,
        env.env,
        Same.result,
        *(each for each in Same.result if each is not False),
        *Same.result[0],
        probe.slice_infos(env_slice),
    ]
    gc.collect()  # what other tests have left
    before = [sys.getrefcount(each) for each in objects]
    references_to_false = sys.getrefcount(False)
    for _ in range(10_000):
        env_slice.step(slots)
    assert [sys.getrefcount(each) for each in objects] == before
    # Before Python 3.12, other threads and collections of garbage change this number, too, by a few hundred.
    assert abs(sys.getrefcount(False) - references_to_false) < 1_000
    env_slice.reset(slots)
    env_slice.access.set_attr([FIRST], [2], "_max_episode_steps")
    for _ in range(100):
        env_slice.step(slots)  # and ends every other episode
    del env_slice, objects
    gc.collect()
    assert sys.getrefcount(env) == 2


# --- wrappers that are passed by --------------------------------------------------------------


class Counting(gymnasium.Env):
    """Says what it has done in its observation, and raises or ends its episode now and then."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)
    built = 0

    def __init__(self, fails: bool = False, returns: type = tuple) -> None:
        type(self).built += 1
        self.fails, self.returns, self.number, self.steps = fails, returns, type(self).built, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.fails and self.steps % 17 == 0:
            raise RuntimeError("now")
        return self.returns((self.obs(), 1.0, bool(self.np_random.random() < 0.05), False, {}))

    def obs(self) -> Any:
        return self.np_random.random(2)


def wrapped(env: gymnasium.Env, limit: int) -> gymnasium.Env:
    return TimeLimit(OrderEnforcing(PassiveEnvChecker(env)), limit)


OFTEN = jaxvec.Restart(rate=None, max_restarts=None)
POOLS = {
    "same step": {},
    "next step": {"autoreset_mode": "NEXT_STEP"},
    "envs that raise": {"fails": True, "on_fault": OFTEN},
    "envs built anew": {"fails": True, "on_fault": replace(OFTEN, retry="rebuild")},
    "spare envs": {"spare_envs": 2},
    "steps that return a list": {"returns": list},
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_wrappers_that_are_passed_by_are_as_if_they_had_been_called(options, make):
    def env_fn(fails: bool = False, returns: type = tuple) -> gymnasium.Env:
        env = Counting(fails, returns)  # Gymnasium's checker wants tuples
        return TimeLimit(wrapped(env, 11) if returns is tuple else TimeLimit(env, 11), 9)

    pools = [
        make(env_fn, 3, num_workers=1, wrapper_bypass=see_through, **options) for see_through in (True, False)
    ]
    steps = [[envs.reset(seed=1)] for envs in pools]
    for number in range(80):
        if number in (25, 50):  # the inner limit is the first to be reached, and then the outer one again
            for envs in pools:
                envs.map(
                    lambda env, most: setattr(env.env, "_max_episode_steps", most), {25: 5, 50: 11}[number]
                )
        if number == 50:
            for envs in pools:
                envs.set_attr("_max_episode_steps", 6)
                envs.reset(mask=[False, True, False])
        for envs, seen in zip(pools, steps, strict=True):
            seen += [envs.step(np.ones(3, int)), envs.call("_elapsed_steps"), envs.infos()]
    np.testing.assert_equal(*steps)


def test_first_steps_go_through_all_wrappers():
    env = wrapped(gymnasium.make("CartPole-v1").unwrapped, 500)
    targets = WrapperBypass([env], bypass=True)
    assert not env.get_wrapper_attr("has_reset")
    looks = (
        2 if hasattr(env.env.env, "checked_data_reuse") else 1
    )  # older checkers look at the first step only
    for step in range(looks):
        targets.update()
        assert targets.envs == [env]
        if not step:
            env.reset(seed=0)
        env.step(0)
    targets.update()
    assert targets.envs == [env.unwrapped]
    assert targets.limits == [(vars(env),)]


def test_an_env_that_goes_on_from_a_state_is_passed_by_as_before():
    env = wrapped(gymnasium.make("CartPole-v1").unwrapped, 500)
    targets = WrapperBypass([env], bypass=True)
    env.reset(seed=0)
    for _ in range(2):
        env.step(0)
    targets.update()
    targets.note_restore(0, env)
    assert targets.envs == [env.unwrapped]
    for wrapper, name, value in ((env, "_elapsed_steps", None), (env.env, "_has_reset", False)):
        before = getattr(wrapper, name)
        setattr(wrapper, name, value)  # as it was before the first reset
        targets.note_restore(0, env)
        targets.update()
        assert targets.envs == [env]
        setattr(wrapper, name, before)
        targets.update()
        assert targets.envs == [env.unwrapped]


def test_wrappers_count_on_from_states_as_if_they_had_been_called(make):
    pools = [
        make(lambda: wrapped(Counting(), 9), 2, num_workers=1, states=99, wrapper_bypass=see_through)
        for see_through in (True, False)
    ]
    told: list[list[Any]] = [[], []]
    for envs, mine in zip(pools, told, strict=True):
        states = [envs.save()]  # of envs that were never reset
        mine.append(envs.reset(seed=1))
        for number in range(60):
            if number % 7 == 3:
                states.append(envs.save())
            if number % 4 == 2:
                chosen = number % len(states)
                mine.append(envs.restore(states[chosen]))
                mine.append([envs.get_attr(name) for name in ("has_reset", "_elapsed_steps")])
                if not chosen:
                    mine.append(envs.reset(seed=number))
            mine += [envs.step(np.ones(2, int)), envs.get_attr("_elapsed_steps"), envs.get_attr("has_reset")]
    np.testing.assert_equal(*told)


def test_the_warnings_of_a_checker_are_given(make):
    class Outside(Counting):
        observation_space = spaces.Box(0, 1, (2,), np.float64)

        def obs(self) -> Any:
            return np.full(2, 5.0)

    envs = make(lambda: wrapped(Outside(), 9), 1, backend="serial")
    with pytest.warns(UserWarning, match="reset.* is not within the observation space"):
        envs.reset(seed=0)
    with pytest.warns(UserWarning, match="step.* is not within the observation space"):
        envs.step(np.zeros(1, int))


class Subclass(TimeLimit):
    pass


def on_instance(env: gymnasium.Env) -> gymnasium.Env:
    env.step = env.step
    return env


OPAQUE = {
    "a subclass": lambda env: Subclass(env, 9),
    "another wrapper": gymnasium.wrappers.RecordEpisodeStatistics,
    "a method of the instance": lambda env: on_instance(OrderEnforcing(env)),
}


@pytest.mark.parametrize("wrap", OPAQUE.values(), ids=OPAQUE)
def test_what_may_do_more_is_called(wrap):
    opaque = wrap(TimeLimit(Counting(), 9))
    env = TimeLimit(OrderEnforcing(opaque), 7)
    env.reset(seed=0)
    targets = WrapperBypass([env], bypass=True)
    targets.update()
    assert targets.envs == [opaque]
    assert targets.limits == [(vars(env),)]


def test_a_wrapper_that_somebody_has_changed_is_called(monkeypatch):
    env = OrderEnforcing(TimeLimit(Counting(), 9))
    env.reset(seed=0)
    monkeypatch.setattr(TimeLimit, "step", lambda *_: None)
    targets = WrapperBypass([env], bypass=True)
    targets.update()
    assert targets.envs == [env.env]
