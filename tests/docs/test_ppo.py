"""The program `ppo`, at sizes that take seconds: training, its folder, signals, resuming, kinds of spaces."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support.probe import main as command_line
from support.runs import assert_same_params, assert_same_state, load_params, load_state
from support.scripts import run_python

import jaxvec
from jaxvec.examples import ppo, ppo_mujoco
from jaxvec.logging import TrainingRun
from jaxvec.normalize import RunningMeanStd

SMALL = [
    *("--num-envs", "4", "--num-workers", "1", "--num-steps", "16", "--num-minibatches", "2"),
    *("--eval-episodes", "2", "--eval-steps", "50"),
]


pytestmark = pytest.mark.usefixtures("in_tmp_path")


def rows_of(folder):
    with (Path(folder) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(folder, name):
    return [float(row[name]) for row in rows_of(folder) if row[name]]


def error_in(text):
    """Returns an error as one line, without the frame around it."""
    return " ".join(text.replace("│", " ").split())


class TargetEnv(gymnasium.Env):
    """Pays 1 for the best action, less for others; says at its end how often it was stepped.

    Raises on actions outside its space: neither bounds nor an offset may get lost on the way.
    """

    def __init__(self, observation_space, action_space, best, folder):
        self.observation_space = observation_space
        self.action_space = action_space
        self.best = best
        self.folder = folder
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.steps += 1
        reward = max(0.0, 1.0 - abs(float(np.sum(action)) - self.best))
        return self.observation_space.sample(), reward, False, self.steps % 10 == 0, {}

    def close(self):
        (self.folder / f"{id(self)}-{self.np_random_seed}").write_text(str(self.steps))


class OwnEnv(CartPoleEnv):
    """A class of a module, with an argument."""

    def __init__(self, force=10.0, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.force_mag = force

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward * self.force_mag, *rest


@pytest.mark.jax_version
@pytest.mark.parametrize(
    "env",
    [
        "own_envs:OwnEnv",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("CartPole-v1", "Pendulum-v1")),
    ],
)
def test_ppo_trains_and_writes_a_folder(env, capsys, monkeypatch):
    """The arguments of an own class are those of the run, also for `--evaluate`."""
    monkeypatch.setitem(sys.modules, "own_envs", SimpleNamespace(OwnEnv=OwnEnv))
    own = env == "own_envs:OwnEnv"
    words = [*SMALL, "--env", env, "--total-steps", "900", "--name", "a", "--seed", "3"]
    words += ["--env-kwargs", '{"force": 5.0}', "--spare-envs", "1"] if own else []
    result = ppo.main(words)
    assert result.env_steps == 960
    assert result.folder == Path("runs/a")
    record = json.loads(Path("runs/a/config.json").read_text())
    assert record["config"]["seed"] == 3
    assert record["config"]["env"] == env
    assert record["versions"]["jax"] == jax.__version__
    assert column("runs/a", "env_steps") == [*range(64, 961, 64), 960]
    names = "seconds steps_per_second episode_return episode_length policy_loss value_loss entropy kl"
    assert {*names.split(), "explained_variance", "evaluation"} < {*rows_of("runs/a")[0]}
    assert all(float(row["kl"]) >= -1e-6 for row in rows_of("runs/a")[:-1])
    assert column("runs/a", "evaluation") == [pytest.approx(result.latest("evaluation"))]
    assert Path("runs/a/curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    printed = capsys.readouterr()
    assert f"score {result.latest('evaluation'):.6g}" in printed.out
    assert "\r" not in printed.err
    assert printed.err.startswith("compiling\n")
    assert "100%  960 steps" in printed.err
    if own:
        ppo.main(["--evaluate", "runs/a"])
        mean = float(capsys.readouterr().out.split()[2])
        assert mean == result.latest("evaluation")
        assert mean % 5 < 1e-6
        policy = ppo.load("runs/a")
        assert mean == np.mean([policy.play(seed=10_003 + number) for number in range(2)])
        vmapped = policy.act(None, jnp.stack([jnp.zeros(4), jnp.ones(4)]), {})[1]
        assert [policy(np.zeros(4)), policy(np.ones(4))] == vmapped.tolist()
        assert result.latest("episode_return") == pytest.approx(5 * result.latest("episode_length"))


def returns_of(folder):
    """Returns the returns of episodes with the saved parameters in Gymnasium's own loop."""
    config = ppo.Config(**json.loads((folder / "config.json").read_text())["config"])
    saved = load_params(folder)
    empty = np.zeros(0)  # which Orbax restores as None
    stats = RunningMeanStd(**{name: empty if each is None else each for name, each in saved["stats"].items()})
    returns = []
    for number in range(config.eval_episodes):
        env = gymnasium.make(config.env)
        network = jax.jit(ppo.ActorCritic(env.action_space).apply)
        start = int(env.action_space.start)
        obs, info = env.reset(seed=config.seed + 10_000 + number)
        returns.append(0.0)
        for _ in range(config.eval_steps):
            batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], obs)
            encoded = ppo.encode(env.observation_space, batch)
            if config.mask_info:
                encoded = encoded._replace(mask=info["action_mask"][None] > 0)
            outputs, _ = network(saved["params"], stats, encoded)
            obs, reward, terminated, truncated, info = env.step(start + int(outputs.argmax()))
            returns[-1] += float(reward)
            if terminated or truncated:
                break
    return returns


