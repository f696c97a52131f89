"""Faults, limits and wrong arguments of pools on a Ray cluster."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
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
from support.probe import cluster as _cluster
from support.probe import nodes as _nodes
from support.probe import wire
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
    with pytest.raises(jaxvec.WorkerDiedError, match="worker 0 .* was lost: ActorDiedError"):
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


ON_STAGE = jaxvec.Ray(resources_per_worker={"stage": 1})


def kill_a_node_during(envs, cluster, nodes, program):
    """Runs `program` in a thread, and kills a node that it uses when it is under way."""
    completed = probe.array(envs, "completed")
    outcome = disasters.Background(program)
    before = completed.copy()
    wait_until(lambda: (completed > before + 20).all())
    cluster.remove_node(nodes[0], allow_graceful=False)
    return outcome


def test_a_node_killed_during_a_compiled_loop_breaks_the_pool(make_on_ray, cluster, nodes, no_jax_log):
    envs = make_on_ray(CountingEnv, 4, backend=ON_STAGE)
    handle, _ = jaxvec.reset(envs)
    loop = partial(jax.lax.fori_loop, 0, 10**9, lambda _, h: jaxvec.step(h, jnp.zeros(4, int))[0])
    outcome = kill_a_node_during(envs, cluster, nodes, lambda: jax.block_until_ready(jax.jit(loop)(handle)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="WorkerDiedError"):
        outcome.result(60)
    with pytest.raises(jaxvec.WorkerDiedError, match="on node .* was lost"):
        envs.raise_if_failed()
    within(envs.close)


def test_a_node_killed_during_a_compiled_loop_is_replaced(make_on_ray, cluster, nodes):
    envs = make_on_ray(CountingEnv, 4, backend=ON_STAGE, on_fault="restart")
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


def test_a_node_that_dies_while_an_actor_starts_on_it_is_no_fault(
    make_on_ray, cluster, nodes, monkeypatch, tmp_path
):
    where = tmp_path / "where"

    class Held(_cluster._actor_class()):
        def __init__(self):
            if not where.exists():  # the first never gets there
                where.write_text(ray.get_runtime_context().get_node_id())
                threading.Event().wait()

    monkeypatch.setattr(_cluster, "_actor_class", lambda: Held)
    options = {"backend": ON_STAGE, "num_workers": 1, "on_fault": "restart"}
    made = disasters.Background(lambda: make_on_ray(CountingEnv, 2, **options))
    wait_until(lambda: where.exists() and where.read_text())
    cluster.remove_node(next(n for n in nodes if n.node_id == where.read_text()), allow_graceful=False)
    envs = made.result(90)
    envs.reset()
    assert not envs.step(np.zeros(2, int)).info["fault"].any()
    assert envs.stats().total.restarts == 0


# --- How many -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "num_envs", "num_workers"),
    [
        ({}, 8, 4),
        ({}, 3, 3),
        ({"resources_per_worker": {"CPU": 2}}, 8, 2),
        ({"resources_per_worker": {"CPU": 0}}, 5, 5),
        ({"workers_per_actor": 3}, 8, 3),
        ({"workers_per_actor": 16}, 8, 4),
    ],
)
def test_there_are_as_many_workers_as_there_is_room_for(cluster, options, num_envs, num_workers):
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)  # without those that others killed
    wait_until(lambda: ray.available_resources().get("CPU") == 4)
    assert _cluster.connect(jaxvec.Ray(**options), None).num_workers(num_envs) == num_workers


def test_that_many_workers_are_made(cluster, make):
    wait_until(lambda: ray.available_resources().get("CPU") == 4)
    backend = jaxvec.Ray(resources_per_worker={"CPU": 2})
    assert make(CountingEnv, 3, backend=backend).num_workers == 2


# --- Bad input ------------------------------------------------------------------------------------


def test_what_cannot_be_pickled_is_refused(make_on_ray):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="the constructor of env 0 can't be pickled"):
        make_on_ray([lambda: lock and CountingEnv()] * 2)


def test_a_node_without_jaxvec_is_named(make_on_ray, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['jaxvec'] = None")
    backend = jaxvec.Ray(runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    with pytest.raises(jaxvec.WorkerDiedError, match=r"on node .* can't import jaxvec \(ModuleNotF"):
        make_on_ray(CountingEnv, 2, backend=backend)


SHIPS = """
import jaxvec
from mine.envs import Mine
backend = jaxvec.Ray(runtime_env={"working_dir": "here", "py_modules": ["packages/mine"]})
for _ in range(2):  # the second finds the process connected
    with jaxvec.make(Mine, 1, backend=backend) as envs:
        print(*envs.call("told"), flush=True)
"""

MINE = """
from pathlib import Path
from jaxvec.testing import CountingEnv
class Mine(CountingEnv):
    def told(self):
        return Path("data.txt").read_text() + " " + __file__
