"""Random saves, restores and simulations of a pool, against a model that deep-copies Gymnasium's envs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import jaxvec

NUM_ENVS = 5
CAPACITY = 60  # states; newer ones soon replace older ones


class Walk(gymnasium.Env):
    """A random walk with varying info keys."""

    observation_space = spaces.Dict(
        place=spaces.Box(-np.inf, np.inf, (2,), np.float32), image=spaces.Box(0, 255, (2, 3), np.uint8)
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place = self.np_random.normal(size=2)
        return self._observe(), {"luck": 7} if self.np_random.random() < 0.5 else {}

    def step(self, action):
        self._place += action - self.np_random.random(2)
        luck = self.np_random.random()
        info = {"luck": luck, "raw": [luck]} if luck < 0.5 else {}
        return self._observe(), self._place[0] * 0.1, luck < 0.15, False, info

    def _observe(self):
        return {
            "place": self._place.astype(np.float32),
            "image": self.np_random.integers(256, size=(2, 3), dtype=np.uint8),
        }


def walk():
    return TimeLimit(Walk(), 7)


def cart_pole():
    return gymnasium.make("CartPole-v1", max_episode_steps=20)


# --- the model --------------------------------------------------------------------------------


@dataclass
class Model:
    """A model of an env of a pool, and of all fields of its row."""

    env: gymnasium.Env
    mode: str
    env_id: int
    episode: tuple[float, int] = (0.0, 0)
    over: bool = False
    raw: dict[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)

    def reset(self, seed=None):
        obs, info = self.env.reset(seed=seed)
        self._begin(obs, info)

    def step(self, action):
        """Returns whether the env took a step."""
        if self.over and self.mode == "EPISODIC":
            self.row |= {"reward": 0.0, "idle": True}
            return False
        if self.over and self.mode == "NEXT_STEP":
            self.reset()
            return False
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.episode = self.episode[0] + reward, self.episode[1] + 1
        self.raw, self.over = info, terminated or truncated
        final = None
        if self.over and self.mode == "SAME_STEP":
            final, (obs, begun) = (obs, info), self.env.reset()
            self.raw = {**begun, "final_info": info}
        self._write(obs, reward, terminated, truncated, begun if final else info, final)
        if final:
            self.over, self.episode = False, (0.0, 0)
        return True

    def _begin(self, obs, info):
        self.raw, self.over, self.episode = info, False, (0.0, 0)
        self._write(obs, 0.0, False, False, info, None)

    def _write(self, obs, reward, terminated, truncated, info, final):
        self.row = {
            "obs": copy.deepcopy(obs),
            "reward": np.float32(reward),
            "terminated": terminated,
            "truncated": truncated,
            "episode_return": np.float32(self.episode[0]),
            "episode_length": self.episode[1],
            **_declared(info),
            "last_info": _declared(final[1] if final else info),
        }
        if self.mode == "EPISODIC":
            self.row["idle"] = False
        if self.mode == "SAME_STEP":
            zeros = jax.tree.map(np.zeros_like, obs)
            self.row |= {
                "final_obs": copy.deepcopy(final[0]) if final else zeros,
                "_final_obs": final is not None,
                "final_info": _declared(final[1] if final else {}),
            }


def _declared(info):
    return {"luck": np.float32(info.get("luck", 0)), "_luck": "luck" in info}


def check(timestep, models, env_ids):
    """Compares every field of every row."""
    found = {**timestep._asdict(), **timestep.info, "last_info": timestep.last_info}
    del found["info"]
    expected = [model.row | {"env_id": env_id} for model, env_id in zip(models, env_ids, strict=True)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
    assert found.keys() == stacked.keys()
    jax.tree.map(np.testing.assert_array_equal, found, stacked)


# --- the two APIs of a pool ----------------------------------------------------------------------


class HostFace:
    """Drives a pool by its methods."""

    def __init__(self, envs):
        self.envs = envs
        self.step, self.simulate = envs.step, envs.simulate

    def reset(self, seed=None, mask=None):
        return self.envs.reset(seed=seed, mask=mask)

    def save(self, ids):
        return self.envs.save(indices=ids)

    def restore(self, state, ids):
        return self.envs.restore(state, indices=ids)

    def restore_masked(self, state, mask):
        return self.envs.restore(state, mask=mask)


_step, save_in_jit, _restore = jax.jit(jaxvec.step), jax.jit(jaxvec.save), jax.jit(jaxvec.restore)
_simulate = jax.jit(jaxvec.simulate)


class ProgramFace:
    """Drives a pool by compiled programs, and subsets of its envs by parts of its handle."""

    def __init__(self, envs):
        self.handle, _ = jaxvec.reset(envs)

    def reset(self, seed=None, mask=None):
        self.handle, timestep = jaxvec.reset(self.handle, seed=seed, mask=mask)
        return timestep

    def step(self, actions):
        self.handle, timestep = _step(self.handle, actions)
        return timestep

    def save(self, ids):
        return self._of_part(save_in_jit, ids)

    def restore(self, state, ids):
        return self._of_part(_restore, ids, state)

    def restore_masked(self, state, mask):
        self.handle, timestep = _restore(self.handle, state, mask=mask)
        return timestep

    def simulate(self, state, actions):
        return _simulate(self.handle, state, actions)

    def _of_part(self, verb, ids, *more):
        part, result = verb(jax.tree.map(lambda x: x[np.array(ids)], self.handle), *more)
        token = self.handle.token.at[np.array(ids)].set(part.token)
        self.handle = jaxvec.Handle(token, part.spec, part.transport)
        return result


# --- the game ---------------------------------------------------------------------------------


@dataclass
class Saved:
    """A saved state: its env, its number, and the model at that time."""

    state: jaxvec.EnvState
    number: int
    model: Model


_TURNS = ["step"] * 7 + ["save", "restore", "simulate"] * 3 + ["restore_masked", "reset"]


class Game:
    """A sequence of random operations on a pool and the model."""

    def __init__(self, face, models, rng):
        self.face, self.models, self.rng = face, models, rng
        self.saved: list[Saved] = []
        self.count = self.steps = self.simulated = 0

    def play(self, turns):
        self.reset_all()
        for _ in range(turns):
            getattr(self, self.rng.choice(_TURNS))()

    def reset_all(self):
        for env_id, model in enumerate(self.models):
            model.reset(100 + env_id)
        check(self.face.reset(seed=100), self.models, range(NUM_ENVS))

    def reset(self):
        mask = self.rng.random(NUM_ENVS) < 0.5
        for env_id in np.flatnonzero(mask):
            self.models[env_id].reset()
        check(self.face.reset(mask=mask), self.models, range(NUM_ENVS))

    def step(self):
        if self.models[0].mode == "DISABLED":
            over = np.array([model.over for model in self.models])
            if over.any():
                for env_id in np.flatnonzero(over):
                    self.models[env_id].reset()
                check(self.face.reset(mask=over), self.models, range(NUM_ENVS))
        actions = self.rng.integers(2, size=NUM_ENVS)
        for model, action in zip(self.models, actions, strict=True):
            self.steps += model.step(int(action))
        check(self.face.step(actions), self.models, range(NUM_ENVS))

    def save(self):
        ids = self.some()
        self.keep(self.face.save(ids), [copy.deepcopy(self.models[env_id]) for env_id in ids])

    def restore(self):
        ids = self.some()
        chosen = self.choose(len(ids))
        if not chosen:
            return
        with self.refusal(chosen):
            timestep = self.face.restore(_stack(chosen), ids)
            for env_id, saved in zip(ids, chosen, strict=True):
                self.models[env_id] = copy.deepcopy(saved.model)
                self.models[env_id].env_id = env_id
            check(timestep, [self.models[env_id] for env_id in ids], ids)

    def restore_masked(self):
        mask = self.rng.random(NUM_ENVS) < 0.5
        ids, chosen = np.flatnonzero(mask), self.choose(int(mask.sum()))
        if not chosen:
            return
        state = jaxvec.EnvState(np.zeros((NUM_ENVS, 3), np.uint32))  # other entries are not read
        state.ids[mask] = _stack(chosen).ids
        with self.refusal(chosen):
            timestep = self.face.restore_masked(state, mask)
            for env_id, saved in zip(ids, chosen, strict=True):
                self.models[env_id] = copy.deepcopy(saved.model)
                self.models[env_id].env_id = env_id
            check(timestep, self.models, range(NUM_ENVS))

    def simulate(self):
        chosen = self.choose(6, stepped=True)
        if not chosen:
            return
        with self.refusal(chosen, stepped=True):
            actions = self.rng.integers(2, size=6)
            state, timestep = self.face.simulate(_stack(chosen), actions)
            models = [copy.deepcopy(saved.model) for saved in chosen]
            for model, action in zip(models, actions, strict=True):
                self.simulated += model.step(int(action))
            check(timestep, models, [model.env_id for model in models])
            self.keep(state, models)

    def some(self):
        """Returns all envs, or two in any order."""
        size = 2 if self.rng.random() < 0.5 else NUM_ENVS
        return self.rng.permutation(NUM_ENVS)[:size].tolist()

    def choose(self, count, *, stepped=False):
        """Returns some states, perhaps repeated, and seldom unusable ones."""
        here = [
            saved
            for saved in self.saved
            if self.is_kept(saved) and not (stepped and saved.model.over and saved.model.mode == "DISABLED")
        ]
        pool = self.saved if self.rng.random() < 0.05 else here
        return [pool[i] for i in self.rng.integers(len(pool), size=count)] if pool else []

    def keep(self, state, models):
        self.saved += [Saved(state[place], self.count + place, model) for place, model in enumerate(models)]
        self.count += len(models)
        self.saved = self.saved[-2 * CAPACITY :]

    def is_kept(self, saved):
        return saved.number >= self.count - CAPACITY

    def refusal(self, chosen, *, stepped=False):
        """Returns a context that expects an error if these states can't be used."""
        if not all(map(self.is_kept, chosen)):
            return pytest.raises((ValueError, RuntimeError), match="is gone: pool")
        if stepped and any(saved.model.mode == "DISABLED" and saved.model.over for saved in chosen):
            return pytest.raises(RuntimeError, match="is over")
        return nullcontext()


def _stack(chosen):
    return jaxvec.EnvState(np.stack([np.asarray(saved.state.ids) for saved in chosen]))
