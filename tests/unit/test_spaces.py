"""Any nested space to rows of a segment and back, exactly; or an error that names the leaf."""

import dataclasses
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from copy import deepcopy
from math import prod
from types import MappingProxyType

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxvec
from jaxvec._leaves import as_is, as_jax, declared_leaves, leaves, walk
from jaxvec._memory import rows as _rows
from jaxvec._memory import segment
from jaxvec._memory.segment import make_layout, split_evenly
from jaxvec._spec import Autoreset, EnvSpaces, make_spec

many = settings(database=None)
policies = pytest.mark.parametrize("policy", [as_is, as_jax], ids=["as_is", "as_jax"])

INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
FLOATS = [np.dtype(f"f{size}") for size in (2, 4, 8)]
INT32 = np.iinfo(np.int32)


# --- strategies -------------------------------------------------------------------------------


def shapes(min_side=0):
    return st.lists(st.integers(min_side, 3), max_size=3).map(tuple)


@st.composite
def boxes(draw, wide):
    """Boxes of every dtype; bounds of 64-bit integers fit into 32 bits unless `wide`."""
    dtype, shape = draw(st.sampled_from([*INTEGERS, *FLOATS, np.dtype(bool)])), draw(shapes())
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, dtype)
    if dtype.kind == "f":
        bound = draw(st.sampled_from([1, 1000, np.inf] if dtype.itemsize > 2 else [1, 1000]))
        return spaces.Box(-bound, bound, shape, dtype)
    limits = np.iinfo(dtype if wide or dtype.itemsize < 8 else f"{dtype.kind}4")
    # Not to the ends of 64 bits, where Gymnasium's `sample` overflows.
    low = draw(st.integers(max(int(limits.min), -(2**62)), min(int(limits.max), 2**62)))
    high = draw(st.integers(low, min(int(limits.max), low + 2**60)))
    return spaces.Box(low, high, shape, dtype)


@st.composite
def discretes(draw, wide):
    dtype = draw(st.sampled_from(INTEGERS[:4]))
    limits = np.iinfo(dtype if wide else min(dtype, np.dtype("i4"), key=lambda d: d.itemsize))
    start = draw(st.integers(int(limits.min), int(limits.max) - 3))
    return spaces.Discrete(draw(st.integers(1, 3)), start=start, dtype=dtype)


@st.composite
def multi_discretes(draw, wide):
    shape = draw(shapes(min_side=1).filter(len))
    counts = st.lists(st.integers(1, 9), min_size=prod(shape), max_size=prod(shape))
    nvec = np.array(draw(counts)).reshape(shape)
    dtype = draw(st.sampled_from([np.int8, np.int16, np.int32, np.int64]))
    return spaces.MultiDiscrete(nvec, start=nvec * draw(st.integers(-5, 5)), dtype=dtype)


multi_binaries = st.one_of(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3)).map(
    spaces.MultiBinary
)


@st.composite
def dicts(draw, children):
    keys = draw(
        st.one_of(
            *(st.lists(key, max_size=3, unique=True) for key in (st.integers(-9, 9), st.text(max_size=3)))
        )
    )
    return spaces.Dict(OrderedDict((key, draw(children)) for key in keys))  # keeps the order of keys


def nested_spaces(wide):
    leaf = st.one_of(boxes(wide), discretes(wide), multi_discretes(wide), multi_binaries)
    return st.recursive(
        leaf,
        lambda children: st.one_of(
            dicts(children), st.lists(children, max_size=3).map(lambda s: spaces.Tuple(s))
        ),
        max_leaves=6,
    )


# --- what is expected -------------------------------------------------------------------------


def map_leaves(f, value):
    match value:
        case dict():
            return {key: map_leaves(f, child) for key, child in value.items()}
        case tuple():
            return tuple(map_leaves(f, child) for child in value)
    return f(value)


def rounded(policy):
    """Returns a function that takes a value to the stored dtype and back."""
    return lambda value: value.astype(policy(value.dtype)).astype(value.dtype)


