"""EnvPool's Atari tasks, built from ALE and Gymnasium's own preprocessing.

`build` stacks `_EpisodeStart`, `AtariPreprocessing` and `_AtariTask` onto an ALE env. Workers import this
module, so it must never import JAX.

EnvPool's `episodic_life` ends an episode when a life is lost. The next episode continues the same game after
a few no-ops, and keeps the frame stack and the step count. Therefore the wrapper that starts episodes lies
below `AtariPreprocessing`, and the wrapper that stacks frames and counts steps lies above it.

Results equal EnvPool's bit for bit where the random number of no-ops does not matter. The one exception is a
game's last frame, if the game ends between the two frames that are max-pooled. The options
`zero_discount_on_life_loss` and `use_inter_area_resize` (always on) are not supported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import AtariPreprocessing
from numpy.typing import NDArray

Frame = NDArray[np.uint8]

NEW_GAME = {"new_game": True}  # options of a reset that must not continue the running game
INFO = {  # declared keys of a task's info
    "lives": "i4",
    "reward": "f4",
    "terminated": "i4",
    "elapsed_step": "i4",
    "ram": ("u1", (128,)),
}


@dataclass(frozen=True)
class AtariOptions:
    """EnvPool's options of an Atari task, with its defaults."""

    stack_num: int = 4
    frame_skip: int = 4
    noop_max: int = 30
    episodic_life: bool = False
    reward_clip: bool = False
    use_fire_reset: bool = True
    img_height: int = 84
    img_width: int = 84
    mode: int = -1
    difficulty: int = -1
    full_action_space: bool = False
    repeat_action_probability: float = 0.0
    gray_scale: bool = True
    max_episode_steps: int = 27_000


def tasks() -> dict[str, str]:
    """Returns ALE's env id for each of EnvPool's Atari tasks, such as `Breakout-v5`. Empty without ALE."""
    try:
        import ale_py  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    gymnasium.register_envs(ale_py)
    ids = (name for name in gymnasium.registry if name.startswith("ALE/") and name.endswith("-v5"))
    return {name.removeprefix("ALE/"): name for name in ids}


def find(task_id: Any) -> str | None:
    """Returns ALE's env id for one of EnvPool's Atari tasks, or `None` if `task_id` is not one."""
    if not isinstance(task_id, str) or task_id in gymnasium.registry:
        return None
    return tasks().get(task_id)


def parse(task_id: str, options: dict[str, Any]) -> AtariOptions:
    """Checks the keyword arguments of a task. Raises `TypeError` or `ValueError` if one is invalid."""
    known = asdict(AtariOptions())
    if unknown := sorted(options.keys() - known.keys()):
        names = ", ".join(known)
        raise TypeError(f"{task_id} has no options {unknown}; use {names}, or arguments of jaxvec.make")
    parsed = AtariOptions(**options)
    for name in ("stack_num", "frame_skip", "noop_max", "max_episode_steps"):
        if getattr(parsed, name) < 1:
            raise ValueError(f"{task_id}: {name} must be at least 1, not {getattr(parsed, name)!r}")
    return parsed


def build(ale_id: str, options: AtariOptions) -> gymnasium.Env[Frame, Any]:
    import ale_py  # pyright: ignore[reportMissingImports]

    gymnasium.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner from each worker
    chosen = {name: getattr(options, name) for name in ("mode", "difficulty")}
    env = gymnasium.make(
        ale_id,
        obs_type="grayscale" if options.gray_scale else "rgb",
        frameskip=1,
        repeat_action_probability=options.repeat_action_probability,
        full_action_space=options.full_action_space,
        max_num_frames_per_episode=0,
        disable_env_checker=True,
        **{name: value for name, value in chosen.items() if value >= 0},
    )
    start = _EpisodeStart(env, options)
    frames = AtariPreprocessing(
        start,
        noop_max=0,
        frame_skip=options.frame_skip,
        screen_size=(options.img_width, options.img_height),
        grayscale_obs=options.gray_scale,
        grayscale_newaxis=options.gray_scale,
    )
    return _AtariTask(frames, start, options)


class _EpisodeStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Resets to a new game or continues the same one, then plays no-ops, then FIRE."""

    def __init__(self, env: gymnasium.Env[Any, Any], options: AtariOptions) -> None:
        super().__init__(env)
        meanings: list[str] = env.get_wrapper_attr("get_action_meanings")()
        fires = options.use_fire_reset and "FIRE" in meanings
        self._fire = meanings.index("FIRE") if fires else None
        self._noop_max = options.noop_max
        # Set by `_AtariTask` before each reset. Cleared here if the no-ops ended the game.
        self.continues_game = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = (None, {}) if self.continues_game else self.env.reset(seed=seed)
        # Without FIRE, EnvPool plays at least one no-op: 1 to noop_max, otherwise 0 to noop_max - 1.
        noops = int(self.np_random.integers(self._noop_max)) + (self._fire is None)
        for action in [0] * noops + [self._fire] * (self._fire is not None):
            obs, _, terminated, _, info = self.env.step(action)
            result = obs, info
            if terminated:
                result = self.env.reset()
                self.continues_game = False
        return result


class _AtariTask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stacks frames with channels first. Counts lives, steps and unclipped rewards."""

    def __init__(self, env: AtariPreprocessing, start: _EpisodeStart, options: AtariOptions) -> None:
        super().__init__(env)
        self._start = start
        self._options = options
        width, height = env.screen_size
        self._channels = 1 if options.gray_scale else 3
        shape = (options.stack_num * self._channels, height, width)
        self.observation_space = Box(0, 255, shape, np.uint8)
        self._ale: Any = env.get_wrapper_attr("ale")
        self._stack = np.zeros(shape, np.uint8)
        self._elapsed = 0
        self._lives = 0
        self._game_running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frame, dict[str, Any]]:
        """Continues the game after a lost life, unless there is a seed or the option `NEW_GAME`."""
        new_game = seed is not None or bool(options and options.get("new_game"))
        self._start.continues_game = self._options.episodic_life and self._game_running and not new_game
        frame, _ = self.env.reset(seed=seed)
        self._push(frame)
        if not self._start.continues_game:
            for _ in range(self._options.stack_num - 1):
                self._push(frame)
            self._elapsed = 0
        self._game_running = True
        self._lives = self._ale.lives()
        return self._stack, self._info(0.0, False)

    def step(self, action: Any) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        frame, raw, game_over, _, _ = self.env.step(action)
        reward = float(raw)
        self._push(frame)
        self._elapsed += 1
        truncated = self._elapsed >= self._options.max_episode_steps
        lives = self._ale.lives()
        # After the last life the game itself is over, so only 0 < lives counts as a lost life.
        lost = self._options.episodic_life and 0 < lives < self._lives
        self._lives = lives
        self._game_running = not (game_over or truncated)
        clipped = float(np.sign(reward)) if self._options.reward_clip else reward
        info = self._info(reward, game_over)
        return self._stack, clipped, (game_over or lost) and not truncated, truncated, info

    def _push(self, frame: Any) -> None:
        self._stack[: -self._channels] = self._stack[self._channels :]
        self._stack[-self._channels :] = np.moveaxis(frame, -1, 0)

    def _info(self, reward: float, game_over: bool) -> dict[str, Any]:
        return {
            "lives": self._lives,
            "reward": reward,
            "terminated": int(game_over),
            "elapsed_step": self._elapsed,
            "ram": self._ale.getRAM(),
        }
