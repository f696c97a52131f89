"""Integers never wrap, and floats become infinite: all dtypes and leaves, with Python ints as the model."""

import itertools
import math

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import GraphInstance

from jaxvec import ActionError, _native
from jaxvec import spaces as padding
from jaxvec._arguments import cast_rows
from jaxvec._leaves import Leaf, as_is, as_jax
from jaxvec._memory import rows as _rows
from jaxvec._memory.segment import make_layout, private_segment
from jaxvec._spec import Autoreset, EnvSpaces, make_spec

INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
FLOATS = [np.dtype(f"f{size}") for size in (2, 4, 8)]
LIMITS = {dtype: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for dtype in INTEGERS}
EDGES = sorted({5, 300, *(edge + by for edges in LIMITS.values() for edge in edges for by in (-1, 0, 1))})
SEQUENCE = spaces.Sequence(spaces.Box(0, 9, (2,), np.uint8))
GRAPH = spaces.Graph(spaces.Box(0, 9, (1,), np.int16), None)
NUMBERS = [0.0, 1.5, -1.5, 65504.0, 65520.0, 1e30, -1e39, 1e200, math.inf, -math.inf, math.nan]

WRITERS = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
POLICIES = pytest.mark.parametrize("policy", [as_is, as_jax], ids=["as_is", "as_jax"])


def values_of(dtype):
    low, high = LIMITS[dtype]
    return [value for value in EDGES if low <= value <= high]


def writer(monkeypatch, compiled, space, policy, strict=False):
    """Returns the leaf of an observation, the function that writes it, and the rows."""
    if not compiled:
        monkeypatch.setattr(_native, "ext", None)
    elif _native.ext is None:
        pytest.skip(f"not compiled: {_native.reason_unavailable()}")
    spec = make_spec(
        EnvSpaces(space, spaces.Discrete(2), None),
        num_envs=2,
        autoreset=Autoreset.DISABLED,
        final_obs=False,
        declared={},
        policy=policy,
    )
    arrays = private_segment(make_layout(spec, 1))
    return spec.obs, _rows.writer(spec.obs, arrays, check="strict" if strict else "structure"), arrays


@WRITERS
@POLICIES
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_of_any_dtype_fit_or_are_refused(monkeypatch, compiled, policy, dtype, shape):
    leaf, write, arrays = writer(monkeypatch, compiled, spaces.Box(0, 1, shape, dtype), policy)
    low, high = LIMITS[leaf.stored]
    for given in INTEGERS:
        if shape and not np.can_cast(given, dtype, "same_kind"):
            with pytest.raises(_rows.InvalidValue, match=f"obs: expected {dtype}, got {given}"):
                write(1, np.zeros(shape, given))
            continue
        for value in values_of(given):
            array = np.zeros(shape, given)
            array[(-1,) * len(shape)] = value
            for one in (array, given.type(value), value) if not shape else (array,):
                if low <= value <= high:
                    write(1, one)
                    assert int(arrays["obs",][(1, *(-1,) * len(shape))]) == value
                else:
                    with pytest.raises(
                        _rows.InvalidValue, match=f"obs: {value} doesn't fit into {leaf.stored}"
                    ):
                        write(1, one)


@WRITERS
@POLICIES
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_out_of_range_are_infinite_unless_strict(monkeypatch, compiled, policy, dtype, strict):
    for shape in ((), (2,)):
        space = spaces.Box(-np.inf, np.inf, shape, dtype)
        leaf, write, arrays = writer(monkeypatch, compiled, space, policy, strict)
        for given, number in itertools.product([*FLOATS, *INTEGERS], [*NUMBERS, *EDGES]):
            if given.kind == "f":
                with np.errstate(over="ignore"):
                    array = np.full(shape, number, given)
            elif isinstance(number, int) and number in values_of(given):
                array = np.full(shape, number, given)
            else:
                continue
            with np.errstate(over="ignore"):
                expected = array.astype(leaf.stored)
            if strict and np.isinf(expected).any() and np.isfinite(array).all():
                with pytest.raises(_rows.InvalidValue, match=rf"obs: .* doesn't fit into {leaf.stored}"):
                    write(1, array)
            else:
                write(1, array)
                np.testing.assert_array_equal(arrays["obs",][1], expected)


@pytest.mark.parametrize(
    ("space", "value", "maxima", "wrong"),
    [
        (SEQUENCE, (np.ones(2, np.uint8), np.array([1, 300], np.uint16)), {"action": 3}, 300),
        (
            spaces.Sequence(SEQUENCE),
            ((np.array([1, 300], np.uint16),),),
            {"action": 2, "action/items": 3},
            300,
        ),
        (
            spaces.Sequence(spaces.Box(0, 9, (), np.int16), stack=True),
            np.array([1, 2**16]),
            {"action": 3},
            2**16,
        ),
        (GRAPH, GraphInstance(np.array([[1], [2**16]]), None, None), {"action/nodes": 3}, 2**16),
        (spaces.OneOf([spaces.Box(0, 9, (1,), np.int16)]), (0, np.array([2**16])), {}, 2**16),
    ],
    ids=["sequence", "nested", "stacked", "graph", "one_of"],
)
def test_integers_in_padded_values_never_wrap(space, value, maxima, wrong):
    with pytest.raises(ActionError, match=rf"action.*: {wrong} doesn't fit into"):
        padding.pad(space, value, maxima)


@pytest.mark.parametrize("stored", INTEGERS, ids=str)
def test_actions_of_any_integer_dtype_fit_or_are_refused(stored):
    leaf = Leaf(("action", "x"), (2,), stored, stored)
    low, high = LIMITS[stored]
    for given in [np.dtype(bool), *INTEGERS]:
        for value in [0, 1] if given.kind == "b" else values_of(given):
            array = np.zeros((3, 2), given)
            array[1, 1] = value
            if low <= value <= high:
                assert cast_rows(leaf, array)[1].tolist() == [0, value]
                continue
            with pytest.raises(ActionError) as caught:
                cast_rows(leaf, array)
            assert str(caught.value) == f"action['x']: {value} for env 1 doesn't fit into {stored}"