def gymnasiums_rows(space, values):
    """Returns each env's value as Gymnasium's vector envs hand actions over."""
    n = len(values)
    match space:
        case spaces.Dict():  # Gymnasium itself can't iterate over an empty one
            columns = [
                gymnasiums_rows(child, [value[key] for value in values]) for key, child in space.items()
            ]
            return [
                dict(zip(space, row, strict=True))
                for row in (zip(*columns, strict=True) if columns else [()] * n)
            ]
        case spaces.Tuple():
            columns = [
                gymnasiums_rows(child, [value[i] for value in values]) for i, child in enumerate(space)
            ]
            return list(zip(*columns, strict=True)) if columns else [()] * n
    return list(iterate(batch_space(space, n), concatenate(space, values, create_empty_array(space, n))))


def has_empty(space):
    children = list(space.values()) if isinstance(space, spaces.Dict) else list(space)
    return not children or any(has_empty(c) for c in children if isinstance(c, (spaces.Dict, spaces.Tuple)))


def assert_same(actual, expected, *, ordered=True):
    """Compares types, order of keys, dtypes, shapes and bits."""
    assert type(actual) is type(expected)
    match expected:
        case dict():
            assert (list(actual) if ordered else set(actual)) == (
                list(expected) if ordered else set(expected)
            )
            for key in expected:
                assert_same(actual[key], expected[key], ordered=ordered)
        case tuple():
            assert len(actual) == len(expected)
            for pair in zip(actual, expected, strict=True):
                assert_same(*pair, ordered=ordered)
        case _:
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            assert actual.tobytes() == expected.tobytes(), f"{actual} != {expected}"


def make_rows(space, policy, num_envs=3, num_workers=1):
    env_spaces = EnvSpaces(observation=space, action=space, reward=None)
    mode = Autoreset.SAME_STEP
    spec = make_spec(
        env_spaces, num_envs=num_envs, autoreset=mode, final_obs=True, declared={}, policy=policy
    )
    layout = make_layout(spec, num_workers)
    return spec, layout, segment.private_segment(layout)


# --- round trips ------------------------------------------------------------------------------


@policies
@many
@given(st.data(), st.integers(1, 4), st.integers(0, 99))
def test_values_round_trip_as_gymnasium_passes_them(policy, data, num_envs, seed):
    space = data.draw(nested_spaces(wide=policy is as_is))
    space.seed(seed)
    values = [space.sample() for _ in range(num_envs)]
    spec, _, arrays = make_rows(space, policy, num_envs)
    write = _rows.writer(spec.obs, arrays)
    for slot, value in enumerate(values):
        write(slot, value)
    expected = [map_leaves(rounded(policy), row) for row in gymnasiums_rows(space, values)]
    for leaf in leaves(spec.obs):
        assert arrays[leaf.path].dtype == leaf.stored == policy(leaf.dtype)
        assert arrays[leaf.path].shape == (num_envs, *leaf.shape)
    rows = list(_rows.reader(spec.obs, arrays)(np.arange(num_envs)))
    assert len(rows) == num_envs
    for row, expected_row in zip(rows, expected, strict=True):
        assert_same(row, expected_row)
    if not isinstance(space, (spaces.Dict, spaces.Tuple)) or not has_empty(space):
        batch = concatenate(space, values, create_empty_array(space, num_envs))
        for row, whole in zip(rows, iterate(batch_space(space, num_envs), batch), strict=True):
            # Its batched Dict space has sorted keys; ours, as the env's own, keep their order.
            assert_same(row, map_leaves(rounded(policy), whole), ordered=False)


@policies
@many
@given(st.data())
def test_what_is_read_is_a_copy_of_the_slots_asked_for(policy, data):
    space = data.draw(nested_spaces(wide=False))
    spec, _, arrays = make_rows(space, policy)
    write, read = _rows.writer(spec.action, arrays), _rows.reader(spec.action, arrays)
    for slot in range(3):
        write(slot, space.sample())
    before = deepcopy(list(read(np.arange(3))))
    slots = data.draw(st.permutations([0, 1, 2]))[: data.draw(st.integers(0, 3))]
    picked = list(read(np.array(slots, int)))
    assert len(picked) == len(slots)

    def spoil(value):
        if isinstance(value, np.ndarray):
            value[...] = ~value if value.dtype.kind == "b" else value + 1
        return value

    for slot, row in zip(slots, picked, strict=True):
        assert_same(row, before[slot])
        map_leaves(spoil, row)
    for row, again in zip(before, read(np.arange(3)), strict=True):
        assert_same(again, row)


