"""`Restart(retry="restore")`: envs go on from their last saved states, as a model foretells."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from support.state_game import CAPACITY, HostFace, Model, Walk, check

import jaxvec
from jaxvec import _arguments, _native
from jaxvec.testing import CountingEnv

RESTORE = jaxvec.Restart(retry="restore", max_restarts=None, rate=None)
NUM_ENVS = 4  # in two workers
HARM = 9  # beyond those by which a save is proved


class Raising(Walk):
    def step(self, action):
        if action == HARM:
            self._place += 100  # half a step, of which nothing may be left
            raise RuntimeError("fragile")
        return super().step(action)


class Dying(Walk):
    def step(self, action):
        if action == HARM:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@dataclass
class Recovering(Model):
    """A model whose env may be lost."""

    kind: Any = None
    saved: Model | None = None
    seeds: dict[str, Any] = field(default_factory=lambda: {"last": None, "next": None, "rebuilds": 0})
    cut: bool = False  # whether the row before was that of a fault

    def reset(self, seed=None):
        if seed is None:
            seed = self.seeds["next"]
        else:
            self.seeds["last"] = seed
        self.seeds["next"] = None
        self.cut = False
        super().reset(seed)

    def step(self, action):
        if not (self.cut and self.mode == "NEXT_STEP"):
            self.cut = False
            super().step(action)
        elif not self._resume():
            self.reset()
        else:
            self._write(self.saved.row["obs"], 0.0, False, False, self.raw, None)

    @property
    def waits(self):
        """Whether the next step goes on from the saved state."""
        return self.cut and self.mode == "NEXT_STEP" and self.saved is not None

    def save(self):
        self.saved = copy.deepcopy(self)
        self.saved.saved = None

    def lose(self):
        """Takes the loss of the env in a step."""
        self.env = TimeLimit(self.kind(), 7)
        self.seeds["rebuilds"] += 1
        self.seeds["next"] = _arguments.derive_seeds(self.seeds["last"], 0, self.seeds["rebuilds"])
        if self.over and self.mode == "NEXT_STEP":  # it was to be reset, or to go on
            self.step(0)
            return
        last, lost = self.row["obs"], self.episode
        if self.mode == "NEXT_STEP":
            self._write(last, 0.0, False, True, {}, None)
            self.raw, self.over = {}, True
        else:
            if not self._resume():
                obs, self.raw = self.env.reset(seed=self.seeds["next"])
                self.seeds["next"], self.episode = None, (0.0, 0)
            else:
                obs = self.saved.row["obs"]
            begun, self.episode = self.episode, lost
            self._write(obs, 0.0, False, True, self.raw, (last, {}))
            self.raw, self.episode = {**self.raw, "final_info": {}}, begun
        self.row["fault"], self.cut = True, True

    def _resume(self):
        """Goes on from the saved state, and says whether there is one in an episode."""
        self.cut = False
        if self.saved is None:
            return False
        self.env, self.episode = copy.deepcopy(self.saved.env), self.saved.episode
        self.seeds |= {name: self.saved.seeds[name] for name in ("last", "next")}
        self.raw, self.over = self.saved.raw, False
        return not self.saved.over

    def _write(self, *args):
        super()._write(*args)
        self.row["fault"] = False


def play(envs, models, turns):
    """Steps, saves, resets and harms at random; returns how many faults there were."""
    rng, faults = np.random.default_rng(0), 0
    for env_id, model in enumerate(models):
        model.reset(100 + env_id)
    check(envs.reset(seed=100), models, range(NUM_ENVS))
    for _ in range(turns):
        what = rng.choice(["step"] * 8 + ["harm"] * 3 + ["save", "reset"])
        if what == "save":
            ids = rng.permutation(NUM_ENVS)[: rng.integers(1, NUM_ENVS + 1)]
            if any(models[env_id].waits for env_id in ids):
                with pytest.raises(
                    jaxvec.EnvStateError, match="after this fault, the env has no state to save"
                ):
                    HostFace(envs).save(ids)
                continue
            HostFace(envs).save(ids)
            for env_id in ids:
                models[env_id].save()
            continue
        if what == "reset":
            mask = rng.random(NUM_ENVS) < 0.5
            for env_id in np.flatnonzero(mask):
                models[env_id].reset()
            check(envs.reset(mask=mask), models, range(NUM_ENVS))
            continue
        actions = rng.integers(3, size=NUM_ENVS)
        harmed = np.zeros(NUM_ENVS, bool)
        if what == "harm":
            harmed = (rng.random(NUM_ENVS) < 0.4) & [
                model.mode == "SAME_STEP" or not model.over for model in models
            ]
            actions[harmed] = HARM
            if models[0].kind is Dying:  # what dies is the worker
                harmed = np.repeat(harmed.reshape(2, -1).any(axis=1), NUM_ENVS // 2)
        for model, action, hit in zip(models, actions, harmed, strict=True):
            model.lose() if hit else model.step(int(action))
        faults += sum(model.row["fault"] for model in models)
        check(envs.step(actions), models, range(NUM_ENVS))
        assert envs.infos() == tuple(model.raw for model in models)
    return faults


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize(
    ("kind", "dispatch"),
    [
        (Raising, "native"),
        (Raising, "portable"),
        (Raising, "serial"),
        (Dying, "native"),
        pytest.param(Dying, "portable", marks=pytest.mark.nightly),
    ],
)
def test_all_is_as_the_model_foretells(make, kind, dispatch, mode):
    if dispatch == "native" and _native.reason_unavailable():
        pytest.skip(_native.reason_unavailable())
    how = {"backend": "serial"} if dispatch == "serial" else {"dispatch": dispatch, "num_workers": 2}
    env_fn = lambda: TimeLimit(kind(), 7)  # noqa: E731
    envs = make(
        env_fn,
        NUM_ENVS,
        states=CAPACITY,
        on_fault=RESTORE,
        autoreset_mode=mode,
        info={"luck": np.float32},
        **how,
    )
    models = [Recovering(env_fn(), mode, env_id, kind=kind) for env_id in range(NUM_ENVS)]
    assert play(envs, models, 100 if kind is Raising else 40) > 10


def test_a_reset_from_outside_begins_anew(make):
    """Whatever was saved: also where a worker died since, and its successor has not stepped yet."""
    envs = make(lambda: TimeLimit(Dying(), 7), 2, num_workers=1, states=9, on_fault=RESTORE)
    envs.reset(seed=0)
    envs.step([1, 1])
    envs.save()
    os.kill(envs.map(lambda env: os.getpid())[0], signal.SIGKILL)
    fresh = Walk()
    np.testing.assert_array_equal(envs.reset(seed=5).obs["place"][0], fresh.reset(seed=5)[0]["place"])
    timestep, expected = envs.step([1, 1]), fresh.step(1)
    np.testing.assert_array_equal(timestep.obs["place"][0], expected[0]["place"])
    assert timestep.info["episode_length"].tolist() == [1, 1]


def test_restored_state_becomes_the_state_for_retries(make):
    """After the row of the fault, and before the step that would have gone on."""
    options = {"num_workers": 1, "states": 9, "on_fault": RESTORE, "autoreset_mode": "NEXT_STEP"}
    envs = make(lambda: TimeLimit(Raising(), 7), 1, **options)
    envs.reset(seed=0)
    first = envs.save()
    envs.step([1])
    envs.save()
    assert envs.step([HARM]).info["fault"].all()
    assert envs.restore(first).info["episode_length"].tolist() == [0]
    timestep = envs.step([1])
    while not (timestep.terminated | timestep.truncated).all():
        timestep = envs.step([1])
    assert envs.step([1]).info["episode_length"].tolist() == [0]  # a reset, and nothing else


def test_an_env_that_can_not_be_put_back_is_reset(make, tmp_path, caplog):
    trap = tmp_path / "trap"

    def put(env, state):
        if trap.exists():
            raise ValueError("no way back")
        vars(env).update(copy.deepcopy(state))

    functions = (lambda env: copy.deepcopy(vars(env))), put
    envs = make(
        Counting, 2, num_workers=1, states=jaxvec.States(max=9, functions=functions), on_fault=RESTORE
    )
    envs.reset(seed=0)
    envs.step([1, 1])
    envs.save()
    envs.step([1, 1])
    assert envs.step([HARM, 1]).obs[:, 1].tolist() == [1, 3]
    assert "(env 0 can continue from saved states)" in caplog.text
    trap.touch()
    timestep = envs.step([1, HARM])
    assert timestep.info["fault"].tolist() == timestep.truncated.tolist() == [False, True]
    assert timestep.obs[:, 1].tolist() == [2, 0]
    assert "raised ValueError in reset: no way back" in caplog.text
    assert envs.stats().total.restarts == 3


class Counting(CountingEnv):
    def step(self, action):
        if action == HARM:
            raise RuntimeError("fragile")
        return super().step(action)
