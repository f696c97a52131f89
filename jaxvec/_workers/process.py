"""The envs of a pool in worker processes, and the start method of local workers.

`ProcessWorkers` dispatches slots and waits for their completion. Its `Supervisor` handles everything else:
requests over the control sockets, failures and replacements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._arguments import Options, options_changed, select_options
from jaxvec._engine.channel import Channel
from jaxvec._engine.choice import choose_dispatch, open_engine, parent_end
from jaxvec._engine.dispatch import DEATH_CHECK_INTERVAL, ParentDispatch
from jaxvec._engine.engine import Engine, EngineConfig
from jaxvec._engine.move import Verb
from jaxvec._envs.constructors import Description
from jaxvec._envs.env_access import SlotAccess
from jaxvec._envs.slice import Arguments, EnvSettings, Slice
from jaxvec._errors import EnvError, JaxvecError, NotPicklableError, WorkerDiedError
from jaxvec._memory.segment import Arrays, Layout, Marks
from jaxvec._options import LimitName, PoolConfig
from jaxvec._settings import candidates
from jaxvec._spec import PoolSpec
from jaxvec._stats import RESET_NS, STEP_NS, STEPS, ProcessStats, read_process
from jaxvec._tracing import Trace
from jaxvec._util import logger, usable_cores
from jaxvec._workers import fork
from jaxvec._workers.base import (
    Backend,
    Check,
    Launcher,
    Process,
    WaitLimits,
    WorkerGroup,
    for_slots,
)
from jaxvec._workers.budget import Budget
from jaxvec._workers.diagnosis import check_all, name_worker
from jaxvec._workers.fork import Forker
from jaxvec._workers.forkserver import ThreadsError
from jaxvec._workers.output import Output, OutputFiles, OutputLog
from jaxvec._workers.protocol import Attach, WorkerRecipe
from jaxvec._workers.spawn import Spawner
from jaxvec._workers.supervisor import Supervisor

_SPIN_NS = 200_000  # how long an idle worker spins before it sleeps
_MANY_CORES = 8  # from here on, a core for the program costs the workers an eighth of their time at most
# Pools with other values of these options need processes.
_OPTIONS_OF_PROCESSES = ("backend", "batch_size", "on_fault", "spare_envs", "timeouts", "workers")
_MIN_STEPS = 1000  # of each env, for a comparison with the serial backend


def choose_start_method(name: str) -> str:
    """Returns `"forkserver"` or `"spawn"`. Raises `RuntimeError` for an unavailable `"forkserver"`."""
    reason = fork.reason_unavailable()
    if name == "forkserver" and reason is not None:
        raise RuntimeError(f'start_method="forkserver" is not possible here: {reason}; use "auto" or "spawn"')
    if name == "auto":
        return "forkserver" if reason is None else "spawn"
    return name


class LocalLauncher(Launcher):
    """Starts workers on this machine, by fork or, where that is unsafe, as new interpreters."""

    def __init__(self, recipe: WorkerRecipe) -> None:
        self._recipe = recipe
        workers = recipe.config.workers
        forks = choose_start_method(workers.start_method) == "forkserver"
        self._launcher = (Forker if forks else Spawner)(recipe.config, recipe.interpreter)
        if workers.preload and not forks:
            logger.warning(
                "preload=%s has no effect: workers can't be forked here: %s",
                list(workers.preload),
                fork.reason_unavailable(),
            )
        self._latest: dict[int, tuple[Process, Channel]] = {}  # by worker
        self._output = Output()
        if workers.output == "file":
            self._output = OutputFiles()
        elif workers.output == "log":
            self._output = OutputLog(
                {worker: name_worker(worker, slots) for worker, slots in enumerate(recipe.slices)}
            )

    def launch(self, worker: int) -> tuple[Process, Channel]:
        with self._output.streams(worker) as streams:
            process, channel = self._launch(streams)
            self._latest[worker] = process, channel
        process.output_advice = partial(self._output.advice, worker)
        return process, channel

    def _launch(self, streams: Sequence[int]) -> tuple[Process, Channel]:
        try:
            return self._launcher.launch(streams)
        except ThreadsError as error:
            workers = self._recipe.config.workers
            if workers.start_method != "auto" or workers.preload:
                raise ThreadsError(
                    f"the fork server can't be used: {error}, and a fork of several threads is not safe; use "
                    'start_method="spawn", or remove the module that starts them from preload'
                ) from error
            logger.info('using start_method="spawn": %s', error)
            self._launcher = Spawner(self._recipe.config, self._recipe.interpreter)
            return self._launcher.launch(streams)

    def close(self) -> None:
        while self._latest:
            _, (process, channel) = self._latest.popitem()
            # All have ended, except for one of which Ctrl-C has kept the pool from learning. The traceback of
            # the error that broke the pool may refer to it.
            process.end()
            channel.close()
            process.wait(timeout=1)
        if isinstance(self._launcher, Forker):
            self._launcher.close()
        self._output.close()


class LocalProcesses(Backend):
    """Processes on this machine."""

    def num_workers(self, num_instances: int, timeout: float | None) -> int:
        cores = usable_cores()
        if cores >= _MANY_CORES and "core" in candidates():
            cores -= 1
        return min(num_instances, cores)

    def start(self, recipe: WorkerRecipe, *, learn_info: bool) -> WorkerGroup:
        return ProcessWorkers(recipe, LocalLauncher(recipe), learn_info=learn_info)


class ProcessWorkers(WorkerGroup):
    """The worker processes of one pool, and the parent's end of the dispatch to them."""

    _arrays: Arrays  # these two from `attach` to `close`
    _dispatch: ParentDispatch

    def __init__(self, recipe: WorkerRecipe, launcher: Launcher, *, learn_info: bool) -> None:
        """Starts the workers and waits until every env is built; raises as `wait`."""
        budget = Budget(recipe.config.restart, len(recipe.slices))
        self._slices = recipe.slices
        dispatch = recipe.config.settings.dispatch
        # Another interpreter may lack the native library.
        is_portable = dispatch == "auto" and not recipe.interpreter.is_native
        self._kind = choose_dispatch("portable" if is_portable else dispatch)
        self.supervisor: Supervisor = Supervisor(recipe, budget, launcher)
        self.restarts: Sequence[int] = budget.restarts
        self.incarnations: Sequence[int] = self.supervisor.incarnations
        self.last_errors: Sequence[JaxvecError | None] = self.supervisor.last_errors
        self.env_settings: EnvSettings | None = self.supervisor.env_settings
        try:
            self.description: Description = self.supervisor.build(learn_info=learn_info)
        except BaseException:
            self.close(timeout=0)
            raise
        default = PoolConfig()
        self._needs_processes = self.description.has_jax or any(
            getattr(recipe.config, name) != getattr(default, name) for name in _OPTIONS_OF_PROCESSES
        )

    def attach(self, layout: Layout, spec: PoolSpec) -> Arrays:
        # Workers that share cores do not spin: it would take time from a worker that steps.
        spin_ns = _SPIN_NS if len(self._slices) <= usable_cores() else 0
        # Only a worker that spins notices that others want its core.
        keeps_core = spin_ns > 0 and "home" in candidates()
        message = Attach(0, self._slices[0], layout, spec, self._kind, spin_ns, keeps_core, replaces=None)
        arrays = self.supervisor.attach(message)
        self._spec = spec
        self._objects_out = [leaf.path for leaf in spec.action_leaves if leaf.is_object]
        self._objects_in = [leaf.path for leaf in spec.timestep_leaves if leaf.is_object]
        self.takes_verbs: bool = not self._objects_in
        connections = self.supervisor.connections
        self._dispatch = parent_end(
            self._kind,
            Marks.of(arrays),
            slices=self._slices,
            channels=connections.channels,
            spin_ns=spin_ns,
        )
        self._arrays = arrays
        self._running = arrays["running",][:, 0].copy()  # at the last look; guarded by `polling`
        connections.notify_worker = self._dispatch.notify_worker
        return arrays

    def open_engine(self, config: EngineConfig) -> Engine:
        self._engine = open_engine(self._dispatch, self._spec, self._arrays, config=config)
        return self._engine

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        if verb is Verb.STEP and self._objects_out:
            self._put_objects(slots)
        self._dispatch.send(verb, slots)

    def any_resetting(self, slots: NDArray[Any]) -> bool:
        return self._dispatch.any_resetting(slots)

    def wait(self, slots: NDArray[Any], count: int, limits: WaitLimits) -> None:
        supervisor = self.supervisor
        dispatch = self._dispatch
        while True:
            seconds = min(supervisor.deadlines.time_left(limits), DEATH_CHECK_INTERVAL)
            if dispatch.wait(slots, count, seconds):
                break
            with supervisor.polling():
                self._note_progress()
                try:
                    received = supervisor.poll(dispatch.start_poll(slots, count, seconds), limits)
                except (EnvError, WorkerDiedError) as error:
                    supervisor.collect_errors(error, lambda: self._late(slots)[0], limits)
                    raise
                # The marks decide, not the wakes, because a worker may be stopped after it has set a mark and
                # before it wakes the parent. After a message, look again first: a recovery extends the time.
                timed_out = not received and supervisor.deadlines.time_left(limits) <= 0
                if timed_out and not dispatch.enough_completed(slots, count):
                    limits = self._time_out(slots, limits)
        if self._objects_in:
            self._get_objects(slots, limits.limit)

    def first_completed(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        return self._dispatch.first_completed(slots, count)

    def set_options(self, options: Options) -> None:
        # First, so that a worker that is replaced during the request also gets them.
        before = self.supervisor.options
        self.supervisor.options = options
        try:
            # Only workers with changed options: the others may be in the middle of a long step.
            self.request(
                Slice.set_options,
                lambda *slots: (
                    (select_options(options, *slots),) if options_changed(before, options, *slots) else None
                ),
            )
        except NotPicklableError:
            self.supervisor.options = before
            raise

    def request(
        self,
        method: Callable[..., Any],
        arguments: Arguments,
        *,
        limit: LimitName = "step",
        check: Check = lambda: None,
    ) -> list[Any]:
        return self.supervisor.request(method, arguments, limit, check)

    def start_trace(self, capacity: int) -> None:
        self.supervisor.trace = capacity  # first: replacements get it, too
        self.request(Slice.start_trace, lambda *_: (capacity,), limit="start")

    def stop_trace(self, *, hurry: bool) -> Sequence[Trace | JaxvecError | None]:
        self.supervisor.trace = None
        if hurry:
            return self.supervisor.collect_traces()
        return self.request(Slice.stop_trace, lambda *_: (), limit="start")

    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        try:
            if tell and hasattr(self, "_arrays") and hasattr(self, "_engine") and not self._needs_processes:
                self._compare_with_serial()
            self.supervisor.close(timeout, tell=tell)
        finally:
            if hasattr(self, "_arrays"):
                self._dispatch.close()
                del self._dispatch, self._arrays

    def processes(self) -> list[ProcessStats | None]:
        pids = (process.pid for process in self.supervisor.connections.processes)
        return [None if pid is None else read_process(pid) for pid in pids]

    def kill(self) -> None:
        self.supervisor.connections.kill()

    def _compare_with_serial(self) -> None:
        """Logs that the serial backend may be faster, if all envs take less time than their dispatch."""
        stats = self._arrays["stats",]
        num_steps = stats[:, STEPS].sum() // self._spec.num_envs
        envs_ns = stats[:, STEP_NS] + stats[:, RESET_NS]
        dispatch_ns = int(self._engine.steps_ns[0]) - envs_ns.max()
        if num_steps >= _MIN_STEPS and envs_ns.sum() < dispatch_ns:
            logger.info(
                'backend="serial" may be faster for these %d envs: in a step, all of them together take '
                "%.1f us, and their dispatch to workers takes %.1f us (means of %d steps)",
                self._spec.num_envs,
                envs_ns.sum() / num_steps / 1e3,
                dispatch_ns / num_steps / 1e3,
                num_steps,
            )

    def _note_progress(self) -> None:
        """Notes the workers that have come to another env, because `Timeouts` limit each env.

        It looks from time to time, so a worker that hangs may have the time between two looks in addition.
        """
        if (arrays := getattr(self, "_arrays", None)) is None:  # another thread has closed the pool
            return
        if self._spec.first_ready:  # each env has a time of completion, as the workers post each at once
            for worker, (first, stop) in enumerate(self._slices):
                last = int(arrays["completed_at",][first:stop].max())
                self.supervisor.deadlines.progress_at[worker] = last / 1e9
            return
        running = arrays["running",][:, 0]
        changed = np.flatnonzero(running != self._running).tolist()
        self.supervisor.deadlines.progress_at.update(dict.fromkeys(changed, time.monotonic()))
        self._running = running.copy()

    def _time_out(self, slots: NDArray[Any], limits: WaitLimits) -> WaitLimits:
        """Raises, or replaces the workers that delay `slots`, if one of their envs exceeds its limit.

        Returns the limits for the rest of the wait.
        """
        supervisor = self.supervisor
        working, unfinished = self._late(slots)
        late = [worker for worker in working if supervisor.deadlines.time_left(limits, worker) <= 0]
        if not late:
            times = [supervisor.deadlines.progress_at[worker] for worker in working]
            return replace(limits, start=min(times, default=limits.start), waited=0)
        # Slots of other workers may have been dispatched a moment ago, in first-ready mode.
        worker_of = supervisor.diagnosis.worker_of
        supervisor.time_out(limits, late, [slot for slot in unfinished if worker_of(slot) in late])
        return limits

    def _late(self, slots: NDArray[Any]) -> tuple[list[int], list[int]]:
        """Returns the workers with unfinished slots among `slots`, and all unfinished slots of the pool."""
        unfinished = self._dispatch.unfinished()
        late = set(map(self.supervisor.diagnosis.worker_of, np.intersect1d(unfinished, slots).tolist()))
        return sorted(late), unfinished.tolist()

    def _put_objects(self, slots: NDArray[Any]) -> None:
        """Sends the workers the action leaves that are Python objects, which are not in the segment."""
        columns = {path: self._arrays[path] for path in self._objects_out}
        arguments = for_slots(
            slots,
            lambda slots_here: (slots_here, {path: column[slots_here] for path, column in columns.items()}),
        )
        check_all(self.request(SlotAccess.put_objects, arguments, limit="start"))

    def _get_objects(self, slots: NDArray[Any], limit: LimitName) -> None:
        """Fetches the time step leaves that are Python objects, which are not in the segment."""
        arguments = for_slots(slots, lambda slots_here: (slots_here, self._objects_in))
        answers = check_all(self.request(SlotAccess.get_objects, arguments, limit=limit))
        for (first, stop), columns in zip(self._slices, answers, strict=True):
            for path, column in (columns or {}).items():
                self._arrays[path][slots[(first <= slots) & (slots < stop)]] = column
