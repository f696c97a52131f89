"""Recycling: a fresh process takes the envs of a worker that exceeds a limit of `Workers(recycle=...)`.

    the worker          finds a limit exceeded (`Usage`)                   -> Retire
    the pool            sends that back when no request is pending         (`Recycling.due`)
    the worker          exports its slots, and closes its envs             -> ExportedSlots
    the pool            starts a fresh process, which gets that message    (`Recycling.begin`)
    the fresh process   imports the slots                                  -> ImportedSlots
    the pool            logs what could not be continued                   (`Recycling.finish`)

How slots are exported and imported is up to the states of envs (`_extensions/states/slice_states.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jaxvec._envs.slice import EnvSettings
from jaxvec._options import Recycle
from jaxvec._stats import STEPS, family_of, memory_of
from jaxvec._workers.base import Slices
from jaxvec._workers.diagnosis import name_worker, take_losses

_logger = logging.getLogger("jaxvec")
_LOOK_INTERVAL_NS = 100_000_000  # between reads of /proc, which take about 50 µs

_TOO_LOW = (
    "%s exceeds Recycle(memory=...) in the first step of a new process, so each step waits for another "
    "process. Raise the limit, or let the envs keep less in their attributes, which move to the new process"
)

# --- Messages ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retire:
    """Report of a worker that it exceeds a limit, and the pool's answer, upon which it exports its slots."""

    reason: str
    at_once: bool  # its process was too large from the start, as its successor will be


@dataclass(frozen=True)
class ExportedSlots:
    """The last message of a worker, which its successor gets."""

    data: bytes | None  # all that determines the future of the slots; `None` if their episodes are cut
    inexact: str = ""  # the reason for the cuts


@dataclass(frozen=True)
class ImportedSlots:
    """The report of the successor about the slots that it got."""

    cut: dict[int, str]  # by slot, why the episode of its env could not continue
    keeps_states: bool  # False if the saved states are lost


# --- In the worker ----------------------------------------------------------------------------------------


class Usage:
    """The memory, descriptors and steps of this process, compared with the limits."""

    def __init__(self, limits: Recycle, stats: memoryview) -> None:
        self._limits, self._stats = limits, stats
        self._first_step, self._next_look_ns = stats[STEPS], 0
        self._too_large = False  # at the first look

    def exceeded(self, now_ns: int) -> Retire | None:
        """Returns a report of a limit that is exceeded, if any."""
        limits, steps = self._limits, self._stats[STEPS] - self._first_step
        if not steps:  # limits that are too low must not stop all progress
            return None
        found: dict[str, Any] = {"steps": steps}
        first_look = not self._next_look_ns
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + _LOOK_INTERVAL_NS
            found["memory"] = limits.memory and memory_of(family_of(os.getpid()))
            found["descriptors"] = limits.descriptors and len(os.listdir("/proc/self/fd"))
        for name, value in found.items():
            if (limit := getattr(limits, name)) is not None and value >= limit:
                self._too_large |= first_look and name == "memory"
                return Retire(f"it has reached {name}={limit:,}", self._too_large)
        return None


# --- In the program ---------------------------------------------------------------------------------------


class Recycling:
    """The workers of a pool that are being recycled. Used by the thread that polls.

    `incarnations` has the number of times that each worker lost its saved states.
    """

    def __init__(self, slices: Slices, settings: EnvSettings | None, incarnations: list[int]) -> None:
        self._slices, self._settings, self._incarnations = slices, settings, incarnations
        self._retiring: dict[int, Retire] = {}  # workers over a limit, until their successors serve
        self._exported: dict[int, ExportedSlots] = {}  # those with a successor that starts
        self._warned: set[int] = set()  # workers of which the log says that their limit is too low

    def retire(self, worker: int, message: Retire) -> None:
        self._retiring[worker] = message

    def due(self, busy: Collection[int]) -> dict[int, Retire]:
        """Returns the answers to workers that can export their slots now, as they are not `busy`."""
        return {worker: each for worker, each in self._retiring.items() if worker not in busy}

    def begin(self, worker: int, message: ExportedSlots) -> None:
        """Notes the last message of a worker, and logs what becomes of its envs."""
        name, retiring = name_worker(worker, self._slices[worker]), self._retiring[worker]
        fate = "its envs continue in a fresh process"
        if message.data is None:
            self._incarnations[worker] += 1
            fate = f"its episodes are cut, because their states are not exact: {message.inexact}"
            fate += take_losses(self._settings, range(*self._slices[worker]))
        _logger.info("%s is recycled, as %s: %s", name, retiring.reason, fate)
        if retiring.at_once and worker not in self._warned:
            self._warned.add(worker)
            _logger.warning(_TOO_LOW, name)
        self._exported[worker] = message

    def exported(self, worker: int) -> ExportedSlots | None:
        """Returns what a process that starts has to import, if it is a successor."""
        return self._exported.get(worker)

    def ends(self, worker: int) -> bool:
        """Returns whether a worker still has to export its slots and to close its envs."""
        return worker in self._retiring and worker not in self._exported

    def cut_after(self, worker: int, error: Exception) -> ExportedSlots | None:
        """Returns the message for another successor, if one has failed that had slots to continue."""
        exported = self._exported.get(worker)
        if exported is None or exported.data is None:
            return None
        summary = str(error).partition("\n")[0]
        return ExportedSlots(None, f"the new process could not continue ({summary})")

    def finish(self, worker: int, imported: ImportedSlots | None) -> None:
        """Logs what a successor, which serves now, could not continue: `None` for what `begin` has logged."""
        self.forget(worker)
        if imported is None:
            return
        if not imported.keeps_states:
            self._incarnations[worker] += 1
            name = name_worker(worker, self._slices[worker])
            _logger.info("%s: its saved states are lost by the recycling", name)
        for slot, reason in imported.cut.items():
            losses = take_losses(self._settings, [slot])
            _logger.info("env %d could not continue, so its episode is cut: %s%s", slot, reason, losses)

    def forget(self, worker: int) -> None:
        """Forgets a worker that serves anew, or that was lost."""
        self._retiring.pop(worker, None)
        self._exported.pop(worker, None)
