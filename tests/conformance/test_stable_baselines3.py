"""Stable-Baselines3's own tests of its vector envs, with the classes swapped for ours.

They run from a checkout, of about the installed version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import STABLE_BASELINES3

pytestmark = [
    pytest.mark.skipif(bool(STABLE_BASELINES3.missing), reason=STABLE_BASELINES3.missing),
    pytest.mark.timeout(1_200),
]


def test_all_tests_of_vector_envs_pass():
    path = [str(STABLE_BASELINES3.folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "stable_baselines3_swap"]
    done = subprocess.run(
        [*command, "tests/test_vec_envs.py"],
        cwd=STABLE_BASELINES3.folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=1_100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
