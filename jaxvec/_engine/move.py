"""The request of a call: an operation, its caller, and its envs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Operation = TypeVar("_Operation")


@dataclass(frozen=True, kw_only=True)
class Traits:
    """All that the core has to know about an operation, besides what performs it.

    Attributes:
        activity: Activity of a worker, such as "stepping"; empty if workers do not receive the operation.
        in_program: Code for a program, in place of the method of `VectorEnv`; empty if the method has none.
        returns_timestep: True if the results of a program's call are a time step.
        is_pure: True if JAX may drop or repeat a program's call.
        without: The end of an error for a pool that has no extension for the operation.
    """

    activity: str = ""
    in_program: str = ""
    returns_timestep: bool = False
    is_pure: bool = False
    without: str = "has no extension that performs this operation"


_NO_STATES = (
    "keeps no states; make it with states=n, the number of states that your program uses at the same time"
)


class Verb(IntEnum):
    """An operation. C++, compiled programs and the marks of slots contain these numbers."""

    traits: Traits

    def __new__(cls, number: int, traits: Traits) -> Verb:
        verb = int.__new__(cls, number)
        verb._value_ = number
        verb.traits = traits
        return verb

    RESET = (
        0,
        Traits(
            activity="resetting",
            in_program="handle, timestep = jaxvec.reset(envs, seed=..., mask=..., options=...)",
            returns_timestep=True,
        ),
    )
    STEP = (
        1,
        Traits(
            activity="stepping",
            in_program="handle, timestep = jaxvec.step(handle, action)",
            returns_timestep=True,
        ),
    )
    SEND = 2, Traits(in_program="handle = jaxvec.send(handle, action, env_id)")
    RECV = 3, Traits(returns_timestep=True)
    CALL = 4, Traits(in_program="handle, results = jaxvec.call(handle, name, *args)")
    GET_ATTR = 5, Traits(is_pure=True)
    SAVE = 6, Traits(activity="saving", without=_NO_STATES)
    RESTORE = (
        7,
        Traits(
            activity="restoring",
            in_program="handle, timestep = jaxvec.restore(handle, state)",
            returns_timestep=True,
            without=_NO_STATES,
        ),
    )
    SIMULATE = (
        8,
        Traits(
            activity="simulating",
            in_program="state, timestep = jaxvec.simulate(envs, state, action)",
            returns_timestep=True,
            is_pure=True,
            without=_NO_STATES,
        ),
    )
    PACK_STATES = 9, Traits(without=_NO_STATES)
    UNPACK_STATES = 10, Traits(without=_NO_STATES)

    @property
    def word(self) -> str:
        """Name of the operation, such as "step"."""
        return self.name.lower()

    @property
    def function(self) -> str:
        """Name of the function of jaxvec, such as "jaxvec.step"."""
        return f"jaxvec.{self.word}"


VERBS = tuple(sorted(Verb))  # by number
_END = 16  # above the operations that workers receive; `kEnd` of C++


def requests(numbers: NDArray[np.int64], verb: Verb) -> NDArray[np.int64]:
    """Returns the marks for requests with these numbers, as C++ does."""
    # `int`, because NumPy swallows a Ctrl-C that arrives while it converts an enum.
    return _END * numbers + int(verb)


def verbs_of(marks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the operation numbers in marks of `requests`."""
    return marks % _END


def merge(tables: Iterable[Mapping[Verb, _Operation]]) -> dict[Verb, _Operation]:
    """Returns the operations of all extensions; raises `ValueError` if two perform the same one."""
    merged: dict[Verb, _Operation] = {}
    for table in tables:
        for verb in merged.keys() & table.keys():
            raise ValueError(f"two extensions of the pool perform {verb.word}; remove one of them")
        merged.update(table)
    return merged


class Caller(IntEnum):
    """The origin of a call: a compiled program, or Python code on the host."""

    PROGRAM = 0
    HOST = 16


@dataclass(frozen=True, slots=True)
class Move:
    """An operation on some envs of a pool, as its caller requests it."""

    verb: Verb
    slots: NDArray[Any]  # `[n]` env ids in the caller's handle, or all
    # `[n]` uint32 generations in the caller's handle; `None` without a handle
    generation: NDArray[np.uint32] | None = None
    # The origin that stale handles name later; `None` if the move leaves other handles fresh.
    caller: Caller | None = None

    @property
    def caller_code(self) -> int:
        return self.verb + (self.caller or 0)

    @property
    def name(self) -> str:
        """Name of the user's function, such as "jaxvec.step"; of a move without a caller, the verb's word."""
        return self.verb.word if self.caller is None else name_caller(self.caller_code)


def name_caller(code: int) -> str:
    """Returns the name of the user's function, for a `Move.caller_code`."""
    verb = Verb(code % Caller.HOST)
    return f"VectorEnv.{verb.word} on the host" if code >= Caller.HOST else verb.function
