"""PPO on Gymnasium envs, with all of training in one `jax.jit`. The file is complete: copy and change it.

    python -m jaxvec.examples.ppo --env Pendulum-v1
    python -m jaxvec.examples.ppo --resume runs/NAME

The envs are plain Python in worker processes, and `jaxvec.step` steps them from inside the compiled loop.
Observations are Box, Discrete, MultiDiscrete or MultiBinary spaces, or Dicts and Tuples of them. A CNN
processes uint8 images. A leaf `action_mask` of a Dict, or with `--mask-info` an info of this name, marks the
legal Discrete actions. Each run has a folder in `runs`. Ctrl-C ends a run after the current update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import serialization
from gymnasium import Space, spaces

import jaxvec
from jaxvec.logging import Episodes, Run, option, training
from jaxvec.normalize import RunningMeanStd


@dataclass(frozen=True)
class Config:
    env: str = option("CartPole-v1", "Gymnasium id")
    num_envs: int = option(64, "number of envs")
    num_workers: int | None = option(None, "number of worker processes; by default, one per usable core", int)
    total_steps: int = option(524_288, "env steps, rounded up to a multiple of num-envs x num-steps")
    num_steps: int = option(64, "steps of each env per update")
    num_epochs: int = option(4, "passes over the steps of an update")
    num_minibatches: int = option(8, "gradient steps per pass")
    lr: float = option(1e-3, "learning rate, falling linearly to 0")
    gamma: float = option(0.99, "discount per step")
    gae_lambda: float = option(0.95, "decay of the advantage estimate per step")
    clip: float = option(0.2, "PPO clip range")
    entropy_weight: float = option(0.005, "weight of the entropy bonus")
    value_weight: float = option(0.5, "weight of the value loss")
    max_grad_norm: float = option(0.5, "maximum norm of the gradient")
    scale_by_return: bool = option(False, "divide rewards by the standard deviation of discounted returns")
    mask_info: bool = option(False, "read the legal actions from the info action_mask")
    stop_at: float | None = option(None, "stop once the mean return reaches this value", float)
    save_every: int = option(100, "updates between two saves, each with an evaluation")
    eval_envs: int = option(8, "episodes of an evaluation, with the most probable actions")
    eval_steps: int = option(10_000, "maximum number of steps of an evaluated episode")
    seed: int = option(0, "random seed")
    name: str | None = option(None, "name of the folder in runs; by default program, env, seed and time", str)
    video: int = option(0, "number of envs to film; needs moviepy")
    tensorboard: bool = option(False, "write event files for TensorBoard, too; needs tensorboardX")
    wandb: bool = option(False, "log to Weights & Biases, too; needs wandb")

    def __post_init__(self) -> None:
        sizes = self.num_envs, self.num_steps, self.total_steps, self.num_epochs, self.num_minibatches
        if min(*sizes, self.save_every, self.eval_envs) < 1:
            raise ValueError("the numbers of envs, steps, updates, epochs and minibatches must be at least 1")
        if self.steps_per_update % self.num_minibatches:
            raise ValueError("--num-envs times --num-steps must be a multiple of --num-minibatches")

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        return -(-self.total_steps // self.steps_per_update)


class Policy:
    """Distribution of actions. Discrete: logits, actions from 0. Box: means and log standard deviations."""

    def __init__(self, space: Space[Any]) -> None:
        self.space: Space[Any] = space
        self.discrete: bool = isinstance(space, spaces.Discrete)
        if isinstance(space, spaces.Discrete):
            self.size: int = int(space.n)
        elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            self.size = int(np.prod(space.shape))
        else:
            raise SystemExit(f"this PPO takes Discrete and float Box actions, not {space}")

    def sample(self, outputs: jax.Array, key: jax.Array | None) -> jax.Array:
        """Samples actions or, without a key, returns the most probable ones."""
        if self.discrete:
            return outputs.argmax(-1) if key is None else jax.random.categorical(key, outputs)
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return mean if key is None else mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

    def evaluate(self, outputs: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the log-density of the action (before it is clipped) and the entropy, `[...]` in nats."""
        if self.discrete:
            log_probs = jax.nn.log_softmax(outputs)
            log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
            return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        log_prob = jax.scipy.stats.norm.logpdf(action, mean, jnp.exp(log_std))
        return log_prob.sum(-1), (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)

    def to_env(self, action: jax.Array) -> jax.Array:
        """Converts to actions of the env, `[num_envs, ...]`; -1 and 1 become the bounds of a Box."""
        if isinstance(self.space, spaces.Discrete):
            return action + int(self.space.start)
        assert isinstance(self.space, spaces.Box)
        low, high = self.space.low.astype(np.float64), self.space.high.astype(np.float64)
        bounded = high - low < 1e6  # some spaces use the largest float as infinity
        low, high = np.where(bounded, low, -1), np.where(bounded, high, 1)
        middle, reach = ((low + high) / 2).astype(np.float32), ((high - low) / 2).astype(np.float32)
        return jnp.clip(middle + reach * action.reshape(-1, *low.shape), self.space.low, self.space.high)


