"""The request of a call: an operation, its caller, and its envs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Verb(IntEnum):
    """An operation. C++, compiled programs and the marks of slots contain these numbers."""

    RESET = 0
    STEP = 1
    SEND = 2
    RECV = 3
    CALL = 4
    GET_ATTR = 5
    SAVE = 6
    RESTORE = 7
    SIMULATE = 8

    @property
    def word(self) -> str:
        """Name of the operation, such as "step"."""
        return self.name.lower()

    @property
    def function(self) -> str:
        """Name of the function of jaxvec, such as "jaxvec.step"."""
        return f"jaxvec.{self.word}"


VERBS = tuple(Verb)
_END = 16  # above the operations that workers receive; `kEnd` of C++


def requests(numbers: NDArray[np.int64], verb: Verb) -> NDArray[np.int64]:
    """Returns the marks for requests with these numbers, as C++ does."""
    # `int`, because NumPy swallows a Ctrl-C that arrives while it converts an enum.
    return _END * numbers + int(verb)


def verbs_of(marks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the operation numbers in marks of `requests`."""
    return marks % _END


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
