"""Debugging of envs in worker processes: pdb at the program's terminal.

    env calls breakpoint()
      -> WorkerDebugger (in the worker)   requests the terminal, and waits until it has it
      -> Terminal (in the program)        makes the worker's process group the terminal's foreground group
      -> pdb with line editing            Ctrl-C and all keys go to this worker; timeouts stand still
      -> WorkerDebugger                   gives the terminal back, for the next worker or the program

The worker holds the terminal only while pdb prompts. The foreground group is the answer to a request, so the
worker needs to read no message in the middle of an env's step.
"""

from __future__ import annotations

import bdb
import os
import pdb
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from jaxvec._envs.envs import EnvFailure, forked
from jaxvec._errors import EnvStateError
from jaxvec._memory.rows import InvalidValue

_TERMINAL = "/dev/tty"  # the controlling terminal of the session, which workers share with the program
_POLL_INTERVAL = 0.02  # seconds

NO_TERMINAL = (
    "breakpoint() in a worker process needs a terminal, and the program had none in its foreground when this "
    'worker started. Run the program in a terminal, or use backend="serial", which runs the envs in the '
    "program itself, also in a notebook"
)


@dataclass(frozen=True)
class WantTerminal:
    """Report of a worker that pdb prompts, or no longer does."""

    group: int | None  # the worker's process group; `None` at the end


def has_terminal() -> bool:
    """Returns whether this process runs in the foreground of a terminal."""
    with suppress(OSError), _open_terminal() as terminal:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    return False


def post_mortem(failure: EnvFailure, debug: Callable[[TracebackType | None], None] = pdb.post_mortem) -> None:
    """Opens a debugger where the code of an env raised."""
    error = failure.__cause__
    if isinstance(error, Exception) and not isinstance(error, (InvalidValue, EnvStateError, bdb.BdbQuit)):
        print(f"env {failure.env_id} raised {type(error).__name__} in {failure.operation}: {error}")
        debug(error.__traceback__)


@contextmanager
def _open_terminal() -> Generator[int]:
    terminal = os.open(_TERMINAL, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        yield terminal
    finally:
        os.close(terminal)


# --- In the program --------------------------------------------------------------------------------------


class Terminal:
    """The program's terminal, lent to one worker at a time. The supervisor's lock `polling` guards it."""

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}  # process groups by worker; the first gets the terminal, or has it
        self._lent: int | None = None  # the group that has it
        self._settings: list[Any] = []  # of the terminal before it was lent

    @property
    def wanted(self) -> bool:
        """True while a worker has or wants a terminal."""
        return bool(self._waiting)

    def note(self, worker: int, group: int | None) -> None:
        """Notes the report of a worker, or its end."""
        self._waiting.pop(worker, None)
        if group is not None:
            self._waiting[worker] = group
        self.forward()

    def clear(self) -> None:
        self._waiting.clear()
        self.forward()

    def forward(self) -> None:
        """Passes the terminal on to the next worker, or back.

        Does nothing while the program is in the background. Later calls try again, after the shell's `fg`.
        """
        group = next(iter(self._waiting.values()), None)
        if group == self._lent:
            return
        with suppress(OSError, termios.error), _open_terminal() as terminal:
            # A background process that does this is stopped by SIGTTOU, unless it blocks the signal.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            try:
                if self._lent is None:
                    if os.tcgetpgrp(terminal) != os.getpgrp():
                        return
                    self._settings = termios.tcgetattr(terminal)
                else:  # a killed worker leaves the terminal without echo
                    termios.tcsetattr(terminal, termios.TCSADRAIN, self._settings)
                os.tcsetpgrp(terminal, os.getpgrp() if group is None else group)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._lent = group


# --- In a worker -----------------------------------------------------------------------------------------


class WorkerDebugger:
    """The debugger of a worker process, which becomes the target of `breakpoint()`."""

    def __init__(self, send: Callable[[WantTerminal], None], *, terminal: bool, worker: int) -> None:
        self._send, self._has_terminal, self._worker = send, terminal, worker
        self.env_id: Callable[[], int] = lambda: -1  # the env that runs now; -1 for none
        sys.breakpointhook = self._stop

    def post_mortem(self, trace: TracebackType | None) -> None:
        """Opens pdb at the end of a traceback."""
        debugger = self._make_pdb()
        debugger.reset()
        debugger.interaction(None, trace)

    def _stop(self, *args: Any, **kwargs: Any) -> None:
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if chosen not in ("", "pdb.set_trace") or forked:
            sys.__breakpointhook__(*args, **kwargs)
            return
        if not self._has_terminal:
            raise RuntimeError(NO_TERMINAL)
        self._make_pdb().set_trace(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    def _make_pdb(self) -> _TerminalPdb:
        def prompt() -> str:
            env_id = self.env_id()
            return f"(Pdb worker {self._worker}) " if env_id < 0 else f"(Pdb env {env_id}) "

        return _TerminalPdb(self._borrow, prompt, nosigint=True, skip=["jaxvec._*"])

    @contextmanager
    def _borrow(self) -> Generator[None]:
        """Makes the terminal this process's standard input and output, and prepares for its Ctrl-C."""
        with _open_terminal() as terminal:
            self._send(WantTerminal(os.getpgrp()))
            while os.tcgetpgrp(terminal) != os.getpgrp():
                time.sleep(_POLL_INTERVAL)
            streams, copies = (sys.stdin, sys.stdout), (os.dup(0), os.dup(1))
            sys.stdout.flush()
            for descriptor in (0, 1):
                os.dup2(terminal, descriptor)
        # GNU readline edits only lines that come from the descriptors 0 and 1.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it closes nothing
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
            handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # no shell waits
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            sys.stdout.flush()
            sys.stdin, sys.stdout = streams
            for descriptor, copy in enumerate(copies):
                os.dup2(copy, descriptor)
                os.close(copy)
            self._send(WantTerminal(None))


class _TerminalPdb(pdb.Pdb):
    """A pdb that borrows a terminal whenever it prompts."""

    def __init__(self, borrow: Callable[[], Any], prompt: Callable[[], str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._borrow, self._make_prompt = borrow, prompt

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        with self._borrow():
            self.stdin, self.stdout, self.prompt = sys.stdin, sys.stdout, self._make_prompt()
            super().interaction(*args, **kwargs)
