"""Envs of an OpenEnv server, through OpenEnv's own client (`OpenEnvClient` of `examples/server_envs.py`)."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from server_envs import OpenEnvClient, ServerEnvs

import jaxvec

pytest.importorskip("openenv")


@pytest.fixture
def start():
    """Starts OpenEnv servers, and kills them after the test."""
    servers = []

    def start_one(port=0, latency=0.0):
        script = Path(__file__).parents[1] / "support/openenv_cartpole.py"
        command = [sys.executable, script, str(port), str(latency)]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return servers[-1], int(servers[-1].stdout.readline())

    yield start_one
    for server in servers:
        server.kill()
        server.wait()
        server.stdout.close()


def make_pool(make, port, count, **options):
    with gymnasium.make("CartPole-v1") as env:
        spaces = env.observation_space, env.action_space
    connect = partial(OpenEnvClient.connect, f"http://127.0.0.1:{port}")
    fn = partial(ServerEnvs, connect, *spaces, count, **options)
    return make(fn, count, envs_per_instance=count, num_workers=1, info={"lost": bool})


def test_every_field_equals_envs_stepped_directly(make, start):
    _, port = start()
    actions = np.random.default_rng(0).integers(0, 2, (60, 8))
    oracle = SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1")] * 8, autoreset_mode=AutoresetMode.NEXT_STEP
    )
    first, _ = oracle.reset(seed=3)
    rows = [oracle.step(action)[:4] for action in actions]

    handle, timestep = jaxvec.reset(make_pool(make, port, 8, deadline=60), seed=3)
    np.testing.assert_array_equal(timestep.obs, first)
    _, steps = jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, jnp.asarray(actions))
    assert steps.terminated.any()
    assert not steps.info["lost"].any()
    for name, column in zip(
        ("obs", "reward", "terminated", "truncated"), zip(*rows, strict=True), strict=True
    ):
        np.testing.assert_array_equal(getattr(steps, name), np.stack(column), err_msg=name)


def test_restarted_server_truncates_and_resets(make, start):
    server, port = start()
    envs = make_pool(make, port, 4, deadline=60, restart=600)
    before = envs.reset(seed=0)
    server.kill()
    server.wait()
    lost = envs.step(np.zeros(4, int))
    np.testing.assert_array_equal(lost.truncated, np.ones(4, bool))
    np.testing.assert_array_equal(lost.info["lost"], np.ones(4, bool))
    np.testing.assert_array_equal(lost.terminated, np.zeros(4, bool))
    np.testing.assert_array_equal(lost.obs, before.obs)

    start(port)
    after = envs.step(np.zeros(4, int))  # the reset of next-step autoreset
    assert not after.truncated.any()
    assert not after.info["lost"].any()
    assert (np.abs(after.obs) <= 0.05).all()
    np.testing.assert_array_equal(envs.step(np.zeros(4, int)).reward, np.ones(4))


def test_step_beyond_its_deadline_truncates(make, start):
    _, port = start(latency=100_000.0)
    envs = make_pool(make, port, 2, deadline=1.0, restart=600)
    envs.reset(seed=0)
    late = envs.step(np.zeros(2, int))
    np.testing.assert_array_equal(late.truncated, np.ones(2, bool))
    np.testing.assert_array_equal(late.info["lost"], np.ones(2, bool))
