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
from multiprocessing.connection import Connection, Listener
from typing import Any, NamedTuple

from jaxvec._envs.envs import Env, find_attr
from jaxvec._util import add_note, dumps


class Address(NamedTuple):
    name: str  # of the socket at which a `Host` waits for the new process; it is no file
    key: bytes


class Guest:
    """An env of another process, which steps it on request."""

    set_observation_buffer = None  # its process does not write the rows

    def __init__(self, connection: Connection, index: int) -> None:
        self._connection, self._index = connection, index

    def step(self, action: Any) -> Any:
        return self.run(_call_attr, "step", action)

    def close(self) -> None:
        """Ends the borrowing. The other process closes its envs after the last one."""
        with suppress(RuntimeError):
            self.run(None)

    def run(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `function(env, *args, **kwargs)`, which the other process calls."""
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
    """Returns an attribute of an env, or a function that calls it in the process of the env."""
    return partial(env.run, _call_attr, name) if type(env) is Guest else find_attr(env, name)


def _call_attr(env: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    attribute = find_attr(env, name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


class Host:
    """The other end of guests, by their index in the slice."""

    def __init__(self, envs: Mapping[int, Env]) -> None:
        self._left = dict(envs)
        self.address = Address(f"\0jaxvec-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_bytes(32))
        self._listener = Listener(self.address.name, "AF_UNIX", authkey=self.address.key)

    def serve(self) -> None:
        """Answers requests until all guests have ended, or their process has. The caller closes the envs."""
        while True:
            with suppress(AuthenticationError):  # a stranger
                connection = self._listener.accept()
                break
        self._listener.close()
        with connection, suppress(EOFError, OSError):
            while self._left:
                index, function, args, kwargs = pickle.loads(connection.recv_bytes())
                error = result = None
                if function is None:
                    del self._left[index]
                else:
                    try:
                        result = function(self._left[index], *args, **kwargs)
                    except BaseException as raised:
                        error = raised
                connection.send_bytes(_pack(error, result))


def _pack(error: BaseException | None, result: Any) -> bytes:
    if error is not None:
        add_note(error, "In the old process of the env:\n" + "".join(traceback.format_exception(error)))
    try:
        packed: bytes = dumps((error, result))
        pickle.loads(packed)  # an exception may pickle, and not unpickle
        return packed
    except Exception as unpicklable:
        return dumps((RuntimeError(f"{unpicklable} ({error!r})"), None))
