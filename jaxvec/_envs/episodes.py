"""Episodes: how far each is, and the rows that were delivered before a fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._memory.rows import reader, scalars
from jaxvec._memory.segment import Arrays, index_of
from jaxvec._spec import Autoreset, KeyPath, PoolSpec

# ----------------------------------------------------------------------------------------------------------
# How far each env's episode is, and what its row says of that, after steps, ends, faults and resets.
# ----------------------------------------------------------------------------------------------------------

# What an env has to do when it is asked for a step. All but the first are rare; those after `MARKED` come in
# place of stepping the env.
PLAYING = 0  # steps
MARKED = 1  # steps, and clears what its row says of the end of the episode before
ENDED = 2  # resets: next-step autoreset
IDLE = 3  # nothing, until it is reset from outside
LOST = 4  # ends its episode, which a fault has cut
UNRESET = 5  # resets within the step: its row already says that an episode ended

# What an env has to do, and return and length of its episode.
Saved: TypeAlias = tuple[int, Any, int]

_AFTER_END = {
    Autoreset.SAME_STEP: UNRESET,
    Autoreset.NEXT_STEP: ENDED,
    Autoreset.DISABLED: MARKED,
    Autoreset.EPISODIC: IDLE,
}


class Episodes:
    """Of the envs of a slice, which go by their index there.

    The ordinary step is also C++'s, which does to the same lists and rows what `take` does, and `mark`
    where no episode ends.

    Attributes:
        state: what each env has to do when it is asked for a step.
        returns, lengths: of the episodes that run, in float64 and int64, whatever the rows store.
        row_rewards, row_returns, row_lengths: what the rows say.
        end_marks: the columns of the rows that say that an episode has ended.
    """

    def __init__(self, rows: Arrays, autoreset: Autoreset, *, lost: bool = False) -> None:
        """Begins with episodes that have not begun.

        Args:
            rows: arrays `[n, ...]`, of which these fields are written: reward, flags and statistics.
            autoreset: what happens when an episode ends.
            lost: whether a fault has cut the episodes that others have begun in these rows.
        """
        count, *shape = rows["reward",].shape
        self._zero: Any = np.zeros(shape) if shape else 0.0
        self.state = [LOST if lost else PLAYING] * count
        self.returns, self.lengths = np.zeros((count, *shape)), np.zeros(count, np.int64)
        self._returns, self._lengths = scalars(self.returns), scalars(self.lengths)
        self.row_rewards = scalars(rows["reward",])
        self.row_returns, self.row_lengths = (
            scalars(rows["info", name]) for name in ("episode_return", "episode_length")
        )
        fault, idle = (rows.get(("info", name), np.zeros(count, np.bool_)) for name in ("fault", "idle"))
        self.end_marks = rows["terminated",], rows["truncated",], fault
        self._terminated, self._truncated, self._fault = map(scalars, self.end_marks)
        self._idle = scalars(idle)
        self._over = _AFTER_END[autoreset]

    def begin(self, index: int, saved: Saved | None = None) -> None:
        """Takes a reset in a call or a step of its own: the row holds no reward and a new episode.

        `saved` is what `save` returned of an episode that goes on in place of a new one.
        """
        self._write(index, False, False, fault=False)
        self._idle[index] = False
        self._restart(index, PLAYING, saved)
        self.row_rewards[index] = self._zero
        self.row_returns[index], self.row_lengths[index] = self._returns[index], self._lengths[index]

    def take(self, index: int, reward: Any) -> bool:
        """Takes a step's reward; says whether its row is marked with the end of the episode before."""
        self.row_rewards[index] = reward
        self._returns[index] = self.row_returns[index] = self._returns[index] + reward
        self._lengths[index] = self.row_lengths[index] = self._lengths[index] + 1
        return self.state[index] == MARKED

    def mark(self, index: int, terminated: bool, truncated: bool) -> bool:
        """Takes the flags of a step, if one is set or the row has some; says whether its episode is over."""
        over = terminated or truncated
        self._write(index, terminated, truncated, fault=False)
        self.state[index] = self._over if over else PLAYING
        return over

    def reset_in_step(self, index: int, saved: Saved | None = None) -> None:
        """Takes the reset after an episode's last step: the row still says how that ended; see `begin`."""
        self._restart(index, MARKED, saved)

    def idle(self, index: int) -> None:
        """Takes a step that an env was asked for and did not take; the row goes on as it is."""
        self.row_rewards[index] = self._zero
        self._idle[index] = True

    def lose(self, index: int) -> None:
        """Takes a fault in a step."""
        self.state[index] = LOST

    def cut(self, index: int, delivered: tuple[Any, int], *, over: bool) -> bool:
        """Ends an episode that is lost.

        Args:
            index: of the env.
            delivered: return and length of the episode, as its row said before the fault.
            over: whether that row ended an episode.

        Returns:
            Whether there was one: after an end, only same-step autoreset has begun another.
        """
        if over and self._over in (ENDED, IDLE):
            self.state[index] = self._over
            return False
        self.row_rewards[index] = self._zero
        self.row_returns[index], self.row_lengths[index] = delivered
        self._write(index, False, True, fault=True)
        self.state[index] = self._over
        return True

    def is_lost(self, index: int) -> bool:
        """Says whether a fault has cut an episode whose row does not say so yet."""
        return self.state[index] == LOST

    def is_over(self, index: int) -> bool:
        """Says whether an env has to be reset before it steps again."""
        ended = self._over == MARKED and bool(self._terminated[index] or self._truncated[index])
        return ended or self.state[index] in (ENDED, IDLE)

    def save(self, index: int) -> Saved:
        """Returns what an env has to do, and return and length of its episode."""
        return self.state[index], self._zero + self._returns[index], self._lengths[index]

    def restore(self, index: int, saved: Saved) -> None:
        """Goes on from what `save` returned, and leaves the row to others."""
        self.state[index], self._returns[index], self._lengths[index] = saved

    def clear_marks(self, index: int) -> None:
        """Has the next step write flags even where the row, which is another's, may say what they are."""
        self._idle[index] = False
        if self.state[index] == PLAYING:
            self.state[index] = MARKED

    def _restart(self, index: int, state: int, saved: Saved | None) -> None:
        _, played, length = (state, self._zero, 0) if saved is None else saved
        self.state[index], self._returns[index], self._lengths[index] = state, played, length

    def _write(self, index: int, terminated: bool, truncated: bool, *, fault: bool) -> None:
        self._terminated[index], self._truncated[index], self._fault[index] = terminated, truncated, fault


