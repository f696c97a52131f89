"""`jaxvec.logging`: the episodes are those of Gymnasium's wrapper, and files contain the logged metrics."""

import csv
import json
import os
import platform
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from support.disasters import PATIENCE
from support.runs import load_params

import jaxvec
from jaxvec.logging import Episodes, Options, Run, play_episodes, training
from jaxvec.logging._training import Interrupted
from jaxvec.testing import CountingEnv


class LivesEnv(gymnasium.Wrapper):
    """CartPole with the number of steps so far as an info `age`."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.age = 0
        return obs, {**info, "age": self.age}

    def step(self, action):
        self.age += 1
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, {**info, "age": self.age}


@pytest.mark.slow(but=1)
@pytest.mark.jax_version
@pytest.mark.parametrize("window", [5, 100])
def test_episodes_are_those_of_gymnasium(window):
    num_envs, num_steps = 6, 80
    actions = np.random.default_rng(0).integers(0, 2, (num_steps, num_envs))
    ended = []
    for number in range(num_envs):
        env = gymnasium.wrappers.RecordEpisodeStatistics(LivesEnv())
        env.reset(seed=number)
        for step in range(num_steps):
            *_, terminated, truncated, info = env.step(actions[step, number])
            if terminated or truncated:
                ended.append((step, number, info["episode"]["r"], info["episode"]["l"], info["age"]))
                env.reset()
    latest = np.array(sorted(ended)[-window:])

    with jaxvec.make(LivesEnv, num_envs, num_workers=1, info={"age": int}) as envs:

        @jax.jit
        def play(handle):
            def step(carry, action):
                handle, episodes = carry
                handle, timestep = jaxvec.step(handle, action)
                return (handle, episodes.add(timestep)), timestep

            start = Episodes.create(["age"], window=window)
            (_, episodes), timesteps = jax.lax.scan(step, (handle, start), actions)
            return episodes.means(), start.add(timesteps).means()

        for means in play(jaxvec.reset(envs, seed=0)[0]):
            assert means["episodes"] == len(ended) > 10
            for column, name in ((2, "episode_return"), (3, "episode_length"), (4, "age")):
                assert means[name] == pytest.approx(latest[:, column].mean(), rel=1e-5)

        _, timestep = jaxvec.reset(envs, seed=0)
        with pytest.raises(ValueError, match=r"info 'speed': expected one number per env, .*no such key"):
            Episodes.create(["speed"]).add(timestep)
        assert np.isnan(Episodes.create().add(timestep).means()["episode_return"])


HARM = 3


class PatchyEnv(CountingEnv):
    """Has the info `score` in the last step of every second episode, and fails in a step with `HARM`."""

    def reset(self, *, seed=None, options=None):
        self.episodes = 0 if seed is not None else self.episodes + 1
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if action == HARM:
            raise ValueError("harm")
        obs, reward, terminated, truncated, _ = super().step(action)
        has_score = truncated and self.episodes % 2
        return obs, reward + action, terminated, truncated, {"score": 10.0 + action} if has_score else {}


def play_patchy(length, seed, actions, resets, mode):
    """Yields `(step, return, length, score or None)` of the episodes that an env alone ends."""
    env = gymnasium.wrappers.RecordEpisodeStatistics(PatchyEnv(length, truncate=True))
    env.reset(seed=seed)
    over = False
    for step, (action, reset) in enumerate(zip(actions, resets, strict=True)):
        if over and mode == "NEXT_STEP":
            env.reset()
            over = False
        elif not over and action == HARM:
            over = True
        elif not over:
            *_, over, info = env.step(action)
            if over:
                yield step, info["episode"]["r"], info["episode"]["l"], info.get("score")
        if over and mode == "SAME_STEP":
            env.reset()
            over = False
        if reset or (over and mode == "DISABLED"):
            env.reset()
            over = False


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("harms", [False, True])
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED", "EPISODIC"])
def test_episodes_are_counted_as_in_a_plain_loop(make, mode, harms):
    """Idle steps, missing infos, resets by a mask and faults do not change the statistics."""
    lengths, num_steps = [2, 5, 3], 40
    actions = np.random.default_rng(1).integers(0, HARM, (num_steps, 3))
    if harms:
        actions[[6, 13, 14, 30], [0, 1, 1, 2]] = HARM
    resets = np.zeros((num_steps, 3), bool)
    resets[7::8] = [True, True, False] if mode != "EPISODIC" else True
    expected = sorted(
        end
        for number, length in enumerate(lengths)
        for end in play_patchy(length, 5, actions[:, number], resets[:, number], mode)
    )

    @jax.jit
    def play(handle):
        def body(carry, turn):
            handle, episodes = carry
            action, reset = turn
            handle, timestep = jaxvec.step(handle, action)
            if mode == "DISABLED":
                reset |= timestep.terminated | timestep.truncated
            handle, _ = jaxvec.reset(handle, mask=reset)
            return (handle, episodes.add(timestep)), timestep

        start = Episodes.create(["score"])
        (_, episodes), timesteps = jax.lax.scan(body, (handle, start), (actions, resets))
        return episodes, start.add(timesteps)

    options = {"on_fault": jaxvec.Restart(rate=None, max_restarts=None)} if harms else {}
    options |= {"env_configs": [{"episode_length": length} for length in lengths], "truncate": True}
    envs = make(PatchyEnv, 3, num_workers=1, autoreset_mode=mode, info={"score": float}, **options)
    found = [*play(jaxvec.reset(envs, seed=[5] * 3)[0]), Episodes.create(["score"])]
    envs.reset(seed=[5] * 3)
    for action, reset in zip(actions, resets, strict=True):
        timestep = envs.step(action)
        found[2] = found[2].add(timestep)
        if (mask := reset | ((mode == "DISABLED") & (timestep.terminated | timestep.truncated))).any():
            envs.reset(mask=mask)
    _, returns, ends, scores = zip(*expected, strict=True)
    scores = [score for score in scores if score is not None]
    assert len(expected) > len(scores) > 0
    for episodes in found:
        assert episodes.total == len(expected)
        means = episodes.means()
        for name, values in (("episode_return", returns), ("episode_length", ends), ("score", scores)):
            assert means[name] == pytest.approx(np.mean(values), rel=1e-6), name


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_episodes_of_batched_envs_are_those_of_single_ones(make, mode):
    env_fns = [partial(PatchyEnv, length, truncate=True) for length in (2, 5, 3)]
    batched = partial(gymnasium.vector.SyncVectorEnv, env_fns, autoreset_mode=AutoresetMode[mode])
    found = []
    for envs in (
        make(env_fns, num_workers=1, autoreset_mode=mode, info={"score": float}),
        make(batched, 3, num_workers=1, envs_per_instance=3, info={"score": float}),
    ):
        envs.reset(seed=[5] * 3)
        steps = [envs.step(np.array(action)) for action in np.random.default_rng(1).integers(0, 3, (30, 3))]
        found.append(Episodes.create(["score"]).add(jax.tree.map(lambda *each: np.stack(each), *steps)))
    assert found[0].last["_score"].sum() > 3
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_episodes_of_first_ready_batches_are_counted(make):
    options = {"num_workers": 2, "batch_size": 2, "info": {"score": float}}
    envs = make(PatchyEnv, 4, episode_length=2, truncate=True, **options)
    timestep, episodes = envs.reset(seed=[5] * 4), Episodes.create(["score"])
    returns, scores = [], []
    for _ in range(30):
        envs.send(timestep.info["env_id"] % 3, timestep.info["env_id"])
        timestep = envs.recv()
        episodes = episodes.add(timestep)
        returns += timestep.info["episode_return"][timestep.truncated].tolist()
        final = timestep.info["final_info"]
        scores += final["score"][final["_score"]].tolist()
    means = episodes.means()
    assert means["episodes"] == len(returns) > len(scores) > 0
    assert means["episode_return"] == pytest.approx(np.mean(returns))
    assert means["score"] == pytest.approx(np.mean(scores))


def test_a_nan_in_a_return_is_not_hidden(make):
    class Broken(CountingEnv):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, reward if action else float("nan"), *rest

    envs = make(Broken, 2, episode_length=2, num_workers=1)
    envs.reset(seed=0)
    episodes = Episodes.create().add(envs.step([0, 1])).add(envs.step([1, 1]))
    assert np.isnan(episodes.means()["episode_return"])
    assert episodes.means()["episode_length"] == 2


def test_a_cut_episode_is_not_part_of_an_evaluation(make):
    options = {"autoreset_mode": "EPISODIC", "on_fault": "restart", "num_workers": 1}
    envs = make(PatchyEnv, 2, episode_length=2, truncate=True, **options)

    def act(memory, timestep):
        return memory + 1, jnp.array([HARM, 1]) * memory

    returns = play_episodes(act, 0, *jaxvec.reset(envs, seed=0))
    np.testing.assert_array_equal(returns, [np.nan, 1 + 2 + 1])


def rows_of(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("max_steps", [10_000, 12])
def test_played_episodes_are_those_of_gymnasium(make, max_steps):
    """The actions depend on the observation and on the memory, which counts the steps of each env."""

    def act(memory, timestep):
        return memory + 1, ((timestep.obs[:, 2] > 0) ^ (memory % 5 == 0)).astype(int)

    returns = []
    for seed in range(7, 11):
        env = gymnasium.make("CartPole-v1")
        obs, _ = env.reset(seed=seed)
        total = 0.0
        for number in range(max_steps):
            obs, reward, terminated, truncated, _ = env.step(int((obs[2] > 0) ^ (number % 5 == 0)))
            total += reward
            if terminated or truncated:
                break
        returns.append(total)
    assert len({*returns}) > 1 or max_steps == 12

    envs = make("CartPole-v1", 4, num_workers=1, autoreset_mode="EPISODIC")
    play = jax.jit(partial(play_episodes, act, jnp.zeros(4, int), max_steps=max_steps))
    assert play(*jaxvec.reset(envs, seed=7)).tolist() == returns


def test_a_run_writes_what_compiled_programs_log(tmp_path, capsys):
    folder = tmp_path / "run"
    with Run(folder, {"lr": 0.5, "seed": 1}, total_steps=30) as run:

        @jax.jit
        def train(loss):
            def body(number, loss):
                run.log(10 * number, loss=loss)
                return loss / 2

            return jax.lax.fori_loop(1, 4, body, loss)

        train(8.0).block_until_ready()
        jax.effects_barrier()
        run.log(30, evaluation=7)
    record = json.loads((folder / "config.json").read_text())
    assert record["config"] == {"lr": 0.5, "seed": 1}
    assert record["versions"]["gymnasium"] == gymnasium.__version__
    rows = rows_of(folder)
    assert [float(row["env_steps"]) for row in rows] == [10, 20, 30, 30]
    assert [row["loss"] for row in rows] == ["8.0", "4.0", "2.0", ""]
    assert [row["evaluation"] for row in rows] == ["", "", "", "7"]
    np.testing.assert_array_equal(run.metrics()["loss"], [8, 4, 2, np.nan])
    said = capsys.readouterr().err
    assert "\r" not in said
    assert "100%  30 steps" in said

    with pytest.raises(FileExistsError, match="contains a run; choose another name, or resume it"):
        Run(folder)
    with pytest.raises(FileNotFoundError):
        Run(folder, resume=True)  # nothing was saved
    assert json.loads((folder / "config.json").read_text()) == record


def test_a_resumed_run_continues_from_its_last_save(tmp_path, capsys):
    folder = tmp_path / "run"
    with jaxvec.make("CartPole-v1", 3, num_workers=1, states=3) as envs:
        handle, timestep = jaxvec.reset(envs, seed=0)
        learned = {"weight": jnp.arange(3, dtype=jnp.bfloat16), "number": jnp.int32(7)}
        with Run(folder, {"lr": 1}) as run:
            assert run.load(learned, (handle, timestep.obs), envs)[0] is learned
            run.log(10, loss=1)
            run.log(20, loss=2)
            run.save(learned, (handle, timestep.obs), envs)
            run.log(30, loss=3)
            assert run.latest("loss") == 3
        _, expected = jaxvec.step(handle, jnp.zeros(3, int))

        fresh = jax.tree.map(jnp.zeros_like, learned)
        handle, timestep = jaxvec.reset(envs, seed=1)
        with Run(folder, resume=True) as run:
            loaded, (handle, obs) = run.load(fresh, (handle, timestep.obs), envs)
            assert capsys.readouterr().err.endswith("resuming after 20 steps; the episodes continue\n")
            with pytest.raises(
                ValueError, match=r"has no \['learned'\]\['weight'\] of shape \(4,\) and dtype"
            ):
                run.load({**fresh, "weight": jnp.zeros(4, jnp.bfloat16)}, (handle, obs), envs)
            run.log(25, loss=5)
        assert jax.tree.all(
            jax.tree.map(lambda a, b: bool((a == b).all()) and a.dtype == b.dtype, loaded, learned)
        )
        np.testing.assert_array_equal(jaxvec.step(handle, jnp.zeros(3, int))[1].obs, expected.obs)
    assert [float(row["env_steps"]) for row in rows_of(folder)] == [10, 20, 25]

    with Run(folder, resume=True) as run:
        run.save(learned)
        run.save(learned, (obs,))
    with Run(folder, resume=True) as run:
        loaded, playing = run.load(fresh, "new")
        assert playing == "new"
        assert loaded["number"] == 7
    assert capsys.readouterr().err.endswith("resuming after 20 steps; new episodes start\n")


@pytest.mark.parametrize("cut", ["3", "30,", "25,1.", "25,1.0,2", "25,1.0,2.0,1"])
def test_a_cut_last_line_of_metrics_does_not_hinder_a_resume(tmp_path, cut):
    with Run(tmp_path) as run:
        run.log(10, loss=1)
        run.log(25, loss=2, flag=np.bool_(True))
        run.save({})
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(cut)  # the program was killed while it wrote this line
    with Run(tmp_path, resume=True) as run:
        np.testing.assert_array_equal(run.metrics()["env_steps"], [10, 25])
        np.testing.assert_array_equal(run.metrics()["flag"], [np.nan, 1])
        run.log(30, loss=3)
    assert [float(row["loss"]) for row in rows_of(tmp_path)] == [1, 2, 3]


def test_a_run_that_saved_before_it_logged_is_resumed(tmp_path):
    with Run(tmp_path) as run:
        run.save({})
    with Run(tmp_path, resume=True) as run:
        run.log(10, loss=1)
    assert [float(row["loss"]) for row in rows_of(tmp_path)] == [1]


class Killed(BaseException):
    pass


def test_a_kill_while_columns_are_added_keeps_all_metrics(tmp_path, monkeypatch):
    def die(*_):
        raise Killed

    run = Run(tmp_path)
    run._log(10, {"loss": 1})
    monkeypatch.setattr(csv.DictWriter, "writerows", die)
    with pytest.raises(Killed):
        run._log(20, {"loss": 2, "entropy": 3})
    assert [float(row["loss"]) for row in rows_of(tmp_path)] == [1]


def test_rows_logged_again_after_a_resume_come_once(tmp_path):
    with Run(tmp_path) as run:
        run.log(0, loss=9)
        run.log(5, loss=-8)
        run.log(10, loss=1)
        run.save({})
        run.log(10, evaluation=np.nan)
        run.log(10, loss=2, evaluation=5)
    with Run(tmp_path, resume=True) as run:  # such as a program that evaluates before each update
        run.log(10, evaluation=6)
        run.log(20, loss=3)
        run.log(20, loss=4)  # not of the run before
        assert run.latest("evaluation") == 6
    with Run(tmp_path, resume=True) as run:
        run.log(10, loss=8)
        run.log(10, evaluation=7)
    rows = [(float(row["env_steps"]), row["loss"], row["evaluation"]) for row in rows_of(tmp_path)]
    assert rows == [(0, "9", ""), (5, "-8", ""), (10, "2", "5"), (10, "8", ""), (10, "", "7")]
    assert rows_of(tmp_path)[3]["steps_per_second"]  # of the first row
    seconds = [float(row["seconds"]) for row in rows_of(tmp_path)]
    assert seconds == sorted(seconds)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_evaluated_run_is_only_read(tmp_path, capsys):
    learned = {"weight": jnp.arange(3)}
    with jaxvec.make("CartPole-v1", 2, num_workers=1, states=2) as envs, Run(tmp_path) as run:
        handle, timestep = jaxvec.reset(envs, seed=0)
        run.log(10, episode_return=1)
        run.save(learned, (handle, timestep.obs), envs)
        run.log(20, episode_return=2)
        jax.effects_barrier()
        before = files_of(tmp_path)
        with Run(tmp_path, evaluate=True) as run:
            loaded, playing = run.load(jax.tree.map(jnp.zeros_like, learned), (handle, timestep.obs), envs)
            run.report(jnp.float32([1, 3, 5]))
        assert files_of(tmp_path) == before
        assert playing[0] is handle
        assert run.env_steps == 10
        assert run.latest("episode_return") == 1
        jaxvec.step(handle, jnp.zeros(2, int))  # the episodes were not replaced
    np.testing.assert_array_equal(loaded["weight"], learned["weight"])
    assert capsys.readouterr().out == "mean return 3 ± 1.63 over 3 episodes\n"


@pytest.mark.jax_version
def test_saved_params_replace_older_ones_of_any_structure(tmp_path):
    params = {"layers": [jnp.arange(3, dtype=jnp.bfloat16), {"bias": jnp.float32(2)}], "count": jnp.int32(7)}
    params["empty"] = jnp.zeros(0)
    for _ in range(2):  # the second run continues the first one
        with Run(tmp_path, resume=(tmp_path / "checkpoints").exists()) as run:
            run.log(10, loss=1)
            run.save({"x": jnp.zeros(1)}, params={"older": jnp.zeros(2)})
            run.save({"x": jnp.zeros(1)}, params=params)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]
    loaded = load_params(tmp_path)
    assert {*loaded} == {*params}
    assert loaded["empty"] is None  # Orbax refuses arrays of size 0
    assert loaded["layers"][0].dtype == jnp.bfloat16
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(loaded))
    jax.tree.map(np.testing.assert_array_equal, loaded["layers"], params["layers"])


SAVING = """
import sys
import numpy as np
from jaxvec.logging import Run

