"""IMPALA on a Ray cluster: each actor has its own pool, and the learner takes the first finished rollout.

    python examples/impala_ray.py --address auto --num-actors 16
    python examples/impala_ray.py --simulate-nodes 3 --kill-one --stop-at 475
    python examples/impala_ray.py --resume runs/NAME

The file is complete: copy and change it. The network, the loss and V-trace are those of `impala.py`;
`jaxvec.Rollouts` replaces the threads. The second command simulates a cluster of three nodes on this machine,
with an actor on each. It kills one node after a tenth of the steps, and the actor restarts on another node.

Each run has a folder in `runs`. Ctrl-C ends a run after the current update. A resumed run continues with the
parameters, the optimiser state, the number of updates and the statistics of the run. Its episodes start anew.
The order of the rollouts depends on time, so two runs with the same seed differ.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import serialization
from gymnasium import spaces

import jaxvec
from jaxvec.logging import Episodes, Run, option, training
from jaxvec.normalize import RunningMeanStd

# Actors on other machines do not have this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_MEMORY = 200 << 20  # bytes of each simulated node's object store


@dataclass(frozen=True)
class Config:
    env: str = option("CartPole-v1", "Gymnasium id of an env with Box observations and Discrete actions")
    num_actors: int = option(3, "number of actors")
    num_envs: int = option(16, "number of envs per actor")
    num_workers: int = option(1, "number of worker processes, and of CPUs, of each actor")
    max_lag: int = option(8, "maximum number of updates between the weights of a rollout and the newest ones")
    address: str | None = option(
        None, "address of the Ray cluster; by default the one of this machine, or a new one", str
    )
    simulate_nodes: int = option(0, "simulate a cluster with this number of nodes on this machine")
    kill_one: bool = option(False, "kill one of the simulated nodes during training")
    num_steps: int = option(20, "steps of each env in a rollout")
    total_steps: int = option(400_000, "env steps, rounded up to whole rollouts")
    lr: float = option(1e-3, "learning rate, falling linearly to 0")
    gamma: float = option(0.99, "discount per step")
    trace_decay: float = option(0.95, "V-trace's lambda: decay of later temporal differences per step")
    entropy_weight: float = option(0.005, "weight of the entropy bonus")
    value_weight: float = option(0.5, "weight of the value loss")
    max_grad_norm: float = option(0.5, "maximum norm of the gradient")
    stop_at: float | None = option(None, "stop once the mean return reaches this value", float)
    save_every: int = option(500, "updates between two saves")
    seed: int = option(0, "random seed")
    name: str | None = option(None, "name of the folder in runs; by default program, env, seed and time", str)
    tensorboard: bool = option(False, "write event files for TensorBoard, too; needs tensorboardX")
    wandb: bool = option(False, "log to Weights & Biases, too; needs wandb")

    def __post_init__(self) -> None:
        sizes = self.num_actors, self.num_envs, self.num_workers, self.num_steps, self.total_steps
        if min(*sizes, self.save_every) < 1:
            raise ValueError("the numbers of actors, envs, workers, steps and updates must be at least 1")
        if self.kill_one and self.simulate_nodes < 2:
            raise ValueError("--kill-one needs --simulate-nodes of at least 2")

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        return -(-self.total_steps // self.steps_per_update)


class ActorCritic(nn.Module):
    """Separate networks for policy and value, with two hidden layers each."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[..., obs_size]` to logits `[..., num_actions]` and values `[...]`."""

        def network(num_outputs: int, scale: float) -> jax.Array:
            hidden = obs
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
            return nn.Dense(num_outputs, kernel_init=nn.initializers.orthogonal(scale))(hidden)

        logits = network(self.num_actions, 0.01)  # small, so the initial policy is nearly uniform
        return logits, network(1, 1.0)[..., 0]


class Weights(NamedTuple):
    """The part of the learner's state that actors need."""

    params: Any
    obs_stats: RunningMeanStd  # [obs_size]


class Learner(NamedTuple):
    """State of the learner between two updates."""

    number: jax.Array  # [] int32, updates so far
    weights: Weights
    opt_state: Any
    episodes: Episodes


class Rollout(NamedTuple):
    """Data of the steps of an actor, stacked to `[num_steps, num_envs, ...]`."""

    obs: jax.Array  # [num_envs, obs_size] float32
    next_obs: jax.Array  # [num_envs, obs_size] float32, of the same episode
    action: jax.Array  # [num_envs] int32, from 0
    log_prob: jax.Array  # [num_envs] float32, under the weights of the actor
    timestep: jaxvec.TimeStep  # without obs, and with the infos about episodes only


