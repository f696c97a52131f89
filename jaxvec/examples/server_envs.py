"""Steps many envs behind a server from a jitted loop, all at the same time, in one worker.

Each env has its own connection. One worker sends all actions, and then waits for all replies with
asyncio. If an env exceeds its deadline, or the server dies, its episode ends as truncated, with
`timestep.last_info["lost"]`. Its next reset connects again.

    python -m jaxvec.examples.server_envs                     # 256 envs of 50 ms
    python -m jaxvec.examples.server_envs --kill-server       # kill and restart the server in the middle
    python -m jaxvec.examples.server_envs --serve             # only the server, which prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol, Self

import gymnasium
import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray


class Reply(NamedTuple):
    """Reply of a server to an action. After a reset, only the observation counts."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool


class Client(Protocol):
    """Connection to one env on a server. Its methods may be coroutines.

    They raise an OSError, such as ConnectionError, if the server is lost. Other errors end the program.
    """

    def reset(self, seed: int | None) -> Awaitable[Reply]: ...
    def step(self, action: Any) -> Awaitable[Reply]: ...
    async def close(self) -> None: ...


class ServerEnvs(VectorEnv[Any, Any, Any]):
    """A batch of envs behind a server, which move at the same time.

    Args:
        connect: Coroutine function that connects to a new env.
        observation_space: Space of one env's observations.
        action_space: Space of one env's actions.
        num_envs: Number of envs, each with its own connection.
        deadline: Seconds that a step or one attempt of a reset may take.
        restart: Seconds in which a lost env has to be reset, for example while the server restarts.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012  # as in Gymnasium

    def __init__(
        self,
        connect: Callable[[], Awaitable[Client]],
        observation_space: Space[Any],
        action_space: Space[Any],
        num_envs: int,
        deadline: float = 10.0,
        restart: float = 60.0,
    ) -> None:
        self.single_observation_space: Space[Any] = observation_space
        self.single_action_space: Space[Any] = action_space
        self.observation_space: Space[Any] = batch_space(observation_space, num_envs)
        self.action_space: Space[Any] = batch_space(action_space, num_envs)
        self.num_envs: int = num_envs
        self._connect, self._deadline, self._restart = connect, deadline, restart
        self._clients: dict[int, Client] = {}  # those that are connected
        self._closing: set[asyncio.Task[None]] = set()
        self._obs = np.zeros(self.observation_space.shape or (), observation_space.dtype)
        self._over = np.zeros(num_envs, bool)
        self._loop = asyncio.new_event_loop()

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + index for index in range(self.num_envs)]

        async def reset_all() -> None:
            async with asyncio.TaskGroup() as group:
                for index in range(self.num_envs):
                    group.create_task(self._reset_env(index, seed[index]))

        self._loop.run_until_complete(reset_all())
        self._over[:] = False
        return self._obs.copy(), self._info(np.zeros(self.num_envs, bool))

    def step(self, actions: Any) -> Any:
        reward, terminated = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        truncated, lost = np.zeros((2, self.num_envs), bool)
        for index, step in self._loop.run_until_complete(self._step_envs(actions.tolist())).items():
            try:
                if not step.done():
                    step.cancel()
                    raise TimeoutError
                self._obs[index], reward[index], terminated[index], truncated[index] = step.result()
            except OSError:  # includes ConnectionError and TimeoutError
                self._disconnect(index)
                truncated[index] = lost[index] = True
        self._over = terminated | truncated
        return self._obs.copy(), reward, terminated, truncated, self._info(lost)

    def close_extras(self, **kwargs: Any) -> None:
        for index in list(self._clients):
            self._disconnect(index)
        if self._closing:
            self._loop.run_until_complete(asyncio.wait(self._closing, timeout=self._deadline))
        self._loop.close()

    def _info(self, lost: NDArray[Any]) -> dict[str, Any]:
        return {"lost": lost, "_lost": np.ones(self.num_envs, bool)}

    async def _step_envs(self, actions: list[Any]) -> dict[int, asyncio.Future[Reply]]:
        """Resets finished envs, and waits for the steps of the others, until the deadline."""
        steps: dict[int, asyncio.Future[Reply]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self.num_envs):
                    if self._over[index]:
                        group.create_task(self._reset_env(index, None))
                    else:
                        steps[index] = asyncio.ensure_future(self._clients[index].step(actions[index]))
                if steps:
                    await asyncio.wait(steps.values(), timeout=self._deadline)
        except BaseException:  # a late reply must not answer the next request
            for index in steps:
                self._disconnect(index)
            raise
        return steps

    async def _reset_env(self, index: int, seed: int | None) -> None:
        give_up = time.monotonic() + self._restart
        while True:
            try:
                async with asyncio.timeout(self._deadline):
                    if index not in self._clients:
                        self._clients[index] = await self._connect()
                    self._obs[index] = (await self._clients[index].reset(seed))[0]
                return
            except OSError as error:
                self._disconnect(index)
                if time.monotonic() > give_up:
                    raise ConnectionError(f"env {index} was not reset within {self._restart} s") from error
                await asyncio.sleep(0.1)
            except BaseException:
                self._disconnect(index)
                raise

    def _disconnect(self, index: int) -> None:
        if client := self._clients.pop(index, None):
            task = self._loop.create_task(client.close())
            self._closing.add(task)  # the loop has only a weak reference
            task.add_done_callback(self._closing.discard)


class LineClient(asyncio.Protocol):
    """A `Client` of `serve`, which exchanges lines of JSON."""

    @classmethod
    async def connect(cls, port: int) -> Self:
        """Connects to a server on this machine."""
        return (await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port))[1]

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._received = b""
        self._reply = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(b"\n") and not self._reply.done():
            line, self._received = self._received, b""
            self._reply.set_result(Reply(*json.loads(line)))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._reply.done():
            self._reply.set_exception(ConnectionError("the server closed the connection"))

    def reset(self, seed: int | None) -> Awaitable[Reply]:
        return self._request({"type": "reset", "seed": seed})

    def step(self, action: Any) -> Awaitable[Reply]:
        return self._request({"type": "step", "action": action})

    async def close(self) -> None:
        self._transport.abort()

    def _request(self, request: dict[str, Any]) -> Awaitable[Reply]:
        # A future costs less time than a coroutine, for which asyncio needs a task.
        self._reply = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._reply.set_exception(ConnectionError("the server closed the connection"))
        else:
            self._transport.write(json.dumps(request).encode() + b"\n")
        return self._reply


class OpenEnvClient:
    """A `Client` of an OpenEnv server, by OpenEnv's own client from the package openenv-core.

    Change `step` and `_reply` for the actions and observations of your env.
    """

    def __init__(self, url: str) -> None:
        self._client = import_module("openenv.core").GenericEnvClient(url)
        self._closed = import_module("websockets.exceptions").ConnectionClosed

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connects to a server, such as `"http://127.0.0.1:8000"`."""
        client = cls(url)
        await client._client.connect()
        return client

    async def reset(self, seed: int | None) -> Reply:
        return await self._reply(self._client.reset(seed=seed))

    async def step(self, action: Any) -> Reply:
        return await self._reply(self._client.step({"action": action}))

    async def close(self) -> None:
        await self._client.close()

    async def _reply(self, request: Awaitable[Any]) -> Reply:
        try:
            result = await request
        except self._closed as error:
            raise ConnectionError("the server closed the connection") from error
        # OpenEnv does not distinguish between terminated and truncated episodes.
        return Reply(result.observation["values"], result.reward or 0.0, result.done, False)


