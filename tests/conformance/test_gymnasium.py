"""Gymnasium's own tests of its vector envs, with the classes swapped for ours.

They run from a checkout of https://github.com/Farama-Foundation/Gymnasium at v1.4.0, which the environment
variable `JAXVEC_GYMNASIUM` names, with `pip install gymnasium==1.4.0 moviepy`.

Tests that fail without the swap as well, for want of a display or an extra, say nothing of us.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CHECKOUT = os.environ.get("JAXVEC_GYMNASIUM")
FILES = ["tests/vector", "tests/wrappers/vector", "tests/envs/registration/test_make_vec.py"]

# What differs, and why.
DIFFERENCES = {
    "tests.vector.test_async_vector_env.test_async_vector_subenv_error": (
        "it wants an error logged for each of two envs that fail in the same step; the first failure ends "
        "our step, and the second env is not stepped if it shares a worker with the first"
    ),
}

pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="JAXVEC_GYMNASIUM names no checkout of Gymnasium"),
    pytest.mark.timeout(1_200),
]


@pytest.mark.parametrize("files", FILES)
def test_only_the_listed_tests_fail(files, tmp_path):
    failed = _failures(tmp_path, [files], swap=True)
    if failed:
        failed -= _failures(tmp_path, [files], swap=False)
    assert failed == {
        name for name in DIFFERENCES if name.startswith(files.removesuffix(".py").replace("/", "."))
    }


def _failures(folder: Path, files: list[str], *, swap: bool) -> set[str]:
    """Returns the names of the tests that fail, and asserts that some pass."""
    report = folder / f"{swap}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    path = [str(CHECKOUT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "SDL_VIDEODRIVER": "dummy"}
    command += ["-k", "not (screen_size and Ant)"]  # without a display, its renderer ends the process
    plugin = ["-p", "gymnasium_swap"] if swap else []
    done = subprocess.run(
        [*command, *plugin], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=1_100
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    cases = ElementTree.parse(report).findall(".//testcase")
    bad = {
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    assert len(bad) < len(cases) / 2, done.stdout
    return bad
