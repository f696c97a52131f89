"""`Workers(recycle=...)`: a fresh process takes the place of a worker, and no row is lost or wrong."""

from __future__ import annotations

import functools
import os
import signal
import threading
from contextlib import closing

import cloudpickle
import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from support import late_structures, probe
from support.disasters import Background, wait_until
from support.late_structures import KINDS, START, Late
from support.probe import StatefulEnv, pool_of
from support.recycling import (
    NUM_ENVS,
    NUM_STEPS,
    OFTEN,
    Opened,
    actions,
    assert_equal,
    check_rows,
    recycled,
    scan,
)
from support.state_game import Walk

import jaxvec
from jaxvec.compat.gymnasium import AsyncVectorEnv
from jaxvec.testing import CountingEnv

Recycle = jaxvec.Recycle
WAYS = [("native", "ffi"), ("native", "io_callback"), ("portable", "io_callback")]


def walk():
    return TimeLimit(Walk(), 7)


class Leaking(CountingEnv):
    """Keeps 1 MB more with each step, outside of its attributes."""

    def step(self, action):
        hoard = jaxvec.__dict__.setdefault("hoard", [])
        hoard.append(b"x" * 1_000_000)
        return super().step(action)


@pytest.fixture(params=WAYS, ids="-".join)
def way(request):
    dispatch, transport = request.param
    with jaxvec.config.override(dispatch=dispatch, transport=transport):
        yield request.param


def make(env, recycle, **options):
    return jaxvec.make(env, NUM_ENVS, num_workers=2, workers=jaxvec.Workers(recycle=recycle), **options)


# --- Envs with exact states -----------------------------------------------------------------------------


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "EPISODIC"])
@pytest.mark.parametrize("env", [walk, lambda: gymnasium.make("CartPole-v1", max_episode_steps=9)])
def test_recycling_in_a_compiled_loop_changes_no_bit(env, mode, way):
    chosen = actions(high=2)
    with make(env, None, autoreset_mode=mode) as envs:
        expected = scan(envs, chosen)
    often = Recycle(steps=4) if mode == "EPISODIC" else OFTEN  # each env has one episode there
    with make(env, often, autoreset_mode=mode) as envs:
        pids = probe.pids(envs)
        found = scan(envs, chosen)
        assert min(recycled(envs)) >= 1
        assert not {*pids} & {*probe.pids(envs)}
    assert_equal(found, expected)


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_recycling_in_first_ready_mode_changes_no_row(dispatch):
    def play(recycle):
        rows = []
        with jaxvec.config.override(dispatch=dispatch):
            envs = make(walk, recycle, batch_size=2, recv_order="sent", info={"luck": np.float32})
        with envs:
            handle, timestep = jaxvec.reset(envs, seed=3)
            for action in actions()[:, :2]:
                rows.append(jax.tree.map(np.asarray, timestep))
                handle, timestep = jaxvec.recv(jaxvec.send(handle, action, timestep.info["env_id"]))
            return rows, recycled(envs)

    expected, _ = play(None)
    found, times = play(OFTEN)
    assert min(times) >= 1
    assert_equal(found, expected)


def test_recycling_keeps_saved_states_infos_and_attributes():
    def play(recycle):
        with make(walk, recycle, states=20) as envs:
            rows = [envs.reset(seed=3)]
            for step, action in enumerate(actions()):
                if step == 8:
                    states = envs.save()
                    envs.set_attr("mark", [1, 2, 3, 4])
                if step == 30:
                    rows.append(envs.restore(states))
                rows.append(envs.step(action))
                rows.append([pool_of(envs).env_calls.infos(pool_of(envs).all)])
                if step >= 8:
                    rows.append(envs.get_attr("mark") if step < 30 else [])
            _, simulated = envs.simulate(states, actions()[0])
            return rows, simulated, recycled(envs) if recycle else [1]

    *expected, _ = play(None)
    *found, times = play(OFTEN)
    assert min(times) >= 1
    assert_equal(found, expected)


