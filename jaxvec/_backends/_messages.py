"""The messages on a worker's control socket, in the order in which they are first sent."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from jaxvec import _pickling
from jaxvec._memory._layout import Layout
from jaxvec._options import Options
from jaxvec._slices._failures import Report
from jaxvec._slices._parameters import Parameters
from jaxvec._slices._slice import Asked
from jaxvec._slices._slice_config import SliceConfig
from jaxvec._spaces import KeyPath
from jaxvec._spec import PoolSpec


@dataclass(frozen=True)
class Setup:
    """Parent: build these envs."""

    sys_path: list[str]
    python_path: str | None
    first: int  # env id of the slice's first env
    worker_init: bytes | None  # cloudpickled, to be opened only once sys.path is set, and run
    env_fns: bytes  # and state_functions, cloudpickled, to be opened only after that
    slice_config: SliceConfig
    learn_info: bool
    core: int | None  # the number, of the usable ones, of that to stay on


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
    parameters: dict[int, Parameters]  # of its envs, those that have some


@dataclass(frozen=True)
class Attach:
    """Parent: map the segment, whose descriptor comes with this message, and begin to serve."""

    worker: int
    slots: tuple[int, int]  # first and stop
    layout: Layout
    spec: PoolSpec
    handoff: str  # "native" or "portable"
    spin_ns: int
    max_running: int | None  # workers that may run envs at once
    replaces: Replacement | None  # what to know in the place of a worker that is gone


@dataclass(frozen=True)
class Recover:
    """Parent: go on after the failure that you reported; it was the pool's last otherwise."""

    rebuild: bool  # the env
    parameters: Parameters | None  # of the new env


@dataclass(frozen=True)
class Closed:
    """Worker, after the end of file: these envs are closed."""

    env_ids: range


@dataclass(frozen=True)
class Request:
    """Parent: call this method of your `Slice`."""

    name: Asked
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
        pickled: bytes = _pickling.dumps(value)
    except MemoryError:
        raise
    except Exception as error:
        raise refuse(error) from error
    return pickled
