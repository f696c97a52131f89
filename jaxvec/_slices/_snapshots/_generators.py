"""Generators of random numbers: NumPy's and Python's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxvec._slices._snapshots._core import Node, Putter, TakesParts


class Generator(Node):
    """NumPy's generator, and the node of its `bits`."""

    __slots__ = ("bits", "kind")

    def __init__(self, kind: type, bits: Any) -> None:
        self.kind = kind
        self.bits = bits

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is not self.kind:
            return self.kind(putter.value(self.bits, None))
        before = old.bit_generator
        bits = putter.value(self.bits, before)
        return old if bits is before and putter.reuse(old) else self.kind(bits)


def take_generator(taker: TakesParts, value: Any) -> Any:
    bits = value.bit_generator
    node = Generator(type(value), taker.memo.get(id(bits)) or take_bits(taker, bits))
    taker.memo[id(value)] = node
    return node


class BitGenerator(Node):
    """Has the sequence of seeds itself, of which nothing changes but how many children it has."""

    __slots__ = ("children", "kind", "sequence", "state")

    def __init__(self, kind: type, state: Any, sequence: Any, children: int) -> None:
        self.kind = kind
        self.state = state
        self.sequence = sequence
        self.children = children

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is not self.kind or not putter.reuse(old):
            old = self.kind()
        self.give(old)
        return old

    def give(self, old: Any) -> None:
        """Gives one of this kind its state."""
        there, sequence = old.seed_seq, self.sequence
        if sequence is None or (
            (there is sequence or _seed(there) == _seed(sequence))
            and there.n_children_spawned == self.children
        ):
            old.state = self.state
        else:  # as unpickling does it; to make another generator takes much longer
            entropy, key, size = _seed(sequence)
            sequence = np.random.SeedSequence(
                entropy, spawn_key=key, pool_size=size, n_children_spawned=self.children
            )
            old.__setstate__((self.state, sequence))

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.kind, other.kind
        yield "", self.state, other.state
        yield "", (_seed(self.sequence), self.children), (_seed(other.sequence), other.children)


def _seed(sequence: Any) -> Any:
    """Returns what a sequence of seeds was made of; `None` if it is another's, of which nobody knows that."""
    if type(sequence) is not np.random.SeedSequence:
        return None
    return sequence.entropy, sequence.spawn_key, sequence.pool_size


def take_bits(taker: TakesParts, value: Any) -> Any:
    sequence = value.seed_seq
    if type(sequence) is np.random.SeedSequence:
        node = BitGenerator(type(value), value.state, sequence, sequence.n_children_spawned)
    else:
        node = BitGenerator(type(value), value.state, None, 0)
    taker.memo[id(value)] = node
    return node


class _Random(Node):
    """Python's or NumPy's older generator."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: type, state: Any) -> None:
        self.kind = kind
        self.state = state

    def put(self, putter: Putter, old: Any) -> Any:
        target = old if type(old) is self.kind and putter.reuse(old) else self.kind()
        if isinstance(target, np.random.RandomState):
            target.set_state(self.state)
        else:
            target.setstate(self.state)
        return target


def take_random(taker: TakesParts, value: Any) -> Any:
    state = value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else value.getstate()
    node = _Random(type(value), state)
    taker.remember(value, node)
    return node