@policies
@many
@given(st.data(), st.integers(1, 5), st.data())
def test_fields_are_aligned_and_do_not_overlap(policy, data, num_envs, more):
    space = data.draw(nested_spaces(wide=False))
    num_workers = more.draw(st.integers(1, num_envs))
    spec, layout, arrays = make_rows(space, policy, num_envs, num_workers)
    assert {field.path for field in layout.fields} >= {
        leaf.path for leaf in (*spec.action_leaves, *spec.timestep_leaves)
    }
    assert len({field.path for field in layout.fields}) == len(layout.fields)
    end = 0
    for field in sorted(layout.fields, key=lambda field: (field.offset, field.nbytes)):
        assert field.offset % 64 == 0
        assert field.offset >= end
        assert field.nbytes == arrays[field.path].nbytes
        assert arrays[field.path].flags.c_contiguous
        end = field.offset + field.nbytes
    assert end <= layout.nbytes
    slices = split_evenly(num_envs, num_workers)
    assert [i for first, stop in slices for i in range(first, stop)] == list(range(num_envs))
    assert all(first < stop for first, stop in slices)


def test_layout_message_does_not_grow_with_the_number_of_workers():
    spec, few, _ = make_rows(spaces.Discrete(2), as_jax, num_envs=1000)
    many = make_layout(spec, 1000)
    assert abs(len(pickle.dumps(many)) - len(pickle.dumps(few))) < 100


# --- actions as they reach an env -------------------------------------------------------------

KINDS = {
    "discrete": spaces.Discrete(5, start=-2),
    "discrete of int8": spaces.Discrete(5, dtype=np.int8),
    "box": spaces.Box(-1, 1, (2, 3), np.float32),
    "box of float64": spaces.Box(-1, 1, (3,), np.float64),
    "box of float16": spaces.Box(-1, 1, (3,), np.float16),
    "box without shape": spaces.Box(-1, 1, (), np.float32),
    "float64 without shape": spaces.Box(-1, 1, (), np.float64),
    "int64 without shape": spaces.Box(-9, 9, (), np.int64),
    "bool without shape": spaces.Box(0, 1, (), np.bool_),
    "box of bool": spaces.Box(0, 1, (2,), np.bool_),
    "box of uint8": spaces.Box(0, 255, (2,), np.uint8),
    "empty box": spaces.Box(-1, 1, (0, 2), np.float32),
    "multidiscrete": spaces.MultiDiscrete([3, 4], start=[1, -1]),
    "matrix multidiscrete": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "multibinary": spaces.MultiBinary([2, 2]),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
    "dict": spaces.Dict(OrderedDict(z=spaces.Discrete(3), a=spaces.MultiBinary(2))),
    "integer keys": spaces.Dict({2: spaces.Discrete(3), 10: spaces.Discrete(4)}),
    "nested": spaces.Dict(
        {"b": spaces.Tuple((spaces.Dict({"c": spaces.Discrete(3)}), spaces.Box(0, 1, ())))}
    ),
}


class RecordingEnv(gymnasium.Env):
    """Records what it is given, then spoils the arrays among it."""

    observation_space = spaces.Discrete(2)

    def __init__(self, action_space):
        self.action_space = action_space
        self.seen = []

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.seen.append(self.describe(action))
        return 0, 0.0, False, False, {}

    def describe(self, value):
        match value:
            case dict():
                return dict, {key: self.describe(child) for key, child in value.items()}
            case tuple():
                return tuple, tuple(self.describe(child) for child in value)
        seen = type(value), value.dtype, value.shape, value.tolist()
        if isinstance(value, np.ndarray):
            value[...] = 0  # an env may: it must be writeable, and nobody else's
        return seen


