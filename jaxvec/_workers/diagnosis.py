"""Error messages about workers: what they were doing, which envs they have, and what is lost with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from jaxvec._engine.move import Verb, verbs_of
from jaxvec._envs import failures
from jaxvec._envs.slice import EnvSettings
from jaxvec._errors import (
    EnvTimeoutError,
    JaxvecError,
    WorkerDiedError,
)
from jaxvec._memory.rows import reader
from jaxvec._memory.segment import Arrays, Marks, Slices
from jaxvec._workers import stacks
from jaxvec._workers.base import Process, WaitLimits

_MAX_STACKS = 4  # of late workers in an error message

_ACTIVITIES: dict[int, str] = {verb: verb.traits.activity for verb in Verb if verb.traits.activity}
_MAX_OTHERS = 10  # further failures in the text of an error


class Diagnosis:
    """Errors about workers that died or are late, with the activity that the segment shows."""

    def __init__(self, slices: Slices, processes: Sequence[Process], *, recovers: bool) -> None:
        self._slices = slices
        self.processes = processes  # by worker; the supervisor's own list, in which it replaces them
        self._recovers = recovers
        # Both are set by the thread that makes the pool, before any other thread has it; the one that closes
        # the pool drops `arrays`.
        self.action: Any = None  # action space
        self.arrays: Arrays | None = None  # of the segment, while the workers serve
        # Number of built envs, and of all with spare ones, by worker that starts. Guarded by `polling`.
        self.built: dict[int, tuple[int, int]] = {}

    def name(self, worker: int) -> str:
        return name_worker(worker, self._slices[worker])

    def worker_of(self, slot: int) -> int:
        return next(w for w, (first, stop) in enumerate(self._slices) if first <= slot < stop)

    def running(self, slots: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Maps those of `slots` with a running env to an activity and the action of a step."""
        if self.arrays is None:
            return {}
        marks = Marks.of(self.arrays)
        inside = marks.running[:, 0].tolist()  # 1 + the slot, for each worker; 0 for none
        running = np.array([slot for slot in slots if slot + 1 in inside], np.intp)
        actions = reader(self.action, self.arrays, stored=True)(running)
        verbs = verbs_of(marks.requested[running])
        verbs[marks.completed[running] == marks.requested[running]] = Verb.SIMULATE  # of a copy of the env
        return {
            slot: (_ACTIVITIES.get(verb, "running"), _describe_action(action) if verb == Verb.STEP else "")
            for slot, action, verb in zip(running.tolist(), actions, verbs.tolist(), strict=True)
        }

    def died_error(self, worker: int, request: str | None) -> WorkerDiedError:
        """Returns the error of a worker that has ended; `request` names its unanswered request, if any."""
        process = self.processes[worker]
        exitcode, ending = process.ending()
        env_ids = tuple(range(*self._slices[worker]))
        name = self.name(worker)
        activity = f"answering {request}" if request else "idle or starting"
        for slot, (doing, action) in self.running(env_ids).items():  # at most one
            activity = f"{doing} env {slot}" + (action and f" with action {action}")
            if len(env_ids) == 1:  # the activity names the worker's only env
                name = f"worker {worker}"
        text = f"{name} {ending} while {activity}. {process.output_advice()}"
        return WorkerDiedError(text, worker=worker, env_ids=env_ids, exitcode=exitcode)

    def late_start_error(self, worker: int, timeout: float | None, ends: bool) -> EnvTimeoutError:
        """Returns the error of a replacement, or, if it `ends`, of a worker that is to be recycled."""
        name = self.name(worker)
        late = f"the replacement of {name} did not start"
        if ends:
            late = f"{name}, which is to be recycled, did not close its envs, or the next of them,"
        return EnvTimeoutError(
            f"{late} within {timeout} s (Timeouts.start)"
            + self._describe_built([worker])
            + self._describe_stacks([worker]),
            env_ids=tuple(range(*self._slices[worker])),
        )

    def late_error(
        self, limits: WaitLimits, workers: Sequence[int], unfinished: Sequence[int] | None
    ) -> EnvTimeoutError:
        """Returns the error of an operation that `workers` delay, as for `Supervisor.time_out`."""
        env_ids = tuple(slot for worker in workers for slot in range(*self._slices[worker]))
        activity = f"No reply from the workers of {name_envs(env_ids)}"
        running = {}
        if unfinished is not None:
            running = self.running(env_ids)
            # A simulation is dispatched to one env of each worker, whichever it copies.
            env_ids = tuple(running) if limits.name == "simulate" else tuple(unfinished)
            activity = f"No env is running. Unfinished: {name_envs(env_ids)}"
        if running:
            activity = "Still running: " + ", ".join(
                f"env {slot} (worker {self.worker_of(slot)}, {f'action {action}' if action else doing})"
                for slot, (doing, action) in running.items()
            )
        activity += self._describe_built(workers)
        advice = f"Raise Timeouts({limits.limit}=...)"
        if limits.name == "constructor":
            advice += ", which limits the start of each env"
            if len(self._slices) < self._slices[-1][1]:
                advice += f", or num_workers ({len(self._slices)}), so that each worker builds fewer envs"
        if not self._recovers and self.arrays is not None:
            advice += ', or use on_fault="restart"'
        return EnvTimeoutError(
            f"{limits.name} timed out after {limits.timeout} s. {activity}. {advice}."
            + self._describe_stacks(workers),
            env_ids=env_ids,
        )

    def _describe_built(self, workers: Sequence[int]) -> str:
        """Returns how far workers that start have come, for the middle of a message."""
        built = [(worker, *self.built[worker]) for worker in workers if worker in self.built]
        texts = [f"worker {worker} has built {count} of {total} envs" for worker, count, total in built]
        return f"; {', '.join(texts)}" if texts else ""

    def _describe_stacks(self, workers: Sequence[int]) -> str:
        """Returns the stacks of workers that are late, for the end of a message. Those to be replaced end."""
        end = self._recovers and self.arrays is not None
        text = ""
        pids = [self.processes[worker].pid for worker in workers[:_MAX_STACKS]]
        reads = [stacks.request_stack(pid, end=end) for pid in pids]
        for worker, read in zip(workers, reads, strict=False):
            if part := stacks.env_part(read()):
                text += f"\n\nThe stack of {self.name(worker)}, most recent call first:\n{part}"
        return text


