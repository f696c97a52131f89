"""Rows of one segment arrive in another: those that were asked for, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvec._backends.remote.wire_format import RowPacker
from jaxvec._memory.segment import ALIGNMENT

NUM_ENVS = 7
SHAPES = {("bool",): ((), np.bool_), ("odd",): ((3,), np.uint8), ("wide",): ((2, 5), np.float32)}
FINAL, FLAG = ("final",), ("flag",)


def segment(seed):
    rng = np.random.default_rng(seed)
    arrays = {
        path: rng.integers(0, 2, (NUM_ENVS, *shape)).astype(dtype) for path, (shape, dtype) in SHAPES.items()
    }
    flags = rng.integers(0, 2, NUM_ENVS).astype(bool)
    final = rng.integers(1, 9, (NUM_ENVS, 4)).astype(np.int32) * flags[:, None]
    return arrays | {FLAG: flags, FINAL: final, ("whole",): rng.integers(0, 99, (2, 3))}


def packer(arrays):
    paths = [FINAL, *SHAPES, FLAG]
    return RowPacker(arrays, paths, whole=[arrays["whole",][1]], sparse={FINAL: FLAG})


@given(st.sets(st.integers(0, NUM_ENVS - 1)).map(sorted), st.integers(0, 99))
def test_rows_arrive_and_others_stay(slots, seed):
    there, here = segment(seed), segment(seed + 1)
    before = {path: array.copy() for path, array in here.items()}
    slots = np.array(slots, np.int64)
    assert packer(here).unpack(packer(there).pack(slots)).tolist() == slots.tolist()
    others = np.setdiff1d(np.arange(NUM_ENVS), slots)
    for path in [*SHAPES, FLAG, FINAL]:
        np.testing.assert_array_equal(here[path][slots], there[path][slots])
        np.testing.assert_array_equal(here[path][others], before[path][others])
    np.testing.assert_array_equal(here["whole",][1], there["whole",][1])
    np.testing.assert_array_equal(here["whole",][0], before["whole",][0])


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, NUM_ENVS - 1)).map(sorted), st.integers(0, 99)),
        min_size=2,
        max_size=6,
    )
)
def test_the_same_packers_and_buffer_bring_batch_after_batch(batches):
    """As a connection does, which has one buffer for rows of equal length."""
    there, here = segment(0), segment(1)
    packing, unpacking = packer(there), packer(here)
    buffer = np.zeros(0, np.uint8)
    for slots, seed in batches:
        for path, array in segment(seed).items():
            there[path][...] = array
        sent = packing.pack(np.array(slots, np.int64))
        if len(sent) != len(buffer):
            buffer = np.empty_like(sent)
        buffer[:] = sent
        assert unpacking.unpack(buffer).tolist() == slots
        for path in [*SHAPES, FLAG, FINAL]:
            np.testing.assert_array_equal(here[path][slots], there[path][slots])
        np.testing.assert_array_equal(here["whole",][1], there["whole",][1])


@pytest.mark.parametrize("ended", [0, 1, NUM_ENVS])
def test_a_sparse_array_takes_room_for_the_rows_that_are_flagged(ended):
    arrays = {FLAG: np.arange(NUM_ENVS) < ended, FINAL: np.zeros((NUM_ENVS, 4096), np.uint8)}
    sent = RowPacker(arrays, [FLAG, FINAL], sparse={FINAL: FLAG}).pack(np.arange(NUM_ENVS))
    assert len(sent) == 3 * ALIGNMENT + ended * 4096  # how many, which, and their flags
