"""What can be told of workers that died or are late, in the errors' words."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from jaxvec._backends._backend import Patience
from jaxvec._backends._launcher import Process, Slices
from jaxvec._errors import EnvTimeoutError, JaxvecError, WorkerDiedError
from jaxvec._handoff._move import Verb, verbs_of
from jaxvec._memory._marks import Marks
from jaxvec._memory._rows import reader
from jaxvec._memory._segment import Arrays
from jaxvec._slices import _failures
from jaxvec._slices._parameters import Told
from jaxvec._spec import PoolSpec

_logger = logging.getLogger("jaxvec")

_DOING: dict[int, str] = {Verb.SAVE: "being saved", Verb.RESTORE: "being restored"}


class Diagnosis:
    """Looks at the segment to say what workers are at.

    Attributes:
        arrays: of the segment; `None` until the workers serve, and once they are ended.
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self.arrays: Arrays | None = None

    def attach(self, spec: PoolSpec, arrays: Arrays) -> None:
        """Makes the segment known."""
        self._action, self.arrays = spec.action, arrays

    def forget(self) -> None:
        """Lets the segment go: the workers are ended."""
        self.arrays = None

    def name(self, worker: int) -> str:
        """Returns a worker and its envs in words."""
        return f"worker {worker} ({name_envs(range(*self._slices[worker]))})"

    def worker_of(self, slot: int) -> int:
        """Returns the worker that holds a slot."""
        return next(w for w, (first, stop) in enumerate(self._slices) if first <= slot < stop)

    def running(self, slots: Iterable[int]) -> str:
        """Says which of `slots` are inside their env's code now, and what for."""
        if self.arrays is None:
            return ""
        marks = Marks.of(self.arrays)
        inside = marks.running[:, 0].tolist()
        running = np.array([slot for slot in slots if slot + 1 in inside], np.intp)
        actions = reader(self._action, self.arrays)(running)
        verbs = verbs_of(marks.requested[running]).tolist()
        return ", ".join(
            f"env {slot} (worker {self.worker_of(slot)}) is {_DOING.get(verb, 'running')}"
            + (f", last action {_failures.describe_action(action)}" if verb == Verb.STEP else "")
            for slot, action, verb in zip(running.tolist(), actions, verbs, strict=True)
        )

    def died(self, worker: int, process: Process, *, asked: str | None) -> WorkerDiedError:
        """Returns the error of a worker that has ended; `asked` is the method it was asked for, if any."""
        exitcode, ending = process.ending()
        env_ids = tuple(range(*self._slices[worker]))
        doing = self.running(env_ids) or (f"answering {asked}" if asked else "idle or starting")
        return WorkerDiedError(
            f"{self.name(worker)} {ending} while {doing}; its standard error may tell more",
            worker=worker,
            env_ids=env_ids,
            exitcode=exitcode,
        )

    def late_start(self, worker: int, process: Process, timeout: float | None) -> EnvTimeoutError:
        """Returns the error of a worker that took another's place and has not started in time."""
        where = process.place and f": it is {process.place}"
        return EnvTimeoutError(
            f"{self.name(worker)} took another's place, but did not start within start_timeout, "
            f"{timeout} s{where}",
            env_ids=tuple(range(*self._slices[worker])),
        )

    def late(
        self,
        patience: Patience,
        workers: Sequence[int],
        processes: Sequence[Process],
        unfinished: Sequence[int] | None,
    ) -> EnvTimeoutError:
        """Returns the error of an operation that took too long.

        Args:
            patience: of the operation.
            workers: that hold it up.
            processes: of all workers.
            unfinished: those of their slots that it waits for; `None` if it waits for their answers.
        """
        elsewhere = _silent(workers, processes)
        if unfinished is None:
            env_ids = tuple(slot for worker in workers for slot in range(*self._slices[worker]))
            doing = f"the workers of {name_envs(env_ids)} have not answered" + (
                elsewhere and f": {elsewhere}"
            )
        else:
            env_ids = tuple(unfinished)
            running = self.running(env_ids) or elsewhere or "no env is running"
            doing = f"{running}; unfinished: {name_envs(env_ids)}"
        return EnvTimeoutError(
            f"{patience.name} timed out after {patience.timeout} s: {doing}", env_ids=env_ids
        )


def _silent(workers: Iterable[int], processes: Sequence[Process]) -> str:
    """Says which of `workers`, who are late, are on other machines, and where."""
    return ", ".join(
        f"worker {worker} {place} has not answered"
        for worker in workers
        if (place := processes[worker].place)
    )


def join(errors: Iterable[JaxvecError]) -> JaxvecError:
    """Returns the first of the errors of one operation; it then tells of the others, which are logged."""
    first, *others = dict.fromkeys(errors)  # late workers share one
    first.others = tuple(others)
    for other in others:
        _logger.error("failed at the same time: %s", str(other).partition("\n")[0])
    if others:
        what, *traceback = str(first).split("\n")
        more = f"Failed at the same time: {len(others)} more, see `others` and the log."
        first.args = ("\n".join([what, more, *traceback]),)
    return first


def check_all(answers: list[Any]) -> list[Any]:
    """Returns the answers of a request; raises the first error among them, which tells of the others."""
    errors = [answer for answer in answers if isinstance(answer, JaxvecError)]
    if errors:
        raise join(errors)
    return answers


def tell_lost(told: Told | None, slots: Collection[int]) -> str:
    """Says what the new envs in `slots` can't be told, as it will be lost, and which have a saved state."""
    if told is None:
        return ""
    saved = told.saved(slots)
    lost = told.forget_calls({*slots} - {*saved})
    kept = f" ({name_envs(saved)} can go on from saved states)" if saved else ""
    return kept + (f" (what call or map may have changed in {name_envs(lost)} is lost)" if lost else "")


def name_envs(env_ids: Sequence[int]) -> str:
    """Returns the ids in words."""
    if len(env_ids) == 1:
        return f"env {env_ids[0]}"
    if len(env_ids) > 2 and list(env_ids) == list(range(env_ids[0], env_ids[-1] + 1)):
        return f"envs {env_ids[0]} to {env_ids[-1]}"
    return f"envs {', '.join(map(str, env_ids))}"
