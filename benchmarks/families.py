"""Families of envs that were run, and the gallery of them: `python -m benchmarks.families`.

`tests/pool/test_gallery.py` compares each family with Gymnasium's loop. This program measures its speed,
verifies its states and takes a picture of it. It writes `docs/envs.json`, the pictures and
the section "Gallery" of `docs/how-to/env_libraries.md`. Families that are not installed keep their earlier
entries. `--page` only writes the section. Beside other programs, cheap steps seem several times as slow as
they are: `chrt -f 1 python -m benchmarks.families` keeps these from its core.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np

import jaxvec
from jaxvec._extensions.states.env_states import StatefulEnv
from jaxvec._extensions.states.proof import prove

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS, PAGE = DOCS / "envs.json", DOCS / "how-to/env_libraries.md"
_NUM_ENVS = 8


@dataclass(frozen=True)
class Family:
    """A family of envs, and the env that stands for it.

    Attributes:
        name: Name in the gallery.
        install: Arguments of `pip install`.
        env: Expression for the argument `env` of `make`.
        imports: Statement before the expression.
        options: Further arguments of `make`, as in its call.
        caveat: Note for users, as Markdown.
        steps: Number of steps of the comparison.
        vector_reward: Whether the reward is a vector, for which SyncVectorEnv has no place.
        picture: Expression for an env that renders, if `render_mode="rgb_array"` is no option of `make`;
            `None` if there are no pictures.
    """

    name: str
    install: str
    env: str
    imports: str = ""
    options: str = ""
    caveat: str = ""
    steps: int = 200
    vector_reward: bool = False
    picture: str | None = ""

    def namespace(self) -> dict[str, Any]:
        """Returns the names that the expression uses."""
        names: dict[str, Any] = {"gymnasium": gymnasium, "jaxvec": jaxvec}
        exec(self.imports, names)
        return names

    def argument(self) -> Any:
        """Returns the argument `env` of `make`: an id, or a function."""
        return eval(self.env, self.namespace())

    def make_options(self) -> dict[str, Any]:
        """Returns the further arguments of `make`."""
        return eval(f"dict({self.options})", self.namespace())

    def constructor(self, **kwargs: Any) -> Callable[[], gymnasium.Env[Any, Any]]:
        """Returns a function that makes the env as Gymnasium does."""
        argument = self.argument()
        if isinstance(argument, str):
            return functools.partial(gymnasium.make, argument, **kwargs)
        return argument

    def line(self) -> str:
        """Returns the call of `make` of the gallery."""
        options = f", {self.options}" if self.options else ""
        return f"jaxvec.make({self.env}, {_NUM_ENVS}{options})"


_INTERPRETER = "workers.md#envs-of-another-interpreter-old-gym-gymnasium-or-python"
_SEEDED = "[seeds](#openspiel)"
_FILTER = "from gymnasium.wrappers import FilterObservation"
_ZOO = "from jaxvec.adapters.pettingzoo import INFO, PettingZooEnv"
_DM = "from jaxvec.adapters.dm_env import DmEnv"

FAMILIES = (
    Family("Gymnasium classic control", '"gymnasium[classic-control]"', '"CartPole-v1"'),
    Family("Gymnasium toy text", '"gymnasium[toy-text]"', '"FrozenLake-v1"'),
    Family("Gymnasium Box2D", '"gymnasium[box2d]"', '"LunarLander-v3"'),
    Family("Gymnasium MuJoCo", '"gymnasium[mujoco]"', '"HalfCheetah-v5"'),
    Family("ALE: Atari", "ale-py opencv-python-headless", '"ale_py:ALE/Breakout-v5"', steps=100),
    Family(
        "MiniGrid",
        "minigrid",
        'lambda: FilterObservation(gymnasium.make("minigrid:MiniGrid-DoorKey-5x5-v0"), ["image"])',
        _FILTER,
        picture='gymnasium.make("minigrid:MiniGrid-DoorKey-5x5-v0", render_mode="rgb_array")',
        caveat="missions as [padded text](padded_and_batched.md#minigrids-missions)",
    ),
    Family(
        "BabyAI",
        "minigrid",
        'lambda: FilterObservation(gymnasium.make("minigrid:BabyAI-GoToRedBallGrey-v0"), ["image"])',
        _FILTER,
        picture='gymnasium.make("minigrid:BabyAI-GoToRedBallGrey-v0", render_mode="rgb_array")',
        caveat="missions as [padded text](padded_and_batched.md#minigrids-missions)",
    ),
    Family(
        "dm_control",
        'dm-control dm-env "mujoco<4"',
        'lambda: DmEnv(suite.load("cheetah", "run"))',
        f"from dm_control import suite; {_DM}",
        picture='DmEnv(suite.load("cheetah", "run"), render_mode="rgb_array", render_kwargs={"height": 120})',
    ),
    Family(
        "bsuite",
        "bsuite dm-env",
        "lambda: DmEnv(lambda seed=None: Catch(seed=seed))",
        f"from bsuite.environments.catch import Catch; {_DM}",
        picture=None,
    ),
    Family(
        "PettingZoo MPE",
        "pettingzoo mpe2",
        "lambda: PettingZooEnv(simple_spread_v3.parallel_env())",
        f"from mpe2 import simple_spread_v3; {_ZOO}",
        "info=INFO",
        "rewards per agent",
        picture='PettingZooEnv(simple_spread_v3.parallel_env(render_mode="rgb_array"))',
        vector_reward=True,
    ),
    Family(
        "PettingZoo butterfly",
        '"pettingzoo[butterfly]"',
        "lambda: PettingZooEnv(knights_archers_zombies_v11.parallel_env())",
        f"from pettingzoo.butterfly import knights_archers_zombies_v11; {_ZOO}",
        "info=INFO",
        "rewards per agent",
        picture='PettingZooEnv(knights_archers_zombies_v11.parallel_env(render_mode="rgb_array"))',
        vector_reward=True,
    ),
    Family(
        "PettingZoo SISL",
        '"pettingzoo[sisl]"',
        "lambda: PettingZooEnv(pursuit_v5.parallel_env())",
        f"from pettingzoo.sisl import pursuit_v5; {_ZOO}",
        "info=INFO",
        "rewards per agent",
        steps=100,
        picture='PettingZooEnv(pursuit_v5.parallel_env(render_mode="rgb_array"))',
        vector_reward=True,
    ),
    Family(
        "PettingZoo classic",
        "pettingzoo rlcard",
        "lambda: PettingZooEnv(connect_four_v3.env())",
        f"from pettingzoo.classic import connect_four_v3; {_ZOO}",
        "info=INFO",
        'turn-based: `info["turn"]`',
        picture='PettingZooEnv(connect_four_v3.env(render_mode="rgb_array"))',
        vector_reward=True,
    ),
    Family(
        "RWARE",
        "rware",
        '"rware:rware-tiny-2ag-v2"',
        caveat="rewards per agent",
        picture=None,
        vector_reward=True,
    ),
    Family(
        "Level-based foraging",
        "lbforaging",
        '"lbforaging:Foraging-8x8-2p-1f-v3"',
        caveat="rewards per agent",
        picture=None,
        vector_reward=True,
    ),
    Family(
        "MO-Gymnasium",
        "mo-gymnasium",
        '"mo_gymnasium:deep-sea-treasure-v0"',
        caveat="rewards per objective; the [dispatch](speed.md#the-serial-backend) adds 40% to steps of 4 us",
        vector_reward=True,
    ),
    Family(
        "highway-env",
        "highway-env",
        '"highway_env:highway-fast-v0"',
        picture='gymnasium.make("highway_env:highway-fast-v0", render_mode="rgb_array", '
        'config={"offscreen_rendering": True})',
        steps=60,
    ),
    Family("Gymnasium-Robotics mazes", "gymnasium-robotics", '"gymnasium_robotics:PointMaze_UMaze-v3"'),
    Family(
        "Gymnasium-Robotics Adroit",
        "gymnasium-robotics",
        '"gymnasium_robotics:AdroitHandDoor-v1"',
        steps=100,
    ),
    Family("ViZDoom", "vizdoom", '"vizdoom.gymnasium_wrapper:VizdoomBasic-v1"', steps=100),
    Family(
        "panda-gym (PyBullet)",
        "panda-gym",
        '"panda_gym:PandaReach-v3"',
        caveat=f"episodes after the first need {_SEEDED}",
        steps=49,
    ),
    Family(
        "Flappy Bird",
        "flappy-bird-gymnasium",
        '"flappy_bird_gymnasium:FlappyBird-v0"',
        options="use_lidar=False",
    ),
    Family("gym-anytrading", "gym-anytrading", '"gym_anytrading:stocks-v0"', picture=None),
    Family("PushT (LeRobot)", "gym-pusht", '"gym_pusht:gym_pusht/PushT-v0"', steps=100),
    Family("POPGym", "popgym", '"popgym:popgym-RepeatPreviousEasy-v0"', picture=None),
    Family(
        "OpenSpiel",
        "open-spiel shimmy pettingzoo",
        'lambda: PettingZooEnv(OpenSpielCompatibilityV0(game_name="matrix_rps"))',
        f"from shimmy import OpenSpielCompatibilityV0; {_ZOO}",
        "info=INFO",
        f"moves of chance need {_SEEDED}",
        vector_reward=True,
        picture=None,
    ),
    Family(
        "Old gym, by shimmy",
        '"shimmy>=2" "gym>=0.26.2"',
        "lambda: GymV26CompatibilityV0(env=CartPoleEnv())",
        "from shimmy import GymV26CompatibilityV0; from gym.envs.classic_control import CartPoleEnv",
        caveat=f"or [another interpreter]({_INTERPRETER})",
        picture=None,
    ),
)

MISSING = (
    "NetHack (`nle`) and MiniHack run, but `reset` does not seed their levels, so they can't be compared",
    "Crafter runs, but its worlds depend on the addresses of objects, so two runs with one seed differ",
    f"Meta-World 3 pins an older MuJoCo, with which its envs run in [another interpreter]({_INTERPRETER})",
    "Fetch and Franka Kitchen of Gymnasium-Robotics raise errors with MuJoCo 3.17",
    "MiniWorld needs a display, and Procgen has no wheel for Python 3.11 or newer",
    "gym-trading-env runs, but `reset` seeds its first position only if `initial_position` fixes it",
)


def is_installed(family: Family) -> bool:
    """Returns whether the packages of a family can be imported."""
    try:
        argument = family.argument()
        if isinstance(argument, str) and ":" in argument:
            __import__(argument.partition(":")[0])
        if isinstance(argument, str):
            gymnasium.make(argument, **_env_options(family)).close()
        elif callable(argument):
            argument().close()
    except (ImportError, gymnasium.error.UnregisteredEnv, gymnasium.error.DependencyNotInstalled):
        return False
    return True


def _env_options(family: Family) -> dict[str, Any]:
    return {name: value for name, value in family.make_options().items() if name != "info"}


def states(family: Family) -> str:
    """Returns how states of the env are saved: "exact", by "`ReplayEnv`", or "no"."""
    from jaxvec.adapters.replay import ReplayEnv

    constructor = family.constructor(**_env_options(family))
    for result, make in (("exact", constructor), ("`ReplayEnv`", lambda: ReplayEnv(constructor))):
        env = make()
        try:
            stateful = StatefulEnv(env)
            env.reset(seed=0)
            prove(stateful)
            return result
        except (jaxvec.EnvStateError, TypeError) as error:
            sys.stderr.write(f"{family.name}: {error}\n"[:300])
        finally:
            env.close()
    return "no"


def picture(family: Family) -> Any:
    """Returns a picture of the env after some steps, an array `[height, width, 3]`, or None."""
    if family.picture is None:
        return None
    if family.picture:
        env = eval(family.picture, family.namespace())
    elif isinstance(family.argument(), str):
        env = family.constructor(**_env_options(family), render_mode="rgb_array")()
    else:
        env = family.argument()()
    env.reset(seed=1)
    env.action_space.seed(1)
    for _ in range(30):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    frame = np.asarray(env.render())
    env.close()
    return frame


def speed_ratio(family: Family, turns: int = 7) -> float:
    """Returns the rate of a scan over one worker, divided by that of Gymnasium's loop, on one core."""
    env_fns = [family.constructor(**_env_options(family))] * _NUM_ENVS
    plain = _Loop([make() for make in env_fns]) if family.vector_reward else None
    sync = plain or gymnasium.vector.SyncVectorEnv(env_fns, autoreset_mode="SameStep")
    sync.reset(seed=0)
    sync.action_space.seed(0)
    action = sync.action_space.sample()
    started = time.perf_counter()
    sync.step(action)
    sync.step(action)
    num_steps = int(np.clip(0.2 / ((time.perf_counter() - started) / 2), 3, 500))

    def gymnasium_loop() -> None:
        for _ in range(num_steps):
            sync.step(action)

    with jaxvec.make(family.argument(), _NUM_ENVS, num_workers=1, **family.make_options()) as envs:
        handle, _ = jaxvec.reset(envs, seed=0)

        @jax.jit
        def scan(handle: jaxvec.Handle) -> tuple[jaxvec.Handle, Any]:
            def body(handle: jaxvec.Handle, _: None) -> tuple[jaxvec.Handle, Any]:
                handle, timestep = jaxvec.step(handle, action)
                return handle, timestep.reward.sum()

            return jax.lax.scan(body, handle, length=num_steps)

        handle = jax.block_until_ready(scan(handle))[0]
        times: list[tuple[float, float]] = []
        for _ in range(turns):
            started = time.perf_counter()
            gymnasium_loop()
            between = time.perf_counter()
            handle = jax.block_until_ready(scan(handle))[0]
            times.append((between - started, time.perf_counter() - between))
    sync.close()
    theirs, ours = np.min(times, axis=0)
    return float(theirs / ours)


