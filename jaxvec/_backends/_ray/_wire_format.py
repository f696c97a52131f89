"""What travels between the pool's process and a Ray actor; both ends pack and unpack alike."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._handoff._move import Verb
from jaxvec._memory._row_packer import RowPacker
from jaxvec._memory._segment import Arrays
from jaxvec._spec import PoolSpec

Payload: TypeAlias = NDArray[np.uint8]  # rows in one buffer, see `RowPacker`

_KEPT_BY_WORKERS = ("raw_info", "last_seed", "rebuilds")  # rows beside the results, see _layout


class ProcessEnd(NamedTuple):
    """How a worker process ended."""

    exitcode: int | None
    ending: str


class WorkerMessage(NamedTuple):
    """What a worker process said, or a `ProcessEnd`; all rows that it finished before have come before."""

    worker: int
    incarnation: int  # which of the processes in the worker's place it was
    message: Any


class HostFailure(NamedTuple):
    """What went wrong with the actor itself."""

    why: str


class WireFormat:
    """Packs rows at one end and unpacks them at the other.

    Attributes:
        requests: by verb, what workers need for it.
        results: what they answer.
    """

    def __init__(
        self,
        spec: PoolSpec,
        arrays: Arrays,
        workers: range,
        *,
        requested: NDArray[np.int64],
        answered: NDArray[np.int64],
    ) -> None:
        """Prepares for these arrays.

        Args:
            spec: of the pool.
            arrays: of the segment at this end.
            workers: of the actor.
            requested: the request of each slot, `[num_envs]`, which travels to the actor.
            answered: the request that each row answers, `[num_envs]`, which travels back.
        """
        actions = [leaf.path for leaf in spec.action_leaves if not leaf.is_object]
        results = [leaf.path for leaf in spec.timestep_leaves if not leaf.is_object]
        final = [path for path in results if path[:2] == ("info", "final_obs")]
        self._arrays = arrays
        self._rows = [*results, *((name,) for name in _KEPT_BY_WORKERS), ("completed",)]
        sent = arrays | {("requested",): requested}
        self.requests = {
            Verb.STEP: RowPacker(sent, [("requested",), *actions]),
            Verb.RESET: RowPacker(sent, [("requested",), ("seed",)]),
        }
        self.results = RowPacker(
            arrays | {("completed",): answered},
            self._rows,
            whole=[self._of(workers, name) for name in ("stats", "running")],
            sparse=dict.fromkeys(final, ("info", "_final_obs")),
        )

    def inheritance(self, worker: int) -> RowPacker:
        """Returns what packs what a worker needs in the place of one that was lost with its actor."""
        return RowPacker(self._arrays, self._rows, whole=[self._of(range(worker, worker + 1), "stats")])

    def _of(self, workers: range, name: str) -> NDArray[np.generic]:
        return self._arrays[name,][workers.start : workers.stop]