class LeveledEnv(CartPoleEnv):
    """Appends the level of each episode to a file of its process."""

    def reset(self, *, seed=None, options=None):
        with Path(f"levels-{os.getpid()}").open("a") as file:
            file.write(f"{-1 if options is None else options['level'].item()} ")
        return super().reset(seed=seed)


@pytest.mark.slow
def test_the_curriculum_of_the_page_sets_the_level_of_each_episode(register, monkeypatch):
    page = Path(__file__).parents[2] / "docs/own_agent.md"
    (diff,) = re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
    source = Path(ppo.__file__).read_text()
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        assert source.count(before) == 1
        source = source.replace(before, after)
    program = ModuleType("my_ppo")
    monkeypatch.setitem(sys.modules, "my_ppo", program)
    exec(source, program.__dict__)
    register("Leveled-v0", LeveledEnv, disable_env_checker=True)
    program.main([*SMALL, "--env", "Leveled-v0", "--total-steps", "640", "--name", "a"])
    # Saved states are proven in another process, and evaluations played in this one.
    files = [path.read_text().split() for path in Path().glob("levels-*")]
    levels = [float(level) for level in max(files, key=len)]
    assert levels[:8] == [-1] * 4 + [0] * 4  # the first reset, of `run.train`, has no options
    assert levels == sorted(levels)
    assert levels[-1] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_copy_of_ppo_with_results(name, capsys):
    """The copy lies in an empty folder, and imports no other file of the examples."""
    assert command_line(["new", "ppo", "my_ppo.py"]) == 0
    assert command_line(["new", "ppo", "my_ppo.py"]) == 2
    assert "cannot write my_ppo.py: File exists" in capsys.readouterr().err
    assert "jaxvec.examples" not in Path("my_ppo.py").read_text()
    words = [sys.executable, "my_ppo.py", *SMALL, "--name", "a", "--total-steps", "100000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as program:
        assert program.stderr.readline() == "compiling\n"
        assert " 64 steps" in program.stderr.readline()
        os.kill(program.pid, signal.Signals[name])
        assert "stopping: this update is completed and saved" in program.stderr.readline()
        out, err = program.communicate(timeout=200)
    assert program.returncode == 130
    assert "Traceback" not in err
    assert out.count("\n") == 1
    assert out.startswith("stopped: mean return ")
    assert out.endswith("continue with python my_ppo.py --resume runs/a\n")
    assert Path("runs/a/curve.png").exists()
    ppo.main(["--evaluate", "runs/a"])
    returns = returns_of(Path("runs/a"))
    expected = f"mean return {np.mean(returns):.6g} ± {np.std(returns):.3g} over 2 episodes\n"
    assert capsys.readouterr().out == expected


# A worker waits in its step, so that no update ends, and in one case the program has not even logged.
STUCK = """
import sys, threading
import gymnasium
from jaxvec.examples import ppo

class Stuck(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > STEPS:
            threading.Event().wait()
        return super().step(action)

gymnasium.register("Stuck-v0", lambda: Stuck(gymnasium.make("CartPole-v1")), disable_env_checker=True)
ppo.main(["--env", "Stuck-v0", "--num-envs", "1", "--num-workers", "1", *sys.argv[1:]])
"""


@pytest.mark.parametrize("steps", [0, 16], ids=["before the first update", "by a second signal"])
def test_a_program_that_hangs_ends_at_once_by_signals(steps):
    options = "--num-steps 16 --num-minibatches 1 --name a"
    words = [sys.executable, "-c", STUCK.replace("STEPS", str(steps)), *options.split()]
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile: the program is never fast
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=quick) as program:
        assert program.stderr.readline() == "compiling\n"
        if steps:
            assert " 16 steps" in program.stderr.readline()
            os.kill(program.pid, signal.SIGINT)
            assert program.stderr.readline().startswith("stopping: ")
        os.kill(program.pid, signal.SIGINT)
        assert program.stderr.read() == "interrupted\n"
        assert program.wait(timeout=200) == 130