def _describe_action(action: Any) -> str:
    # "1", not "np.int64(1)".
    return str(action) if isinstance(action, np.generic) else failures.describe_action(action)


def join(errors: Iterable[JaxvecError]) -> JaxvecError:
    """Returns the first error of one operation, and attaches the others: as `others`, and in its text."""
    first, *others = dict.fromkeys(errors)  # late workers share one error object
    first.others = tuple(others)
    if others:
        summary, *traceback = str(first).split("\n")
        count = "1 more failure" if len(others) == 1 else f"{len(others)} more failures"
        note = f"{count} in the same operation: see error.others."
        # Not logged, since that would come before this error.
        also = [f"also failed in the same operation: {str(other).partition(chr(10))[0]}" for other in others]
        first.args = ("\n".join([summary, note, *also[:_MAX_OTHERS], *traceback]),)
    return first


def check_all(answers: list[Any]) -> list[Any]:
    """Returns the answers to a request, or raises the first error among them, joined with the others."""
    errors = [answer for answer in answers if isinstance(answer, JaxvecError)]
    if errors:
        raise join(errors)
    return answers


def take_losses(settings: EnvSettings | None, slots: Collection[int]) -> str:
    """Makes settings forget the changes that rebuilt envs lose, and returns them for the log."""
    lost = settings.forget_calls(slots) if settings is not None else ()
    return f" (changes that call or map made to {name_envs(lost)} are lost)" if lost else ""


def name_worker(worker: int, slots: tuple[int, int]) -> str:
    return f"worker {worker} ({name_envs(range(*slots))})"


def name_envs(env_ids: Sequence[int]) -> str:
    if len(env_ids) == 1:
        return f"env {env_ids[0]}"
    if len(env_ids) > 2 and list(env_ids) == list(range(env_ids[0], env_ids[-1] + 1)):
        return f"envs {env_ids[0]} to {env_ids[-1]}"
    return f"envs {', '.join(map(str, env_ids))}"