with Run(sys.argv[1]) as run:
    for number in range(1000):
        run.save(np.int32(0), params={"weight": np.full(100_000, number)})
        print(number, flush=True)
"""


def test_params_are_whole_after_a_kill_at_any_time(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SAVING, tmp_path], stdout=subprocess.PIPE) as program:
        for number in range(3):
            assert int(program.stdout.readline()) == number
        program.kill()  # while it saves the next ones
    assert program.returncode == -9
    (number,) = np.unique(load_params(tmp_path)["weight"])
    assert number >= 2


def test_a_run_films_the_first_envs(tmp_path):
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    pytest.importorskip("pygame", reason="pygame is not installed")
    with Run(tmp_path, progress=False) as run:
        assert run.film("CartPole-v1", 0) == "CartPole-v1"
        make = partial(gymnasium.make, "CartPole-v1", max_episode_steps=3)
        own, given = (make, {}), ("CartPole-v1", {"max_episode_steps": 3})
        # The second pool is that of a resumed run.
        for steps, start, (env, options) in ((0, "", own), (60, "from_60_", given)):
            run.log(steps)
            jax.effects_barrier()
            with jaxvec.make(run.film(env, 2), 3, num_workers=1, **options) as envs:
                envs.reset(seed=0)
                envs.step(np.zeros(3, int))
                assert envs.get_attr("render_mode") == ("rgb_array", "rgb_array", None)
                for _ in range(2):
                    _, _, _, truncated, _ = envs.step(np.zeros(3, int))
                assert truncated.all()
                (modules,) = {frozenset(names) for names in envs.map(lambda env: [*sys.modules])}
                assert "jax" not in modules
            films = {path.name for path in (tmp_path / "videos").glob(f"{start}env_*")}
            assert {f"{start}env_{number}-episode-0.mp4" for number in (0, 1)} <= films
            assert not any("env_2" in name for name in films)


def test_a_run_logs_to_any_object_with_a_method_log(tmp_path):
    lines = []
    logger = SimpleNamespace(log=lambda metrics, step: lines.append((metrics, step)))
    with Run(tmp_path) as run:
        run.loggers.append(logger)
        jax.jit(lambda: run.log(jnp.int32(3), loss=jnp.float32(2), done=True))()
    ((metrics, step),) = lines
    assert (step, metrics["loss"], metrics["done"], metrics["env_steps"]) == (3, 2.0, 1, 3)
    assert not any(hasattr(value, "shape") for value in metrics.values())


def test_training_writes_events_for_tensorboard(in_tmp_path):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    with training(Options, ["--logger", "tensorboard"], program="mine") as (_, run):
        run.log(jnp.int32(3), loss=jnp.float32(2))
    (events,) = run.folder.glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_training_logs_to_wandb_and_trackio(in_tmp_path, monkeypatch, name):
    calls = []

    class Package:
        def init(self, **options):
            calls.append(options)
            return self

        def log(self, row, step):
            calls.append((row["loss"], step))

        def finish(self):
            calls.append("finish")

    monkeypatch.setitem(sys.modules, name, Package())
    with training(Options, ["--logger", name, "--name", "a", "--seed", "4"], program="mine") as (_, run):
        run.log(3, loss=2)
    assert calls[0]["config"]["seed"] == 4
    assert calls[0]["name"] == "a"
    assert calls[1:] == [(2, 3), "finish"]


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0:00:00"), (59, "0:00:59"), (90, "0:01:30"), (40_000, "11:06:40")],
)
def test_the_progress_line_shows_the_time_left(tmp_path, capsys, monkeypatch, seconds, text):
    """The first line has no rate, because its time is that of the compiler; no line has a NaN."""
    monkeypatch.setattr("jaxvec.logging._run._PRINT_INTERVAL", -np.inf)
    run = Run(tmp_path, total_steps=3000)
    run._log(500, {"episode_return": np.nan})
    run._seconds, run._first = 10.0 + seconds, (1000, 10.0)
    run._show_progress({"env_steps": 2000, "episode_return": -0.1234, "steps_per_second": 123.4})
    run._show_progress({"env_steps": 3000, "steps_per_second": 12345.6})
    assert capsys.readouterr().err.splitlines() == [
        " 17%    500 steps  mean return          -",
        f" 67%  2,000 steps  mean return     -0.123        123 steps/s  {text} left",
        "100%  3,000 steps     12,346 steps/s",
    ]
    run.close()
    assert rows_of(tmp_path)[0]["steps_per_second"] == ""


def test_the_time_left_does_not_count_the_first_save(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxvec.logging._run._PRINT_INTERVAL", -np.inf)
    run, clock = Run(tmp_path, total_steps=4000), [0.0]
    run._start = 0.0
    monkeypatch.setattr("jaxvec.logging._run.time.perf_counter", lambda: clock[0])

    def write(*_):
        clock[0] += 100

    monkeypatch.setattr(run, "_write_checkpoint", write)
    for step in 1000, 2000, 3000:
        clock[0] += 10
        run._log(step, {"episode_return": 1.0})
        run.save({"weights": np.zeros(2)})
    shown = capsys.readouterr().err.splitlines()
    assert [line.rpartition("  ")[2] for line in shown[1:]] == ["0:00:20 left", "0:01:00 left"]
    assert "100 steps/s" in shown[1]


def test_the_curve_shows_the_evaluations(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: drawn.extend(self.axes[0].lines))
    with Run(tmp_path) as run:
        run.log(10, episode_return=np.nan)
        run.log(20, episode_return=3)
        run.log(20, evaluation=5)
    lines = {line.get_label(): line.get_xydata() for line in drawn}
    np.testing.assert_array_equal(lines["episode_return"], [[10, np.nan], [20, 3]])
    np.testing.assert_array_equal(lines["evaluation"], [[20, 5]])


@pytest.mark.parametrize("module", [None, "jaxvec.examples.ppo"])
def test_messages_name_the_command_of_the_program(in_tmp_path, capsys, monkeypatch, module):
    spec = module and SimpleNamespace(name=module)
    command = f"python -m {module}" if module else "python my/program.py"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr("jaxvec.logging._training._keep_compiled", lambda: None)
    monkeypatch.setattr(sys, "argv", ["my/program.py", "--name", "a"])
    with pytest.raises(SystemExit), training(Options, program="mine") as (_, run), run.signals():
        run.log(3, episode_return=1)
        jax.effects_barrier()
        signal.raise_signal(signal.SIGTERM)
        while not run.stopped:
            signal.sigtimedwait([], 0.01)
    assert capsys.readouterr().out.endswith(f"continue with {command} --resume runs/a\n")
    assert (run.folder / ".gitignore").read_text() == "*\n"
    for words, message in (("--env none-v0", f"{command}: "), ("--nope", f"{command} --help")):
        monkeypatch.setattr(sys, "argv", ["my/program.py", *words.split()])
        with pytest.raises(SystemExit), training(Options, program="mine"):
            pass
        assert message in capsys.readouterr().err


COMPILING = """
import signal, sys
import jax, jax.numpy as jnp
from jaxvec.logging import Options, training

