"""`python -m jaxvec`: see `jaxvec.cli`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    try:
        from jaxvec.cli._main import main  # which imports jax, and takes its time

        code: int = main()
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # who reads our output has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes at its end
        sys.exit(1)