@pytest.mark.parametrize("how", ["jit", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_actions_reach_an_env_as_under_gymnasium(make, kind, how):
    space = KINDS[kind]
    oracle = SyncVectorEnv([lambda: RecordingEnv(space)] * 3)
    # The nested one through processes: elsewhere the same code runs here, and faster.
    envs = make(lambda: RecordingEnv(space), 3, backend="process" if kind == "nested" else "serial")
    envs.action_space.seed(5)
    handle, _ = jaxvec.reset(envs)
    oracle.reset()
    step = jax.jit(jaxvec.step)
    for _ in range(4):
        raw = envs.action_space.sample()
        action = jax.tree.map(lambda leaf: leaf.astype(as_jax(leaf.dtype)), raw)
        if how == "jit":
            handle, timestep = step(handle, action)
            jax.block_until_ready(timestep)
        else:
            envs.step(action)
        oracle.step(jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), action, raw))
    assert envs.call("seen") == oracle.call("seen")
    assert len(envs.call("seen")[0]) == 4


@pytest.mark.parametrize(("space", "action"), [(spaces.Dict({}), {}), (spaces.Tuple(()), ())])
def test_an_empty_action_space_can_be_stepped(make, backend, space, action):
    envs = make(lambda: RecordingEnv(space), 2, backend=backend)
    handle, _ = jaxvec.reset(envs)
    handle, _ = jax.block_until_ready(jax.jit(jaxvec.step)(handle, action))
    jaxvec.step(handle, action)
    envs.step(action)
    assert envs.call("seen") == ([(type(action), type(action)())] * 3,) * 2


# --- spaces that can't be ---------------------------------------------------------------------


class CustomSpace(spaces.Space):
    def __eq__(self, other):
        return isinstance(other, CustomSpace)


UNSUPPORTED = {
    "Text": spaces.Text(5),
    "Graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
    "Sequence": spaces.Sequence(spaces.Discrete(3)),
    "OneOf": spaces.OneOf([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
    "CustomSpace": CustomSpace((2,), np.float32),
}


@pytest.mark.parametrize("where", ["obs", "action"])
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_space_is_named_by_its_path(kind, where):
    bad = UNSUPPORTED[kind]
    deep = spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), bad)), "b": spaces.Discrete(2)})
    match = rf"{where}\['a'\]\[1\]: {kind} .*Box, Discrete"
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=match):
        walk(deep, root=(where,), policy=as_is)
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=rf"^{where}: {kind} "):
        walk(bad, root=(where,), policy=as_is)


def test_an_unsupported_space_of_a_worker_and_of_an_info_key(make):
    bad = spaces.Dict({"mission": CustomSpace((2,), np.float32)})
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"action\['mission'\]: CustomSpace"):
        make(lambda: RecordingEnv(bad), 2)
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"info\['goal'\]\['mission'\]: CustomSpace"):
        make(lambda: RecordingEnv(spaces.Discrete(2)), 2, backend="serial", info={"goal": bad})


@pytest.mark.parametrize("declaration", [np.int32, np.dtype("i4"), "i4", np.zeros((), "i4"), jnp.int32])
def test_a_dtype_of_an_info_key_may_be_written_in_any_way(declaration):
    node = declared_leaves({"lives": declaration}, as_is).child("lives")
    assert (node.shape, node.dtype) == ((), np.int32)


def test_unsortable_keys_and_unsupported_dtypes_are_rejected():
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"obs\['k'\]: keys .* can't be sorted"):
        mixed = spaces.Dict({"a": spaces.Discrete(2), 1: spaces.Discrete(2)})
        walk(spaces.Dict({"k": mixed}), root=("obs",), policy=as_is)
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"obs\[0\]: dtype .* has no JAX equivalent"):
        walk(spaces.Tuple((spaces.Box(-1, 1, (2,), np.longdouble),)), root=("obs",), policy=as_is)