def large(x):
    for i in range(300):
        x = jnp.sin(x @ x) + i
    return x

with training(Options, ["--name", "run"], program="mine") as (config, run):
    print("kept")
    lowered = jax.jit(large).lower(jnp.ones((8, 8)))
    sys.stderr.write("ready\\n")
    lowered.compile()
    signal.pause()
"""


def test_ctrl_c_while_compiling_leaves_with_the_output(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", COMPILING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(jaxvec.__file__))},
    )
    try:
        assert any(line == "ready\n" for line in program.stderr)
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=PATIENCE)
    finally:
        program.kill()
        program.communicate()
    assert (program.returncode, output, errors) == (130, "kept\n", "interrupted\n")


KEPT = """
import jax
from jaxvec.logging import Options, training

with training(Options, program="mine") as (config, run):
    print(jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.parametrize("chosen", [None, "mine"])
def test_a_program_keeps_what_it_has_compiled_unless_the_user_chose_where(chosen, tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {} if chosen is None else {"JAX_COMPILATION_CACHE_DIR": chosen}
    command = [sys.executable, "-c", KEPT, "--name", "run"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=PATIENCE, check=True
    )
    folder = tmp_path / "cache" / "jaxvec"
    assert done.stdout.splitlines()[0] == (chosen or str(folder / platform.node()))
    assert folder.is_dir() == (chosen is None)


def test_an_interrupted_program_can_be_caught():
    with pytest.raises(SystemExit) as caught:
        raise Interrupted
    assert caught.value.code == 130
