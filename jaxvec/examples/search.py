r"""Gumbel MuZero that plans with the envs themselves: it learns a policy and a value, but no model. One file.

    python -m jaxvec.examples.search
    python -m jaxvec.examples.search --resume runs/NAME
    python -m jaxvec.examples.search --evaluate runs/NAME

All of training is one `jax.jit`. Before each step, mctx searches a tree. The model is `jaxvec.simulate`,
which steps copies of the envs. A network gives the prior policy and the value of each node. It learns the
policy that the search found, and returns that bootstrap from the values of the search. Evaluations compare
the policy alone with the search. Each run has a folder in `runs`. Ctrl-C saves, and ends the run.

The state of an env includes its random generator, so the search foresees random events. That makes no
difference for envs that are deterministic after their reset, such as CartPole.
"""

# mctx's records are chex dataclasses; pyright does not see their fields.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from gymnasium import Space, spaces

import jaxvec
from jaxvec.logging import Episodes, Options, TrainingRun, training
from jaxvec.normalize import RunningMeanStd

try:
    import mctx
except ImportError as _error:
    raise (SystemExit if __name__ == "__main__" else ImportError)(
        'this example needs mctx: pip install "mctx>=0.0.71"'
    ) from _error


@dataclass(frozen=True)
class Config(Options):
    """Learns a policy and a value by tree search with copies of Gymnasium envs."""

    env: str = "CartPole-v1"  # Gymnasium id of an env with Discrete actions
    env_kwargs: str = "{}"  # JSON object with arguments of the env or of jaxvec.make, such as max_sizes
    num_envs: int = 16  # number of envs
    total_steps: int = 49_152  # env steps, without those of copies, rounded up to whole updates
    num_steps: int = 32  # steps of each env per update
    num_simulations: int = 16  # nodes that a search adds to its tree before each env step
    value_scale: float = 0.03  # weight of the values, compared with the prior policy, in a search
    num_epochs: int = 4  # passes over the steps of an update
    num_minibatches: int = 8  # gradient steps per pass
    lr: float = 1e-3  # learning rate, falling linearly to 0
    gamma: float = 0.99  # discount per step
    trace_decay: float = 0.8  # decay of the value target per step
    max_grad_norm: float = 0.5  # maximum norm of the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_simulations, self.num_epochs, self.num_minibatches) < 1:
            raise ValueError("the numbers of simulations and passes must be at least 1")
        if self.steps_per_update % self.num_minibatches:
            raise ValueError("--num-envs times --num-steps must be a multiple of --num-minibatches")
        if self.video > self.eval_episodes:
            raise ValueError("--video must be at most --eval-episodes")


def encode(space: Space[Any], obs: Any) -> jax.Array:
    """Flattens observations, with leaves `[num_envs, ...]`, to `[num_envs, size]` float32. Omits texts."""
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return obs.reshape(len(obs), -1).astype(jnp.float32)
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(obs - int(space.start), int(space.n))
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = dict(space.items() if isinstance(space, spaces.Dict) else enumerate(space))
        return jnp.concatenate([encode(each, obs[name]) for name, each in inner.items()], axis=-1)
    if isinstance(obs, dict) and "chars" in obs:  # a text, such as MiniGrid's mission
        return jnp.zeros((len(obs["chars"]), 0))
    raise SystemExit(f"this search takes Box, Discrete, Dict and Tuple observations, not {space}")


class PolicyValue(nn.Module):
    """Separate networks for policy and value, with two hidden layers each."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits `[..., num_actions]` and values `[...]`."""

        def network(num_outputs: int) -> jax.Array:
            hidden = obs
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
            # Zeros: before it has learned, a search knows nothing but the rewards in its tree.
            return nn.Dense(num_outputs, kernel_init=nn.initializers.zeros)(hidden)

        return network(self.num_actions), network(1)[..., 0]


class Learned(NamedTuple):
    """Parameters of the network and statistics of its inputs and outputs."""

    train: TrainState  # parameters and optimiser state
    obs_stats: RunningMeanStd  # [size]
    value_stats: RunningMeanStd  # [], of value targets


class State(NamedTuple):
    """State of training between two updates."""

    number: jax.Array  # [] int32, updates so far
    learned: Learned
    episodes: Episodes


class Steps(NamedTuple):
    """Data of one step of all envs, which `update` stacks to `[num_steps, num_envs, ...]`."""

    obs: jax.Array  # [num_envs, size] float32
    policy: jax.Array  # [num_envs, num_actions] float32, the probabilities that the search found
    value: jax.Array  # [num_envs] float32, of the search
    reward: jax.Array  # [num_envs] float32, with the value of the last observation after a truncation
    done: jax.Array  # [num_envs] bool