class Service(asyncio.Protocol):
    """Serves one env to one connection: a line of JSON per request, and one per reply.

    Args:
        latency: Seconds that a step takes, as of a slow simulator.
        env_id: Gymnasium id.
    """

    def __init__(self, latency: float, env_id: str = "CartPole-v1") -> None:
        self._latency, self._env, self._received = latency, gymnasium.make(env_id), b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._env.close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith(b"\n"):
            return
        request, self._received = json.loads(self._received), b""
        if request["type"] == "reset":
            self._write(self._env.reset(seed=request["seed"])[0], 0.0, False, False)
        else:
            asyncio.get_running_loop().call_later(self._latency, self._step, request["action"])

    def _step(self, action: Any) -> None:
        if not self._transport.is_closing():
            self._write(*self._env.step(action)[:4])

    def _write(self, obs: Any, reward: Any, terminated: bool, truncated: bool) -> None:
        reply = [obs.tolist(), float(reward), bool(terminated), bool(truncated)]
        self._transport.write(json.dumps(reply).encode() + b"\n")


async def serve(port: int, latency: float) -> None:
    """Runs a server, and prints its port when it is ready."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(Service, latency), "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def start_server(port: int = 0, latency: float = 0.05) -> tuple[subprocess.Popen[str], int]:
    """Starts a server process. Returns the process and its port."""
    return launch([sys.executable, __file__, "--serve", "--port", str(port), "--latency", str(latency)])


def launch(command: list[str]) -> tuple[subprocess.Popen[str], int]:
    """Starts a server that prints its port. Returns the process and its port."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--kill-server", action="store_true")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.port, args.latency))
        return

    import jax
    import jax.numpy as jnp

    import jaxvec

    server, port = start_server(args.port, args.latency)
    count = args.num_envs
    env = gymnasium.make("CartPole-v1")  # for its spaces
    connect = partial(LineClient.connect, port)
    make_envs = partial(ServerEnvs, connect, env.observation_space, env.action_space, count)
    with jaxvec.make(make_envs, count, envs_per_instance=count, num_workers=1) as envs:

        @jax.jit
        def rollout(handle: jaxvec.Handle, key: jax.Array) -> Any:
            def body(handle: jaxvec.Handle, key: jax.Array) -> Any:
                handle, timestep = jaxvec.step(handle, jax.random.randint(key, (count,), 0, 2))
                return handle, (timestep.truncated.sum(), timestep.terminated.sum())

            return jax.lax.scan(body, handle, jax.random.split(key, args.steps))

        handle, _ = jaxvec.reset(envs, seed=0)
        handle, ended = rollout(handle, jax.random.key(0))  # compiles
        for turn in range(1, 4):
            if args.kill_server and turn == 2:
                server.kill()
                server.wait()
                server, port = start_server(port, args.latency)
            start = time.perf_counter()
            handle, ended = rollout(handle, jax.random.key(turn))
            truncated, terminated = map(int, jax.tree.map(jnp.sum, ended))
            rate = count * args.steps / (time.perf_counter() - start)
            ideal = count / args.latency
            print(
                f"{rate:,.0f} steps/s, {rate / ideal:.2f} of ideal; "
                f"{terminated} terminated, {truncated} truncated"
            )
    server.kill()
    server.wait()


if __name__ == "__main__":
    main()
