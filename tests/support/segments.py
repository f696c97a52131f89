"""Segments without a pool, and the available dispatches."""

import gymnasium
import pytest
from support.probe import Autoreset, EnvSpaces, Marks, _native, as_jax, make_spec
from support.probe import segment_module as segment

KINDS = [
    "portable",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(
            _native.reason_unavailable() is not None, reason=str(_native.reason_unavailable())
        ),
    ),
]


def board(num_envs, num_workers):
    """Returns the marks and slices of a pool."""
    spaces = EnvSpaces(gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2), None)
    spec = make_spec(
        spaces, num_envs=num_envs, autoreset=Autoreset.DISABLED, final_obs=False, declared={}, policy=as_jax
    )
    layout = segment.make_layout(spec, num_workers)
    return Marks.of(segment.private_segment(layout)), segment.split_evenly(spec.num_envs, num_workers)