class _Loop:
    """A loop over plain envs, for vector rewards, which SyncVectorEnv does not take."""

    def __init__(self, envs: list[gymnasium.Env[Any, Any]]) -> None:
        self.envs = envs
        self.action_space = gymnasium.vector.utils.batch_space(envs[0].action_space, len(envs))

    def reset(self, seed: int) -> None:
        for number, env in enumerate(self.envs):
            env.reset(seed=seed + number)

    def step(self, actions: Any) -> None:
        each = gymnasium.vector.utils.iterate(self.action_space, actions)
        for env, action in zip(self.envs, each, strict=True):
            *_, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    def close(self) -> None:
        for env in self.envs:
            env.close()


def measure(family: Family) -> dict[str, Any]:
    """Returns the entry of a family in the results, and writes its picture."""
    found = save_picture(family)
    return {"states": states(family), "ratio": round(speed_ratio(family), 2), "picture": found}


def save_picture(family: Family) -> bool:
    """Writes a thumbnail of the env, and returns whether it has pictures."""
    frame = picture(family)
    if frame is not None:
        from PIL import Image

        image = Image.fromarray(frame.astype(np.uint8))
        image.thumbnail((160, 107))
        image.save(DOCS / "images/envs" / f"{slug(family)}.webp", quality=75, method=6)
    return frame is not None


