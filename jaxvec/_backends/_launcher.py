"""What a supervisor asks of those who start its workers: processes here, or actors of a cluster."""

from __future__ import annotations

import signal
from typing import Protocol, TypeAlias

from jaxvec._handoff._channel import ParentChannel

Slices: TypeAlias = tuple[tuple[int, int], ...]


class Process(Protocol):
    """A worker, as far as it can be told from outside."""

    @property
    def place(self) -> str:
        """Says where it is, if that is not this machine."""
        ...

    @property
    def ahead(self) -> int:
        """How far its monotonic clock is ahead of ours, in ns."""
        ...

    def ended(self) -> bool:
        """Says whether it has ended."""
        ...

    def wait(self, timeout: float) -> bool:
        """Waits for its end, for at most `timeout` seconds; says whether it has ended."""
        ...

    def end(self) -> None:
        """Ends it at once, and whatever its envs have started; from any thread, and twice."""
        ...

    def ending(self) -> tuple[int | None, str]:
        """Returns the exit code, if there is one, and says in words how it ended."""
        ...


class Launcher(Protocol):
    """Starts workers, each with a control socket, on which it waits for what to build.

    Attributes:
        at_sockets: whether workers that serve listen at their sockets all the same, and need no notice.
    """

    at_sockets: bool

    def partition(self, slices: Slices) -> Slices:
        """Returns for which slots each worker's doorbell is rung, of the slots that each holds."""
        ...

    def launch(self, worker: int) -> tuple[Process, ParentChannel]:
        """Starts a worker, or another in its place; returns it, and our end of its control socket.

        Raises:
            ConnectionError: what starts workers can't be reached any more.
            TimeoutError: it was not started in time.
            OSError: there is no room for it: no memory, descriptor or process is left.
        """
        ...

    def close(self) -> None:
        """Lets go of what workers share. They have ended."""
        ...


def tell_ending(ended: bool, exitcode: int | None) -> tuple[int | None, str]:
    """Says how a process of this machine ended; see `Process.ending`."""
    if not ended:
        return None, "closed its control socket"  # but lives; it will be killed
    if exitcode is None:
        return None, "ended, after the fork server that knew its exit code"
    if exitcode >= 0:
        return exitcode, f"exited with code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = " (perhaps by the kernel, for want of memory)" if name == "SIGKILL" else ""
    return exitcode, f"was killed by {name}{hint}"
