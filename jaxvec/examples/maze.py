"""Mazes whose walls, start and goal are reset options: the env of `plr.py`, without JAX, for workers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

SIZE, VIEW, TIME_LIMIT = 13, 5, 120  # cells of a maze and of the agent's view along an axis, and steps
CELLS = SIZE * SIZE
MARGIN = VIEW // 2
MAX_VISITS = 8  # to a cell, as the agent sees them
MOVES = (-1, 0), (1, 0), (0, -1), (0, 1)

LEVEL = spaces.Dict(
    {
        "walls": spaces.Box(0, 1, (SIZE, SIZE), np.uint8),
        "start": spaces.Discrete(CELLS),
        "goal": spaces.Discrete(CELLS),
    }
)


class Maze(gymnasium.Env[NDArray[np.int8], Any]):
    """A maze with the walls, start and goal of the reset options.

    The agent sees the walls around it, the cells that it has visited, and in which direction the goal is.
    """

    observation_space: spaces.Space[Any] = spaces.Box(-1, MAX_VISITS, (2 * VIEW * VIEW + 2,), np.int8)
    action_space: spaces.Space[Any] = spaces.Discrete(4)
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode: str | None = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.int8], Any]:
        super().reset(seed=seed)
        level = options or {"walls": 0, "start": 0, "goal": CELLS - 1}
        self._y, self._x = divmod(int(level["start"]), SIZE)
        self._goal = divmod(int(level["goal"]), SIZE)
        self._time = 0
        # Two planes: walls, and visited cells. The margin is wall, so that each view is a slice.
        self._planes = np.zeros((2, SIZE + 2 * MARGIN, SIZE + 2 * MARGIN), np.int8)
        self._planes[0] = 1
        self._planes[0, MARGIN:-MARGIN, MARGIN:-MARGIN] = level["walls"]
        for y, x in ((self._y, self._x), self._goal):
            self._planes[0, y + MARGIN, x + MARGIN] = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[NDArray[np.int8], float, bool, bool, dict[str, Any]]:
        down, right = MOVES[action]
        y, x = self._y + down, self._x + right
        if not self._planes[0, y + MARGIN, x + MARGIN]:
            self._y, self._x = y, x
        self._time += 1
        solved = (self._y, self._x) == self._goal
        reward = 1 - 0.9 * self._time / TIME_LIMIT if solved else 0.0
        return self._observe(), reward, solved, self._time == TIME_LIMIT, {}

    def render(self) -> Any:
        """Returns an image with black walls, the goal in green and the agent in red."""
        free = self._planes[0, MARGIN:-MARGIN, MARGIN:-MARGIN, None] == 0
        image = np.where(free, 255, 0).astype(np.uint8).repeat(3, axis=2)
        image[self._goal], image[self._y, self._x] = (0, 160, 0), (220, 0, 0)
        return image.repeat(16, axis=0).repeat(16, axis=1)

    def _observe(self) -> NDArray[np.int8]:
        y, x = self._y, self._x
        visits = self._planes[1]
        visits[y + MARGIN, x + MARGIN] = min(visits[y + MARGIN, x + MARGIN] + 1, MAX_VISITS)
        obs = np.empty(2 * VIEW * VIEW + 2, np.int8)
        obs[:-2] = self._planes[:, y : y + VIEW, x : x + VIEW].reshape(-1)
        goal_y, goal_x = self._goal
        obs[-2] = (goal_y > y) - (goal_y < y)
        obs[-1] = (goal_x > x) - (goal_x < x)
        return obs


def perfect_mazes(count: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Returns held-out levels `[count, ...]`, mazes with exactly one way between any two cells."""
    rng = np.random.default_rng(seed)
    walls = np.ones((count, SIZE, SIZE), np.uint8)
    for maze in walls:
        stack = [(0, 0)]
        maze[0, 0] = 0
        while stack:
            y, x = stack[-1]
            steps = [(y + 2 * down, x + 2 * right, y + down, x + right) for down, right in MOVES]
            steps = [at for at in steps if 0 <= at[0] < SIZE and 0 <= at[1] < SIZE and maze[at[:2]]]
            if not steps:
                stack.pop()
                continue
            y, x, wall_y, wall_x = steps[rng.integers(len(steps))]
            maze[wall_y, wall_x] = maze[y, x] = 0
            stack.append((y, x))
    ends = [rng.choice(np.flatnonzero(maze.ravel() == 0), 2, replace=False) for maze in walls]
    start, goal = np.array(ends, np.int32).T
    return {"walls": walls, "start": start, "goal": goal}
