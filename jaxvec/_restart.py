"""Which failures end a pool, and which are gone on from: the policy, and what is left of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

from jaxvec._errors import JaxvecError

RETRIES = ("reset", "rebuild", "restore")

_logger = logging.getLogger("jaxvec")


@dataclass(frozen=True)
class Restart:
    """How a pool goes on after a fault, for `make(on_fault=...)`; `"restart"` stands for `Restart()`.

    Attributes:
        retry: what happens to an env that raised or returned wrong data: `"reset"` resets it,
            `"rebuild"` closes it and builds another. A worker that died or hangs is replaced, and
            all its envs are built anew. With `"restore"` all that are built anew go on, after the result of
            the fault, from the state in which `jaxvec.save` saved them last, and are reset only if there
            is none. It needs `make(states=n)` and autoreset; each save then sends states to this process.
        max_restarts: how many faults each worker and its envs may have in the pool's
            lifetime; `None` for any number. The next one is raised.
        rate: how many of these, and within how many seconds: `(3, 60.0)` are three in any minute; `None`
            for any rate.
        keep_options: whether an env that is built anew is told what the one before it was: its first reset
            gets the options of the last `reset` of that env, and attributes that `set_attr` has set are
            set again before. What `call` and `map` have changed is lost, as only the env's code knows what
            that is; the log then says so.

    Example:
        ```python
        class Fragile(jaxvec.testing.CountingEnv):
            def step(self, action):
                assert action != 13, "the simulator crashed"
                return super().step(action)

        policy = jaxvec.Restart(retry="rebuild", max_restarts=100, rate=None)
        with jaxvec.make(Fragile, 2, on_fault=policy) as envs:
            envs.reset(seed=0)
            print(envs.step([1, 13]).info["fault"])  # [False  True]
        ```
    """

    retry: str = "reset"
    max_restarts: int | None = 10
    rate: tuple[int, float] | None = (1, 60.0)
    keep_options: bool = True

    def __post_init__(self) -> None:
        if self.retry not in RETRIES:
            raise ValueError(f"retry must be one of {', '.join(RETRIES)}, not {self.retry!r}")
        if self.max_restarts is not None and not self.max_restarts >= 0:
            raise ValueError(f"max_restarts must be at least 0, or None, not {self.max_restarts!r}")
        if self.rate is not None:
            object.__setattr__(self, "rate", _check_rate(self.rate))


def _check_rate(rate: tuple[int, float]) -> tuple[int, float]:
    try:
        count, seconds = rate
        if isinstance(count, int) and count >= 1 and seconds > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            return count, seconds
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"rate must be (n, seconds), at most n restarts, 1 or more, within that time, or None, not {rate!r}"
    )


def parse(on_fault: str | Restart) -> Restart | None:
    """Returns the policy, `None` for `"raise"`; raises `ValueError` for anything else."""
    if isinstance(on_fault, Restart):
        return on_fault
    if on_fault not in ("raise", "restart"):
        raise ValueError(f'on_fault must be "raise", "restart" or a jaxvec.Restart, not {on_fault!r}')
    return Restart() if on_fault == "restart" else None


class Budget:
    """Counts the faults of each worker, or of whoever else is restarted.

    Attributes:
        restarts: `[num_workers]` faults that the pool recovered from.
    """

    def __init__(self, policy: Restart | None, num_workers: int, *, who: str = "worker") -> None:
        self.policy = policy
        self._who = who
        self.restarts = [0] * num_workers
        most = policy.rate[0] if policy and policy.rate else 0
        self._latest = [deque[float](maxlen=most) for _ in range(num_workers)]  # when; the latest last

    @property
    def rebuilds(self) -> bool:
        """Whether an env that raised is built anew."""
        return self.policy is not None and self.policy.retry != "reset"

    def spend(self, worker: int, error: JaxvecError, lost: str = "") -> None:
        """Counts and logs a fault that the pool recovers from, and what is lost by it; or raises `error`."""
        if self.policy is None:
            raise error
        now = time.monotonic()
        count, most = self.restarts[worker], self.policy.max_restarts
        latest, rate = self._latest[worker], self.policy.rate
        why = ""
        if most is not None and count >= most:
            why = f"it was restarted {count} times, and max_restarts is {most}"
        elif rate is not None and len(latest) == rate[0] and now - latest[0] < rate[1]:
            why = f"restarts in the last {now - latest[0]:.1f} s: {len(latest)}, and rate is {rate}"
        if why:
            error.args = (f"{error}\n{self._who.capitalize()} {worker} was not restarted: {why}.",)
            raise error
        self.restarts[worker] = count + 1
        latest.append(now)
        _logger.warning("%s %d recovers from fault %d%s: %s", self._who, worker, count + 1, lost, error)