KILLED = """
import os, signal, sys, threading
from jaxvec.examples import ppo
from jaxvec.logging import Run

def save(self, *args, **kwargs):
    before(self, *args, **kwargs)
    if not killer.is_alive():
        killer.start()

killer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL))
before, Run.save = Run.save, save
ppo.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_result():
    """The kill comes at any moment after the first save, so mostly amid another one."""
    options = [*SMALL, "--total-steps", "6400"]
    words = [sys.executable, "-c", KILLED, *options, "--save-every", "0", "--name", "killed"]
    # Compiled as in this process: otherwise the floats differ in their last bits.
    setting = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | os.environ
    run = subprocess.run(words, capture_output=True, timeout=300, env=setting)
    assert run.returncode == -signal.SIGKILL
    assert load_state("runs/killed")["env_steps"] < 6400
    assert ppo.main(["--resume", "runs/killed", "--save-every", "1e9"]).env_steps == 6400
    ppo.main([*options, "--name", "whole"])
    assert_same_state("runs/killed", "runs/whole")


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(capsys):
    whole = ppo.main([*SMALL, "--total-steps", "640", "--name", "whole"])
    half = ppo.main([*SMALL, "--total-steps", "640", "--name", "half", "--stop-at", "0"])
    assert half.env_steps < 640
    with Path("runs/half/metrics.csv").open("a") as file:
        file.write("99999" + "," * (len(rows_of("runs/half")[0]) - 1) + "\n")  # as after a crash
    resumed = ppo.main(["--resume", "runs/half", "--stop-at", "1e9"])
    assert resumed.env_steps == 640
    assert resumed.latest("evaluation") == whole.latest("evaluation")
    assert_same_params("runs/half", "runs/whole")
    assert_same_state("runs/half", "runs/whole")
    for name in ("episode_return", "entropy", "value_loss", "explained_variance"):
        assert column("runs/half", name) == column("runs/whole", name)
    assert {row["env_steps"] for row in rows_of("runs/half")} == {str(64 * n) for n in range(1, 11)}
    assert "; the episodes continue\n" in capsys.readouterr().err
    assert ppo.main(["--resume", "runs/half", "--total-steps", "704", "--spare-envs", "1"]).env_steps == 704
    assert "resuming after 640 steps; new episodes start\n" in capsys.readouterr().err
    seconds = column("runs/half", "seconds")
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "best"),
    [
        (spaces.Box(0, 255, (2, 3), np.uint8), spaces.Discrete(3, start=-1), 1),
        (spaces.Discrete(3, start=2), spaces.Box(10, 12, (1,), np.float32), 11.9),
        (spaces.MultiBinary(2), spaces.MultiDiscrete([3, 2], start=[1, -1]), 3),
        (spaces.Box(-1, 1, (), np.float64), spaces.Box(-np.inf, np.inf, (2, 1), np.float64), 0.5),
    ],
    ids=[
        "pixels, offset actions",
        "one-hot, bounded actions",
        "several numbers",
        "scalar, unbounded actions",
    ],
)
@pytest.mark.nightly
def test_ppo_learns_and_takes_each_step_once(observation_space, action_space, best, register, tmp_path):
    counts = tmp_path / "counts"
    counts.mkdir()
    register(
        "Target-v0",
        lambda: TargetEnv(observation_space, action_space, best, counts),
        disable_env_checker=True,
    )
    options = "--env Target-v0 --num-envs 8 --num-steps 16 --total-steps 10000 --lr 0.005 --gamma 0.5"
    result = ppo.main([*options.split(), "--name", "a", "--eval-episodes", "1"])
    assert result.env_steps == 10_112  # the next whole update of 128
    steps = sorted(int(count.read_text()) for count in counts.iterdir())
    assert steps == [10, *[10_112 // 8] * 8]  # one env plays an episode of the evaluation
    curve = column("runs/a", "episode_return")
    assert curve[-1] > 6
    assert curve[-1] > curve[1] + 1


class MaskedEnv(gymnasium.Env):
    """Shows the rewarded action as a bright column of an image; accepts only the legal actions.

    The legal actions are in a leaf of the observation, and in the info.
    """

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32))),
            "action_mask": spaces.MultiBinary(4),
        }
    )
    action_space = spaces.Discrete(4, start=5)

    def __init__(self, leaf=True):
        self.leaf = leaf
        if not leaf:
            self.observation_space = self.observation_space["image"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.show()

    def show(self):
        self.best = int(self.np_random.integers(4))
        self.mask = np.zeros(4, np.int8)
        self.mask[[self.best, (self.best + 1) % 4]] = 1
        image = np.zeros((12, 12, 3), np.uint8)
        image[:, 3 * self.best : 3 * self.best + 3] = 255
        pair = (np.int64(1), np.zeros(2, np.float32))
        obs = {"image": image, "pair": pair, "action_mask": self.mask} if self.leaf else image
        return obs, {} if self.leaf else {"action_mask": self.mask}

    def step(self, action):
        assert self.mask[action - 5], f"action {action} is not legal: {self.mask}"
        reward = float(action - 5 == self.best)
        self.steps += 1
        obs, info = self.show()
        return obs, reward, False, self.steps == 10, info


@pytest.mark.slow
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "info"])
def test_ppo_learns_from_images_with_legal_actions(leaf, register, capsys):
    register("Masked-v0", lambda: MaskedEnv(leaf), disable_env_checker=True)
    options = "--env Masked-v0 --num-envs 8 --num-workers 1 --num-steps 32 --total-steps 5120 --gamma 0.5"
    words = [*options.split(), "--eval-episodes", "2", "--name", "a", *([] if leaf else ["--mask-info"])]
    result = ppo.main(words)
    assert column("runs/a", "episode_return")[0] < 7
    assert result.latest("evaluation") > 8
    before = {path: path.read_bytes() for path in Path("runs/a").rglob("*") if path.is_file()}
    capsys.readouterr()
    ppo.main(["--evaluate", "runs/a"])
    returns = returns_of(Path("runs/a"))
    expected = f"mean return {np.mean(returns):.6g} ± {np.std(returns):.3g} over 2 episodes\n"
    assert capsys.readouterr().out == expected
    assert np.mean(returns) == result.latest("evaluation")
    assert ppo.load("runs/a").play(seed=10_001) == returns[1]
    ppo.main(["--evaluate", "runs/a", "--eval-episodes", "5"])
    assert capsys.readouterr().out.endswith(" over 5 episodes\n")
    assert before == {path: path.read_bytes() for path in Path("runs/a").rglob("*") if path.is_file()}


def test_evaluate_refuses_a_folder_without_a_saved_run(capsys):
    Path("runs/a").mkdir(parents=True)
    for words, message in (
        (["--evaluate", "runs/b"], "runs/b/config.json does not exist; pass the folder of a run"),
        (["--evaluate", "runs/a", "--resume", "runs/a"], "--evaluate and --resume exclude each other"),
    ):
        with pytest.raises(SystemExit):
            ppo.main(words)
        assert message in error_in(capsys.readouterr().err)
    with pytest.raises(ValueError, match="runs/b/config.json does not exist; pass the folder of a run"):
        ppo.load("runs/b")
    Path("runs/a/config.json").write_text('{"config": {"seed": 1, "buffer_size": 2}}')
    with pytest.raises(ValueError, match="runs/a is a run of another program, with the options buffer_size"):
        ppo.load("runs/a")


@pytest.mark.slow
def test_convolutions_on_the_cpu_equal_those_of_jax():
    images = jax.random.normal(jax.random.key(0), (5, 11, 14, 3))
    for size, strides in ((4, (2, 2)), (3, (1, 1)), (5, (3, 2))):
        kernel = jax.random.normal(jax.random.key(1), (size, size, 3, 7))
        numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        expected = jax.lax.conv_general_dilated(images, kernel, strides, "VALID", **numbers)
        found = ppo.convolve(images, kernel, strides, "VALID", **numbers)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_mujoco_trains_with_scaled_rewards(capsys):
    pytest.importorskip("mujoco", reason="mujoco is not installed")
    result = ppo_mujoco.main([*SMALL, "--num-epochs", "2", "--total-steps", "128", "--name", "a"])
    assert result.env_steps == 128
    assert "128 env steps" in capsys.readouterr().out


@pytest.mark.parametrize("env", ["CartPole-v1"])
def test_ppo_films_envs(env):
    pytest.importorskip("moviepy", reason="moviepy is not installed")
    ppo.main([*SMALL, "--env", env, "--total-steps", "640", "--video", "1", "--name", "a"])
    assert list(Path("runs/a/videos").glob("env_0-episode-0.mp4"))
    assert not list(Path("runs/a/videos").glob("env_1*"))
    ppo.main(["--evaluate", "runs/a"])
    assert len(list(Path("runs/a/videos").glob("evaluation_*"))) == 1


@pytest.mark.parametrize(
    ("spaces_", "message"),
    [
        ((spaces.Text(3), spaces.Discrete(2)), "Box, Discrete, Dict and Tuple observations, not Text"),
        ((spaces.Discrete(2), spaces.MultiBinary(3)), "MultiDiscrete and float Box actions, not MultiBinary"),
    ],
)
def test_ppo_says_which_spaces_it_takes(spaces_, message):
    space, action_space = spaces_
    with pytest.raises(SystemExit, match=message):
        ppo.encode(space, jnp.zeros(1, int))
        envs = SimpleNamespace(single_observation_space=space, single_action_space=action_space)
        ppo.train(ppo.Config(), None, envs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--num-envs 3 --num-steps 3", "multiple of --num-minibatches"),
        ("--total-steps 0", "at least 1"),
        ("--env Cartpole-v7", "Cartpole"),
        ("--env no_module:Own-v0", "no_module"),
        ("--env-kwargs {x", "--env-kwargs is not JSON"),
        ("--env-kwargs [1]", "--env-kwargs must be a JSON object"),
        ("--resume runs/none", "runs/none/config.json"),
    ],
)
def test_ppo_refuses_options_that_do_not_fit(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        ppo.main(options.split())
    assert caught.value.code == 2
    assert message in error_in(capsys.readouterr().err)


def test_ppo_advantages_go_on_where_an_episode_was_only_truncated():
    rng = np.random.default_rng(0)
    shape = 6, 2
    reward, value, next_value = rng.normal(size=(3, *shape)).astype(np.float32)
    terminated, truncated = np.zeros((2, *shape), bool)
    terminated[1, 0] = truncated[3, 0] = truncated[2, 1] = terminated[5, 1] = True
    done = terminated | truncated
    steps = ppo.Steps(None, None, None, value, next_value, reward, terminated, done, None)

    expected, later = np.zeros(shape), np.zeros(2)
    for t in reversed(range(6)):
        bootstrap = np.where(terminated[t], 0, next_value[t])
        later = np.where(done[t], 0, later)
        expected[t] = later = reward[t] + 0.9 * bootstrap - value[t] + 0.9 * 0.8 * later

    advantage = ppo.advantages(ppo.Config(gamma=0.9, gae_lambda=0.8), steps)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-6)


class NoisyEnv(gymnasium.Env):
    """Draws its rewards and ends, whatever the action is."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        terminated, truncated = self.np_random.random(2) < 0.05
        return 0, self.np_random.normal(), bool(terminated), bool(truncated), {}


