"""PPO on Gymnasium envs, with all of training in one `jax.jit`. The file is complete: copy and change it.

    python -m jaxvec.examples.ppo --env Pendulum-v1
    python -m jaxvec.examples.ppo --resume runs/NAME
    python -m jaxvec.examples.ppo --evaluate runs/NAME

The compiled loop steps the Python envs, which run in worker processes. Observations are Box, Discrete,
MultiDiscrete or MultiBinary spaces, or Dicts and Tuples of them; actions Discrete, MultiDiscrete or float Box
spaces. A CNN processes uint8 images. A leaf `action_mask` of a Dict, or with `--mask-info` an info of this
name, marks the legal discrete actions. Each run has a folder in `runs`. Ctrl-C saves, and ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from gymnasium import Space, spaces

import jaxvec
from jaxvec.logging import Episodes, Options, Policy, TrainingRun, training
from jaxvec.normalize import RunningMeanStd


@dataclass(frozen=True)
class Config(Options):
    """Trains PPO on a Gymnasium env."""

    total_steps: int = 524_288  # env steps, rounded up to a multiple of num-envs x num-steps
    num_epochs: int = 4  # passes over the steps of an update
    num_minibatches: int = 8  # gradient steps per pass
    lr: float = 1e-3  # learning rate, falling linearly to 0
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # decay of the advantage estimate per step
    clip: float = 0.2  # PPO clip range
    entropy_weight: float = 0.005  # weight of the entropy bonus
    value_weight: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # maximum norm of the gradient
    scale_by_return: bool = True  # divide rewards by the standard deviation of discounted returns
    mask_info: bool = False  # read the legal actions from the info action_mask

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_epochs, self.num_minibatches) < 1 or self.steps_per_update % self.num_minibatches:
            raise ValueError("--num-envs times --num-steps must be a multiple of --num-minibatches")

    @property
    def infos(self) -> list[str]:
        return ["action_mask"] if self.mask_info else []


class Obs(NamedTuple):
    """Inputs of the network, with any leading axes."""

    vector: jax.Array  # [..., size] float32, all leaves that are not images
    images: tuple[jax.Array, ...] = ()  # each [..., height, width, channels] uint8
    mask: jax.Array | None = None  # [..., num_actions] bool, the legal actions; None if all are


def encode(space: Space[Any], obs: Any) -> Obs:
    """Converts observations of a space, with leaves `[num_envs, ...]`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = dict(space.items() if isinstance(space, spaces.Dict) else enumerate(space))
        mask = obs["action_mask"] > 0 if inner.pop("action_mask", None) else None
        parts = [encode(each, obs[name]) for name, each in inner.items()]
        vector = jnp.concatenate([part.vector for part in parts], axis=-1)
        return Obs(vector, sum((part.images for part in parts), ()), mask)
    if isinstance(space, spaces.Discrete):
        return Obs(jax.nn.one_hot(obs - int(space.start), int(space.n)))
    if isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8:
        return Obs(jnp.zeros((len(obs), 0)), (obs,))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return Obs(obs.reshape(len(obs), -1).astype(jnp.float32))
    raise SystemExit(f"this PPO takes Box, Discrete, Dict and Tuple observations, not {space}")


def convolve(images: jax.Array, kernel: jax.Array, strides: Sequence[int], *_: Any, **__: Any) -> jax.Array:
    """Convolves `[n, height, width, c]` without padding, for `nn.Conv`, by a matrix product with patches.

    On the CPU, XLA's convolution took 24 times as long inside a `scan` as outside (jaxlib 0.10.2, two cores).
    """
    (height, width), (down, right) = kernel.shape[:2], strides
    rows, columns = images.shape[1] - height + 1, images.shape[2] - width + 1
    corners = [(y, x) for y in range(height) for x in range(width)]
    patches = [images[:, y : y + rows : down, x : x + columns : right] for y, x in corners]
    return jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


