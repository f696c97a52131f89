"""The serial backend: all envs of a pool in this process, as one slice.

It is for debugging, and for a few envs with steps that take less time than a dispatch. The C++ engine
calls `send` for a step, with the GIL. The backend can't interrupt an env, so timeouts do not apply, except to
programs that step envs which call JAX.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxvec._arguments import Options
from jaxvec._engine.choice import choose_dispatch, open_engine, parent_end
from jaxvec._engine.engine import Engine, EngineConfig
from jaxvec._engine.move import Verb
from jaxvec._envs import failures
from jaxvec._envs.constructors import describe
from jaxvec._envs.copies import copied
from jaxvec._envs.envs import EnvErrorContext, EnvFailure, build_env, close_envs, layers_of
from jaxvec._envs.slice import Arguments, EnvSettings, MethodName
from jaxvec._errors import EnvError, EnvStateError, EnvTimeoutError, SpaceMismatchError
from jaxvec._memory.segment import Arrays, Layout, Marks, private_segment
from jaxvec._native import interrupts
from jaxvec._options import LimitName, PoolConfig, reject
from jaxvec._spec import PoolSpec
from jaxvec._tracing import Trace
from jaxvec._workers.base import Backend, Check, WaitLimits, WorkerGroup
from jaxvec._workers.budget import Budget
from jaxvec._workers.protocol import WorkerRecipe

T = TypeVar("T")
_SMALLEST_NORMAL = sys.float_info.min
_FLOAT_STATE = 64  # bytes, more than any `fenv_t` has
# Functions of <fenv.h>, called with the GIL, and with arguments of undeclared types. That is the fastest way:
# three run per step.
_libm = ctypes.PyDLL(None)
_read_floats = _libm.fegetenv
_write_floats = _libm.fesetenv
_read_floats.restype = _write_floats.restype = None


class _HostThread:
    """The state of a thread on which all code of the envs runs, as in a loop on the host.

    XLA flushes denormals while it runs a program, and runs parts of a large one in threads of its own. There,
    envs get the floating-point state of the thread that made the pool, with its rounding, and the context
    variables that it had in its latest call. These include the context of `decimal`, and NumPy's `errstate`.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit  # seconds
        self._thread = threading.get_ident()
        self._flushes = _flushes_denormals()
        self._context = copy_context()
        self.apart: ThreadPoolExecutor | None = None  # for envs that call JAX
        # Floating-point states: this thread's, and that of the thread which calls `run`. The pool lets one
        # thread at a time call it.
        self.own_floats = ctypes.create_string_buffer(_FLOAT_STATE)
        self._floats_of_caller = ctypes.create_string_buffer(_FLOAT_STATE)
        _read_floats(self.own_floats)

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """Calls a function in this state, and restores that of the calling thread."""
        if threading.get_ident() == self._thread:
            self._context = copy_context()
            if self._flushes == _flushes_denormals():
                return call(*args)
        else:
            call = partial(self._context.run, call)
            if self.apart is not None:
                return self._run_apart(self.apart.submit(call, *args))
        _read_floats(self._floats_of_caller)
        _write_floats(self.own_floats)
        try:
            return call(*args)
        finally:
            _write_floats(self._floats_of_caller)

    def _run_apart(self, call: Future[T]) -> T:
        """Waits for the end of a call, up to the limit for steps and to Ctrl-C."""
        # XLA runs a limited number of computations at a time. If the program has queued as many, one of the
        # env waits for them, and they for the env. Only an error of the program's call ends that.
        check_interrupt = interrupts.since_now()  # first, as the user may answer the warning by Ctrl-C
        warnings.warn(_CALLS_JAX, stacklevel=2)
        deadline = time.monotonic() + (math.inf if self._limit is None else self._limit)
        while not wait([call], timeout=_INTERRUPT_INTERVAL).done:
            check_interrupt()
            if time.monotonic() > deadline:
                text = f"step timed out after {self._limit} s (Timeouts.step). {_CALLS_JAX}"
                raise EnvTimeoutError(text, env_ids=())
        return call.result()


_INTERRUPT_INTERVAL = 0.1  # seconds
_CALLS_JAX = (
    'use backend="process": an env of backend="serial" calls JAX, which can wait forever for the compiled '
    "program that steps it"
)


def _calls_jax(env: Any) -> bool:
    """Returns True if a method of an env or of a wrapper names a module of JAX, or an attribute is of JAX."""
    modules: set[str] = set()
    for layer in layers_of(env):
        attributes = getattr(layer, "__dict__", {})
        # Some classes of SWIG have no module.
        modules |= {str(getattr(type(value), "__module__", "")) for value in attributes.values()}
        for method in (value for cls in type(layer).__mro__ for value in vars(cls).values()):
            if isinstance(method, FunctionType):
                named = [method.__globals__.get(name) for name in method.__code__.co_names]
                modules |= {value.__name__ for value in named if isinstance(value, ModuleType)}
    return any(module.partition(".")[0] in ("jax", "jaxlib") for module in modules)


def _flushes_denormals() -> bool:
    return _SMALLEST_NORMAL * 0.5 == 0.0


def _share(value: Any) -> Any:
    """Returns a value itself, in place of `copied`."""
    return value


class SerialBackend(Backend):
    """This process and its own thread."""

    def check(self, config: PoolConfig) -> None:
        workers = config.workers
        if config.num_workers not in (None, 1):
            raise ValueError(f'backend="serial" has one worker, this process, not {config.num_workers}')
        options = ("env", "init", "preload", "pin", "python", "recycle")
        rejected: dict[str, Any] = {
            **{f"Workers({name}=...)": getattr(workers, name) for name in options},
            "Workers(output=...)": workers.output != "inherit",
            "spare_envs": config.spare_envs,
        }
        reject('needs worker processes; backend="serial" has none', rejected)

    def num_workers(self, num_instances: int, timeout: float | None) -> int:
        return 1

    def start(self, recipe: WorkerRecipe, *, learn_info: bool) -> WorkerGroup:
        return SerialWorkers(recipe, learn_info=learn_info)


