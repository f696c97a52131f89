"""Data of a saved state beside the env itself: the progress of the episode, and what the row cannot show."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.episodes import IDLE
from jaxvec._errors import EnvStateError
from jaxvec._leaves import KeyPath

_EMPTY: dict[Any, Any] = {}  # shared by states, which never change


class SlotData(NamedTuple):
    """All that determines the future of a slot, except its env and its row of the segment."""

    episode: tuple[int, Any, int]  # from `EpisodeTracker.save`
    resets: tuple[int, int | None, Any]  # from `SlotEnvs.save`
    info: dict[str, Any]  # the raw info of the last reset or step
    is_final: bool  # True if the row contains the last step of an episode
    objects: dict[KeyPath, Any]  # the leaves of the row that are Python objects

    @classmethod
    def of(cls, env_slice: EnvSlice, index: int) -> SlotData:
        """Returns the data of the slot at `index`.

        Raises:
            EnvStateError: The env waits for a reset after a fault.
        """
        if env_slice.episodes.state[index] > IDLE:
            raise EnvStateError("after this fault, the env has no state to save until it is stepped or reset")
        rows = env_slice.rows
        return cls(
            env_slice.episodes.save(index),
            env_slice.slots.save(index),
            deepcopy(rows.infos[index]) or _EMPTY,
            rows.final.is_written(index),
            {path: column[index] for path, column in rows.objects.items()} or _EMPTY,
        )

    def restore(self, env_slice: EnvSlice, index: int, restore_env: Callable[[], bool]) -> None:
        """Restores the slot at `index`, except its row of the segment; see `SlotEnvs.restore`."""
        env_slice.slots.restore(index, restore_env, self.resets)
        env_slice.episodes.restore(index, self.episode)
        rows = env_slice.rows
        rows.take_info(index, deepcopy(self.info))
        rows.final.note_written(index, is_written=self.is_final)
        for path, value in self.objects.items():
            rows.objects[path][index] = value