"""


def test_directories_of_ones_own_are_shipped(cluster, tmp_path):
    for name, text in {"here/data.txt": "read", "packages/mine/envs.py": MINE}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    said = subprocess.run(
        [sys.executable, "-c", SHIPS],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(tmp_path / "packages")},
    )
    told = [line.split() for line in said.stdout.splitlines()]
    assert [each[0] for each in told] == ["read", "read"], said.stderr
    assert not any(each[1].startswith(str(tmp_path)) for each in told)


@pytest.mark.parametrize("what", [{"working_dir": "."}, {"py_modules": ["."]}])
def test_directories_that_come_too_late_are_refused(make_on_ray, what):
    with pytest.raises(ValueError, match=r"connected already.* ray\.init\(runtime_env=\.\.\.\)"):
        make_on_ray(CountingEnv, 2, backend=jaxvec.Ray(runtime_env=what))


@pytest.mark.parametrize(
    ("runtime_env", "kind", "said"),
    [
        ({"workingdir": "."}, ValueError, "runtime_env has no 'workingdir'; .* working_dir"),
        ({"env_vars": {"N": 1}}, TypeError, r"runtime_env\['env_vars'\] must be of type"),
        ({"pip": [], "conda": "base"}, ValueError, "'conda' field"),
    ],
)
def test_a_runtime_env_that_ray_does_not_know_is_refused(make_on_ray, runtime_env, kind, said):
    with pytest.raises(kind, match=said):
        make_on_ray(CountingEnv, 2, backend=jaxvec.Ray(runtime_env=runtime_env))


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


def test_what_no_node_has_is_refused_at_once(make_on_ray):
    with pytest.raises(ValueError, match="no node of the Ray cluster has {'CPU': 1, 'unobtainium': 1}"):
        make_on_ray(CountingEnv, 2, backend=jaxvec.Ray(resources_per_worker={"unobtainium": 1}))


def test_actors_that_find_no_room_time_out(make_on_ray):
    needs = r"did not start within 2 s \(Timeouts.start\): Ray has not started .* needs {'CPU': 1}"
    with pytest.raises(jaxvec.EnvTimeoutError, match=needs):
        make_on_ray(CountingEnv, 6, num_workers=6, start_timeout=2)


def test_too_many_open_files_are_told(make_on_ray, monkeypatch):
    def open_none(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(_nodes.os, "open", open_none)
    with pytest.raises(jaxvec.WorkerDiedError, match="too many open files, .*ulimit -n"):
        make_on_ray(CountingEnv, 2)


def test_the_workers_of_an_actor_take_no_descriptors_here(make_on_ray):
    def take(num_workers):
        backend = jaxvec.Ray(workers_per_actor=num_workers, resources_per_worker={"CPU": 0.1})
        with make_on_ray(CountingEnv, num_workers, num_workers=num_workers, backend=backend) as envs:
            envs.reset()
            return len(os.listdir("/proc/self/fd"))

    one = take(1)
    assert take(9) - one < 8  # Ray opens and closes some of its own


def test_a_placement_group_that_finds_no_room_times_out(make_on_ray):
    backend = jaxvec.Ray(placement_strategy="STRICT_SPREAD")
    with pytest.raises(TimeoutError, match="has no room for 2 actors of .*STRICT_SPREAD"):
        make_on_ray(CountingEnv, 2, backend=backend, start_timeout=2)


def test_ctrl_c_removes_a_placement_group_that_finds_no_room(make_on_ray):
    from ray.util import placement_group_table

    def states():
        return [group["state"] for group in placement_group_table().values()]

    def interrupt():
        wait_until(lambda: "PENDING" in states())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    backend = jaxvec.Ray(placement_strategy="STRICT_SPREAD")
    with ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_on_ray(CountingEnv, 4, num_workers=4, backend=backend, start_timeout=None)
        interrupted.result(60)
    wait_until(lambda: "PENDING" not in states())


def test_a_placement_group_goes_with_its_pool(make_on_ray):
    from ray.util import placement_group_table

    envs = make_on_ray(CountingEnv, 2, backend=jaxvec.Ray(placement_strategy="PACK"))
    envs.reset()
    assert [group["state"] for group in placement_group_table().values()].count("CREATED") == 1
    envs.close()
    assert [group["state"] for group in placement_group_table().values()].count("CREATED") == 0


@pytest.mark.parametrize("seen", ["by the launcher", "by the actor's link"])
def test_a_placement_group_that_is_removed_breaks_the_pool(make_on_ray, monkeypatch, seen):
    """Ray would let a new actor wait in it without end."""
    envs = make_on_ray(
        CountingEnv,
        2,
        num_workers=1,
        backend=jaxvec.Ray(placement_strategy="PACK"),
        on_fault=jaxvec.Restart(max_restarts=None, rate=None),
        step_timeout=None,
        start_timeout=None,
    )
    envs.reset()
    placement = probe.placement(envs)
    if seen != "by the launcher":  # it was there a moment ago
        monkeypatch.setattr(placement, "loss", partial(next, iter(["", *["it was removed"] * 9])))
    ray.util.remove_placement_group(placement._group)

    def step_on():
        while True:
            envs.step(np.zeros(2, int))

    with pytest.raises(jaxvec.WorkerDiedError, match="removed") as caught:
        within(step_on)
    assert "removed" in str(caught.value.__cause__)
    # It was logged, and pytest keeps the log: its frames, and its causes', hold the segment.
    error: BaseException | None = caught.value
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def step_two_workers():
    """What an actor of Ray's Tune does: it makes a pool."""
    import numpy as np

    import jaxvec
    from jaxvec.testing import CountingEnv

    with jaxvec.make(
        CountingEnv, 2, num_workers=2, backend="ray", timeouts=jaxvec.Timeouts(start=100)
    ) as envs:
        envs.reset()
        return envs.step(np.zeros(2, int)).info["episode_length"].tolist()


