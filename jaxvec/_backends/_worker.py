"""A worker. Attaches, builds its slice, serves until end of file.

It never imports jax. It is its own interpreter, or a fork of one that did nothing but import
(`_forkserver.py`), not a child of `multiprocessing`: so it neither runs the user's script again nor has JAX's
threads.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import monotonic_ns
from typing import Any

import numpy as np

from jaxvec import _pickling
from jaxvec._backends import _handoffs, _process_name
from jaxvec._backends._messages import Attach, Closed, Ready, Recover, Reply, Request, Setup, pack
from jaxvec._backends._run_limit import RunLimit
from jaxvec._handoff import _channel
from jaxvec._handoff._handoff import Work, WorkerHandoff
from jaxvec._handoff._move import Verb
from jaxvec._memory import _segment
from jaxvec._memory._marks import Marks
from jaxvec._memory._segment import Arrays
from jaxvec._slices import _envs, _failures, _forks
from jaxvec._slices._description import describe
from jaxvec._slices._env_states import StateFunctions
from jaxvec._slices._envs import Env, EnvFailure, EnvFn, Failing
from jaxvec._slices._parameters import Parameters
from jaxvec._slices._slice import Slice
from jaxvec._slices._spares import Spares
from jaxvec._stats import WAIT_NS
from jaxvec._tracing._recorder import span

_BY_NAME = (
    "It was sent by the name of its module, {!r}, which this worker can't import. If the module is no file "
    "on sys.path, as a script under runpy.run_path(run_name=...), define it in one that is, or call "
    "cloudpickle.register_pickle_by_value(module) before it is sent."
)


def main(lifeline: int, control: int) -> None:
    """Works as an interpreter of its own, which holds the lifeline."""
    work(_channel.adopt(control))


def work(channel: _channel.Channel) -> None:
    """Does what comes on the control socket, until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    _forks.watch()
    try:
        setup: Setup = channel.receive_message()
        if setup.core is not None:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[setup.core % len(cores)]})
        _adopt_paths(setup)
        with _reporting(channel):
            _init(setup)
            env_fns, functions = _load(setup)
            slice_config = replace(setup.slice_config, state_functions=functions)
            _process_name.show(setup.first, len(env_fns) * (slice_config.size or 1))
            envs, spares = _envs.build(env_fns, setup.first, setup.slice_config.size), Spares()
            try:
                with _reporting(channel):
                    spares.build(setup.slice_config.spare_envs, env_fns, setup.first)
                    channel.send(Ready(_describe(envs, setup)))
                    _serve(channel, slice_config.slice_of(envs, env_fns, spares))
            finally:
                tell = partial(_tell_closed, channel)
                _envs.close([*envs, *spares.envs], setup.first, setup.slice_config.size, tell)
    except EOFError:
        pass  # the parent closed the pool


def _serve(channel: _channel.Channel, make_slice: Callable[..., Slice]) -> None:
    """Serves until end of file, with the slice that `make_slice` makes of what the parent says."""
    attach: Attach = channel.receive_message()  # others may send envs to us before we are ready
    segment = channel.descriptors.pop()
    arrays = _segment.attach(segment, attach.layout)
    marks, limit = Marks.of(arrays), attach.max_running
    turn = nullcontext() if limit is None else RunLimit(segment, limit, marks.running[attach.worker, 1:2])
    os.close(segment)
    replaces = attach.replaces
    env_slice = make_slice(
        first=attach.slots[0],
        worker=attach.worker,
        spec=attach.spec,
        arrays=arrays,
        **({} if replaces is None else {"replaces": replaces.objects}),
    )
    if replaces is not None:
        env_slice.set_options(replaces.options)
        for slot in replaces.parameters:
            parameters = _unpack(slot, replaces.parameters[slot])
            assert parameters is not None
            env_slice.restore(slot, parameters)
        if replaces.trace is not None:
            env_slice.start_trace(replaces.trace)
    try:
        _work(env_slice, attach, marks, arrays, channel, turn)
    finally:
        env_slice.close()


