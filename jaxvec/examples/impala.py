"""IMPALA on one machine: actors play while the learner learns. The file is complete: copy and change it.

    python -m jaxvec.examples.impala
    python -m jaxvec.examples.impala --num-actors 0
    python -m jaxvec.examples.impala --resume runs/NAME

Each actor is a thread with its own pool and a compiled rollout. It reads the newest weights, plays, and puts
the rollout into a queue for the learner, so a slow env delays only its own actor. V-trace corrects for older
weights. For comparison, the second command plays and learns alternately. The order of rollouts depends on
time, so two runs with the same seed differ. Each run has a folder in `runs`. Ctrl-C saves, and ends the run.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from gymnasium import spaces

import jaxvec
from jaxvec.logging import Episodes, Options, TrainingRun, training
from jaxvec.normalize import RunningMeanStd


@dataclass(frozen=True)
class Config(Options):
    """Trains IMPALA on a Gymnasium env with Box observations and Discrete actions."""

    num_actors: int = 2  # number of threads that step envs; with 0, stepping and learning alternate
    num_envs: int = 16  # number of envs per actor
    num_workers: int | None = None  # workers of all actors; by default, one per usable core for each
    num_steps: int = 20  # steps of each env in a rollout
    total_steps: int = 400_000  # env steps, rounded up to whole rollouts
    mean_delay: float = 0.0  # mean additional delay of each env step, in seconds
    lr: float = 1e-3  # learning rate, falling linearly to 0
    gamma: float = 0.99  # discount per step
    trace_decay: float = 0.95  # V-trace's lambda: decay of later temporal differences per step
    entropy_weight: float = 0.005  # weight of the entropy bonus
    value_weight: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # maximum norm of the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_actors, self.mean_delay) < 0:
            raise ValueError("--num-actors and --mean-delay must be at least 0")

    def env_fn(self) -> Any:
        env = super().env_fn()
        return delayed(env, self.mean_delay) if self.mean_delay else env


class ActorCritic(nn.Module):
    """Separate networks for policy and value, with two hidden layers each."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[..., obs_size]` to logits `[..., num_actions]` and values `[...]`."""

        def dense(size: int, scale: float = 2**0.5) -> nn.Dense:
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))

        policy, value = (nn.tanh(dense(64)(nn.tanh(dense(64)(obs)))) for _ in range(2))
        # Small, so the initial policy is nearly uniform.
        return dense(self.num_actions, 0.01)(policy), dense(1, 1.0)(value)[..., 0]


