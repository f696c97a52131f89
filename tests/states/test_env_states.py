"""The state of an env as a value: an env that is put back time and again does what another one does."""

import copy
import enum
import itertools
import mmap
import random
import socket
import threading
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.utils import EzPickle
from support.env_states import assert_equal, assert_goes_on, copied
from support.probe import NODES, StatefulEnv, _native, difference, prove

import jaxvec
from jaxvec.adapters.replay import ReplayEnv

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("Acrobot-v1", 1),
        ("CartPole-v1", 20),
        ("MountainCar-v0", 3),
        ("MountainCarContinuous-v0", 0),
        ("Pendulum-v1", 3),
        ("Blackjack-v1", 300),
        ("CliffWalking-v1", 0),
        ("FrozenLake-v1", 30),
        ("Taxi-v4", 3),
    ],
)
def test_gymnasiums_own(name, ends):
    assert_goes_on(partial(gymnasium.make, name), ends=ends)


def test_wrappers_with_states_of_their_own():
    def wrapped():
        env = wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1", max_episode_steps=30))
        env = wrappers.NormalizeReward(wrappers.NormalizeObservation(env))
        return wrappers.FrameStackObservation(wrappers.DelayObservation(env, 2), 3)

    class Timeless(gymnasium.Wrapper):
        def step(self, action):
            *rest, info = self.env.step(action)
            info.get("episode", {}).pop("t", None)
            return *rest, info

    assert_goes_on(lambda: Timeless(wrapped()), ends=20)


