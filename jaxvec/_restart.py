"""Which failures end a pool, and which are gone on from: the policy, and what is left of it."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from jaxvec._errors import JaxvecError

RETRIES = ("reset", "rebuild")

_logger = logging.getLogger("jaxvec")


@dataclass(frozen=True)
class Restart:
    """How a pool goes on after a fault, for `make(on_fault=...)`; `"restart"` stands for `Restart()`.

    Attributes:
        retry: what happens to an env that raised or returned wrong data: `"reset"` resets it,
            `"rebuild"` closes it and builds another. A worker that died or hangs is replaced, and
            all its envs are built anew.
        max_restarts: how many faults each worker and its envs may have in the pool's
            lifetime; `None` for any number. The next one is raised.
        interval: seconds that must lie between two of them; 0 for none.
        keep_options: whether an env that is built anew is told what the one before it was: its first reset
            gets the options of the last `reset` of that env, and attributes that `set_attr` has set are
            set again before. What `call` and `map` have changed is lost, as only the env's code knows what
            that is; the log then says so.
    """

    retry: str = "reset"
    max_restarts: int | None = 10
    interval: float = 60.0
    keep_options: bool = True

    def __post_init__(self) -> None:
        if self.retry not in RETRIES:
            raise ValueError(f"retry must be one of {', '.join(RETRIES)}, not {self.retry!r}")
        if self.max_restarts is not None and not self.max_restarts >= 0:
            raise ValueError(f"max_restarts must be at least 0, or None, not {self.max_restarts!r}")
        if not self.interval >= 0:
            raise ValueError(f"interval must be at least 0 seconds, not {self.interval!r}")


def parse(on_fault: str | Restart) -> Restart | None:
    """Returns the policy, `None` for `"raise"`; raises `ValueError` for anything else."""
    if isinstance(on_fault, Restart):
        return on_fault
    if on_fault not in ("raise", "restart"):
        raise ValueError(f'on_fault must be "raise", "restart" or a jaxvec.Restart, not {on_fault!r}')
    return Restart() if on_fault == "restart" else None


class Budget:
    """Counts the faults of each worker.

    Attributes:
        restarts: `[num_workers]` faults that the pool recovered from.
    """

    def __init__(self, policy: Restart | None, num_workers: int) -> None:
        self.policy = policy
        self.restarts = [0] * num_workers
        self._latest = [-math.inf] * num_workers

    def spend(self, worker: int, error: JaxvecError, lost: str = "") -> None:
        """Counts and logs a fault that the pool recovers from, and what is lost by it; or raises `error`."""
        if self.policy is None:
            raise error
        now = time.monotonic()
        count, most = self.restarts[worker], self.policy.max_restarts
        why = ""
        if most is not None and count >= most:
            why = f"it was restarted {count} times, and max_restarts is {most}"
        elif now - self._latest[worker] < self.policy.interval:
            ago = now - self._latest[worker]
            why = f"its last restart was {ago:.1f} s ago, and interval is {self.policy.interval} s"
        if why:
            error.args = (f"{error}\nWorker {worker} was not restarted: {why}.",)
            raise error
        self.restarts[worker], self._latest[worker] = count + 1, now
        _logger.warning("worker %d recovers from fault %d%s: %s", worker, count + 1, lost, error)
