"""The format of saved states in files and checkpoints."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._errors import StateFileError
from jaxvec._memory.segment import Rows


@dataclass(frozen=True)
class PackedStates:
    """States on their way to another pool or to a file."""

    data: Sequence[bytes]  # `[n]` pickles of the env data
    rows: Rows  # leaves `[n, ...]` of the time steps that were current when the states were saved
    needs_reset: NDArray[np.bool_]  # `[n]` envs that must be reset before they are stepped


# A line with the version of the format; the fingerprint of the pool's specification; a checksum of the rest;
# and a pickle. Reading it can run code, as any pickle can.

_MAGIC = b"jaxvec states 1\n"
_HEAD = struct.Struct("<q16s")  # fingerprint, checksum


def pack_states(states: PackedStates, fingerprint: int) -> bytes:
    """Returns states as bytes, marked with the fingerprint of their pool's specification."""
    content = pickle.dumps((states.data, states.rows, states.needs_reset), 5)
    return _MAGIC + _HEAD.pack(fingerprint, _checksum(content)) + content


def unpack_states(data: bytes, fingerprint: int, name: str) -> PackedStates:
    """Returns the states in bytes of `pack_states`, for a pool with this fingerprint.

    Raises:
        StateFileError: The file or array `name` has no states, damaged ones, or ones of another pool.
    """
    start = len(_MAGIC) + _HEAD.size
    if data[: len(_MAGIC)] != _MAGIC:
        if data.startswith(_MAGIC.rpartition(b" ")[0]):
            raise StateFileError(
                f"{name}: another version of jaxvec wrote these states; read them with that one"
            )
        raise StateFileError(f"{name}: this is not a file or array of saved states; use one of save_states")
    if len(data) < start:
        raise StateFileError(f"{name}: the states are cut short; save them again")
    saved_fingerprint, checksum = _HEAD.unpack(data[len(_MAGIC) : start])
    content = data[start:]
    if checksum != _checksum(content):
        raise StateFileError(
            f"{name}: the states were cut short or changed after they were written; save again"
        )
    if saved_fingerprint != fingerprint:
        raise StateFileError(
            f"{name}: the states are of envs with other spaces, or of a pool with other options; make the "
            "pool with the spaces and options of the pool that saved them"
        )
    try:
        return PackedStates(*pickle.loads(content))
    except Exception as error:  # an observation may be an object of a class that is not known here
        raise StateFileError(
            f"{name}: the states can't be unpickled in this process: {type(error).__name__}: {error}; the "
            "classes of their objects have to be importable here"
        ) from error


def read_states(source: Any) -> tuple[str, bytes]:
    """Returns the content of a file or array, with its name for errors.

    Raises:
        StateFileError: The array can't be one of `pack_states`.
    """
    if isinstance(source, Path):
        return str(source), source.read_bytes()
    name = "the array"
    if isinstance(source, bytes | bytearray | memoryview):
        return name, bytes(source)
    try:
        with np.errstate(invalid="ignore"):  # the checksum finds wrong values
            return name, np.asarray(source).astype(np.uint8).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise StateFileError(
            f"{name}: {type(source).__name__} can't be converted to bytes: {error}; pass an array of "
            "pack_states"
        ) from error


def write_states(path: Path, data: bytes) -> None:
    """Writes a file atomically: after a crash it has either its old or its new content."""
    descriptor, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)  # the rename must not reach the disk before the data
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