class Obs(NamedTuple):
    """Inputs of the network, with any leading axes."""

    vector: jax.Array  # [..., size] float32, all leaves that are not images
    images: tuple[jax.Array, ...] = ()  # each [..., height, width, channels] uint8
    mask: jax.Array | None = None  # [..., num_actions] bool, the legal actions; None if all are


def encode(space: Space[Any], obs: Any) -> Obs:
    """Converts observations of a space, with leaves `[num_envs, ...]`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner: Any = space
        names = list(space.spaces) if isinstance(space, spaces.Dict) else range(len(space.spaces))
        parts = [encode(inner[name], obs[name]) for name in names if name != "action_mask"]
        vector = jnp.concatenate([part.vector for part in parts], axis=-1)
        mask = obs["action_mask"] > 0 if "action_mask" in names else None
        return Obs(vector, sum((part.images for part in parts), ()), mask)
    if isinstance(space, spaces.Discrete):
        return Obs(jax.nn.one_hot(obs - int(space.start), int(space.n)))
    if isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8:
        return Obs(jnp.zeros((len(obs), 0)), (obs,))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return Obs(obs.reshape(len(obs), -1).astype(jnp.float32))
    raise SystemExit(f"this PPO takes Box, Discrete, Dict and Tuple observations, not {space}")


class Conv(nn.Module):
    """A convolution without padding that is fast inside a loop on the CPU, too.

    There, XLA's convolution took 24 times as long inside a `scan` as outside (jaxlib 0.10.2, two cores). So
    on the CPU this is a matrix product with patches. The parameters are those of `nn.Conv`.
    """

    features: int
    size: int
    stride: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        shape = (self.size, self.size, images.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        if jax.default_backend() != "cpu":
            convolve = partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return bias + convolve(images, kernel, (self.stride, self.stride), "VALID")
        rows, columns = ((side - self.size) // self.stride * self.stride + 1 for side in images.shape[1:3])
        corners = [(y, x) for y in range(self.size) for x in range(self.size)]
        patches = [images[:, y : y + rows : self.stride, x : x + columns : self.stride] for y, x in corners]
        return bias + jnp.concatenate(patches, axis=-1) @ kernel.reshape(-1, self.features)


class ActorCritic(nn.Module):
    """A small CNN per image, and separate networks for policy and value, with two hidden layers each."""

    policy: Policy

    @nn.compact
    def __call__(self, obs: Obs) -> tuple[jax.Array, jax.Array]:
        """Maps observations to the policy's outputs `[..., num_outputs]` and values `[...]`."""
        inputs = [obs.vector]
        for image in obs.images:
            hidden = image.reshape(-1, *image.shape[-3:]).astype(jnp.float32) / 255
            for features, size, stride in ((16, 4, 2), (32, 4, 2), (32, 3, 1)):
                if min(hidden.shape[1:3]) >= size:
                    hidden = nn.relu(Conv(features, size, stride)(hidden))
            inputs.append(nn.relu(nn.Dense(128)(hidden.reshape(*image.shape[:-3], -1))))

        def network(num_outputs: int, scale: float) -> jax.Array:
            hidden = jnp.concatenate(inputs, axis=-1)
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
            return nn.Dense(num_outputs, kernel_init=nn.initializers.orthogonal(scale))(hidden)

        outputs = network(self.policy.size, 0.01)  # small, so the initial policy is nearly uniform
        if not self.policy.discrete:
            log_std = self.param("log_std", nn.initializers.zeros, (self.policy.size,))
            outputs = jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], axis=-1)
        elif obs.mask is not None:
            outputs = jnp.where(obs.mask, outputs, -1e9)
        return outputs, network(1, 1.0)[..., 0]