class SerialWorkers(WorkerGroup):
    """The envs of one pool in this process."""

    def __init__(self, recipe: WorkerRecipe, *, learn_info: bool) -> None:
        self._envs: list[Any] = []
        self._close_slice: Callable[[], None] = lambda: None
        self._recipe = recipe
        self._dispatch = choose_dispatch(recipe.config.settings.dispatch)
        self._budget = budget = Budget(recipe.config.restart, 1)
        self.restarts = budget.restarts
        self.incarnations = [0]
        self.last_errors = [None]
        self.env_settings = None
        self._host = _HostThread(recipe.config.timeouts.step)
        if budget.policy is not None:
            self.env_settings = EnvSettings(_share if recipe.shares_values else copied)
        try:
            with self._typed():
                self._envs = build_env(recipe.env_fns, 0, recipe.config.envs_per_instance)
                if any(map(_calls_jax, self._envs)):
                    interrupts.watch()
                    floats = (self._host.own_floats,)  # a new thread would have those of the program's
                    self._host.apart = ThreadPoolExecutor(1, initializer=_write_floats, initargs=floats)
                description = describe(
                    self._envs, first=0, learn_info=learn_info, equal_spaces=recipe.equal_spaces
                )
                # Samples and `batch_space` give spaces random generators, which envs would have as states.
                self.description = replace(description, spaces=deepcopy(description.spaces))
            if self.description.mismatch is not None:
                raise SpaceMismatchError(self.description.mismatch)
        except BaseException:
            with suppress(EnvError):
                self.close(timeout=0)
            raise

    def attach(self, layout: Layout, spec: PoolSpec) -> Arrays:
        arrays = private_segment(layout)
        self._requested = Marks.of(arrays).requested
        slices = ((0, spec.num_envs),)
        end = parent_end(self._dispatch, Marks.of(arrays), slices=slices, channels=(), spin_ns=0)
        self._open_engine = partial(open_engine, end, spec, arrays)
        recipe = self._recipe
        with self._typed(), EnvErrorContext(0, "constructor"):
            self._slice = recipe.make_slice(
                self._envs,
                recipe.env_fns,
                config=recipe.config,
                on_slice=recipe.on_slice,
                first=0,
                worker=0,
                spec=spec,
                arrays=arrays,
            )
        self._slice.in_program = True
        self._moves = {Verb.STEP: self._slice.step, Verb.RESET: self._slice.reset}
        if self._recipe.shares_values:
            self._slice.access.copied = _share
        self._close_slice = self._slice.close
        return arrays

    def open_engine(self, config: EngineConfig) -> Engine:
        return self._open_engine(config=config, step_here=partial(self.send, Verb.STEP))

    def send(self, verb: Verb, slots: NDArray[Any]) -> None:
        if self.env_settings is not None:
            # For each new request number, the slice copies the received rows, which it repeats after a fault.
            self._requested[slots] += 1
        move = self._moves.get(verb)
        if move is None:
            self._host.run(self._slice.perform, verb, slots)
            return
        while slots.size:
            try:
                self._host.run(move, slots)
                return
            except EnvFailure as failure:
                slots = np.setdiff1d(slots, failure.completed)
                self._recover(failure)

    def wait(self, slots: NDArray[Any], count: int, limits: WaitLimits) -> None:
        """Returns at once: `send` has completed the slots."""

    def first_completed(self, slots: NDArray[Any], count: int) -> NDArray[Any]:
        return slots[:count]

    def set_options(self, options: Options) -> None:
        self._slice.set_options(options)

    def request(
        self,
        method: Callable[..., Any],
        arguments: Arguments,
        *,
        limit: LimitName = "step",
        check: Check = lambda: None,
    ) -> list[Any]:
        arguments_here = arguments(0, len(self._requested))
        if arguments_here is None:
            return [None]
        try:
            with self._typed():
                return [self._host.run(self._slice.answer, MethodName.of(method), *arguments_here)]
        except (EnvError, EnvStateError) as error:
            return [error]

    def start_trace(self, capacity: int) -> None:
        self._slice.start_trace(capacity)

    def stop_trace(self, *, hurry: bool) -> Sequence[Trace]:
        return [self._slice.stop_trace() or Trace([])]

    def close(self, timeout: float | None, *, tell: bool = True) -> None:
        envs = self._envs
        self._envs = []
        self._close_slice()
        with self._typed():
            close_envs(envs, 0, self._recipe.config.envs_per_instance)

    def _recover(self, failure: EnvFailure) -> None:
        while True:
            error = self._to_error(failure)
            settings = self._budget.spend_on_env(0, failure.env_id, error, self.env_settings)
            try:
                recover = partial(self._slice.recover, rebuild=self._budget.rebuilds, settings=settings)
                self._host.run(recover, failure)
            except EnvFailure as another:
                failure = another
            else:
                return

    @contextmanager
    def _typed(self) -> Generator[None]:
        """Turns an `EnvFailure` into its public error."""
        try:
            yield
        except EnvFailure as failure:
            raise self._to_error(failure) from failure.__cause__

    def _to_error(self, failure: EnvFailure) -> EnvError | EnvStateError:
        """Returns the public error of a failure; raises Ctrl-C, which is not a failure of the env."""
        if isinstance(failure.__cause__, KeyboardInterrupt):
            raise failure.__cause__ from None
        error = failures.to_error(failures.report(failure), worker=None)
        error.__cause__ = failure.__cause__
        return error
