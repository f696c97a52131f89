"""PPO on Atari games in one `jax.jit`: half of the envs step while the network acts for the other half.

    python -m jaxvec.examples.ppo_atari
    python -m jaxvec.examples.ppo_atari --env ALE/Breakout-v5 --sticky 0
    python -m jaxvec.examples.ppo_atari --resume runs/NAME

The file is complete. Workers return single frames and lives, by Gymnasium's `AtariPreprocessing`. The program
stacks four frames and clips rewards to their sign. A lost life is the end of an episode for learning, while
the game continues. The reported returns are unclipped scores of whole games. Older results are without sticky
actions, as with `--sticky 0`. Each run has a folder in `runs`. Ctrl-C saves, and ends the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from gymnasium.wrappers import AtariPreprocessing

import jaxvec
from jaxvec.logging import Episodes, Options, Policy, TrainingRun, training


@dataclass(frozen=True)
class Config(Options):
    """Trains PPO on an Atari game."""

    env: str = "ALE/Pong-v5"  # id of an ALE game
    num_envs: int = 16  # number of envs, in two alternating halves
    total_steps: int = 1_000_000  # env steps of four frames each, rounded up to whole updates
    num_epochs: int = 2  # passes over the steps of an update
    num_minibatches: int = 4  # gradient steps per pass
    lr: float = 5e-4  # learning rate, falling linearly to 0
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # decay of the advantage estimate per step
    clip: float = 0.1  # PPO clip range
    entropy_weight: float = 0.01  # weight of the entropy bonus
    value_weight: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # maximum norm of the gradient
    sticky: float = 0.25  # probability that a frame repeats the last action

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_envs % 2:
            raise ValueError("--num-envs must be even, because the envs are split into two halves")
        if min(self.num_epochs, self.num_minibatches) < 1 or self.steps_per_update % self.num_minibatches:
            raise ValueError("--num-envs times --num-steps must be a multiple of --num-minibatches")

    def env_fn(self) -> Any:
        """Returns a function that makes the game."""
        gymnasium.spec(self.env)  # raises an error if there is no such game
        env_id, sticky = self.env, self.sticky  # without `self`, as workers would then import JAX

        def game(**options: Any) -> gymnasium.Env[Any, Any]:
            import ale_py  # pyright: ignore[reportMissingImports]

            gymnasium.register_envs(ale_py)
            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner of each worker
            options |= {"frameskip": 1, "repeat_action_probability": sticky}
            return AtariPreprocessing(gymnasium.make(env_id, **options))

        return game


def patches(images: jax.Array, size: int, stride: int) -> jax.Array:
    """Extracts the inputs of a convolution: `[n, height, width, c]` to `[n, rows, columns, ...]`.

    A `Dense` layer on patches is a convolution. On two cores, the gradient of `nn.Conv` took twenty times as
    long inside a loop (jaxlib 0.10.2). `size` and the sides of the images must be multiples of `stride`.
    """
    n, height, width, c = images.shape
    rows, columns = height // stride, width // stride
    blocks = images.reshape(n, rows, stride, columns, stride, c).swapaxes(2, 3)
    blocks = blocks.reshape(n, rows, columns, stride * stride * c)
    reach = size // stride  # in blocks
    rows, columns = rows - reach + 1, columns - reach + 1
    shifted = [blocks[:, y : y + rows, x : x + columns] for y in range(reach) for x in range(reach)]
    return jnp.concatenate(shifted, axis=-1)


class NatureNetwork(nn.Module):
    """Three convolutions and a dense layer, as in the DQN paper in Nature, then policy and value."""

    num_actions: int

    @nn.compact
    def __call__(self, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[n, 84, 84, 4]` uint8 to logits `[n, num_actions]` and values `[n]`."""

        def dense(inputs: jax.Array, size: int, scale: float = 2**0.5) -> jax.Array:
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))(inputs)

        hidden = frames.astype(jnp.float32) / 255
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            hidden = nn.relu(dense(patches(hidden, size, stride), features))
        hidden = nn.relu(dense(hidden.reshape(len(hidden), -1), 512))
        return dense(hidden, self.num_actions, 0.01), dense(hidden, 1, 1.0)[..., 0]


def push(frames: jax.Array, newest: jax.Array) -> jax.Array:
    """Replaces the oldest of the frames, `[n, 84, 84, 4]`, by the newest, `[n, 84, 84]`."""
    return jnp.concatenate([frames[..., 1:], newest[..., None]], axis=-1)


def repeated(first: jax.Array) -> jax.Array:
    """Returns the frames at the start of a game: `[n, 84, 84]` repeated to `[n, 84, 84, 4]`."""
    return jnp.repeat(first[..., None], 4, axis=-1)


