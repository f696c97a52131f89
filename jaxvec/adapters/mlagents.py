"""Simulations of Unity's ML-Agents as Gymnasium envs, with several behaviours and a varying number of agents.

Does not import `mlagents_envs`: `MlAgentsEnv` is given a `BaseEnv`, and `_Places` maps the agents of each
behaviour to a fixed number of places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from jaxvec.adapters._adapter import Adapter

__all__ = ["INFO", "MlAgentsEnv"]

INFO = ("agent_id", "terminated", "interrupted", "group_reward")
"""Keys of info: `jaxvec.make(..., info=INFO)` returns them."""


@final
class MlAgentsEnv(Adapter):
    """An ML-Agents `BaseEnv` as one `gymnasium.Env`, with a fixed number of places for agents.

    Observations and actions are dicts with one key per behaviour. Each behaviour has `max_agents` places. An
    agent keeps its place until its episode ends; the next agent may take the place in the same step. The
    observation of a behaviour is a dict:

    - `"obs"`: a tuple of `[max_agents, ...]` float32, the latest observation of each agent; 0 in free places;
    - `"decides"`: `[max_agents]`, 1 where an agent requests an action. Other actions are ignored;
    - `"action_mask"`, for discrete actions: a tuple of `[max_agents, branch]`, 1 for available actions.

    The action of a behaviour is `[max_agents, n]` float32 within [-1, 1], `[max_agents, branches]` integers,
    or a dict of both, `"continuous"` and `"discrete"`. Rewards are one vector `[behaviours * max_agents]`
    float32, behaviour by behaviour.

    The env's own episode never ends; wrap the env in `TimeLimit` for an end, and then read infos from
    `timestep.last_info`. info has the ends of the agents'
    episodes, in arrays shaped like rewards: `terminated` and `interrupted` (by a step limit) bool, `agent_id`
    int32 with -1 for free places, and `group_reward` float32. After that step, the place has the agent's last
    observation, unless the next agent has taken it.

    Example:
        ```python
        from mlagents_envs.environment import UnityEnvironment
        from jaxvec.adapters.mlagents import INFO, MlAgentsEnv

        def make_env(env_index):
            scene = UnityEnvironment("builds/Soccer", worker_id=env_index, no_graphics=True)
            return MlAgentsEnv(scene, max_agents=4)

        envs = jaxvec.make(make_env, 8, info=INFO, timeouts=jaxvec.Timeouts(start=300))
        ```
    """

    def __init__(
        self, env: Any, max_agents: int, *, set_parameter: Callable[[str, float], None] | None = None
    ) -> None:
        """Adapts a simulation, and resets it to learn its behaviours.

        Args:
            env: A `mlagents_envs.base_env.BaseEnv`, such as a `UnityEnvironment`.
            max_agents: Maximum number of agents that a behaviour has at the same time.
            set_parameter: Called with each name and number of a reset's `options`, before the reset. Pass the
                method `set_float_parameter` of an `EnvironmentParametersChannel`.

        Raises:
            ValueError: `max_agents` is below 1, or the simulation has no behaviours.
        """
        if max_agents < 1:
            raise ValueError(f"max_agents must be at least 1, not {max_agents}")
        self.adapted: Any = env
        self._set_parameter = set_parameter
        env.reset()
        self._places = {name: _Places(name, spec, max_agents) for name, spec in env.behavior_specs.items()}
        if not self._places:
            raise ValueError("the simulation has no behaviours after a reset; it needs at least one agent")
        self.observation_space: Space[Any] = spaces.Dict(
            {name: places.observation_space for name, places in self._places.items()}
        )
        self.action_space: Space[Any] = spaces.Dict(
            {name: places.action_space for name, places in self._places.items()}
        )
        number = len(self._places) * max_agents
        self.reward_space: Space[Any] = spaces.Box(-np.inf, np.inf, (number,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, float] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Resets the simulation.

        Args:
            seed: Seed of the spaces only. A simulation is seeded where it is made.
            options: Reset parameters by name.

        Raises:
            ValueError: options are given without `set_parameter`, or a behaviour is new or has too many
                agents.
        """
        super().reset(seed=seed)
        if options and self._set_parameter is None:
            raise ValueError(
                f"reset: MlAgentsEnv has no set_parameter for the options {sorted(options)}; pass the "
                "method set_float_parameter of an EnvironmentParametersChannel"
            )
        for name, value in (options or {}).items():
            assert self._set_parameter is not None
            self._set_parameter(name, float(value))
        self.adapted.reset()
        for places in self._places.values():
            places.clear()
        obs, _, info = self._observe()
        return obs, info

    def step(self, action: Any) -> tuple[dict[str, Any], NDArray[np.float32], bool, bool, dict[str, Any]]:
        """Passes actions to the deciding agents, and steps the simulation until agents decide again.

        Returns:
            `(obs, reward, False, False, info)`.

        Raises:
            ValueError: a behaviour is new, or has too many agents.
        """
        for name, places in self._places.items():
            if len(places.deciding):
                self.adapted.set_actions(name, places.actions(action[name]))
        self.adapted.step()
        obs, reward, info = self._observe()
        return obs, reward, False, False, info

    def _observe(self) -> tuple[dict[str, Any], NDArray[np.float32], dict[str, Any]]:
        new = sorted(set(self.adapted.behavior_specs) - set(self._places))
        if new:
            raise ValueError(f"behaviours {new} appeared after the first reset; create all of them before it")
        for name, places in self._places.items():
            places.update(*self.adapted.get_steps(name))
        all_places = list(self._places.values())
        info = {key: np.concatenate([places.info[key] for places in all_places]) for key in INFO}
        obs = {places.name: places.observe() for places in all_places}
        return obs, np.concatenate([places.reward for places in all_places]), info


