"""The rows of a slice's envs, as far as they are the envs' own: actions out, observations and infos in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._memory import _rows
from jaxvec._memory._raw_info import RawInfo, kind_of
from jaxvec._memory._segment import Arrays
from jaxvec._memory._views import Index
from jaxvec._slices._info_rows import DeclaredInfo, FinalStep
from jaxvec._spec import PoolSpec


class EnvRows:
    """Of the envs of a slice, which go by their index there.

    Attributes:
        write_obs: writes one observation, by index.
        final: of episodes that have ended.
        infos: the raw info of each env's last call.
        given: the next actions, by index, if they are not in the segment.
        objects: leaves of Python objects.
    """

    def __init__(self, spec: PoolSpec, rows: Arrays, *, left: bool) -> None:
        """Prepares to read and write.

        Args:
            spec: of the pool.
            rows: the envs' rows of the segment's arrays.
            left: whether another slice has left them.
        """
        count = len(rows["raw_info",])
        self._read_actions = _rows.reader(spec.action, rows)
        self._read_obs = _rows.reader(spec.obs, rows)
        self.write_obs = _rows.writer(spec.obs, rows)
        self.final = FinalStep(spec, rows, range(count) if left else ())
        self._declared = DeclaredInfo(spec.declared, rows)
        self._raw_info = rows["raw_info",]
        self._raw_info[:] = RawInfo.EMPTY
        self.infos: list[dict[str, Any]] = [{} for _ in range(count)]
        self._timestep = [rows[leaf.path] for leaf in spec.timestep_leaves]
        self.objects = {leaf.path: rows[leaf.path] for leaf in spec.object_leaves}
        self.given: dict[int, Any] | None = None

    def actions(self, indices: list[int], rows: Index) -> list[Any]:
        """Returns the next action of each of these envs, once; `rows` are `indices`, for an array."""
        given, self.given = self.given, None
        if given is None:
            return list(self._read_actions(rows))
        return [given[index] for index in indices]

    def obs(self, index: int) -> Any:
        """Returns a copy of the observation that is in the row."""
        (obs,) = self._read_obs(np.array([index]))
        return obs

    def put(self, indices: NDArray[Any], rows: Sequence[NDArray[Any]]) -> None:
        """Writes whole rows of time steps, `[n, ...]` each."""
        for array, row in zip(self._timestep, rows, strict=True):
            array[indices] = row

    def take_info(self, index: int, info: dict[str, Any]) -> None:
        """Keeps a raw info whose declared keys another has written."""
        self.infos[index] = info
        self._raw_info[index] = kind_of(info)

    def write_info(self, index: int, info: dict[str, Any]) -> None:
        """Writes what is declared of a raw info, and keeps all of it."""
        self._declared.write(index, info)
        self.take_info(index, info)
