"""Pools of workers at hosts, on a Ray cluster and of `jaxvec worker`: the local pool is their oracle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from support import disasters, probe, state_game
from support.disasters import DEATHS, FAILURES, SleepingEnv, failing, wait_until, within
from support.elsewhere import (
    Parented,
    compare,
    faults_until_20_steps_after,
    parents,
    play_in_order,
    sample_actions,
    scan,
)

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

NUM_ENVS = 5  # so that 2 workers hold slices of different size

ENVS = {
    "CartPole-v1": [partial(gymnasium.make, "CartPole-v1")] * NUM_ENVS,
    "NestedEnv": [partial(NestedEnv, length) for length in (3, 7, 5, 1, 4)],
}


@pytest.mark.parametrize(
    ("dispatch", "transport", "name", "num_workers"),
    [
        ("native", "ffi", "NestedEnv", 3),
        ("portable", "io_callback", "CartPole-v1", 2),
        pytest.param("native", "io_callback", "NestedEnv", 5, marks=pytest.mark.nightly),
        pytest.param("portable", "ffi", "NestedEnv", 2, marks=pytest.mark.nightly),
    ],
)
def test_compiled_loop_gets_the_data_of_local_workers(
    make, make_at_hosts, dispatch, transport, name, num_workers
):
    options = {"dispatch": dispatch, "transport": transport, "num_workers": num_workers}
    run = partial(scan, actions=sample_actions(ENVS[name], 40))
    _, rows = compare(make, make_at_hosts, run, ENVS[name], **options)
    assert rows.info["_final_obs"].any()  # autoresets were among them


def test_batches_in_the_order_sent_are_those_of_local_workers(make, make_at_hosts):
    options = {"batch_size": 2, "recv_order": "sent"}
    compare(make, make_at_hosts, play_in_order, "CartPole-v1", 4, **options)


def test_batched_envs_are_stepped_as_by_local_workers(make, make_at_hosts):
    batched = partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="sync")
    run = partial(scan, actions=np.tile(np.arange(4) % 2, (30, 1)))
    compare(make, make_at_hosts, run, batched, num_envs=4, envs_per_instance=2)


@pytest.mark.parametrize("mode", ["SAME_STEP", "EPISODIC"])
def test_states_go_to_hosts_and_come_back(make_at_hosts, mode):
    options = {"states": state_game.CAPACITY, "info": {"luck": np.float32}, "autoreset_mode": mode}
    envs = make_at_hosts(state_game.walk, NUM_ENVS, **options)
    models = [state_game.Model(state_game.walk(), mode, env_id) for env_id in range(NUM_ENVS)]
    game = state_game.Game(state_game.HostFace(envs), models, np.random.default_rng(0))
    game.play(80)
    assert game.count > 90


def test_envs_can_be_called_and_set(make_at_hosts, tmp_path):
    envs = make_at_hosts(CountingEnv, 4)
    handle, _ = jaxvec.reset(envs, seed=1)
    handle, _ = jax.jit(jaxvec.step)(handle, jnp.zeros(4, int))
    assert [*envs.get_attr("steps")] == [1, 1, 1, 1]
    envs.set_attr("steps", [5, 6, 7, 8])
    assert [*envs.get_attr("steps")] == [5, 6, 7, 8]
    assert (envs.stats().total.steps, envs.stats().total.resets) == (4, 4)
    by = 10
    assert envs.map(lambda env, more: env.steps + by + more, 1, indices=[-1, 0]) == (19, 16)
    with pytest.raises(jaxvec.EnvAttributeError, match=r"'nothing' \(env 2, .*on "):
        envs.get_attr("nothing", indices=2)

    def meet(_, mine, other):
        (tmp_path / mine).touch()
        while not (tmp_path / other).exists():
            threading.Event().wait(0.001)
        return mine

    with ThreadPoolExecutor(2) as threads:  # of different workers: both calls are under way at once
        calls = [threads.submit(envs.map, meet, *who, indices=i) for who, i in (("ab", 0), ("ba", 3))]
        assert [call.result(200) for call in calls] == [("a",), ("b",)]


# --- Faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_an_env_that_raises_breaks_the_pool_and_its_host_is_named(make_at_hosts, where):
    with pytest.raises(jaxvec.EnvError, match="env 2 .*bad luck.*on .*") as caught:
        envs = make_at_hosts(failing(where, FAILURES["picklable"][0]), 4)
        envs.reset()
        envs.step(np.full(4, 7))
    assert (caught.value.env_id, caught.value.worker, caught.value.operation) == (2, 1, where)
    assert Path(disasters.__file__).name in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("failure", "retry", "dispatch"),
    [
        (FAILURES["picklable"][0], "reset", "native"),
        (DEATHS["SIGKILL"][0], "reset", "portable"),
        pytest.param(FAILURES["picklable"][0], "rebuild", "portable", marks=pytest.mark.nightly),
        pytest.param(DEATHS["SIGKILL"][0], "rebuild", "native", marks=pytest.mark.nightly),
    ],
    ids=["exception", "death", "rebuilt", "rebuilt after death"],
)
def test_pool_recovers_from_faults_of_envs_as_a_local_one(make, make_at_hosts, failure, retry, dispatch):
    def run(envs):
        rows = [envs.reset(seed=3)]
        rows += [envs.step(np.full(4, action)) for action in (0, 0, 7, 0, 7, 0, 0)]
        return rows, envs.stats().total.restarts, envs.stats().total.faults

    options = {"on_fault": jaxvec.Restart(retry, None, rate=None), "dispatch": dispatch}
    rows, restarts, _ = compare(make, make_at_hosts, run, failing("step", failure), 4, **options)
    assert restarts == 2
    assert rows[3].info["fault"][2]


def run_and_kill_a_host(envs, program, kill):
    """Runs `program` in a thread, and kills the host of worker 1 when it is under way."""
    completed = probe.array(envs, "completed")
    outcome = disasters.Background(program)
    before = completed.copy()
    wait_until(lambda: (completed > before + 20).all())
    kill()
    return outcome


def test_a_host_killed_during_a_compiled_loop_breaks_the_pool(make_at_hosts, no_jax_log):
    envs = make_at_hosts(Parented, 4)
    handle, _ = jaxvec.reset(envs)
    loop = partial(jax.lax.fori_loop, 0, 10**9, lambda _, h: jaxvec.step(h, jnp.zeros(4, int))[0])
    program = lambda: jax.block_until_ready(jax.jit(loop)(handle))  # noqa: E731
    victim = parents(envs)[1]
    outcome = run_and_kill_a_host(envs, program, lambda: os.kill(victim, signal.SIGKILL))
    with pytest.raises(jax.errors.JaxRuntimeError, match="WorkerDiedError"):
        outcome.result()
    with pytest.raises(jaxvec.WorkerDiedError, match=r"worker 1 .*on .* was lost: its connection ended"):
        envs.raise_if_failed()
    within(envs.close)


def test_a_host_killed_during_a_compiled_loop_is_replaced(make_at_hosts, spare_host):
    envs = make_at_hosts(Parented, 4, num_workers=4, on_fault="restart")
    handle, _ = jaxvec.reset(envs)
    one, same, other, last = parents(envs)
    assert one == same != other == last
    program = partial(faults_until_20_steps_after, handle)
    outcome = run_and_kill_a_host(envs, program, lambda: os.kill(other, signal.SIGKILL))
    assert outcome.result().tolist() == [0, 0, 1, 1]
    assert [worker.restarts for worker in envs.stats().workers] == [0, 0, 1, 1]
    first, second, third, fourth = parents(envs)
    assert first == second == one
    assert third == fourth not in (one, other)


def test_a_host_that_is_stopped_is_replaced(make_at_hosts, spare_host):
    envs = make_at_hosts(Parented, 4, step_timeout=3, on_fault="restart")
    envs.reset()
    stopped, _ = parents(envs)
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED)
    assert envs.step(np.zeros(4, int)).info["fault"].tolist() == [True, True, False, False]
    assert stopped not in parents(envs)
    os.kill(stopped, signal.SIGKILL)  # Ray waits until it goes on


def test_a_slow_env_is_replaced_beside_the_others_of_its_host(make_at_hosts):
    on_fault = jaxvec.Restart(rate=None)
    envs = make_at_hosts(SleepingEnv, 4, num_workers=4, step_timeout=5, on_fault=on_fault)
    envs.reset(seed=0)
    assert envs.step(np.full(4, 7)).info["fault"].tolist() == [False, True, False, False]
    assert [worker.restarts for worker in envs.stats().workers] == [0, 1, 0, 0]
    assert not envs.step(np.zeros(4, int)).info["fault"].any()


def test_a_slow_env_breaks_a_pool_without_restarts(make_at_hosts):
    envs = make_at_hosts(SleepingEnv, 4, step_timeout=2)
    envs.reset()
    with pytest.raises(
        jaxvec.EnvTimeoutError, match=r"Still running: env 1 \(worker 0, action 7\)"
    ) as caught:
        envs.step(np.full(4, 7))
    assert caught.value.env_ids == (0, 1)
    within(envs.close)


# --- Their end ------------------------------------------------------------------------------------


def test_hosts_and_their_workers_end_with_the_pool(make_at_hosts):
    envs = make_at_hosts(Parented, 4)
    pids = {*envs.call("pid")}
    assert len(pids) == 2
    assert os.getpid() not in pids
    envs.close()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


PROGRAM = """
import os, sys, time, gymnasium, jaxvec
class Pid(gymnasium.Wrapper):
    def pid(self): return os.getpid()
