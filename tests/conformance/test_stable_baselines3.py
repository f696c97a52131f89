"""Stable-Baselines3's own tests of its vector envs, with the classes swapped for ours.

They run from a local checkout, of about the installed version, that `JAXVEC_STABLE_BASELINES3` names:

    git clone --depth 1 https://github.com/DLR-RM/stable-baselines3
    export JAXVEC_STABLE_BASELINES3=$PWD/stable-baselines3
    python -m pytest tests/conformance/test_stable_baselines3.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("JAXVEC_STABLE_BASELINES3")

pytestmark = [
    pytest.mark.skipif(
        not CHECKOUT, reason="JAXVEC_STABLE_BASELINES3 names no checkout of stable-baselines3"
    ),
    pytest.mark.skipif(find_spec("stable_baselines3") is None, reason="stable-baselines3 is not installed"),
    pytest.mark.timeout(1_200),
]


def test_all_tests_of_vector_envs_pass():
    path = [CHECKOUT, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "stable_baselines3_swap"]
    done = subprocess.run(
        [*command, "tests/test_vec_envs.py"],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=1_100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
