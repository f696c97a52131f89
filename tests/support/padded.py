"""A model of padded values for Gymnasium's spaces, and random spaces without a fixed shape."""

from copy import deepcopy

import gymnasium
import jax
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate
from hypothesis import strategies as st
from support.probe import as_jax

MOST = 4  # items, nodes and edges


class Sequence(spaces.Sequence):
    """Samples at most 3 items; a stack has at least one, as Gymnasium can't sample an empty one."""

    def sample(self, mask=None, probability=None):
        return super().sample(mask=(np.arange(int(self.stack), MOST), None))


class Graph(spaces.Graph):
    """Samples at most 3 nodes and 3 edges."""

    def sample(self, mask=None, probability=None):
        num_edges = 0 if self.edge_space is None else int(self.np_random.integers(MOST))
        edges = {} if self.edge_space is None else {"num_edges": num_edges}
        return super().sample(num_nodes=int(self.np_random.integers(1, MOST)), **edges)


def zeros(space, policy=as_jax):
    """Returns the padded form of a space, all zeros."""
    number = np.zeros((), np.int32)
    match space:
        case spaces.Dict():
            return {key: zeros(child, policy) for key, child in space.items()}
        case spaces.Tuple():
            return tuple(zeros(child, policy) for child in space)
        case spaces.Text():
            dtype = np.uint8 if all(ord(char) < 256 for char in space.character_set) else np.int32
            return {"chars": np.zeros(space.max_length, dtype), "length": number}
        case spaces.Sequence():
            return {"items": repeat(zeros(space.feature_space, policy)), "length": number}
        case spaces.Graph():
            tree = {"nodes": repeat(zeros(space.node_space, policy)), "n_node": number}
            if space.edge_space is not None:
                links = np.zeros((MOST, 2), np.int32)
                tree |= {"edges": repeat(zeros(space.edge_space, policy)), "edge_links": links}
                tree |= {"n_edge": number}
            return tree
        case spaces.OneOf():
            return {"index": number, "values": tuple(zeros(child, policy) for child in space.spaces)}
    return np.zeros(space.shape or (), policy(np.dtype(space.dtype)))


def repeat(tree):
    return jax.tree.map(lambda leaf: np.stack([leaf] * MOST), tree)


def model(space, value, policy=as_jax):
    """Returns the padded form of a value."""
    tree = zeros(space, policy)
    match space:
        case spaces.Dict():
            return {key: model(child, value[key], policy) for key, child in space.items()}
        case spaces.Tuple():
            return tuple(model(child, one, policy) for child, one in zip(space, value, strict=True))
        case spaces.Text():
            tree["chars"][: len(value)] = [ord(char) for char in value]
            return {**tree, "length": np.int32(len(value))}
        case spaces.Sequence():
            items = list(iterate(space.stacked_feature_space, value)) if space.stack else value
            for place, item in enumerate(items):
                parts = model(space.feature_space, item, policy)
                jax.tree.map(lambda to, part, i=place: to.__setitem__(i, part), tree["items"], parts)
            return {**tree, "length": np.int32(len(items))}
        case spaces.Graph():
            tree["nodes"][: len(value.nodes)] = value.nodes
            count = 0 if value.edges is None else len(value.edges)
            if count:
                tree["edges"][:count], tree["edge_links"][:count] = value.edges, value.edge_links
            edges = {} if space.edge_space is None else {"n_edge": np.int32(count)}
            return {**tree, "n_node": np.int32(len(value.nodes)), **edges}
        case spaces.OneOf():
            index, chosen = value
            values = list(tree["values"])
            values[index] = model(space.spaces[index], chosen, policy)
            return {"index": np.int32(index), "values": tuple(values)}
    return np.asarray(value).astype(policy(np.dtype(space.dtype)))


def sizes(space, path=()):
    """Returns `max_sizes` for all spaces within `space` that need it."""
    match space:
        case spaces.Dict():
            parts = [sizes(child, (*path, key)) for key, child in space.items()]
        case spaces.Tuple():
            parts = [sizes(child, (*path, i)) for i, child in enumerate(space)]
        case spaces.OneOf():
            parts = [sizes(child, (*path, "values", i)) for i, child in enumerate(space.spaces)]
        case spaces.Sequence():
            parts = [{"/".join(map(str, path)): MOST}, sizes(space.feature_space, (*path, "items"))]
        case spaces.Graph():
            keys = ["nodes"] if space.edge_space is None else ["nodes", "edges"]
            parts = [{"/".join(map(str, (*path, key))): MOST} for key in keys]
        case _:
            parts = []
    return {key: size for part in parts for key, size in part.items()}


def assert_equal(actual, expected):
    """Compares padded trees, or values of a space, bit for bit; both with the types of their parts."""
    match expected:
        case dict():
            assert actual.keys() == expected.keys()
            for key in expected:
                assert_equal(actual[key], expected[key])
        case tuple() | list():
            assert (type(actual), len(actual)) == (type(expected), len(expected))
            for pair in zip(actual, expected, strict=True):
                assert_equal(*pair)
        case None | str():
            assert actual == expected
        case _:
            actual, expected = np.asarray(actual), np.asarray(expected)
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            assert actual.tobytes() == expected.tobytes(), f"{actual} != {expected}"


# --- Random spaces ----------------------------------------------------------------------------

_numbers = st.sampled_from(
    [
        spaces.Discrete(5, start=-2),
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Box(0, 255, (1,), np.uint8),
        spaces.MultiBinary(3),
        spaces.MultiDiscrete([3, 4]),
    ]
)
_texts = st.builds(spaces.Text, st.integers(1, 6), charset=st.sampled_from(["ab", "aé\xff", "a€\U0001f600"]))
_features = st.sampled_from([spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1, 2)), spaces.Discrete(4)])
_graphs = st.builds(Graph, _features, st.one_of(st.none(), _features))


def nested(children):
    return st.one_of(
        st.dictionaries(st.sampled_from("abc"), children, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(children, min_size=1, max_size=3).map(spaces.Tuple),
        st.builds(Sequence, children, stack=st.booleans()),
        st.lists(children, min_size=1, max_size=3).map(spaces.OneOf),
    )


# Each test has its own copy, and so its own random generators.
any_space = st.recursive(st.one_of(_numbers, _texts, _graphs), nested, max_leaves=4).map(deepcopy)


class EchoEnv(gymnasium.Env):
    """An env that observes a sample of its space or the last action; episodes have 3 steps."""

    def __init__(self, space):
        self.observation_space, self.action_space = deepcopy(space), deepcopy(space)
        self.seen = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self.observation_space.sample(), {"note": self.observation_space.sample()}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.seen.append(action)
        self._steps += 1
        info = {"note": self.observation_space.sample()} if self._steps == 2 else {}
        return action, float(self._steps), self._steps == 3, False, info