@pytest.mark.parametrize("bundles", [[1], [1, 3]])
def test_pool_in_a_captured_actor_uses_its_placement_group_or_others(cluster, bundles):
    """Of four CPUs. The larger group has them all, so that workers that were not in it would find no room."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wait_until(lambda: ray.available_resources().get("CPU") == 4)
    group = ray.util.placement_group([{"CPU": cpus} for cpus in bundles])
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    program = cloudpickle.dumps(step_two_workers)  # by value, which Ray's own would not
    trial = ray.remote(num_cpus=1, scheduling_strategy=strategy)(lambda: cloudpickle.loads(program)())
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

        with jaxvec.make(
            CountingEnv, 2, num_workers=1, backend="ray", timeouts=jaxvec.Timeouts(start=100)
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
    ("options", "said"),
    [
        ({"placement_strategy": "SCATTER"}, "placement_strategy must be one of PACK, SPREAD"),
        ({"workers_per_actor": 0}, "workers_per_actor must be an integer of at least 1, not 0"),
        ({"resources_per_worker": {"CPU": -1}}, r"resources_per_worker\['CPU'\] must be a number"),
        ({"resources_per_worker": {"GPU": "one"}}, r"resources_per_worker\['GPU'\] must be a number"),
        ({"resources_per_worker": {"CPU": 1e-5}}, "reserves 1e-05, but Ray counts in steps of 0.0001"),
        (
            {"resources_per_worker": {"GPU": 0.75}, "workers_per_actor": 2},
            r"\['GPU'\] is 0.75, so an actor with 2 workers reserves 1.5, but Ray can",
        ),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        jaxvec.Ray(**options)


def test_an_actor_of_fewer_workers_is_checked_too(make_on_ray):
    backend = jaxvec.Ray(resources_per_worker={"GPU": 0.5}, workers_per_actor=4)
    with pytest.raises(ValueError, match="an actor with 3 workers reserves 1.5, but Ray can reserve a part"):
        make_on_ray(CountingEnv, 7, num_workers=7, backend=backend)


@pytest.mark.parametrize("name", ["{ip}:{port}", "localhost:{port}", "127.0.0.1:{port}"])
def test_another_name_of_the_same_head_is_accepted(cluster, name):
    ip, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    _cluster.connect(jaxvec.Ray(name.format(ip=ip, port=port)), None)


def test_another_address_is_refused(make_on_ray):
    with pytest.raises(ValueError, match="this process is connected to the Ray cluster at"):
        make_on_ray(CountingEnv, 2, backend=jaxvec.Ray("192.0.2.1:6379"))


UNREACHABLE = """
import sys, jaxvec
for address in sys.argv[1:]:
    try:
        jaxvec.make("CartPole-v1", 2, backend=jaxvec.Ray(address), timeouts=jaxvec.Timeouts(start=1))
    except ConnectionError as error:
        print(error)
"""


def test_an_address_where_no_cluster_is_is_an_error_at_once():
    with socket.socket() as refusing, socket.socket() as silent, socket.socket() as waiting:
        refusing.bind(("127.0.0.1", 0))  # and does not listen
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)  # so that it accepts only the first connection
        waiting.connect(silent.getsockname())
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (refusing, silent)]
        said = subprocess.run(
            [sys.executable, "-c", UNREACHABLE, *addresses], capture_output=True, text=True, timeout=100
        )
    told = said.stdout.splitlines()
    assert len(told) == 2, said.stderr
    for line, address, why in zip(told, addresses, ["refused", "timed out"], strict=True):
        assert re.match(rf"no Ray cluster can be reached at {address}: .*{why}", line)


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
        "import os, time, gymnasium, jaxvec\n"
        "class Pid(gymnasium.Wrapper):\n"
        "    def pid(self): return os.getpid()\n"
        "env = lambda: Pid(gymnasium.make('CartPole-v1'))\n"
        "envs = jaxvec.make(env, 4, num_workers=4, backend=jaxvec.Ray(workers_per_actor=2))\n"
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


def test_lost_head_breaks_the_pool_before_ray_ends_the_process():
    script = Path(__file__).parents[1] / "support/lost_head.py"
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "9", "PYTHONPATH": str(script.parents[1])}
    said = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, env={**os.environ, **patience}
    )
    assert "WorkerDiedError: worker 0 (envs 0, 1) on node " in said.stdout, said.stderr
    assert "was lost: the Ray cluster's head at " in said.stdout
    assert said.stdout.endswith("closed\n")
