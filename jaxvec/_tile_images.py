"""`tile_images`: the frames of many envs as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray


def tile_images(frames: NDArray[Any] | Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Tiles frames, as `VectorEnv.render` returns them, into one picture, line by line.

    Args:
        frames: `[n, height, width, channels]`, an array or a sequence of arrays.

    Returns:
        `[lines * height, columns * width, channels]` of the frames' dtype, with as many columns as lines
        or one fewer; tiles without a frame are black.

    Raises:
        ValueError: there is no frame, or they have no three axes or not the same shape.

    Example:
        ```python
        frames = np.zeros((5, 40, 60, 3), np.uint8)  # such as envs.render() returns
        print(jaxvec.tile_images(frames).shape)  # (120, 120, 3)
        ```
    """
    if len(frames) == 0:
        raise ValueError("frames: expected at least one frame")
    for number, frame in enumerate(frames):
        shape, first = np.shape(frame), np.shape(frames[0])
        if len(shape) != 3:
            what = "None" if frame is None else f"one of shape {shape}"  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError(
                f"frame {number}: expected an array [height, width, channels], got {what}; make the envs "
                'with render_mode="rgb_array"'
            )
        if shape != first:
            raise ValueError(
                f"frame {number} has shape {shape}, but frame 0 has {first}; all frames must have one shape"
            )
    n, (height, width, channels) = len(frames), np.shape(frames[0])
    rows = isqrt(n - 1) + 1  # the root, rounded up
    columns = ceil(n / rows)
    tiles = np.zeros((rows * columns, height, width, channels), np.asarray(frames[0]).dtype)
    tiles[:n] = frames
    grid = tiles.reshape(rows, columns, height, width, channels)
    return grid.swapaxes(1, 2).reshape(rows * height, columns * width, channels)
