"""`python -m jaxvec`: see `jaxvec.cli`."""

from __future__ import annotations

import sys

from jaxvec.cli._command_line import main

if __name__ == "__main__":
    sys.exit(main())
