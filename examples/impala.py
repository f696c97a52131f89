"""IMPALA on one machine: actors play while the learner learns, and V-trace corrects for older weights.

    python examples/impala.py
    python examples/impala.py --num-actors 0

Each actor is a thread with its own pool and a compiled rollout. It reads the newest weights, plays, and
puts the rollout into a queue. The learner takes the next rollout from the queue, so a slow env delays only
its own actor. For comparison, the second command plays and learns alternately. `--mean-delay` makes the
steps of all envs slower, by random times.
"""

from __future__ import annotations

import queue
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
from shared_ppo import ActorCritic, Categorical
from shared_training import (
    Options,
    Result,
    Returns,
    discrete_actions,
    encode,
    finish,
    option,
    parse,
    progress,
)

import jaxvec
from jaxvec.normalize import RunningMeanStd


def delayed(env_id: str, mean: float) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Returns a function that makes an env with slower steps, by `mean` seconds on average."""

    # A local class is pickled by value. With one of this module, workers would import it, and so JAX.
    class Delayed(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
            super().__init__(env)
            self._random = np.random.default_rng()

        def step(self, action: Any) -> Any:
            time.sleep(self._random.exponential(mean))
            return super().step(action)

    return lambda: Delayed(gymnasium.make(env_id))


@dataclass(frozen=True)
class Config(Options):
    num_actors: int = option(2, "number of threads that step envs; with 0, stepping and learning alternate")
    num_envs: int = option(16, "number of envs per actor")
    num_steps: int = option(20, "steps of each env in a rollout")
    total_steps: int = option(400_000, "env steps, rounded up to whole rollouts")
    mean_delay: float = option(0.0, "mean additional delay of each env step, in seconds")
    lr: float = option(1e-3, "learning rate, falling linearly to 0")
    gamma: float = option(0.99, "discount per step")
    trace_decay: float = option(0.95, "V-trace's lambda: decay of later temporal differences per step")
    entropy_weight: float = option(0.005, "weight of the entropy bonus")
    value_weight: float = option(0.5, "weight of the value loss")


@dataclass(frozen=True)
class Agent:
    """The parts that do not change during training."""

    config: Config
    policy: Categorical
    network: Any  # an ActorCritic; Any because flax annotates no result type for `apply`
    optimizer: optax.GradientTransformation


def make_agent(config: Config, envs: jaxvec.VectorEnv) -> Agent:
    action_space = discrete_actions(config, envs, "IMPALA")
    lr = optax.linear_schedule(config.lr, 0, config.num_updates)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(lr))
    network = ActorCritic(int(action_space.n))
    return Agent(config, Categorical(action_space), network, optimizer)


class Learner(NamedTuple):
    """State of the learner between two rollouts."""

    params: Any
    opt_state: Any
    obs_stats: RunningMeanStd  # [obs_size]
    returns: Returns


class Rollout(NamedTuple):
    """Data of the steps of an actor, stacked to `[num_steps, num_envs, ...]`."""

    obs: jax.Array  # [num_envs, obs_size] float32
    next_obs: jax.Array  # [num_envs, obs_size] float32, of the same episode
    action: jax.Array  # [num_envs] int32
    log_prob: jax.Array  # [num_envs] float32, under the weights of the actor
    reward: jax.Array  # [num_envs] float32
    terminated: jax.Array  # [num_envs] bool
    done: jax.Array  # [num_envs] bool
    episode_return: jax.Array  # [num_envs] float32


def play(
    agent: Agent, learner: Learner, handle: jaxvec.Handle, obs: jax.Array, key: jax.Array
) -> tuple[jaxvec.Handle, jax.Array, Rollout]:
    """Plays `num_steps` steps in every env of an actor, starting at `obs`, `[num_envs, obs_size]`."""

    def step(carry: tuple[jaxvec.Handle, jax.Array], key: jax.Array) -> tuple[Any, Rollout]:
        handle, obs = carry
        logits, _ = agent.network.apply(learner.params, learner.obs_stats.normalize(obs))
        action = agent.policy.sample(logits, key)
        log_prob, _ = agent.policy.evaluate(logits, action)
        handle, timestep = jaxvec.step(handle, agent.policy.to_env(action))
        next_obs, done = encode(timestep.obs), timestep.terminated | timestep.truncated
        # At the end of an episode, next_obs is already the first one of the next episode.
        within = jnp.where(done[:, None], encode(timestep.info["final_obs"]), next_obs)
        ends = timestep.terminated, done
        steps = Rollout(
            obs, within, action, log_prob, timestep.reward, *ends, timestep.info["episode_return"]
        )
        return (handle, next_obs), steps

    (handle, obs), rollout = jax.lax.scan(step, (handle, obs), jax.random.split(key, agent.config.num_steps))
    return handle, obs, rollout


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


def learn(agent: Agent, learner: Learner, rollout: Rollout) -> tuple[Learner, jax.Array]:
    """Takes one gradient step. Also returns the mean return of the last episodes, `[]` float32."""
    config = agent.config
    obs, next_obs = map(learner.obs_stats.normalize, (rollout.obs, rollout.next_obs))
    reward = (1 - config.gamma) * rollout.reward  # scales values to the magnitude of one reward

    def loss(params: Any) -> jax.Array:
        logits, value = agent.network.apply(params, obs)
        _, next_value = agent.network.apply(params, next_obs)
        log_prob, entropy = agent.policy.evaluate(logits, rollout.action)
        target, advantage = jax.lax.stop_gradient(
            v_trace(
                config,
                reward,
                rollout.terminated,
                rollout.done,
                value=value,
                next_value=next_value,
                log_ratio=log_prob - rollout.log_prob,
            )
        )
        advantage = advantage / (advantage.std() + 1e-8)
        error = 0.5 * jnp.square(value - target)
        return jnp.mean(config.value_weight * error - log_prob * advantage - config.entropy_weight * entropy)

    change, opt_state = agent.optimizer.update(jax.grad(loss)(learner.params), learner.opt_state)
    returns = learner.returns.add(rollout.done, rollout.episode_return)
    stats = learner.obs_stats.update(rollout.obs)
    learner = Learner(optax.apply_updates(learner.params, change), opt_state, stats, returns)
    return learner, returns.mean()


class Actor:
    """An actor with its own pool.

    Attributes:
        obs: latest observations, `[num_envs, obs_size]` float32.
    """

    def __init__(self, agent: Agent, envs: jaxvec.VectorEnv, number: int) -> None:
        seed = agent.config.seed + number * agent.config.num_envs
        self._play: Callable[..., Any] = jax.jit(partial(play, agent))
        self._handle, timestep = jaxvec.reset(envs, seed=seed)
        self.obs: jax.Array = encode(timestep.obs)
        self._key = jax.random.fold_in(jax.random.key(agent.config.seed), number)

    def play(self, learner: Learner) -> Rollout:
        self._key, key = jax.random.split(self._key)
        self._handle, self.obs, rollout = self._play(learner, self._handle, self.obs, key)
        return jax.block_until_ready(rollout)


class Exchange:
    """Exchange of weights and rollouts between the learner and the actors' threads."""

    def __init__(self, learner: Learner, num_actors: int) -> None:
        self.learner = learner  # replaced by the learner's thread, read by the actors'
        self._rollouts: queue.Queue[Rollout] = queue.Queue(
            num_actors
        )  # bounded, so rollouts in the queue stay recent
        self._stopped = threading.Event()
        self._threads: list[Future[None]] = []

    @contextmanager
    def playing(self, actors: Sequence[Actor]) -> Generator[Callable[[], Rollout]]:
        """Runs each actor in a thread. Yields a function that waits for the next rollout."""
        with ThreadPoolExecutor(len(actors)) as pool:
            try:
                self._threads = [pool.submit(self._play, actor) for actor in actors]
                yield self._next
            finally:
                self._stopped.set()

    def alone(self, actor: Actor) -> Callable[[], Rollout]:
        """Returns a function that plays the next rollout in the learner's thread."""
        return lambda: actor.play(self.learner)

    def _play(self, actor: Actor) -> None:
        while not self._stopped.is_set():
            rollout = actor.play(self.learner)
            while not self._stopped.is_set():
                with suppress(queue.Full):  # then checks again whether training has stopped
                    self._rollouts.put(rollout, timeout=0.1)
                    break

    def _next(self) -> Rollout:
        while True:
            with suppress(queue.Empty):  # then checks whether an actor has failed
                return self._rollouts.get(timeout=0.1)
            for thread in self._threads:
                if thread.done():
                    thread.result()


