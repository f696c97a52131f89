"""A worker process: the messages that it receives, and its loop."""

from __future__ import annotations

import fcntl
import itertools
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._arguments import Options
from jaxvec._config import PoolConfig
from jaxvec._dispatch.channel import Channel, adopt_channel
from jaxvec._dispatch.dispatch import Work, WorkerDispatch
from jaxvec._dispatch.move import Verb
from jaxvec._envs import constructors, failures
from jaxvec._envs.constructors import describe
from jaxvec._envs.env_states import StateFunctions
from jaxvec._envs.envs import Env, EnvFailure, EnvFn, Failing, build_env, close_envs, watch_forks
from jaxvec._envs.failures import Report
from jaxvec._envs.slice import RequestName, Slice, SlotSettings
from jaxvec._envs.slot_envs import Spares
from jaxvec._memory.segment import Arrays, Layout, Marks, attach_segment
from jaxvec._spec import KeyPath, PoolSpec
from jaxvec._stats import WAIT_NS
from jaxvec._tracing import span
from jaxvec._util import dumps
from jaxvec._workers.base import worker_end

# ----------------------------------------------------------------------------------------------------------
# Names a worker's process, so that `ps` tells whose it is.
# ----------------------------------------------------------------------------------------------------------

_LONGEST = 15  # characters, of which the kernel keeps no more


def show_process_name(first: int, count: int) -> None:
    """Names this process `jaxvec 4-7`, after its envs, where the system lets it; its command line stays.

    Args:
        first: id of its first env.
        count: how many it has.
    """
    envs = f"{first}-{first + count - 1}" if count > 1 else f"{first}"
    with suppress(OSError):  # not Linux, or no /proc: a name is a convenience
        Path("/proc/self/comm").write_text(f"jaxvec {envs}"[:_LONGEST])


# ----------------------------------------------------------------------------------------------------------
# `RunLimit`: at most so many of a pool's workers run their envs at once; the others wait for their turn.
#
# A turn is a lock on one byte of the segment, which the kernel gives back whatever becomes of its holder.
# Only who holds the queue's lock looks which turn is free; the others sleep until the queue is theirs.
# ----------------------------------------------------------------------------------------------------------

_LOOK_AGAIN = 0.0005  # seconds; who runs for long enough to be limited is not held up by that


class RunLimit:
    """A worker's view; a context manager in which its envs run."""

    def __init__(self, segment: int, turns: int, waiting: NDArray[Any]) -> None:
        """Keeps a descriptor of its own.

        Args:
            segment: the descriptor of the memory that all workers share.
            turns: how many may run.
            waiting: our word that says that we wait for our turn.
        """
        self._fd = os.dup(segment)
        self._turns, self._queue = range(turns), turns
        self._waiting = waiting
        waiting[...] = 0  # a worker that is gone may have left it

    def __enter__(self) -> None:
        self._waiting[...] = 1
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, self._queue)
        self._turn = next(turn for turn in itertools.cycle(self._turns) if self._take(turn))
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._queue)
        self._waiting[...] = 0

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._turn)

    def _take(self, turn: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, turn)
        except BlockingIOError:
            if turn == self._turns[-1]:
                time.sleep(_LOOK_AGAIN)
            return False
        return True


