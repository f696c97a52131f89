"""PettingZoo's multi-agent envs as Gymnasium envs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np
from gymnasium import Space, spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from jaxvec._leaves import MaxSizes, Node, as_is, leaves, walk
from jaxvec._memory.rows import reader
from jaxvec.adapters._adapter import Adapter
from jaxvec.adapters._packages import optional_imports

with optional_imports("jaxvec.adapters.pettingzoo", "pettingzoo"):
    from pettingzoo import AECEnv, ParallelEnv
    from pettingzoo.utils.conversions import (
        aec_to_parallel,
        turn_based_aec_to_parallel,
        turn_based_aec_to_parallel_wrapper,
    )

__all__ = ["INFO", "PettingZooEnv"]

INFO = ("alive", "turn", "terminated", "truncated")
"""Masks `[num_agents]` that the adapter adds to info. Pools of `jaxvec.make(..., info=INFO)` return them."""


@final
class PettingZooEnv(Adapter):
    """A `ParallelEnv` as one `gymnasium.Env` with fixed shapes, however many agents are alive.

    Observations and actions are dicts with one key for each of `possible_agents`. Their spaces may differ.
    Rewards are one vector in that order, `[num_agents]` float64. Agents that are not alive have rewards and
    observations of zero, even if their space excludes zero. Their actions are ignored.

    info has each agent's own info under its name, and four masks `[num_agents]` bool: `terminated` and
    `truncated` for the agents' episodes that this step ended, `alive` for the agents that are left, and
    `turn` for the agents that act in the next step. These are all that are alive, or one in a turn-based
    env. The env's episode is over when no agent is alive. It is `terminated` if all agents that
    took part were, otherwise `truncated`. Read the masks of an episode's last step from
    `timestep.last_info`.

    Example:
        ```python
        from jaxvec.adapters.pettingzoo import INFO, PettingZooEnv
        from mpe2 import simple_spread_v3

        with jaxvec.make(lambda: PettingZooEnv(simple_spread_v3.parallel_env()), 2, info=INFO) as envs:
            timestep = envs.reset(seed=0)
            print(timestep.obs["agent_0"].shape, timestep.reward.shape)  # (2, 18) (2, 3)
        ```
    """

    def __init__(self, env: ParallelEnv[Any, Any, Any] | AECEnv[Any, Any, Any]) -> None:
        """Adapts an env.

        Args:
            env: A `ParallelEnv` or an `AECEnv`. If the metadata of an `AECEnv` set `is_parallelizable`, all
                agents act in each step, by PettingZoo's `aec_to_parallel`. Otherwise, as in board and card
                games, a step is one agent's turn, by `turn_based_aec_to_parallel`.

        Raises:
            TypeError: the env is neither, or has no `possible_agents`.
        """
        if isinstance(env, AECEnv):
            parallel = env.metadata.get("is_parallelizable", False)
            env = aec_to_parallel(env) if parallel else turn_based_aec_to_parallel(env)
        if not isinstance(env, ParallelEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"env must be a ParallelEnv or an AECEnv, not {type(env).__name__}")
        self.adapted: Any = env
        if self._optional("possible_agents", Iterable) is None:
            raise TypeError(
                f"{type(env).__name__} has no possible_agents, so its observations and rewards have no fixed "
                "shape; list all possible agents in a wrapper"
            )
        self._agents: tuple[Any, ...] = tuple(env.possible_agents)
        observations = {agent: env.observation_space(agent) for agent in self._agents}
        self.observation_space: Space[Any] = spaces.Dict(observations)
        actions = {agent: env.action_space(agent) for agent in self._agents}
        self.action_space: Space[Any] = spaces.Dict(actions)
        self.reward_space: Space[Any] = spaces.Box(-np.inf, np.inf, (len(self._agents),), np.float64)
        self.metadata: dict[str, Any] = dict(self._optional("metadata", Mapping) or {})
        self.render_mode: str | None = self._optional("render_mode", str)
        self._nodes: dict[Any, Node] = {}  # observation spaces by agent, to build zeros
        # For each agent that took part in this episode: whether it was terminated. False while it is alive.
        self._terminated: dict[Any, bool] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Starts an episode. Returns observations by agent, and infos by agent with the masks."""
        super().reset(seed=seed)
        observations, infos = self.adapted.reset(seed=seed, options=options)
        alive = set(self.adapted.agents)
        self._terminated = dict.fromkeys(alive, False)
        return self._observe(observations, alive, alive), self._info(infos, alive, (), ())

    def step(self, action: Any) -> tuple[dict[Any, Any], NDArray[np.float64], bool, bool, dict[Any, Any]]:
        """Steps the agents that are alive.

        Args:
            action: A dict of actions by agent. Actions of agents that are not alive are ignored.

        Returns:
            `(obs, reward, terminated, truncated, info)`, with `[num_agents]` float64 rewards.

        Raises:
            ResetNeeded: no agent is alive.
        """
        # Some envs set `agents` only in `reset`.
        acting = set(self._optional("agents", Iterable) or ())
        if not acting:
            raise ResetNeeded("step: no agent is left, or reset was never called; call reset first")
        observations, rewards, terminations, truncations, infos = self.adapted.step(
            {agent: action[agent] for agent in self.adapted.agents}
        )
        terminated, truncated = (
            {agent for agent in acting if flags.get(agent)} for flags in (terminations, truncations)
        )
        alive = set(self.adapted.agents) - terminated - truncated
        self._terminated |= {agent: agent in terminated for agent in acting | alive}
        over = not alive
        all_terminated = all(self._terminated.values())
        reward = [rewards.get(agent, 0) if agent in acting else 0 for agent in self._agents]
        return (
            self._observe(observations, acting, alive),
            np.array(reward, np.float64),
            over and all_terminated,
            over and not all_terminated,
            self._info(infos, alive, terminated, truncated),
        )

    def render(self) -> Any:
        return self.adapted.render()

    def _observe(self, observations: dict[Any, Any], acting: set[Any], alive: set[Any]) -> dict[Any, Any]:
        """Returns one observation per agent: the env's, or zeros.

        Agents that are not alive get zeros, unless this step ended their episode and the env observed them.
        """
        gone = {agent for agent in acting - alive if agent in observations}
        seen = {agent: observations[agent] for agent in alive | gone}
        return {agent: seen[agent] if agent in seen else self._zeros(agent) for agent in self._agents}

    def _info(
        self, infos: dict[Any, Any], alive: Iterable[Any], terminated: Iterable[Any], truncated: Iterable[Any]
    ) -> dict[Any, Any]:
        turn = alive
        if alive and isinstance(self.adapted, turn_based_aec_to_parallel_wrapper):
            turn = {self.adapted.aec_env.agent_selection}
        masks = zip(INFO, (alive, turn, terminated, truncated), strict=True)
        return infos | {name: np.array([agent in which for agent in self._agents]) for name, which in masks}

    def _zeros(self, agent: Any) -> Any:
        if agent not in self._nodes:
            space = self.adapted.observation_space(agent)
            sizes = MaxSizes({}, default=1)
            self._nodes[agent] = walk(space, root=(agent,), policy=as_is, sizes=sizes)
        zeros = {leaf.path: np.zeros((1, *leaf.shape), leaf.dtype) for leaf in leaves(self._nodes[agent])}
        return next(reader(self._nodes[agent], zeros)(slice(0, 1, 1)))