def encode(obs: jax.Array) -> jax.Array:
    """Flattens observations, `[num_envs, ...]`, to `[num_envs, obs_size]` float32."""
    return obs.reshape(len(obs), -1).astype(jnp.float32)


def evaluate(logits: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the action's log-probability and the policy's entropy, `[...]` in nats."""
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
    return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def v_trace(
    config: Config,
    reward: jax.Array,
    terminated: jax.Array,
    done: jax.Array,
    *,
    value: jax.Array,
    next_value: jax.Array,
    log_ratio: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns value targets and advantages. All arrays are `[num_steps, num_envs]`.

    `log_ratio` is the log of the action's probability now over its probability when it was taken.
    """
    weight = jnp.exp(jnp.minimum(log_ratio, 0))
    # Bootstrap unless the episode terminated: a truncated episode could have continued.
    future = config.gamma * jnp.where(terminated, 0, next_value)
    surprise = weight * (reward + future - value)
    decay = config.gamma * config.trace_decay * weight * ~done

    def add(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        correction = now[0] + now[1] * later
        return correction, correction

    _, correction = jax.lax.scan(add, jnp.zeros_like(value[0]), (surprise, decay), reverse=True)
    # The value after a step is corrected, too, unless the episode or the rollout ends there.
    following = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])]) * ~done
    advantage = weight * (reward + future + config.gamma * config.trace_decay * following - value)
    return value + correction, advantage


