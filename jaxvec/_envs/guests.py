"""Envs that stay in the process of a recycled worker until their episodes end.

    new worker: SlotEnvs -> Guest.step --function and arguments--> old worker: Host -> env.step
                                       <--------result------------

The new worker owns the slots and writes the rows. It only borrows the envs of the old one.
"""

from __future__ import annotations

import os
import pickle
import secrets
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

from jaxvec._envs.envs import Env, find_attr
from jaxvec._util import add_note, dumps


class Address(NamedTuple):
    name: str  # of a socket, which is no file
    key: bytes

    def connect(self) -> Connection:
        return Client(self.name, "AF_UNIX", self.key)


class Entrance:
    """A socket at which one other process of this machine can connect, if it has the address."""

    def __init__(self) -> None:
        self.address = Address(f"\0jaxvec-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_bytes(32))
        self._listener = Listener(self.address.name, "AF_UNIX", authkey=self.address.key)

    def accept(self) -> Connection:
        with self._listener:
            while True:
                with suppress(AuthenticationError):  # a stranger
                    return self._listener.accept()


class Guest:
    """An env of another process, which steps it on request, in the place of a new one of this process."""

    set_observation_buffer = None  # its process does not write the rows

    def __init__(self, connection: Connection, index: int, own: Env) -> None:
        self._connection, self._index, self.own = connection, index, own

    def step(self, action: Any) -> Any:
        return self.run(_call_attr, "step", action)

    def leave(self) -> Env:
        """Ends the borrowing, and returns the new env. After the last, the other process closes its envs."""
        with suppress(RuntimeError):
            self.run(None)
        return self.own

    def close(self) -> None:
        self.leave().close()

    def run(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Returns `function(env, *args, **kwargs)`, called in its process; `None` ends the borrowing."""
        try:
            self._connection.send_bytes(dumps((self._index, function, args, kwargs)))
            error, result = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as lost:
            raise RuntimeError("the old process of this env has ended before its episode") from lost
        if error is not None:
            raise error
        return result


def call(function: Callable[..., Any], env: Any, *args: Any) -> Any:
    """Returns `function(env, *args)`, which the process of the env calls."""
    return env.run(function, *args) if type(env) is Guest else function(env, *args)


def find_callable(env: Any, name: str) -> Any:
    return partial(env.run, _call_attr, name) if type(env) is Guest else find_attr(env, name)


def _call_attr(env: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    attribute = find_attr(env, name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


class Host:
    """The other end of guests, by their index in the slice."""

    def __init__(self, envs: Mapping[int, Env]) -> None:
        self._left, self._entrance = dict(envs), Entrance()
        self.address = self._entrance.address

    def serve(self) -> None:
        """Answers requests until all guests have ended, or their process has. The caller closes the envs."""
        with self._entrance.accept() as connection, suppress(EOFError, OSError):
            while self._left:
                index, function, args, kwargs = pickle.loads(connection.recv_bytes())
                error = result = None
                try:
                    env = self._left[index] if function else self._left.pop(index)
                    result = function and function(env, *args, **kwargs)
                except BaseException as raised:
                    trace = "".join(traceback.format_exception(raised))
                    add_note(error := raised, f"In the old process of the env:\n{trace}")
                connection.send_bytes(_pack(error, result))


def _pack(error: BaseException | None, result: Any) -> bytes:
    try:
        packed: bytes = dumps((error, result))
        pickle.loads(packed)  # an exception may pickle, and not unpickle
        return packed
    except Exception as unpicklable:
        return dumps((RuntimeError(f"{unpicklable} ({error!r})"), None))
