"""Rollouts on a Ray cluster, and workers in another Python."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jaxvec._options import PoolConfig

if TYPE_CHECKING:
    from jaxvec._workers.interpreter import Interpreter


def make_other_python(config: PoolConfig) -> Interpreter | None:
    if config.workers.python is None:
        return None
    from jaxvec._backends.other_python import OtherPython

    return OtherPython(os.fspath(config.workers.python))
