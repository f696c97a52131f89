"""Data that do not quite fit the spaces: the originals of two compatibility APIs beside ours.

The tables "Data that do not fit" on the porting pages are written from `DIFFERENCES`:
`python tests/compat/test_compat_data.py` prints them.
"""

from __future__ import annotations

import sys
import warnings
from collections import UserDict
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import logger, spaces

import jaxvec
from jaxvec.compat import gymnasium as gymnasium_api

PAGES = Path(__file__).parents[2] / "docs" / "porting"
UINT8 = spaces.Box(0, 255, (1,), np.uint8)
FLOAT = spaces.Box(-np.inf, np.inf, (1,), np.float32)
WIDE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
GRID = spaces.Box(-np.inf, np.inf, (2, 3), np.float32)
DICT = spaces.Dict(image=UINT8, count=spaces.Discrete(9))
PAIR = spaces.Tuple((spaces.Discrete(9), spaces.Discrete(9)))


@dataclass
class Case:
    """An env whose data do not fit exactly: functions of the number of steps in the episode."""

    space: spaces.Space[Any]
    obs: Any
    reward: Any = 1.0
    terminated: Any = lambda n: n >= 2
    info: Any = lambda n: {}
    result: Any = tuple  # type of the results of reset and step
    shows: str = "obs"  # the part that the tables show


class CaseEnv(gymnasium.Env):
    def __init__(self, case):
        self.case, self.observation_space, self.action_space = case, case.space, spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return self.case.result((self.case.obs(0), self.case.info(0)))

    def step(self, action):
        self.n += 1
        case = self.case
        return case.result((case.obs(self.n), case.reward, case.terminated(self.n), False, case.info(self.n)))


def fitting(**others):
    return Case(FLOAT, lambda n: np.full(1, n, np.float32), **others)


def in_dict(n):
    return {"count": n, "image": np.full(1, n, np.uint8), "more": "text"}


# What every original accepts that casts: Gymnasium's `AsyncVectorEnv`, Stable-Baselines3's `DummyVecEnv`.
ACCEPTED = {
    "a key that is not in the space": Case(DICT, in_dict),
    "a mapping that is no dict": Case(DICT, lambda n: UserDict(in_dict(n))),
    "whole float64 for uint8": Case(UINT8, lambda n: np.full(1, 2.0 * n)),
    "fractions for uint8": Case(UINT8, lambda n: np.full(1, 2.7 * n)),
    "int64 for uint8": Case(UINT8, lambda n: np.full(1, 2 * n)),
    "a list of ints for uint8": Case(UINT8, lambda n: [n]),
    "a list of floats for uint8": Case(UINT8, lambda n: [n + 0.5]),
    "uint8 for bool": Case(spaces.Box(0, 1, (1,), bool), lambda n: np.full(1, 2 * n, np.uint8)),
    "floats for MultiBinary": Case(spaces.MultiBinary(2), lambda n: np.full(2, n % 2, float)),
    "a float for Discrete": Case(spaces.Discrete(9), lambda n: float(n)),
    "a float array for Discrete": Case(spaces.Discrete(9), lambda n: np.array(n + 0.5)),
    "a bool for Discrete": Case(spaces.Discrete(9), lambda n: bool(n)),
    "text of an integer for Discrete": Case(spaces.Discrete(9), lambda n: str(n)),
    "an array of objects": Case(FLOAT, lambda n: np.array([n], object)),
    "a scalar for the shape (1,)": Case(FLOAT, lambda n: np.float64(n)),
    "a scalar for the shape (3,)": Case(WIDE, lambda n: np.float64(n)),
    "the shape (1,) for (3,)": Case(WIDE, lambda n: np.full(1, n)),
    "the shape (1, 3) for (3,)": Case(WIDE, lambda n: np.full((1, 3), n)),
    "1e200 for float32": Case(FLOAT, lambda n: np.full(1, 1e200)),
    "a list for Tuple": Case(PAIR, lambda n: [n, n]),
    "an array for Tuple": Case(PAIR, lambda n: np.array([n, n])),
    "flags that are ints": fitting(terminated=lambda n: int(n >= 2)),
    "flags that are None": fitting(terminated=lambda n: None),
    "infos with other keys in each step": fitting(
        info=lambda n: {"a": n} if n % 2 else {"b": "x", "c": None}
    ),
    "lists for the results of reset and step": fitting(result=list),
}
# Everything in which an original and ours differ.
DIFFERENCES = {
    "a number that the dtype cannot hold: 300 for uint8": Case(UINT8, lambda n: np.full(1, 300 * (n > 0))),
    "-1 for uint8": Case(UINT8, lambda n: np.full(1, -(n > 0))),
    "1 for uint8, but as int64": Case(UINT8, lambda n: np.full(1, n)),
    "complex numbers": Case(FLOAT, lambda n: np.full(1, 1 + 1j)),
    "the shape (3, 1) for (3,)": Case(WIDE, lambda n: np.full((3, 1), n)),
    "the shape (3, 2) for (2, 3)": Case(GRID, lambda n: np.arange(6.0).reshape(3, 2)),
    "no observation: None": Case(FLOAT, lambda n: None),
    "an array of shape (1,) for Discrete": Case(spaces.Discrete(9), lambda n: np.array([n])),
    "a tuple of 3 for a Tuple of 2": Case(PAIR, lambda n: (n, n, n)),
    "the reward None": fitting(reward=None, shows="reward"),
    "the reward `'1.5'`, a text": fitting(reward="1.5", shows="reward"),
    "a masked reward": fitting(reward=np.ma.array(7.0, mask=True), shows="reward"),
    "a reward of shape (1,)": fitting(reward=np.ones(1), shows="reward"),
    "a reward of shape (2,), without `reward_space`": fitting(reward=np.ones(2), shows="reward"),
    "a flag of shape (1,)": fitting(terminated=lambda n: np.array([n >= 2]), shows="terminated"),
    "an info that is a mapping but no dict": fitting(info=lambda n: UserDict(a=n), shows="info"),
}


