"""Saved states as bytes: the format of files, and of arrays in others' checkpoints.

A line that says what it is and the version of the format, the fingerprint of the specification of the pool, a
check of what follows, and then that: a pickle. So reading it runs code, as opening any pickle does.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

from jaxvec._errors import StateFileError
from jaxvec._state_table import PackedStates

_MAGIC = b"jaxvec states 1\n"
_HEAD = struct.Struct("<q16s")  # fingerprint, check


def pack(states: PackedStates, fingerprint: int) -> bytes:
    """Returns states of a pool with a specification of this fingerprint as bytes."""
    content = pickle.dumps((states.data, states.rows, states.needs_reset), 5)
    return _MAGIC + _HEAD.pack(fingerprint, _check(content)) + content


def unpack(data: bytes, fingerprint: int, name: str) -> PackedStates:
    """Returns the states in these bytes.

    Args:
        data: the bytes.
        fingerprint: of the pool's specification, which has to be the same.
        name: what they are, for errors.

    Raises:
        StateFileError: they are something else, cut short or changed, or of envs of another specification.
    """
    start = len(_MAGIC) + _HEAD.size
    if data[: len(_MAGIC)] != _MAGIC:
        kind = _MAGIC.rpartition(b" ")[0]
        why = "another version wrote it" if data.startswith(kind) else "it is something else"
        raise StateFileError(f"{name}: no saved states that this version of jaxvec can read; {why}")
    if len(data) < start:
        raise StateFileError(f"{name}: cut short")
    theirs, check = _HEAD.unpack(data[len(_MAGIC) : start])
    content = data[start:]
    if check != _check(content):
        raise StateFileError(f"{name}: cut short or changed since it was written")
    if theirs != fingerprint:
        raise StateFileError(
            f"{name}: of envs with other spaces, or of a pool with other options, than this one; make the "
            "pool as the one was made that saved them"
        )
    return PackedStates(*pickle.loads(content))


def write(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, whenever the process or the machine ends."""
    descriptor, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _check(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
