"""An env whose steps take longer. Workers import this file, and so no JAX."""

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

import jaxvec
from jaxvec.examples._training import (
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
from jaxvec.examples.ppo import ActorCritic, Categorical
from jaxvec.normalize import RunningMeanStd


class Delayed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes each step take longer, by a time drawn from an exponential distribution."""

    def __init__(self, env: gymnasium.Env[Any, Any], mean: float) -> None:
        """Takes the mean in seconds."""
        super().__init__(env)
        self._mean = mean
        self._random = np.random.default_rng()

    def step(self, action: Any) -> Any:
        """Sleeps, and steps the env."""
        time.sleep(self._random.exponential(self._mean))
        return super().step(action)


def make_delayed(env: str, mean: float) -> gymnasium.Env[Any, Any]:
    """Makes an env from its Gymnasium id, which takes longer by `mean` seconds a step."""
    return Delayed(gymnasium.make(env), mean)


# ----------------------------------------------------------------------------------------------------------
# IMPALA on one machine: actors play while the learner learns, and V-trace corrects for what is older.
#
#     python -m jaxvec.examples.impala
#     python -m jaxvec.examples.impala --num-actors 0
#
# Each actor is a thread with a pool of its own and a compiled rollout; it takes the newest weights, plays,
# and puts what came of it into a queue. The learner takes the next rollout that is there. So nobody waits
# for a slow env but the actor that plays in it. The second command plays and learns one after the other, to
# compare. `--mean-delay` makes each step of an env take longer, by a time that is drawn anew each time.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config(Options):
    """Holds the command line's options."""

    num_actors: int = option(2, "threads that step envs; with 0, stepping and learning alternate")
    num_envs: int = option(16, "envs of each actor, stepped together")
    num_steps: int = option(20, "steps of each env in a rollout")
    total_steps: int = option(400_000, "env steps, rounded up to whole rollouts")
    mean_delay: float = option(0.0, "mean seconds that each step of an env takes longer")
    lr: float = option(1e-3, "learning rate, falling linearly to 0")
    gamma: float = option(0.99, "discount per step")
    trace_decay: float = option(0.95, "V-trace's lambda: decay per step of later temporal differences")
    entropy_weight: float = option(0.005, "weight of the entropy bonus")
    value_weight: float = option(0.5, "weight of the value loss")


@dataclass(frozen=True)
class Agent:
    """Bundles what stays the same throughout training."""

    config: Config
    policy: Categorical
    network: Any  # an ActorCritic, whose `apply` flax leaves without a result type
    optimizer: optax.GradientTransformation


def make_agent(config: Config, envs: jaxvec.VectorEnv) -> Agent:
    """Fits an agent to the spaces of the envs."""
    action_space = discrete_actions(config, envs, "IMPALA")
    lr = optax.linear_schedule(config.lr, 0, config.num_updates)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(lr))
    network = ActorCritic(int(action_space.n), gaussian=False)
    return Agent(config, Categorical(action_space), network, optimizer)


class Learner(NamedTuple):
    """What learning carries from rollout to rollout."""

    params: Any
    opt_state: Any
    obs_stats: RunningMeanStd  # [obs_size]
    returns: Returns


class Rollout(NamedTuple):
    """What came of steps, `[num_steps, num_envs, ...]`."""

    obs: jax.Array  # [num_envs, obs_size] float32
    next_obs: jax.Array  # [num_envs, obs_size] float32, within the episode
    action: jax.Array  # [num_envs] int32
    log_prob: jax.Array  # [num_envs] float32, with the weights that played
    reward: jax.Array  # [num_envs] float32
    terminated: jax.Array  # [num_envs] bool
    done: jax.Array  # [num_envs] bool
    episode_return: jax.Array  # [num_envs] float32