class FaultyEnv(NoisyEnv):
    """Raises in a method."""

    def __init__(self, method):
        self.method = method
        self.fail("constructor")

    def reset(self, *, seed=None, options=None):
        self.fail("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.fail("step")
        return super().step(action)

    def fail(self, method):
        if method == self.method:
            raise ValueError("of the env\nand more")


@pytest.mark.parametrize("method", ["constructor", "reset", "step"])
def test_an_env_that_fails_ends_ppo_with_one_line(method, register, capfd):
    register("Faulty-v0", partial(FaultyEnv, method), disable_env_checker=True)
    with pytest.raises(SystemExit) as caught:
        ppo.main([*SMALL, "--env", "Faulty-v0", "--name", "a"])
    assert caught.value.code == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if line != "compiling"]
    assert len(lines) == 1
    assert re.match(
        rf"ppo: env . \(worker 0\) raised ValueError in {method}.*: of the env \(\".*\", line \d+\)$",
        lines[0],
    )
    assert not Path("runs/a").exists()
    run = TrainingRun("runs/b")
    run.options = ppo.Config(env="Faulty-v0")
    with pytest.raises(jaxvec.EnvError, match=rf"env . raised ValueError in {method}"):
        run.play(lambda *_: (None, np.zeros(run.options.eval_episodes, int)))


