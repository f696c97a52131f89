"""The example programs, at sizes that take seconds."""

import csv
import importlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from jax.sharding import Mesh
from support.runs import assert_same_leaves, assert_same_params, assert_same_state, load_params, load_state

import jaxvec
from jaxvec.examples import (
    data_parallel,
    dqn,
    impala,
    impala_ray,
    plr,
    ppo_atari,
    ppo_mujoco,
    ppo_recurrent,
    sac,
    search,
)
from jaxvec.logging import Run
from jaxvec.normalize import RunningMeanStd
from jaxvec.testing import CountingEnv

KEY = jax.random.key(0)


pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["--num-workers 2 --mean-delay 0.0001", "--num-actors 0"])
def test_impala_trains_and_continues_with_what_it_saved(options):
    words = [*options.split(), *["--num-envs", "4", "--num-steps", "50", "--total-steps", "900"]]
    stopped = impala.main([*words, "--name", "a", "--stop-at=-1e9"])  # when the first episode ends
    before = load_params("runs/a")
    assert stopped.env_steps == before["stats"]["count"] < 1000
    resumed = impala.main(["--resume", "runs/a", "--stop-at", "1e9", "--lr", "0"])
    metrics = resumed.metrics()
    assert metrics["env_steps"].tolist() == [200, 400, 600, 800, 1000]
    columns = "seconds steps_per_second entropy kl policy_loss value_loss explained_variance"
    assert {*columns.split()} < {*metrics}
    assert (np.diff(metrics["episodes"]) > 0).all()
    # Without a learning rate, the parameters are those that were saved. The statistics continue.
    after = load_params("runs/a")
    jax.tree.map(np.testing.assert_array_equal, after["params"], before["params"])
    assert after["stats"]["count"] == 1000


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "options"),
    [
        (dqn, "--learn-after 200"),
        (sac, "--learn-after 200 --gradient-steps 1"),
        (ppo_recurrent, "--num-minibatches 2"),
        (search, "--num-minibatches 2 --num-simulations 2 --eval-episodes 1 --eval-steps 20"),
    ],
    ids=["dqn", "sac", "ppo_recurrent", "search"],
)
def test_a_resumed_program_equals_an_uninterrupted_one(program, options, capsys):
    words = [*options.split(), *["--num-envs", "4", "--num-steps", "50", "--total-steps", "900"]]
    words += ["--num-workers", "1", "--name"]
    whole = program.main([*words, "whole"])
    assert whole.env_steps == 1000
    rows = list(csv.DictReader(Path("runs/whole/metrics.csv").read_text().splitlines()))
    updates = [row for row in rows if row["episodes"]]  # the other lines are evaluations
    assert [row["env_steps"] for row in updates] == ["200", "400", "600", "800", "1000"]
    assert {"seconds", "steps_per_second", "episode_return", "episode_length"} < {*rows[0]}
    if program is sac:
        parts = [float(updates[-1][name]) for name in ("value_loss", "policy_loss", "entropy", "alpha")]
        assert np.isfinite(parts).all()
    assert json.loads(Path("runs/whole/config.json").read_text())["config"]["num_envs"] == 4
    half = program.main([*words, "half", "--stop-at=-1e9"])
    assert half.env_steps < 1000
    resumed = program.main(["--resume", "runs/half", "--stop-at", "1e9"])
    assert resumed.env_steps == 1000
    assert_same_state("runs/half", "runs/whole")
    assert_same_params("runs/half", "runs/whole")
    assert np.isfinite(whole.latest("evaluation"))
    assert resumed.latest("evaluation") == whole.latest("evaluation")
    capsys.readouterr()
    program.main(["--evaluate", "runs/half"])
    assert capsys.readouterr().out.startswith(f"mean return {whole.latest('evaluation'):.6g} ± ")


