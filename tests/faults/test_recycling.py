"""`Workers(recycle=...)`: a fresh process replaces a worker between requests, and cuts running episodes."""

import os
import signal
import threading

import gymnasium
import jax
import numpy as np
import pytest
from support import probe
from support.disasters import Background, wait_until
from support.probe import _stats

import jaxvec
from jaxvec.testing import CountingEnv

Recycle = jaxvec.Recycle
NUM_ENVS, NUM_WORKERS, NUM_STEPS, LENGTH = 4, 2, 50, 7
LIMIT = 16  # steps of the two envs of a worker


def make(env, recycle, **options):
    workers = jaxvec.Workers(recycle=recycle)
    return jaxvec.make(
        env, **{"num_envs": NUM_ENVS, "num_workers": NUM_WORKERS, "workers": workers, **options}
    )


def recycled(envs):
    return probe.array(envs, "stats")[:, _stats.RECYCLED].tolist()


# --- A model of every field of every row ----------------------------------------------------------------


class SlotModel:
    """One `CountingEnv`, and the episode that its rows show."""

    def __init__(self, env_id, mode):
        self.env_id, self.mode = env_id, mode
        self.env = CountingEnv(LENGTH)
        self.total, self.length = 0.0, 0
        self.over = self.is_cut = False
        self.obs, _ = self.env.reset()

    def replace(self):
        self.env = CountingEnv(LENGTH)
        self.is_cut = not self.over or self.mode == "SAME_STEP"

    def step(self, action):
        """Returns the next row, and whether the env took a step."""
        reward, over, cut, final = 0.0, False, self.is_cut, np.zeros(4, np.int32)
        self.is_cut = False
        stepped = not cut and not (self.over and self.mode == "NEXT_STEP")
        if self.over:
            self.total, self.length = 0.0, 0
        if stepped:
            self.obs, reward, over, *_ = self.env.step(action)
            self.total += reward
            self.length += 1
        elif not cut:
            self.obs, _ = self.env.reset()
        self.over = over or cut
        if self.over and self.mode == "SAME_STEP":
            final = self.obs
            self.obs, _ = self.env.reset()
        row = {
            "obs": self.obs,
            "reward": reward,
            "terminated": over,
            "truncated": cut,
            "discount": 1.0 - over,
            "env_id": self.env_id,
            "episode_return": self.total,
            "episode_length": self.length,
            "fault": cut,
        }
        if self.mode == "SAME_STEP":
            row |= {"final_obs": final, "_final_obs": self.over, "last_obs": final if self.over else self.obs}
        else:
            row["last_obs"] = self.obs
        return row, stepped


class PoolModel:
    """Slots in groups, one per worker, of which each is recycled after `LIMIT` steps."""

    def __init__(self, mode, num_workers):
        slots = [SlotModel(env_id, mode) for env_id in range(NUM_ENVS)]
        size = NUM_ENVS // num_workers
        self.groups = [slots[first : first + size] for first in range(0, NUM_ENVS, size)]
        self.limit = LIMIT // NUM_WORKERS * size
        self.steps, self.recycled = [0] * num_workers, [0] * num_workers

    def step(self, actions):
        """Returns the rows of the envs in `actions`, a dict, which has all envs of a worker or none."""
        rows = {}
        for worker, group in enumerate(self.groups):
            for slot in group:
                if slot.env_id in actions:
                    rows[slot.env_id], stepped = slot.step(actions[slot.env_id])
                    self.steps[worker] += stepped
            if self.steps[worker] >= self.limit:
                self.steps[worker] = 0
                self.recycled[worker] += 1
                for slot in group:
                    slot.replace()
        return [rows[env_id] for env_id in actions]


def assert_row(timestep, expected):
    fields = {"obs": timestep.obs, "reward": timestep.reward, **timestep.info}
    fields |= {name: getattr(timestep, name) for name in ("terminated", "truncated", "discount", "last_obs")}
    assert fields.keys() == expected[0].keys()
    for name, values in fields.items():
        np.testing.assert_array_equal(values, [row[name] for row in expected], name)


@jax.jit
def scan(handle, actions):
    return jax.lax.scan(jaxvec.step, handle, actions)


