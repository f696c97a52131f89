"""Ends forks of a worker that come back from an env's code: their envs are copies, the rows not theirs."""

from __future__ import annotations

import os
from typing import NoReturn

forked: list[int] = []  # not empty in a fork of a worker


def watch() -> None:
    """Lets forks of this process know what they are."""
    os.register_at_fork(after_in_child=lambda: forked.append(os.getpid()))


def end(env_id: int, operation: str) -> NoReturn:
    """Ends this process, which is a fork, and says so on its standard error."""
    text = (
        f"jaxvec.EnvError: env {env_id} has forked in {operation}, and the new process {os.getpid()} came "
        f"back from it, so it was ended. Let it end in {operation} by os._exit, or start it with subprocess "
        "or multiprocessing.\n"
    )
    os.write(2, text.encode())
    os._exit(1)
