"""Hosts in tasks of a Ray cluster: rows, requests to the workers of a host, lost nodes, and placement."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import cloudpickle
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support import disasters, padded, probe
from support.disasters import DEATHS, GatedEnv, failing, wait_until, within
from support.elsewhere import assert_equal, compare, faults_until_20_steps_after, sample_actions, scan
from support.pool_machine import PoolMachine
from support.probe import link as _link
from support.probe import pool_of, ray_backend, wire

import jaxvec
from jaxvec.examples import data_parallel
from jaxvec.spaces import pad
from jaxvec.testing import CountingEnv

# Not `ray`: without Ray, the name is this folder, a namespace package.
pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: the extra ray has it")
import ray

NUM_ENVS = 5  # so that 2 workers hold slices of different size
ONE_HOST = jaxvec.Ray()


def test_workers_there_run_worker_init_first(make_on_ray):
    def prepare(worker_id):
        os.environ["JAXVEC_MINE"] = f"worker {worker_id}"

    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            self.mine = os.environ["JAXVEC_MINE"]

    envs = make_on_ray(Env, 4, backend=ONE_HOST, workers=jaxvec.Workers(init=prepare))
    assert envs.get_attr("mine") == ("worker 0", "worker 0", "worker 1", "worker 1")


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_the_hosts_verbs_return_what_they_return_of_local_workers(make, make_on_ray, mode):
    def run(envs):
        rows = [envs.reset(seed=np.arange(NUM_ENVS) + 4, options={"low": -0.01, "high": 0.01})]
        for step in range(30):
            rows.append(envs.step(np.arange(NUM_ENVS) % 2 if step % 3 else np.ones(NUM_ENVS, int)))
            over = rows[-1].terminated | rows[-1].truncated
            if mode == "DISABLED" and over.any():
                rows.append(envs.reset(seed=step, mask=over))
        return rows, envs.infos()

    compare(make, make_on_ray, run, "CartPole-v1", NUM_ENVS, autoreset_mode=mode)


class LengthEnv(CountingEnv):
    """Its episodes have the length that their options say."""

    def reset(self, *, seed=None, options=None):
        self._length = 1 if options is None else int(options["length"])
        return super().reset(seed=seed, options=options)


def test_declared_reset_options_reach_the_envs_of_actors(make, make_on_ray):
    lengths = jax.random.randint(jax.random.key(0), (30, NUM_ENVS), 1, 4)

    @jax.jit
    def rollout(handle):
        def body(handle, length):
            action = jnp.zeros(NUM_ENVS, int)
            return jax.lax.cond(
                length[0] > 1,
                lambda: jaxvec.step(handle, action, reset_options={"length": length}),
                lambda: jaxvec.step(handle, action),
            )

        handle, timestep = jaxvec.reset(handle, options={"length": 2})
        return timestep, jax.lax.scan(body, handle, lengths)[1]

    def run(envs):
        return rollout(jaxvec.reset(envs)[0])

    declared = spaces.Dict({"length": spaces.Discrete(9)})
    _, rows = compare(make, make_on_ray, run, LengthEnv, NUM_ENVS, reset_options=declared)
    assert (rows.info["reset_options"]["length"] == 3).any()


def test_padded_values_are_those_of_local_workers(make, make_on_ray):
    space = spaces.Dict(
        text=spaces.Text(6, charset="aé"),
        bag=padded.Sequence(spaces.Dict(name=spaces.Text(3), count=spaces.Discrete(9))),
        scene=padded.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(3)),
        choice=spaces.OneOf([spaces.Text(4), spaces.Discrete(7)]),
    )
    maxima = padded.sizes(space)
    space.seed(7)
    actions = padded.stack(
        [pad(space, [space.sample() for _ in range(NUM_ENVS)], max_sizes=maxima) for _ in range(12)]
    )
    env_fns = [partial(padded.EchoEnv, space)] * NUM_ENVS
    _, rows = compare(make, make_on_ray, partial(scan, actions=actions), env_fns, max_sizes=maxima)
    first_obs, first_actions = jax.tree.map(lambda leaf: leaf[0], (rows.obs, actions))
    assert_equal(first_obs, first_actions)


def test_envs_are_reset_in_advance_as_by_local_workers(make, make_on_ray):
    env_fns = [partial(gymnasium.make, "CartPole-v1")] * NUM_ENVS
    run = partial(scan, actions=sample_actions(env_fns, 40))
    compare(make, make_on_ray, run, env_fns, spare_envs=1)


def test_replaced_worker_gets_the_settings_of_its_envs(make_on_ray):
    class Fragile(CountingEnv):
        def step(self, action):
            if action == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    policy = jaxvec.Restart(retry="rebuild", max_restarts=None, rate=None)
    envs = make_on_ray(Fragile, 2, on_fault=policy)
    envs.reset(options={"level": 3})
    envs.set_attr("goal", [[1], [2]])
    assert envs.step([7, 0]).info["fault"].tolist() == [True, False]
    assert envs.infos()[0]["options"] == {"level": 3}
    assert envs.get_attr("goal") == ([1], [2])


class PoolOnRay(PoolMachine):
    """The model of pools, faults included; each host's start takes its second."""

    hosts = 2


