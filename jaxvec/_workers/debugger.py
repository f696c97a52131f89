"""Debugging of envs in worker processes: pdb at the program's terminal, or in its notebook.

    env calls breakpoint()
      -> WorkerDebugger (in the worker)   requests the terminal, and waits until it has it
      -> Terminal (in the program)        makes the worker's process group the terminal's foreground group
      -> pdb with line editing            Ctrl-C and all keys go to this worker; timeouts stand still
      -> WorkerDebugger                   gives the terminal back, for the next worker or the program

The worker holds the terminal only while pdb prompts. The foreground group is the answer to a request, so the
worker needs to read no message in the middle of an env's step. In a notebook, the program connects to the
worker instead: it prints what it receives, and calls `input` when the worker needs a line.

`python -m jaxvec attach` (cli/_top.py) requests a prompt at its own terminal by a signal (stacks.py).
"""

from __future__ import annotations

import bdb
import ctypes
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
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any

from jaxvec._envs.envs import EnvFailure, forked
from jaxvec._envs.guests import Address, Entrance
from jaxvec._errors import EnvStateError
from jaxvec._memory.rows import InvalidValue

_TERMINAL = "/dev/tty"  # the controlling terminal of the session, which workers share with the program
_POLL_INTERVAL = 0.02  # seconds
_SKIPPED = "jaxvec._*", "gymnasium.core", "gymnasium.wrappers.*"  # modules in which pdb does not stop

NO_TERMINAL = (
    "breakpoint() in a worker process needs a terminal, or a notebook with input boxes, and the program had "
    "none in its foreground when this worker started. Run the program in a terminal or a notebook, or use "
    'backend="serial", which runs the envs in the program itself'
)
_NO_INPUT = b"\0"  # in place of a line, from a kernel that runs without a person


@dataclass(frozen=True)
class WantTerminal:
    """Report of a worker that pdb prompts, or no longer does."""

    # The worker's process group, or its address for a notebook; 0 at another terminal; `None` at the end.
    place: int | Address | None


def find_place() -> str:
    """Returns "notebook" or "terminal" if this process runs in one, in the foreground; else ""."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel") and sys.platform == "linux":
        return "notebook"
    with suppress(OSError), open_terminal() as terminal:
        if os.tcgetpgrp(terminal) == os.getpgrp():
            return "terminal"
    return ""


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
        self._waiting: dict[int, int | Address] = {}  # by worker; the first gets the terminal, or has it
        self._lent: int | None = None  # the group that has it
        self._settings: list[Any] = []  # of the terminal before it was lent

    @property
    def wanted(self) -> bool:
        """True while a worker has or wants a terminal."""
        return bool(self._waiting)

    def note(self, worker: int, place: int | Address | None) -> None:
        """Notes the report of a worker, or its end."""
        self._waiting.pop(worker, None)
        if place is not None:
            self._waiting[worker] = place
        self.forward()

    def clear(self) -> None:
        self._waiting.clear()
        self.forward()

    def forward(self, check: Callable[[], None] | None = None) -> None:
        """Passes the terminal on to the next worker, or back.

        Does nothing while the program is in the background. Later calls try again, after the shell's `fg`. In
        a notebook, it needs `check`, which may raise to end the wait, and returns after the prompt.
        """
        group = next(filter(None, self._waiting.values()), None)
        if isinstance(group, Address):
            if check is None:
                return
            with suppress(EOFError, OSError), group.connect() as connection:
                # In a thread: this one may belong to a compiled program, where nothing could end `input`.
                thread = threading.Thread(target=_relay, args=(connection,), daemon=True)
                thread.start()
                try:
                    while thread.is_alive():
                        thread.join(_POLL_INTERVAL)
                        check()
                except BaseException:
                    self._waiting.clear()  # the worker ends its prompt, or is killed
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
                    )
                    raise
            return
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


def _relay(connection: Connection) -> None:
    """Prints text of a worker, and answers each empty text with a line, until the worker disconnects."""
    line = ""
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            while not connection.poll(_POLL_INTERVAL):  # not one long wait, which no exception could end
                pass
            if text := connection.recv_bytes().decode():
                lines, newline, line = f"{line}{text}".rpartition("\n")
                print(lines, end=newline, flush=True)
                continue
            try:
                answer = f"{input(line)}\n".encode()
            except NotImplementedError:
                answer = _NO_INPUT
            connection.send_bytes(answer)
            line = ""


# --- In a worker -----------------------------------------------------------------------------------------


class WorkerDebugger:
    """The debugger of a worker process, which becomes the target of `breakpoint()`."""

    def __init__(self, send: Callable[[WantTerminal], None], *, place: str, worker: int) -> None:
        self._send, self._place, self._worker = send, place, worker
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
        if not self._place:
            raise RuntimeError(NO_TERMINAL)
        _TerminalPdb(self._borrow, self._prompt).set_trace(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    def _prompt(self) -> str:
        env_id = self.env_id()
        return f"(Pdb worker {self._worker}) " if env_id < 0 else f"(Pdb env {env_id}) "

    @contextmanager
    def _borrow(self, terminal: int | None = None) -> Generator[None]:
        """Makes a terminal, or by default the program's, this process's standard input and output."""
        with ExitStack() as after:
            after.callback(self._report, None)
            sys.stdout.flush()
            after.callback(setattr, sys, "stdin", sys.stdin)
            after.callback(setattr, sys, "stdout", sys.stdout)
            if terminal is None and self._place == "notebook":
                entrance = Entrance()
                self._report(entrance.address)
                sys.stdin = sys.stdout = _NotebookStream(after.enter_context(entrance.accept()))
            else:
                group = os.getpgrp() if terminal is None else 0
                terminal = after.enter_context(open_terminal()) if terminal is None else terminal
                self._report(group)
                while group and os.tcgetpgrp(terminal) != group:
                    time.sleep(_POLL_INTERVAL)
                for descriptor in (0, 1):
                    copy = os.dup(descriptor)
                    after.callback(os.close, copy)
                    after.callback(os.dup2, copy, descriptor)
                    os.dup2(terminal, descriptor)
                # GNU readline edits only lines that come from the descriptors 0 and 1. Nothing is buffered:
                # it would go to the program's output if the terminal is closed.
                sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it closes nothing
                sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # pyright: ignore
            if threading.current_thread() is threading.main_thread():
                # No shell waits for SIGTSTP.
                for number, handler in ((signal.SIGINT, _interrupt), (signal.SIGTSTP, signal.SIG_IGN)):
                    after.callback(signal.signal, number, signal.signal(number, handler))
            yield

    def _report(self, place: int | Address | None) -> None:
        self._is_prompting = place is not None
        self._send(WantTerminal(place))


class _NotebookStream(io.TextIOBase):
    """Standard input and output of a worker that prompts in a notebook; see `_relay`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, text: str) -> int:
        if text:
            self._connection.send_bytes(text.encode(errors="replace"))
        return len(text)

    def readline(self, size: int = -1) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._connection.send_bytes(b"")
        if (line := self._connection.recv_bytes()) == _NO_INPUT:
            raise RuntimeError(NO_TERMINAL)
        return line.decode()


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
                self.use_rawinput = sys.stdin.isatty()
                super().interaction(*args, **kwargs)
        except (EOFError, OSError):  # the terminal is closed
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