class _Places:
    """The places of one behaviour's agents, with their latest observations."""

    def __init__(self, name: str, spec: Any, max_agents: int) -> None:
        self.name = name
        self._action_spec: Any = spec.action_spec
        self._max_agents = max_agents
        shapes = [(max_agents, *observation.shape) for observation in spec.observation_specs]
        branches = tuple(self._action_spec.discrete_branches)
        masks = [(max_agents, size) for size in branches]
        observations: dict[str, Space[Any]] = {
            "obs": spaces.Tuple([spaces.Box(-np.inf, np.inf, shape, np.float32) for shape in shapes]),
            "decides": spaces.MultiBinary(max_agents),
        }
        if branches:
            observations["action_mask"] = spaces.Tuple([spaces.MultiBinary(shape) for shape in masks])
        self.observation_space = spaces.Dict(observations)
        actions: dict[str, Space[Any]] = {}
        if self._action_spec.continuous_size:
            shape = (max_agents, self._action_spec.continuous_size)
            actions["continuous"] = spaces.Box(-1, 1, shape, np.float32)
        if branches:
            actions["discrete"] = spaces.MultiDiscrete(np.tile(branches, (max_agents, 1)))
        self._action_types = tuple(actions)
        self.action_space: Space[Any] = (
            spaces.Dict(actions) if len(actions) != 1 else next(iter(actions.values()))
        )
        self._obs = [np.zeros(shape, np.float32) for shape in shapes]
        self._masks = [np.ones(shape, np.int8) for shape in masks]
        self.clear()

    def clear(self) -> None:
        self._place_of: dict[int, int] = {}  # by agent_id
        self.deciding = np.zeros(0, np.intp)  # places in the order of DecisionSteps, as set_actions expects
        for array in self._obs:
            array[:] = 0
        for mask in self._masks:
            mask[:] = 1

    def update(self, decisions: Any, terminals: Any) -> None:
        """Writes the results of a step of the simulation, its ended episodes and its decision requests."""
        number = self._max_agents
        self.reward = np.zeros(number, np.float32)
        self.info: dict[str, NDArray[Any]] = {
            "agent_id": np.full(number, -1, np.int32),
            "terminated": np.zeros(number, np.bool_),
            "interrupted": np.zeros(number, np.bool_),
            "group_reward": np.zeros(number, np.float32),
        }
        # Places that were freed in the last step kept the agent's last observation until now.
        free = np.setdiff1d(np.arange(number), list(self._place_of.values()))
        for array, value in (*((array, 0) for array in self._obs), *((mask, 1) for mask in self._masks)):
            array[free] = value
        ended = self._take(terminals)
        self.info["terminated"][ended] = ~np.asarray(terminals.interrupted, np.bool_)
        self.info["interrupted"][ended] = terminals.interrupted
        for agent_id in terminals.agent_id:
            del self._place_of[int(agent_id)]  # before `decisions`, because its agents may take the place
        self.deciding = self._take(decisions)
        if decisions.action_mask is not None:  # in ML-Agents, true means that an action is not available
            for mask, refused in zip(self._masks, decisions.action_mask, strict=True):
                mask[self.deciding] = ~np.asarray(refused, np.bool_)
        for agent_id, place in self._place_of.items():
            self.info["agent_id"][place] = agent_id

    def _take(self, steps: Any) -> NDArray[np.intp]:
        """Writes the agents' results into their places, and returns these places."""
        places = np.array([self._find(int(agent_id)) for agent_id in steps.agent_id], np.intp)
        for array, values in zip(self._obs, steps.obs, strict=True):
            array[places] = values
        # Added, because a place may have an ended agent and the next one in the same step.
        self.reward[places] += steps.reward
        self.info["group_reward"][places] += steps.group_reward
        return places

    def _find(self, agent_id: int) -> int:
        if agent_id not in self._place_of:
            free = sorted({*range(self._max_agents)} - {*self._place_of.values()})
            if not free:
                raise ValueError(
                    f"behaviour {self.name!r} has more agents than max_agents={self._max_agents}: {agent_id} "
                    f"joined {sorted(self._place_of)}; pass a larger max_agents"
                )
            self._place_of[agent_id] = free[0]
        return self._place_of[agent_id]

    def observe(self) -> dict[str, Any]:
        decides = np.zeros(self._max_agents, np.int8)
        decides[self.deciding] = 1
        obs: dict[str, Any] = {"obs": tuple(array.copy() for array in self._obs), "decides": decides}
        if self._masks:
            obs["action_mask"] = tuple(mask.copy() for mask in self._masks)
        return obs

    def actions(self, action: Any) -> Any:
        """Returns ML-Agents' `ActionTuple` for the deciding agents."""
        parts = action if len(self._action_types) != 1 else {self._action_types[0]: action}
        result = self._action_spec.empty_action(len(self.deciding))
        if "continuous" in self._action_types:
            result.add_continuous(np.asarray(parts["continuous"], np.float32)[self.deciding])
        if "discrete" in self._action_types:
            result.add_discrete(np.asarray(parts["discrete"], np.int32)[self.deciding])
        return result
