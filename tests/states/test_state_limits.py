"""Limits and failures of saved states, and checkpoints."""

from __future__ import annotations

import enum
import importlib
import os
import pickle
import queue
import random
import threading
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from support import probe
from support.disasters import PATIENCE, GatedEnv
from support.probe import pool_of, unpack
from test_states import ACTIONS, counting, equal, pool  # noqa: F401

import jaxvec
from jaxvec.testing import CountingEnv

# --- bounds and failures ----------------------------------------------------------------------


def test_as_many_are_kept_as_was_said(make, backend):
    envs = make("CartPole-v1", 4, states=6, backend=backend)
    envs.reset(seed=0)
    assert envs.stats().states == 0
    old, new = envs.save(), envs.save()
    stats = envs.stats()
    assert stats.states == 6
    assert stats.total.state_bytes > 0
    assert stats.state_row_bytes > 0
    with pytest.raises(jaxvec.StaleStateError, match="state 0 is gone: pool .* keeps 6"):
        envs.restore(old)
    envs.restore(jaxvec.EnvState(np.concatenate([old.ids[2:], new.ids[:2]])))
    for _ in range(5):
        envs.save()
    envs.map(lambda env: None)
    assert envs.stats().total.state_bytes <= 2 * stats.total.state_bytes
    with pytest.raises(ValueError, match="8 states at once, because pool .* keeps 6; make it with states=8"):
        envs.simulate(jaxvec.EnvState(np.tile(envs.save().ids, (2, 1))), [0] * 8)


def test_memory_of_states_is_taken_when_it_is_used(make):
    before = psutil.Process().memory_info().rss
    envs = make(CountingEnv, 2, states=10**8, backend="serial")
    start = envs.reset(seed=0)
    states = [envs.save() for _ in range(3)]
    envs.step([1, 2])
    equal(envs.restore(states[0]), start)
    assert envs.stats().states == 6
    assert psutil.Process().memory_info().rss - before < 200 * 1024**2


@pytest.mark.parametrize("states", [10**15, 10**30])
def test_more_states_than_memory_are_refused(states):
    with pytest.raises(ValueError, match=f"can't keep {states} states.* keep fewer"):
        jaxvec.make(CountingEnv, 2, states=states, backend="serial")


def test_a_pool_without_states_says_what_to_write(make):
    envs = make("CartPole-v1", 2, backend="serial")
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"save: pool \d+ keeps no states; make it with states=n"):
        envs.save()
    with pytest.raises(ValueError, match=r"restore: pool \d+ keeps no states; make it with"):
        envs.restore(jaxvec.EnvState(np.full((2, 3), pool_of(envs).id, np.uint32)))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"states": 5, "spare_envs": 1}, ValueError, "spare_envs"),
        ({"states": 5, "envs_per_instance": 2}, ValueError, "batched env"),
    ],
)
def test_options_that_do_not_go_together(options, error, match):
    with pytest.raises(error, match=match):
        jaxvec.make("CartPole-v1", 2, **options)


def test_what_is_no_state_is_refused(make):
    envs = make("CartPole-v1", 2, states=4, backend="serial")
    handle, _ = jaxvec.reset(envs, seed=0)
    for wrong in (3, np.zeros((2, 3), np.uint32)):
        with pytest.raises(TypeError, match="an EnvState from save or simulate"):
            envs.restore(wrong)
        with pytest.raises(TypeError, match="an EnvState from save or simulate"):
            jaxvec.restore(handle, wrong)
        with pytest.raises(TypeError, match="an EnvState from save or simulate"):
            jaxvec.simulate(envs, wrong, [0, 0])
    one = envs.save()[:1]
    for verb in (envs.restore, lambda state: jaxvec.restore(handle, state)):
        with pytest.raises(
            ValueError, match=r"expected one for each of 2 envs.* got uint32 of shape \(1, 3\)"
        ):
            verb(one)
    with pytest.raises(TypeError, match="takes the pool"):
        jaxvec.simulate("CartPole-v1", one, [0])


class Fragile(CountingEnv):
    """Raises at action 9, and dies at 8."""

    def step(self, action):
        if action == 9:
            raise RuntimeError("fragile")
        if action == 8:
            import os

            os._exit(3)
        return super().step(action)