def play(
    agent: Agent, learner: Learner, handle: jaxvec.Handle, obs: jax.Array, key: jax.Array
) -> tuple[jaxvec.Handle, jax.Array, Rollout]:
    """Plays `num_steps` steps in every env of an actor; `obs` are the last, `[num_envs, obs_size]`."""

    def step(carry: tuple[jaxvec.Handle, jax.Array], key: jax.Array) -> tuple[Any, Rollout]:
        handle, obs = carry
        logits, _ = agent.network.apply(learner.params, learner.obs_stats.normalize(obs))
        action = agent.policy.sample(logits, key)
        log_prob, _ = agent.policy.evaluate(logits, action)
        handle, timestep = jaxvec.step(handle, agent.policy.to_env(action))
        next_obs, done = encode(timestep.obs), timestep.terminated | timestep.truncated
        # Where an episode ended, next_obs is already the first of the next one.
        within = jnp.where(done[:, None], encode(timestep.info["final_obs"]), next_obs)
        ends = timestep.terminated, done
        came = Rollout(obs, within, action, log_prob, timestep.reward, *ends, timestep.info["episode_return"])
        return (handle, next_obs), came

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
    """Returns the targets of values, and the advantages of actions; all are `[num_steps, num_envs]`.

    Args:
        config: with the discount and the decay.
        reward: of each step.
        terminated: whether the episode ended there, and had no future.
        done: whether it ended there at all.
        value: before each step.
        next_value: after it, within the episode.
        log_ratio: by how much likelier the action is now than when it was taken, as a logarithm.
    """
    weight = jnp.exp(jnp.minimum(log_ratio, 0))
    future = config.gamma * jnp.where(terminated, 0, next_value)
    surprise = weight * (reward + future - value)
    decay = config.gamma * config.trace_decay * weight * ~done

    def add(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        correction = now[0] + now[1] * later
        return correction, correction

    _, correction = jax.lax.scan(add, jnp.zeros_like(value[0]), (surprise, decay), reverse=True)
    # What follows a step is corrected, too, unless the episode or the rollout ends there.
    following = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])]) * ~done
    advantage = weight * (reward + future + config.gamma * config.trace_decay * following - value)
    return value + correction, advantage


def learn(agent: Agent, learner: Learner, rollout: Rollout) -> tuple[Learner, jax.Array]:
    """Takes one gradient step; returns the mean return of the last episodes, `[]` float32, too."""
    config = agent.config
    obs, next_obs = map(learner.obs_stats.normalize, (rollout.obs, rollout.next_obs))
    reward = (1 - config.gamma) * rollout.reward  # so that values are of the order of a reward

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
    """Plays in a pool of its own.

    Attributes:
        obs: the last observations, `[num_envs, obs_size]` float32.
    """

    def __init__(self, agent: Agent, envs: jaxvec.VectorEnv, number: int) -> None:
        """Resets the envs."""
        seed = agent.config.seed + number * agent.config.num_envs
        self._play: Callable[..., Any] = jax.jit(partial(play, agent))
        self._handle, timestep = jaxvec.reset(envs, seed=seed)
        self.obs: jax.Array = encode(timestep.obs)
        self._key = jax.random.fold_in(jax.random.key(agent.config.seed), number)

    def play(self, learner: Learner) -> Rollout:
        """Returns the next rollout, when it is there."""
        self._key, key = jax.random.split(self._key)
        self._handle, self.obs, rollout = self._play(learner, self._handle, self.obs, key)
        return jax.block_until_ready(rollout)


class Exchange:
    """Where the learner leaves the newest weights, and actors in threads leave rollouts."""

    def __init__(self, learner: Learner, num_actors: int) -> None:
        """Begins with the learner's first weights."""
        self.learner = learner
        self._rollouts: queue.Queue[Rollout] = queue.Queue(num_actors)  # so that none gets much older
        self._stopped = threading.Event()
        self._threads: list[Future[None]] = []

    @contextmanager
    def playing(self, actors: Sequence[Actor]) -> Generator[Callable[[], Rollout]]:
        """Lets actors play, each in a thread; yields what waits for the next rollout."""
        with ThreadPoolExecutor(len(actors)) as pool:
            try:
                self._threads = [pool.submit(self._play, actor) for actor in actors]
                yield self._next
            finally:
                self._stopped.set()

    def alone(self, actor: Actor) -> Callable[[], Rollout]:
        """Returns what plays the next rollout, while the learner waits."""
        return lambda: actor.play(self.learner)

    def _play(self, actor: Actor) -> None:
        while not self._stopped.is_set():
            rollout = actor.play(self.learner)
            while not self._stopped.is_set():
                with suppress(queue.Full):  # looks again whether there is more to do
                    self._rollouts.put(rollout, timeout=0.1)
                    break

    def _next(self) -> Rollout:
        while True:
            with suppress(queue.Empty):  # looks again whether an actor has failed
                return self._rollouts.get(timeout=0.1)
            for thread in self._threads:
                if thread.done():
                    thread.result()


def run(config: Config) -> Result:
    """Starts the envs, trains, and closes them."""
    env = partial(make_delayed, config.env, config.mean_delay) if config.mean_delay else config.env
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
        curve = [np.nan]  # which is not high enough
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
    """Returns what is learned before the first rollout; observations are `[num_envs, obs_size]`."""
    params = agent.network.init(jax.random.key(agent.config.seed), obs)
    stats = RunningMeanStd.create(obs[0], count=0)
    return Learner(params, agent.optimizer.init(params), stats, Returns.create())


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains as `argv` or the command line says, prints the outcome, plots the learning curve."""
    about = "Trains IMPALA on a Gymnasium env with Box observations and Discrete actions."
    config = parse(Config, "impala", about, argv)
    return finish(config, "IMPALA", "impala", run(config))


if __name__ == "__main__":
    main()
