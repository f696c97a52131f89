"""Serves CartPole envs by OpenEnv: `python openenv_cartpole.py PORT LATENCY` prints its port.

`LATENCY` is the seconds that a step takes. A client of this server needs no import of this module.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import gymnasium
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

LATENCY = float(sys.argv[2])


class Push(Action):
    action: int


class Cart(Observation):
    values: list[float]


class CartPole(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._env = gymnasium.make("CartPole-v1")

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Cart(values=self._env.reset(seed=seed)[0].tolist(), reward=0.0, done=False)

    def step(self, action, timeout_s=None, **kwargs):
        obs, reward, terminated, truncated, _ = self._env.step(action.action)
        return Cart(values=obs.tolist(), reward=reward, done=terminated or truncated)

    async def step_async(self, action, timeout_s=None, **kwargs):
        await asyncio.sleep(LATENCY)
        return self.step(action)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(CartPole, Push, Cart, max_concurrent_envs=1000)
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
