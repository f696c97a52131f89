"""What workers run for `bench`: an env's bare loop, and envs that cost nothing. Without jax."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

_NUM_ACTIONS = 64  # drawn in advance
_LOOK_NS = 1_000_000  # how often a loop looks at the clock


@dataclass(frozen=True)
class Loop:
    """What a bare loop did.

    Attributes:
        steps: taken.
        seconds: they took, resets included.
        core_share: of these, that the env computed; the rest it waited of its own accord.
    """

    steps: int
    seconds: float
    core_share: float


@dataclass(frozen=True)
class Times:
    """How long single calls took.

    Attributes:
        build: seconds for the constructor.
        steps: `[n]` seconds of each step, with the reset where it ended an episode.
        resets: `[m]` seconds of each reset.
    """

    build: float
    steps: NDArray[np.float64]
    resets: NDArray[np.float64]


class BareLoop(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps its env by itself, with random actions and nothing between loop and env."""

    def __init__(self, env_fn: Callable[[], Any]) -> None:
        began = time.perf_counter()
        super().__init__(env_fn())
        self._build = time.perf_counter() - began
        self._actions: list[Any] = []
        self._steps_a_look = 0

    def loop(self, seconds: float) -> Loop:
        """Steps for about so many seconds, and resets as episodes end."""
        if not self._steps_a_look:
            median = np.median(self.times(0).steps)
            self._steps_a_look = int(np.clip(_LOOK_NS / 1e9 / median, 1, _NUM_ACTIONS))
        step, reset, actions = self.env.step, self.env.reset, self._actions[: self._steps_a_look]
        steps, watch = 0, _Watch()
        began = now = perf_counter_ns()
        until = began + int(seconds * 1e9)
        while now < until:
            for action in actions:
                _, _, terminated, truncated, _ = step(action)
                if terminated or truncated:
                    reset()
            steps += len(actions)
            now = perf_counter_ns()
        return Loop(steps, (now - began) / 1e9, watch.core_share((now - began) / 1e9))

    def times(self, seconds: float) -> Times:
        """Times single calls for about so many seconds; ten steps at least.

        By this thread's CPU time if the env computes only: what else the machine does is not its spread.
        """
        if not self._actions:
            self.env.reset(seed=0)
            self.env.action_space.seed(0)
            self._actions = [self.env.action_space.sample() for _ in range(_NUM_ACTIONS)]
        step, reset, actions, watch = self.env.step, self.env.reset, self._actions, _Watch()
        steps: list[tuple[int, int]] = []  # by both clocks
        resets: list[tuple[int, int]] = []
        began = now = perf_counter_ns()
        until = began + int(seconds * 1e9)
        while now < until or len(steps) < 10:
            before, cpu_before = perf_counter_ns(), thread_time_ns()
            _, _, terminated, truncated, _ = step(actions[len(steps) % _NUM_ACTIONS])
            if terminated or truncated:
                middle, cpu_middle = perf_counter_ns(), thread_time_ns()
                reset()
                resets.append((perf_counter_ns() - middle, thread_time_ns() - cpu_middle))
            cpu, now = thread_time_ns(), perf_counter_ns()
            steps.append((now - before, cpu - cpu_before))
        clock = 1 if watch.core_share((now - began) / 1e9) == 1 else 0
        return Times(self._build, *(_seconds(each, clock) for each in (steps, resets)))


def _seconds(taken: list[tuple[int, int]], clock: int) -> NDArray[np.float64]:
    """Returns what was taken by one of the clocks, less what it takes to look at both."""
    looks: list[int] = []
    for _ in range(100):
        before, cpu_before = perf_counter_ns(), thread_time_ns()
        cpu, now = thread_time_ns(), perf_counter_ns()
        looks.append((now - before, cpu - cpu_before)[clock])
    ns = np.asarray(taken, np.float64).reshape(-1, 2)[:, clock]
    return np.maximum(ns - np.median(looks), 1) / 1e9


class _Watch:
    """Tells waiting from being kept waiting by what else the machine does."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def core_share(self, seconds: float) -> float:
        """Returns the CPU time of this process a second; 1 if it hardly ever gave up its core by itself."""
        usage, before = resource.getrusage(resource.RUSAGE_SELF), self._usage
        if usage.ru_nvcsw - before.ru_nvcsw <= max(usage.ru_nivcsw - before.ru_nivcsw, 100 * seconds):
            return 1.0
        return (time.process_time() - self._cpu) / seconds


class NoOpEnv(gymnasium.Env[Any, Any]):
    """Has the given spaces, returns one and the same observation, and does nothing else."""

    def __init__(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self._obs = observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begins an episode without end."""
        return self._obs, {}

    def step(self, action: Any) -> Any:
        """Returns what it always returns."""
        return self._obs, 0.0, False, False, {}
