"""Steps many envs behind a server from a jitted loop, all at the same time, in one worker.

Each env has its own connection. One worker sends all actions, and then waits for all replies with
asyncio. If an env exceeds its deadline, or the server dies, its episode ends as truncated, with
`info["lost"]`. Its next reset connects again.

    python examples/server_envs.py                     # 256 envs of 50 ms
    python examples/server_envs.py --kill-server       # kill and restart the server in the middle
    python examples/server_envs.py --serve             # only the server, which prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray


async def serve_env(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, latency: float, env_id: str = "CartPole-v1"
) -> None:
    """Serves one env to one connection: a line of JSON per request, and one per reply."""
    env = gymnasium.make(env_id)
    try:
        while line := await reader.readline():
            request = json.loads(line)
            if request["type"] == "reset":
                obs, reward, terminated, truncated = env.reset(seed=request["seed"])[0], 0.0, False, False
            else:
                await asyncio.sleep(latency)  # a slow simulator
                obs, reward, terminated, truncated, _ = env.step(request["action"])
            reply = [obs.tolist(), float(reward), bool(terminated), bool(truncated)]
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        env.close()
        writer.close()


async def serve(port: int, latency: float) -> None:
    """Runs a server, and prints its port when it is ready."""
    server = await asyncio.start_server(partial(serve_env, latency=latency), "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def start_server(port: int = 0, latency: float = 0.05) -> tuple[subprocess.Popen[str], int]:
    """Starts a server process. Returns the process and its port."""
    command = [sys.executable, __file__, "--serve", "--port", str(port), "--latency", str(latency)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


class ServerEnvs(VectorEnv[Any, Any, Any]):
    """A batch of envs behind a server, which move at the same time.

    Args:
        port: Port of the server on this machine.
        num_envs: Number of envs, each with its own connection.
        deadline: Seconds that a step or one attempt of a reset may take.
        restart: Seconds in which a lost env has to be reset, for example while the server restarts.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012  # as in Gymnasium

    def __init__(self, port: int, num_envs: int, deadline: float = 10.0, restart: float = 60.0) -> None:
        with gymnasium.make("CartPole-v1") as env:
            self.single_observation_space = env.observation_space
            self.single_action_space = env.action_space
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._port, self._deadline, self._restart = port, deadline, restart
        self._connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter] | None] = [None] * num_envs
        self._obs: NDArray[Any] = np.zeros(self.observation_space.shape or (), np.float32)
        self._over = np.zeros(num_envs, bool)
        self._loop = asyncio.new_event_loop()

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + index for index in range(self.num_envs)]
        self._run(self._reset_env(index, seed[index]) for index in range(self.num_envs))
        self._over[:] = False
        return self._obs.copy(), self._info(np.zeros(self.num_envs, bool))

    def step(self, actions: Any) -> Any:
        results = self._run(self._step_env(index, action) for index, action in enumerate(actions.tolist()))
        reward, terminated, truncated, lost = map(np.array, zip(*results, strict=True))
        self._over = terminated | truncated
        return self._obs.copy(), reward, terminated, truncated, self._info(lost)

    def close_extras(self, **kwargs: Any) -> None:
        for index in range(self.num_envs):
            self._disconnect(index)
        self._loop.run_until_complete(asyncio.sleep(0))  # closes the sockets
        self._loop.close()

    def _run(self, coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def gather() -> list[Any]:
            async with asyncio.TaskGroup() as group:  # an error cancels the other requests
                tasks = [group.create_task(coroutine) for coroutine in coroutines]
            return [task.result() for task in tasks]

        return self._loop.run_until_complete(gather())

    def _info(self, lost: NDArray[Any]) -> dict[str, Any]:
        return {"lost": lost, "_lost": np.ones(self.num_envs, bool)}

    async def _step_env(self, index: int, action: Any) -> tuple[float, bool, bool, bool]:
        if self._over[index]:
            await self._reset_env(index, None)
            return 0.0, False, False, False
        try:
            reply = await self._request(index, {"type": "step", "action": action})
        except OSError:  # includes TimeoutError and ConnectionError
            return 0.0, False, True, True
        self._obs[index], reward, terminated, truncated = reply
        return reward, terminated, truncated, False

    async def _reset_env(self, index: int, seed: int | None) -> None:
        give_up = time.monotonic() + self._restart
        while True:
            try:
                self._obs[index] = (await self._request(index, {"type": "reset", "seed": seed}))[0]
                return
            except OSError as error:
                if time.monotonic() > give_up:
                    raise ConnectionError(f"env {index} was not reset within {self._restart} s") from error
                await asyncio.sleep(0.1)

    async def _request(self, index: int, request: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._deadline):
                if (connection := self._connections[index]) is None:
                    connection = self._connections[index] = await asyncio.open_connection(
                        "127.0.0.1", self._port
                    )
                reader, writer = connection
                writer.write(json.dumps(request).encode() + b"\n")
                line = await reader.readline()
                if not line.endswith(b"\n"):
                    raise ConnectionError("the server closed the connection")
                return json.loads(line)
        except BaseException:  # a late reply must not answer the next request
            self._disconnect(index)
            raise

    def _disconnect(self, index: int) -> None:
        if (connection := self._connections[index]) is not None:
            connection[1].transport.abort()
            self._connections[index] = None


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
    make_envs = partial(ServerEnvs, port, count)
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