# ----------------------------------------------------------------------------------------------------------
# What the workers of a pool are made of.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerRecipe:
    """What a worker is made of, now and whenever it has to be made again.

    Attributes:
        env_fns: of all envs, or of all batches of envs.
        slices: `(first, stop)` of each worker's envs.
        config: options of the pool.
        equal_spaces: whether observation spaces have to be equal, and not only alike.
    """

    env_fns: Sequence[EnvFn]
    slices: tuple[tuple[int, int], ...]
    config: PoolConfig
    equal_spaces: bool

    def env_fns_of(self, worker: int) -> Sequence[EnvFn]:
        """Returns those of one worker."""
        first, stop = (place // (self.config.envs_per_instance or 1) for place in self.slices[worker])
        return self.env_fns[first:stop]


# ----------------------------------------------------------------------------------------------------------
# The messages on a worker's control socket, in the order in which they are first sent.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Parent: build these envs."""

    sys_path: list[str]
    python_path: str | None
    worker: int
    first: int  # env id of the slice's first env
    init: bytes | None  # cloudpickled, to be opened only once sys.path is set, and run
    env_fns: bytes  # and functions for states, cloudpickled, to be opened only after that
    config: PoolConfig
    equal_spaces: bool
    learn_info: bool


@dataclass(frozen=True)
class Ready:
    """Worker: the envs are built; a cloudpickled `Description`."""

    description: bytes


@dataclass(frozen=True)
class Replacement:
    """What a worker that is gone was told since it attached."""

    options: Options  # of its envs' resets
    trace: int | None  # how many spans to record, if any
    notices: int  # of messages on its control socket
    objects: dict[
        KeyPath, NDArray[Any]
    ]  # that the program had from it last, of leaves that are not in the segment
    settings: dict[int, SlotSettings]  # of its envs, those that have some


@dataclass(frozen=True)
class Attach:
    """Parent: map the segment, whose descriptor comes with this message, and begin to serve."""

    worker: int
    slots: tuple[int, int]  # first and stop
    layout: Layout
    spec: PoolSpec
    dispatch: str  # "native" or "portable"
    spin_ns: int
    replaces: Replacement | None  # what to know in the place of a worker that is gone


@dataclass(frozen=True)
class Recover:
    """Parent: go on after the failure that you reported; it was the pool's last otherwise."""

    rebuild: bool  # the env
    settings: SlotSettings | None  # of the new env


@dataclass(frozen=True)
class Closed:
    """Worker, after the end of file: these envs are closed."""

    env_ids: range


@dataclass(frozen=True)
class Request:
    """Parent: call this method of your `Slice`."""

    name: RequestName
    args: bytes  # a cloudpickled tuple; what is wrong with it then is the answer, and no end of the worker


@dataclass(frozen=True)
class Reply:
    """Worker: a `Request`'s cloudpickled result, or why there is none."""

    result: bytes = b""
    failure: Report | None = None


def pack(message: Request | Reply) -> bytes:
    """Pickles a message that has nothing of the user's but bytes: it takes a third of cloudpickle's time."""
    return pickle.dumps(message)


def pickle_given(value: Any, refuse: Callable[[Exception], TypeError]) -> bytes:
    """Pickles what the user gave, before a worker is sent it; raises what `refuse` makes of an error."""
    try:
        pickled: bytes = dumps(value)
    except MemoryError:
        raise
    except Exception as error:
        raise refuse(error) from error
    return pickled


# ----------------------------------------------------------------------------------------------------------
# Makes the message that tells a worker what to build.
# ----------------------------------------------------------------------------------------------------------


def make_setup(recipe: WorkerRecipe, worker: int, *, learn_info: bool) -> Setup:
    """Makes the first message to a worker; raises `TypeError` if a function of the user can't be pickled."""
    first, _ = recipe.slices[worker]
    config = recipe.config
    init = config.workers.init
    return Setup(
        sys_path=list(sys.path),
        python_path=os.environ.get("PYTHONPATH"),
        worker=worker,
        first=first,
        init=init and _pickle(constructors.of_worker(init, worker), "Workers(init=...)"),
        env_fns=_pickle(
            (list(recipe.env_fns_of(worker)), config.states.functions),
            f"the constructor of env {first}",
            ', or use backend="serial"',
        ),
        config=config.for_workers(),
        equal_spaces=recipe.equal_spaces,
        learn_info=learn_info and first == 0,
    )


def _pickle(function: Any, name: str, otherwise: str = "") -> bytes:
    return pickle_given(
        function,
        lambda error: TypeError(
            f"{name} can't be pickled, so it can't be sent to a worker: {error}; make what it needs inside it"
            + otherwise
        ),
    )


# ----------------------------------------------------------------------------------------------------------
# A worker. Attaches, builds its slice, serves until end of file.
#
# It never imports jax. It is its own interpreter, or a fork of one that did nothing but import
# (`forkserver.py`), not a child of `multiprocessing`: so it neither runs the user's script again nor has
# JAX's threads.
# ----------------------------------------------------------------------------------------------------------

_BY_NAME = (
    "It was sent by the name of its module, {!r}, which this worker can't import. If the module is no file "
    "on sys.path, as a script under runpy.run_path(run_name=...), define it in one that is, or call "
    "cloudpickle.register_pickle_by_value(module) before it is sent."
)


def main(lifeline: int, control: int) -> None:
    """Works as an interpreter of its own, which holds the lifeline."""
    work(adopt_channel(control))


def work(channel: Channel) -> None:
    """Does what comes on the control socket, until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    watch_forks()
    try:
        setup: Setup = channel.receive_message()
        config = setup.config
        if config.workers.pin:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[setup.worker % len(cores)]})
        _adopt_paths(setup)
        with _reporting(channel):
            _init(setup)
            env_fns, functions = _load(setup)
            config = replace(config, states=replace(config.states, functions=functions))
            size = config.envs_per_instance
            show_process_name(setup.first, len(env_fns) * (size or 1))
            envs, spares = build_env(env_fns, setup.first, size), Spares()
            try:
                with _reporting(channel):
                    spares.build(config.spare_envs, env_fns, setup.first)
                    channel.send(Ready(_describe(envs, setup)))
                    make_slice = constructors.slice_of(config, envs, env_fns, spares)
                    _serve(channel, make_slice, config.workers.max_running)
            finally:
                tell = partial(_tell_closed, channel)
                close_envs([*envs, *spares.envs], setup.first, size, tell)
    except EOFError:
        pass  # the parent closed the pool


def _serve(channel: Channel, make_slice: Callable[..., Slice], max_running: int | None) -> None:
    """Serves until end of file, with the slice that `make_slice` makes of what the parent says."""
    attach: Attach = channel.receive_message()  # others may send envs to us before we are ready
    segment = channel.descriptors.pop()
    arrays = attach_segment(segment, attach.layout)
    marks = Marks.of(arrays)
    waits = marks.running[attach.worker, 1:2]
    turn = nullcontext() if max_running is None else RunLimit(segment, max_running, waits)
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
        for slot in replaces.settings:
            settings = _unpack(slot, replaces.settings[slot])
            assert settings is not None
            env_slice.reapply_settings(slot, settings)
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
    channel: Channel,
    turn: AbstractContextManager[None],
) -> None:
    """Serves with a slice that is ready."""
    replaces = attach.replaces
    end = worker_end(
        attach.dispatch,
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
    channel: Channel,
    end: WorkerDispatch,
    env_slice: Slice,
    failure: EnvFailure,
    turn: AbstractContextManager[None],
) -> None:
    """Reports a failure until the env is ready again; the parent may end us instead."""
    while True:
        channel.send(failures.report(failure))
        end.notify_parent()
        while not isinstance(message := end.receive_message(), Recover):  # a request was under way to us
            channel.send(pack(_answer(env_slice, message)))
        try:
            settings = _unpack(failure.env_id, message.settings)
            with turn:
                env_slice.recover(failure, rebuild=message.rebuild, settings=settings)
        except EnvFailure as another:
            failure = another
        else:
            return


def _tell_closed(channel: Channel, env_ids: range) -> None:
    with suppress(EOFError):  # the parent is gone
        channel.send(Closed(env_ids))


@contextmanager
def _reporting(channel: Channel) -> Generator[None]:
    try:
        yield
    except EnvFailure as failure:
        channel.send(failures.report(failure))


def _adopt_paths(setup: Setup) -> None:
    """Imports from where the parent imports, whatever we had to be started with."""
    sys.path[:] = setup.sys_path
    if setup.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = setup.python_path


def _init(setup: Setup) -> None:
    """Runs what the user wants to be run before the envs are even unpickled."""
    if setup.init is not None:
        with Failing(setup.first, "worker_init"):
            _open(setup.init)()


def _load(setup: Setup) -> tuple[Sequence[EnvFn], StateFunctions | None]:
    with Failing(setup.first, "constructor"):
        return _open(setup.env_fns)


def _unpack(slot: int, sent: SlotSettings | None) -> SlotSettings | None:
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
        envs, first=setup.first, learn_info=setup.learn_info, equal_spaces=setup.equal_spaces
    )
    with Failing(setup.first, "constructor"):
        return dumps(description)


def _answer(env_slice: Slice, request: Request) -> Reply:
    """Serves a request; a failure is an answer, too."""
    try:
        with Failing(env_slice.first, request.name):
            args = _open(request.args)
        result = getattr(env_slice, request.name)(*args)
        with Failing(env_slice.first, request.name):
            return Reply(dumps(result))
    except EnvFailure as failure:
        return Reply(failure=failures.report(failure))
