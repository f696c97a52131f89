r"""Gumbel MuZero search that plans with the envs themselves: no learned model, one `jax.jit`. One file.

    python examples/search.py
    python examples/search.py --env FrozenLake-v1 --env-options '{"is_slippery": false}' \
        --num-simulations 128

The tree search is mctx's. Its model is `jaxvec.simulate`, which steps copies of the envs from the states in
the tree. The prior policy is uniform, and the value of a state is the return of a few random steps. So any
result better than chance comes from the search. Each run has a folder in `runs`.

The state of an env includes its random generator, so the search foresees random events. That makes no
difference for envs that are deterministic after their reset, such as CartPole and this lake.

Mean returns of 8 episodes, printed by these commands with different numbers of simulations per step:

| env | simulations | policy alone | with search |
| --- | --- | --- | --- |
| CartPole-v1 | 16 | 18.9 | 108.3 |
| FrozenLake-v1, not slippery | 32 | 0 | 0.63 |
| FrozenLake-v1, not slippery | 64 | 0 | 0.63 |
| FrozenLake-v1, not slippery | 128 | 0 | 1 |
"""

# mctx's records are chex dataclasses; pyright does not see their fields.
# pyright: reportCallIssue=false

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

import jaxvec
from jaxvec import EnvState, Handle, TimeStep
from jaxvec.logging import Run, option, training

try:
    import mctx
except ImportError as _error:
    raise ImportError('this example needs mctx: pip install "mctx>=0.0.71"') from _error


@dataclass(frozen=True)
class Config:
    env: str = option("CartPole-v1", "Gymnasium id of an env with Discrete actions")
    env_options: str = option("{}", "JSON object with further arguments of gymnasium.make")
    num_envs: int = option(8, "number of envs, each for one episode")
    num_workers: int | None = option(
        None, "number of worker processes; by default, one for each usable core", int
    )
    num_simulations: int = option(16, "nodes that a search adds to its tree before each env step")
    rollout_steps: int = option(10, "random steps that estimate the value of a node; 0 disables rollouts")
    gamma: float = option(0.99, "discount per step in the search")
    seed: int = option(0, "random seed")
    name: str | None = option(None, "name of the folder in runs; by default program, env, seed and time", str)

    def __post_init__(self) -> None:
        if min(self.num_envs, self.num_simulations) < 1 or self.rollout_steps < 0:
            raise ValueError(
                "the numbers of envs and simulations must be at least 1, of rollout steps at least 0"
            )
        if not isinstance(self.make_options, dict):
            raise ValueError('--env-options must be a JSON object, such as {"is_slippery": false}')

    @property
    def make_options(self) -> Any:
        """Further arguments of `gymnasium.make`."""
        try:
            return json.loads(self.env_options)
        except json.JSONDecodeError as error:
            raise ValueError(f"--env-options is not JSON: {error}") from error

    @property
    def num_states(self) -> int:
        """Number of states of a search: the nodes, including the root, and their rollouts."""
        return self.num_envs * (1 + self.num_simulations) * (1 + self.rollout_steps)