BEYOND = {
    "Discrete": spaces.Discrete(2**31 + 1),
    "Discrete's start": spaces.Discrete(2, start=2**31 - 1),
    "Discrete's negative start": spaces.Discrete(2, start=-(2**31) - 1),
    "MultiDiscrete": spaces.MultiDiscrete([2, 2**31 + 1]),
    "MultiDiscrete's start": spaces.MultiDiscrete([2, 2], start=[0, -(2**31) - 1]),
}


@pytest.mark.parametrize("name", BEYOND)
def test_counted_spaces_beyond_int32_need_x64(name):
    space = spaces.Tuple((spaces.Discrete(2), BEYOND[name]))
    with pytest.raises(
        jaxvec.UnsupportedSpaceError, match=r"action\[1\]: values from .* don't fit into int32.*x64"
    ):
        walk(space, root=("action",), policy=as_jax)
    (_, leaf) = leaves(walk(space, root=("action",), policy=as_is))
    assert leaf.stored == np.int64


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(2, start=INT32.max - 1),
        spaces.Discrete(2, start=INT32.min),
        spaces.MultiDiscrete([2, 2], start=[INT32.min, INT32.max - 1]),
    ],
)
def test_the_ends_of_int32_are_still_in(space):
    spec, _, arrays = make_rows(space, as_jax, num_envs=1)
    low = np.asarray(space.start)
    for value in (low, low + 1):
        _rows.writer(spec.obs, arrays)(0, value if space.shape else int(value))
        (row,) = _rows.reader(spec.obs, arrays)(np.arange(1))
        assert row.dtype == np.int64
        np.testing.assert_array_equal(row, value)


# --- values that don't fit --------------------------------------------------------------------

DEEP = spaces.Dict(
    {
        "a": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))),
        "i": spaces.Box(-9, 9, (2,), np.int64),
        "s": spaces.Box(-1, 1, (), np.float64),
        "u": spaces.Box(0, 255, (2,), np.uint8),
    }
)


def deep(**changes):
    good = {"a": (1, np.ones(2, np.float32)), "i": np.ones(2, np.int64), "s": 0.5, "u": np.ones(2, np.uint8)}
    return good | changes


def without(key):
    return {k: v for k, v in deep().items() if k != key}


F2 = np.ones(2, np.float32)
INVALID = {
    "missing key": (without("s"), r"obs: expected keys .*missing \['s'\]"),
    "extra key": (deep(z=1), r"obs: expected keys .*not in the space \['z'\]"),
    "no dict": ((1, 2, 3, 4), r"obs: expected a dict with keys .*got tuple"),
    "short tuple": (deep(a=(1,)), r"obs\['a'\]: expected a tuple of 2, got one of 1"),
    "array for a tuple": (deep(a=F2), r"obs\['a'\]: expected a tuple of 2, got ndarray"),
    "wrong length": (
        deep(a=(1, np.ones(3, np.float32))),
        r"obs\['a'\]\[1\]: expected shape \(2,\), got \(3,\)",
    ),
    "scalar for a vector": (deep(i=1), r"obs\['i'\]: expected shape \(2,\), got \(\)"),
    "vector for a scalar": (deep(s=np.ones(1)), r"obs\['s'\]: expected shape \(\), got \(1,\)"),
    "vector for a discrete": (
        deep(a=(np.ones(1, int), F2)),
        r"obs\['a'\]\[0\]: expected shape \(\), got \(1,\)",
    ),
    "float for a discrete": (deep(a=(1.0, F2)), r"obs\['a'\]\[0\]: expected int64, got float64"),
    "floats for integers": (deep(i=np.ones(2)), r"obs\['i'\]: expected int64, got float64"),
    "signed for unsigned": (deep(u=np.ones(2, int)), r"obs\['u'\]: expected uint8, got int64"),
    "none for a discrete": (deep(a=(None, F2)), r"obs\['a'\]\[0\]: expected int64, got NoneType"),
    "none for a float": (deep(s=None), r"obs\['s'\]: expected float64, got NoneType"),
    "none for a vector": (deep(i=None), r"obs\['i'\]: expected shape \(2,\), got \(\)"),
    "ragged": (deep(i=[[1], [2, 3]]), r"obs\['i'\]: expected shape \(2,\), got a ragged sequence"),
    "objects": (deep(i=np.array([object(), object()])), r"obs\['i'\]: expected int64, got"),
    "an object": (deep(s=object()), r"obs\['s'\]: expected float64, got object"),
    "a string": (deep(s="0.5"), r"obs\['s'\]: expected float64, got <U3"),
    "a complex number": (deep(s=1j), r"obs\['s'\]: expected float64, got complex128"),
}


