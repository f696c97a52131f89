"""What a pool is asked to do, by whom, and with which of its envs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Verb(IntEnum):
    """What can be asked for. C++ and compiled programs go by the numbers, and `requests` of workers, too."""

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
        """The name of the function."""
        return self.name.lower()

    @property
    def function(self) -> str:
        """Its name in jaxvec."""
        return f"jaxvec.{self.word}"


VERBS = tuple(Verb)
_END = 8  # of the verbs that workers are asked for


def requests(numbers: NDArray[np.int64], verb: Verb) -> NDArray[np.int64]:
    """Returns the marks by which workers are asked for a verb; handoff.cc makes the same."""
    return _END * numbers + int(verb)  # NumPy swallows Ctrl-C as it looks at an enum


def verbs_of(marks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the verbs of what `requests` has returned, as numbers."""
    return marks % _END


class Caller(IntEnum):
    """Who asks. Added to a verb, it says who moved envs last."""

    PROGRAM = 0
    HOST = 16


@dataclass(frozen=True, slots=True)
class Move:
    """A verb, who asks for it, and for which envs.

    Attributes:
        verb: what is asked for.
        slots: `[n]` indices of envs in the pool: those of the caller's handle, or all.
        generation: `[n]` uint32, how often each env was moved when the caller got its handle; `None` of
            a caller that has none.
        caller: who is named when the handles of others go stale; `None` if they don't.
    """

    verb: Verb
    slots: NDArray[Any]
    generation: NDArray[np.uint32] | None = None
    caller: Caller | None = None

    @property
    def caller_code(self) -> int:
        """Verb and caller in one number."""
        return self.verb + (self.caller or 0)

    @property
    def name(self) -> str:
        """The function that the user has called or, of an API that counts no moves, the verb."""
        return self.verb.word if self.caller is None else name_caller(self.caller_code)


def name_caller(code: int) -> str:
    """Returns what a user has called, by `Move.caller_code`."""
    verb, on_host = Verb(code % Caller.HOST), code >= Caller.HOST
    return f"VectorEnv.{verb.word} on the host" if on_host else verb.function
