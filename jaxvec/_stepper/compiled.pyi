"""What compiled.cc and states.cc have; they say more."""

from collections.abc import Callable
from typing import Any, TypeAlias, final

from numpy.typing import NDArray

Fields: TypeAlias = tuple[dict[str, Any], dict[str, Any], int]
Nodes: TypeAlias = tuple[set[type], type, type, type, type, type]

def leaf_writer(write: Callable[[int, Any], None], rows: NDArray[Any], /) -> Callable[[int, Any], None]:
    """Returns what writes a row as `write` does, and calls it with values that need care."""

def nested_writer(
    write: Callable[[int, Any], None],
    keys: tuple[Any, ...] | None,
    children: tuple[Callable[[int, Any], None], ...],
    /,
) -> Callable[[int, Any], None]:
    """Returns what writes a dict of these keys, or a tuple, as `write` does; see `leaf_writer`."""

def put_again(
    layers: list[Any], told: list[frozenset[str] | None], fields: list[Fields], nodes: Nodes, /
) -> bool:
    """Puts a snapshot back, as `_snapshots/snapshot.py` says."""

def take_again(
    layers: list[Any], told: list[frozenset[str] | None], before: list[Fields], nodes: Nodes, /
) -> list[Fields] | None:
    """Takes a snapshot, as `_snapshots/snapshot.py` says."""

def stepper(
    *,
    states: list[int],
    infos: list[dict[str, Any]],
    marks: tuple[NDArray[Any], ...] | None,
    returns: NDArray[Any],
    lengths: NDArray[Any],
    row_reward: NDArray[Any],
    row_return: NDArray[Any],
    row_length: NDArray[Any],
    running: NDArray[Any],
    forked: list[int],
    write_obs: Callable[[int, Any], None],
    write_info: Callable[[int, dict[str, Any]], None],
    first: int,
    marked: int,
) -> Stepper:
    """Returns the loop of a slice; of its index, what the lists and columns have, which it changes.

    `marks` are the columns that say how the episode before has ended; `None` leaves them to Python.
    """

@final
class Stepper:
    """Steps envs in turn, for as long as their steps are ordinary."""

    def run(
        self,
        place: int,
        envs: list[Any],
        limits: list[tuple[dict[str, Any], ...]],
        indices: list[int],
        actions: list[Any],
        end_step: Callable[[int, Any, bool, bool, dict[str, Any]], tuple[Any, dict[str, Any]]],
        after: Callable[[int], None] | None,
        /,
    ) -> tuple[int, Any]:
        """Steps from `place` in `indices` on; returns where it stopped, and what `step` has returned there.

        Args:
            place: of the first.
            envs: to be called, by index.
            limits: the attributes of the `TimeLimit`s around each that are passed by but count, inmost first.
            indices: of the envs to be stepped.
            actions: of each of these.
            end_step: is called at an episode's end, with index, observation, flags and info; returns the
                row's observation and info.
            after: is told of each that is done.

        Returns:
            `len(indices)` if all is done. Where it stopped before, the row is not written.
        """