def slug(family: Family) -> str:
    """Returns the name of a family's picture."""
    return "".join(c if c.isalnum() else "_" for c in family.name.lower()).strip("_")


def gallery(results: dict[str, Any]) -> str:
    """Returns the gallery, the last section of the page about libraries of envs."""
    lines = [_HEAD.format(count=len(results["families"]), machine=results["machine"])]
    lines += ["| family | `pip install` | `make` | speed | states | note |"]
    lines += ["| --- | --- | --- | ---: | --- | --- |"]
    for family in FAMILIES:
        entry = results["families"].get(family.name)
        if entry is not None:
            shown = f"![](../images/envs/{slug(family)}.webp)<br>" if entry["picture"] else ""
            cells = [shown + family.name, f"`{family.install}`", f"`{family.line()}`"]
            cells += [f"{entry['ratio']:.2f}", entry["states"], family.caveat]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "The names in the calls of `make` come from these imports:", "", "```text"]
    shown_families = [family for family in FAMILIES if family.name in results["families"]]
    imports = [family.imports.split("; ") for family in shown_families if "\n" not in family.imports]
    lines += [*dict.fromkeys(filter(None, itertools.chain(*imports))), "```"]
    lines += ["", "Not in the table:", "", *(f"- {text}." for text in MISSING)]
    return "\n".join(lines) + "\n"


