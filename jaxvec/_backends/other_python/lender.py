"""The program with which another interpreter starts as a worker, or as a fork server.

It runs before jaxvec can be imported, and so imports only the standard library.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

_OLDEST_GYMNASIUM = (1, 2)  # next to an older one, jaxvec's own modules use the program's


def parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


class Lender(MetaPathFinder):
    """An import hook for single packages of the program. Other packages in their folders stay hidden."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        file = self.files.get(fullname)
        if file is None:
            return None
        folders = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=folders)


def main(files: dict[str, str], lifeline: int, module: str, integers: Sequence[int]) -> None:
    """Imports `module` with the lent packages, and calls its `main`."""
    own = [parse(distribution.version) for distribution in importlib.metadata.distributions(name="gymnasium")]
    if own and own[0] >= _OLDEST_GYMNASIUM:
        del files["gymnasium"]
    sys.meta_path.insert(0, Lender(files))
    _name_modules_as_numpy_2()
    run = importlib.import_module(module).main
    importlib.import_module("jaxvec._backends.other_python")  # adapts envs, with the same Gymnasium
    if own and files.pop("gymnasium", None):
        # jaxvec's modules have the lent one by now. Later imports, by envs, find the interpreter's own.
        for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]:
            del sys.modules[name]
    run(lifeline, *integers)


def _name_modules_as_numpy_2() -> None:
    """Makes pickles of arrays readable by NumPy 1 here and by NumPy 2 in the program."""
    if parse(importlib.import_module("numpy").__version__) >= (2, 0):
        return
    numeric: Any = importlib.import_module("numpy.core.numeric")
    for name in [name for name in sys.modules if name.startswith("numpy.core")]:
        sys.modules.setdefault(name.replace("numpy.core", "numpy._core", 1), sys.modules[name])
    numeric._frombuffer.__module__ = "numpy._core.numeric"  # NumPy 2 warns about the old name


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.path.join(os.path.dirname(os.path.dirname(here)), "_workers")
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != here)]
    # First, so that this process ends with the program from now on.
    descriptor = importlib.import_module("lifeline").hold(int(sys.argv[2]))
    del sys.path[0]
    main(json.loads(sys.argv[1]), descriptor, sys.argv[3], [int(word) for word in sys.argv[4:]])