def run(config: Config) -> Result:
    env = delayed(config.env, config.mean_delay) if config.mean_delay else config.env
    num_pools = max(1, config.num_actors)
    workers = config.num_workers and max(1, config.num_workers // num_pools)
    with ExitStack() as stack:
        pools = [
            stack.enter_context(jaxvec.make(env, config.num_envs, num_workers=workers))
            for _ in range(num_pools)
        ]
        agent = make_agent(config, pools[0])
        start = time.perf_counter()
        actors = [Actor(agent, envs, number) for number, envs in enumerate(pools)]
        learner = init(agent, actors[0].obs)
        exchange = Exchange(learner, num_pools)
        playing = exchange.playing(actors) if config.num_actors else nullcontext(exchange.alone(actors[0]))
        step: Callable[..., tuple[Learner, jax.Array]] = jax.jit(partial(learn, agent))
        goal = np.inf if config.stop_at is None else config.stop_at
        curve = [np.nan]  # NaN >= goal is false
        with playing as next_rollout, progress(config) as report:
            while len(curve) <= config.num_updates and not curve[-1] >= goal:
                exchange.learner, mean_return = step(exchange.learner, next_rollout())
                curve.append(float(mean_return))
                report(curve[-1])
        seconds = time.perf_counter() - start
        num_episodes = int(jnp.isfinite(exchange.learner.returns.last).sum())
    env_steps = (len(curve) - 1) * config.steps_per_update
    return Result(curve[-1], num_episodes, env_steps, seconds, np.array(curve[1:], np.float32))


def init(agent: Agent, obs: jax.Array) -> Learner:
    """Returns the learner before the first rollout, for observations `[num_envs, obs_size]`."""
    params = agent.network.init(jax.random.key(agent.config.seed), obs)
    stats = RunningMeanStd.create(obs[0], count=0)
    return Learner(params, agent.optimizer.init(params), stats, Returns.create())


def main(argv: Sequence[str] | None = None) -> Result:
    about = "Train IMPALA on a Gymnasium env with Box observations and Discrete actions."
    config = parse(Config, "impala", about, argv)
    return finish(config, "IMPALA", "impala", run(config))


if __name__ == "__main__":
    main()