def test_an_env_that_fails_in_simulate_breaks_nothing(make, backend):
    envs = make(Fragile, 3, states=9, backend=backend)
    envs.reset(seed=0)
    state = envs.save()
    with pytest.raises(
        jaxvec.EnvError, match="env 1.* raised RuntimeError in simulate with action .*: fragile"
    ):
        envs.simulate(state, [0, 9, 0])
    _, timestep = envs.simulate(state, [1, 2, 3])
    np.testing.assert_array_equal(timestep.obs[:, 3], [1, 2, 3])
    np.testing.assert_array_equal(envs.step([4, 5, 6]).obs, [[1, 1, 1, 4], [1, 1, 1, 5], [1, 1, 1, 6]])


@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
@pytest.mark.parametrize("error", [jaxvec.EnvError, jaxvec.StaleHandleError], ids=["simulate", "get_attr"])
def test_errors_of_programs_with_only_pure_calls_are_typed(no_jax_log, transport, error):
    with pytest.raises(error) as caught:
        with jaxvec.config.override(transport=transport), jaxvec.make(Fragile, 2, states=9) as envs:
            handle, _ = jaxvec.reset(envs, seed=0)
            handle, state = jaxvec.save(handle)
            if error is jaxvec.EnvError:
                run = jax.jit(lambda action: jaxvec.simulate(envs, state, action)[1].reward)
            else:
                run = jax.jit(lambda action: jaxvec.get_attr(handle, "resets", int) + action)
            for _ in range(3):  # JAX may dispatch later runs in another way than the first
                jax.block_until_ready(run(jnp.zeros(2, int)))
            envs.step([0, 0])  # makes the handle stale
            jax.block_until_ready(run(jnp.array([0, 9])))
    assert isinstance(caught.value.__context__, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_a_worker_that_dies_in_simulate_is_a_worker_that_died(make, on_fault):
    envs = make(Fragile, 4, num_workers=2, states=20, on_fault=on_fault)
    envs.reset()
    envs.step(np.zeros(4, int))
    state = envs.save()
    with pytest.raises(
        jaxvec.WorkerDiedError, match=r"\(envs 2, 3\) exited with code 3 while simulating env 3\."
    ):
        envs.simulate(state, np.array([0, 0, 0, 8]))
    if on_fault == "raise":
        with pytest.raises(jaxvec.PoolBrokenError, match="while simulating env 3"):
            envs.step(np.zeros(4, int))
        return
    assert envs.simulate(state[:2], np.zeros(2, int))[1].obs[:, 1].tolist() == [2, 2]  # the other worker's
    with pytest.raises(
        jaxvec.StaleStateError, match="2 of these states are lost, because their worker was replaced"
    ):
        envs.simulate(state, np.zeros(4, int))
    after = envs.step(np.zeros(4, int))
    assert after.info["fault"].tolist() == [False, False, True, True]
    assert after.obs[:2, 1].tolist() == [2, 2]


def test_a_simulation_that_hangs_names_the_env(make, tmp_path):
    envs = make(GatedEnv, 4, gate=tmp_path / "never", num_workers=2, states=20, on_fault="restart")
    envs.reset()
    state = envs.save()
    envs.simulate(state, np.zeros(4, int))  # what a worker imports for it is not in its time below
    probe.set_timeouts(envs, PATIENCE, PATIENCE, 1)
    with pytest.raises(
        jaxvec.EnvTimeoutError, match=r"simulate timed out .* env 3 \(worker 1, simulating\)"
    ) as caught:
        envs.simulate(state, np.array([0, 0, 0, 7]))
    assert caught.value.env_ids == (3,)
    probe.set_timeouts(envs, PATIENCE, PATIENCE, PATIENCE)
    assert envs.step(np.zeros(4, int)).info["fault"].tolist() == [False, False, True, True]


class Frail(CountingEnv):
    """Fails as it was told, as often, when its state is taken or put back."""

    fails = "", "", 0

    def tell(self, *how):
        self.fails = how

    def get_state(self):
        self._fail("save")

    def set_state(self, state):
        self._fail("restore")

    def _fail(self, verb):
        when, how, times = self.fails
        if when != verb or not times:
            return
        self.fails = when, how, times - 1
        if how == "dies":
            import os

            os._exit(3)
        raise ValueError("frail")


@pytest.mark.parametrize("on_fault", ["raise", "restart"])
@pytest.mark.parametrize("verb", ["save", "restore"])
def test_worker_death_during_save_or_restore_is_worker_died_error(make, verb, on_fault):
    envs = make(Frail, 4, num_workers=2, states=20, on_fault=on_fault)
    envs.reset()
    state = envs.save()
    envs.step(np.zeros(4, int))
    envs.call("tell", verb, "dies", 1, indices=3)
    doing = {"save": "saving", "restore": "restoring"}[verb]
    what = rf"worker 1 \(envs 2, 3\) exited with code 3 while {doing} env 3\."
    with pytest.raises(jaxvec.WorkerDiedError, match=what):
        envs.save() if verb == "save" else envs.restore(state)
    if on_fault == "raise" or verb == "restore":
        with pytest.raises(jaxvec.PoolBrokenError, match=what):
            envs.step(np.zeros(4, int))
        return
    after = envs.step(np.zeros(4, int))
    assert after.info["fault"].tolist() == [False, False, True, True]
    assert after.obs[:, 1].tolist() == [2, 2, 0, 0]
    envs.restore(envs.save())


def test_failed_save_or_restore_is_retried_once(make):
    envs = make(Frail, 4, num_workers=2, states=20)
    envs.reset()
    states = [envs.save()]
    envs.step(np.zeros(4, int))
    envs.call("tell", "save", "raises", 1, indices=2)
    states.append(envs.save())
    envs.call("tell", "save", "raises", 2, indices=2)
    with pytest.raises(jaxvec.EnvError, match="env 2 .*raised ValueError in save: frail"):
        envs.save()
    states.append(envs.save())
    envs.step(np.zeros(4, int))
    for state, steps in zip(states, (0, 1, 1), strict=True):
        envs.call("tell", "restore", "raises", 1, indices=3)
        assert envs.restore(state).obs[:, 1].tolist() == [steps] * 4
        assert envs.step(np.zeros(4, int)).obs[:, 1].tolist() == [steps + 1] * 4
    envs.call("tell", "restore", "raises", 2, indices=2)
    with pytest.raises(jaxvec.EnvError, match="env 2 .*raised ValueError in restore: frail"):
        envs.restore(states[0])
    with pytest.raises(jaxvec.PoolBrokenError, match="raised ValueError in restore"):
        envs.save()


class Forgetful(CountingEnv):
    """Has random numbers of Python's one generator, which is not the env's."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, random.random(), *rest


def test_the_first_save_proves_that_states_are_kept(make, backend):
    envs = make([counting, lambda i: Forgetful(4)], states=9, backend=backend, num_workers=1)
    envs.reset(seed=0)
    assert envs.save(indices=[0]).ids.shape == (1, 3)
    with pytest.raises(jaxvec.EnvStateError, match="save of env 1") as caught:
        envs.save()
    assert caught.value.env_id == 1
    envs.step([0, 0])


class Locked:
    """Can be copied, but not pickled."""

    def __init__(self):
        lock = threading.Lock()
        self.again = lambda: (lock, self)[1]

    def __reduce__(self):
        return self.again, ()


def test_a_state_that_can_not_leave_its_process_says_so(make):
    class Keeps(CountingEnv):
        def reset(self, **kwargs):
            self.held = Locked()
            return super().reset(**kwargs)

    envs = make(Keeps, 2, states=jaxvec.States(max=4, trust=[Locked]), num_workers=2)
    envs.reset(seed=0)
    state = envs.save()
    envs.restore(state)
    with pytest.raises(jaxvec.EnvStateError, match=r"can't be pickled, .* '_thread.lock'.*; pass States\("):
        envs.restore(state[::-1])
    envs.step([0, 0])


class Speed(enum.Enum):
    """Its members can be copied, but are pickled wrongly."""

    SLOW = 1
    FAST = 2

    def __reduce_ex__(self, protocol):
        return Speed, (1,)


class Moves(CountingEnv):
    def reset(self, **kwargs):
        self.speed = Speed.SLOW
        return super().reset(**kwargs)

    def step(self, action):
        self.speed = Speed.FAST if self.speed is Speed.SLOW else Speed.SLOW
        obs, reward, *rest = super().step(action)
        return obs, reward * self.speed.value, *rest


def test_a_state_whose_pickled_copy_differs_is_refused_elsewhere(make, backend):
    options = {"backend": backend} if backend == "serial" else {"num_workers": 2}
    envs = make(Moves, 2, states=8, **options)
    jaxvec.reset(envs, seed=0)
    envs.step([1, 1])
    states = envs.save()
    assert envs.restore(states).reward.tolist() == [2, 2]
    # In another worker, another env's state is a pickled copy.
    attempts = [envs.pack_states, lambda: envs.restore(states[::-1])]
    for attempt in attempts if backend == "process" else attempts[:1]:
        with pytest.raises(
            jaxvec.EnvStateError, match=r"Moves from a pickled copy .*\n?.*get_state"
        ) as caught:
            attempt()
        assert caught.value.env_id == 0
    for step in (2, 3):
        assert envs.step([1, 1]).reward.tolist() == [step * (1 + step % 2)] * 2


def test_a_state_that_can_not_enter_a_process_says_so():
    with pytest.raises(
        jaxvec.EnvStateError, match=r"can't be unpickled in this .* No module named 'no_such'"
    ):
        unpack(pickle.dumps(Gone()))


class Gone:
    def __reduce__(self):
        return importlib.import_module, ("no_such",)


def test_functions_of_the_user_take_and_put_states(make, backend):
    def get_state(env):
        return env.unwrapped.np_random.bit_generator.state, env.unwrapped.count

    def set_state(env, state):
        env.unwrapped.np_random.bit_generator.state, env.unwrapped.count = state

    class Dice(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 1), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.count, self.lock = 0, __import__("threading").Lock()
            return self.observe(), {}

        def step(self, action):
            self.count += 1
            return self.observe(), float(self.count), self.count == 5, False, {}

        def observe(self):
            return self.np_random.random(1, np.float32)

    states = jaxvec.States(max=9, functions=(get_state, set_state))
    envs = make(lambda: TimeLimit(Dice(), 4), 4, states=states, backend=backend)
    envs.reset(seed=0)
    state = envs.save()
    first = [envs.step(action) for action in ACTIONS]
    envs.restore(state)
    equal([envs.step(action) for action in ACTIONS], first)


class Painter(gymnasium.Env):
    """Writes into the memory that it is lent."""

    observation_space, action_space = spaces.Box(-99, 99, (3,), np.float32), spaces.Discrete(2)
    lent = None

    def set_observation_buffer(self, buffer):
        self.lent = None if buffer is None else {"there": (buffer,)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = np.zeros(3)
        return self.paint(), {}

    def step(self, action):
        self.at += self.np_random.normal(size=3) + action
        return self.paint(), 1.0, bool(self.at[0] > 3), False, {}

    def paint(self):
        if self.lent is None:
            return self.at.astype(np.float32)
        (buffer,) = self.lent["there"]
        buffer[...] = self.at
        return buffer


@pytest.mark.filterwarnings("ignore:.*reuse.*:UserWarning")
def test_envs_that_write_in_place_keep_their_rows(make, backend):
    envs = make(Painter, 4, states=90, backend=backend)
    timestep = envs.reset(seed=0)
    before = envs.save()
    equal(envs.restore(before), timestep)  # the proof has left the rows alone
    first = [envs.step(action) for action in ACTIONS[:10]]
    after = envs.save()
    last = envs.step(ACTIONS[10])
    equal(envs.simulate(after, ACTIONS[10])[1], last)
    envs.restore(before[::-1])
    turned = [envs.step(action[::-1]) for action in ACTIONS[:10]]
    for one, other in zip(first, turned, strict=True):
        np.testing.assert_array_equal(one.obs, other.obs[::-1])
        np.testing.assert_array_equal(one.info["final_obs"], other.info["final_obs"][::-1])
    assert all(envs.map(lambda env: env.lent is not None))


def test_an_env_may_change_the_info_that_it_returned(make, backend):
    class Marking(CountingEnv):
        last = {}

        def step(self, action):
            self.last["old"] = True
            *rest, self.last = super().step(action)
            return *rest, self.last

    envs = make(Marking, 2, states=4, backend=backend)
    envs.reset(seed=0)
    envs.step([0, 0])
    state = envs.save()  # the first proves that states are kept, by steps
    assert envs.infos() == ({"steps": 1},) * 2
    envs.step([0, 0])
    for _ in range(2):
        envs.restore(state)
        assert envs.infos() == ({"steps": 1},) * 2
        envs.step([0, 0])


# --- checkpoints ------------------------------------------------------------------------------


def test_states_come_back_from_a_file(make, tmp_path):
    options = {"states": 8, "autoreset_mode": "NEXT_STEP"}
    envs = make("CartPole-v1", 4, num_workers=2, **options)
    envs.reset(seed=0)
    for action in ACTIONS[:12]:
        timestep = envs.step(action)
    envs.save_states(tmp_path / "states")
    first = [envs.step(action) for action in ACTIONS]
    other = make("CartPole-v1", 4, backend="serial", **options)
    equal(other.restore(other.load_states(tmp_path / "states")), timestep)
    equal([other.step(action) for action in ACTIONS], first)
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


def test_other_files_are_refused(make, tmp_path):
    envs = make("CartPole-v1", 2, states=4, backend="serial")
    envs.reset(seed=0)
    envs.save_states(tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    file = tmp_path / "file"
    for data, match in {
        b"": "not a file or array of saved states",
        b"\x80\x05": "not a file or array of saved states",
        b"jaxvec states 9\nmore": "another version",
        good[:20]: "cut short",
        good[:-1]: "cut short or changed",
        good[:-9] + b"x" + good[-8:]: "cut short or changed",
    }.items():
        file.write_bytes(data)
        with pytest.raises(jaxvec.StateFileError, match=f"file: .*{match}"):
            envs.load_states(file)
    other = make("Acrobot-v1", 2, states=4, backend="serial")
    with pytest.raises(jaxvec.StateFileError, match="of envs with other spaces"):
        other.load_states(tmp_path / "good")
    with pytest.raises(jaxvec.StateFileError, match="the array: "):
        other.unpack_states(envs.pack_states())


class Other(CountingEnv):
    """Another class, with equal spaces."""


def limited():
    return gymnasium.wrappers.TimeLimit(CountingEnv(), 1000)


@pytest.mark.parametrize("saver", [CountingEnv, limited])
def test_files_of_envs_of_another_class_are_refused(make, backend, tmp_path, saver):
    envs = make(saver, 2, states=4, backend=backend)
    envs.reset(seed=0)
    envs.save_states(tmp_path / "file")
    other = make(Other, 2, states=9, backend=backend)
    other.reset(seed=0)
    mine = other.save()
    with pytest.raises(jaxvec.StateFileError, match=r"file: .*env 0.* state of .*CountingEnv into .*\.Other"):
        other.load_states(tmp_path / "file")
    with pytest.raises(jaxvec.StateFileError, match="the array: .*env 0.* state of"):
        other.unpack_states(envs.pack_states())
    other.step([1, 2])
    assert other.restore(mine).obs[:, 1].tolist() == [0, 0]


def test_files_keep_which_env_each_state_is_of(make, backend):
    envs = make([CountingEnv, Other], states=9, backend=backend)
    envs.reset(seed=0)
    envs.step([3, 4])
    data = envs.pack_states(envs.save()[1:])
    state = envs.unpack_states(data)
    assert envs.simulate(state, [5])[1].info["env_id"].tolist() == [1]
    assert envs.restore(state, indices=[1]).obs.tolist() == [[1, 1, 1, 4]]


def test_wrong_bytes_are_a_state_file_error(make):
    envs = make(CountingEnv, 2, states=4, backend="serial")
    envs.reset(seed=0)
    data = envs.pack_states()
    for wrong in (None, "text", b"bytes", 3, [300, -1], np.full(9, np.nan), object(), data[:60], data[::-1]):
        with pytest.raises(jaxvec.StateFileError, match="the array: "):
            envs.unpack_states(wrong)
    for good in (data, data.tobytes(), data.tolist(), data.astype(np.float32)):
        assert envs.restore(envs.unpack_states(good)).obs[:, 1].tolist() == [0, 0]


# --- The proof at the first save ------------------------------------------------------------------------


class Exits(gymnasium.Env):
    observation_space = action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        if action == 1:
            os._exit(3)
        return 0, 0.0, False, False, {}


@pytest.mark.filterwarnings("default:the states of env 0")
def test_an_env_that_ends_its_process_is_used_with_a_warning(make, capfd):
    envs = make(Exits, 2, num_workers=1, states=20)
    envs.reset(seed=0)
    state = envs.save()
    envs.step([0, 0])
    envs.restore(state)
    envs.close()
    warned = capfd.readouterr().err
    assert warned.count("the states of env 0 are used without a proof: ") == 1
    assert "the forked process that stepped the env ended with exit code 3" in warned


class AskingAThread(gymnasium.Env):
    """Steps in a thread of its own, which a forked copy of the process lacks."""

    observation_space = gymnasium.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    # Of the class, so that the attributes of the env can be copied; made in the worker.
    questions: ClassVar[Any] = None
    answers: ClassVar[Any] = None

    def __init__(self):
        self.count = 0
        if (kind := type(self)).questions is None:
            kind.questions, kind.answers = queue.Queue(), queue.Queue()
            threading.Thread(target=self._serve, name="simulation", daemon=True).start()

    @classmethod
    def _serve(cls):
        while True:
            cls.answers.put(cls.questions.get() + 1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.questions.put(self.count)
        self.count = self.answers.get()
        return np.full(1, self.count, np.float32), 0.0, False, False, {}


def test_an_env_that_needs_a_thread_is_refused_and_the_pool_goes_on(make):
    no_limit = jaxvec.Timeouts(step=None)
    envs = make(AskingAThread, 2, num_workers=1, states=4, timeouts=no_limit)
    envs.reset(seed=0)
    (pid,) = (worker.process.pid for worker in envs.stats().workers)
    with pytest.raises(
        jaxvec.EnvStateError, match=r"env 0.* no progress for \d+ s.* 1 more thread \(simulation\)"
    ):
        envs.save()
    assert not psutil.Process(pid).children()  # the forked copy was killed
    assert envs.step([0, 0]).obs.tolist() == [[1], [1]]


double = jax.jit(lambda x: 2 * x + 1)  # not in the env


class HoldsJaxArrays(CountingEnv):
    def reset(self, *, seed=None, options=None):
        self.x = jax.numpy.ones(3)
        self.key = jax.random.PRNGKey(seed or 0)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.key, key = jax.random.split(self.key)
        self.x = double(self.x) * jax.random.uniform(key)
        obs, _, *rest = super().step(action)
        return obs, float(self.x.sum()), *rest


def test_an_env_that_computes_with_jax_continues_exactly(make):
    """It can't be proved in a fork, which lacks the threads of JAX."""
    envs = make(HoldsJaxArrays, 2, num_workers=1, states=4)
    envs.reset(seed=0)
    envs.step([1, 1])
    states = envs.save()
    first = [envs.step([1, 1]).reward.tolist() for _ in range(5)]
    envs.restore(states)
    assert [envs.step([1, 1]).reward.tolist() for _ in range(5)] == first


class Jitting(CountingEnv):
    def __init__(self):
        super().__init__()
        self.jitted = jax.jit(lambda x: x + 1)


@pytest.mark.parametrize("trust", [[], [type(jax.jit(abs))]], ids=["not trusted", "trusted"])
def test_a_jitted_function_in_an_env_is_refused_with_advice(make, trust):
    envs = make(Jitting, 1, states=jaxvec.States(max=2, trust=trust))
    envs.reset()
    with pytest.raises(
        jaxvec.EnvStateError, match=r"Jitting\.jitted is .*\. Keep a function or device of JAX in a variable"
    ):
        envs.save()