# ----------------------------------------------------------------------------------------------------------
# What the program has of each env: its row as it was before the step that runs.
#
# The row of a fault says what was delivered before, and never what a worker left half-done. So before a
# step touches any row, its slice keeps what such a row is made of, in memory that outlives the worker:
#
# 1. it copies observation, return, length, and whether the episode was over;
# 2. it notes for which request: only now do the copies count;
# 3. the envs step, and their rows are overwritten.
#
# A worker that dies before 2. has left the row itself as it was; after 2., the copies are whole. Who takes
# its place finds in the note which of the two it is, and keeps nothing anew for that request, however often
# it is tried.
# ----------------------------------------------------------------------------------------------------------

_BY_FAULT = 2  # is what ended an episode


class CommittedRows:
    """Of the envs of a slice, which go by their index there."""

    def __init__(self, spec: PoolSpec, rows: Arrays) -> None:
        """Prepares to keep the envs' rows of the segment's arrays."""
        self._rows = {leaf.path: rows[leaf.path] for leaf in spec.kept_leaves}
        self._kept = {
            leaf.path: np.empty_like(rows[leaf.path]) if leaf.is_object else rows["kept", *leaf.path]
            for leaf in spec.kept_leaves
        }
        self._terminated, self._truncated = rows["terminated",], rows["truncated",]
        self._fault = rows["info", "fault"]
        self._over, self._for, self._requested = (
            rows[name,] for name in ("kept_over", "kept_for", "requested")
        )
        self._read_obs = reader(spec.obs, self._kept)
        self._zero: Any = np.zeros(spec.reward.shape) if spec.reward.shape else 0.0

    def keep(self, indices: NDArray[Any]) -> None:
        """Keeps the rows of envs that are about to step; once for each request."""
        new = indices[self._for[indices] != self._requested[indices]]
        if not new.size:
            return
        index = index_of(new)
        for path, kept in self._kept.items():
            kept[index] = self._rows[path][index]
        over = self._terminated[index] | self._truncated[index]
        self._over[index] = over + self._fault[index].view(np.uint8)
        self._for[index] = self._requested[index]  # last

    def take_over(self, objects: Mapping[KeyPath, NDArray[Any]]) -> None:
        """Takes what is not in the segment, and went with the process that had it, from the program."""
        for path, column in objects.items():
            self._rows[path][:] = self._kept[path][:] = column

    def obs(self, index: int) -> Any:
        """Returns a copy of the observation."""
        (obs,) = self._read_obs(np.array([index]))
        return obs

    def over(self, index: int) -> bool:
        """Says whether the row ended an episode."""
        return bool(self._over[index])

    def over_by_fault(self, index: int) -> bool:
        """Says whether the row told of a fault, which ended an episode."""
        return bool(self._over[index] == _BY_FAULT)

    def episode(self, index: int, resumed: tuple[Any, int] | None) -> tuple[Any, int]:
        """Returns return and length of the episode that runs; of one that has not begun, zeros.

        `resumed` are those with which it went on from a saved state, if it did so in that row.
        """
        if self.over_by_fault(index) and resumed is not None:
            return resumed
        if self._over[index]:
            return self._zero, 0
        episode_return = self._kept["info", "episode_return"][index]
        return self._zero + episode_return, int(self._kept["info", "episode_length"][index])
