"""Generators of random numbers: NumPy's and Python's."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxvec._slices._snapshots._core import Node, Putter, TakesParts


class _Generator(Node):
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
    node = _Generator(type(value), taker.value(value.bit_generator))
    taker.memo[id(value)] = node
    return node


class _BitGenerator(Node):
    __slots__ = ("kind", "sequence", "state")

    def __init__(self, kind: type, state: Any, sequence: Any) -> None:
        self.kind = kind
        self.state = state
        self.sequence = sequence

    def put(self, putter: Putter, old: Any) -> Any:
        if type(old) is self.kind and _sequence(old) == self.sequence and putter.reuse(old):
            old.state = self.state
            return old
        if self.sequence is None:
            bits = self.kind()
        else:
            entropy, key, size, spawned = self.sequence
            bits = self.kind(
                np.random.SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=spawned)
            )
        bits.state = self.state
        return bits


def _sequence(bits: Any) -> Any:
    """Returns what a bit generator's children depend on."""
    sequence = bits.seed_seq
    if type(sequence) is not np.random.SeedSequence:
        return None
    return sequence.entropy, sequence.spawn_key, sequence.pool_size, sequence.n_children_spawned


def take_bits(taker: TakesParts, value: Any) -> Any:
    node = _BitGenerator(type(value), value.state, _sequence(value))
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
