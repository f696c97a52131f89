"""What travels between a pool's segment and that of a Ray actor; both ends make the same of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxvec._handoff._move import Verb
from jaxvec._memory._row_packer import RowPacker
from jaxvec._memory._segment import Arrays
from jaxvec._spec import PoolSpec

_WORKERS = ("has_info", "last_seed", "rebuilds")  # what else workers write, see _layout


class Waybills:
    """What is packed at one end and unpacked at the other.

    Attributes:
        out: by operation, what workers need for it.
        back: what they answer.
    """

    def __init__(
        self,
        spec: PoolSpec,
        arrays: Arrays,
        workers: range,
        *,
        asked: NDArray[np.int64],
        answered: NDArray[np.int64],
    ) -> None:
        """Prepares for these arrays.

        Args:
            spec: of the pool.
            arrays: of the segment at this end.
            workers: that live at the other end, or at this.
            asked: the request of each slot, `[num_envs]`; out.
            answered: the request that its row answers, `[num_envs]`; back.
        """
        actions = [leaf.path for leaf in spec.action_leaves if not leaf.is_object]
        results = [leaf.path for leaf in spec.timestep_leaves if not leaf.is_object]
        final = [path for path in results if path[:2] == ("info", "final_obs")]
        self._arrays = arrays
        self._rows = [*results, *((name,) for name in _WORKERS), ("done",)]
        out = arrays | {("asked",): asked}
        self.out = {
            Verb.STEP: RowPacker(out, [("asked",), *actions]),
            Verb.RESET: RowPacker(out, [("asked",), ("seed",)]),
        }
        self.back = RowPacker(
            arrays | {("done",): answered},
            self._rows,
            whole=[self._of(name, workers) for name in ("stats", "running")],
            sparse=dict.fromkeys(final, ("info", "_final_obs")),
        )

    def left_by(self, worker: int) -> RowPacker:
        """Returns what a worker needs at the other end to take the place of one that has gone."""
        whole = [self._of("stats", range(worker, worker + 1))]
        return RowPacker(self._arrays, self._rows, whole=whole)

    def _of(self, name: str, workers: range) -> NDArray[np.generic]:
        return self._arrays[name,][workers.start : workers.stop]
