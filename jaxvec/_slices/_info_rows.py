"""Writes the parts of `info` that come from the env: declared keys, and an episode's last step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxvec._memory import _rows
from jaxvec._memory._segment import Arrays
from jaxvec._spaces import DictNode, leaves
from jaxvec._spec import PoolSpec

_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


class DeclaredInfo:
    """Writes the declared keys of a raw info, each with its mask; a missing key reads as zero."""

    def __init__(self, node: DictNode, arrays: Arrays) -> None:
        pairs = zip(node.keys[::2], node.children[::2], node.children[1::2], strict=True)
        self._fields = [
            (key, _rows.writer(child, arrays), _rows.zeroer(child, arrays), _rows.column(mask, arrays))
            for key, child, mask in pairs
        ]

    def write(self, index: int, info: dict[str, Any]) -> None:
        """Writes row `index`."""
        for key, write, clear, mask in self._fields:
            present = key in info
            if present:
                write(index, info[key])
            elif mask[index]:
                clear(index)
            mask[index] = present


class FinalStep:
    """The last observation and info of an episode, under same-step autoreset; zero elsewhere.

    Attributes:
        columns: `[n, ...]` each, of all this.
    """

    def __init__(self, spec: PoolSpec, arrays: Arrays, written: Iterable[int] = ()) -> None:
        """Prepares to write.

        Args:
            spec, arrays: of the pool.
            written: rows that may not be zero: another has left them.
        """
        self._obs = self._info = None
        nodes = [node for key, node in zip(spec.info.keys, spec.info.children, strict=True) if key in _FINAL]
        self.columns = [arrays[leaf.path] for node in nodes for leaf in leaves(node)]
        if spec.has_final_obs:
            node = spec.info.child("final_obs")
            mask = _rows.column(spec.info.child("_final_obs"), arrays)
            self._obs = (_rows.writer(node, arrays), _rows.zeroer(node, arrays), mask)
        if spec.has_final_info:
            self._info = DeclaredInfo(spec.info.child("final_info"), arrays)
        self._written = set(written)  # whose final rows are not zero

    def write(self, index: int, obs: Any, info: dict[str, Any]) -> None:
        """Writes row `index`."""
        self._written.add(index)
        if self._obs is not None:
            write, _, mask = self._obs
            write(index, obs)
            mask[index] = True
        if self._info is not None:
            self._info.write(index, info)

    def is_written(self, index: int) -> bool:
        """Says whether row `index` has something else than zeros."""
        return index in self._written

    def note_written(self, index: int, *, is_written: bool) -> None:
        """Takes note of a row that another has written."""
        (self._written.add if is_written else self._written.discard)(index)

    def clear(self, index: int) -> None:
        """Zeroes row `index`."""
        if index not in self._written:
            return
        self._written.remove(index)
        if self._obs is not None:
            _, clear, mask = self._obs
            clear(index)
            mask[index] = False
        if self._info is not None:
            self._info.write(index, {})


def one_of(info: Mapping[str, Any], row: int, size: int) -> dict[str, Any]:
    """Returns the part of a batched info of `size` envs that is one env's."""
    mine: dict[str, Any] = {}
    for key, value in info.items():
        mask = info.get(f"_{key}")
        if (key.startswith("_") and key[1:] in info) or (mask is not None and not mask[row]):
            continue
        if isinstance(value, Mapping):
            mine[key] = one_of(value, row, size)
        else:
            batched = isinstance(value, (np.ndarray, list, tuple)) and len(value) == size
            mine[key] = value[row] if batched else value
    return mine
