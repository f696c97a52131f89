"""Faults, limits and wrong arguments of pools on a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from support import disasters, probe
from support.disasters import DEATHS, FAILURES, SleepingEnv, failing, wait_until, within
from support.probe import ray_backend, wire
from test_ray import Parented, assert_equal, cluster, make_on_ray, parents, pytestmark, ray, scan  # noqa: F401

import jaxvec
from jaxvec.testing import CountingEnv

cloudpickle.register_pickle_by_value(sys.modules[Parented.__module__])  # only the own module is, otherwise

# --- Faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_an_env_that_raises_breaks_the_pool_and_its_node_is_named(make_on_ray, where):
    with pytest.raises(jaxvec.EnvError, match="env 2 .*bad luck.*on node ") as caught:
        envs = make_on_ray(failing(where, FAILURES["picklable"][0]), 4)
        envs.reset()
        envs.step(np.full(4, 7))
    assert (caught.value.env_id, caught.value.worker, caught.value.operation) == (2, 1, where)
    assert Path(disasters.__file__).name in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.nightly(but=2)
@pytest.mark.parametrize("retry", ["reset", "rebuild"])
@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_an_env_that_raises_is_gone_on_from_as_by_local_workers(make, make_on_ray, retry, dispatch):
    def run(envs):
        rows = [envs.reset(seed=3)]
        rows += [envs.step(np.full(4, action)) for action in (0, 0, 7, 0, 7, 0, 0)]
        return rows, envs.stats().total.restarts, envs.stats().total.faults

    options = {"on_fault": jaxvec.Restart(retry, None, rate=None), "dispatch": dispatch}
    env = failing("step", FAILURES["picklable"][0])
    on_ray, local = (run(each(env, 4, **options)) for each in (make_on_ray, partial(make, num_workers=2)))
    assert_equal(on_ray, local)
    assert on_ray[1] == 2
    assert on_ray[0][3].info["fault"].tolist() == [False, False, True, False]


@pytest.mark.parametrize("by", ["host", "ffi", "io_callback"])
def test_an_actor_that_dies_breaks_the_pool(make_on_ray, no_jax_log, by):
    envs = make_on_ray(failing("step", DEATHS["SIGKILL"][0]), 4, transport="auto" if by == "host" else by)
    handle, _ = jaxvec.reset(envs)
    actions = np.full(4, 7)
    with pytest.raises(
        jaxvec.WorkerDiedError,
        match=r"worker 1 \(envs 2, 3\) on node .* was killed by SIGKILL .* while stepping env 2 with",
    ) as caught:
        if by == "host":
            envs.step(actions)
        else:
            with envs:
                jax.block_until_ready(jax.jit(jaxvec.step)(handle, actions))
    assert caught.value.env_ids == (2, 3)
    with pytest.raises((jaxvec.PoolBrokenError, jaxvec.PoolClosedError)):
        envs.step(actions)
    within(envs.close)


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_an_actor_that_dies_is_replaced(make_on_ray, dispatch):
    env = failing("step", DEATHS["SIGKILL"][0])
    on_fault = jaxvec.Restart("reset", None, rate=None)
    envs = make_on_ray(env, 4, on_fault=on_fault, dispatch=dispatch)
    handle, _ = jaxvec.reset(envs, seed=1)
    actions = np.array([0, 0, 7, 0, 0, 7, 0])[:, None] * np.ones(4, int)
    _, rows = jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, actions)
    fault = np.asarray(rows.info["fault"])
    assert fault[[2, 5]].tolist() == [[False, False, True, True]] * 2
    assert fault.sum() == 4
    assert_equal(rows.truncated, rows.info["fault"])
    assert envs.stats().total.restarts == 2
    # The others' episodes went on, and those of the lost began anew.
    assert np.asarray(rows.info["episode_length"])[-1].tolist() == [7, 7, 1, 1]


def test_an_actor_killed_while_idle_is_noticed(make_on_ray):
    envs = make_on_ray(Parented, 4)
    envs.reset()
    os.kill(parents(envs)[0], signal.SIGKILL)
    with pytest.raises(jaxvec.WorkerDiedError, match="worker 0 .* was lost: its connection ended"):
        envs.step(np.zeros(4, int))


def test_an_actor_that_is_too_slow_times_out(make_on_ray):
    envs = make_on_ray(SleepingEnv, 4, step_timeout=2)
    envs.reset()
    with pytest.raises(
        jaxvec.EnvTimeoutError, match=r"Still running: env 1 \(worker 0, action 7\)"
    ) as caught:
        envs.step(np.full(4, 7))
    assert caught.value.env_ids == (0, 1)
    within(envs.close)


def test_an_actor_that_is_too_slow_is_replaced(make_on_ray):
    envs = make_on_ray(SleepingEnv, 4, step_timeout=5, on_fault=jaxvec.Restart(rate=None))
    envs.reset(seed=0)
    rows = envs.step(np.full(4, 7))
    assert rows.info["fault"].tolist() == [True, True, False, False]
    assert not envs.step(np.zeros(4, int)).info["fault"].any()


@pytest.fixture
def nodes(cluster):
    """Adds two nodes, each with room for one worker of its own resource; they go in the end."""
    added = [
        cluster.add_node(num_cpus=1, resources={"stage": 1}, object_store_memory=100 * 2**20)
        for _ in range(2)
    ]
    cluster.wait_for_nodes()
    yield added
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


ON_STAGE = {"resources": {"stage": 1}}


def kill_a_node_during(envs, cluster, nodes, program):
    """Runs `program` in a thread, and kills a node that it uses when it is under way."""
    completed = probe.array(envs, "completed")
    outcome = disasters.Background(program)
    before = completed.copy()
    wait_until(lambda: (completed > before + 20).all())
    cluster.remove_node(nodes[0], allow_graceful=False)
    return outcome


def test_a_node_killed_during_a_compiled_loop_breaks_the_pool(make_on_ray, cluster, nodes, no_jax_log):
    envs = make_on_ray(CountingEnv, 4, backend=jaxvec.Ray(2, ON_STAGE))
    handle, _ = jaxvec.reset(envs)
    loop = partial(jax.lax.fori_loop, 0, 10**9, lambda _, h: jaxvec.step(h, jnp.zeros(4, int))[0])
    outcome = kill_a_node_during(envs, cluster, nodes, lambda: jax.block_until_ready(jax.jit(loop)(handle)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="WorkerDiedError"):
        outcome.result(60)
    with pytest.raises(jaxvec.WorkerDiedError, match="on node .* was lost"):
        envs.raise_if_failed()
    within(envs.close)


def test_a_node_killed_during_a_compiled_loop_is_replaced(make_on_ray, cluster, nodes):
    envs = make_on_ray(CountingEnv, 4, backend=jaxvec.Ray(2, ON_STAGE), on_fault="restart")
    handle, _ = jaxvec.reset(envs)

    def go_on(carry):
        handle, faults, after = carry
        handle, timestep = jaxvec.step(handle, jnp.zeros(4, int))
        faults = faults + timestep.info["fault"]
        return handle, faults, after + faults.any()

    loop = partial(jax.lax.while_loop, lambda carry: carry[2] < 20, go_on)
    program = lambda: jax.block_until_ready(jax.jit(loop)((handle, jnp.zeros(4, int), 0)))  # noqa: E731
    outcome = kill_a_node_during(envs, cluster, nodes, program)
    spare = cluster.add_node(num_cpus=1, resources={"stage": 1}, object_store_memory=100 * 2**20)
    try:
        _, faults, _ = outcome.result(90)
        assert sorted(faults.tolist()) == [0, 0, 1, 1]
        assert envs.stats().total.restarts == 1
        envs.close()
    finally:
        cluster.remove_node(spare)


def test_a_node_that_dies_while_a_host_starts_on_it_is_no_fault(
    make_on_ray, cluster, nodes, monkeypatch, tmp_path
):
    where, host_task = tmp_path / "where", ray_backend._host_task

    def held_once():
        serve = host_task()

        def serve_later(*args):
            if not where.exists():  # the first never gets there
                where.write_text(ray.get_runtime_context().get_node_id())
                threading.Event().wait()
            return serve(*args)

        return serve_later

    monkeypatch.setattr(ray_backend, "_host_task", held_once)
    options = {"backend": jaxvec.Ray(options=ON_STAGE), "num_workers": 1, "on_fault": "restart"}
    made = disasters.Background(lambda: make_on_ray(CountingEnv, 2, **options))
    wait_until(lambda: where.exists() and where.read_text())
    cluster.remove_node(next(n for n in nodes if n.node_id == where.read_text()), allow_graceful=False)
    envs = made.result(90)
    envs.reset()
    assert not envs.step(np.zeros(2, int)).info["fault"].any()
    assert envs.stats().total.restarts == 0


def test_by_default_there_is_a_worker_per_cpu_of_the_hosts(cluster, make):
    wait_until(lambda: ray.available_resources().get("CPU") == 4)
    backend = jaxvec.Ray(hosts=2, options={"num_cpus": 2})
    assert make(CountingEnv, 3, backend=backend).num_workers == 3
    assert backend.num_workers(9, None) == 4


# --- Bad input ------------------------------------------------------------------------------------


def test_what_cannot_be_pickled_is_refused(make_on_ray):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="the constructor of env 0 can't be pickled"):
        make_on_ray([lambda: lock and CountingEnv()] * 2)


def test_a_node_without_jaxvec_is_named(make_on_ray, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['jaxvec'] = None")
    backend = jaxvec.Ray(options={"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}})
    with pytest.raises(jaxvec.WorkerDiedError, match="on node .* ModuleNotFoundError: .*; install jaxvec"):
        make_on_ray(CountingEnv, 2, backend=backend)


@pytest.mark.parametrize("what", ["jaxvec", "Python"])
def test_a_node_with_another_version_is_named(make_on_ray, monkeypatch, what):
    monkeypatch.setattr(wire, "versions", lambda: {what: "0.0.1"})
    with pytest.raises(
        jaxvec.WorkerDiedError, match=rf"on node .* has {what} .*, but the pool.s process has 0\.0\.1"
    ):
        make_on_ray(CountingEnv, 2)


def test_a_node_without_a_package_is_named(make_on_ray):
    def env():
        import no_such_package  # pyright: ignore[reportMissingImports]

        return no_such_package.Env()

    with pytest.raises(jaxvec.EnvError, match=r"No module named 'no_such_package' \(on node .*; install it"):
        make_on_ray(env, 2)


def test_hosts_that_find_no_room_time_out(make_on_ray):
    needs = r"did not start within 2 s \(Timeouts.start\): Ray has not started .*'num_cpus': 5"
    with pytest.raises(jaxvec.EnvTimeoutError, match=needs):
        make_on_ray(CountingEnv, 5, num_workers=5, backend=jaxvec.Ray(), start_timeout=2)


def test_the_workers_of_an_actor_take_no_descriptors_here(make_on_ray):
    def take(num_workers):
        backend = jaxvec.Ray(options={"num_cpus": 1})
        with make_on_ray(CountingEnv, num_workers, num_workers=num_workers, backend=backend) as envs:
            envs.reset()
            return len(os.listdir("/proc/self/fd"))

    one = take(1)
    assert take(9) - one < 8  # Ray opens and closes some of its own


def step_two_workers(options):
    """Makes a pool, as a trial of Ray Tune does."""
    import numpy as np

    import jaxvec
    from jaxvec.testing import CountingEnv

    backend = jaxvec.Ray(options=options)
    with jaxvec.make(
        CountingEnv, 2, num_workers=2, backend=backend, timeouts=jaxvec.Timeouts(start=100)
    ) as envs:
        envs.reset()
        return envs.step(np.zeros(2, int)).info["episode_length"].tolist()


@pytest.mark.parametrize(("bundles", "options"), [([1], {"scheduling_strategy": "DEFAULT"}), ([1, 3], {})])
def test_pool_of_a_captured_task_uses_its_placement_group(cluster, bundles, options):
    """Of four CPUs. The larger group has them all, so that hosts that were not in it would find no room."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wait_until(lambda: ray.available_resources().get("CPU") == 4)
    group = ray.util.placement_group([{"CPU": cpus} for cpus in bundles])
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    program = cloudpickle.dumps(step_two_workers)  # by value, which Ray's own would not
    trial = ray.remote(num_cpus=1, scheduling_strategy=strategy)(lambda: cloudpickle.loads(program)(options))
    try:
        assert ray.get(trial.remote()) == [1, 1]
    finally:
        ray.util.remove_placement_group(group)