@pytest.mark.slow
@pytest.mark.parametrize("program", [dqn, ppo_recurrent], ids=["dqn", "ppo_recurrent"])
def test_an_evaluation_plays_the_best_actions(program, capsys):
    options = (
        "--num-envs 8 --num-steps 50 --total-steps 400 --num-workers 1 --eval-episodes 3 --seed 5 --name a"
    )
    run = program.main(options.split())
    saved = load_params("runs/a")
    stats = RunningMeanStd(**saved["stats"])
    if program is dqn:
        network = dqn.QNetwork(2)
        best = lambda memory, obs: (memory, network.apply(saved["params"], obs))  # noqa: E731
    else:
        network = ppo_recurrent.RecurrentActorCritic(2, 64)
        best = lambda memory, obs: network.apply(saved["params"], memory, obs)[:2]  # noqa: E731
    returns = []
    for number in range(3):
        env = gymnasium.make("CartPole-v1")
        obs, _ = env.reset(seed=5 + 10_000 + number)
        memory, total, over = jnp.zeros((1, 64)), 0.0, False
        while not over:
            seen = obs if program is dqn else obs[[0, 2]]
            memory, preferences = best(memory, stats.normalize(jnp.asarray(seen)[None]))
            obs, reward, terminated, truncated, _ = env.step(int(preferences[0].argmax()))
            total, over = total + reward, terminated or truncated
        returns.append(total)
    assert run.latest("evaluation") == pytest.approx(np.mean(returns))
    assert f"score {np.mean(returns):.6g}: " in capsys.readouterr().out
    assert program.load("runs/a").play(seed=5 + 10_000) == returns[0]
    program.main(["--evaluate", "runs/a"])
    expected = f"mean return {np.mean(returns):.6g} ± {np.std(returns):.3g} over 3 episodes\n"
    assert capsys.readouterr().out == expected


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["dqn", "sac", "ppo_recurrent", "search", "ppo_atari", "impala", "ippo", "plr"]
)
def test_a_copy_in_an_empty_folder_ends_by_a_signal(name):
    """A copy needs none of the other files, and writes its folder when it is interrupted."""
    needed = {"ppo_atari": "ale_py", "ippo": "mpe2"}.get(name, "jax")
    pytest.importorskip(needed, reason=f"the extra families has {needed}")
    source = Path(dqn.__file__).with_name(f"{name}.py")
    Path("my_program.py").write_text(source.read_text())
    words = [
        sys.executable,
        "my_program.py",
        "--num-workers",
        "1",
        "--total-steps",
        "100000000",
        "--name",
        "a",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as program:
        assert program.stderr.readline() == "compiling\n"
        assert " steps  mean return" in program.stderr.readline()
        os.kill(program.pid, signal.SIGTERM)
        out, err = program.communicate(timeout=200)
    assert program.returncode == 130, err
    assert "Traceback" not in err
    assert "stopping: this update is completed and saved" in err
    assert out.startswith("stopped: mean return ")
    assert out.endswith("continue with python my_program.py --resume runs/a\n")
    assert {"metrics.csv", "checkpoints"} < {path.name for path in Path("runs/a").iterdir()}
    assert "params" in load_params("runs/a")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dqn", "--learn-after 128"),
        ("sac", "--learn-after 128 --gradient-steps 1"),
        ("ppo_recurrent", "--num-minibatches 2"),
        ("search", "--num-minibatches 2 --num-simulations 2 --eval-episodes 2 --eval-steps 30"),
        ("impala", "--num-actors 2"),
        ("ippo", "--num-minibatches 2"),
        ("plr", "--num-seeds 1 --num-batches 1 --buffer-size 8"),
        ("ppo_atari", "--num-minibatches 2"),
    ],
)
def test_programs_film_envs_while_they_train(name, options, monkeypatch):
    needed = {"ppo_atari": "ale_py", "ippo": "mpe2"}.get(name, "jax")
    for module in ("moviepy", needed):
        pytest.importorskip(module, reason=f"{module} is not installed")
    monkeypatch.setattr(ppo_atari, "NatureNetwork", TinyNetwork)
    options += "" if name == "plr" else " --num-steps 30"  # its updates have the length of an episode
    words = f"--num-envs 4 --num-workers 2 --total-steps 240 --video 1 --name a {options}"
    importlib.import_module(f"jaxvec.examples.{name}").main(words.split())
    assert Path("runs/a/videos/env_0-episode-0.mp4").stat().st_size > 0
    assert {path.name.partition("-")[0] for path in Path("runs/a/videos").iterdir()} == {"env_0"}


def test_impala_ray_does_not_film(capsys):
    with pytest.raises(SystemExit):
        impala_ray.main(["--video", "1"])
    assert "--video is not supported" in capsys.readouterr().err