class Weights(NamedTuple):  # the part of the learner's state that actors need
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
    config: Config, reward: Any, terminated: Any, done: Any, *, value: Any, next_value: Any, log_ratio: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns value targets and advantages, `[num_steps, num_envs]`. `log_ratio` is that of now to then."""
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
            takes = "this IMPALA takes Box observations and Discrete actions"
            raise SystemExit(f"{config.env}: {takes}, not {obs_space} and {action_space}")
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
            next_obs = encode(timestep.last_obs)
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
        metrics["explained_variance"] = 1 - jnp.var(target - value) / (jnp.var(target) + 1e-8)
        return total, metrics | {"kl": jnp.mean(jnp.exp(log_ratio) - 1 - log_ratio)}

    def learn(self, learner: Learner, rollout: Rollout) -> tuple[Learner, dict[str, jax.Array]]:
        """Takes one gradient step. Also returns metrics, `[]` float32."""
        (params, stats), episodes = learner.weights, learner.episodes.add(rollout.timestep)
        gradient, metrics = jax.grad(self.loss, has_aux=True)(params, stats, rollout)
        change, opt_state = self.optimizer.update(gradient, learner.opt_state, params)
        weights = Weights(optax.apply_updates(params, change), stats.update(rollout.obs))
        return Learner(learner.number + 1, weights, opt_state, episodes), episodes.means() | metrics

    def best(self, learner: Learner, _: None, obs: jax.Array, __: Any) -> tuple[None, jax.Array]:
        """Returns the most probable actions, for evaluations."""
        params, stats = learner.weights
        logits, _ = self.network.apply(params, stats.normalize(encode(obs)))
        return None, logits.argmax(-1) + self.first_action


class Actors:
    """Pools that play with the newest weights: each in a thread of its own, or the first one in this one."""

    def __init__(self, agent: Agent, pools: Sequence[jaxvec.VectorEnv], key: Any, weights: Weights) -> None:
        self.weights: Weights = weights  # replaced by the learner's thread, and read by the actors'
        self._play: Any = jax.jit(agent.play)
        key, seed_key = jax.random.split(key)
        self._keys: list[Any] = [*jax.random.split(key, len(pools))]
        seeds = [int(seed) for seed in jax.random.randint(seed_key, (len(pools),), 0, 2**31 - 1)]
        self._playing: list[Any] = [
            jaxvec.reset(envs, seed=seed) for envs, seed in zip(pools, seeds, strict=True)
        ]
        self._rollouts: queue.Queue[Rollout] = queue.Queue(len(pools))  # bounded, so they stay recent
        self._stopped = threading.Event()
        self._threads: list[Future[None]] = []

    @contextmanager
    def threads(self) -> Generator[None]:
        """Plays each pool in a thread."""
        with ThreadPoolExecutor(len(self._playing)) as executor:
            try:
                self._threads = [executor.submit(self._run, number) for number in range(len(self._playing))]
                yield
            finally:
                self._stopped.set()

    def _rollout(self, number: int) -> Rollout:
        self._keys[number], key = jax.random.split(self._keys[number])
        handle, timestep, rollout = self._play(self.weights, *self._playing[number], key)
        self._playing[number] = handle, timestep
        return jax.block_until_ready(rollout)

    def _run(self, number: int) -> None:
        while not self._stopped.is_set():
            rollout = self._rollout(number)
            while not self._stopped.is_set():
                with suppress(queue.Full):  # then checks again whether training has stopped
                    self._rollouts.put(rollout, timeout=0.1)
                    break

    def get(self) -> Rollout:
        """Waits for the next rollout of any thread. Without threads, the first pool plays it now."""
        while self._threads:
            with suppress(queue.Empty):  # then checks whether an actor has failed
                return self._rollouts.get(timeout=0.1)
            for thread in filter(Future.done, self._threads):
                thread.result()
        return self._rollout(0)


def delayed(env: Any, mean: float) -> Callable[..., gymnasium.Env[Any, Any]]:
    """Returns a function that makes an env with slower steps, by `mean` seconds on average."""
    construct = partial(gymnasium.make, env) if isinstance(env, str) else env

    # A local class is pickled by value. With one of this module, workers would import it, and so JAX.
    class Delayed(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            time.sleep(random.expovariate(1 / mean))
            return super().step(action)

    return lambda **options: Delayed(construct(**options))


def train(config: Config, run: TrainingRun) -> None:
    """Trains, or continues or evaluates a run, and writes its folder."""
    num_pools = max(1, config.num_actors)
    workers = config.num_workers and max(1, config.num_workers // num_pools)
    films = [config.video] + [0] * (num_pools - 1)  # the first actor's envs are filmed
    with ExitStack() as stack:
        made = (run.make(num_workers=workers, states=0, video=video) for video in films)
        pools = [stack.enter_context(envs) for envs in made]
        agent = Agent(config, pools[0].single_observation_space, pools[0].single_action_space)
        learner, _ = run.load(agent.begin())
        if config.evaluate:
            run.report(evaluation=run.play(partial(jax.jit(agent.best), learner)))
            return
        number, goal = int(learner.number), np.inf if config.stop_at is None else config.stop_at
        # A resumed run has other seeds than before, or it would repeat the first episodes.
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        actors, learn = Actors(agent, pools, key, learner.weights), jax.jit(agent.learn)
        stop = number >= config.num_updates
        with run.signals(), actors.threads() if config.num_actors else nullcontext():
            run.show("compiling")
            while not stop:
                learner, metrics = learn(learner, actors.get())
                actors.weights, number = learner.weights, number + 1
                run.log(number * config.steps_per_update, **metrics)
                reached = number == config.num_updates or float(metrics["episode_return"]) >= goal
                stop = run.stopped or reached
                if stop or run.save_due:
                    learned = {"params": learner.weights.params, "stats": vars(learner.weights.obs_stats)}
                    run.save(learner, params=learned)


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    with training(Config, argv, program="impala") as (config, run):
        train(config, run)
    return run


if __name__ == "__main__":
    main()
