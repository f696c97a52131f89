"""Records what a pool does within a block, and writes it as a timeline."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from jaxvec._pool.pool import Pool
from jaxvec._tracing import _timeline
from jaxvec._tracing._recorder import Loss, Record


@contextmanager
def tracing(
    pool: Pool, path: str | Path, slices: tuple[tuple[int, int], ...], *, max_events: int
) -> Generator[Path]:
    """See `VectorEnv.trace`; `slices` are the workers' `(first, stop)`."""
    path = check_file(Path(path))
    if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"max_events must be an integer of at least 1, not {max_events!r}")
    epoch_ns, began_ns = _now()
    pool.start_trace(max_events)
    try:
        yield path
    finally:
        programs, workers = pool.stop_trace()
        ended_ns = time.monotonic_ns()
        if not workers:
            workers = [Record([], losses=(Loss("the pool was closed within the block", ended_ns),))] * len(
                slices
            )
        timeline = _timeline.build(
            programs,
            workers,
            slices,
            pool_id=pool.id,
            epoch_ns=epoch_ns,
            began_ns=began_ns,
            ended_ns=ended_ns,
        )
        _timeline.write(timeline, path)


def _now() -> tuple[int, int]:
    """Reads the clock since 1970 and the monotonic one at the same moment, as nearly as can be."""
    tries = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    before, epoch, after = min(tries, key=lambda each: each[2] - each[0])
    return epoch, (before + after) // 2


def check_file(path: Path) -> Path:
    """Returns the path, if a file can be made there; else it would be known only when all was run."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it, such as {path / 'pool.json'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it first")
    return path
