"""Workers in another Python interpreter: its check in the program, and its start.

    Workers(python=...) -> probe    checks the interpreter, before any worker starts
                        -> spawn.py starts it with this file as its program
    this file -> Lender             imports jaxvec, cloudpickle and Gymnasium from the program's folders
              -> worker.py or forkserver.py

Nothing has to be installed there for jaxvec. The envs use the interpreter's own packages; `foreign_env.py`
adapts envs of libraries that jaxvec itself can't use. As a program, this file runs before jaxvec can be
imported, so it imports only the standard library.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from typing import Any

_OLDEST = {"Python": (3, 10), "numpy": (1, 21), "gymnasium": (0, 26), "gym": (0, 21)}
_OLDEST_USED = (1, 2)  # of Gymnasium; next to an older one, jaxvec's own modules use the program's
_LENT = ("jaxvec", "jaxvec._native._ext", "cloudpickle", "gymnasium", "typing_extensions")
_NOT_PASSED_ON = ("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH", "__PYVENV_LAUNCHER__")
_PROBE_TIMEOUT = 60  # seconds

_PROBE = f"""
import json, platform
from importlib.metadata import distributions
versions = {{name: one.version for name in {[*_OLDEST]!r} for one in distributions(name=name)}}
print(json.dumps(dict(versions, Python=platform.python_version())))
"""


@dataclass(frozen=True)
class Interpreter:
    """Another interpreter that can run workers."""

    python: str  # path of the executable
    version: tuple[int, ...]
    numpy: tuple[int, ...]

    @property
    def is_native(self) -> bool:
        """True if the native library can be loaded there: it uses the stable ABI of 3.11."""
        return self.version >= (3, 11)


@cache
def probe(python: str) -> Interpreter:
    """Checks an interpreter. Raises `ValueError` if it is too old or lacks a package."""
    name = f"Workers(python={python!r})"
    try:
        env = _environ(os.environ)
        run = subprocess.run(
            [python, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=_PROBE_TIMEOUT
        )
        found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{name} can't be started: {error}") from error
    except (IndexError, ValueError):
        reason = (run.stderr.strip().splitlines() or [f"it ended with code {run.returncode}"])[-1]  # pyright: ignore
        raise ValueError(f"{name} is no interpreter that can run workers: {reason}") from None
    if "numpy" not in found:
        raise ValueError(f"{name} has no numpy; install it: {python} -m pip install numpy")
    for package, version in found.items():
        if _parse(version) < (oldest := _OLDEST[package]):
            needed = ".".join(map(str, oldest))
            raise ValueError(f"{name} has {package} {version}, but workers need {needed} or newer")
    return Interpreter(python, _parse(found["Python"]), _parse(found["numpy"]))


def command(python: str, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns a command to which `spawn.py` adds the arguments of `lifeline.py`, and its environment."""
    files: dict[str, Any] = {name: sys.modules[name].__file__ for name in _LENT if name in sys.modules}
    if not probe(python).is_native:
        files.pop("jaxvec._native._ext", None)
    return [python, "-u", __file__, json.dumps(files)], _environ(env)


def path_for(python: Any) -> tuple[list[str], bool]:
    """Returns entries of `sys.path` for workers, and whether they follow those of the interpreter itself.

    Another interpreter gets the folders with the program's own modules, without installed packages.
    """
    if python is None:
        return list(sys.path), False
    installed = tuple(os.path.realpath(root) + os.sep for root in (sys.prefix, sys.base_prefix))
    entries = [each for each in sys.path if not (os.path.realpath(each) + os.sep).startswith(installed)]
    return [each for each in entries if not {"site-packages", "dist-packages"} & {*each.split(os.sep)}], True


def _environ(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _NOT_PASSED_ON}


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


# --- In the other interpreter -----------------------------------------------------------------------------


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
    own = [_parse(one.version) for one in importlib.metadata.distributions(name="gymnasium")]
    if own and own[0] >= _OLDEST_USED:
        del files["gymnasium"]
    sys.meta_path.insert(0, Lender(files))
    _name_modules_as_numpy_2()
    run = importlib.import_module(module).main
    if own and files.pop("gymnasium", None):
        # jaxvec's modules have the lent one by now. Later imports, by envs, find the interpreter's own.
        for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]:
            del sys.modules[name]
    run(lifeline, *integers)


def _name_modules_as_numpy_2() -> None:
    """Makes pickles of arrays readable by NumPy 1 here and by NumPy 2 in the program."""
    if _parse(importlib.import_module("numpy").__version__) >= (2, 0):
        return
    numeric: Any = importlib.import_module("numpy.core.numeric")
    for name in [name for name in sys.modules if name.startswith("numpy.core")]:
        sys.modules.setdefault(name.replace("numpy.core", "numpy._core", 1), sys.modules[name])
    numeric._frombuffer.__module__ = "numpy._core.numeric"  # NumPy 2 warns about the old name


if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    # First, so that this process ends with the program from now on.
    held = importlib.import_module("lifeline").hold(int(sys.argv[2]))
    del sys.path[0]
    main(json.loads(sys.argv[1]), held, sys.argv[3], [int(word) for word in sys.argv[4:]])
