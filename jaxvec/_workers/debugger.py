"""Debugging of envs in worker processes: pdb at the program's terminal.

    env calls breakpoint()
      -> WorkerDebugger (in the worker)   requests the terminal, and waits until it has it
      -> Terminal (in the program)        makes the worker's process group the terminal's foreground group
      -> pdb with line editing            Ctrl-C and all keys go to this worker; timeouts stand still
      -> WorkerDebugger                   gives the terminal back, for the next worker or the program

The worker holds the terminal only while pdb prompts. The foreground group is the answer to a request, so the
worker needs to read no message in the middle of an env's step.

`python -m jaxvec attach` (cli/_top.py) requests a prompt at its own terminal by a signal (stacks.py).
"""

from __future__ import annotations

import bdb
import io
import os
import pdb
import signal
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from jaxvec._envs.envs import EnvFailure, forked
from jaxvec._errors import EnvStateError
from jaxvec._memory.rows import InvalidValue

_TERMINAL = "/dev/tty"  # the controlling terminal of the session, which workers share with the program
_POLL_INTERVAL = 0.02  # seconds
_SKIPPED = "jaxvec._*", "gymnasium.core", "gymnasium.wrappers.*"  # modules in which pdb does not stop

NO_TERMINAL = (
    "breakpoint() in a worker process needs a terminal, and the program had none in its foreground when this "
    'worker started. Run the program in a terminal, or use backend="serial", which runs the envs in the '
    "program itself, also in a notebook"
)


@dataclass(frozen=True)
class WantTerminal:
    """Report of a worker that pdb prompts, or no longer does."""

    group: int | None  # the worker's process group; 0 at another terminal; `None` at the end


def has_terminal() -> bool:
    """Returns whether this process runs in the foreground of a terminal."""
    with suppress(OSError), open_terminal() as terminal:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    return False


def post_mortem(failure: EnvFailure, debug: Callable[[TracebackType | None], None] = pdb.post_mortem) -> None:
    """Opens a debugger where the code of an env raised."""
    error = failure.__cause__
    if isinstance(error, Exception) and not isinstance(error, (InvalidValue, EnvStateError, bdb.BdbQuit)):
        print(f"env {failure.env_id} raised {type(error).__name__} in {failure.operation}: {error}")
        debug(error.__traceback__)


@contextmanager
def open_terminal(path: str = "") -> Generator[int]:
    terminal = os.open(path or _TERMINAL, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
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
        group = next(filter(None, self._waiting.values()), None)
        if group == self._lent:
            return
        with suppress(OSError, termios.error), open_terminal() as terminal:
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
        self._is_prompting = False
        self._session = ExitStack()  # of `attach`; closing it ends the session
        sys.breakpointhook = self._stop

    def post_mortem(self, trace: TracebackType | None) -> None:
        """Opens pdb at the end of a traceback."""
        debugger = _TerminalPdb(self._borrow, self._prompt)
        debugger.reset()
        debugger.interaction(None, trace)

    def attach(self, request: str, frame: FrameType | None, *, size: int) -> None:
        """Prompts at another terminal when an env next runs Python code; first ends the last such session.

        `request` names the env and the terminal, or is empty. `frame` runs now; `size` envs run together.
        """
        if self._is_prompting:
            return
        self._session.close()
        try:
            env_id, path = request.split()
            if os.stat(path).st_uid != os.getuid():
                return
            terminal = self._session.enter_context(open_terminal(path))
        except (OSError, ValueError):  # it is empty, its sender has ended, or a dump of the stack replaced it
            return

        def is_due() -> bool:
            first = self.env_id()
            return not self._is_prompting and not forked and 0 <= first <= int(env_id) < first + size

        debugger = _AttachedPdb(partial(self._borrow, terminal), self._prompt)
        debugger.is_due, debugger.close = is_due, self._session.close
        self._session.callback(debugger.set_quit)
        debugger.set_trace(frame)  # last, as it would stop in calls that follow

    def _stop(self, *args: Any, **kwargs: Any) -> None:
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if chosen not in ("", "pdb.set_trace") or forked:
            sys.__breakpointhook__(*args, **kwargs)
            return
        if not self._has_terminal:
            raise RuntimeError(NO_TERMINAL)
        _TerminalPdb(self._borrow, self._prompt).set_trace(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    def _prompt(self) -> str:
        env_id = self.env_id()
        return f"(Pdb worker {self._worker}) " if env_id < 0 else f"(Pdb env {env_id}) "

    @contextmanager
    def _borrow(self, terminal: int | None = None) -> Generator[None]:
        """Makes a terminal, or by default the program's, this process's standard input and output."""
        with ExitStack() as after:
            group = os.getpgrp() if terminal is None else 0
            terminal = after.enter_context(open_terminal()) if terminal is None else terminal
            after.callback(self._report, None)
            self._report(group)
            while group and os.tcgetpgrp(terminal) != group:
                time.sleep(_POLL_INTERVAL)
            sys.stdout.flush()
            for descriptor in (0, 1):
                copy = os.dup(descriptor)
                after.callback(os.close, copy)
                after.callback(os.dup2, copy, descriptor)
                os.dup2(terminal, descriptor)
            after.callback(setattr, sys, "stdin", sys.stdin)
            after.callback(setattr, sys, "stdout", sys.stdout)
            # GNU readline edits only lines that come from the descriptors 0 and 1. Nothing is buffered, as it
            # would go to the program's output if the terminal is closed.
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it closes nothing
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # pyright: ignore
            if threading.current_thread() is threading.main_thread():
                # No shell waits for SIGTSTP.
                for number, handler in ((signal.SIGINT, _interrupt), (signal.SIGTSTP, signal.SIG_IGN)):
                    after.callback(signal.signal, number, signal.signal(number, handler))
            yield

    def _report(self, group: int | None) -> None:
        self._is_prompting = group is not None
        self._send(WantTerminal(group))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the command that pdb executes, as the handler of a signal. In other places, the env would end."""
    if any(each.f_code is pdb.Pdb.cmdloop.__code__ for each, _ in traceback.walk_stack(frame)):
        raise KeyboardInterrupt


class _TerminalPdb(pdb.Pdb):
    """A pdb that borrows a terminal whenever it prompts."""

    def __init__(self, borrow: Callable[[], Any], prompt: Callable[[], str]) -> None:
        super().__init__(nosigint=True, skip=_SKIPPED)
        self._borrow, self._make_prompt = borrow, prompt
        self.stdout = self._messages = io.StringIO()  # before the next prompt

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        try:
            with self._borrow():
                sys.stdout.write(self._messages.getvalue())
                self.stdin, self.stdout, self.prompt = sys.stdin, sys.stdout, self._make_prompt()
                super().interaction(*args, **kwargs)
        except OSError:  # the terminal is closed
            self.set_quit()
        self.stdout = self._messages = io.StringIO()


class _AttachedPdb(_TerminalPdb):
    """A pdb that stops only while `is_due()`. `quit` lets the env continue."""

    is_due: Callable[[], bool]
    close: Callable[[], None]

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        return super().trace_dispatch(frame, event, arg) if self.is_due() else None

    def set_quit(self) -> None:
        self.clear_all_breaks()
        self.set_continue()

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self.close()