_HEAD = """## Gallery

Each of these {count} families was run, and compared with Gymnasium's loop, field by field
(`test_gallery.py`).

- **speed**: the rate of a scan over 8 envs in one worker, divided by that of Gymnasium's `SyncVectorEnv` (for
  vector rewards, by that of a loop over plain envs, which is faster), on one core of a machine in use
  ({machine}). `python -m benchmarks.families` writes this section.
- **states**: *exact* means that [states](env_states.md) are saved, restored and verified bit for bit.
  `ReplayEnv` means that they work in the
  [wrapper that replays actions](env_states.md#which-envs-can-be-saved).
"""


def main() -> None:
    """Parses the command line, measures, and writes results, pictures and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of the names of the families to measure")
    parser.add_argument(
        "--page", action="store_true", help="write the page from the results, without measuring"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, value in (("MUJOCO_GL", "egl"), ("SDL_VIDEODRIVER", "dummy"), ("SDL_AUDIODRIVER", "dummy")):
        os.environ.setdefault(name, value)
    if not args.page:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    empty: dict[str, Any] = {"machine": "", "families": {}}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else empty
    (DOCS / "images/envs").mkdir(exist_ok=True)
    for family in () if args.page else FAMILIES:
        if args.only in family.name and is_installed(family):
            results["families"][family.name] = measure(family)
            sys.stdout.write(f"{family.name}: {results['families'][family.name]}\n")
            sys.stdout.flush()
            results["machine"] = (
                f"{os.cpu_count()} cores (AMD EPYC), Python {platform.python_version()}, "
                f"Gymnasium {importlib.metadata.version('gymnasium')}, jax {jax.__version__}"
            )
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    written = PAGE.read_text().partition("## Gallery\n")[0]
    PAGE.write_text(written + gallery(results))


if __name__ == "__main__":
    main()
