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
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import cloudpickle
import numpy as np

from jaxvec._backends import _handoffs
from jaxvec._backends._messages import Attach, Ready, Recover, Reply, Request, Setup
from jaxvec._handoff import _channel
from jaxvec._handoff._handoff import Work, WorkerHandoff
from jaxvec._handoff._move import Verb
from jaxvec._memory import _segment
from jaxvec._memory._marks import Marks
from jaxvec._slices import _envs, _failures, _forks
from jaxvec._slices._description import describe
from jaxvec._slices._envs import Env, EnvFailure, EnvFn
from jaxvec._slices._slice import Slice
from jaxvec._slices._spares import Spares
from jaxvec._stats import WAIT_NS
from jaxvec._tracing._recorder import span

_BY_NAME = (
    "The env's constructor was sent by the name of its module, {!r}, which this worker can't import. If the "
    "module is no file on sys.path, as a script under runpy.run_path(run_name=...), define the env in "
    "one that is, or call cloudpickle.register_pickle_by_value(module) before make."
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
        _adopt_paths(setup)
        with _reporting(channel):
            env_fns = _load(setup)
            envs, spares = _envs.build(env_fns, setup.first, setup.kind.size), Spares()
            try:
                with _reporting(channel):
                    spares.build(setup.kind.spare_envs, env_fns, setup.first)
                    channel.send(Ready(_describe(envs, setup)))
                    _serve(channel, setup.kind.slice_of(envs, env_fns, spares))
            finally:
                _envs.close([*envs, *spares.envs], setup.first)
    except EOFError:
        pass  # the parent closed the pool


def _serve(channel: _channel.Channel, make_slice: Callable[..., Slice]) -> None:
    """Serves until end of file, with the slice that `make_slice` makes of what the parent says."""
    attach: Attach = channel.receive_message()  # others may send envs to us before we are ready
    segment = channel.descriptors.pop()
    arrays = _segment.attach(segment, attach.layout)
    os.close(segment)
    replaces = attach.replaces
    share = attach.layout.slices[attach.worker]
    env_slice = make_slice(
        first=share[0],
        worker=attach.worker,
        spec=attach.spec,
        arrays=arrays,
        autoreset_mode=attach.autoreset_mode,
        **({} if replaces is None else {"replaces": replaces.objects}),
    )
    if replaces is not None:
        env_slice.set_options(replaces.options)
        if replaces.trace is not None:
            env_slice.start_trace(replaces.trace)
    end = _handoffs.worker_end(
        attach.handoff,
        Marks.of(arrays),
        worker=attach.worker,
        share=share,
        channel=channel,
        spin_ns=attach.spin_ns,
        knocks=0 if replaces is None else replaces.knocks,
    )
    channel.send(Reply())
    stats = arrays["stats",][attach.worker].data
    while True:
        while env_slice.can_prepare and end.idle():
            env_slice.prepare()
        began = monotonic_ns()
        message = end.receive()
        stats[WAIT_NS] += monotonic_ns() - began
        recorder = env_slice.recorder
        if recorder is not None:
            recorder.add("wait", began)
        if not isinstance(message, Work):
            with span(recorder, f"answer {message.name}"):
                channel.send(_answer(env_slice, message))
            continue
        move = env_slice.step if message.verb is Verb.STEP else env_slice.reset
        try:
            if attach.spec.first_ready:  # somebody may wait for any of them
                move(message.slots, end.post_some)
            else:
                move(message.slots)
                end.post(message.slots)
        except EnvFailure as failure:
            if not attach.spec.first_ready:
                end.post(np.array(failure.done, np.int64))
            _recover(channel, end, env_slice, failure)  # and what is left is found again


def _recover(channel: _channel.Channel, end: WorkerHandoff, env_slice: Slice, failure: EnvFailure) -> None:
    """Reports a failure until the env is ready again; or to the end, if that is the parent's verdict."""
    while True:
        channel.send(_failures.report(failure))
        end.alarm()
        while not isinstance(verdict := end.verdict(), Recover):  # a request was under way to us
            channel.send(_answer(env_slice, verdict))
        try:
            env_slice.recover(failure, rebuild=verdict.rebuild)
        except EnvFailure as another:
            failure = another
        else:
            return


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


def _load(setup: Setup) -> Sequence[EnvFn]:
    try:
        return pickle.loads(setup.env_fns)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError):
            error.add_note(_BY_NAME.format(error.name))
        raise EnvFailure(setup.first, "constructor") from error


def _describe(envs: list[Env], setup: Setup) -> bytes:
    description = describe(
        envs, first=setup.first, learn_info=setup.learn_info, equal_spaces=setup.kind.equal_spaces
    )
    try:
        return cloudpickle.dumps(description)
    except Exception as error:
        raise EnvFailure(setup.first, "constructor") from error


def _answer(env_slice: Slice, request: Request) -> Reply:
    """Serves a request; a failure is an answer, too."""
    try:
        attribute = getattr(env_slice, request.name)
        result: Any = attribute(*request.args) if callable(attribute) else attribute
        try:
            return Reply(cloudpickle.dumps(result))
        except Exception as error:
            raise EnvFailure(env_slice.first, request.name) from error
    except EnvFailure as failure:
        return Reply(failure=_failures.report(failure))
