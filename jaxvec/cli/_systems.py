"""What `bench` gives turns to: bare loops, pools in compiled programs and in Python loops, callbacks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import jaxvec
from jaxvec._vector_env import VectorEnv
from jaxvec.cli._progress import Progress
from jaxvec.cli._target import Target
from jaxvec.cli._toys import BareLoop, Loop, Times

_NUM_ACTIONS = 64  # batches, drawn in advance


@dataclass(frozen=True)
class Turn:
    """One turn of a system, or the medians of several.

    Attributes:
        rate: env steps a second.
        busy: share of its time that each worker, or loop, was at work.
    """

    rate: float
    busy: tuple[float, ...] = ()


System = Callable[[float], Turn]  # runs for about so many seconds


def take_turns(
    systems: Mapping[str, System], *, rounds: int, seconds: float, what: str, progress: Progress
) -> dict[str, Turn]:
    """Returns the medians over the rounds; a machine that slows down slows all systems."""
    turns: dict[str, list[Turn]] = {name: [] for name in systems}
    with progress(what, rounds * len(systems)) as advance:
        for _ in range(rounds):
            for name, system in systems.items():
                turns[name].append(system(seconds))
                advance()
    return {
        name: Turn(
            statistics.median(turn.rate for turn in mine),
            tuple(map(statistics.median, zip(*(turn.busy for turn in mine), strict=True))),
        )
        for name, mine in turns.items()
    }


class Bare:
    """Loops of `env.step`, side by side in a process each; or one, in this process."""

    def __init__(self, stack: ExitStack, target: Target, copies: int, *, here: bool = False) -> None:
        env_fns = [partial(BareLoop, env_fn) for env_fn in target.env_fns(copies)]
        self.envs = stack.enter_context(
            jaxvec.make(env_fns, num_workers=copies, backend="serial" if here else "process")
        )

    def __call__(self, seconds: float) -> Turn:
        """Runs the loops."""
        loops: tuple[Loop, ...] = self.envs.call("loop", seconds)
        return Turn(
            sum(loop.steps / loop.seconds for loop in loops),
            tuple(loop.core_share for loop in loops),
        )

    def times(self, seconds: float) -> tuple[Times, ...]:
        """Times single calls."""
        return self.envs.call("times", seconds)


class Pool:
    """A pool, stepped with random actions."""

    def __init__(self, stack: ExitStack, envs: VectorEnv, length: int) -> None:
        """Takes over `envs`, until the stack's end; scans have so many steps."""
        self.envs = stack.enter_context(envs)
        self._length = length
        envs.action_space.seed(0)
        self._actions = [envs.action_space.sample() for _ in range(_NUM_ACTIONS)]
        self._stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self._actions)
        self._carry: Any = None  # of the scans; None when a step on the host has made it stale
        self.scan(0)  # compiles

    def scan(self, seconds: float) -> Turn:
        """Steps in jitted scans."""
        if self._carry is None:
            handle, timestep = jaxvec.reset(self.envs, seed=0)
            self._carry = handle, timestep.info["env_id"]
        rollout = _rollout(self._length, first_ready=self.envs.batch_size < self.envs.num_envs)

        def step() -> int:
            self._carry = jax.block_until_ready(rollout(self._carry, self._stacked))
            return self._length

        return self._turn(step, seconds)

    def host(self, seconds: float) -> Turn:
        """Steps in a Python loop."""
        if self._carry is None:
            self.envs.reset(seed=0)
        self._carry = None
        actions = iter(self._actions)

        def step() -> int:
            nonlocal actions
            action = next(actions, None)
            if action is None:
                actions = iter(self._actions)
                action = next(actions)
            self.envs.step(action)
            return 1

        return self._turn(step, seconds)

    def _turn(self, step: Callable[[], int], seconds: float) -> Turn:
        before, began = self._work(), time.perf_counter()
        steps, elapsed = 0, 0.0
        while not steps or elapsed < seconds:
            steps += step()
            elapsed = time.perf_counter() - began
        busy = (np.asarray(self._work()) - before) / elapsed
        return Turn(steps * self.envs.batch_size / elapsed, tuple(busy.tolist()))

    def _work(self) -> Sequence[float]:
        return [worker.step_time + worker.reset_time for worker in self.envs.stats().workers]


@cache
def _rollout(length: int, *, first_ready: bool) -> Callable[[Any, Any], Any]:
    """Returns a program of so many steps; pools of equal specification share its compiled form."""

    def body(carry: Any, i: jax.Array, actions: Any) -> Any:
        handle, env_id = carry
        action = jax.tree.map(lambda leaf: leaf[i % _NUM_ACTIONS], actions)
        if first_ready:
            handle = jaxvec.send(handle, jax.tree.map(lambda leaf: leaf[env_id], action), env_id)
            handle, timestep = jaxvec.recv(handle)
        else:
            handle, timestep = jaxvec.step(handle, action)
        return (handle, timestep.info["env_id"]), None

    @jax.jit
    def rollout(carry: Any, actions: Any) -> Any:
        return jax.lax.scan(lambda carry, i: body(carry, i, actions), carry, jnp.arange(length))[0]

    return rollout


class Callback:
    """A program whose steps call back to Python, where nothing is done: what `io_callback` costs alone."""

    def __init__(self, envs: VectorEnv, length: int) -> None:
        """Takes shapes from a pool, with scans of so many steps."""
        self._num_envs, self._length = envs.num_envs, length
        answer = [np.zeros(envs.spec.batch_shape(leaf), leaf.stored) for leaf in envs.spec.timestep_leaves]
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in answer]

        def body(packed: jax.Array, _: None) -> Any:
            rows = io_callback(lambda _: answer, shapes, packed, ordered=False)
            return packed + rows[0].ravel()[0].astype(np.uint8), None

        self._run = jax.jit(lambda packed: jax.lax.scan(body, packed, length=length)[0])
        self._packed = jnp.zeros(16 * envs.num_envs, np.uint8)
        jax.block_until_ready(self._run(self._packed))

    def __call__(self, seconds: float) -> Turn:
        """Runs scans."""
        began, steps, elapsed = time.perf_counter(), 0, 0.0
        while not steps or elapsed < seconds:
            jax.block_until_ready(self._run(self._packed))
            steps += self._length
            elapsed = time.perf_counter() - began
        return Turn(steps * self._num_envs / elapsed)