def test_trials_of_tune_have_pools_of_their_own(cluster, tmp_path):
    pytest.importorskip("pyarrow", reason='Tune is not installed: pip install "ray[tune]"')
    tune = pytest.importorskip("ray.tune", reason='Tune is not installed: pip install "ray[tune]"')
    wait_until(lambda: ray.available_resources().get("CPU") == 4)

    def train(config):
        import numpy as np

        import jaxvec
        from jaxvec.testing import CountingEnv

        backend = jaxvec.Ray(options={"scheduling_strategy": "DEFAULT"})
        with jaxvec.make(
            CountingEnv, 2, num_workers=1, backend=backend, timeouts=jaxvec.Timeouts(start=100)
        ) as envs:
            envs.reset()
            return {"steps": [envs.step(np.zeros(2, int)) for _ in range(config["n"])][-1].obs.max()}

    tuner = tune.Tuner(
        train,
        param_space={"n": tune.grid_search([2, 3])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    assert sorted(each.metrics["steps"] for each in tuner.fit()) == [2, 3]


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"hosts": 0}, "hosts must be an integer of at least 1, not 0"),
        ({"hosts": 3}, "hosts is 3, but the pool has only 2 workers"),
        ({"options": {"max_fly": 1}}, "max_fly"),
    ],
)
def test_bad_options_are_refused(make_on_ray, backend, said):
    with pytest.raises(ValueError, match=said):
        make_on_ray(CountingEnv, 2, backend=jaxvec.Ray(**backend))


