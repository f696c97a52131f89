"""Fixtures for tests of the example programs."""

import gymnasium
import pytest


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
