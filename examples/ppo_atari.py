"""PPO on Atari games in one `jax.jit`: half of the envs step while the network acts for the other half.

    python examples/ppo_atari.py
    python examples/ppo_atari.py --env ALE/Breakout-v5 --sticky 0

Workers return single frames, scores and lives, preprocessed by Gymnasium's `AtariPreprocessing`. The
program stacks four frames and clips rewards to their sign. It treats a lost life as the end of an episode
for learning, while the game continues. The reported returns are unclipped scores of whole games.

As in every `ALE/...-v5`, the emulator repeats the last action with probability 0.25 in each frame. To compare
with older results, disable these sticky actions with `--sticky 0`. The shared parts of PPO are imported from
`shared_ppo.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import shared_ppo
import shared_training
from flax import linen as nn
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing
from shared_ppo import Agent, Batch, Categorical
from shared_training import Report, Result, Returns, Trained, finish, need, option, parse, repeat

import jaxvec

_NUM_FRAMES = 4


@dataclass(frozen=True)
class Config(shared_ppo.Config):
    env: str = option("ALE/Pong-v5", "id of an ALE game")
    num_envs: int = option(16, "number of envs, in two alternating halves")
    total_steps: int = option(1_000_000, "env steps of four frames each, rounded up to whole updates")
    num_epochs: int = option(2, "passes over the steps of an update")
    num_minibatches: int = option(4, "gradient steps per pass")
    lr: float = option(5e-4, "learning rate, falling linearly to 0")
    clip: float = option(0.1, "PPO clip range")
    entropy_weight: float = option(0.01, "weight of the entropy bonus")
    sticky: float = option(0.25, "probability that a frame repeats the last action")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_envs % 2:
            raise ValueError("--num-envs must be even, because the envs are split into two halves")


def patches(images: jax.Array, size: int, stride: int) -> jax.Array:
    """Extracts the inputs of a convolution: `[n, height, width, c]` to `[n, rows, columns, ...]`.

    A `Dense` layer on patches is a convolution. `nn.Conv` is better on a GPU, but on two cores its gradient
    took twenty times as long inside a loop (jaxlib 0.10.2). `size` and the sides of the images must be
    multiples of `stride`.
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
    return jnp.repeat(first[..., None], _NUM_FRAMES, axis=-1)


class Decision(NamedTuple):
    """Actions for half of the envs, `[half, ...]`, with their inputs. The results arrive later."""

    frames: jax.Array  # [half, 84, 84, 4] uint8, input of the network
    lives: jax.Array  # [half] int32
    action: jax.Array  # [half] int32
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
    score: jax.Array  # [half] float32, score of the game so far


class State(NamedTuple):
    """State of training between two updates."""

    params: Any
    opt_state: Any
    handle: jaxvec.Handle
    timestep: jaxvec.TimeStep  # results of the half that acts next
    # The decision that led to `timestep`, and the one that the other half executes now.
    waiting: tuple[Decision, Decision]
    returns: Returns


def decide(
    agent: Agent,
    params: Any,
    handle: jaxvec.Handle,
    timestep: jaxvec.TimeStep,
    frames: jax.Array,
    key: jax.Array,
) -> tuple[jaxvec.Handle, jaxvec.TimeStep, Decision]:
    """Sends actions to half of the envs, and returns the time step of the other half."""
    logits, value = agent.network.apply(params, frames)
    action = agent.policy.sample(logits, key)
    log_prob, _ = agent.policy.evaluate(logits, action)
    decision = Decision(frames, timestep.info["lives"], action, log_prob, value)
    handle = jaxvec.send(handle, agent.policy.to_env(action), timestep.info["env_id"])
    return *jaxvec.recv(handle), decision