@dataclass(frozen=True)
class Planner:
    """Chooses actions, numbered from 0, for envs with Discrete actions."""

    config: Config
    envs: jaxvec.VectorEnv
    num_actions: int
    start: int  # the start of the action space

    def prior(self, num_envs: int) -> jax.Array:
        """Returns the logits of the uniform policy, `[num_envs, num_actions]` float32."""
        return jnp.zeros((num_envs, self.num_actions))

    def guess(self, handle: Handle, key: jax.Array) -> tuple[Handle, jax.Array]:
        """Samples actions of the policy, without search, `[num_envs]` int32."""
        return handle, jax.random.categorical(key, self.prior(handle.num_envs))

    def search(self, handle: Handle, key: jax.Array) -> tuple[Handle, jax.Array]:
        """Returns the best actions that a search from the envs' states found, `[num_envs]` int32."""
        root_key, search_key = jax.random.split(key)
        handle, state = jaxvec.save(handle)
        root = mctx.RootFnOutput(
            prior_logits=self.prior(handle.num_envs),
            value=self.value(state, root_key),
            embedding=state,
        )
        found = mctx.gumbel_muzero_policy(
            params=(),
            rng_key=search_key,
            root=root,
            recurrent_fn=self.expand,
            num_simulations=self.config.num_simulations,
        )
        return handle, jnp.asarray(found.action)

    def expand(self, _: Any, key: jax.Array, action: Any, state: Any) -> tuple[mctx.RecurrentFnOutput, Any]:
        """Expands one node per tree by a step of copies of the envs: mctx's `recurrent_fn`.

        `action` is `[num_envs]` int32, and `state` the `EnvState` of the nodes.
        """
        state, timestep = self.simulate(state, action)
        output = mctx.RecurrentFnOutput(
            reward=timestep.reward,
            discount=self.discount(timestep),
            prior_logits=self.prior(len(action)),
            value=self.value(state, key),
        )
        return output, state

    def value(self, state: EnvState, key: jax.Array) -> jax.Array:
        """Returns the discounted return of a few steps of the policy, `[num_envs]` float32."""

        def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
            state, value, discount = carry
            action = jax.random.categorical(key, self.prior(len(value)))
            state, timestep = self.simulate(state, action)
            return (state, value + discount * timestep.reward, discount * self.discount(timestep)), None

        zeros = jnp.zeros(state.ids.shape[0])
        keys = jax.random.split(key, self.config.rollout_steps)
        (_, value, _), _ = jax.lax.scan(step, (state, zeros, zeros + 1), keys)
        return value

    def simulate(self, state: EnvState, action: jax.Array) -> tuple[EnvState, TimeStep]:
        """Steps copies of envs. Finished ones do not change, and return reward 0."""
        return jaxvec.simulate(self.envs, state, action + self.start)

    def discount(self, timestep: TimeStep) -> jax.Array:
        """Returns the discount after a step, `[num_envs]` float32: 0 at the end of an episode."""
        return jnp.where(timestep.terminated | timestep.truncated, 0.0, self.config.gamma)


def play(
    choose: Callable[[Handle, jax.Array], tuple[Handle, jax.Array]],
    start: int,
    handle: Handle,
    timestep: TimeStep,
    key: jax.Array,
) -> TimeStep:
    """Plays one episode in each env, and returns the last results.

    `choose` takes a handle and a key, and returns a handle and actions from 0, `[num_envs]` int32.
    """

    def unfinished(carry: tuple[Handle, TimeStep, jax.Array]) -> jax.Array:
        return ~(carry[1].terminated | carry[1].truncated).all()

    def body(carry: tuple[Handle, TimeStep, jax.Array]) -> tuple[Handle, TimeStep, jax.Array]:
        handle, _, key = carry
        key, choose_key = jax.random.split(key)
        handle, action = choose(handle, choose_key)
        handle, timestep = jaxvec.step(handle, action + start)
        return handle, timestep, key

    return jax.lax.while_loop(unfinished, body, (handle, timestep, key))[1]


class Result(NamedTuple):
    """Result of a run."""

    alone: NDArray[np.float32]  # [num_envs], episode returns of the policy alone
    searched: NDArray[np.float32]  # [num_envs], episode returns with search


def compare(config: Config, run: Run) -> Result:
    """Makes the envs, and plays one episode in each without and one with search, from equal seeds."""
    with jaxvec.make(
        config.env,
        config.num_envs,
        num_workers=config.num_workers,
        autoreset_mode="EPISODIC",  # finished envs stay idle, also in the tree
        states=config.num_states,
        **config.make_options,
    ) as envs:
        space = envs.single_action_space
        if not isinstance(space, spaces.Discrete):
            raise SystemExit(f"{config.env}: this search takes Discrete actions, not {space}")
        planner = Planner(config, envs, int(space.n), int(space.start))

        def returns(choose: Any) -> tuple[NDArray[np.float32], int]:
            handle, timestep = jaxvec.reset(envs, seed=config.seed)
            program = jax.jit(partial(play, choose, planner.start))
            timestep = program(handle, timestep, jax.random.key(config.seed))
            return np.asarray(timestep.info["episode_return"]), int(timestep.info["episode_length"].sum())

        alone, _ = returns(planner.guess)
        searched, env_steps = returns(planner.search)  # without the steps of copies
        run.log(env_steps, episode_return=searched.mean(), policy_return=alone.mean())
        return Result(alone, searched)


def main(argv: Sequence[str] | None = None) -> Result:
    about = "Plan with copies of Gymnasium envs: Gumbel MuZero search inside jax.jit."
    with training(Config, argv, program="search", about=about) as (config, run):
        result = compare(config, run)
    for name, returns in ("with the policy alone", result.alone), ("with search", result.searched):
        spread = f"from {returns.min():.6g} to {returns.max():.6g}"
        print(f"mean return {returns.mean():.6g} {name}, {spread}, of {config.num_envs} episodes")
    return result


if __name__ == "__main__":
    main()
