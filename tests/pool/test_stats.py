"""`envs.stats()`: what each worker has done, and the totals."""

import dataclasses
import time
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support.disasters import RaisingEnv
from support.probe import WorkerStats

import jaxvec
from jaxvec.testing import CountingEnv


def test_the_total_is_the_sum_of_the_workers(make):
    envs = make(CountingEnv, 5, num_workers=3)
    envs.reset()
    for _ in range(7):
        envs.step(np.zeros(5, int))
    stats = envs.stats()
    assert [worker.steps for worker in stats.workers] == [7, 14, 14]
    *counters, process = dataclasses.fields(WorkerStats)
    assert process.name == "process"
    for field in counters:
        each = [getattr(worker, field.name) for worker in stats.workers]
        assert getattr(stats.total, field.name) == pytest.approx(sum(each))
    assert all(worker.wait_time > 0 for worker in stats.workers)


def test_the_record_is_frozen_and_of_its_time(make):
    envs = make(CountingEnv, 1)
    envs.reset()
    before = envs.stats()
    envs.step([0])
    assert (before.total.steps, envs.stats().total.steps) == (0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.total.steps = 5


def test_a_broken_pool_tells_what_it_did_and_a_closed_one_nothing(make):
    envs = make(RaisingEnv, 1)
    envs.reset()
    envs.step([0])
    with pytest.raises(jaxvec.EnvError):
        envs.step([7])
    assert envs.stats().total.steps == 1
    envs.close()
    with pytest.raises(jaxvec.PoolClosedError, match=r"call stats\(\) before close\(\)"):
        envs.stats()


def test_times_are_parts_of_the_time_that_passed(make, backend):
    started = time.monotonic()
    envs = make(CountingEnv, 3, backend=backend, num_workers=1, episode_length=2)
    envs.reset()
    for _ in range(6):
        envs.step(np.zeros(3, int))
    total = envs.stats().total
    parts = [total.step_time, total.reset_time, total.wait_time]
    assert min(parts[:2]) > 0
    assert sum(parts) <= time.monotonic() - started


HARM = 7  # the action at which `RaisingEnv` raises


def count_by_hand(length, actions, resets, mode):
    """Returns the numbers of steps, episodes, resets and faults of an env that is played alone."""
    steps = episodes = faults = age = 0
    number, over = 1, False
    for action, reset in zip(actions, resets, strict=True):
        if over and mode == "NEXT_STEP":
            number, age, over = number + 1, 0, False
        elif not over:
            over = action == HARM or age + 1 == length
            steps, age, faults = steps + (action != HARM), age + 1, faults + (action == HARM)
            episodes += over
        if over and mode == "SAME_STEP":
            number, age, over = number + 1, 0, False
        if reset or (over and mode == "DISABLED"):
            number, age, over = number + 1, 0, False
    return steps, episodes, number, faults


@pytest.mark.parametrize(
    "mode", ["SAME_STEP", "NEXT_STEP", "DISABLED", "EPISODIC", "batched", "batched next"]
)
def test_counts_are_those_of_a_plain_loop(make, mode):
    lengths, num_steps = [2, 5, 3], 40
    actions = np.random.default_rng(1).integers(0, 4, (num_steps, 3))
    resets = np.zeros((num_steps, 3), bool)
    if mode.startswith("batched"):
        mode = "NEXT_STEP" if "next" in mode else "SAME_STEP"
        env_fns = [partial(CountingEnv, length) for length in lengths]
        envs = make(SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode[mode]))
    else:
        actions[[0, 6, 13, 14, 30], [0, 0, 1, 1, 2]] = HARM
        resets[7::8] = [True, True, False] if mode != "EPISODIC" else True
        policy = jaxvec.Restart(rate=None, max_restarts=None)
        configs = [{"episode_length": length} for length in lengths]
        envs = make(RaisingEnv, 3, num_workers=2, env_configs=configs, autoreset_mode=mode, on_fault=policy)
    envs.reset(seed=0)
    for action, reset in zip(actions, resets, strict=True):
        timestep = envs.step(action)
        mask = reset | ((mode == "DISABLED") & (timestep.terminated | timestep.truncated))
        if mask.any():
            envs.reset(mask=mask)
    total = envs.stats().total
    each = [count_by_hand(lengths[i], actions[:, i], resets[:, i], mode) for i in range(3)]
    assert (total.steps, total.episodes, total.resets, total.faults) == tuple(np.sum(each, axis=0))
    assert total.step_time > 0