class Agent:
    """The parts that do not change during training, and the functions that are compiled."""

    def __init__(self, config: Config, obs_space: Any, action_space: Any) -> None:
        if not isinstance(obs_space, spaces.Box) or not isinstance(action_space, spaces.Discrete):
            raise SystemExit(
                f"{config.env}: this IMPALA takes Box observations and Discrete actions, not {obs_space} and "
                f"{action_space}"
            )
        self.config: Config = config
        self.obs_size: int = int(np.prod(obs_space.shape))
        self.first_action: int = int(action_space.start)
        self.network: Any = ActorCritic(int(action_space.n))  # Any: flax annotates no result of `apply`
        adam = optax.adam(optax.linear_schedule(config.lr, 0, config.num_updates))
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        self.optimizer: optax.GradientTransformation = optax.chain(clip, adam)

    def begin(self) -> Learner:
        """Returns the learner before the first update."""
        obs = jnp.zeros(self.obs_size)
        params = self.network.init(jax.random.key(self.config.seed), obs)
        weights = Weights(params, RunningMeanStd.create(obs, count=0))
        return Learner(jnp.int32(0), weights, self.optimizer.init(params), Episodes.create())

    def play(
        self, weights: Weights, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array
    ) -> tuple[jaxvec.Handle, jaxvec.TimeStep, Rollout]:
        """Plays `num_steps` steps in every env of an actor, starting at `timestep`."""

        def step(carry: tuple[jaxvec.Handle, jaxvec.TimeStep], key: jax.Array) -> tuple[Any, Rollout]:
            handle, obs = carry[0], encode(carry[1].obs)
            logits, _ = self.network.apply(weights.params, weights.obs_stats.normalize(obs))
            action = jax.random.categorical(key, logits)
            log_prob, _ = evaluate(logits, action)
            handle, timestep = jaxvec.step(handle, action + self.first_action)
            # At the end of an episode, timestep.obs is already the first one of the next episode.
            done, final_obs = timestep.terminated | timestep.truncated, timestep.info["final_obs"]
            next_obs = jnp.where(done[:, None], encode(final_obs), encode(timestep.obs))
            info = {name: timestep.info[name] for name in ("episode_return", "episode_length")}
            ends = timestep._replace(obs=None, info=info)
            return (handle, timestep), Rollout(obs, next_obs, action, log_prob, ends)

        keys = jax.random.split(key, self.config.num_steps)
        (handle, timestep), rollout = jax.lax.scan(step, (handle, timestep), keys)
        return handle, timestep, rollout

    def loss(self, params: Any, stats: RunningMeanStd, rollout: Rollout) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the loss of a rollout, `[]` float32, and its parts."""
        config, (_, reward, terminated, truncated, _) = self.config, rollout.timestep
        logits, value = self.network.apply(params, stats.normalize(rollout.obs))
        _, next_value = self.network.apply(params, stats.normalize(rollout.next_obs))
        log_prob, entropy = evaluate(logits, rollout.action)
        log_ratio = log_prob - rollout.log_prob
        reward = (1 - config.gamma) * reward  # scales values to the magnitude of one reward
        values = {"value": value, "next_value": next_value, "log_ratio": log_ratio}
        traced = v_trace(config, reward, terminated, terminated | truncated, **values)
        target, advantage = jax.lax.stop_gradient(traced)
        gain = jnp.mean(log_prob * advantage / (advantage.std() + 1e-8))
        error, entropy = 0.5 * jnp.square(value - target).mean(), entropy.mean()
        total = config.value_weight * error - gain - config.entropy_weight * entropy
        metrics = {"policy_loss": -gain, "value_loss": error, "entropy": entropy}
        return total, metrics | {"kl": jnp.mean(jnp.exp(log_ratio) - 1 - log_ratio)}

    def learn(self, learner: Learner, rollout: Rollout) -> tuple[Learner, dict[str, jax.Array]]:
        """Takes one gradient step. Also returns metrics, `[]` float32."""
        (params, stats), episodes = learner.weights, learner.episodes.add(rollout.timestep)
        gradient, metrics = jax.grad(self.loss, has_aux=True)(params, stats, rollout)
        change, opt_state = self.optimizer.update(gradient, learner.opt_state, params)
        weights = Weights(optax.apply_updates(params, change), stats.update(rollout.obs))
        return Learner(learner.number + 1, weights, opt_state, episodes), episodes.means() | metrics


def train(config: Config, run: Run, kill_one: Callable[[], None]) -> None:
    """Trains, or continues a run, and writes its folder. With `--kill-one`, calls `kill_one` on the way."""
    with jaxvec.make(config.env, 1, backend="serial") as envs:
        agent = Agent(config, envs.single_observation_space, envs.single_action_space)
    learner, _ = run.load(agent.begin())
    number, goal = int(learner.number), np.inf if config.stop_at is None else config.stop_at
    progress = run.folder / "actors.pickle"  # of a resumed run: the actors' next rollouts have other seeds
    rollouts = jaxvec.Rollouts(
        agent.play,
        config.env,
        config.num_envs,
        num_actors=config.num_actors,
        params=learner.weights,
        seed=config.seed,
        backend=jaxvec.Ray(config.address, workers_per_actor=config.num_workers),
        max_lag=config.max_lag,
        on_fault="restart",
        resume=progress.read_bytes() if progress.exists() else None,
        timeouts=jaxvec.Timeouts(start=300),
    )
    learn, stop = jax.jit(agent.learn), number >= config.num_updates
    with rollouts, run.signals():
        run.show("compiling")
        while not stop:
            rollout = rollouts.get(timeout=300)
            learner, metrics = learn(learner, rollout.trajectory)
            rollouts.push(learner.weights)
            number += 1
            run.log(number * config.steps_per_update, **metrics, lag=rollout.lag)
            reached = float(metrics["episode_return"]) >= goal  # false for NaN, before any episode ends
            stop = run.stopped or reached or number == config.num_updates
            if stop or number % config.save_every == 0:
                run.save(learner)
                run.write(progress.name, rollouts.checkpoint())
                learned = {"params": learner.weights.params, "stats": vars(learner.weights.obs_stats)}
                run.write("params.msgpack", serialization.to_bytes(learned))
            if config.kill_one and number == max(config.num_updates // 10, 1):
                kill_one()
        stats = rollouts.stats()
    faults = sum(actor.faults for actor in stats.actors)
    print(f"faults of actors: {faults}; rollouts dropped because of --max-lag: {stats.dropped}")


@contextmanager
def simulated(config: Config) -> Generator[Callable[[], None]]:
    """Starts a simulated cluster, if requested. Yields a function that kills one of its nodes."""
    if not config.simulate_nodes:
        yield lambda: None
        return
    ray: Any = importlib.import_module("ray")
    cluster: Any = importlib.import_module("ray.cluster_utils").Cluster()
    try:
        cluster.add_node(num_cpus=0, object_store_memory=_MEMORY)  # for the head and the learner
        left = max(config.simulate_nodes - 1, 1)  # these have resources for all actors
        room = config.num_workers * math.ceil(config.num_actors / left)
        nodes = [
            cluster.add_node(num_cpus=room, object_store_memory=_MEMORY) for _ in range(config.simulate_nodes)
        ]
        ray.init(address=cluster.address, log_to_driver=False)
        yield lambda: cluster.remove_node(nodes[0], allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(argv: Sequence[str] | None = None) -> Run:
    about = "Train IMPALA on a Ray cluster."
    with (
        training(Config, argv, program="impala_ray", about=about) as (config, run),
        simulated(config) as kill,
    ):
        train(config, run, kill)
    return run


if __name__ == "__main__":
    main()
