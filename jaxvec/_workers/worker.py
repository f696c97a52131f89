"""A worker process: its start, and the loop that steps its envs.

A worker receives `Setup`, builds its envs and sends `Built` after each. It replies `Ready`, receives `Attach`
with the segment, and then serves until end of file: `Work` from the dispatch, and `Request` from the control
socket.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._engine.channel import Channel, adopt_channel
from jaxvec._engine.choice import worker_end
from jaxvec._engine.dispatch import Work, WorkerDispatch
from jaxvec._engine.move import Verb
from jaxvec._envs import constructors, failures
from jaxvec._envs.constructors import describe
from jaxvec._envs.envs import EnvErrorContext, EnvFailure, build_env, build_spares, close_envs, watch_forks
from jaxvec._envs.failures import Report
from jaxvec._envs.slice import Retirement, Slice, SlotSettings
from jaxvec._memory.large_buffers import map_buffers
from jaxvec._memory.segment import Marks, attach_segment
from jaxvec._stats import PID, RECYCLED, REPLACED, WAIT_NS
from jaxvec._tracing import span
from jaxvec._util import add_note, dumps
from jaxvec._workers import stacks
from jaxvec._workers.output import tag_lines
from jaxvec._workers.protocol import (
    Attach,
    Built,
    Closed,
    Ready,
    Reply,
    Request,
    Retired,
    Setup,
    WarningFilter,
)

# A worker is an interpreter of its own (spawn.py), or a fork of an idle one (forkserver.py). It is not a
# child of `multiprocessing`, which would run the user's script again or fork under JAX's threads. It never
# imports JAX.


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> Any:
    """Replaces `sys.breakpointhook`, unless `PYTHONBREAKPOINT` names another debugger."""
    if os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace"):
        raise RuntimeError(
            "breakpoint() can't prompt in a worker process, which has no terminal. Make the pool with "
            'backend="serial": then the envs run in the program itself, where every debugger works'
        )
    return sys.__breakpointhook__(*args, **kwargs)


def main(lifeline: int, control: int) -> None:
    """Runs a worker that is an interpreter of its own, and that holds the lifeline."""
    run_worker(adopt_channel(control))


def run_worker(channel: Channel) -> None:
    """Builds the envs and serves until the end of the control socket."""
    atexit.register(_leave, channel)  # runs last
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # for the processes of envs, as in the fork server
    watch_forks()
    with suppress(EOFError):  # the parent closed the pool
        setup: Setup = channel.receive_message()
        config = setup.config
        if config.workers.pin:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[setup.worker % len(cores)]})
        sys.argv[:] = setup.argv
        multiprocessing.current_process().authkey = setup.authkey
        _filter_warnings(setup.warning_filters)
        # The path of the parent, in place of the one that starts an interpreter.
        sys.path[:] = [*(() if setup.interpreter.is_own else sys.path), *setup.sys_path]
        if setup.python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = setup.python_path
        sys.breakpointhook = _refuse_breakpoint
        running: list[NDArray[Any]] = []  # the slot that runs now plus 1, `[1]`, once the segment is mapped
        if config.workers.output == "log":
            tag_lines(lambda: int(running[0][0]) - 1 if running else -1)
        with _reporting(channel):
            if setup.init is not None:
                with EnvErrorContext(setup.first, "worker_init"):
                    _unpickle(setup.init)()
            with EnvErrorContext(setup.first, "constructor"):
                large = map_buffers(channel.descriptors.pop(), setup.large) if setup.large else ()
                env_fns, make_slice, on_slice = _unpickle(setup.env_fns, large)
                constructors.put_specs(_unpickle(setup.specs))
            size = config.envs_per_instance
            last = setup.first + len(env_fns) * (size or 1) - 1
            stacks.publish(setup.worker, setup.first, last)
            ids = f"{setup.first}-{last}" if last > setup.first else f"{last}"
            with suppress(OSError):  # not Linux, or no /proc; the name is only a convenience for `ps`
                Path("/proc/self/comm").write_text(f"jaxvec {ids}"[:15])  # the kernel's limit
            total = len(env_fns) * (size or 1) + setup.spares

            def report_built(count: int) -> None:
                channel.send(pickle.dumps(Built(count, total)))  # faster than by cloudpickle

            envs = build_env(env_fns, setup.first, size, report=report_built)
            spares = list[Any]()

            def report_closed(env_ids: range) -> None:
                with suppress(EOFError):  # the parent has ended
                    channel.send(Closed(env_ids))

            retires = False
            try:
                with _reporting(channel):
                    build_spares(spares, setup.spares, env_fns, setup.first, envs, report=report_built)
                    description = describe(
                        envs, first=setup.first, learn_info=setup.learn_info, equal_spaces=setup.equal_spaces
                    )
                    with EnvErrorContext(setup.first, "constructor"):
                        ready = Ready(dumps(setup.interpreter.to_plain(description)))
                    channel.send(ready)
                    of_envs = {"config": config, "spares": spares, "on_slice": on_slice}
                    retires = _serve(channel, partial(make_slice, envs, env_fns, **of_envs), running)
            finally:
                with _reporting(channel):
                    close_envs([*envs, *spares], setup.first, size, report_closed)
                if retires:  # last, since the parent then ends this process
                    channel.send(Retired())


def _leave(channel: Channel) -> None:
    if channel.has_ended():  # the program has, too, so only this process can end what its envs have started
        os.killpg(0, signal.SIGKILL)
    # The parent takes end of file as the end of the worker, so the interpreter does not close the socket.
    channel.leave_open()


def _filter_warnings(filters: Sequence[WarningFilter]) -> None:
    """Replaces the filters of warnings, except those for categories of modules that are not imported here."""
    warnings.resetwarnings()
    for action, message, module_of_category, name, module, line in filters:
        category = getattr(sys.modules.get(module_of_category), name, None)
        if category is not None:
            warnings.filters.append((action, message, category, module, line))  # pyright: ignore


def _serve(channel: Channel, make_slice: Callable[..., Slice], slots_running: list[NDArray[Any]]) -> bool:
    """Performs work and answers requests until end of file, with a replaced worker's settings if any.

    Returns True if the process is to be replaced when its envs are closed.
    """
    attach: Attach = channel.receive_message()  # past wakes: slots may be dispatched before it serves
    segment = channel.descriptors.pop()
    arrays = attach_segment(segment, attach.layout)
    marks = Marks.of(arrays)
    slots_running.append(marks.running[attach.worker, :1])
    os.close(segment)
    replaces = attach.replaces
    with EnvErrorContext(attach.slots[0], "constructor"):
        env_slice = make_slice(
            first=attach.slots[0],
            worker=attach.worker,
            spec=attach.spec,
            arrays=arrays,
            **({} if replaces is None else {"replaces": replaces.objects}),
        )
    if replaces is not None:
        env_slice.set_options(replaces.options)
        for slot, settings in replaces.settings.items():
            env_slice.reapply_settings(slot, _unpickle_settings(slot, settings))
        if replaces.trace is not None:
            env_slice.start_trace(replaces.trace)
    with closing(env_slice):
        end = worker_end(
            attach.dispatch,
            marks,
            worker=attach.worker,
            slots=attach.slots,
            channel=channel,
            spin_ns=attach.spin_ns,
            notices=0 if replaces is None else replaces.notices,
            keeps_core=attach.keeps_core,
        )
        stats = arrays["stats",][attach.worker].data
        stats[PID] = os.getpid()
        if replaces is not None:
            stats[REPLACED] += 1
        channel.send(Reply(dumps(None)))
        moves = {Verb.STEP: env_slice.step, Verb.RESET: env_slice.reset}
        prepare = env_slice.prepare
        find_retirement = env_slice.find_retirement
        # In first-ready mode, a receiver may wait for any single slot, so each is posted at once.
        done = end.post_some if attach.spec.first_ready else None
        while True:
            while prepare is not None and end.idle() and prepare():
                pass
            start = monotonic_ns()
            if find_retirement is not None and (retirement := find_retirement()) is not None:
                _report(channel, end, env_slice, retirement)  # after the answer, no request is pending
                stats[RECYCLED] += 1
                return True
            message = end.receive()
            stats[WAIT_NS] += monotonic_ns() - start
            recorder = env_slice.recorder
            if recorder is not None:
                recorder.add("wait", start)
            if not isinstance(message, Work):
                with span(recorder, f"answer {message.method.name}"):
                    channel.send(pickle.dumps(_answer(env_slice, message)))
                continue
            move = moves.get(message.verb)
            if move is None:
                with span(recorder, message.verb.word):
                    env_slice.perform(message.verb, message.slots)
                end.post(message.slots)
                continue
            try:
                move(message.slots, done)
                if done is None:
                    end.post(message.slots)
            except EnvFailure as failure:
                if done is None:
                    end.post(np.array(failure.completed, np.int64))
                # The marks of the other slots are unchanged, so the next `receive` returns them again.
                _recover(channel, end, env_slice, failure)


def _report(channel: Channel, end: WorkerDispatch, env_slice: Slice, report: Report | Retirement) -> Any:
    channel.send(report)
    end.notify_parent()
    # Requests may have been sent before the parent read the report.
    while isinstance(message := end.receive_message(), Request):
        channel.send(pickle.dumps(_answer(env_slice, message)))
    return message


def _recover(channel: Channel, end: WorkerDispatch, env_slice: Slice, failure: EnvFailure) -> None:
    """Reports a failure until the env is ready again. The parent may kill this process instead."""
    while True:
        message = _report(channel, end, env_slice, failures.report(failure))
        try:
            settings = message.settings and _unpickle_settings(failure.env_id, message.settings)
            env_slice.recover(failure, rebuild=message.rebuild, settings=settings)
            return
        except EnvFailure as another:
            failure = another


@contextmanager
def _reporting(channel: Channel) -> Generator[None]:
    try:
        yield
    except EnvFailure as failure:
        channel.send(failures.report(failure))


def _unpickle_settings(slot: int, settings: SlotSettings) -> SlotSettings:
    with EnvErrorContext(slot, "set_attr"):
        attributes = {name: _unpickle(value) for name, value in settings.attributes.items()}
        return replace(settings, attributes=attributes)


def _unpickle(data: bytes, buffers: Sequence[memoryview] = ()) -> Any:
    """Unpickles objects of the user, and adds a hint to the error if their module can't be imported."""
    try:
        return pickle.loads(data, buffers=buffers)
    except ModuleNotFoundError as error:
        add_note(
            error,
            f"The object was pickled by reference to module {error.name!r}, which this worker can't import. "
            "Move its definition to a module on sys.path, or call "
            "cloudpickle.register_pickle_by_value(module) first. A script that runs under "
            "runpy.run_path(run_name=...) is not on sys.path.",
        )
        raise


def _answer(env_slice: Slice, request: Request) -> Reply:
    try:
        name = request.method.name
        with EnvErrorContext(env_slice.first, name):
            args = _unpickle(request.args)
        result = env_slice.answer(request.method, *args)
        with EnvErrorContext(env_slice.first, name):
            return Reply(dumps(result))
    except EnvFailure as failure:
        return Reply(failure=failures.report(failure))
