"""The entry point of the command `jaxvec`, and of `python -m jaxvec`."""

from __future__ import annotations

import os
import sys

from jaxvec._util import INTERRUPTED, leave


def main() -> None:
    """Runs the command line of `jaxvec.cli`, and exits."""
    if not sys.flags.safe_path and (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does: the env of `jaxvec check` may be a module here
    try:
        from jaxvec.cli._main import main as run  # slow, as it imports jax, so Ctrl-C must work here

        code: int = run()
        sys.stdout.flush()
        if code == INTERRUPTED:
            leave()
        sys.exit(code)
    except KeyboardInterrupt:
        leave()  # XLA may still compile
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        # Python flushes stdout at exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
