"""`python -m jaxvec`: see `jaxvec.cli`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from jaxvec.cli._command_line import main  # which imports jax, and takes its time

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
