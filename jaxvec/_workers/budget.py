"""The number of faults from which the workers of a pool, or the actors of rollouts, may recover."""

from __future__ import annotations

import time
from collections import deque

from jaxvec._envs.slice import EnvSettings, SlotSettings
from jaxvec._errors import JaxvecError
from jaxvec._options import Restart
from jaxvec._util import logger
from jaxvec._workers.diagnosis import take_losses


class Budget:
    """Counts the faults of workers or Ray actors against the limits of a `Restart`.

    Attributes:
        restarts: Number of recovered faults, per worker.
    """

    def __init__(self, policy: Restart | None, num_workers: int, *, who: str = "worker") -> None:
        self.policy: Restart | None = policy
        self._who = who
        self.restarts: list[int] = [0] * num_workers
        count = policy.rate[0] if policy and policy.rate else 0
        # Times of the latest restarts of each worker, oldest first, by the monotonic clock in seconds.
        self._latest = [deque[float](maxlen=count) for _ in range(num_workers)]

    @property
    def rebuilds(self) -> bool:
        """True if an env that raised is rebuilt."""
        return self.policy is not None and self.policy.retry == "rebuild"

    def spend_on_env(
        self, worker: int, slot: int, error: JaxvecError, known: EnvSettings | None
    ) -> SlotSettings | None:
        """Spends a fault of an env in a live worker, and returns settings for a new env if there is one."""
        self.spend(worker, error, take_losses(known, [slot]) if self.rebuilds else "")
        return known.of(slot) if self.rebuilds and known is not None else None

    def spend(self, worker: int, error: JaxvecError, lost: str = "") -> None:
        """Counts and logs a fault, with a note on what is lost; raises `error` if the limits are exceeded."""
        if self.policy is None:
            raise error
        now = time.monotonic()
        count = self.restarts[worker]
        limit = self.policy.max_restarts
        latest = self._latest[worker]
        rate = self.policy.rate
        why = ""
        if limit is not None and count >= limit:
            why = f"it was restarted {count} times, and max_restarts is {limit}"
        elif rate is not None and len(latest) == rate[0] and now - latest[0] < rate[1]:
            why = f"restarts in the last {now - latest[0]:.1f} s: {len(latest)}, and rate is {rate}"
        if why:
            error.args = (f"{error}\n{self._who.capitalize()} {worker} was not restarted: {why}.",)
            raise error
        self.restarts[worker] = count + 1
        latest.append(now)
        logger.warning("%s %d recovers from fault %d%s: %s", self._who, worker, count + 1, lost, error)