class Seldom(gymnasium.Env):
    """Does with its `held` what `change` does, but so seldom that no proof sees it."""

    observation_space = spaces.Box(-np.inf, np.inf, (9,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, make, change, show=np.array):
        self.make, self.change, self.show = make, change, show

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.held = self.make()
        self.steps = 0
        return self.show(self.held), {}

    def step(self, action):
        self.steps += 1
        if self.steps % 100 == 0:
            self.held = self.change(self.held)
        return self.show(self.held), 0.0, False, False, {}


def locked():
    array = np.zeros(9)
    array.flags.writeable = False
    return array


def first_to_last(held):
    first = next(iter(held))
    held[first] = held.pop(first)
    return held


def negated(held):
    held[:] = [-number for number in held]
    return held


@pytest.mark.parametrize(
    ("make", "change"),
    [
        pytest.param(lambda: [0.0] * 9, negated, id="zeros of another sign"),
        pytest.param(lambda: dict.fromkeys(range(9), 0), first_to_last, id="another order"),
    ],
)
def test_a_large_container_that_is_equal_may_differ(make, change):
    stateful = StatefulEnv(Seldom(make, change, lambda held: np.array(list(held))))
    env = stateful.env
    prove(stateful, fresh=True)
    first, _ = env.reset()
    before = stateful.save()
    for _ in range(100):
        last, *_ = env.step(0)
    after = stateful.save()
    assert first.tobytes() != last.tobytes()
    for state, expected in [(before, first), (after, last), (before, first)]:
        stateful.restore(state)
        assert env.step(0)[0].tobytes() == expected.astype(first.dtype).tobytes()


class Packed(gymnasium.Env):
    """Observations are memory that is not NumPy's, each its own."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), 0.0, self.steps == 9, False, {}

    def _observe(self):
        memory = mmap.mmap(-1, 16)
        memory.write(np.array([self.steps, self.np_random.random()]).tobytes())
        return np.frombuffer(memory)


def test_memory_that_was_several_arrays_and_is_one():
    """A reset fills the frames with one array."""
    assert_goes_on(lambda: wrappers.FrameStackObservation(Packed(), 4), ends=30)


class Odd(gymnasium.Env):
    """Changes its attributes in each step, mostly as envs do, else in all ways that are not ordinary."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    random = random.Random(0)  # of the class, so it is no part of the state

    def __init__(self, seed):
        self.kept, self.dtype, self.space = Kept.MEMBER, np.dtype(float), spaces.Box(-1, 1, (2,))
        self.generator, self.another = np.random.default_rng(seed), np.random.default_rng(seed)
        self.change()

    def change(self):
        self.number, self.name = self.random.random(), "a"
        self.pair = (1, self.number)
        self.array, self.frame = np.full(3, self.number), np.zeros((2, 2), np.uint8)

    def step(self, action):
        self.frame[0] = self.generator.integers(9)
        if self.random.random() < 0.6:
            self.change()
        if self.random.random() < 0.4:
            name, make = self.random.choice(ODDITIES)
            vars(self)[name] = make(self)
        if self.random.random() < 0.05:
            vars(self).pop(self.random.choice(["name", "pair", "number", "more"]), None)
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Kept(enum.Enum):
    MEMBER = 1


ODDITIES = [
    *(("number", lambda env, one=one: one) for one in (1, True, 1.0, -0.0, np.float64(1), None, "1", [1])),
    *(("pair", lambda env, one=one: one) for one in ((), (1, (2, 3)), ([1],), [1, 2], None)),
    ("array", lambda env: env.frame[:1]),
    ("array", lambda env: env.frame.reshape(-1)),
    ("array", lambda env: locked()),
    ("array", lambda env: np.frombuffer(mmap.mmap(-1, 16))),
    ("array", lambda env: np.asfortranarray(np.ones((2, 3), ">f4"))),
    ("array", lambda env: np.float32(1)),
    ("array", lambda env: env.frame),
    ("generator", lambda env: env.another),
    ("generator", lambda env: np.random.Generator(env.another.bit_generator)),
    ("generator", lambda env: np.random.Generator(np.random.Philox(3))),
    ("generator", lambda env: np.random.default_rng(7)),
    ("name", lambda env: str(len(env.generator.spawn(2)))),
    ("generator", lambda env: env.generator.spawn(1)[0]),
    ("generator", lambda env: np.random.Generator(env.generator.spawn(1)[0].bit_generator)),
    ("another", lambda env: env.np_random),
    ("another", lambda env: np.random.default_rng(9)),
    ("name", lambda env: env.space.sample() is None),
    ("space", lambda env: spaces.Box(-1, 1, (2,))),
    ("space", lambda env: spaces.Box(-2, 1, (2,))),
    ("metadata", lambda env: {}),
    ("dtype", lambda env: np.dtype(np.int8)),
    ("more", lambda env: env.frame),
]


def assert_same_state(one, other):
    """Compares what was taken; atoms may be among the nodes, and the counts include what is not taken."""
    assert difference(*([fields[0] | fields[1] for fields in state.layers] for state in (one, other))) is None


@pytest.mark.skipif(_native.ext is None, reason="not compiled")
def test_what_is_taken_again_is_what_a_walk_takes():
    """C++ takes and puts what it can; what it leaves and what it does are both as if there were none."""
    counts = Counter()
    for seed in range(40):
        Odd.random.seed(seed)
        env = wrappers.OrderEnforcing(wrappers.TimeLimit(Odd(seed), 99))
        again, walk = StatefulEnv(env), StatefulEnv(env)
        walk._compiled = None
        save_changes, restore_changes = (
            partial(function, again._layers, again._classes)
            for function in (_native.ext.save_changes, _native.ext.restore_changes)
        )
        env.unwrapped.reset(seed=seed)
        kept = []
        for _ in range(40):
            env.unwrapped.step(0)
            latest = again._latest
            counts["taken", bool(latest) and save_changes(latest, NODES) is not None] += 1
            states = [again.save(), walk.save()]
            assert_same_state(*states)
            kept = [*kept, states[seed % 2]][-3:]
            if Odd.random.random() < 0.4:
                state = Odd.random.choice(kept)
                done = restore_changes(state.layers, NODES)
                counts["put", done] += 1
                if not done:
                    assert_same_state(walk.save(), states[1])  # nothing was done
                    again.restore(state)
                assert_same_state(walk.save(), state)
                walk.restore(state)
                assert_same_state(again.save(), state)
    assert min(counts[key] for key in itertools.product(("taken", "put"), (True, False))) > 50, counts


class Constructed(EzPickle, gymnasium.Wrapper):
    """Copies and pickles as a new one, without its state; so does what is in it."""

    class Part(EzPickle):
        def __init__(self):
            EzPickle.__init__(self)
            self.total = 0

    def __init__(self):
        EzPickle.__init__(self)
        gymnasium.Wrapper.__init__(self, gymnasium.make("CartPole-v1"))
        self.part = self.Part()
        self.steps = 0

    def step(self, action):
        self.steps += 1
        self.part.total += self.steps
        obs, *rest, info = self.env.step(action)
        return obs, *rest, info | {"steps": self.steps, "total": self.part.total}


def test_what_copies_without_its_state():
    assert_goes_on(Constructed)
    env = Constructed()
    env.reset()
    env.step(0)
    assert copy.deepcopy(env).steps == 0


_COUNTERS = weakref.WeakKeyDictionary()


class Hidden(gymnasium.Env):
    """Counts its steps where Python's attributes don't show it."""

    observation_space = spaces.Discrete(99)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.last = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        self.last = next(_COUNTERS.setdefault(self, itertools.count()))
        return self.last % 7, 0.0, False, False, {}


class Tells(Hidden):
    """Says its state, which is in no attribute."""

    def get_state(self):
        return self.last

    def set_state(self, state):
        _COUNTERS[self] = itertools.count(state + 1)


def test_an_env_may_say_its_state_itself():
    assert_goes_on(Tells, ends=0, pickled=False)


def test_what_is_not_in_attributes_is_seen():
    env = wrappers.TimeLimit(Hidden(), 9)
    with pytest.raises(
        jaxvec.EnvStateError,
        match=r"Restoring Hidden did not .* after 1 identical actions, obs differs; attribute Hidden.last",
    ):
        prove(StatefulEnv(env), fresh=True)

    class Global(Hidden):
        def step(self, action):
            return random.randrange(50), 0.0, False, False, {}

    with pytest.raises(jaxvec.EnvStateError, match=r"(?s)obs differs.* global .* generator"):
        prove(StatefulEnv(Global()), fresh=True)


class Odometer:
    """Pickles and copies as a new one, which is no loss before its first step."""

    def __init__(self):
        self.count = 0

    def __reduce__(self):
        return Odometer, ()


@pytest.mark.parametrize("fresh", [True, False])
def test_what_is_lost_only_later_in_an_episode_is_seen(fresh):
    class Lossy(Hidden):
        def reset(self, **kwargs):
            self.odometer = Odometer()
            return super().reset(**kwargs)

        def step(self, action):
            self.odometer.count += 1
            return self.odometer.count, 0.0, self.odometer.count > 30, False, {}

    env = Lossy()
    if not fresh:
        env.reset(seed=0)
        with pytest.raises(
            jaxvec.EnvStateError, match=r"Lossy.odometer is a .*copy exactly.*trust=\[Odometer\]"
        ):
            StatefulEnv(env).save()
    stateful = StatefulEnv(env, trust=(Odometer,))
    with pytest.raises(jaxvec.EnvStateError, match=r"Restoring Lossy did not reproduce it: .*, obs differs"):
        prove(stateful, fresh=fresh)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Path(__file__).open(), "an open file"),  # noqa: SIM115
        (lambda: socket.socket(), "a socket"),
        (lambda: (number for number in range(3)), "a generator"),
        (lambda: threading.Thread(), "a thread"),
    ],
)
def test_what_is_no_value_is_named(make, what):
    env = wrappers.TimeLimit(Hidden(), 9)
    held = make()
    env.unwrapped.parts = {"held": [held]}
    with pytest.raises(
        jaxvec.EnvStateError,
        match=rf"cannot save Hidden: attribute Hidden.parts\['held'\]\[0\] is {what}.* States\(functions=",
    ):
        StatefulEnv(env).save()
    if hasattr(held, "close"):
        held.close()


