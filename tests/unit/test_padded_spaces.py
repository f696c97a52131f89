"""Values of spaces without a fixed shape as padded arrays and back; `jaxvec.spaces`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracle import stack
from support.padded import MOST, EchoEnv, Graph, any_space, assert_equal, model, sizes

import jaxvec
from jaxvec import spaces as padding
from jaxvec._leaves import MaxSizes, as_is, as_jax, leaves, limit, walk
from jaxvec._memory import rows

many = settings(database=None, deadline=None)
policies = pytest.mark.parametrize("policy", [as_is, as_jax], ids=["as_is", "as_jax"])


def rooted(space):
    """Returns the maxima of a space whose root is named `action`."""
    return {f"action/{key}" if key else "action": size for key, size in sizes(space).items()}


@many
@given(any_space, st.integers(0, 99), st.integers(1, 3))
def test_pad_is_as_the_model_and_unpad_is_its_inverse(space, seed, count):
    space.seed(seed)
    values = [space.sample() for _ in range(count)]
    trees = [model(space, value, as_is) for value in values]
    assert_equal(padding.pad(space, values[0], rooted(space)), trees[0])
    assert_equal(padding.pad(space, values, rooted(space)), stack(trees))
    restored = padding.unpad(space, stack(trees))
    for one, value in zip([padding.unpad(space, trees[0]), *restored], [values[0], *values], strict=True):
        assert_equal(one, value)
        assert space.contains(one)


@policies
@many
@given(any_space, st.lists(st.integers(0, 99), min_size=2, max_size=3))
def test_rows_keep_nothing_of_earlier_values(policy, space, seeds):
    node = walk(space, root=("obs",), policy=policy, sizes=MaxSizes({}, default=MOST))
    arrays = {leaf.path: np.zeros((3, *leaf.shape), leaf.stored) for leaf in leaves(node)}
    write, read = rows.writer(node, arrays), rows.reader(node, arrays, stored=True)
    for seed in seeds:
        space.seed(seed)
        value = space.sample()
        write(1, value)
        (stored,) = read(np.array([1]))
        assert_equal(_plain(stored), model(space, value, as_is))
        write(2, stored)  # as the rows of a fault are
    for array in arrays.values():
        assert not array[0].any()
        np.testing.assert_array_equal(array[1], array[2])


def _plain(value):
    match value:
        case dict():
            return {key: _plain(one) for key, one in value.items()}
        case tuple():
            return tuple(map(_plain, value))
    return value


UNLIMITED = {
    "sequence": (spaces.Sequence(spaces.Discrete(3)), {"action": 2}),
    "stacked": (spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True), {"action": 2}),
    "nested": (spaces.Sequence(spaces.Sequence(spaces.Text(9))), {"action": 2, "items": 2, "items/items": 3}),
    "text": (spaces.Text(2**32 - 1, min_length=7), {"action": 5}),
    "choice": (
        spaces.OneOf([spaces.Discrete(2), spaces.Sequence(spaces.Discrete(3))]),
        {"action": {"values": {"1": 2}}},
    ),
    "dict": (
        spaces.Dict(a=spaces.Tuple([spaces.Text(2**32 - 1)]), b=spaces.Discrete(2)),
        {"action": {"a": {"0": 5}}},
    ),
}


@pytest.mark.parametrize("name", UNLIMITED)
def test_samples_of_limited_spaces_fit_the_maximum_sizes(name):
    space, maxima = UNLIMITED[name]
    node = walk(space, root=("action",), policy=as_is, sizes=MaxSizes(maxima))
    limited = limit(space, node)
    limited.seed(0)
    samples = [limited.sample() for _ in range(40)]
    padded = padding.pad(space, samples, maxima)
    if name != "choice":  # its path has no own maximum
        assert_equal(padding.pad(limited, samples), padded)
    for sample in samples:
        assert limited.contains(sample)


@pytest.mark.parametrize("part", ["observation_space", "action_space"])
def test_text_without_a_sensible_maximum_is_refused_by_path(make, part):
    class Browser(EchoEnv):
        def __init__(self):
            super().__init__(spaces.Discrete(2))
            setattr(self, part, spaces.Dict(goal=spaces.Text(2**32 - 1), page=spaces.Discrete(2)))

    root = "obs" if part == "observation_space" else "action"
    text = rf"{root}\['goal'\]: Text has the maximum size 4294967295, .*max_sizes={{'goal': n}}"
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=text):
        make(Browser, 1, backend="serial")
    envs = make(Browser, 1, backend="serial", max_sizes={"goal": 5})
    space = envs.single_observation_space if root == "obs" else envs.single_action_space
    assert space["goal"].max_length == 5


def test_an_unpadded_sample_names_the_function_that_pads_it(make):
    envs = make(lambda: EchoEnv(spaces.Text(5)), 2, backend="serial")
    envs.reset()
    with pytest.raises(jaxvec.ActionError, match=r"jaxvec\.spaces\.pad\(space, values\)"):
        envs.step(envs.action_space.sample())
    samples = [envs.single_action_space.sample() for _ in range(2)]
    assert padding.decode(envs.step(padding.pad(envs.single_action_space, samples)).obs) == samples


def test_an_empty_stack_and_empty_edges_can_be_padded():
    stacked = spaces.Sequence(spaces.Dict({"a": spaces.Box(-1, 1, (2,))}), stack=True)
    value = {"a": np.zeros((0, 2), np.float32)}
    tree = padding.pad(stacked, value, {"action": 3})
    assert tree["length"] == 0
    assert_equal(padding.unpad(stacked, tree), value)
    graphs = spaces.Graph(spaces.Discrete(3), spaces.Discrete(3))
    empty = GraphInstance(np.array([1, 2]), np.zeros(0, int), np.zeros((0, 2), np.int32))
    tree = padding.pad(graphs, empty, {"action": {"nodes": 3, "edges": 2}})
    assert_equal(padding.unpad(graphs, tree), GraphInstance(np.array([1, 2]), None, None))


# --- Maxima -----------------------------------------------------------------------------------


def test_longer_values_are_cut_and_marked():
    text = padding.pad(spaces.Text(9), ["abcdef", "abc"], {"action": jaxvec.spaces.Cut(4)})
    assert padding.decode(text) == ["abcd", "abc"]
    assert (text["length"].tolist(), text["cut"].tolist()) == ([4, 3], [True, False])
    assert padding.unpad(spaces.Text(9), text) == ["abcd", "abc"]
    items = padding.pad(spaces.Sequence(spaces.Text(3)), ("a", "b"), {"action": jaxvec.spaces.Cut(1)})
    assert (padding.decode(items["items"]), items["cut"]) == (["a"], True)


def test_a_cut_graph_loses_the_edges_of_cut_nodes():
    space = spaces.Graph(spaces.Discrete(9), spaces.Discrete(9))
    links = np.array([[0, 2], [1, 0], [2, 2], [0, 1], [1, 1]], np.int32)
    graph = GraphInstance(np.array([5, 6, 7]), np.arange(5), links)
    for nodes, edges, kept, cut in (
        (2, 9, [1, 3, 4], True),
        (3, 2, [0, 1], True),
        (3, 5, [*range(5)], False),
    ):
        maxima = {"action": {"nodes": jaxvec.spaces.Cut(nodes), "edges": edges}}
        if edges == 2:
            maxima = {"action": {"nodes": nodes, "edges": jaxvec.spaces.Cut(edges)}}
        tree = padding.pad(space, graph, maxima)
        assert tree["cut"] == cut
        expected = GraphInstance(graph.nodes[:nodes], np.array(kept), links[kept])
        assert_equal(padding.unpad(space, tree), expected)


SEQUENCE, GRAPH = spaces.Sequence(spaces.Discrete(3)), Graph(spaces.Discrete(3), spaces.Discrete(2))


@pytest.mark.parametrize(
    ("space", "value", "maxima", "message"),
    [
        (spaces.Text(3), "abcd", {}, r"^action: its size is 4, and its maximum 3; .*Cut"),
        (spaces.Text(3), b"abc", {}, "^action: expected a str, got bytes"),
        (spaces.Text(3), "a€", {}, "^action: '€' is not in the charset"),
        (SEQUENCE, (1, 2), {"action": 1}, "^action: its size is 2, and its maximum 1"),
        (SEQUENCE, 7, {"action": 1}, "^action: expected a tuple, got int"),
        (SEQUENCE, (1, "x"), {"action": 2}, r"^action\['items'\]: expected int64, got <U1"),
        (spaces.OneOf([SEQUENCE]), (1, ()), {"action/values/0": 2}, "^action: .*index 1 is out of range"),
        (spaces.OneOf([SEQUENCE]), 3, {"action/values/0": 2}, "^action: expected an index from 0 to 0"),
        (GRAPH, 3, {"action": {"nodes": 1, "edges": 1}}, "^action: expected a GraphInstance, got int"),
        (
            GRAPH,
            GraphInstance(np.ones(2, int), None, None),
            {"action/nodes": 1, "action/edges": 1},
            r"^action\['nodes'\]: its size is 2, and its maximum 1",
        ),
        (
            GRAPH,
            GraphInstance(np.ones(1, int), np.ones(2, int), np.zeros((1, 2), int)),
            {"action/nodes": 1, "action/edges": 3},
            "^action: got 2 edges and 1 edge_links",
        ),
        (
            Graph(spaces.Discrete(3), None),
            GraphInstance(np.ones(1, int), np.ones(1, int), np.zeros((1, 2), int)),
            {"action/nodes": 1},
            "^action: got edges, which the space has not",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_with_its_path(space, value, maxima, message):
    with pytest.raises(jaxvec.ActionError, match=message):
        padding.pad(space, value, maxima)


@pytest.mark.parametrize(
    ("maxima", "error", "message"),
    [
        (3, TypeError, "max_sizes must be a dict"),
        ({"a": 0}, ValueError, r"max_sizes\['a'\] must be an integer of at least 1"),
        ({"a": True}, ValueError, r"max_sizes\['a'\]"),
        ({"a": {"b": "x"}}, ValueError, r"max_sizes\['a/b'\]"),
        ({"a": jaxvec.spaces.Cut(0)}, ValueError, r"max_sizes\['a'\]"),
    ],
)
def test_invalid_maxima_are_refused_by_name(maxima, error, message):
    with pytest.raises(error, match=message):
        jaxvec.make("CartPole-v1", 1, max_sizes=maxima)


def test_missing_and_unknown_maxima_are_refused_by_name():
    space = spaces.Dict({"a": spaces.Tuple((SEQUENCE, GRAPH)), "t": spaces.Text(3)})
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"^action\['a'\]\[0\]: Seq.*'a/0': n"):
        padding.pad(space, None)
    with pytest.raises(
        jaxvec.UnsupportedSpaceError, match=r"^action\['a'\]\[1\]\['edges'\]: Gr.*'a/1/edges': n"
    ):
        padding.pad(space, None, {"a/0": 1, "a/1/nodes": 1})

    class Env(EchoEnv):
        def __init__(self):
            super().__init__(space)

    maxima = {"a": {"0": 3, "1": {"nodes": 1, "edges": 1}}, "b": 3}
    with pytest.raises(ValueError, match=r"no Text.* at \['b'\], only at \['a/0', 'a/1/edges', .*'t'\]"):
        jaxvec.make(Env, 1, backend="serial", max_sizes=maxima)


def test_wrong_sizes_and_indices_in_a_tree_are_errors():
    with pytest.raises(jaxvec.ActionError, match=r"^obs\['length'\]: 4 is not from 0 to 3"):
        padding.unpad(spaces.Text(3), {"chars": np.zeros(3, np.uint8), "length": 4})
    with pytest.raises(jaxvec.ActionError, match=r"^obs\['index'\]: -1 is not from 0 to 0"):
        padding.unpad(spaces.OneOf([spaces.Discrete(2)]), {"index": -1, "values": (0,)})
    wide = spaces.Text(1, charset="€")
    with pytest.raises(jaxvec.ActionError, match=r"^obs\['chars'\]: not code points"):
        padding.unpad(wide, {"chars": np.full(1, 2**30, np.int32), "length": 1})
    with pytest.raises(jaxvec.ActionError, match=r"^obs: expected a dict with keys \['chars', 'length'\]"):
        padding.unpad(wide, 3)


# --- Helpers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_text_is_encoded_and_decoded(dtype):
    texts = ["", "go", "stopé"] + ([] if dtype is np.uint8 else ["€\U0001f600"])
    tree = padding.encode(texts, 6, dtype)
    assert tree["chars"].dtype == dtype
    assert padding.decode(tree) == texts
    assert padding.decode(jax.tree.map(jnp.asarray, tree)) == texts
    assert padding.decode(padding.encode("go", 6, dtype)) == "go"
    assert padding.decode(stack([tree, tree])) == [texts, texts]