def collect(agent: Agent, state: State, key: jax.Array) -> tuple[State, Steps]:

    def play(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
        handle, timestep, (answered, other) = carry
        _, reward, terminated, truncated, info = timestep
        game_over = terminated | truncated
        # At the end of a game, frame and lives are already those of the next game.
        frames = push(answered.frames, timestep.obs)
        frames = jnp.where(game_over[:, None, None, None], repeated(timestep.obs), frames)
        handle, after, decision = decide(agent, state.params, handle, timestep, frames, key)

        def within() -> jax.Array:
            _, value = agent.network.apply(state.params, push(answered.frames, info["final_obs"]))
            return jnp.where(game_over, value, decision.value)

        # Only a truncated game, which is rare, needs the value of its last frame.
        next_value = jax.lax.cond(truncated.any(), within, lambda: decision.value)
        lost = jnp.where(game_over, info["final_info"]["lives"], info["lives"]) < answered.lives
        ends = terminated | lost, game_over | lost, game_over
        steps = Steps(answered, next_value, jnp.sign(reward), *ends, info["episode_return"])
        return (handle, after, (other, decision)), steps

    carry = state.handle, state.timestep, state.waiting
    carry, steps = jax.lax.scan(play, carry, jax.random.split(key, 2 * agent.config.num_steps))
    # The halves alternate, so two consecutive entries are one step of all envs.
    shape = agent.config.num_steps, agent.config.num_envs
    steps: Steps = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[2:]), steps)
    handle, timestep, waiting = carry
    return state._replace(handle=handle, timestep=timestep, waiting=waiting), steps


def update(agent: Agent, state: State, key: jax.Array) -> State:
    """Collects steps and learns from them, once."""
    play_key, learn_key = jax.random.split(key)
    state, steps = collect(agent, state, play_key)
    frames, _, action, log_prob, value = steps.decision
    ends = steps.terminated, steps.done
    advantage = shared_ppo.advantages(
        agent.config, steps.reward, *ends, value=value, next_value=steps.next_value
    )
    batch = Batch(frames, action, log_prob, advantage, advantage + value)
    params, opt_state = shared_ppo.descend(agent, state.params, state.opt_state, batch, learn_key)
    returns = state.returns.add(steps.game_over, steps.score)
    return state._replace(params=params, opt_state=opt_state, returns=returns)


def begin(agent: Agent, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array) -> State:
    """Returns the state after a reset and one action of each half."""
    init_key, *keys = jax.random.split(key, 3)
    params = agent.network.init(init_key, repeated(timestep.obs))
    waiting: list[Decision] = []
    for key in keys:
        first = repeated(timestep.obs)
        handle, timestep, decision = decide(agent, params, handle, timestep, first, key)
        waiting.append(decision)
    opt_state = agent.optimizer.init(params)
    return State(params, opt_state, handle, timestep, (waiting[0], waiting[1]), Returns.create())


def train(
    agent: Agent, report: Report, handle: jaxvec.Handle, timestep: jaxvec.TimeStep, key: jax.Array
) -> Trained[State]:
    """Trains, starting at the `handle` and `timestep` of a reset; see `repeat`."""
    init_key, train_key = jax.random.split(key)
    state = begin(agent, handle, timestep, init_key)
    return repeat(partial(update, agent), state, train_key, agent.config, report)


def halves(config: Config) -> dict[str, Any]:
    """Returns the options of `make` with which `recv` returns the two halves alternately."""
    return {"batch_size": config.num_envs // 2, "recv_order": "sent"}


def make_envs(config: Config) -> jaxvec.VectorEnv:
    need("atari", "ale_py", "cv2")
    env_id, sticky = (
        config.env,
        config.sticky,
    )  # the function below must not refer to `config`, as workers would then import JAX

    def game() -> gymnasium.Env[Any, Any]:
        import ale_py  # pyright: ignore[reportMissingImports]

        gymnasium.register_envs(ale_py)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner of each worker
        return AtariPreprocessing(gymnasium.make(env_id, frameskip=1, repeat_action_probability=sticky))

    workers = config.num_workers
    return jaxvec.make(game, config.num_envs, num_workers=workers, info={"lives": int}, **halves(config))


def make_agent(config: Config, envs: jaxvec.VectorEnv) -> Agent:
    actions = envs.single_action_space
    assert isinstance(actions, spaces.Discrete)
    network = NatureNetwork(int(actions.n))
    return Agent(config, Categorical(actions), network, shared_ppo.make_optimizer(config))


def run(config: Config) -> Result:
    with make_envs(config) as envs:
        return shared_training.run(config, envs, partial(train, make_agent(config, envs)))


def main(argv: Sequence[str] | None = None) -> Result:
    config = parse(Config, "ppo_atari", "Train PPO on an Atari game.", argv)
    return finish(config, "PPO", "ppo_atari", run(config))


if __name__ == "__main__":
    main()
