"""Workers in another Python interpreter: `Workers(python=...)`.

    OtherPython      checks the interpreter before any worker starts, and gives the command that starts it:
    -> lender.py     a program that imports jaxvec, cloudpickle and Gymnasium from the program's folders
    -> worker.py or forkserver.py, with envs that foreign_env.py finds by name and adapts

Nothing has to be installed there for jaxvec. The envs use the interpreter's own packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache, partial
from typing import Any

from jaxvec._backends.other_python import foreign_env, lender
from jaxvec._envs.constructors import Description
from jaxvec._envs.envs import EnvFn
from jaxvec._options import PoolConfig
from jaxvec._workers.interpreter import Interpreter

_OLDEST = {"Python": (3, 10), "numpy": (1, 21), "gymnasium": (0, 26), "gym": (0, 21)}
_LENT = ("jaxvec", "jaxvec._native._ext", "cloudpickle", "gymnasium", "typing_extensions")
_NOT_PASSED_ON = ("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH", "__PYVENV_LAUNCHER__")
_PROBE_TIMEOUT = 60  # seconds

_PROBE = f"""
import json, platform
from importlib.metadata import distributions
versions = {{name: package.version for name in {[*_OLDEST]!r} for package in distributions(name=name)}}
print(json.dumps(dict(versions, Python=platform.python_version())))
"""


class OtherPython(Interpreter):
    """Another interpreter, which has its own packages, and perhaps other versions of them."""

    is_own = False

    @property
    def is_native(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _versions(self.path)["Python"] >= (3, 11)  # the stable ABI of the native library

    def check(self, config: PoolConfig) -> None:
        """Raises `ValueError` if the interpreter is too old or lacks a package, too."""
        versions = _versions(self.path)
        if config.states.max and versions["numpy"] < (2, 0):  # which can't restore generators
            raise ValueError(
                f"states need NumPy 2 in the workers, but Workers(python={self.path!r}) has an older one; "
                "install it there, or leave them out"
            )

    def constructor(self, env: Any) -> Any:
        return foreign_env.by_name(env)

    def adapt(self, env_fn: EnvFn) -> EnvFn:
        return partial(foreign_env.build_adapted, env_fn)

    def to_plain(self, description: Description) -> Description:
        return foreign_env.to_plain(description)

    def sys_path(self) -> list[str]:
        """Returns the folders with the program's own modules, without those of installed packages."""
        installed = tuple(os.path.realpath(root) + os.sep for root in (sys.prefix, sys.base_prefix))
        own = [folder for folder in sys.path if not (os.path.realpath(folder) + os.sep).startswith(installed)]
        return [folder for folder in own if not {"site-packages", "dist-packages"} & {*folder.split(os.sep)}]

    def command(self, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        files: dict[str, Any] = {name: sys.modules[name].__file__ for name in _LENT if name in sys.modules}
        if not self.is_native:
            files.pop("jaxvec._native._ext", None)
        return [self.path, "-u", lender.__file__, json.dumps(files)], _without_python(env)


@cache
def _versions(python: str) -> dict[str, tuple[int, ...]]:
    """Returns the versions of an interpreter and its packages; raises `ValueError` if one is too old."""
    name = f"Workers(python={python!r})"
    try:
        env = _without_python(dict(os.environ))
        run = subprocess.run(
            [python, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=_PROBE_TIMEOUT
        )
        texts: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{name} can't be started: {error}") from error
    except (IndexError, ValueError):
        reason = (run.stderr.strip().splitlines() or [f"it ended with code {run.returncode}"])[-1]  # pyright: ignore
        raise ValueError(f"{name} is no interpreter that can run workers: {reason}") from None
    if "numpy" not in texts:
        raise ValueError(f"{name} has no numpy; install it: {python} -m pip install numpy")
    versions = {package: lender.parse(version) for package, version in texts.items()}
    for package, version in versions.items():
        if version < (oldest := _OLDEST[package]):
            needed = ".".join(map(str, oldest))
            raise ValueError(f"{name} has {package} {texts[package]}, but workers need {needed} or newer")
    return versions


def _without_python(env: dict[str, str]) -> dict[str, str]:
    """Returns environment variables without those of this interpreter."""
    return {name: value for name, value in env.items() if name not in _NOT_PASSED_ON}
