"""The progress of each env's episode, and copies of the rows that were delivered before a fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxvec._leaves import KeyPath
from jaxvec._memory.rows import reader, scalars
from jaxvec._memory.segment import Arrays, index_of
from jaxvec._spec import Autoreset, PoolSpec

# --- Progress of episodes, with their rewards, flags and statistics in the segment -----------------------

# The action that the next request for a step causes. All but the first are rare. The compiled loop makes the
# first two itself; those above MARKED replace the step of the env.
PLAYING = 0  # step
MARKED = 1  # step, and clear the row's marks of the previous episode's end
ENDED = 2  # reset: next-step autoreset
IDLE = 3  # nothing, until the program resets the env
LOST = 4  # end the episode, which a fault has interrupted
UNRESET = 5  # repeat the reset within the step; the row already contains the end of the episode

# One of the constants above, and the return and length of an episode.
SavedEpisode: TypeAlias = tuple[int, Any, int]

_AFTER_END = {
    Autoreset.SAME_STEP: UNRESET,
    Autoreset.NEXT_STEP: ENDED,
    Autoreset.DISABLED: MARKED,
    Autoreset.EPISODIC: IDLE,
}


class EpisodeTracker:
    """Counters and flags of the current episode of each env, by its index in the slice.

    The compiled loop (`_native/stepper.cc`) changes the same lists and rows for ordinary steps, as `take`
    does, and as `mark` does if no episode ends.
    """

    def __init__(self, rows: Arrays, autoreset: Autoreset, *, lost: bool = False) -> None:
        """Creates the counters. If `lost`, the rows contain episodes that a fault has interrupted."""
        count, *shape = rows["reward",].shape
        self._zero: Any = np.zeros(shape) if shape else 0.0
        self.state = [LOST if lost else PLAYING] * count  # the constant for each env's next step
        # Return and length of each episode, in float64 and int64 whatever the segment stores.
        self.returns = np.zeros((count, *shape))
        self.lengths = np.zeros(count, np.int64)
        self._returns = scalars(self.returns)
        self._lengths = scalars(self.lengths)
        self.row_rewards = scalars(rows["reward",])
        self.row_returns, self.row_lengths = (
            scalars(rows["info", name]) for name in ("episode_return", "episode_length")
        )
        # A pool that can't have faults or idle envs lacks these columns. Then nothing reads the arrays.
        fault, idle = (rows.get(("info", name), np.zeros(count, np.bool_)) for name in ("fault", "idle"))
        self.end_marks = rows["terminated",], rows["truncated",], fault
        self._terminated, self._truncated, self._fault = map(scalars, self.end_marks)
        self._idle = scalars(idle)
        self._over = _AFTER_END[autoreset]

    def begin(self, index: int) -> None:
        """Starts a new episode, in a row of its own without a reward."""
        self._write_flags(index, False, False, fault=False)
        self._idle[index] = False
        self._restart(index, PLAYING)
        self.row_rewards[index] = self.row_returns[index] = self._zero
        self.row_lengths[index] = 0

    def take(self, index: int, reward: Any) -> bool:
        """Adds a step's reward. Returns True if the row still has marks of the previous episode's end."""
        self.row_rewards[index] = reward
        self._returns[index] = self.row_returns[index] = self._returns[index] + reward
        self._lengths[index] = self.row_lengths[index] = self._lengths[index] + 1
        return self.state[index] == MARKED

    def mark(self, index: int, terminated: bool, truncated: bool) -> bool:
        """Writes the flags of a step. Returns True if they end the episode."""
        over = terminated or truncated
        self._write_flags(index, terminated, truncated, fault=False)
        self.state[index] = self._over if over else PLAYING
        return over

    def reset_in_step(self, index: int) -> None:
        """Starts an episode, but keeps the row, which shows the end of the last one."""
        self._restart(index, MARKED)

    def idle(self, index: int) -> None:
        """Marks the row of an env that was not stepped; the rest of the row is unchanged."""
        self.row_rewards[index] = self._zero
        self._idle[index] = True

    def lose(self, index: int) -> None:
        """Records that a fault interrupted a step."""
        self.state[index] = LOST

    def cut(self, index: int, delivered: tuple[Any, int], *, over: bool) -> bool:
        """Ends an interrupted episode, and returns whether it was running; otherwise it had already ended.

        `delivered` is the return and length in the last delivered row, and `over` whether that row ended an
        episode. After an end, only same-step autoreset has started another one.
        """
        if over and self._over in (ENDED, IDLE):
            self.state[index] = self._over
            return False
        self.row_rewards[index] = self._zero
        self.row_returns[index], self.row_lengths[index] = delivered
        self._write_flags(index, False, True, fault=True)
        self.state[index] = self._over
        return True

    def is_over(self, index: int) -> bool:
        """Returns True if the env has to be reset before its next step."""
        ended = self._over == MARKED and bool(self._terminated[index] or self._truncated[index])
        return ended or self.state[index] in (ENDED, IDLE)

    def save(self, index: int) -> SavedEpisode:
        # Adding to zero copies a return that is an array.
        return self.state[index], self._zero + self._returns[index], self._lengths[index]

    def restore(self, index: int, saved: SavedEpisode) -> None:
        """Continues a saved episode, and leaves the row to the caller."""
        self.state[index], self._returns[index], self._lengths[index] = saved

    def clear_marks(self, index: int) -> None:
        """Makes the next step write all flags, because the row may contain those of another state."""
        self._idle[index] = False
        if self.state[index] == PLAYING:
            self.state[index] = MARKED

    def _restart(self, index: int, state: int) -> None:
        self.state[index], self._returns[index], self._lengths[index] = state, self._zero, 0

    def _write_flags(self, index: int, terminated: bool, truncated: bool, *, fault: bool) -> None:
        self._terminated[index] = terminated
        self._truncated[index] = truncated
        self._fault[index] = fault


# --- Rows that the program has received ------------------------------------------------------------------
# After a fault, the result is built from the last delivered row, never from a row that may be half-written.
# So before a slice steps envs, it copies their rows within the segment, which outlives the worker:
# 1. copy observation, return and length, and write whether the episode was over;
# 2. write the request number, which makes the copies valid;
# 3. step the envs, which overwrites their rows.
# If the worker dies before 2, the rows are still unchanged; if after 2, the copies are complete. The worker
# that replaces it compares request numbers, and does not copy again for the same request.


class CommittedRows:
    """Copies of the last delivered rows, by the env's index in the slice."""

    def __init__(self, spec: PoolSpec, rows: Arrays) -> None:
        self._rows = {leaf.path: rows[leaf.path] for leaf in spec.kept_leaves}
        self._kept = {
            leaf.path: np.empty_like(rows[leaf.path]) if leaf.is_object else rows[("kept", *leaf.path)]
            for leaf in spec.kept_leaves
        }
        self._terminated = rows["terminated",]
        self._truncated = rows["truncated",]
        self._over, self._for, self._requested = (
            rows[name,] for name in ("kept_over", "kept_for", "requested")
        )
        self._read_obs = reader(spec.obs, self._kept, stored=True)
        self._zero: Any = np.zeros(spec.reward.shape) if spec.reward.shape else 0.0

    def keep(self, indices: NDArray[Any]) -> None:
        """Copies the rows of envs before they step, once per request."""
        new = indices[self._for[indices] != self._requested[indices]]
        if not new.size:
            return
        index = index_of(new)
        for path, kept in self._kept.items():
            kept[index] = self._rows[path][index]
        self._over[index] = self._terminated[index] | self._truncated[index]
        self._for[index] = self._requested[index]  # last, since it makes the copies valid

    def take_over(self, objects: Mapping[KeyPath, NDArray[Any]]) -> None:
        """Fills the leaves of Python objects, which a dead process can't leave, with the program's values."""
        for path, column in objects.items():
            self._rows[path][:] = self._kept[path][:] = column

    def obs(self, index: int) -> Any:
        (obs,) = self._read_obs(np.array([index]))
        return obs

    def over(self, index: int) -> bool:
        return bool(self._over[index])

    def episode(self, index: int) -> tuple[Any, int]:
        """Returns return and length of the running episode; zeros if none is running."""
        if self._over[index]:
            return self._zero, 0
        episode_return = self._kept["info", "episode_return"][index]
        return self._zero + episode_return, int(self._kept["info", "episode_length"][index])