@pytest.mark.timeout(600)
def test_all_fields_of_all_rows_are_foretold(cluster):
    cloudpickle.register_pickle_by_value(sys.modules[PoolMachine.__module__])
    few = settings(
        PoolMachine.TestCase.settings,
        max_examples=settings.default.max_examples // 15,
        stateful_step_count=12,
    )
    run_state_machine_as_test(PoolOnRay, settings=few)


def test_the_environment_is_that_of_local_workers(make_on_ray):
    class Telling(CountingEnv):
        def tell(self):
            return {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "OMP_NUM_THREADS", "MINE")}

    envs = make_on_ray(Telling, 2, workers=jaxvec.Workers(env={"MINE": "1", "JAX_PLATFORMS": None}))
    assert [*envs.call("tell")] == [{"JAX_PLATFORMS": None, "OMP_NUM_THREADS": "1", "MINE": "1"}] * 2


# --- How requests and rows travel -----------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_a_batch_is_one_request_to_each_actor_and_one_answer(make_on_ray, monkeypatch, dispatch):
    posted = []
    post = _link.Shipper.post
    monkeypatch.setattr(
        _link.Shipper, "post", lambda self, rows: (posted.append(rows.nbytes), post(self, rows))[1]
    )
    envs = make_on_ray(CountingEnv, 8, num_workers=4, dispatch=dispatch, step_timeout=None)
    envs.reset()

    def answers():
        del posted[:]
        for _ in range(20):
            envs.step(np.zeros(8, int))
        return len(posted)

    wait_until(lambda: answers() == 40)  # on a busy machine some take so long that they come in parts


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_requests_are_on_their_way_while_others_are_served(make_on_ray, monkeypatch, tmp_path, dispatch):
    shipped = []
    ship = _link.HostLink.ship

    def record(self, frame_type, data):
        if frame_type != wire.MESSAGE:
            shipped.append(frame_type)
        ship(self, frame_type, data)

    monkeypatch.setattr(_link.HostLink, "ship", record)
    gate = tmp_path / "gate"
    envs = make_on_ray(
        lambda: GatedEnv(gate), 4, num_workers=1, backend=ONE_HOST, batch_size=2, dispatch=dispatch
    )
    first = envs.reset()
    del shipped[:]
    one, other = (np.array([each]) for each in first.info["env_id"])
    envs.send(np.array([7]), one)
    wait_until(lambda: len(shipped) == 1)
    envs.send(np.array([0]), other)
    wait_until(lambda: len(shipped) == 2)  # while the first waits at the gate
    assert not gate.exists()
    gate.touch()
    envs.recv()
    envs.recv()
    assert [*envs.get_attr("steps")].count(1) == 2


@pytest.mark.parametrize("dispatch", ["native", pytest.param("portable", marks=pytest.mark.nightly)])
def test_what_was_sent_before_a_question_is_done_before_its_answer(make_on_ray, dispatch):
    envs = make_on_ray(CountingEnv, 4, batch_size=2, dispatch=dispatch)
    envs.reset()
    envs.recv()
    for steps in range(1, 30):
        envs.send(np.zeros(4, int), np.arange(4))
        assert [*envs.get_attr("steps")] == [steps] * 4
        envs.recv()
        envs.recv()


def test_threads_step_slots_of_one_actor_at_once(make_on_ray, tmp_path):
    gate = tmp_path / "gate"
    envs = make_on_ray(lambda: GatedEnv(gate), 4, num_workers=4, backend=ONE_HOST)
    handle, _ = jaxvec.reset(envs)
    held, goes_on = (jax.tree.map(lambda leaf: leaf[part], handle) for part in (slice(0, 2), slice(2, 4)))
    waits = disasters.Background(lambda: jax.block_until_ready(jaxvec.step(held, jnp.full(2, 7))))
    for _ in range(5):  # while the others wait at the gate
        goes_on, timestep = jaxvec.step(goes_on, jnp.zeros(2, int))
    assert timestep.info["episode_length"].tolist() == [5, 5]
    gate.touch()
    assert waits.result(20)[1].info["episode_length"].tolist() == [1, 1]