def plain(value):
    """Returns a value for comparisons: arrays as dtype, shape and elements, where NaN equals NaN."""
    match value:
        case np.ndarray() if value.dtype != object:
            return str(value.dtype), value.shape, str(value.tolist())
        case dict():
            return {key: plain(each) for key, each in value.items()}
        case np.ndarray() | list() | tuple():
            return [plain(each) for each in value]
        case _:
            return value


def play(make_envs, case, *, last=False):
    """Returns the results of a reset and four steps; `None` if an error was raised.

    With `last`, they include Stable-Baselines3's last observations, and the infos of its resets.
    """
    envs = make_envs([partial(CaseEnv, case)] * 2)
    try:
        results = [envs.reset(), *(envs.step(np.zeros(2, int)) for _ in range(4))]
        if last:
            return results, getattr(envs, "reset_infos", None)
        # Stable-Baselines3's classes return the last observation as the env did, ours as in its space.
        for *_, infos in results[1:]:
            for info in infos if isinstance(infos, list) else ():
                info.pop("terminal_observation", None)
        return results
    except Exception as error:
        if type(envs).__module__.startswith("jaxvec") and not isinstance(error, jaxvec.EnvDataError):
            raise
        return None
    finally:
        with suppress(Exception):
            envs.close()


def gymnasium_classes():
    theirs = gymnasium.vector
    return {
        "AsyncVectorEnv": (
            partial(theirs.AsyncVectorEnv, context="fork"),
            partial(gymnasium_api.AsyncVectorEnv, num_workers=1),
        ),
        "SyncVectorEnv": (theirs.SyncVectorEnv, gymnasium_api.SyncVectorEnv),
    }


def stable_baselines3_classes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip(
            "stable_baselines3.common.vec_env",
            reason="stable-baselines3 is not installed",
            exc_type=ImportError,
        )
        from jaxvec.compat import stable_baselines3 as ours
    return {"DummyVecEnv": (theirs.DummyVecEnv, ours.DummyVecEnv)}


FIELDS = ["obs", "reward", "terminated", "truncated", "info"]
LIBRARIES = {"gymnasium": gymnasium_classes, "stable_baselines3": stable_baselines3_classes}
CASTS = {"gymnasium": "AsyncVectorEnv", "stable_baselines3": "DummyVecEnv"}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the originals: casts, forks beside threads
both = pytest.mark.parametrize("library", LIBRARIES)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(logger, "min_level", 50)


@both
@pytest.mark.slow(but=6)
@pytest.mark.parametrize("name", ACCEPTED)
def test_data_that_originals_accept_are_equal(library, name):
    case, classes = ACCEPTED[name], LIBRARIES[library]()
    expected = plain(play(classes[CASTS[library]][0], case))
    assert expected
    for theirs, ours in classes.values():
        found = plain(play(ours, case))
        assert found == (plain(play(theirs, case)) or expected)


def ends_with(space, obs, last):
    """Returns a case whose last observation of each episode is `last`."""
    return Case(space, lambda n: last if n == 2 else obs(n), info=lambda n: {"n": n} if n % 2 else {})


def in_wide(n):
    return np.full(3, n, np.float32)


def in_named(n):
    return {"row": in_wide(n), "count": n}


# Last observations that are not of the space.
LAST = {
    "None": ends_with(WIDE, in_wide, None),
    "a short window": ends_with(WIDE, in_wide, np.arange(2.0)),
    "a window of 1": ends_with(WIDE, in_wide, np.ones(1, np.float32)),
    "an empty window": ends_with(WIDE, in_wide, np.ones(0)),
    "another order of axes": ends_with(GRID, lambda n: np.ones((2, 3), np.float32), np.ones((3, 2))),
    "one axis more": ends_with(WIDE, in_wide, np.ones((1, 3), np.float32)),
    "a text": ends_with(WIDE, in_wide, "the end"),
    "fractions for uint8": ends_with(UINT8, lambda n: np.full(1, n, np.uint8), np.full(1, 0.5)),
    "None for Discrete": ends_with(spaces.Discrete(9), lambda n: n, None),
    "no dict": ends_with(spaces.Dict(row=WIDE, count=spaces.Discrete(9)), in_named, None),
    "no value of a key": ends_with(
        spaces.Dict(row=WIDE, count=spaces.Discrete(9)), in_named, {"row": in_wide(2), "count": None}
    ),
    "a tuple with a short row": ends_with(
        spaces.Tuple((WIDE, WIDE)), lambda n: (in_wide(n), in_wide(n)), (in_wide(2), np.ones(2))
    ),
}