class TinyNetwork(nn.Module):
    """A network that takes less time to compile than `NatureNetwork`."""

    num_actions: int

    @nn.compact
    def __call__(self, frames):
        hidden = frames[:, ::16, ::16].reshape(len(frames), -1) / 255
        return nn.Dense(self.num_actions)(hidden), nn.Dense(1)(hidden)[..., 0]


def test_atari_continues_with_its_games(monkeypatch, capsys):
    pytest.importorskip("ale_py", reason="ale_py is not installed")
    monkeypatch.setattr(ppo_atari, "NatureNetwork", TinyNetwork)
    options = "--num-steps 8 --num-minibatches 2 --num-envs 4 --num-workers 1 --total-steps 96"
    whole = ppo_atari.main([*options.split(), "--name", "whole"])
    assert whole.env_steps == 96
    assert "96 env steps" in capsys.readouterr().out
    rows = list(csv.DictReader(Path("runs/whole/metrics.csv").read_text().splitlines()))
    assert [row["env_steps"] for row in rows] == ["32", "64", "96"]
    assert all(float(row["explained_variance"]) <= 1 for row in rows)
    assert load_state("runs/whole")["envs"].size > 0

    def fail(self, *args, **kwargs):
        before(self, *args, **kwargs)
        raise RuntimeError("killed")

    before = Run.save
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(Run, "save", fail)
        ppo_atari.main([*options.split(), "--name", "half"])
    assert ppo_atari.main(["--resume", "runs/half"]).env_steps == 96
    assert_same_leaves("runs/half", "runs/whole")  # pickles of equal states of games differ
    ppo_atari.main(["--evaluate", "runs/whole", "--eval-episodes", "2", "--eval-steps", "20"])
    assert " over 2 episodes\n" in capsys.readouterr().out


@pytest.mark.parametrize(("program", "module"), [(ppo_atari, "ale_py"), (ppo_mujoco, "mujoco")])
def test_programs_name_the_package_that_they_need(program, module, monkeypatch):
    pytest.importorskip(module, reason=f"{module} is not installed")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=f'this example needs {module}: pip install .*"'):
        program.main([])


class GameEnv(gymnasium.Env):
    """Shows noise, and loses lives by chance; ends without any, or is cut short."""

    observation_space = spaces.Box(0, 255, (2, 3), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.lives = 0, 3
        return self.frame(), {"lives": self.lives}

    def step(self, action):
        self.steps += 1
        self.lives -= int(self.np_random.random() < 0.2)
        ends = self.lives == 0, self.steps == 12
        return self.frame(), 5.0 * (int(action) - 1), *ends, {"lives": self.lives}

    def frame(self):
        return self.np_random.integers(0, 256, (2, 3), np.uint8)


def value_of(frames):
    return (frames.astype(np.float32) * np.float32([1, 2, 3, 4])).sum((-3, -2, -1))


@pytest.mark.slow
def test_atari_halves_learn_from_the_results_gymnasium_returns():
    """Each result belongs to the decision before the last, also the first and the last ones of an update."""
    num_steps, num_envs = 20, 6
    config = ppo_atari.Config(num_envs=num_envs, num_steps=num_steps, num_minibatches=1)
    agent = ppo_atari.Agent(config, GameEnv.action_space)
    agent.network = SimpleNamespace(
        init=lambda *_: jnp.zeros(1), apply=lambda _, frames: (jnp.zeros((len(frames), 3)), value_of(frames))
    )
    updates = []
    with jaxvec.make(GameEnv, num_envs, info={"lives": int}, **ppo_atari.halves(config)) as envs:
        state, playing = jax.jit(agent.begin)(*jaxvec.reset(envs, seed=7))
        for key in jax.random.split(KEY):
            playing, episodes, steps = jax.jit(agent.collect)(state, playing, key)
            state = state._replace(episodes=episodes)
            updates.append(steps)
    returns = []
    played = jax.tree.map(lambda *leaves: np.concatenate(leaves), *updates)

    order = np.concatenate([half.env_id for half in playing.halves]).tolist()
    assert sorted(order) == [*range(num_envs)]
    lost, cut = 0, 0
    for number, env_id in enumerate(order):
        env = GameEnv()
        frame, _ = env.reset(seed=7 + env_id)
        frames, score, lives = np.stack([frame] * 4, -1), 0.0, env.lives
        for step in range(2 * num_steps):
            now = jax.tree.map(lambda leaf, step=step, number=number: leaf[step, number], played)
            frame, reward, terminated, truncated, _ = env.step(now.decision.action)
            score += reward
            after = np.concatenate([frames[..., 1:], frame[..., None]], -1)
            life_lost, over = env.lives < lives, terminated or truncated
            decision = ppo_atari.Decision(
                frames, lives, now.decision.action, np.float32(-np.log(3)), value_of(frames)
            )
            expected = ppo_atari.Steps(
                decision,
                # Has no meaning after the last life.
                now.next_value if terminated else value_of(after),
                np.sign(reward),
                terminated or life_lost,
                over or life_lost,
                over,
            )
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), now, expected)
            lost, cut = lost + (life_lost and not over), cut + truncated
            frames, lives = after, env.lives
            if over:
                returns.append(score)
                frame, _ = env.reset()
                frames, score, lives = np.stack([frame] * 4, -1), 0.0, env.lives
    assert min(lost, cut) > 3
    assert episodes.total == len(returns)
    np.testing.assert_allclose(episodes.means()["episode_return"], np.mean(returns), rtol=1e-5)


