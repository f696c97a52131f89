"""Envs that write observations into the pool's memory give the same data as those that return arrays."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import jaxvec

pytestmark = pytest.mark.filterwarnings("ignore:.*reuse.*:UserWarning")


class Painter(gymnasium.Env):
    """Paints random pictures, into the memory that it is lent or into new arrays."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (4, 5), np.uint8),
        pair=spaces.Tuple([spaces.Box(-9, 9, (), np.float32), spaces.Box(-9, 9, (3,), np.float32)]),
    )
    action_space = spaces.Discrete(2)

    def __init__(self, takes: bool, fails: bool = False) -> None:
        self.buffer: Any = None
        self.lent = 0
        self.count = 0
        self.fails = fails
        if takes:
            self.set_observation_buffer = self._set

    def _set(self, buffer: Any) -> None:
        self.buffer = buffer
        self.lent += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._paint(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        obs = self._paint()
        if self.fails and self.count % 11 == 0:
            raise RuntimeError("in the middle")
        return obs, 1.0, bool(self.np_random.random() < 0.2), False, {}

    def _paint(self) -> Any:
        drawn = {
            "image": self.np_random.integers(256, size=(4, 5), dtype=np.uint8),
            "pair": (np.float32(self.np_random.random()), self.np_random.random(3).astype(np.float32)),
        }
        if self.buffer is None:
            return drawn
        self.buffer["image"][...] = drawn["image"]
        for target, part in zip(self.buffer["pair"], drawn["pair"], strict=True):
            target[...] = part
        return self.buffer


OFTEN = {"on_fault": jaxvec.Restart(rate=None, max_restarts=None), "fails": True}
POOLS = {
    "same step": {},
    "next step": {"autoreset_mode": "NEXT_STEP"},
    "serial": {"backend": "serial"},
    "faults": OFTEN,
    "envs built anew": OFTEN | {"on_fault": jaxvec.Restart(retry="rebuild", rate=None, max_restarts=None)},
    "spare envs": {"spare_envs": 2},
    "first ready": {"batch_size": 2, "recv_order": "sent"},
}


@pytest.mark.parametrize("options", POOLS.values(), ids=POOLS)
def test_data_are_the_same_as_those_of_new_arrays(make, options):
    seen = []
    for takes in (True, False):
        options = {"num_workers": 1} | options
        envs = make(lambda takes=takes, **kwargs: TimeLimit(Painter(takes, **kwargs), 9), 4, **options)
        rows = [envs.reset(seed=3)]
        for _ in range(60):
            if envs.batch_size < 4:
                envs.send(np.zeros(2, int), rows[-1].info["env_id"])
                rows.append(envs.recv())
            else:
                rows.append(envs.step(np.zeros(4, int)))
        seen.append(rows)
        assert all(count > 0 for count in envs.call("lent")) is takes
    for mine, other in zip(*seen, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, other)


class Double(Painter):
    observation_space = spaces.Box(-1, 1, (2,), np.float64)  # stored as float32

    def _paint(self) -> Any:
        return np.zeros(2)


def behind_a_wrapper(takes: bool) -> gymnasium.Env:
    return gymnasium.wrappers.RecordEpisodeStatistics(Painter(takes))


@pytest.mark.parametrize("env_fn", [Double, behind_a_wrapper])
def test_nothing_is_lent_where_the_row_may_be_another(make, env_fn):
    envs = make(lambda: env_fn(True), 1)
    envs.reset(seed=0)
    assert envs.call("lent") == (0,)
