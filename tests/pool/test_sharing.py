"""One pool in several threads and processes, and several pools in one: it works, or is refused clearly."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.disasters import PATIENCE, WAYS, Background, RaisingEnv, _step
from support.scripts import gone, read_pids, run_script

import jaxvec
from jaxvec.testing import CountingEnv


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps, ForkingPickler.dumps, copy.deepcopy])
def test_a_pool_is_not_pickled_nor_copied(drive, dump):
    driver = drive(CountingEnv)
    with pytest.raises(TypeError, match="a VectorEnv can't be pickled: it owns processes and memory"):
        dump(driver.envs)
    driver.reset()
    assert driver.step(3)[:, 3].tolist() == [3] * 4


FORK = """
if os.fork() == 0:
    for name, call in {
        "step": driver.step,
        "reset": driver.reset,
        "call": lambda: envs.call("pid"),
        "raise": envs.raise_if_failed,
    }.items():
        try:
            call()
            print(name, "nothing", flush=True)
        except jaxvec.JaxvecError as error:
            print(name, type(error).__name__, error, flush=True)
    envs.close()
    os._exit(0)
os.wait()
print(driver.step().tolist())
"""


# Not in programs: a fork has no threads, so JAX, which warns of forks, may hang in it before it comes to us.
@pytest.mark.parametrize("way", [w for w in WAYS if w.face == "python"], ids=str, indirect=True)
def test_a_fork_is_refused_in_every_call(way):
    with run_script(then="import warnings; warnings.simplefilter('ignore')" + FORK, way=way) as script:
        pids = read_pids(script)
        out, err = script.communicate(timeout=200)
    refused = [line for line in out.splitlines() if "PoolClosedError" in line and "is a fork of it" in line]
    assert [line.split()[0] for line in refused] == ["step", "reset", "call"], out + err
    assert "raise nothing" in out
    assert out.splitlines()[-1] == "[[0.0, 0.0], [0.0, 0.0]]"
    assert gone(pids)


def test_a_pool_is_made_driven_and_closed_by_different_threads(drive):
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        driver = first.submit(drive, CountingEnv).result(PATIENCE)
        second.submit(driver.reset).result(PATIENCE)
        for steps in range(1, 11):
            thread = (first, second)[steps % 2]
            assert thread.submit(driver.step).result(PATIENCE)[:, 1].tolist() == [steps] * 4
        second.submit(driver.close).result(PATIENCE)


def test_several_threads_step_one_pool_in_turn_on_the_host(make):
    """Each call is whole: no step is lost, and every thread gets the rows of its own call."""
    for dispatch in ("native", "portable"):
        envs = make(CountingEnv, 4, num_workers=2, dispatch=dispatch)
        envs.reset()
        seen = []

        def step(number, envs=envs, seen=seen):
            for _ in range(50):
                obs = envs.step(np.full(4, number)).obs
                assert obs[:, 3].tolist() == [number] * 4
                assert len(set(obs[:, 1].tolist())) == 1
                seen.append(int(obs[0, 1]))

        for call in [Background(lambda number=number: step(number)) for number in range(4)]:
            call.result()
        assert sorted(seen) == list(range(1, 201))


@pytest.mark.parametrize("way", [w for w in WAYS if w.face != "python"], ids=str, indirect=True)
def test_of_several_threads_with_one_handle_all_but_one_are_refused(drive):
    """A handle is used once, so who shares it is told, whoever comes first; the host has no handles."""
    driver = drive(CountingEnv)
    driver.reset()
    barrier = threading.Barrier(4)

    driver.step()
    handle = driver._handle
    calls = [Background(lambda: stepped_or_stale(handle, barrier)) for _ in range(4)]
    outcomes = sorted(call.result() for call in calls)
    assert outcomes == ["stale", "stale", "stale", "stepped"]
    driver.reset()
    assert driver.step()[:, 1].tolist() == [3] * 4


def stepped_or_stale(handle, barrier):
    barrier.wait(PATIENCE)
    try:
        jax.block_until_ready(_step(handle, jnp.zeros(4, int), times=1))
    except jax.errors.JaxRuntimeError as error:  # typed for all threads but once, so not here
        return "stale" if "StaleHandleError: stale handle" in str(error) else str(error)
    return "stepped"


def test_two_pools_at_once_do_not_know_of_each_other(drive):
    first, second = drive(CountingEnv), drive(CountingEnv)

    def run(driver, action):
        driver.reset()
        return [driver.step(action)[:, 3].tolist() for _ in range(20)]

    calls = [Background(lambda d=d, a=a: run(d, a)) for d, a in ((first, 1), (second, 2))]
    assert [call.result() for call in calls] == [[[1] * 4] * 20, [[2] * 4] * 20]
    first.workers[0].kill()
    with pytest.raises(jaxvec.WorkerDiedError):
        first.step()
    assert second.step(5)[:, 3].tolist() == [5] * 4
    first.close()
    assert second.step(6)[:, 3].tolist() == [6] * 4


def test_an_error_in_one_thread_reaches_the_others(make):
    envs = make(RaisingEnv, 4, num_workers=2)
    envs.reset()
    others = [Background(lambda: steps_until_broken(envs)) for _ in range(3)]
    with pytest.raises(jaxvec.EnvError, match="bad luck"):
        envs.step(np.full(4, 7))
    for other in others:
        assert isinstance(other.result().__cause__, jaxvec.EnvError)


def steps_until_broken(envs):
    try:
        while True:
            envs.step(np.zeros(4, int))
    except jaxvec.PoolBrokenError as error:
        return error
