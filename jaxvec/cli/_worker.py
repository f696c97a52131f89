"""The command `worker`: a host of workers for a pool on another machine. It does not import JAX."""

from __future__ import annotations

import logging
import os
import platform
import ssl
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from jaxvec._backends.remote.host import serve_pool
from jaxvec._backends.remote.remote import check_key, parse_address
from jaxvec._backends.remote.wire import HostLostError

_DETAILS = """\
The command connects to the pool, and serves envs until the pool closes (exit code 0). If the connection is
lost, or the pool needs another version, the exit code is 1; start the command again to dial in again.
The key file has the same content as the key of jaxvec.Remote. A process that has the key can run code here.

example: jaxvec worker --connect learner.example.org:7777 --key-file key.txt"""


def main(argv: Sequence[str]) -> int:
    """Serves a pool; returns the exit code.

    Args:
        argv: The arguments after `jaxvec worker`.
    """
    parser = ArgumentParser(
        prog="jaxvec worker",
        description="Serve envs of a pool on another machine, for backend=jaxvec.Remote(...).",
        epilog=_DETAILS,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--connect", metavar="HOST:PORT", required=True, help="where the pool listens")
    parser.add_argument("--key-file", metavar="FILE", type=Path, required=True, help="file with the key")
    parser.add_argument("--wait", metavar="SECONDS", type=float, default=60, help="to reach the pool (60)")
    parser.add_argument("--tls-ca", metavar="FILE", help="certificate of the pool, or of its authority")
    options = parser.parse_args(argv)
    try:
        address, key = parse_address(options.connect), check_key(options.key_file.read_bytes())
        context = None if options.tls_ca is None else ssl.create_default_context(cafile=options.tls_ca)
    except (OSError, ValueError) as error:
        return _fail(error, 2)
    node = f"{platform.node()} (process {os.getpid()})"
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        serve_pool(address, key, node=node, wait=options.wait, context=context)
    except HostLostError as error:
        return _fail(f"this host {error}", 1)
    except OSError as error:
        return _fail(error, 1)
    return 0


def _fail(why: object, code: int) -> int:
    print(f"jaxvec worker: {why}", file=sys.stderr)
    return code