def last_classes(library):
    """Returns pairs of an original and ours, with same-step autoreset."""
    pairs = list(LIBRARIES[library]().values())
    if library == "gymnasium":
        return [[partial(make, autoreset_mode="SameStep") for make in pair] for pair in pairs]
    from stable_baselines3.common.vec_env import SubprocVecEnv

    from jaxvec.compat.stable_baselines3 import SubprocVecEnv as OurSubprocVecEnv

    return [*pairs, (partial(SubprocVecEnv, start_method="fork"), partial(OurSubprocVecEnv, num_workers=1))]


@both
@pytest.mark.slow(but=6)
@pytest.mark.parametrize("name", LAST)
def test_unfit_last_observations_are_the_envs_own(library, name):
    for theirs, ours in last_classes(library):
        expected = plain(play(theirs, LAST[name], last=True))
        assert expected
        assert plain(play(ours, LAST[name], last=True)) == expected


@pytest.mark.parametrize("ours", [0, 1])
def test_unfit_last_observation_survives_reuse_of_its_memory(ours):
    memory = np.zeros(3, np.float32)

    def reused(n):
        memory[:] = n
        return {"row": memory[:2] if n == 2 else memory}

    classes = last_classes("gymnasium")
    results, _ = play(classes[ours][1], Case(spaces.Dict(row=WIDE), reused), last=True)
    assert [obs["row"].tolist() for obs in results[2][4]["final_obs"]] == [[2, 2], [2, 2]]


@pytest.mark.parametrize("backend", ["serial", "process"])
@pytest.mark.parametrize("check", ["structure", "cast"])
@pytest.mark.parametrize("name", ["None", "a short window", "no value of a key"])
def test_make_refuses_unfit_last_observation_and_names_final_obs(make, name, check, backend):
    options = {"check": check, "backend": backend}
    envs = make(partial(CaseEnv, LAST[name]), 2, **options)
    envs.reset()
    envs.step([0, 0])
    with pytest.raises(jaxvec.EnvDataError, match=r"env 0 .*final_obs.*pass make\(final_obs=False\)"):
        envs.step([0, 0])
    envs = make(partial(CaseEnv, LAST[name]), 2, **options, final_obs=False)
    envs.reset()
    envs.step([0, 0])
    assert envs.step([0, 0]).done.all()
    assert not envs.step([0, 0]).done.any()


def cell(results, case):
    """Describes env 0's part of the result of a first step."""
    if results is None:
        return "error"
    names = ["obs", "reward", "terminated", "info"] if len(results[1]) == 4 else FIELDS
    part = results[1][names.index(case.shows)]
    if case.shows == "info":
        part = part if isinstance(part, dict) else {"a": [part[0]["a"]]}
        return f"`{{'a': {part['a'][0]}}}`"
    return f"`{[each.item(0) for each in part] if isinstance(part, tuple) else part[0].tolist()}`"


def differing(library):
    """Returns the lines of a porting page's table, from runs of all classes."""
    classes = LIBRARIES[library]()
    lines = [
        f"| an env that returns | {' | '.join(f'their `{name}`' for name in classes)} | jaxvec |",
        f"| --- |{' --- |' * (len(classes) + 1)}",
    ]
    for name, case in DIFFERENCES.items():
        theirs = [play(each, case) for each, _ in classes.values()]
        ours = [play(each, case) for _, each in classes.values()]
        same = [plain(a) == plain(b) for a, b in zip(theirs, ours, strict=True)]
        assert len({str(plain(each)) for each in ours}) == 1, name
        if not all(same):
            cells = [cell(each, case) for each in (*theirs, ours[0])]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


@both
def test_porting_page_has_the_table_of_differing_data(library):
    assert "\n".join(differing(library)) in (PAGES / f"{library}.md").read_text()


@pytest.mark.parametrize(
    "name", ["a key that is not in the space", "int64 for uint8", "a scalar for the shape (1,)"]
)
def test_make_refuses_with_a_cure_and_casts_if_asked(make, name):
    case = ACCEPTED[name]
    with pytest.raises(jaxvec.EnvDataError, match='check="cast"'):
        make(partial(CaseEnv, case), 1, backend="serial").reset()
    envs = make(partial(CaseEnv, case), 1, backend="serial", check="cast")
    envs.reset()
    obs = envs.step([0]).obs
    first = (obs["count"] if case.space is DICT else obs).item(0)
    assert first == (2 if name == "int64 for uint8" else 1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logger.min_level = 50
    for library in sys.argv[1:] or LIBRARIES:
        print(library, *differing(library), sep="\n")
