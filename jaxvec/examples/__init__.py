"""Example programs: `python -m jaxvec.examples.ppo` runs one."""

import sys
from importlib.util import find_spec

from jaxvec.adapters._packages import install_command

_missing = [package for package in ("flax", "optax") if find_spec(package) is None]
if _missing:
    raise (SystemExit if sys.argv[0] == "-m" else ImportError)(  # a program has one line of error
        f"jaxvec's examples need {', '.join(_missing)}, of the extra [demo]: {install_command('demo')}"
    )
