"""How to install what an optional part of jaxvec needs."""

from __future__ import annotations

import importlib.metadata
import re
import shlex


def command(extra: str) -> str:
    """Returns the command that installs what an extra of jaxvec needs, however jaxvec itself came here.

    It names the packages and not `jaxvec[extra]`, which an installer could only find in an index.
    """
    try:
        return shlex.join(["pip", "install", *_packages(extra)]).replace("'", '"')
    except importlib.metadata.PackageNotFoundError:  # it was not installed, but found by PYTHONPATH
        return f'pip install ".[{extra}]" in the folder of jaxvec\'s pyproject.toml'


def _packages(extra: str) -> list[str]:
    packages: list[str] = []
    for requirement in importlib.metadata.requires("jaxvec") or ():
        package, _, condition = requirement.partition(";")
        if re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", condition) is None:
            continue
        ours = re.fullmatch(r"jaxvec\[(.+)\]", package.strip())  # an extra may be made of others
        parts = ours[1].split(",") if ours else []
        packages += [each for part in parts for each in _packages(part)] or [package.strip()]
    return packages
