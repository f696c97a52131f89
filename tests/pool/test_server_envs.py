"""Envs behind a server (`jaxvec.examples.server_envs`): real server processes and compiled programs."""

import sys
from functools import partial
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import jaxvec
from jaxvec.examples.server_envs import LineClient, OpenEnvClient, ServerEnvs, launch, start_server

LOST = {"lost": bool}


def start_openenv(port=0, latency=0.0):
    script = Path(__file__).parents[1] / "support/openenv_cartpole.py"
    return launch([sys.executable, str(script), str(port), str(latency)])


@pytest.fixture(params=["lines", "openenv"])
def protocol(request):
    """A function that starts a server, and one that connects to an env of the server at a port."""
    if request.param == "lines":
        return start_server, lambda port: partial(LineClient.connect, port)
    pytest.importorskip("openenv", reason="openenv is not installed: the group families has it")
    return start_openenv, lambda port: partial(OpenEnvClient.connect, f"http://127.0.0.1:{port}")


@pytest.fixture
def start(protocol):
    """Starts servers, and kills them after the test."""
    servers = []

    def start_one(port=0, latency=0.0):
        server, port = protocol[0](port, latency)
        servers.append(server)
        return server, port

    yield start_one
    for server in servers:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.fixture
def make_pool(make, protocol):
    def make_one(port, count, **options):
        with gymnasium.make("CartPole-v1") as env:
            spaces = env.observation_space, env.action_space
        fn = partial(ServerEnvs, protocol[1](port), *spaces, count, **options)
        return make(fn, count, envs_per_instance=count, num_workers=1, info=LOST)

    return make_one


def test_every_field_equals_envs_stepped_directly(make_pool, start):
    _, port = start()
    actions = np.random.default_rng(0).integers(0, 2, (60, 8))
    oracle = SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1")] * 8, autoreset_mode=AutoresetMode.NEXT_STEP
    )
    first, _ = oracle.reset(seed=3)
    rows = [oracle.step(action)[:4] for action in actions]

    handle, timestep = jaxvec.reset(make_pool(port, 8, deadline=60), seed=3)
    np.testing.assert_array_equal(timestep.obs, first)
    _, steps = jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, jnp.asarray(actions))
    assert steps.terminated.any()
    assert not steps.info["lost"].any()
    # Later resets draw from the generator that the seed of the first reset made.
    for name, column in zip(
        ("obs", "reward", "terminated", "truncated"), zip(*rows, strict=True), strict=True
    ):
        np.testing.assert_array_equal(getattr(steps, name), np.stack(column), err_msg=name)


def test_restarted_server_truncates_and_resets(make_pool, start):
    server, port = start()
    envs = make_pool(port, 4, deadline=60, restart=600)
    before = envs.reset(seed=0)
    server.kill()
    server.wait()
    lost = envs.step(np.zeros(4, int))
    assert lost.truncated.all()
    assert lost.info["lost"].all()
    assert not lost.terminated.any()
    np.testing.assert_array_equal(lost.obs, before.obs)

    start(port)
    after = envs.step(np.zeros(4, int))  # the reset of next-step autoreset
    assert not after.truncated.any()
    assert not after.info["lost"].any()
    assert (np.abs(after.obs) <= 0.05).all()
    np.testing.assert_array_equal(envs.step(np.zeros(4, int)).reward, np.ones(4))


def test_late_reply_truncates_its_episode(make_pool, start):
    _, port = start(latency=100_000.0)
    envs = make_pool(port, 2, deadline=1.0, restart=600)
    envs.reset(seed=0)
    late = envs.step(np.zeros(2, int))
    assert late.truncated.all()
    assert late.info["lost"].all()


def test_server_that_stays_away_is_an_error(make_pool, start):
    server, port = start()
    envs = make_pool(port, 2, deadline=60, restart=0)
    server.kill()
    server.wait()
    with pytest.raises(jaxvec.EnvError, match="reset"):
        envs.reset(seed=0)
