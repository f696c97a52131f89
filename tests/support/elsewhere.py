"""Envs and programs for comparing pools on other machines with local pools."""

from __future__ import annotations

import os
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from gymnasium.vector import SyncVectorEnv
from support import probe

import jaxvec
from jaxvec.testing import CountingEnv


class Parented(CountingEnv):
    """Knows its worker's process and host, and dies at action 7."""

    def pid(self):
        return os.getpid()

    def parent(self):
        parent = psutil.Process(os.getppid())
        forked = "jaxvec._workers.forkserver" in parent.cmdline()
        return parent.ppid() if forked else parent.pid

    def step(self, action):
        if action == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def parents(envs):
    """Returns the host, by process id, of each worker of a pool of `Parented`."""
    pids = envs.call("parent")
    return [pids[first] for first, _ in probe.partition(envs)]


def sample_actions(env_fns, num_steps):
    """Returns actions `[num_steps, num_envs, ...]` of the envs' action space."""
    space = SyncVectorEnv(env_fns).action_space
    space.seed(3)
    samples = [space.sample() for _ in range(num_steps)]
    return jax.tree.map(lambda *each: np.stack(each), *samples)


def scan(envs, actions):
    """Returns the time steps of a reset and a compiled loop."""
    handle, first = jaxvec.reset(envs, seed=7)
    _, rest = jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, actions)
    return first, rest


def faults_until_20_steps_after(handle):
    """Steps envs in a compiled loop until 20 steps after the first fault; returns each env's faults."""

    def go_on(carry):
        handle, faults, after = carry
        handle, timestep = jaxvec.step(handle, jnp.zeros(len(faults), int))
        faults = faults + timestep.info["fault"]
        return handle, faults, after + faults.any()

    loop = jax.jit(partial(jax.lax.while_loop, lambda carry: carry[2] < 20, go_on))
    return np.asarray(loop((handle, jnp.zeros(handle.num_envs, int), 0))[1])


def assert_equal(one, other):
    """Compares two pytrees bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def compare(make, make_at_hosts, run, *args, **options):
    """Runs the same at hosts and with local workers; returns the results, which must be equal."""
    remote, local = (run(each(*args, **{"num_workers": 2} | options)) for each in (make_at_hosts, make))
    assert_equal(remote, local)
    return remote


def play_in_order(envs):
    """Returns the time steps of a `recv` loop over a pool with `recv_order="sent"`."""

    @jax.jit
    def rollout(handle):
        def body(handle, _):
            handle, timestep = jaxvec.recv(handle)
            ids = timestep.info["env_id"]
            return jaxvec.send(handle, ids % 2, ids), timestep

        return jax.lax.scan(body, handle, length=40)

    handle, first = jaxvec.reset(envs, seed=5)
    ids = first.info["env_id"]
    return first, rollout(jaxvec.send(handle, ids % 2, ids))[1]