def _work(
    env_slice: Slice,
    attach: Attach,
    marks: Marks,
    arrays: Arrays,
    channel: _channel.Channel,
    turn: AbstractContextManager[None],
) -> None:
    """Serves with a slice that is ready."""
    replaces = attach.replaces
    end = _handoffs.worker_end(
        attach.handoff,
        marks,
        worker=attach.worker,
        slots=attach.slots,
        channel=channel,
        spin_ns=attach.spin_ns,
        notices=0 if replaces is None else replaces.notices,
    )
    channel.send(Reply())
    stats = arrays["stats",][attach.worker].data
    done = end.post_some if attach.spec.first_ready else None  # somebody may wait for any of them
    while True:
        while env_slice.can_prepare and end.idle():
            with turn:
                env_slice.prepare()
        began = monotonic_ns()
        message = end.receive()
        stats[WAIT_NS] += monotonic_ns() - began
        recorder = env_slice.recorder
        if recorder is not None:
            recorder.add("wait", began)
        if not isinstance(message, Work):
            runs = turn if message.name == "simulate_states" else nullcontext()
            with span(recorder, f"answer {message.name}"), runs:
                channel.send(pack(_answer(env_slice, message)))
            continue
        if message.verb in (Verb.SAVE, Verb.RESTORE):
            attempt = env_slice.try_save if message.verb is Verb.SAVE else env_slice.try_restore
            with span(recorder, f"answer {message.verb.word}"):
                attempt(message.slots)
            end.post(message.slots)
            continue
        move = env_slice.step if message.verb is Verb.STEP else env_slice.reset
        try:
            with turn:
                move(message.slots, done)
            if done is None:
                end.post(message.slots)
        except EnvFailure as failure:
            if done is None:
                end.post(np.array(failure.completed, np.int64))
            _recover(channel, end, env_slice, failure, turn)  # and what is left is found again


def _recover(
    channel: _channel.Channel,
    end: WorkerHandoff,
    env_slice: Slice,
    failure: EnvFailure,
    turn: AbstractContextManager[None],
) -> None:
    """Reports a failure until the env is ready again; the parent may end us instead."""
    while True:
        channel.send(_failures.report(failure))
        end.notify_parent()
        while not isinstance(message := end.receive_message(), Recover):  # a request was under way to us
            channel.send(pack(_answer(env_slice, message)))
        try:
            parameters = _unpack(failure.env_id, message.parameters)
            with turn:
                env_slice.recover(failure, rebuild=message.rebuild, parameters=parameters)
        except EnvFailure as another:
            failure = another
        else:
            return


def _tell_closed(channel: _channel.Channel, env_ids: range) -> None:
    with suppress(EOFError):  # the parent is gone
        channel.send(Closed(env_ids))


@contextmanager
def _reporting(channel: _channel.Channel) -> Generator[None]:
    try:
        yield
    except EnvFailure as failure:
        channel.send(_failures.report(failure))


def _adopt_paths(setup: Setup) -> None:
    """Imports from where the parent imports, whatever we had to be started with."""
    sys.path[:] = setup.sys_path
    if setup.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = setup.python_path


def _init(setup: Setup) -> None:
    """Runs what the user wants to be run before the envs are even unpickled."""
    if setup.worker_init is not None:
        with Failing(setup.first, "worker_init"):
            _open(setup.worker_init)()


def _load(setup: Setup) -> tuple[Sequence[EnvFn], StateFunctions | None]:
    with Failing(setup.first, "constructor"):
        return _open(setup.env_fns)


def _unpack(slot: int, sent: Parameters | None) -> Parameters | None:
    if sent is None:
        return None
    with Failing(slot, "set_attr"):
        return replace(sent, attributes={name: _open(value) for name, value in sent.attributes.items()})


def _open(sent: bytes) -> Any:
    """Unpickles what came from the user; says more if its module is not here."""
    try:
        return pickle.loads(sent)
    except ModuleNotFoundError as error:
        error.add_note(_BY_NAME.format(error.name))
        raise


def _describe(envs: list[Env], setup: Setup) -> bytes:
    description = describe(
        envs, first=setup.first, learn_info=setup.learn_info, equal_spaces=setup.slice_config.equal_spaces
    )
    with Failing(setup.first, "constructor"):
        return _pickling.dumps(description)


def _answer(env_slice: Slice, request: Request) -> Reply:
    """Serves a request; a failure is an answer, too."""
    try:
        with Failing(env_slice.first, request.name):
            args = _open(request.args)
        result = getattr(env_slice, request.name)(*args)
        with Failing(env_slice.first, request.name):
            return Reply(_pickling.dumps(result))
    except EnvFailure as failure:
        return Reply(failure=_failures.report(failure))