class Later(Hidden):
    pass


def test_a_state_is_refused_after_a_change_of_class():
    env = Hidden()
    stateful = StatefulEnv(env)
    states = [stateful.save(), stateful.save()]
    env.__class__ = Later
    states.append(stateful.save())
    stateful.restore(states[-1])
    with pytest.raises(jaxvec.EnvStateError, match="cannot restore a state of .*Hidden into .*Later"):
        stateful.restore(states[0])


class Listed(list, gymnasium.Env):
    pass


def test_an_env_that_extends_a_list_is_refused():
    with pytest.raises(jaxvec.EnvStateError, match="cannot save Listed: .*memory in C"):
        StatefulEnv(Listed()).save()


def test_wrappers_and_their_records_are_restored():
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    stateful, names = StatefulEnv(env), ("TimeLimit", "OrderEnforcing", "PassiveEnvChecker")
    layers = [env, env.env, env.env.env]
    assert [type(layer).__name__ for layer in layers] == [*names]
    states = [stateful.save() for _ in range(2)]  # the second one is taken in C++
    for state in states:
        for layer in layers:
            layer._saved_kwargs["more"], layer.more = 3, 3
        env.unwrapped.spec.kwargs["more"], env.unwrapped.spec.reward_threshold = 3, 3.0
        assert env.spec.reward_threshold == 3.0
        stateful.restore(state)
        for layer in layers:
            assert "more" not in layer._saved_kwargs | vars(layer)
            assert layer._cached_spec is None
        spec = env.unwrapped.spec
        assert (spec.kwargs, spec.reward_threshold) == ({}, 475.0)


@pytest.mark.parametrize("held", [gymnasium.Env.step, copy.deepcopy], ids=["method", "function"])
def test_a_function_of_a_module_stays_itself(held):
    env = Hidden()
    env.held, stateful = held, StatefulEnv(env)
    state = stateful.save()
    for each in (state, copied(state)):
        env.held = None
        stateful.restore(each)
        assert env.held is held


def test_a_wrapper_may_come_in_between():
    env = gymnasium.make("CartPole-v1")
    stateful = StatefulEnv(env)
    env.reset(seed=0)
    before = stateful.save()
    env.env = wrappers.TransformReward(env.env, lambda reward: reward + 1)
    env.env.bonus = [3]
    state = stateful.save()
    env.env.bonus[0] = 4
    stateful.restore(state)
    assert env.env.bonus == [3]
    with pytest.raises(jaxvec.EnvStateError, match="cannot restore a state of .* into "):
        stateful.restore(before)


def test_a_replayed_env():
    assert_goes_on(lambda: ReplayEnv(gymnasium.make("CartPole-v1")), ends=20)
    assert_goes_on(lambda: ReplayEnv(lambda: gymnasium.make("FrozenLake-v1")), ends=20)


def test_a_replayed_env_may_change_its_actions():
    class Doubling(gymnasium.Wrapper):
        def step(self, action):
            action *= 2
            return self.env.step(action)

    env = ReplayEnv(Doubling(gymnasium.make("Pendulum-v1")))
    env.reset(seed=0)
    env.step(np.full(1, 0.3, np.float32))
    state = env.get_state()
    expected = env.step(np.full(1, 0.3, np.float32))
    env.set_state(state)
    assert_equal(env.step(np.full(1, 0.3, np.float32)), expected)


# --- Envs with their state in a C library ---------------------------------------------------------------
