"""Operands, and the small results of a call, go over in one array, and come out of it as they were."""

import contextlib

import jax
import numpy as np
import pytest

from jaxvec.callbacks._packing import Packing

pytestmark = pytest.mark.jax_version

SHAPES = [(5,), (3, 1), (2, 7), (4, 0), (0, 3), (1, 1, 1)]
SMALL = ["?", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4"]
LARGE = [((5000,), "f4"), ((3, 10_000), "u1"), ((20_000,), "?"), ((2, 2), "c8")]


@contextlib.contextmanager
def x64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def arrays_of(types, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for shape, dtype in types:
        dtype = np.dtype(dtype)
        if dtype.kind in "fc":
            made.append(rng.standard_normal(shape).astype(dtype))
        else:
            bounds = (0, 2) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            made.append(rng.integers(*bounds, shape, np.uint64 if dtype == "u8" else np.int64).astype(dtype))
    return made


def packing_of(arrays):
    return Packing.of([jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays])


def check(arrays):
    packing = packing_of(arrays)
    transferred = [np.zeros(each.shape, each.dtype) for each in packing.transfers]
    for array, view in zip(arrays, packing.views(transferred), strict=True):
        assert (view.shape, view.dtype) == (array.shape, array.dtype)
        view[...] = array
    for array, result in zip(arrays, jax.jit(packing.split)(transferred), strict=True):
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array)
    return packing, transferred


def check_operands(arrays):
    packing = Packing.of(arrays, pack_all=True)
    (words,) = packing.transfers
    joined = np.asarray(jax.jit(packing.join)(arrays))
    assert (joined.shape, joined.dtype) == (words.shape, words.dtype)
    for array, view in zip(arrays, packing.views([joined]), strict=True):
        assert view.dtype == array.dtype
        np.testing.assert_array_equal(view, array)


def test_results_come_out_as_they_were():
    arrays = arrays_of([(shape, dtype) for dtype in SMALL for shape in SHAPES])
    packing, transferred = check(arrays)
    assert len(transferred) == 1
    assert packing.num_words <= sum(-(-array.nbytes // 4) for array in arrays)


def test_large_ones_have_arrays_of_their_own():
    arrays = arrays_of([((4,), "f4"), *LARGE, ((3,), "?")])
    _, transferred = check(arrays)
    assert len(transferred) == 1 + len(LARGE)
    for array, sent in zip(arrays[1:-1], transferred[1:], strict=True):
        assert sent.shape == (array.size,)


def test_operands_come_out_as_they_were():
    check_operands(arrays_of([(shape, dtype) for dtype in SMALL for shape in SHAPES] + LARGE[:-1]))


def test_with_64_bits():
    with x64():
        arrays = arrays_of([((3,), "f8"), ((3,), "i8"), ((2, 2), "u8"), ((3,), "f4"), ((2,), "c16")])
        check(arrays)
        check_operands(arrays[:-1])


@pytest.mark.parametrize("types", [[], [((0,), "f4")], [((5000,), "f4")]])
def test_where_nothing_is_packed(types):
    packing, _ = check(arrays_of(types))
    assert packing.num_words == 0