class State(NamedTuple):
    """State of training between two updates."""

    number: jax.Array  # [] int32, updates so far
    params: Any
    opt_state: Any
    obs_stats: RunningMeanStd  # [size], of the vector
    return_stats: RunningMeanStd  # [], of discounted returns
    episodes: Episodes


class Playing(NamedTuple):
    """State of the running episodes between two updates."""

    handle: jaxvec.Handle
    obs: Obs  # [num_envs, ...]
    discounted: jax.Array  # [num_envs] float32, discounted returns so far


class Steps(NamedTuple):
    """Data of one step of all envs, which `collect` stacks to `[num_steps, num_envs, ...]`."""

    obs: Obs
    action: jax.Array  # [num_envs] int32 or [num_envs, num_actions] float32
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


class Agent:
    """The parts that do not change during training, and the functions that are compiled."""

    def __init__(self, config: Config, envs: jaxvec.VectorEnv) -> None:
        self.config: Config = config
        self.space: Space[Any] = envs.single_observation_space
        self.policy: Policy = Policy(envs.single_action_space)
        self.network: Any = ActorCritic(self.policy)  # Any because flax annotates no result type for `apply`
        num_steps = config.num_updates * config.num_epochs * config.num_minibatches
        adam = optax.adam(optax.linear_schedule(config.lr, 0, num_steps))
        clipped = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)
        # All parameters in one vector: there are fewer operations to compile and run.
        self.optimizer: optax.GradientTransformation = optax.flatten(clipped)

    def encode(self, obs: Any, info: dict[str, Any]) -> Obs:
        encoded = encode(self.space, obs)
        return encoded._replace(mask=info["action_mask"] > 0) if self.config.mask_info else encoded

    def apply(self, params: Any, stats: RunningMeanStd, obs: Obs) -> tuple[jax.Array, jax.Array]:
        """Returns the policy's outputs `[..., num_outputs]` and the values `[...]`."""
        return self.network.apply(params, obs._replace(vector=stats.normalize(obs.vector)))

    def begin(self, handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> tuple[State, Playing]:
        """Returns the initial states, given the `handle` and `timestep` of a reset."""
        obs = self.encode(timestep.obs, timestep.info)
        params = self.network.init(jax.random.key(self.config.seed), obs)
        stats = RunningMeanStd.create(obs.vector[0], count=0), RunningMeanStd.create(0.0, count=0)
        state = State(jnp.int32(0), params, self.optimizer.init(params), *stats, Episodes.create())
        return state, Playing(handle, obs, jnp.zeros(self.config.num_envs))

    def collect(self, state: State, playing: Playing, key: jax.Array) -> tuple[Playing, Episodes, Steps]:
        """Plays `num_steps` steps in every env."""
        act = partial(self.apply, state.params, state.obs_stats)

        def play(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
            (handle, obs, discounted), episodes = carry
            outputs, value = act(obs)
            action = self.policy.sample(outputs, key)
            log_prob, _ = self.policy.evaluate(outputs, action)
            handle, timestep = jaxvec.step(handle, self.policy.to_env(action))
            _, reward, terminated, truncated, info = timestep
            # At the end of an episode, timestep.obs is already the first one of the next episode. The value
            # of its own last observation is needed only if it was truncated, which is rare.
            final = self.encode(info["final_obs"], info)
            last = jax.lax.cond(truncated.any(), lambda: act(final)[1], lambda: jnp.zeros_like(value))
            done, discounted = terminated | truncated, self.config.gamma * discounted + reward
            steps = Steps(obs, action, log_prob, value, last, reward, terminated, done, discounted)
            playing = Playing(handle, self.encode(timestep.obs, info), jnp.where(done, 0, discounted))
            return (playing, episodes.add(timestep)), steps

        keys = jax.random.split(key, self.config.num_steps)
        (playing, episodes), steps = jax.lax.scan(play, (playing, state.episodes), keys)
        following = jnp.concatenate([steps.value[1:], act(playing.obs)[1][None]])
        steps = steps._replace(next_value=jnp.where(steps.done, steps.next_value, following))
        return playing, episodes, steps

    def loss(self, params: Any, stats: RunningMeanStd, steps: Steps, advantage: Any, target: Any) -> Any:
        """Returns PPO's loss of a minibatch, `[]` float32, and its parts."""
        outputs, value = self.apply(params, stats, steps.obs)
        log_prob, entropy = self.policy.evaluate(outputs, steps.action)
        log_ratio, clip = log_prob - steps.log_prob, self.config.clip
        ratio = jnp.exp(log_ratio)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()
        error, entropy = 0.5 * jnp.square(value - target).mean(), entropy.mean()
        total = self.config.value_weight * error - gain - self.config.entropy_weight * entropy
        metrics = {"policy_loss": -gain, "value_loss": error, "entropy": entropy}
        return total, metrics | {"kl": jnp.mean(ratio - 1 - log_ratio)}

    def update(self, state: State, playing: Playing) -> tuple[State, Playing, dict[str, jax.Array]]:
        """Collects steps and learns from them, once. Also returns metrics, `[]` float32."""
        config, stats = self.config, state.obs_stats
        # The key depends only on the number of the update, so a resumed run equals an uninterrupted one.
        play_key, learn_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.number))
        playing, episodes, steps = self.collect(state, playing, play_key)
        return_stats = state.return_stats.update(steps.discounted)
        reward = return_stats.scale(steps.reward) if config.scale_by_return else steps.reward
        steps = steps._replace(reward=reward)
        advantage = advantages(config, steps)
        target = advantage + steps.value
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (steps, scaled, target))

        def descend(carry: tuple[Any, Any], chosen: jax.Array) -> tuple[tuple[Any, Any], Any]:
            params, opt_state = carry
            minibatch = jax.tree.map(partial(jnp.take, indices=chosen, axis=0), rows)
            gradient, metrics = jax.grad(self.loss, has_aux=True)(params, stats, *minibatch)
            change, opt_state = self.optimizer.update(gradient, opt_state, params)
            return (optax.apply_updates(params, change), opt_state), metrics

        order = jnp.argsort(jax.random.uniform(learn_key, (config.num_epochs, config.steps_per_update)))
        chosen = order.reshape(config.num_epochs * config.num_minibatches, -1)  # [gradient steps, minibatch]
        (params, opt_state), metrics = jax.lax.scan(descend, (state.params, state.opt_state), chosen)
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["explained_variance"] = 1 - jnp.var(advantage) / (jnp.var(target) + 1e-8)
        stats = stats.update(steps.obs.vector)
        state = State(state.number + 1, params, opt_state, stats, return_stats, episodes)
        return state, playing, metrics

    def train(self, run: Run, state: State, playing: Playing, until: jax.Array) -> tuple[Any, ...]:
        """Repeats `update`, and reports. Also returns whether to stop: by a signal, or with `stop_at`."""
        goal = jnp.inf if self.config.stop_at is None else self.config.stop_at

        def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            state, playing, metrics = self.update(*carry[:2])
            means = state.episodes.means()
            run.log(state.number * self.config.steps_per_update, **means, **metrics)
            return state, playing, run.stopping() | (means["episode_return"] >= goal)

        carry = state, playing, jnp.bool_(False)
        return jax.lax.while_loop(lambda carry: (carry[0].number < until) & ~carry[2], body, carry)

    def evaluate(self, params: Any, stats: RunningMeanStd, handle: Any, timestep: Any) -> jax.Array:
        """Plays an episode in each env with the most probable actions. Returns the mean return."""

        def unfinished(carry: Any) -> jax.Array:
            _, timestep, number = carry
            return ~(timestep.terminated | timestep.truncated).all() & (number < self.config.eval_steps)

        def body(carry: Any) -> Any:
            handle, timestep, number = carry
            outputs, _ = self.apply(params, stats, self.encode(timestep.obs, timestep.info))
            return *jaxvec.step(handle, self.policy.to_env(self.policy.sample(outputs, None))), number + 1

        _, timestep, _ = jax.lax.while_loop(unfinished, body, (handle, timestep, 0))
        return timestep.info["episode_return"].mean()