class Levels(gymnasium.Env):
    """Observes the level of its reset options, and the step of its episode, which has three."""

    observation_space = gymnasium.spaces.Box(-1, 1000, (2,), np.int32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level, self.count = (options or {}).get("level", -1), 0
        return np.array([self.level, 0], np.int32), {}

    def step(self, action):
        self.count += 1
        return np.array([self.level, self.count], np.int32), 0.0, self.count == 3, False, {}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_recycling_keeps_the_newest_reset_options(dispatch):
    levels = gymnasium.spaces.Dict(level=gymnasium.spaces.Discrete(1000))
    with jaxvec.config.override(dispatch=dispatch):
        envs = make(Levels, Recycle(steps=10), reset_options=levels)
    with envs:
        envs.reset(seed=0, options={"level": np.arange(4)})
        for step in range(1, 60):
            given = {"level": 10 * step + np.arange(4)}
            timestep = envs.step([0] * NUM_ENVS, reset_options=given)
            begun = 10 * (step - step % 3) + np.arange(4)
            assert (timestep.obs[:, 0] == begun).all(), step
            assert (timestep.obs[:, 1] == step % 3).all()
        assert min(recycled(envs)) >= 2


def test_recycling_keeps_python_objects_in_gymnasiums_api():
    class Speaking(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(20)
        action_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.said = "start"
            return self.said, {"said": [self.said]}

        def step(self, action):
            self.said = f"{self.said[-9:]}{action}"
            return self.said, 1.0, len(self.said) > 9, False, {"said": [self.said]}

    def play(recycle):
        workers = jaxvec.Workers(recycle=recycle)
        envs = AsyncVectorEnv([Speaking] * NUM_ENVS, num_workers=2, workers=workers)
        rows = [envs.reset(seed=0)]
        rows += [envs.step([f"{word}{env}" for env in range(NUM_ENVS)]) for word in range(40)]
        times = recycled(envs.pool)[0]
        envs.close()
        return rows, times

    expected, _ = play(None)
    found, times = play(OFTEN)
    assert times >= 1
    assert_equal(found, expected)


class Distance:
    """A class that is copied by its own protocol only."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Distance, (self.value,)


class Trusting(CountingEnv):
    def reset(self, **kwargs):
        self.distance = Distance(0)
        return super().reset(**kwargs)

    def step(self, action):
        self.distance = Distance(self.distance.value + int(action))
        obs, _, *rest = super().step(action)
        return obs, float(self.distance.value), *rest


def test_trusted_classes_move_to_the_new_process(caplog):
    with caplog.at_level("INFO", "jaxvec"):
        states = jaxvec.States(max=1, trust=[Distance])
        with make(Trusting, OFTEN, states=states) as envs:
            envs.reset(seed=0)
            for step in range(1, 40):
                assert (envs.step([1, 2, 3, 4]).reward == step * np.arange(1, 5)).all()
            assert min(recycled(envs)) >= 1
    assert any("continue in a fresh process" in message for message in caplog.messages)
    assert not any("not exact" in message for message in caplog.messages)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("limit", [{"memory": "120MB"}, {"descriptors": 1}])
def test_each_limit_replaces_the_workers(limit):
    with make(Leaking, Recycle(**limit)) as envs:
        envs.reset(seed=0)
        for number in range(1, 2000):
            timestep = envs.step([7] * NUM_ENVS)
            assert (timestep.obs == [1, number, number, 7]).all()
            if min(recycled(envs)) >= 2:
                break
        assert min(recycled(envs)) >= 2


def test_a_limit_below_a_new_process_is_warned_of_once_per_worker(caplog):
    with make(CountingEnv, Recycle(memory="1MB")) as envs:
        envs.reset(seed=0)
        for number in range(1, 2000):
            assert (envs.step([7] * NUM_ENVS).obs == [1, number, number, 7]).all()
            if min(recycled(envs)) >= 3:
                break
    workers = [f"worker {worker} (envs {2 * worker}, {2 * worker + 1})" for worker in range(2)]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(message.partition(" exceeds")[0] for message in warnings) == workers
    assert all("Raise the limit" in message for message in warnings)


def test_a_leak_stays_below_the_limit_of_memory():
    with make(Leaking, Recycle(memory="150MB", steps=100)) as envs:
        envs.reset(seed=0)
        for number in range(1, 251):
            timestep = envs.step([7] * NUM_ENVS)
            assert (timestep.obs == [1, number, number, 7]).all()
            # The first replacement also verifies the states, in a fork that shares the memory.
            found = [worker for worker in envs.stats().workers if worker.process and worker.recycled]
            assert all(worker.process.memory < 200e6 for worker in found)
        assert min(recycled(envs)) >= 4


# --- Objects that an env makes after the first replacement, which has verified states without them --------

# Kinds that move without a cut. The others may be cut, but none may be wrong, and none may end the pool.
EXACT = {
    *("closure", "function_of_the_env", "default_that_changes", "keyword_default_that_changes"),
    *("attribute_of_a_function", "one_generator_twice", "generators_of_python", "spawned_seeds"),
    *("weak_reference", "weak_proxy", "named_tuple_of_lists", "list_in_itself", "bound_method"),
    *("bound_method_of_the_env", "views_of_an_array", "memory_of_a_bytearray", "array_of_objects", "records"),
    *("lossy_getstate", "raising_setstate", "class_of_a_function", "class_with_a_list", "global_table"),
    *("containers_of_collections", "iterators", "partial_function", "mapping_proxy", "set_of_texts"),
    *("set_of_objects", "dict_by_objects", "frozen_dataclass", "special_floats", "space_with_a_generator"),
    *("lock", "env_in_a_dict", "exception", "slots"),
}
CUT = {"singleton", "module_of_the_old_process", "key_without_a_hash_elsewhere"}
DEADLY = "key_that_kills_elsewhere"


@pytest.fixture
def importable_kinds():
    """Workers import the kinds, as they do with modules of a user."""
    cloudpickle.unregister_pickle_by_value(late_structures)
    yield
    cloudpickle.register_pickle_by_value(late_structures)


def can_be_saved(kind):
    with closing(Late(kind)) as env:
        stateful = StatefulEnv(env)
        env.reset()
        for _ in range(START):
            env.step(0)
        try:
            stateful.save()
        except jaxvec.EnvStateError:
            return False
        return True


def play_late(kinds):
    """Steps two workers beyond a replacement after `START`; returns when the episodes of each kind were cut.

    Each field of each row is compared with an env that is stepped here, and that is new after a cut.
    """
    workers = jaxvec.Workers(recycle=Recycle(steps=len(kinds) // 2 * 18))
    envs = [functools.partial(Late, kind) for kind in kinds]
    with jaxvec.make(envs, num_workers=2, workers=workers) as envs:
        envs.reset(seed=0)
        rows = [envs.step([0] * len(kinds)) for _ in range(START + 19)]
    cuts = {}
    for env_id, kind in enumerate(kinds):
        env, total, steps = Late(kind), 0.0, 0
        last, _ = env.reset()
        for number, row in enumerate(rows):
            cut = bool(row.info["fault"][env_id])
            if cut:
                cuts.setdefault(kind, []).append(number)
                np.testing.assert_array_equal(row.info["final_obs"][env_id], last)
                env.close()
                env, reward, played = Late(kind), 0.0, (total, steps)
                last, _ = env.reset()
                total, steps = 0.0, 0
            else:
                last, reward, *_ = env.step(0)
                total, steps = total + reward, steps + 1
                played = total, steps
            np.testing.assert_array_equal(row.obs[env_id], last, f"{kind} in step {number}")
            assert row.reward[env_id] == reward, (kind, number)
            assert (row.info["episode_return"][env_id], row.info["episode_length"][env_id]) == played
            assert (row.terminated[env_id], row.truncated[env_id]) == (False, cut)
            assert row.info["_final_obs"][env_id] == cut
        env.close()
    return cuts


def test_late_objects_are_exact_in_the_new_process_or_cut(importable_kinds, caplog):
    kinds = [kind for kind in KINDS if kind != DEADLY and can_be_saved(kind)]
    with caplog.at_level("INFO", "jaxvec"):
        cuts = play_late(kinds + ["closure"] * (len(kinds) % 2))
    assert not EXACT & cuts.keys()
    assert cuts.keys() >= CUT
    for kind in CUT:
        text = f"env {kinds.index(kind)} could not continue, so its episode is cut: "
        (message,) = [message for message in caplog.messages if text in message]
        assert kind != "singleton" or "Late.late (identity with support.late_structures.SINGLETON)" in message
    assert not any("not exact" in message for message in caplog.messages)


def test_a_new_process_that_dies_of_a_state_cuts_its_envs(importable_kinds, caplog):
    refused = [kind for kind in KINDS if not can_be_saved(kind)]
    kinds = [*refused, *["closure"] * (len(refused) - 1), DEADLY]
    with caplog.at_level("INFO", "jaxvec"):
        cuts = play_late(kinds)
    assert cuts.keys() - {"closure", DEADLY} == {*refused}
    assert len(cuts[DEADLY]) == 1
    assert any("the new process could not continue" in message for message in caplog.messages)


# --- Envs without exact states --------------------------------------------------------------------------


@pytest.mark.slow(but=1)
def test_without_exact_states_episodes_are_cut_and_marked(way):
    chosen = actions(high=2)
    with make(Opened, OFTEN, episode_length=7) as envs:
        _, rows = scan(envs, chosen)
        assert min(recycled(envs)) >= 2
        assert envs.stats().total.restarts == 0
    faults = rows.info["fault"]
    check_rows(rows, chosen, faults)
    assert (faults.sum(0) >= 2).all()
    # The final observation of a cut episode is the one that was delivered last.
    for before, env_id in np.argwhere(faults[1:]):
        assert (rows.info["final_obs"][before + 1, env_id] == rows.obs[before, env_id]).all()


def test_cut_envs_keep_attributes_and_lose_what_calls_changed(caplog):
    with caplog.at_level("INFO", "jaxvec"), make(Opened, OFTEN, episode_length=50) as envs:
        envs.reset(seed=0)
        envs.set_attr("difficulty", [5, 6, 7, 8])
        envs.map(lambda env: setattr(env.unwrapped, "mark", 1))
        rows = [envs.step([1] * NUM_ENVS) for _ in range(15)]
        assert min(recycled(envs)) == 1
        assert sum(row.info["fault"] for row in rows).tolist() == [1] * NUM_ENVS
        assert [*envs.get_attr("difficulty")] == [5, 6, 7, 8]
        with pytest.raises(AttributeError, match="mark"):
            envs.get_attr("mark")
    assert any("changes that call or map made to envs 0, 1 are lost" in text for text in caplog.messages)


def test_close_during_a_replacement_closes_every_env(tmp_path):
    class Noting(Opened):
        def __init__(self):
            super().__init__()
            self.note = tmp_path / f"{os.getpid()}-{id(self)}"
            self.note.touch()

        def close(self):
            self.note.unlink()

    for steps in range(9, 13):
        with make(Noting, OFTEN) as envs:
            envs.reset(seed=0)
            pids = {*probe.pids(envs)}
            for _ in range(steps):
                envs.step([1] * NUM_ENVS)
            pids |= {*probe.pids(envs)}
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        assert not [*tmp_path.iterdir()]


def test_each_env_that_closes_before_a_recycling_has_all_of_the_time(tmp_path):
    class Gated(Opened):
        def __init__(self, env_id):
            super().__init__()
            self.env_id = env_id

        def close(self):
            (tmp_path / f"closing {self.env_id}").touch()
            while not (tmp_path / f"gate {self.env_id}").exists():
                threading.Event().wait(0.001)
            super().close()

    def step_until_recycled():
        while not all(recycled(envs)):
            envs.step([1, 1])

    workers = jaxvec.Workers(recycle=Recycle(steps=5))
    with jaxvec.make(Gated, 2, num_workers=1, workers=workers) as envs:
        deadlines = probe.supervisor(envs).starting
        envs.reset(seed=0)
        stepping = Background(step_until_recycled)
        wait_until(lambda: deadlines and (tmp_path / "closing 0").exists())
        first = deadlines[0]
        (tmp_path / "gate 0").touch()
        wait_until((tmp_path / "closing 1").exists)
        wait_until(lambda: deadlines[0] > first)
        (tmp_path / "gate 1").touch()
        stepping.result()


def test_a_close_that_fails_before_a_recycling_is_logged(caplog):
    class Failing(Opened):
        def close(self):
            super().close()
            raise OSError("the port is stuck")

    with make(Failing, Recycle(steps=5)) as envs:
        envs.reset(seed=0)
        while not all(recycled(envs)):
            envs.step([1] * NUM_ENVS)
        first, second = sorted(text for text in caplog.messages if "the port is stuck" in text)
        assert first.startswith("env 0 (worker 0) raised OSError in close")
        assert second.startswith("env 2 (worker 1) raised OSError in close")


@pytest.mark.slow
def test_faults_beside_recycling_are_recovered():
    class Fragile(Walk):
        def step(self, action):
            if action == 2 and self.np_random.random() < 0.3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    policy = jaxvec.Restart(max_restarts=None, rate=None)
    with make(Fragile, OFTEN, on_fault=policy) as envs:
        _, rows = scan(envs, actions())
        stats = envs.stats()
        assert rows.info["fault"].any()
        assert sum(recycled(envs)) >= 1
        assert stats.total.restarts >= 1
        assert stats.total.steps + stats.total.faults == NUM_STEPS * NUM_ENVS


# --- Arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "serial"}, "needs worker processes"),
        ({"spare_envs": 1}, "spare_envs cannot be combined"),
        ({"envs_per_instance": 2}, "does not go with a batched env"),
    ],
)
def test_recycling_is_refused_with_a_reason(options, text):
    with pytest.raises(ValueError, match=text):
        jaxvec.make(CountingEnv, 2, workers=jaxvec.Workers(recycle=OFTEN), **options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "has no limit"),
        ({"memory": "2 parsecs"}, 'such as "2GB"'),
        ({"memory": 0}, "memory"),
        ({"memory": "..GB"}, "memory"),
        ({"steps": 0}, "steps"),
        ({"descriptors": "many"}, "descriptors"),
    ],
)
def test_limits_of_recycling_are_checked_by_name(arguments, text):
    with pytest.raises(ValueError, match=text):
        Recycle(**arguments)


def test_memory_is_read_with_its_unit():
    assert Recycle(memory="2GB").memory == 2 * 10**9
    assert Recycle(memory=" 1.5 GiB ").memory == 3 * 2**29
    assert Recycle(memory=123).memory == 123
    with pytest.raises(TypeError, match=r"jaxvec\.Recycle"):
        jaxvec.Workers(recycle="2GB")