def play(envs, num_steps=NUM_STEPS):
    """Returns actions, and the time steps of a compiled loop."""
    chosen = np.random.default_rng(0).integers(0, 9, (num_steps, NUM_ENVS))
    handle, _ = jaxvec.reset(envs, seed=3)
    _, rows = scan(handle, chosen)
    rows = jax.tree.map(np.asarray, rows)
    return chosen, [jax.tree.map(lambda leaf, step=step: leaf[step], rows) for step in range(num_steps)]


def assert_as_the_model(model, chosen, timesteps):
    for actions, timestep in zip(chosen, timesteps, strict=True):
        assert_row(timestep, model.step(dict(enumerate(actions.tolist()))))


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("way", [("native", "ffi"), ("native", "io_callback"), ("portable", "io_callback")])
def test_each_field_of_each_row_in_a_compiled_loop(way, mode):
    with jaxvec.config.override(dispatch=way[0], transport=way[1]):
        envs = make(CountingEnv, Recycle(steps=LIMIT), autoreset_mode=mode, episode_length=LENGTH)
    with envs:
        pids = probe.pids(envs)
        model = PoolModel(mode, NUM_WORKERS)
        assert_as_the_model(model, *play(envs))
        assert min(model.recycled) >= 4
        stats = envs.stats().total
        assert (stats.recycled, stats.restarts) == (sum(model.recycled), 0)
        assert not {*pids} & {*probe.pids(envs)}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_each_field_of_each_row_in_asynchronous_mode(dispatch, mode):
    options = {"autoreset_mode": mode, "episode_length": LENGTH, "batch_size": 2, "recv_order": "sent"}
    with jaxvec.config.override(dispatch=dispatch):
        envs = make(CountingEnv, Recycle(steps=LIMIT // 2), num_workers=NUM_ENVS, **options)
    with envs:
        model = PoolModel(mode, NUM_ENVS)
        handle, timestep = jaxvec.reset(envs, seed=3)
        sent = []
        for number in range(2 * NUM_STEPS):
            env_ids = np.asarray(timestep.info["env_id"]).tolist()
            actions = {env_id: (number + env_id) % 9 for env_id in env_ids}
            if number >= 2:  # the first two receive the resets
                assert_row(jax.tree.map(np.asarray, timestep), model.step(sent.pop(0)))
            sent.append(actions)
            handle = jaxvec.send(handle, np.array([*actions.values()]), timestep.info["env_id"])
            handle, timestep = jaxvec.recv(handle)
        assert min(model.recycled) >= 4
        assert envs.stats().total.recycled >= sum(model.recycled)


def test_envs_of_other_workers_do_not_change():
    def run(recycle):
        with make("CartPole-v1", recycle, num_envs=3) as envs:  # two workers, of one env and of two
            envs.reset(seed=3)
            rows = [envs.step([step % 2] * 3) for step in range(60)]
            return rows, recycled(envs)

    expected, _ = run(None)
    timesteps, counts = run(Recycle(steps=70))
    assert counts == [0, 1]
    for timestep, row in zip(timesteps, expected, strict=True):
        assert not timestep.info.pop("fault")[0]
        jax.tree.map(lambda leaf, other: np.testing.assert_array_equal(leaf[0], other[0]), timestep, row)


@pytest.mark.parametrize("dispatch", ["native", "portable"])
@pytest.mark.parametrize("on_fault", ["raise", jaxvec.Restart(max_restarts=1)])
def test_a_replacement_that_is_killed_is_an_ordinary_fault(tmp_path, dispatch, on_fault):
    class Deadly(CountingEnv):
        """Kills the second process that makes one of its worker 0."""

        def __init__(self, env_id, **kwargs):
            super().__init__(**kwargs)
            if env_id == 0:
                count = len([*tmp_path.iterdir()])
                (tmp_path / str(count)).touch()
                if count == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

    with jaxvec.config.override(dispatch=dispatch):
        envs = make(Deadly, Recycle(steps=LIMIT), episode_length=LENGTH, on_fault=on_fault)
    with envs:
        if on_fault == "raise":
            envs.reset(seed=0)
            with pytest.raises(jaxvec.WorkerDiedError, match="SIGKILL"):
                [envs.step([1] * NUM_ENVS) for _ in range(LIMIT)]
            return
        model = PoolModel("SAME_STEP", NUM_WORKERS)
        assert_as_the_model(model, *play(envs))
        stats = envs.stats().workers
        assert [worker.restarts for worker in stats] == [1, 0]
        assert [worker.recycled for worker in stats] == model.recycled


# --- What an env keeps, and what it loses ---------------------------------------------------------------


class Levels(CountingEnv):
    """Observes the level of its reset options, and the level of its attribute."""

    difficulty = 0

    def reset(self, *, seed=None, options=None):
        self.level = (options or {}).get("level", -1)
        obs, info = super().reset(seed=seed)
        return self.observe(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self.observe(obs), *rest

    def observe(self, obs):
        return np.array([self.level, self.difficulty, *obs[2:]], np.int32)


def test_settings_are_applied_again_and_changes_of_calls_are_lost(caplog):
    with caplog.at_level("INFO", "jaxvec"), make(Levels, Recycle(steps=LIMIT)) as envs:
        envs.reset(seed=0, options={"level": 5})
        envs.set_attr("difficulty", [6, 7, 8, 9])
        envs.map(lambda env: setattr(env.unwrapped, "mark", 1))
        timesteps = [envs.step([1] * NUM_ENVS) for _ in range(LIMIT // 2 + 2)]
        assert [timestep.info["fault"].all() for timestep in timesteps] == [*[False] * 8, True, False]
        for timestep in timesteps:
            assert timestep.obs[:, :2].tolist() == [[5, 6], [5, 7], [5, 8], [5, 9]]
        assert [*envs.get_attr("difficulty")] == [6, 7, 8, 9]
        with pytest.raises(AttributeError, match="mark"):
            envs.get_attr("mark")
    text = f"worker 0 (envs 0, 1) is recycled, as it has reached steps={LIMIT} (changes that call or map made"
    assert any(message.startswith(text) for message in caplog.messages)


def test_declared_reset_options_are_those_given_last():
    levels = gymnasium.spaces.Dict(level=gymnasium.spaces.Discrete(1000))
    with make(Levels, Recycle(steps=10), reset_options=levels, episode_length=3) as envs:
        envs.reset(seed=0, options={"level": np.arange(NUM_ENVS)})
        started = np.arange(NUM_ENVS)
        for step in range(1, 40):
            level = 10 * step + np.arange(NUM_ENVS)
            timestep = envs.step([0] * NUM_ENVS, reset_options={"level": level})
            started = np.where(timestep.done, level, started)
            assert timestep.obs[:, 0].tolist() == started.tolist(), step
        assert min(recycled(envs)) >= 2


def test_saved_states_of_a_recycled_worker_are_lost():
    with make(CountingEnv, Recycle(steps=LIMIT), num_envs=3, states=9) as envs:
        envs.reset(seed=0)
        states = envs.save()
        for _ in range(LIMIT // 2 + 1):
            envs.step([1] * 3)
        assert recycled(envs) == [0, 1]
        with pytest.raises(jaxvec.StaleStateError, match="2 of these states are lost"):
            envs.restore(states)
        assert envs.restore(states[[0, 0, 0]]).obs.tolist() == [[1, 0, 0, -1]] * 3
        assert envs.restore(envs.save()).obs.tolist() == [[1, 0, 0, -1]] * 3


def test_faults_beside_recycling_are_recovered():
    class Fragile(CountingEnv):
        def step(self, action):
            if action == 2 and self.np_random.random() < 0.3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    policy = jaxvec.Restart(max_restarts=None, rate=None)
    with make(Fragile, Recycle(steps=LIMIT), on_fault=policy) as envs:
        _, timesteps = play(envs)
        total = envs.stats().total
        assert total.recycled >= 1
        assert total.restarts >= 1
        faults = sum(int(timestep.info["fault"].sum()) for timestep in timesteps)
        assert (total.faults, total.steps + total.faults) == (faults, NUM_STEPS * NUM_ENVS)


def test_spare_envs_are_built_anew():
    options = {"spare_envs": 1, "episode_length": LENGTH}
    with make(CountingEnv, Recycle(steps=LIMIT), **options) as envs:
        _, timesteps = play(envs)
        assert min(recycled(envs)) >= 4
    length = np.zeros(NUM_ENVS, int)
    for timestep in timesteps:
        length = np.where(timestep.info["fault"], length, length + 1)
        assert timestep.info["episode_length"].tolist() == length.tolist()
        assert (timestep.terminated == (~timestep.info["fault"] & (length == LENGTH))).all()
        length = np.where(timestep.done, 0, length)
        assert timestep.obs[:, 2].tolist() == length.tolist()


# --- Limits ---------------------------------------------------------------------------------------------


class Leaking(CountingEnv):
    """Keeps 1 MB more with each step, outside of its attributes."""

    def step(self, action):
        hoard = jaxvec.__dict__.setdefault("hoard", [])
        hoard.append(b"x" * 1_000_000)
        return super().step(action)


def step_until(envs, count, maximum=2000):
    """Steps until each worker was recycled `count` times, and checks that each env's steps are whole."""
    envs.reset(seed=0)
    last = np.zeros(NUM_ENVS)
    for _ in range(maximum):
        timestep = envs.step([7] * NUM_ENVS)
        last = np.where(timestep.info["fault"], 0, last + 1)
        assert timestep.obs[:, 2].tolist() == last.tolist()
        if min(recycled(envs)) >= count:
            return
    raise AssertionError(recycled(envs))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("limit", [{"memory": 120_000_000}, {"descriptors": 1}])
def test_each_limit_replaces_the_workers(limit):
    with make(Leaking, Recycle(**limit)) as envs:
        step_until(envs, 2)


def test_a_limit_below_a_new_process_is_warned_of_once_per_worker(caplog):
    with make(CountingEnv, Recycle(memory=1_000_000)) as envs:
        step_until(envs, 3)
    workers = [f"worker {worker} (envs {2 * worker}, {2 * worker + 1})" for worker in range(2)]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(message.partition(" exceeds")[0] for message in warnings) == workers
    assert all("Raise the limit" in message for message in warnings)


# --- The end of the old process -------------------------------------------------------------------------


def test_close_during_a_replacement_closes_every_env(tmp_path):
    class Noting(CountingEnv):
        def __init__(self):
            super().__init__()
            self.note = tmp_path / f"{os.getpid()}-{id(self)}"
            self.note.touch()

        def close(self):
            self.note.unlink()

    for steps in range(7, 11):
        with make(Noting, Recycle(steps=LIMIT)) as envs:
            envs.reset(seed=0)
            pids = {*probe.pids(envs)}
            for _ in range(steps):
                envs.step([1] * NUM_ENVS)
            pids |= {*probe.pids(envs)}
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        assert not [*tmp_path.iterdir()]


def test_each_env_that_closes_before_a_recycling_has_all_of_the_time(tmp_path):
    class Gated(CountingEnv):
        def __init__(self, env_id):
            super().__init__()
            self.env_id = env_id

        def close(self):
            (tmp_path / f"closing {self.env_id}").touch()
            while not (tmp_path / f"gate {self.env_id}").exists():
                threading.Event().wait(0.001)

    def step_until_recycled():
        while not all(recycled(envs)):
            envs.step([1, 1])
        envs.step([1, 1])

    with make(Gated, Recycle(steps=5), num_envs=2, num_workers=1) as envs:
        deadlines = probe.supervisor(envs).deadlines.starting
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
    class Failing(CountingEnv):
        def close(self):
            raise OSError("the port is stuck")

    with make(Failing, Recycle(steps=5)) as envs:
        step_until(envs, 1)
        envs.step([1] * NUM_ENVS)
        first, second = sorted(text for text in caplog.messages if "the port is stuck" in text)
        assert first.startswith("env 0 (worker 0) raised OSError in close")
        assert second.startswith("env 2 (worker 1) raised OSError in close")


# --- Arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "serial"}, "needs worker processes"),
        ({"envs_per_instance": 2}, "does not go with a batched env"),
    ],
)
def test_recycling_is_refused_with_a_reason(options, text):
    with pytest.raises(ValueError, match=text):
        jaxvec.make(CountingEnv, 2, workers=jaxvec.Workers(recycle=Recycle(steps=20)), **options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "has no limit"),
        ({"memory": "2GB"}, "memory"),
        ({"memory": 0}, "memory"),
        ({"steps": 0}, "steps"),
        ({"descriptors": "many"}, "descriptors"),
    ],
)
def test_limits_of_recycling_are_checked_by_name(arguments, text):
    with pytest.raises(ValueError, match=text):
        Recycle(**arguments)


def test_a_limit_without_recycle_is_refused():
    with pytest.raises(TypeError, match=r"jaxvec\.Recycle"):
        jaxvec.Workers(recycle=2_000_000_000)