@policies
@pytest.mark.parametrize("name", INVALID)
def test_a_value_that_does_not_fit_is_refused_with_its_leaf(name, policy):
    value, match = INVALID[name]
    spec, _, arrays = make_rows(DEEP, policy)
    write = _rows.writer(spec.obs, arrays)
    for slot in range(3):
        write(slot, deep())
    before = {path: array.copy() for path, array in arrays.items()}
    with pytest.raises(_rows.InvalidValue, match=match):
        write(1, value)
    for path, array in arrays.items():
        np.testing.assert_array_equal(array, before[path])


FITTING = {
    "python numbers": deep(a=(True, F2), s=1),
    "numpy scalars": deep(a=(np.uint8(1), F2), s=np.float32(1)),
    "arrays without shape": deep(a=(np.array(1), F2), s=np.array(1.0)),
    "lists": deep(a=[1, [1.0, 1.0]], i=[1, 1], s=1.0),
    "wider floats": deep(a=(1, np.ones(2)), s=1.0),
    "integers for floats": deep(a=(1, np.ones(2, int)), s=1),
    "smaller integers": deep(i=np.ones(2, np.int8), s=1.0),
    "any order and kind of dict": MappingProxyType(dict(reversed(deep(s=1.0).items()))),
    "strided arrays": deep(i=np.ones(4, int)[::2], s=1.0),
    "foreign byte order": deep(i=np.ones(2, ">i8"), s=np.array(1.0, ">f8")),
}


@policies
@pytest.mark.parametrize("name", FITTING)
def test_values_that_gymnasium_would_stack_are_taken(name, policy):
    spec, _, arrays = make_rows(DEEP, policy)
    _rows.writer(spec.obs, arrays)(1, FITTING[name])
    for leaf in leaves(spec.obs):
        np.testing.assert_array_equal(arrays[leaf.path][1], 1)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is sealed on Linux")
def test_nobody_can_make_the_memory_shorter_under_those_who_use_it():
    """Their next touch of what has gone would kill them."""
    spec = make_spec(
        EnvSpaces(spaces.Discrete(2), spaces.Discrete(2), None),
        num_envs=2,
        autoreset=Autoreset.DISABLED,
        final_obs=False,
        declared={},
        policy=as_jax,
    )
    layout = make_layout(spec, 1)
    descriptor = segment.create_segment(layout)
    assert os.fstat(descriptor).st_blocks > 0
    for size in (0, 2 * layout.nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


# --- specifications ---------------------------------------------------------------------------


def test_a_specification_is_its_value_in_every_process():
    spaces_ = EnvSpaces(spaces.Discrete(2), spaces.Discrete(2), None)
    specs = [
        make_spec(spaces_, num_envs=2, autoreset=mode, final_obs=False, declared={}, policy=as_jax)
        for mode in Autoreset
    ]
    assert len({spec.fingerprint for spec in specs}) == len(set(specs)) == len(Autoreset)
    unpickled = "import pickle, sys; print(*(s.fingerprint for s in pickle.load(sys.stdin.buffer)))"
    for seed in ("1", "2"):
        # New ones, which have not worked out their fingerprints here.
        new = [dataclasses.replace(spec) for spec in specs]
        done = subprocess.run(
            [sys.executable, "-c", unpickled],
            input=pickle.dumps(new),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            timeout=200,
            check=True,
        )
        assert [int(each) for each in done.stdout.split()] == [spec.fingerprint for spec in specs]
    assert {spec: spec for spec in specs} == {spec: spec for spec in pickle.loads(pickle.dumps(specs))}
