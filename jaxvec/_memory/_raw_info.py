"""What an env's raw info says, as far as the segment tells it: the parent asks for the others alone."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class RawInfo(IntEnum):
    """What the raw info of an env's last reset or step says; in the segment."""

    EMPTY = 0
    EMPTY_AT_END = 1  # nothing, neither of an episode's last step nor of the reset that came with it
    FULL = 2  # something, which the worker keeps


def kind_of(info: dict[str, Any]) -> RawInfo:
    """Says what an info is."""
    if not info:
        return RawInfo.EMPTY
    final = info.get("final_info") if len(info) == 1 else None
    return RawInfo.EMPTY_AT_END if type(final) is dict and not final else RawInfo.FULL


def known(kinds: bytes) -> list[dict[str, Any]]:
    """Returns new infos of these kinds; those in the places of `FULL` ones are none."""
    return [{"final_info": {}} if kind else {} for kind in kinds]