def test_a_film_without_moviepy_ends_ppo_with_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "moviepy.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        ppo.main([*SMALL, "--video", "1", "--name", "a"])
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line != "compiling"]
    assert "raised gymnasium.error.DependencyNotInstalled in constructor: moviepy is not installed" in line
    assert not Path("runs/a").exists()


def test_a_missing_package_ends_a_program_with_one_line():
    for name, package in ("ppo", "flax"), ("ippo", "pettingzoo"):
        source = f"import runpy, sys; sys.modules['{package}'] = None; sys.argv[0] = '-m'"
        run = run_python("-c", f"{source}; runpy.run_module('jaxvec.examples.{name}', run_name='__main__')")
        assert run.returncode == 1
        assert re.fullmatch(rf".* needs? {package}.*: pip install .*\n", run.stderr)


@pytest.mark.slow
def test_discounted_returns_are_those_of_each_episode_so_far(register):
    register("Noisy-v0", NoisyEnv, disable_env_checker=True)
    options = "--env Noisy-v0 --num-envs 3 --num-workers 1 --num-steps 40 --num-minibatches 1 --gamma 0.9"
    ppo.main([*options.split(), "--total-steps", "240", "--eval-episodes", "1", "--name", "a"])
    saved = load_state("runs/a")["leaves"]
    oracle = SyncVectorEnv([NoisyEnv] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    oracle.reset(seed=0)
    expected, total, ends = [], np.zeros(3), 0
    for _ in range(80):
        _, reward, terminated, truncated, _ = oracle.step([0, 0, 0])
        total = 0.9 * total + reward
        expected.append(total)
        total = np.where(terminated | truncated, 0, total)
        ends += (terminated | truncated).sum()
    assert ends > 10
    stats = {name: saved[f"['learned'].return_stats.{name}"] for name in ("mean", "var", "count")}
    assert stats["count"] == 240
    np.testing.assert_allclose(stats["mean"], np.mean(expected), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats["var"], np.var(expected), rtol=1e-4)
    np.testing.assert_allclose(saved["['playing'][2]"], [total], rtol=1e-5, atol=1e-6)
