"""Reads and writes the rows of a slice in the segment: actions, observations and infos.

`EpisodeTracker` writes the rewards, flags and statistics of the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from jaxvec._envs.episodes import MARKED
from jaxvec._errors import ActionError
from jaxvec._leaves import DictNode, leaves
from jaxvec._memory.rows import InvalidValue, column, reader, writer, zeroer
from jaxvec._memory.segment import Arrays, Index, InfoKind, kind_of
from jaxvec._spec import PoolSpec

# The end of the text of an error.
WITHOUT_FINAL_OBS = "; if nothing reads an episode's last observation, pass make(final_obs=False)"

_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


class DeclaredInfo:
    """Writer of the declared keys of infos, each with its mask. A missing key, or `None`, becomes zero."""

    def __init__(self, node: DictNode, arrays: Arrays, *, check: str) -> None:
        # A declared info has its keys in pairs: a value and its mask.
        pairs = zip(node.keys[::2], node.children[::2], node.children[1::2], strict=True)
        self._fields = [
            (key, writer(child, arrays, check=check), zeroer(child, arrays), column(mask, arrays))
            for key, child, mask in pairs
        ]

    def write(self, index: int, info: dict[str, Any]) -> None:
        for key, write, clear, mask in self._fields:
            value = info.get(key)
            present = value is not None
            if present:
                write(index, value)
            elif mask[index]:
                clear(index)
            mask[index] = present


class FinalStep:
    """Writer of an episode's last observation and info, under same-step autoreset. Other rows are zero.

    Attributes:
        infos: What `final_info`, and `final_obs` if it has no row, will be in the raw info of the reset that
            follows, by the index of each env that has ended and is not reset yet.
    """

    def __init__(self, spec: PoolSpec, arrays: Arrays, written: Iterable[int], *, check: str) -> None:
        self._obs = self._info = None
        nodes = [node for key, node in zip(spec.info.keys, spec.info.children, strict=True) if key in _FINAL]
        # All arrays that it writes.
        self.columns = [arrays[leaf.path] for node in nodes for leaf in leaves(node)]
        if spec.has_final_obs:
            node = spec.info.child("final_obs")
            mask = column(spec.info.child("_final_obs"), arrays)
            # Other libraries return the env's own object, so an observation is not cast to fit its row.
            check_obs = "structure" if spec.objects else check
            self._obs = (writer(node, arrays, check=check_obs), zeroer(node, arrays), mask)
        self._keeps_unfit = spec.objects
        if spec.has_final_info:
            self._info = DeclaredInfo(spec.info.child("final_info"), arrays, check=check)
        self._written = set(written)  # the rows that may not be zero
        self.infos: dict[int, dict[str, Any]] = {}

    def write(self, index: int, obs: Any, info: dict[str, Any]) -> None:
        """Writes an episode's last step, before a reset that may reuse the memory of observation and info."""
        info = {key: _copied(value) for key, value in info.items()}
        self.infos[index] = {"final_info": info}
        self._written.add(index)
        if self._obs is not None:
            write, clear, mask = self._obs
            try:
                write(index, obs)
                mask[index] = True
            except InvalidValue as error:
                clear(index)  # some leaves may be written
                mask[index] = False
                if not self._keeps_unfit:
                    error.args = (f"{error}{WITHOUT_FINAL_OBS}",)
                    raise
                self.infos[index]["final_obs"] = deepcopy(obs)
        if self._info is not None:
            self._info.write(index, info)

    def is_written(self, index: int) -> bool:
        return index in self._written

    def note_written(self, index: int, *, is_written: bool) -> None:
        """Records whether a row that the parent has written contains an episode's last step."""
        self.infos.pop(index, None)
        self._written.discard(index)
        if is_written:
            self._written.add(index)

    def clear(self, index: int) -> None:
        if index not in self._written:
            return
        self._written.remove(index)
        if self._obs is not None:
            _, clear, mask = self._obs
            clear(index)
            mask[index] = False
        if self._info is not None:
            self._info.write(index, {})


def _copied(value: Any) -> Any:
    """Copies the dicts and arrays of an info."""
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def one_of(info: Mapping[str, Any], row: int, size: int) -> dict[str, Any]:
    """Returns one env's part of the info of a batched env with `size` envs."""
    part: dict[str, Any] = {}
    for key, value in info.items():
        mask = info.get(f"_{key}")
        # Skip masks, and keys that this env has not set.
        if (key.startswith("_") and key[1:] in info) or (mask is not None and not mask[row]):
            continue
        if isinstance(value, Mapping):
            part[key] = one_of(value, row, size)
        else:
            batched = isinstance(value, (np.ndarray, list, tuple)) and len(value) == size
            part[key] = value[row] if batched else value
    return part


class EnvRows:
    """The rows of a slice, by index in the slice."""

    def __init__(self, spec: PoolSpec, rows: Arrays, *, left: bool, check: str) -> None:
        """Prepares to access `rows`, which contain values of an earlier slice if `left`; see `store`."""
        count = len(rows["raw_info",])
        self._read_actions = reader(spec.action, rows)
        self._read_obs = reader(spec.obs, rows, stored=True)
        self.write_obs = writer(spec.obs, rows, check=check)  # called with an index and an observation
        self.final = FinalStep(spec, rows, range(count) if left else (), check=check)
        self._declared = DeclaredInfo(spec.declared, rows, check=check)
        self._raw_info = rows["raw_info",]
        self._raw_info[:] = InfoKind.EMPTY
        self.infos: list[dict[str, Any]] = [{} for _ in range(count)]  # raw, of the last step or reset
        self.objects = {leaf.path: rows[leaf.path] for leaf in spec.object_leaves}
        self.given: dict[int, Any] | None = None  # the next actions by index, if they are Python objects

    def actions(
        self, indices: list[int], rows: Index, state: list[int]
    ) -> tuple[list[Any], ActionError | None]:
        """Returns the next action of each env. `rows` are `indices` in the form of an array index.

        If a padded action is invalid, and the env's `state` needs it, it is the last one, with its error.
        """
        given = self.given
        self.given = None
        if given is not None:
            return [given[index] for index in indices], None
        try:
            return list(self._read_actions(rows)), None
        except ActionError:  # `suppress` would take 0.4 us of each step
            actions: list[Any] = []
        for index in indices:
            try:
                actions += self._read_actions(np.array([index]))
            except ActionError as error:
                actions.append(None)
                if state[index] <= MARKED:
                    return actions, error.with_traceback(None)
        return actions, None

    def obs(self, index: int) -> Any:
        (obs,) = self._read_obs(np.array([index]))
        return obs

    def take_info(self, index: int, info: dict[str, Any]) -> None:
        """Keeps a raw info. Its declared keys are in the row already."""
        self.infos[index] = info
        self._raw_info[index] = kind_of(info)

    def write_info(self, index: int, info: dict[str, Any]) -> None:
        """Writes the declared keys of a raw info, and keeps the info."""
        self._declared.write(index, info)
        self.take_info(index, info)