def test_without_ray_the_error_says_what_to_install():
    script = (
        "import sys; sys.modules['ray'] = None; import jaxvec; jaxvec.make('CartPole-v1', 2, backend='ray')"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert 'ImportError: backend="ray" needs Ray: pip install "ray>=' in said.stderr


def test_nobody_imports_ray_unasked():
    script = "import sys, jaxvec; jaxvec.make('CartPole-v1', 2).close(); print('ray' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert said.stdout == "False\n"


def test_the_environment_is_that_of_local_workers(make_on_ray):
    class Telling(CountingEnv):
        def tell(self):
            return {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "OMP_NUM_THREADS", "MINE")}

    envs = make_on_ray(Telling, 2, workers=jaxvec.Workers(env={"MINE": "1", "JAX_PLATFORMS": None}))
    assert [*envs.call("tell")] == [{"JAX_PLATFORMS": None, "OMP_NUM_THREADS": "1", "MINE": "1"}] * 2


def test_actors_end_with_their_pool(make_on_ray):
    envs = make_on_ray(lambda: Pid(), 2)
    pids = envs.call("pid")
    assert os.getpid() not in pids
    envs.close()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_actors_end_with_a_program_that_is_killed(cluster):
    script = (
        "import os, time, gymnasium, jaxvec, ray\n"
        "ray.init(log_to_driver=False)\n"  # it would print messages of the cluster among ours
        "class Pid(gymnasium.Wrapper):\n"
        "    def pid(self): return os.getpid()\n"
        "env = lambda: Pid(gymnasium.make('CartPole-v1'))\n"
        "envs = jaxvec.make(env, 4, num_workers=4, backend=jaxvec.Ray(hosts=2))\n"
        "envs.reset()\n"
        "print(*envs.call('pid'), flush=True)\n"
        "time.sleep(100)\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )
    try:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len({*pids}) == 4
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        program.kill()
        program.communicate(timeout=200)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


class Pid(CountingEnv):
    def pid(self):
        return os.getpid()
