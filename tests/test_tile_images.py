"""`tile_images`: which frame goes where, and what is no frame."""

from __future__ import annotations

import numpy as np
import pytest

import jaxvec


@pytest.mark.parametrize(
    ("n", "rows", "columns"),
    [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 2, 2), (5, 3, 2), (7, 3, 3), (10, 4, 3), (64, 8, 8)],
)
@pytest.mark.parametrize("kind", [tuple, np.asarray])
def test_every_frame_is_in_its_tile_and_the_rest_is_black(n, rows, columns, kind):
    frames = np.random.default_rng(n).integers(1, 256, (n, 5, 7, 3), np.uint8)
    picture = jaxvec.tile_images(kind(frames))
    assert (picture.shape, picture.dtype) == ((rows * 5, columns * 7, 3), np.uint8)
    for index in range(rows * columns):
        row, column = divmod(index, columns)
        tile = picture[row * 5 : row * 5 + 5, column * 7 : column * 7 + 7]
        np.testing.assert_array_equal(tile, frames[index] if index < n else np.zeros((5, 7, 3)))


def test_frames_of_a_pool_are_tiled(make):
    envs = make("FrozenLake-v1", 3, render_mode="rgb_array")
    envs.reset(seed=0)
    frames = envs.render()
    picture = jaxvec.tile_images(frames)
    height, width, _ = frames[0].shape
    assert picture.shape == (2 * height, 2 * width, 3)
    np.testing.assert_array_equal(picture[height:, :width], frames[2])


def test_what_is_no_frame_is_refused():
    frame = np.zeros((4, 4, 3))
    with pytest.raises(ValueError, match="at least one frame"):
        jaxvec.tile_images([])
    with pytest.raises(ValueError, match=r'frame 1: .* got None; .*render_mode="rgb_array"'):
        jaxvec.tile_images([frame, None])
    with pytest.raises(ValueError, match=r"frame 0: .* got one of shape \(4, 3\)"):
        jaxvec.tile_images(frame)
    with pytest.raises(ValueError, match=r"frame 1 has shape \(4, 5, 3\), but frame 0 has \(4, 4, 3\)"):
        jaxvec.tile_images([frame, np.zeros((4, 5, 3))])
