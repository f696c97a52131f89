"""Fixtures for tests of the example programs and of the site."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def register():
    """Yields `gymnasium.register`, undone after the test."""
    before = set(gymnasium.registry)
    yield gymnasium.register
    for env_id in set(gymnasium.registry) - before:
        del gymnasium.registry[env_id]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Builds the site, warnings being errors, in the folder that SITE names, or a new one; returns it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e . --group docs")
    folder = Path(os.environ.get("SITE") or tmp_path_factory.mktemp("site"))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