def test_a_trace_allows_for_the_clocks_of_other_machines(make_on_ray, monkeypatch):
    """All nodes share this machine and its clock, so the test adds an error and expects it in the trace."""
    hour, host_task = 3600 * 10**9, ray_backend._host_task

    def telling_an_hour_more():
        serve = host_task()

        def serve_ahead(*args):
            from jaxvec._backends.remote import host

            host._clock = lambda: time.monotonic_ns() + hour
            return serve(*args)

        return serve_ahead

    def steps(envs):
        """Returns when envs were stepped, by the trace, since it began."""
        envs.reset()
        began = time.monotonic_ns()
        pool_of(envs).start_trace(100)
        envs.step(np.zeros(4, int))
        _, workers = pool_of(envs).stop_trace()
        found = [span.began - began for record in workers for span in record.spans if "step" in span.what]
        assert len(found) == 4
        return np.array(found)

    minute = 60 * 10**9
    assert (np.abs(steps(make_on_ray(CountingEnv, 4))) < minute).all()
    monkeypatch.setattr(ray_backend, "_host_task", telling_an_hour_more)
    assert (np.abs(steps(make_on_ray(CountingEnv, 4)) + hour) < minute).all()


def test_the_workers_of_an_actor_take_no_descriptors_here(make_on_ray):
    def take(num_workers):
        backend = jaxvec.Ray(options={"num_cpus": 1})
        with make_on_ray(CountingEnv, num_workers, num_workers=num_workers, backend=backend) as envs:
            envs.reset()
            return len(os.listdir("/proc/self/fd"))

    one = take(1)
    assert take(9) - one < 8  # Ray opens and closes some of its own


# --- Faults ---------------------------------------------------------------------------------------


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


def test_a_node_killed_during_a_compiled_loop_is_replaced(make_on_ray, cluster, nodes):
    envs = make_on_ray(CountingEnv, 4, backend=jaxvec.Ray(2, ON_STAGE), on_fault="restart")
    completed = probe.array(envs, "completed")
    handle, _ = jaxvec.reset(envs)
    outcome = disasters.Background(partial(faults_until_20_steps_after, handle))
    before = completed.copy()
    wait_until(lambda: (completed > before + 20).all())
    cluster.remove_node(nodes[0], allow_graceful=False)
    spare = cluster.add_node(num_cpus=1, resources={"stage": 1}, object_store_memory=100 * 2**20)
    try:
        assert sorted(outcome.result(90).tolist()) == [0, 0, 1, 1]
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


# --- Placement ------------------------------------------------------------------------------------


def test_by_default_there_is_a_worker_per_cpu_of_the_hosts(cluster, make):
    wait_until(lambda: ray.available_resources().get("CPU") == 4)
    backend = jaxvec.Ray(hosts=2, options={"num_cpus": 2})
    assert make(CountingEnv, 3, backend=backend).num_workers == 3
    assert backend.num_workers(9, None) == 4


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


def test_distributed_learners_train_alike_on_local_and_ray_envs(cluster, tmp_path):
    command = [sys.executable, data_parallel.__file__, "--num-envs", "4", "--total-steps", "768"]
    said = [
        subprocess.run(
            [*command, "--num-workers", "1", "--backend", backend, "--name", backend],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "RAY_ADDRESS": cluster.address},
        )
        for backend in ("ray", "process")
    ]
    # Both write at once, so one's line may end after the other's.
    line = r"process \d: mean return \d+\.\d here, parameters \w{8}"
    results = [sorted(re.findall(line, each.stdout)) for each in said]
    assert len(results[0]) == 2, said[0].stderr
    assert results[0] == results[1]


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


def test_a_firewall_between_an_actor_and_the_pool_is_told(make_on_ray, monkeypatch):
    host_task = ray_backend._host_task

    def behind_a_firewall():
        serve = host_task()

        def serve_elsewhere(address, *args):
            with socket.create_server((address[0], 0)) as closed:
                port = closed.getsockname()[1]
            return serve((address[0], port), *args)

        return serve_elsewhere

    monkeypatch.setattr(ray_backend, "_host_task", behind_a_firewall)
    said = r"worker 0 .* on node .* no pool can be reached at [\d.]+:\d+: .*refused.* allow TCP"
    with pytest.raises(jaxvec.WorkerDiedError, match=said):
        make_on_ray(CountingEnv, 2, num_workers=1, backend=ONE_HOST)


def test_hosts_that_find_no_room_time_out(make_on_ray):
    needs = r"did not start within 2 s \(Timeouts.start\): Ray has not started .*'num_cpus': 5"
    with pytest.raises(jaxvec.EnvTimeoutError, match=needs):
        make_on_ray(CountingEnv, 5, num_workers=5, backend=jaxvec.Ray(), start_timeout=2)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"hosts": 0}, "hosts must be an integer of at least 1, not 0"),
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
