"""Many pools at once, with workers that dawdle at random and are killed at random."""

import os
import random
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import probe
from support.disasters import PATIENCE

import jaxvec
from jaxvec.testing import CountingEnv

STEPS = 200
POOLS = 6


class DawdlingEnv(CountingEnv):
    """Sleeps now and then, for less or more than the others look before they sleep."""

    def __init__(self, env_id, seed):
        super().__init__()
        self._random = random.Random(f"{seed} {env_id}")

    def step(self, action):
        if self._random.random() < 0.02:
            time.sleep(self._random.choice([0, 1e-5, 1e-4, 1e-3, 1e-2]))
        return super().step(action)


def run(make, seed, fate):
    """Steps a pool to its end, or to that which `fate` holds for it; returns what it says wrong."""
    dice = random.Random(seed)
    num_envs = dice.randint(1, 9)
    envs = make(DawdlingEnv, num_envs, num_workers=dice.randint(1, min(num_envs, 4)), seed=seed)
    handle, _ = jaxvec.reset(envs)
    wound = threading.Timer(dice.uniform(0, 0.3), fate, [envs, dice])
    wound.start()
    try:
        action = jnp.arange(num_envs)
        scan = jax.jit(lambda h: jax.lax.scan(lambda h, _: jaxvec.step(h, action), h, length=STEPS))
        for turn in range(1, 4):
            try:
                handle, timesteps = jax.block_until_ready(scan(handle))
            except RuntimeError as error:
                return str(error)
            np.testing.assert_array_equal(timesteps.obs[-1, :, 1], turn * STEPS)
            np.testing.assert_array_equal(timesteps.obs[:, :, 3], np.tile(np.arange(num_envs), (STEPS, 1)))
        return "nothing"
    finally:
        wound.cancel()
        wound.join(10)
        envs.close()


def kill(envs, dice):
    """Kills a worker; if the pool is closed by now, there is none."""
    pids = probe.pids(envs)
    if pids:
        os.kill(dice.choice(pids), signal.SIGKILL)


FATES = {
    "spare": (lambda envs, dice: None, "nothing"),
    "kill": (kill, r"nothing|WorkerDiedError: worker \d .*was killed by SIGKILL"),
    "close": (lambda envs, dice: envs.close(), "nothing|PoolClosedError: pool"),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("fate", FATES)
def test_every_pool_ends_well_or_says_why_not(make, fate):
    how, expected = FATES[fate]
    outcomes = {}

    def one(seed):
        outcomes[seed] = run(make, seed, how)

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(POOLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(outcomes) == POOLS
    for outcome in outcomes.values():
        assert re.search(expected, outcome), outcome
    if fate != "spare":
        assert any("Error" in outcome for outcome in outcomes.values())
