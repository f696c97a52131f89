"""The requests that a worker answers, whatever the kind of its envs."""

from __future__ import annotations

import pytest

from jaxvec._envs.batch_slice import BatchSlice
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.slice import Slice


@pytest.mark.parametrize("kind", [EnvSlice, BatchSlice])
def test_each_kind_implements_the_interface(kind):
    assert issubclass(kind, Slice)
    assert not kind.__abstractmethods__
