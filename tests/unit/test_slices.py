"""The requests that a worker answers, whatever the kind of its envs."""

from __future__ import annotations

import pytest

from jaxvec._envs.env_access import EnvAccess, SlotAccess
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.slice import Slice
from jaxvec._extensions.batch_slice import BatchAccess, BatchSlice


@pytest.mark.parametrize(
    ("kind", "interface"),
    [(EnvSlice, Slice), (BatchSlice, Slice), (SlotAccess, EnvAccess), (BatchAccess, EnvAccess)],
)
def test_each_kind_implements_the_interface(kind, interface):
    assert issubclass(kind, interface)
    assert not kind.__abstractmethods__
