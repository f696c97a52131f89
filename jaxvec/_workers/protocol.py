"""The messages between a pool and a worker, on the worker's control socket.

    the pool sends      Setup   Attach   Request   end of file
    the worker answers  Ready   Reply    Reply     Closed

Between these, a worker sends a failure as a `Report` (`_envs/failures.py`), which `Recover` answers. One that
should be replaced sends a `Retirement`, and steps no env any more. When it owes no reply, it gets `Retire`.
Then it closes its envs and sends `Retired`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pickle import PickleBuffer
from typing import Any, TypeAlias

from numpy.typing import NDArray

from jaxvec._arguments import Options
from jaxvec._envs import constructors
from jaxvec._envs.env_slice import OnSlice
from jaxvec._envs.envs import EnvFn
from jaxvec._envs.failures import Report
from jaxvec._envs.slice import MethodName, Slice, SlotSettings
from jaxvec._leaves import KeyPath
from jaxvec._memory.large_buffers import BufferPlace, LargeBuffers
from jaxvec._memory.segment import Layout, Slices
from jaxvec._options import PoolConfig
from jaxvec._script import dumps_for_worker, dumps_with_main
from jaxvec._spec import PoolSpec
from jaxvec._workers.interpreter import Interpreter


@dataclass(frozen=True)
class WorkerRecipe:
    """The specification from which the workers of a pool, and their replacements, are made."""

    env_fns: Sequence[EnvFn]  # of all envs, or of all instances of batched envs
    slices: Slices  # `(first, stop)` of each worker's envs
    config: PoolConfig
    interpreter: Interpreter
    make_slice: Callable[..., Slice]  # `EnvSlice`, or a constructor with its arguments
    on_slice: Sequence[OnSlice]  # of the extensions
    spares: int  # number of envs without a slot that each worker builds for them
    equal_spaces: bool  # whether bounds of observations and rewards must be equal
    has_fault: bool = False  # whether episodes may be cut, by faults or for extensions
    shares_values: bool = False  # whether envs in this process get the objects of the caller, not copies


# --- Messages on the control socket, in the order in which they are first sent ---------------------------


# An entry of `warnings.filters`, with module and name of its category, which a worker may not have imported.
WarningFilter: TypeAlias = tuple[str, Any, str, str, Any, int]


@dataclass(frozen=True)
class Setup:
    """Request of the parent to build envs."""

    argv: list[str]  # of the program, whose options an env may read
    authkey: bytes  # of the program, whose managers and listeners an env may use
    warning_filters: list[WarningFilter]
    sys_path: list[str]
    python_path: str | None
    interpreter: Interpreter
    worker: int
    first: int  # id of the worker's first env
    # Unpickled apart from the message, `init` once `sys_path` is set, and `env_fns` once `init` has run.
    init: bytes | None
    env_fns: bytes  # with the extensions, whose options may contain functions and classes of the user
    specs: bytes  # entries of the registry that `env_fns` name
    large: Sequence[BufferPlace]  # of the buffers that `env_fns` lacks; a descriptor comes with them
    config: PoolConfig
    spares: int
    equal_spaces: bool
    learn_info: bool


@dataclass(frozen=True)
class Built:
    """Report of the worker that it has built one more env, of all of its envs and spare envs."""

    count: int
    total: int


@dataclass(frozen=True)
class Ready:
    """Report of the worker that its envs are built; `description` is a cloudpickled `Description`."""

    description: bytes


@dataclass(frozen=True)
class Replacement:
    """State of a dead worker that its replacement starts with."""

    options: Options  # of its envs' resets
    trace: int | None  # capacity of the span recorder, if tracing
    notices: int  # number of notices of messages on the control socket, which a futex counts
    objects: dict[KeyPath, NDArray[Any]]  # last received rows of the leaves that are not in the segment
    settings: dict[int, SlotSettings]  # by slot, for envs that have some


@dataclass(frozen=True)
class Attach:
    """Request of the parent to map the segment, by the descriptor that comes with it, and to serve."""

    worker: int
    slots: tuple[int, int]  # first and stop
    layout: Layout
    spec: PoolSpec
    dispatch: str  # "native" or "portable"
    spin_ns: int
    keeps_core: bool  # whether the worker wakes where it fell asleep; see dispatch.h
    replaces: Replacement | None


@dataclass(frozen=True)
class Recover:
    """Request of the parent to recover from a reported failure. Without it, the pool ends."""

    rebuild: bool  # whether to build the env anew
    settings: SlotSettings | None  # of the new env


@dataclass(frozen=True)
class Retire:
    """Request of the parent to close the envs, after a `Retirement`."""


@dataclass(frozen=True)
class Retired:
    """Report of the worker, after `Retire`, that its envs are closed."""


@dataclass(frozen=True)
class Closed:
    """Report of the worker, after the end of file or `Retire`, that these envs are closed."""

    env_ids: range


@dataclass(frozen=True)
class Request:
    """Request of the parent to call a method of the slice or of an extension, see `Slice.answer`."""

    method: MethodName
    args: bytes  # a tuple, pickled apart: an error in unpickling it is a reply, not the end of the worker


@dataclass(frozen=True)
class Reply:
    """Cloudpickled result of a `Request`, or the failure in its place."""

    result: bytes = b""
    failure: Report | None = None


def pickle_given(
    value: Any, refuse: Callable[[Exception], TypeError], dump: Callable[[Any], bytes] = dumps_for_worker
) -> bytes:
    """Pickles a value of the user, or raises the error that `refuse` makes of the cause."""
    try:
        return dump(value)
    except MemoryError:
        raise
    except Exception as error:
        raise refuse(error) from error


def make_setup(
    recipe: WorkerRecipe, worker: int, *, learn_info: bool, buffers: LargeBuffers | None = None
) -> Setup:
    """Makes the first message to a worker, which gets large arrays by `buffers` if these are given.

    Raises:
        TypeError: A function can't be pickled.
    """
    first, stop = recipe.slices[worker]
    config = recipe.config
    size = config.envs_per_instance or 1
    init = config.workers.init
    interpreter = recipe.interpreter
    pickled_init = init and _pickle(constructors.of_worker(init, worker), "Workers(init=...)")
    large: list[PickleBuffer] = []
    env_fns = list(recipe.env_fns[first // size : stop // size])
    pickled_env_fns = _pickle(
        (env_fns, recipe.make_slice, recipe.on_slice),
        f"the constructor of env {first}",
        ', or use backend="serial"',
        # Another interpreter may have a NumPy that can't read pickles without buffers.
        large if buffers is not None and interpreter.is_own else None,
    )
    specs = constructors.specs_named(env_fns, pickled_env_fns) if interpreter.is_own else []
    filters: Any = warnings.filters
    return Setup(
        argv=list(sys.argv),
        authkey=bytes(multiprocessing.current_process().authkey),
        warning_filters=[
            (action, message, category.__module__, category.__qualname__, module, line)
            for action, message, category, module, line in filters
        ],
        sys_path=interpreter.sys_path(),
        python_path=(os.environ if interpreter.is_own else config.workers.env).get("PYTHONPATH"),
        interpreter=interpreter,
        worker=worker,
        first=first,
        init=pickled_init,
        env_fns=pickled_env_fns,
        specs=_pickle(specs, "an entry of gymnasium.registry"),
        large=[buffers.add(buffer) for buffer in large] if buffers is not None else [],
        config=config.for_workers(),
        spares=recipe.spares,
        equal_spaces=recipe.equal_spaces,
        learn_info=learn_info and first == 0,
    )


def _pickle(function: Any, name: str, otherwise: str = "", large: list[PickleBuffer] | None = None) -> bytes:
    return pickle_given(
        function,
        lambda error: TypeError(
            f"{name} can't be pickled, so it can't be sent to a worker: {error}; create the objects that it "
            f"needs inside it{otherwise}"
        ),
        partial(dumps_with_main, large=large),
    )
