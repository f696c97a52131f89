"""Stable-Baselines3's own tests of its vector envs, with the classes swapped for ours.

They run from a checkout of https://github.com/DLR-RM/stable-baselines3, of about the installed version
(e05d2dbe was tried), which the environment variable `JAXVEC_STABLE_BASELINES3` names.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("JAXVEC_STABLE_BASELINES3")

pytestmark = [
    pytest.mark.skipif(
        CHECKOUT is None, reason="JAXVEC_STABLE_BASELINES3 names no checkout of Stable-Baselines3"
    ),
    pytest.mark.timeout(1_200),
]


def test_all_tests_of_vector_envs_pass():
    path = [str(CHECKOUT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
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