if sys.argv[1] == "Ray":
    import ray
    ray.init(log_to_driver=False)  # it would print messages of the cluster among ours
    backend = jaxvec.Ray(hosts=2)
else:
    backend = jaxvec.Remote(listen='127.0.0.1:0', hosts=2, key=b"a key that the hosts have, too")
    print(backend.address, flush=True)
envs = jaxvec.make(lambda: Pid(gymnasium.make('CartPole-v1')), 4, num_workers=4, backend=backend)
envs.reset()
print(*envs.call('pid'), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["Ray", "worker"])
def test_hosts_end_with_a_program_that_is_killed(request, hosts, kind):
    env = {**os.environ}
    if kind == "Ray":
        env["RAY_ADDRESS"] = request.getfixturevalue("cluster").address
    pipes = {"stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, kind], env=env, **pipes)
    try:
        if kind == "worker":
            address = program.stdout.readline().strip()
            for _ in range(2):
                hosts.start("--connect", address)
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len({*pids}) == 4
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        program.kill()
        program.communicate(timeout=200)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    for host in hosts.processes:  # they fail, so that they can be restarted
        assert host.wait(200) == 1
        assert f": the connection to {address} was lost: " in host.stderr.read()


@pytest.mark.parametrize("kind", ["Ray", "worker"])
def test_more_hosts_than_workers_are_refused(make, request, kind):
    if kind == "Ray":
        request.getfixturevalue("cluster")
        backend = jaxvec.Ray(hosts=2)
    else:
        backend = request.getfixturevalue("hosts").remote
    with pytest.raises(ValueError, match="hosts is 2, but the pool has only 1 workers"):
        make(CountingEnv, 4, num_workers=1, backend=backend)
