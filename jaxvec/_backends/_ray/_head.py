"""Watches a Ray cluster's head, without which Ray ends this process after a while; says so before."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

_EVERY = 1.0  # seconds
_SHARE = 2 / 3  # of the time that Ray waits for a head to come back


class Head:
    """Looks whether the head can be reached, until it is closed.

    Steps don't need the head, so one that comes back in time, as Ray's fault-tolerant ones do, is not
    missed. One that does not is fatal: Ray exits the process, by `RAY_gcs_rpc_server_reconnect_timeout_s`
    (60 s by default). After two thirds of that the pool gets its error, while there is time to save.

    Attributes:
        lost: what is wrong, if it is.
    """

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        """Begins to watch.

        Args:
            address: of the head, `host:port`.
            tell: is called once, in another thread, when the head is lost.
        """
        self._address = address
        self._tell = tell
        self.lost = ""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()

    def _watch(self) -> None:
        patience = _SHARE * float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112
        seen = time.monotonic()
        while not self._closed.wait(_EVERY):
            if self._answers():
                seen = time.monotonic()
            elif time.monotonic() - seen > patience:
                self.lost = f"was lost: the Ray cluster's head at {self._address} does not answer"
                self._tell(self.lost)
                return

    def _answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_EVERY).close()
        except OSError:
            return False
        return True
