"""An env of PettingZoo with agents that leave: `b` after two steps, and the others after four."""

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Leaving(ParallelEnv):
    """An env that rewards action 2; its observations are the time."""

    metadata = {"name": "leaving_v0"}
    possible_agents = ["b", "a", "c"]
    lasts = {"a": 4, "b": 2, "c": 4}

    def observation_space(self, agent):
        return spaces.Box(0, 9, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3, start=1)

    def observe(self):
        return {agent: np.full(2, self.time, np.float32) for agent in self.agents}

    def reset(self, seed=None, options=None):
        self.agents, self.time = self.possible_agents[:], 0
        return self.observe(), {}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        assert all(1 <= action <= 3 for action in actions.values())
        self.time += 1
        observations = self.observe()
        rewards = {agent: float(actions[agent] == 2) for agent in self.agents}
        ends = {agent: self.lasts[agent] == self.time for agent in self.agents}
        self.agents = [agent for agent in self.agents if not ends[agent]]
        return observations, rewards, ends, dict.fromkeys(ends, False), {}


def parallel_env():
    return Leaving()