class Counting(dqn.Agent):
    """An agent whose actions depend on the step, and which counts its gradient steps."""

    def act(self, params, obs, progress, key):
        return jnp.round(progress * 24).astype(jnp.int32).repeat(len(obs)) % 2

    def learn(self, state, key):
        count = state.learned.opt_state + self.config.gradient_steps
        return state.learned._replace(opt_state=count), jnp.float32(0)


@pytest.mark.slow
def test_what_is_replayed_is_what_gymnasium_returns_within_episodes():
    """A limit of four steps truncates; a pole that falls, and ends an episode, takes longer."""
    config = dqn.Config(
        num_envs=2, num_steps=24, total_steps=48, batch_size=2, learn_after=20, gradient_steps=3
    )
    make = {"max_episode_steps": 4}
    oracle = SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1", **make)] * 2,
        autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
    )
    obs, _ = oracle.reset(seed=3)
    expected = []
    for step in range(24):
        action = np.full(2, step % 2)
        after, reward, terminated, truncated, info = oracle.step(action)
        within = np.stack(info["final_obs"]) if truncated.any() else after
        expected.append((obs, action, reward, within, terminated))
        obs = after
    with jaxvec.make("CartPole-v1", 2, **make) as envs:
        agent = Counting(config, envs.single_observation_space, envs.single_action_space)
        state, playing = agent.begin(*jaxvec.reset(envs, seed=3))
        state = state._replace(learned=state.learned._replace(opt_state=jnp.int32(0)))
        state, _, _ = jax.jit(agent.update)(state, playing)
    kept = state.buffer.experience
    for name, value in zip(dqn.Transition._fields, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(getattr(kept, name)[0, :48], np.concatenate(value), name)
    assert state.learned.opt_state == 3 * (24 - 20 // 2 + 1)


def ends_and_goes_on(loss, action):
    """Returns losses of a transition that ended, and of one that differs from it in nothing else."""
    obs, reward = jnp.ones((1, 3)), jnp.float32([2.0])
    return [loss(dqn.Transition(obs, action, reward, obs, jnp.array([ended]))) for ended in (True, False)]


def test_dqn_s_targets_go_on_where_an_episode_was_only_truncated():
    network = SimpleNamespace(apply=lambda params, obs: jnp.full((len(obs), 2), params))
    algorithm = dqn.Agent(dqn.Config(gamma=0.5), spaces.Box(0, 1, (3,)), spaces.Discrete(2))
    algorithm.network = network
    losses = ends_and_goes_on(partial(algorithm.loss, 0.0, jnp.float32(5)), jnp.zeros(1, jnp.int32))
    assert losses == [pytest.approx(0.5), pytest.approx(1 + 2.5 - 0.5)]  # Huber's


@pytest.mark.slow
def test_sac_s_targets_go_on_where_an_episode_was_only_truncated():
    policy = SimpleNamespace(apply=lambda params, obs: jnp.zeros((len(obs), 2)))
    critic = SimpleNamespace(apply=lambda params, inputs: jnp.full((len(inputs), 1), params))
    algorithm = sac.Agent(sac.Config(gamma=0.5), spaces.Box(0, 1, (3,)), spaces.Box(-2, 2, (1,)))
    algorithm.policy, algorithm.critic = policy, critic
    weights = sac.Weights((), jnp.zeros(2), jnp.float32(-100))  # no weight on entropy
    loss = partial(algorithm.loss, weights, jnp.full(2, 5.0), key=KEY)
    (ended, _), (went_on, _) = ends_and_goes_on(loss, jnp.zeros((1, 1)))
    # Of the temperature, nothing of this depends on the end.
    assert went_on - ended == pytest.approx((2 + 2.5) ** 2 - 2**2, rel=1e-4)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("length", "future"), [(1, 0), (9, 5)])
def test_data_parallel_bootstraps_only_what_goes_on(length, future):
    """The time limit truncates each first step, which also terminates the episodes of length 1."""

    def make():
        env = gymnasium.wrappers.TransformObservation(
            CountingEnv(length), lambda obs: obs.astype(np.float32), spaces.Box(-1, 99, (4,), np.float32)
        )
        return gymnasium.wrappers.TimeLimit(env, 1)

    mesh = Mesh(jax.devices()[:1], data_parallel.AXIS)
    same, split = data_parallel.SAME, data_parallel.SPLIT
    program = jax.shard_map(
        partial(data_parallel.update, 3),
        mesh=mesh,
        in_specs=(same, split, split, same),
        out_specs=(same, split, same),
    )
    params = [(jnp.zeros((4, 3)), jnp.array([5.0, 0, 0]))]  # all values are 5
    learner = params, data_parallel.OPTIMIZER.init(params)
    with jaxvec.make(make, 2, num_workers=1) as envs:
        handle, timestep = jaxvec.reset(envs)
        own = handle, timestep.obs, jnp.zeros(2), jnp.zeros(2)
        _, _, means = jax.jit(program)(learner, own, jnp.zeros((1, 2)), KEY)
    target = data_parallel.REWARD_SCALE + data_parallel.GAMMA * future
    assert means["value_loss"] == pytest.approx(0.5 * (target - 5) ** 2, rel=1e-4)


@pytest.mark.slow
def test_what_a_memory_is_trained_on_is_what_it_did():
    """Else ratios of probabilities would not begin at 1. Episodes end within the sequence."""
    config = ppo_recurrent.Config(num_envs=4, num_steps=60, num_minibatches=1)
    with jaxvec.make("CartPole-v1", 4) as envs:
        agent = ppo_recurrent.Agent(config, envs.single_observation_space, envs.single_action_space)
        handle, timestep = jaxvec.reset(envs, seed=1)
        state, playing = agent.begin(handle, timestep)
        assert playing.obs.tolist() == timestep.obs[:, [0, 2]].tolist()
        memory = jax.random.normal(KEY, (4, config.num_units))
        state = state._replace(obs_stats=state.obs_stats.update(playing.obs))
        _, _, steps = jax.jit(agent.collect)(state, playing._replace(memory=memory), KEY)
        assert steps.done.any()

    def log_prob(done):
        logits, _ = agent.outputs(state.params, memory, steps._replace(done=done))
        return ppo_recurrent.evaluate(logits, steps.action)[0]

    np.testing.assert_allclose(log_prob(steps.done), steps.log_prob, atol=1e-5)
    # The test sees a memory that was not emptied.
    assert np.abs(log_prob(jnp.zeros_like(steps.done)) - steps.log_prob).max() > 1e-4
    zeros = jnp.zeros_like(steps.reward)
    _, metrics = agent.loss(state.params, memory, steps, zeros, zeros)
    assert abs(metrics["kl"]) < 1e-6


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (dqn, ["--env", "Pendulum-v1"], "Pendulum-v1: this DQN takes .* Discrete actions, not Box"),
        (impala, ["--env", "Pendulum-v1"], "Pendulum-v1: this IMPALA takes .* Discrete actions, not Box"),
        (search, ["--env", "Pendulum-v1"], "Pendulum-v1: this search takes Discrete actions, not Box"),
        (sac, ["--env", "CartPole-v1"], "CartPole-v1: this SAC takes Box spaces, not .*Discrete"),
        (ppo_recurrent, ["--entries", "0", "9"], "--entries 9 is out of range for 4 entries"),
    ],
)
def test_other_programs_say_what_they_take(program, options, message):
    with pytest.raises(SystemExit, match=message):
        program.main([*options, "--num-envs", "8", "--num-workers", "1"])


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (dqn, "--batch-size 300 --learn-after 200", "--batch-size must be at most --learn-after"),
        (impala, "--num-actors -1", "--num-actors and --mean-delay must be at least 0"),
        (impala_ray, "--kill-one", "--kill-one needs --simulate-nodes of at least 2"),
        (plr, "--num-seeds 0", "must be at least 1"),
        (plr, "--num-minibatches 7", "must be a multiple of --num-minibatches"),
        (plr, "--buffer-size 31", "--buffer-size must be at least --num-envs"),
        (ppo_recurrent, "--num-envs 12", "--num-envs must be a multiple of --num-minibatches"),
        (ppo_recurrent, "--entries x", "Could not find valid parse for arguments: ['x']"),
        (search, "--num-envs 3 --num-steps 3", "multiple of --num-minibatches"),
        (search, "--video 9", "--video must be at most --eval-episodes"),
    ],
)
def test_other_programs_refuse_options_that_do_not_fit(program, options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        program.main(options.split())
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_v_trace_is_what_its_definition_says():
    rng = np.random.default_rng(0)
    shape = 6, 2
    reward, value, next_value, log_ratio = rng.normal(size=(4, *shape)).astype(np.float32)
    terminated, truncated = np.zeros((2, *shape), bool)
    terminated[1, 0] = truncated[3, 0] = truncated[2, 1] = terminated[5, 1] = True
    done = terminated | truncated
    config = impala.Config(gamma=0.9, trace_decay=0.8)

    weight = np.minimum(1, np.exp(log_ratio))
    future = 0.9 * np.where(terminated, 0, next_value)
    surprise = weight * (reward + future - value)
    expected, advantages = np.zeros(shape), surprise.copy()
    for env in range(2):
        for t in range(6):
            traced = 1.0
            for later in range(t, 6):
                expected[t, env] += traced * surprise[later, env]
                traced *= 0.9 * 0.8 * weight[later, env]
                if done[later, env]:
                    break
        for t in np.flatnonzero(~done[:5, env]):
            advantages[t, env] += weight[t, env] * 0.9 * 0.8 * expected[t + 1, env]

    given = reward, terminated, done
    values = {"value": jnp.array(value), "next_value": jnp.array(next_value)}
    target, advantage = impala.v_trace(
        config, *map(jnp.array, given), **values, log_ratio=jnp.array(log_ratio)
    )
    np.testing.assert_allclose(target, value + expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(advantage, advantages, rtol=1e-5, atol=1e-6)
    # With the weights that played, it is the generalised advantage.
    target, advantage = impala.v_trace(config, *map(jnp.array, given), **values, log_ratio=jnp.zeros(shape))
    recurrent = ppo_recurrent.Config(gamma=0.9, gae_lambda=0.8)
    scaled = SimpleNamespace(reward=reward / (1 - 0.9), terminated=terminated, done=done, **values)
    same = ppo_recurrent.advantages(recurrent, scaled)
    np.testing.assert_allclose(advantage, same, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(target, value + same, rtol=1e-5, atol=1e-6)


class BrokenEnv(gymnasium.Env):
    """Fails in its hundredth step."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 100:
            raise RuntimeError("worn out")
        return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}


def test_workers_of_impala_with_delays_do_not_import_jax():
    with jaxvec.make(impala.delayed("CartPole-v1", 1e-6), 2) as envs:
        envs.reset(seed=0)
        envs.step([0, 1])
        for modules in envs.map(lambda env: [name.partition(".")[0] for name in sys.modules]):
            assert not {"jax", "jaxlib", "flax", "optax"} & {*modules}
            assert "gymnasium" in modules


@pytest.mark.nightly
def test_what_fails_in_an_actor_ends_the_program_and_is_told(register, capfd):
    register("Broken-v0", BrokenEnv, disable_env_checker=True)
    with pytest.raises(SystemExit):
        impala.main(["--env", "Broken-v0", "--num-envs", "2", "--num-workers", "2"])
    assert ": worn out (" in capfd.readouterr().err


class ForkEnv(gymnasium.Env):
    """Pays 1, and ends, if its first three actions are those that the seed has drawn; else it takes ten."""

    observation_space = spaces.Discrete(11)
    action_space = spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.taken, self.secret = [], [3 + int(action) for action in self.np_random.integers(2, size=3)]
        return 0, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.taken.append(int(action))
        over = len(self.taken) == 3 and self.taken == self.secret
        return len(self.taken), float(over), over, len(self.taken) == 10, {}


@pytest.mark.slow
@pytest.mark.jax_version
def test_search_finds_what_the_policy_alone_does_not(register, capsys):
    """The observation does not show the secret, so no policy can learn it. The envs in the tree know it."""
    register("Fork-v0", ForkEnv, disable_env_checker=True)
    options = (
        "--env Fork-v0 --num-envs 6 --num-workers 2 --num-simulations 16 --num-steps 6 --total-steps 144"
    )
    words = [*options.split(), "--num-minibatches", "2", "--save-every", "0", "--eval-episodes", "6"]
    metrics = search.main([*words, "--name", "a"]).metrics()
    evaluated = np.isfinite(metrics["evaluation"])
    assert (
        metrics["evaluation"][evaluated].tolist() == [1.0] * 3
    )  # so each of the six episodes paid 1, the most
    assert metrics["policy_evaluation"][evaluated].max() < 1
    # Without those of copies. The first save is not followed by an evaluation.
    assert metrics["env_steps"].tolist() == [36, 72, 72, 108, 108, 144, 144]
    assert "score 1: " in capsys.readouterr().out


class SecretEnv(gymnasium.Env):
    """Shows the action that pays 1, and never terminates."""

    observation_space = spaces.Dict(
        {"say": spaces.Text(3), "best": spaces.Discrete(2, start=3), "noise": spaces.Box(-1, 1, (2,))}
    )
    action_space = spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.show(), {}

    def show(self):
        self.best = 3 + int(self.np_random.integers(2))
        return {"say": "hm", "best": self.best, "noise": self.np_random.random(2).astype(np.float32)}

    def step(self, action):
        self.steps += 1
        reward = float(action == self.best)
        return self.show(), reward, False, self.steps == 4, {}


@pytest.mark.slow
def test_search_teaches_the_policy_and_bootstraps_truncations(register):
    """An episode of four steps pays 4; its first value is 1.875 if it ends there, and 2 if it goes on."""
    register("Secret-v0", SecretEnv, disable_env_checker=True)
    options = "--env Secret-v0 --num-envs 8 --num-workers 1 --num-simulations 4 --num-steps 16 --gamma 0.5"
    words = [*options.split(), "--total-steps", "3840", "--lr", "3e-3", "--name", "a"]
    result = search.main(words)
    assert result.latest("evaluation") == result.latest("policy_evaluation") == 4
    # If the last observation had no value, the mean value of the four steps would be 1.53.
    assert 1.9 < result.latest("value") < 2.1
    metrics = result.metrics()
    assert {"policy_loss", "value_loss", "entropy", "episode_return", "evaluation"} < {*metrics}
    assert np.nanmin(metrics["policy_loss"]) >= -1e-6


def test_value_targets_of_search_are_what_their_definition_says():
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(2, 7, 2)).astype(np.float32)
    done = np.zeros((6, 2), bool)
    done[1, 0] = done[3, 0] = done[2, 1] = done[5, 1] = True
    config = search.Config(gamma=0.9, trace_decay=0.8)
    expected = np.zeros((6, 2))
    for env in range(2):
        for t in range(6):
            # A mean over numbers of steps, weighted by powers of trace_decay; the longest has the rest.
            total, weight = 0.0, 1.0
            for n in range(1, 7 - t):
                last = done[t + n - 1, env] or t + n == 6
                share = weight if last else weight * (1 - 0.8)
                bootstrap = 0 if done[t + n - 1, env] else 0.9**n * value[t + n, env]
                total += share * (sum(0.9**k * reward[t + k, env] for k in range(n)) + bootstrap)
                weight *= 0.8
                if last:
                    break
            expected[t, env] = total
    steps = search.Steps(None, None, value[:6], reward[:6], done)
    np.testing.assert_allclose(search.returns(config, steps, value[6]), expected, rtol=1e-4, atol=1e-5)
