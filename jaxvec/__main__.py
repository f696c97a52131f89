"""Runs the command line of `jaxvec.cli` for `python -m jaxvec`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["worker"]:  # must not import jax
            from jaxvec.cli._worker import main as serve

            sys.exit(serve(sys.argv[2:]))
        from jaxvec.cli._main import main  # slow, as it imports jax, so Ctrl-C must work here

        code: int = main()
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        # Python flushes stdout at exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