def returns(config: Config, steps: Steps, last_value: jax.Array) -> jax.Array:
    """Returns the value targets, `[num_steps, num_envs]` float32, which mix returns of all lengths.

    `last_value` is the value after the last step, `[num_envs]`.
    """

    def add(later: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, done, next_value = now
        mixed = (1 - config.trace_decay) * next_value + config.trace_decay * later
        target = reward + jnp.where(done, 0, config.gamma * mixed)
        return target, target

    following = jnp.concatenate([steps.value[1:], last_value[None]])
    return jax.lax.scan(add, last_value, (steps.reward, steps.done, following), reverse=True)[1]


def train(
    config: Config, run: TrainingRun, envs: jaxvec.VectorEnv, eval_envs: jaxvec.VectorEnv, film: Any
) -> None:
    """Trains, or continues or evaluates a run. `film` is the envs to film, or None."""
    obs_space, space = envs.single_observation_space, envs.single_action_space
    if not isinstance(space, spaces.Discrete):
        raise SystemExit(f"{config.env}: this search takes Discrete actions, not {space}")
    start: int = int(space.start)
    network: Any = PolicyValue(int(space.n))  # Any because flax annotates no result type for `apply`
    num_gradients = config.num_epochs * config.num_minibatches  # of an update
    adam = optax.adam(optax.linear_schedule(config.lr, 0, config.num_updates * num_gradients))
    # All parameters in one vector: there are fewer operations to compile and run.
    optimizer = optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam))

    def begin(handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> tuple[State, Any]:
        """Returns the initial states of training and of episodes: handle and inputs of the network."""
        obs = encode(obs_space, timestep.obs)
        params = network.init(jax.random.key(config.seed), obs)
        stats = RunningMeanStd.create(obs[0], count=0), RunningMeanStd.create(0.0, count=0)
        learned = Learned(TrainState.create(apply_fn=network.apply, params=params, tx=optimizer), *stats)
        return State(jnp.int32(0), learned, Episodes.create()), (handle, obs)

    def predict(learned: Learned, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits `[num_envs, num_actions]` and values `[num_envs]`, in the scale of rewards."""
        logits, value = network.apply(learned.train.params, learned.obs_stats.normalize(obs))
        return logits, learned.value_stats.mean + value * jnp.sqrt(learned.value_stats.var)

    def outcome(learned: Learned, timestep: jaxvec.TimeStep) -> tuple[jax.Array, ...]:
        """Returns reward, discount, logits and value after a step."""
        logits, value = predict(learned, encode(obs_space, timestep.last_obs))
        # The search stops at the end of an episode, but a truncated episode could have continued.
        cut = timestep.truncated & ~timestep.terminated
        reward = timestep.reward + jnp.where(cut, config.gamma * value, 0)
        return reward, jnp.where(timestep.done, 0.0, config.gamma), logits, value

    def search(learned: Learned, handle: Any, obs: jax.Array, key: jax.Array, noise: float) -> Any:
        """Searches from the envs' states, and returns the handle and mctx's result."""

        def expand(_: Any, __: Any, action: Any, state: Any) -> tuple[mctx.RecurrentFnOutput, Any]:
            """Adds one node per tree: steps copies of the envs from the states `[num_envs]` of nodes."""
            state, timestep = jaxvec.simulate(handle, state, action + start)
            reward, discount, logits, value = outcome(learned, timestep)
            output = mctx.RecurrentFnOutput(
                reward=reward, discount=discount, prior_logits=logits, value=value
            )
            return output, state

        logits, value = predict(learned, obs)
        handle, state = jaxvec.save(handle)
        result = mctx.gumbel_muzero_policy(
            params=(),
            rng_key=key,
            root=mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state),
            recurrent_fn=expand,
            num_simulations=config.num_simulations,
            qtransform=partial(mctx.qtransform_completed_by_mix_value, value_scale=config.value_scale),
            gumbel_scale=noise,
        )
        return handle, result

    def loss(params: Any, obs: jax.Array, policy: jax.Array, target: jax.Array) -> Any:
        """Returns the loss of a minibatch, `[]` float32, and its parts. Inputs are normalised."""
        logits, value = network.apply(params, obs)
        log_probs = jax.nn.log_softmax(logits)
        improvement = jnp.sum(jax.scipy.special.xlogy(policy, policy) - policy * log_probs, axis=-1).mean()
        error = 0.5 * jnp.square(value - target).mean()
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
        return improvement + error, {"policy_loss": improvement, "value_loss": error, "entropy": entropy}

    def update(state: State, playing: Any) -> tuple[State, Any, dict[str, jax.Array]]:
        """Plays `num_steps` steps in every env, and learns from them. Also returns metrics, `[]`."""
        # The key depends only on the number of the update, so a resumed run equals an uninterrupted one.
        play_key, learn_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.number))
        learned = state.learned

        def play(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
            (handle, obs), episodes = carry
            handle, found = search(learned, handle, obs, key, 1.0)
            handle, timestep = jaxvec.step(handle, found.action + start)
            reward, discount, _, _ = outcome(learned, timestep)
            value = found.search_tree.summary().value
            steps = Steps(obs, found.action_weights, value, reward, discount == 0)
            return ((handle, encode(obs_space, timestep.obs)), episodes.add(timestep)), steps

        keys = jax.random.split(play_key, config.num_steps)
        (playing, episodes), steps = jax.lax.scan(play, (playing, state.episodes), keys)
        target = returns(config, steps, predict(learned, playing[1])[1])
        obs_stats, value_stats = learned.obs_stats.update(steps.obs), learned.value_stats.update(target)
        batch = obs_stats.normalize(steps.obs), steps.policy, value_stats.normalize(target)
        batch = jax.tree.map(lambda leaf: leaf.reshape(config.steps_per_update, *leaf.shape[2:]), batch)

        def descend(train: TrainState, chosen: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
            minibatch = jax.tree.map(partial(jnp.take, indices=chosen, axis=0), batch)
            gradient, metrics = jax.grad(loss, has_aux=True)(train.params, *minibatch)
            return train.apply_gradients(grads=gradient), metrics

        order = jnp.argsort(jax.random.uniform(learn_key, (config.num_epochs, config.steps_per_update)))
        trained, metrics = jax.lax.scan(descend, learned.train, order.reshape(num_gradients, -1))
        metrics = jax.tree.map(jnp.mean, metrics) | {"value": target.mean()} | episodes.means()
        return State(state.number + 1, Learned(trained, obs_stats, value_stats), episodes), playing, metrics

    def play(with_search: bool, learned: Learned, film: Any, handle: Any, timestep: Any) -> jax.Array:
        """Plays an episode in each env without noise. Returns the returns, `[num_envs]`."""

        def unfinished(carry: Any) -> jax.Array:
            _, _, timestep, number = carry
            return ~timestep.done.all() & (number < config.eval_steps)

        def body(carry: Any) -> Any:
            film, handle, timestep, number = carry
            obs = encode(obs_space, timestep.obs)
            if with_search:
                handle, found = search(learned, handle, obs, jax.random.key(0), 0.0)
                action = found.action + start
            else:
                action = predict(learned, obs)[0].argmax(-1) + start
            if film is not None:  # the same episodes: the seeds and the actions are equal
                film, _ = jaxvec.step(film, action[: config.video])
            return film, *jaxvec.step(handle, action), number + 1

        return jax.lax.while_loop(unfinished, body, (film, handle, timestep, 0))[2].info["episode_return"]

    alone, searched = (jax.jit(partial(play, with_search)) for with_search in (False, True))

    def evaluate(state: State) -> dict[str, jax.Array]:
        """Returns the returns of evaluated episodes, with the search and with the policy alone."""
        seed, filmed = config.seed + 10_000, None
        policy = alone(state.learned, None, *jaxvec.reset(eval_envs, seed=seed))
        if film is not None:
            filmed, _ = jaxvec.reset(film, seed=seed)
        score = searched(state.learned, filmed, *jaxvec.reset(eval_envs, seed=seed))
        return {"evaluation": score, "policy_evaluation": policy}

    def params(state: State) -> dict[str, Any]:
        """Returns what other programs may load from a checkpoint."""
        learned = state.learned
        stats = {"stats": vars(learned.obs_stats), "value_stats": vars(learned.value_stats)}
        return {"params": learned.train.params, **stats}

    run.train(envs, begin, update, params=params, evaluate=evaluate)


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    with training(Config, argv, program="search") as (config, run):
        # The states of one search: the root and the nodes that it adds to each tree.
        num_states, once = 1 + config.num_simulations, {"autoreset_mode": "EPISODIC"}
        num_films, episodes = config.video, config.eval_episodes
        films = run.make(video=num_films, num_envs=num_films, **once) if num_films else nullcontext()
        with (
            films as film,
            run.make(video=0, states=config.num_envs * num_states) as envs,
            run.make(video=0, num_envs=episodes, states=episodes * num_states, **once) as eval_envs,
        ):
            train(config, run, envs, eval_envs, film)
    return run


if __name__ == "__main__":
    main()
