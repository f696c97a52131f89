"""What a pool may ask of the envs of a worker, whatever kind they are of."""

from __future__ import annotations

from typing import get_args

import pytest

from jaxvec._envs.batch_slice import BatchSlice
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.slice import Asked, Slice


def test_all_that_is_asked_for_is_in_the_protocol():
    assert set(get_args(Asked)) <= set(vars(Slice))


@pytest.mark.parametrize("kind", [EnvSlice, BatchSlice])
def test_each_kind_answers_all(kind):
    assert all(hasattr(kind, name) for name in get_args(Asked))