def evaluate(logits: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of the action and the entropy, `[...]` in nats."""
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
    return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


class Seen(NamedTuple):
    """Half of the envs, ready for their next actions."""

    env_id: jax.Array  # [half] int32
    frames: jax.Array  # [half, 84, 84, 4] uint8, inputs of the network
    lives: jax.Array  # [half] int32


class Decision(NamedTuple):
    """Actions for half of the envs, with their inputs. The results arrive later."""

    frames: jax.Array  # [half, 84, 84, 4] uint8
    lives: jax.Array  # [half] int32
    action: jax.Array  # [half] int32, from 0
    log_prob: jax.Array  # [half] float32
    value: jax.Array  # [half] float32


class Steps(NamedTuple):
    """Decisions with their results. `collect` stacks them to `[num_steps, num_envs, ...]`."""

    decision: Decision
    next_value: jax.Array  # [half] float32, in the same game
    reward: jax.Array  # [half] float32, clipped
    terminated: jax.Array  # [half] bool, also if a life was lost
    done: jax.Array  # [half] bool, also if a life was lost
    game_over: jax.Array  # [half] bool


class State(NamedTuple):
    """State of training between two updates."""

    number: jax.Array  # [] int32, updates so far
    params: Any
    opt_state: Any
    episodes: Episodes


class Playing(NamedTuple):
    """State of the running games between two updates. No env is pending, so their states can be saved."""

    handle: jaxvec.Handle
    halves: tuple[Seen, Seen]  # the one that acts next is first


def advantages(config: Config, steps: Steps) -> jax.Array:
    """Returns generalised advantages, `[num_steps, num_envs]` float32."""
    # Bootstrap unless the episode terminated: a truncated game could have continued.
    future = config.gamma * jnp.where(steps.terminated, 0, steps.next_value)
    surprise = steps.reward + future - steps.decision.value

    def add(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = now[0] + jnp.where(now[1], 0, config.gamma * config.gae_lambda * later)
        return advantage, advantage

    return jax.lax.scan(add, jnp.zeros_like(surprise[0]), (surprise, steps.done), reverse=True)[1]


class Agent:
    """The parts that do not change during training, and the functions that are compiled."""

    def __init__(self, config: Config, action_space: Any) -> None:
        self.config: Config = config
        self.network: Any = NatureNetwork(int(action_space.n))  # Any: flax annotates no type of `apply`
        num_steps = config.num_updates * config.num_epochs * config.num_minibatches
        adam = optax.adam(optax.linear_schedule(config.lr, 0, num_steps))
        clipped = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)
        # All parameters in one vector: there are fewer operations to compile and run.
        self.optimizer: optax.GradientTransformation = optax.flatten(clipped)

    def begin(self, handle: jaxvec.Handle, timestep: jaxvec.TimeStep) -> tuple[State, Playing]:
        """Returns the initial states, given the `handle` and `timestep` of a reset."""

        def seen(timestep: jaxvec.TimeStep) -> Seen:
            return Seen(timestep.info["env_id"], repeated(timestep.obs), timestep.info["lives"])

        handle, other = jaxvec.recv(handle)
        halves = seen(timestep), seen(other)
        params = self.network.init(jax.random.key(self.config.seed), halves[0].frames)
        state = State(jnp.int32(0), params, self.optimizer.init(params), Episodes.create())
        return state, Playing(handle, halves)

    def send(self, params: Any, handle: jaxvec.Handle, seen: Seen, key: jax.Array) -> tuple[Any, Decision]:
        """Sends actions to half of the envs."""
        logits, value = self.network.apply(params, seen.frames)
        action = jax.random.categorical(key, logits)
        handle = jaxvec.send(handle, action, seen.env_id)
        return handle, Decision(seen.frames, seen.lives, action, evaluate(logits, action)[0], value)

    def receive(self, params: Any, handle: jaxvec.Handle, decision: Decision, episodes: Episodes) -> Any:
        """Waits for the results of a decision. Returns the handle, what is seen, episodes and the step."""
        handle, timestep = jaxvec.recv(handle)
        _, reward, terminated, truncated, info = timestep
        game_over = timestep.done
        # At the end of a game, frame and lives are already those of the next game.
        frames = push(decision.frames, timestep.obs)
        frames = jnp.where(game_over[:, None, None, None], repeated(timestep.obs), frames)
        # Only a truncated game, which is rare, needs the value of its last frame.
        final = lambda: self.network.apply(params, push(decision.frames, timestep.last_obs))[1]  # noqa: E731
        last = jax.lax.cond(truncated.any(), final, lambda: jnp.zeros_like(decision.value))
        lost = timestep.last_info["lives"] < decision.lives
        step = Steps(decision, last, jnp.sign(reward), terminated | lost, game_over | lost, game_over)
        return handle, Seen(info["env_id"], frames, info["lives"]), episodes.add(timestep), step

    def collect(self, state: State, playing: Playing, key: jax.Array) -> tuple[Playing, Episodes, Steps]:
        """Plays `num_steps` steps in every env."""
        params, num_steps = state.params, self.config.num_steps
        keys = jax.random.split(key, 2 * num_steps)
        handle, first = self.send(params, playing.handle, playing.halves[0], keys[0])
        handle, second = self.send(params, handle, playing.halves[1], keys[1])

        def play(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
            handle, (answered, other), episodes = carry
            handle, seen, episodes, step = self.receive(params, handle, answered, episodes)
            handle, decision = self.send(params, handle, seen, key)
            return (handle, (other, decision), episodes), step

        carry = handle, (first, second), state.episodes
        (handle, (first, second), episodes), steps = jax.lax.scan(play, carry, keys[2:])
        handle, now, episodes, step = self.receive(params, handle, first, episodes)
        handle, later, episodes, last_step = self.receive(params, handle, second, episodes)
        # The halves alternate, so two consecutive entries are one step of all envs.
        join = lambda *leaves: jnp.concatenate([leaves[0], jnp.stack(leaves[1:])])  # noqa: E731
        steps = jax.tree.map(join, steps, step, last_step)
        steps = jax.tree.map(lambda leaf: leaf.reshape(num_steps, -1, *leaf.shape[2:]), steps)
        values = [self.network.apply(params, seen.frames)[1] for seen in (now, later)]
        following = jnp.concatenate([steps.decision.value[1:], jnp.concatenate(values)[None]])
        steps = steps._replace(next_value=jnp.where(steps.game_over, steps.next_value, following))
        return Playing(handle, (now, later)), episodes, steps

    def loss(self, params: Any, decision: Decision, advantage: Any, target: Any) -> Any:
        """Returns PPO's loss of a minibatch, `[]` float32, and its parts."""
        logits, value = self.network.apply(params, decision.frames)
        log_prob, entropy = evaluate(logits, decision.action)
        log_ratio, clip = log_prob - decision.log_prob, self.config.clip
        ratio = jnp.exp(log_ratio)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()
        error, entropy = 0.5 * jnp.square(value - target).mean(), entropy.mean()
        total = self.config.value_weight * error - gain - self.config.entropy_weight * entropy
        metrics = {"policy_loss": -gain, "value_loss": error, "entropy": entropy}
        return total, metrics | {"kl": jnp.mean(ratio - 1 - log_ratio)}

    def update(self, state: State, playing: Playing) -> tuple[State, Playing, dict[str, jax.Array]]:
        """Collects steps and learns from them, once. Also returns metrics, `[]` float32."""
        config = self.config
        # The key depends only on the number of the update, so a resumed run equals an uninterrupted one.
        play_key, learn_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.number))
        playing, episodes, steps = self.collect(state, playing, play_key)
        advantage = advantages(config, steps)
        target = advantage + steps.decision.value
        batch = steps.decision, (advantage - advantage.mean()) / (advantage.std() + 1e-8), target
        batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

        def descend(carry: tuple[Any, Any], chosen: jax.Array) -> tuple[tuple[Any, Any], Any]:
            params, opt_state = carry
            minibatch = jax.tree.map(partial(jnp.take, indices=chosen, axis=0), batch)
            gradient, metrics = jax.grad(self.loss, has_aux=True)(params, *minibatch)
            change, opt_state = self.optimizer.update(gradient, opt_state, params)
            return (optax.apply_updates(params, change), opt_state), metrics

        order = jnp.argsort(jax.random.uniform(learn_key, (config.num_epochs, config.steps_per_update)))
        chosen = order.reshape(config.num_epochs * config.num_minibatches, -1)  # [gradient steps, minibatch]
        (params, opt_state), metrics = jax.lax.scan(descend, (state.params, state.opt_state), chosen)
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["explained_variance"] = 1 - jnp.var(advantage) / (jnp.var(target) + 1e-8)
        return State(state.number + 1, params, opt_state, episodes), playing, metrics | episodes.means()

    def best(self, saved: Any, frames: Any, obs: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the latest frames and the best actions, from what `main` saves for `load`."""
        frames = repeated(obs) if frames is None else push(frames, obs)
        return frames, self.network.apply(saved["params"], frames)[0].argmax(-1)


def halves(config: Config) -> dict[str, Any]:
    """Returns the options of `make` with which `recv` returns the two halves alternately."""
    return {"batch_size": config.num_envs // 2, "recv_order": "sent"}


def load(folder: str | Path) -> Policy:
    """Returns the policy of a run: a function from an observation to the best action."""
    return Policy(folder, Config, lambda config, _, space: Agent(config, space).best)


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    if missing := [name for name in ("ale_py", "cv2") if importlib.util.find_spec(name) is None]:
        packages = 'pip install "ale-py>=0.11" "opencv-python-headless>=4.8"'
        raise SystemExit(f"this example needs {', '.join(missing)}: {packages}")
    gymnasium.register_envs(importlib.import_module("ale_py"))
    with (
        training(Config, argv, program="ppo_atari") as (config, run),
        run.make(info={"lives": int}, **halves(config)) as envs,
    ):
        agent = Agent(config, envs.single_action_space)
        options: Any = {"params": lambda state: {"params": state.params}, "evaluate_at_saves": False}
        run.train(envs, agent.begin, agent.update, act=agent.best, **options)
    return run


if __name__ == "__main__":
    main()
