"""What a pool may ask of the envs of a worker, whatever kind they are of."""

from __future__ import annotations

from typing import get_args

import pytest

from jaxvec._envs.batch_slice import BatchSlice
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.slice import RequestName, Slice


def test_all_that_is_asked_for_is_in_the_base_class():
    assert set(get_args(RequestName)) <= set(vars(Slice))


@pytest.mark.parametrize("kind", [EnvSlice, BatchSlice])
def test_each_kind_answers_all(kind):
    assert issubclass(kind, Slice)
    assert not kind.__abstractmethods__


def test_batched_envs_refuse_to_keep_states():
    with pytest.raises(NotImplementedError, match="the envs of a BatchSlice do not keep states"):
        object.__new__(BatchSlice).export_states([1])
