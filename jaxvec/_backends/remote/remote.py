"""`jaxvec.Remote`: a listener at which hosts of workers dial in, and the pools that use these hosts.

Remote -- makes --> HostLauncher -- one per host --> HostLink (link.py) <-- `jaxvec worker`
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from jaxvec._backends.remote.backend import HostsBackend, split_workers
from jaxvec._backends.remote.link import HostLauncher, HostSource
from jaxvec._backends.remote.wire import Listener
from jaxvec._options import PoolConfig, check_count
from jaxvec._workers.base import Slices

_logger = logging.getLogger("jaxvec")


def parse_address(text: str) -> tuple[str, int]:
    """Returns the host and the port of `"HOST:PORT"`; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"an address has the form HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _outer_name(host: str) -> str:
    """Returns the host of an address that other machines can use, if `host` means all of this machine's."""
    if not ipaddress.ip_address(host).is_unspecified:
        return host
    family, outside = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((outside, 9))  # sends nothing, but chooses a route
        return sock.getsockname()[0]
    return socket.gethostname()


def check_key(key: bytes) -> bytes:
    """Returns a key without surrounding white space; raises `ValueError` if it is too short."""
    if not isinstance(key, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"key must be bytes, such as Path(file).read_bytes(), not {type(key).__name__}")
    if len(key := key.strip()) < 16:
        raise ValueError(f"key must have at least 16 bytes, not {len(key)}; make one: openssl rand -hex 32")
    return key


class Remote(AbstractContextManager["Remote"], HostsBackend):
    """A listener for worker hosts on other machines, for `make(backend=...)`. It needs no Ray.

    A host is a process `jaxvec worker --connect HOST:PORT --key-file FILE`. It dials in, and serves
    some envs until their pool closes. A host that was lost is replaced by one that waits, or dials in later.
    Hosts that dial in while none is needed wait until `close`.

    Args:
        listen: Address `"HOST:PORT"` of this machine at which to listen. Port 0 takes a free one.
        hosts: Number of hosts of each pool. They share its workers evenly.
        key: Key of at least 16 bytes that all hosts have, too. White space at its ends is ignored. A
            process that has it can run code in this process and at the hosts.
        ssl_context: Context with this machine's certificate, to encrypt all data by TLS. The hosts then need
            `--tls-ca FILE`. `None` for no encryption.

    Attributes:
        address: Address `"HOST:PORT"` at which it listens.

    Raises:
        ValueError, TypeError: An argument is invalid.
        OSError: It is not possible to listen at the address.

    Example:
        ```python
        import pathlib, secrets, subprocess, sys

        key = pathlib.Path("key.txt")
        key.write_text(secrets.token_hex())
        with jaxvec.Remote(listen="127.0.0.1:0", key=key.read_bytes()) as remote:
            command = f"{sys.executable} -m jaxvec worker --connect {remote.address} --key-file key.txt"
            host = subprocess.Popen(command.split())  # normally on another machine
            with jaxvec.make("CartPole-v1", 4, num_workers=2, backend=remote) as envs:
                print(envs.reset(seed=0).obs.shape)  # (4, 4)
            print(host.wait())  # 0
        ```
    """

    def __init__(
        self, *, listen: str, key: bytes, hosts: int = 1, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        check_count("hosts", hosts, 1)
        if not isinstance(ssl_context, ssl.SSLContext | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"ssl_context must be an ssl.SSLContext or None, not {ssl_context!r}")
        self._hosts = hosts
        self._listener = Listener(*parse_address(listen), check_key(key), ssl_context)
        host, port = self._listener.address
        self.address: str = join_address(host, port)
        self.close: Callable[[], object] = weakref.finalize(self, self._listener.close)
        self._advice = f"jaxvec worker --connect {join_address(_outer_name(host), port)} --key-file FILE"
        if ssl_context is not None:
            self._advice += " --tls-ca FILE"
        if ipaddress.ip_address(host).is_loopback:
            self._advice += f" (only on this machine, as it listens at {host})"
        _logger.info("waiting for worker hosts at %s; start: %s", self.address, self._advice)

    def __exit__(self, *_: object) -> None:
        self.close()

    def num_workers(self, num_instances: int, timeout: float | None) -> int:
        """Waits for the hosts, and returns the number of workers that fits their cores."""
        waiting = self._listener.wait(self._hosts, timeout)
        if len(waiting) < self._hosts:
            raise TimeoutError(
                f"{len(waiting)} of {self._hosts} worker hosts have dialled in to {self.address} within "
                f"Timeouts.start, {timeout} s; start others: {self._advice}"
            )
        return min(num_instances, self._hosts * min(host.cores for host in waiting))

    def launcher(self, slices: Slices, config: PoolConfig) -> HostLauncher:
        groups = split_workers(slices, self._hosts)
        missing = f"no worker host has dialled in to {self.address}; start: {self._advice}"
        source = HostSource(self._listener, missing, owner=self)
        return HostLauncher(groups, slices, config, [source] * len(groups))