def make_envs(config: Config, num_envs: int, videos: Path | None = None, **options: Any) -> jaxvec.VectorEnv:
    """Makes the envs. With a folder for `videos`, it films the first ones."""
    options |= {"num_workers": config.num_workers, "states": num_envs}
    options |= {"info": ["action_mask"]} if config.mask_info else {}
    if videos is None or not config.video:
        return jaxvec.make(config.env, num_envs, **options)
    name = config.env.rpartition(":")[2]
    spec, num_films, path = gymnasium.registry.get(name, name), config.video, str(videos.absolute())

    def film(index: int) -> gymnasium.Env[Any, Any]:  # a worker calls this, and must not import JAX
        env = gymnasium.make(spec, render_mode="rgb_array")
        options: Any = {"name_prefix": f"env_{index}", "disable_logger": True}
        return gymnasium.wrappers.RecordVideo(env, path, **options) if index < num_films else env

    return jaxvec.make(film, num_envs, **options)


def train(config: Config, run: Run) -> None:
    """Trains, or continues a run, and writes its folder."""
    make, videos = partial(make_envs, config), run.folder / "videos"
    once: Any = {"autoreset_mode": "EPISODIC"}  # each env plays one episode
    with make(config.num_envs, videos) as envs, make(config.eval_envs, **once) as eval_envs:
        agent = Agent(config, envs)
        state, playing = jax.jit(agent.begin)(*jaxvec.reset(envs, seed=config.seed))
        state, playing = run.load(state, playing, envs)
        program, evaluate, stop = jax.jit(partial(agent.train, run)), jax.jit(agent.evaluate), False
        with run.signals():
            run.show("compiling")
            while state.number < config.num_updates and not stop:
                until = jnp.minimum(state.number + config.save_every, config.num_updates)
                state, playing, stop = jax.block_until_ready(program(state, playing, until))
                run.save(state, playing, envs)
                learned = {"params": state.params, "stats": vars(state.obs_stats)}
                run.write("params.msgpack", serialization.to_bytes(learned))
                start = jaxvec.reset(eval_envs, seed=config.seed + 10_000)
                score = evaluate(state.params, state.obs_stats, *start)
                run.log(state.number * config.steps_per_update, evaluation=score)


def main(argv: Sequence[str] | None = None, kind: type[Config] = Config, program: str = "ppo") -> Run:
    with training(kind, argv, program=program, about="Train PPO on a Gymnasium env.") as (config, run):
        train(config, run)
    return run


if __name__ == "__main__":
    main()