class ActorCritic(nn.Module):
    """A small CNN per image, and separate networks for policy and value, with two hidden layers each."""

    space: Any  # of the actions

    @nn.compact
    def __call__(self, stats: RunningMeanStd, obs: Obs) -> tuple[jax.Array, jax.Array]:
        """Returns logits, or means and log standard deviations, `[..., num_outputs]`, and values `[...]`."""
        inputs = [stats.normalize(obs.vector)]
        options: Any = {"padding": "VALID", "kernel_init": nn.initializers.he_normal()}
        options["conv_general_dilated"] = convolve if jax.default_backend() == "cpu" else None
        for image in obs.images:
            hidden = image.astype(jnp.float32) / 255
            for features, size, stride in ((16, 4, 2), (32, 4, 2), (32, 3, 1)):
                if min(hidden.shape[-3:-1]) >= size:
                    hidden = nn.relu(nn.Conv(features, (size, size), (stride, stride), **options)(hidden))
            inputs.append(nn.relu(nn.Dense(128)(hidden.reshape(*image.shape[:-3], -1))))

        def network(num_outputs: int, scale: float) -> jax.Array:
            hidden = jnp.concatenate(inputs, axis=-1)
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
            return nn.Dense(num_outputs, kernel_init=nn.initializers.orthogonal(scale))(hidden)

        outputs = network(spaces.flatdim(self.space), 0.01)  # small, so the initial policy is nearly uniform
        if isinstance(self.space, spaces.Box):
            log_std = self.param("log_std", nn.initializers.zeros, outputs.shape[-1:])
            outputs = jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], axis=-1)
        elif obs.mask is not None:
            outputs = jnp.where(obs.mask.reshape(outputs.shape), outputs, -1e9)
        return outputs, network(1, 1.0)[..., 0]

    def logits(self, outputs: jax.Array) -> list[jax.Array]:
        """Splits the outputs into the logits of each number of a Discrete or MultiDiscrete action."""
        sizes = [self.space.n] if isinstance(self.space, spaces.Discrete) else self.space.nvec.ravel()
        return jnp.split(outputs, np.cumsum(sizes)[:-1], axis=-1)

    def sample(self, outputs: jax.Array, key: jax.Array | None) -> jax.Array:
        """Samples actions `[..., size]`, integers from 0; without a key, the most probable ones."""
        if isinstance(self.space, spaces.Box):
            mean, log_std = jnp.split(outputs, 2, axis=-1)
            return mean if key is None else mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        noise = 0 if key is None else jax.random.gumbel(key, outputs.shape)  # the maximum is then a draw
        return jnp.stack([each.argmax(-1) for each in self.logits(outputs + noise)], axis=-1)

    def evaluate(self, outputs: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the log-density of the action (before it is clipped) and the entropy, `[...]` in nats."""
        if isinstance(self.space, spaces.Box):
            mean, log_std = jnp.split(outputs, 2, axis=-1)
            log_prob = jax.scipy.stats.norm.logpdf(action, mean, jnp.exp(log_std))
            return log_prob.sum(-1), (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)
        log_prob = entropy = jnp.zeros(action.shape[:-1])
        for number, logits in enumerate(map(jax.nn.log_softmax, self.logits(outputs))):
            log_prob += jnp.take_along_axis(logits, action[..., number, None], axis=-1)[..., 0]
            entropy -= jnp.sum(jnp.exp(logits) * logits, axis=-1)
        return log_prob, entropy

    def to_env(self, action: jax.Array) -> jax.Array:
        """Converts to actions of the env, `[num_envs, ...]`; -1 and 1 become the bounds of a Box."""
        action = action.reshape(-1, *self.space.shape)
        if not isinstance(self.space, spaces.Box):
            return action + np.asarray(self.space.start, np.int32)
        low, high = self.space.low.astype(np.float64), self.space.high.astype(np.float64)
        bounded = high - low < 1e6  # some spaces use the largest float as infinity
        low, high = np.where(bounded, low, -1), np.where(bounded, high, 1)
        middle, reach = ((low + high) / 2).astype(np.float32), ((high - low) / 2).astype(np.float32)
        return jnp.clip(middle + reach * action, self.space.low, self.space.high)


def inputs(config: Config, space: Space[Any], obs: Any, info: dict[str, Any]) -> Obs:
    """Converts observations, with the legal actions of the info if the options say so."""
    encoded = encode(space, obs)
    return encoded._replace(mask=info["action_mask"] > 0) if config.mask_info else encoded


def actor(config: Config, obs_space: Space[Any], space: Space[Any]) -> Any:
    """Returns the function that chooses the most probable actions, for evaluations and `load`."""
    network: Any = ActorCritic(space)

    def act(saved: Any, _: None, obs: Any, info: dict[str, Any]) -> tuple[None, jax.Array]:
        seen = RunningMeanStd(**saved["stats"]), inputs(config, obs_space, obs, info)
        outputs, _ = network.apply(saved["params"], *seen)
        return None, network.to_env(network.sample(outputs, None))

    return act


def load(folder: str | Path) -> Policy:
    """Returns the policy of a run: a function from an observation to the most probable action."""
    return Policy(folder, Config, actor)


class State(NamedTuple):
    """State of training between two updates."""

    number: jax.Array  # [] int32, updates so far
    learned: TrainState  # parameters and optimiser state
    obs_stats: RunningMeanStd  # [size], of the vector
    return_stats: RunningMeanStd  # [], of discounted returns
    episodes: Episodes


class Steps(NamedTuple):
    """Data of one step of all envs, which `update` stacks to `[num_steps, num_envs, ...]`."""

    obs: Obs
    action: jax.Array  # [num_envs, size] int32 or float32
    log_prob: jax.Array  # [num_envs] float32
    value: jax.Array  # [num_envs] float32
    next_value: jax.Array  # [num_envs] float32, of the same episode
    reward: jax.Array  # [num_envs] float32
    terminated: jax.Array  # [num_envs] bool
    done: jax.Array  # [num_envs] bool
    discounted: jax.Array  # [num_envs] float32, discounted return of the episode so far


def advantages(config: Config, steps: Steps) -> jax.Array:
    """Returns generalised advantages, `[num_steps, num_envs]` float32."""
    # Bootstrap unless the episode terminated: a truncated episode could have continued.
    surprise = steps.reward + config.gamma * jnp.where(steps.terminated, 0, steps.next_value) - steps.value

    def add(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = now[0] + jnp.where(now[1], 0, config.gamma * config.gae_lambda * later)
        return advantage, advantage

    return jax.lax.scan(add, jnp.zeros_like(steps.value[0]), (surprise, steps.done), reverse=True)[1]


def train(config: Config, run: TrainingRun, envs: jaxvec.VectorEnv) -> None:
    """Trains, or continues or evaluates a run, and writes its folder."""
    obs_space, space = envs.single_observation_space, envs.single_action_space
    known = isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.Box)
    if not known or space.dtype.kind not in "if":
        raise SystemExit(f"this PPO takes Discrete, MultiDiscrete and float Box actions, not {space}")
    network: Any = ActorCritic(space)  # Any because flax annotates no result type for `apply`
    see = partial(inputs, config, obs_space)
    num_gradients = config.num_epochs * config.num_minibatches  # of an update
    adam = optax.adam(optax.linear_schedule(config.lr, 0, config.num_updates * num_gradients))
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    optimizer = optax.flatten(optax.chain(clip, adam))  # all parameters in one vector: fewer operations

    def begin(handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> tuple[State, Any]:
        """Returns the initial states of training and of episodes: handle, inputs, discounted returns."""
        obs = see(timestep.obs, timestep.info)
        stats = RunningMeanStd.create(obs.vector[0], count=0), RunningMeanStd.create(0.0, count=0)
        params = network.init(jax.random.key(config.seed), stats[0], obs)
        learned = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
        state = State(jnp.int32(0), learned, *stats, Episodes.create())
        return state, (handle, obs, jnp.zeros(config.num_envs))

    def loss(params: Any, stats: RunningMeanStd, steps: Steps, advantage: Any, target: Any) -> Any:
        """Returns PPO's loss of a minibatch, `[]` float32, and its parts."""
        outputs, value = network.apply(params, stats, steps.obs)
        log_prob, entropy = network.evaluate(outputs, steps.action)
        log_ratio, clip = log_prob - steps.log_prob, config.clip
        ratio = jnp.exp(log_ratio)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()
        error, entropy = 0.5 * jnp.square(value - target).mean(), entropy.mean()
        total = config.value_weight * error - gain - config.entropy_weight * entropy
        metrics = {"policy_loss": -gain, "value_loss": error, "entropy": entropy}
        return total, metrics | {"kl": jnp.mean(ratio - 1 - log_ratio)}

    def update(state: State, playing: Any) -> tuple[State, Any, dict[str, jax.Array]]:
        """Plays `num_steps` steps in every env, and learns from them. Also returns metrics, `[]`."""
        # The key depends only on the number of the update, so a resumed run equals an uninterrupted one.
        play_key, learn_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.number))
        act = partial(network.apply, state.learned.params, state.obs_stats)

        def play(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
            (handle, obs, discounted), episodes = carry
            outputs, value = act(obs)
            action = network.sample(outputs, key)
            log_prob, _ = network.evaluate(outputs, action)
            handle, timestep = jaxvec.step(handle, network.to_env(action))
            _, reward, terminated, truncated, info = timestep
            # At the end of an episode, timestep.obs is already the first one of the next episode. The value
            # of its own last observation is needed only if it was truncated, which is rare.
            final = lambda: act(see(timestep.last_obs, info))[1]  # noqa: E731
            last = jax.lax.cond(truncated.any(), final, lambda: jnp.zeros_like(value))
            done, discounted = timestep.done, config.gamma * discounted + reward
            steps = Steps(obs, action, log_prob, value, last, reward, terminated, done, discounted)
            playing = handle, see(timestep.obs, info), jnp.where(done, 0, discounted)
            return (playing, episodes.add(timestep)), steps

        keys = jax.random.split(play_key, config.num_steps)
        (playing, episodes), steps = jax.lax.scan(play, (playing, state.episodes), keys)
        following = jnp.concatenate([steps.value[1:], act(playing[1])[1][None]])
        steps = steps._replace(next_value=jnp.where(steps.done, steps.next_value, following))
        return_stats = state.return_stats.update(steps.discounted)
        if config.scale_by_return:
            steps = steps._replace(reward=return_stats.scale(steps.reward))
        advantage = advantages(config, steps)
        target = advantage + steps.value
        batch = steps, (advantage - advantage.mean()) / (advantage.std() + 1e-8), target
        batch = jax.tree.map(lambda leaf: leaf.reshape(config.steps_per_update, *leaf.shape[2:]), batch)

        def descend(learned: TrainState, chosen: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
            minibatch = jax.tree.map(partial(jnp.take, indices=chosen, axis=0), batch)
            gradient, metrics = jax.grad(loss, has_aux=True)(learned.params, state.obs_stats, *minibatch)
            return learned.apply_gradients(grads=gradient), metrics

        order = jnp.argsort(jax.random.uniform(learn_key, (config.num_epochs, config.steps_per_update)))
        learned, metrics = jax.lax.scan(descend, state.learned, order.reshape(num_gradients, -1))
        explained = 1 - jnp.var(advantage) / (jnp.var(target) + 1e-8)
        metrics = jax.tree.map(jnp.mean, metrics) | {"explained_variance": explained} | episodes.means()
        obs_stats, number = state.obs_stats.update(steps.obs.vector), state.number + 1
        return State(number, learned, obs_stats, return_stats, episodes), playing, metrics

    params = lambda state: {"params": state.learned.params, "stats": vars(state.obs_stats)}  # noqa: E731
    run.train(envs, begin, update, params=params, act=actor(config, obs_space, space))


def main(argv: Sequence[str] | None = None, kind: type[Config] = Config, program: str = "ppo") -> TrainingRun:
    with training(kind, argv, program=program) as (config, run), run.make(info=config.infos) as envs:
        train(config, run, envs)
    return run


if __name__ == "__main__":
    main()
