"""Pools on a Ray cluster: the local pool is their oracle, and Ray's own test cluster breaks under them."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cloudpickle
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from conftest import leftovers
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support import disasters, probe, state_game
from support.disasters import DEATHS, FAILURES, GatedEnv, SleepingEnv, failing, wait_until, within
from support.pool_machine import PoolMachine

import jaxvec
from jaxvec._ray import cluster as _cluster
from jaxvec._ray import link as _link
from jaxvec._ray import nodes as _nodes
from jaxvec._workers import fork
from jaxvec.testing import CountingEnv, NestedEnv

ray = pytest.importorskip("ray", reason="Ray is not installed: the extra ray has it")

pytestmark = [
    pytest.mark.timeout(300),
    # Ray starts its processes by fork and exec, of which JAX warns, and leaves sockets to the collector.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

cloudpickle.register_pickle_by_value(state_game)

NUM_ENVS = 5  # so that 2 workers hold slices of different size


@pytest.fixture(scope="module")
def cluster(kept_by_others):
    unix = control_sockets()
    before = Counter(leftovers())  # after the fork server's have gone
    with running_cluster() as cluster:
        yield cluster
    wait_until(lambda: control_sockets() == unix)  # ours are; what else there is, gRPC keeps
    more = Counter(leftovers()) - before
    kept_by_others.update({kind: more[kind] for kind in ("anon_inode", "socket")})


def control_sockets():
    fork.end_all()  # which has one, too
    return len(psutil.Process().net_connections("unix"))


@contextmanager
def running_cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=4, object_store_memory=100 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def make_on_ray(make, cluster):
    """Yields `make` for pools on the cluster, of two workers."""
    # An actor is an interpreter of Ray's, which takes a minute to start where everything is busy.
    return partial(make, backend="ray", num_workers=2, start_timeout=200, step_timeout=200)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def sample_actions(env_fns, num_steps):
    space = SyncVectorEnv(env_fns).action_space
    space.seed(3)
    samples = [space.sample() for _ in range(num_steps)]
    return jax.tree.map(lambda *each: np.stack(each), *samples)


def scan(envs, actions):
    """Returns the time steps of a reset and a compiled loop."""
    handle, first = jaxvec.reset(envs, seed=7)
    _, rest = jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, actions)
    return first, rest


def test_workers_there_run_worker_init_first(make_on_ray):
    def prepare(worker_id):
        os.environ["JAXVEC_MINE"] = f"worker {worker_id}"

    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            self.mine = os.environ["JAXVEC_MINE"]

    envs = make_on_ray(Env, 4, backend=IN_PAIRS, workers=jaxvec.Workers(init=prepare))
    assert envs.get_attr("mine") == ("worker 0", "worker 0", "worker 1", "worker 1")


# --- The local pool is the oracle -----------------------------------------------------------------

# What is tried with both hand-offs is tried with both ways of data, too.
DATA = {"native": "tcp", "portable": "ray"}

ENVS = {
    "CartPole-v1": [partial(gymnasium.make, "CartPole-v1")] * NUM_ENVS,
    "NestedEnv": [partial(NestedEnv, length) for length in (3, 7, 5, 1, 4)],
}


@pytest.mark.parametrize(
    ("dispatch", "transport", "name"),
    [
        ("native", "ffi", "NestedEnv"),
        ("portable", "io_callback", "CartPole-v1"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("native", "ffi", "CartPole-v1"),
                ("native", "io_callback", "NestedEnv"),
                ("portable", "ffi", "NestedEnv"),
            )
        ),
    ],
)
def test_a_compiled_loop_gets_what_it_gets_from_local_workers(make, make_on_ray, name, transport, dispatch):
    actions = sample_actions(ENVS[name], 40)
    options = {"transport": transport, "dispatch": dispatch}
    backend = jaxvec.Ray(data=DATA[dispatch])
    on_ray = scan(make_on_ray(ENVS[name], backend=backend, **options), actions)
    local = scan(make(ENVS[name], num_workers=2, **options), actions)
    assert_equal(on_ray, local)
    assert on_ray[1].info["_final_obs"].any()  # autoresets were among them


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

    options = {"autoreset_mode": mode}
    on_ray, local = (
        run(each("CartPole-v1", NUM_ENVS, **options)) for each in (make_on_ray, partial(make, num_workers=2))
    )
    assert_equal(on_ray, local)


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

    options = {"reset_options": spaces.Dict({"length": spaces.Discrete(9)})}
    on_ray, local = (
        rollout(jaxvec.reset(each(LengthEnv, NUM_ENVS, **options))[0])
        for each in (make_on_ray, partial(make, num_workers=2))
    )
    assert_equal(on_ray, local)
    assert (on_ray[1].info["reset_options"]["length"] == 3).any()


def test_batches_in_the_order_sent_are_those_of_local_workers(make, make_on_ray):
    def run(envs):
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

    options = {"batch_size": 2, "recv_order": "sent"}
    on_ray, local = (
        run(each("CartPole-v1", 4, **options)) for each in (make_on_ray, partial(make, num_workers=2))
    )
    assert_equal(on_ray, local)


def test_first_ready_batches_lose_no_step(make_on_ray):
    envs = make_on_ray(CountingEnv, 4, batch_size=2)
    handle, timestep = jaxvec.reset(envs)
    steps = np.zeros(4, int)
    for _ in range(50):
        handle, timestep = jax.jit(
            lambda handle, ids: jaxvec.recv(jaxvec.send(handle, jnp.zeros(2, int), ids))
        )(handle, timestep.info["env_id"])
        np.add.at(steps, timestep.info["env_id"], 1)
    assert steps.sum() == 100
    # The rest is in flight, each by one: its reset, which came first, or a step.
    received = [np.asarray(timestep.info["env_id"])]
    _, timestep = jaxvec.recv(handle)
    assert sorted([*received[0], *timestep.info["env_id"]]) == [0, 1, 2, 3]


def test_batched_envs_are_stepped_as_by_local_workers(make, make_on_ray):
    def run(envs):
        return scan(envs, np.tile(np.arange(4) % 2, (30, 1)))

    batched = partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="sync")
    options = {"envs_per_instance": 2, "num_envs": 4}
    on_ray, local = (run(each(batched, **options)) for each in (make_on_ray, partial(make, num_workers=2)))
    assert_equal(on_ray, local)


@pytest.mark.parametrize("workers_per_actor", [1, 2])
def test_envs_can_be_asked_and_set(make_on_ray, tmp_path, workers_per_actor):
    envs = make_on_ray(CountingEnv, 4, backend=jaxvec.Ray(workers_per_actor=workers_per_actor))
    handle, _ = jaxvec.reset(envs, seed=1)
    handle, _ = jax.jit(jaxvec.step)(handle, jnp.zeros(4, int))
    assert [*envs.get_attr("steps")] == [1, 1, 1, 1]
    envs.set_attr("steps", [5, 6, 7, 8])
    assert [*envs.get_attr("steps")] == [5, 6, 7, 8]
    assert envs.stats().total.steps == 4
    assert envs.stats().total.resets == 4
    by = 10
    assert envs.map(lambda env, more: env.steps + by + more, 1, indices=[-1, 0]) == (19, 16)
    with pytest.raises(jaxvec.EnvAttributeError, match=r"'nothing' \(env 2, .*on node"):
        envs.get_attr("nothing", indices=2)

    def meet(_, mine, other):
        (tmp_path / mine).touch()
        while not (tmp_path / other).exists():
            threading.Event().wait(0.001)
        return mine

    with ThreadPoolExecutor(2) as threads:  # of different workers: both calls are under way at once
        calls = [threads.submit(envs.map, meet, *who, indices=i) for who, i in (("ab", 0), ("ba", 3))]
        assert [call.result(200) for call in calls] == [("a",), ("b",)]


def test_replaced_worker_gets_the_settings_and_states_of_its_envs(make_on_ray):
    class Fragile(CountingEnv):
        def step(self, action):
            if action == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    policy = jaxvec.Restart(retry="restore", max_restarts=None, rate=None)
    envs = make_on_ray(Fragile, 2, states=4, on_fault=policy)
    envs.reset(options={"level": 3})
    envs.set_attr("goal", [[1], [2]])
    assert envs.step([7, 0]).info["fault"].tolist() == [True, False]  # nothing was saved
    assert envs.infos()[0]["options"] == {"level": 3}
    assert envs.get_attr("goal") == ([1], [2])
    saved = envs.step([1, 0])
    envs.save()
    envs.step([2, 0])
    timestep = envs.step([7, 0])
    assert timestep.info["fault"].tolist() == [True, False]
    np.testing.assert_array_equal(timestep.obs[0], saved.obs[0])
    assert envs.step([3, 0]).info["episode_length"].tolist() == [2, 5]
    assert envs.get_attr("goal") == ([1], [2])


@pytest.mark.parametrize("dispatch", ["native", pytest.param("portable", marks=pytest.mark.nightly)])
def test_what_was_sent_before_a_question_is_done_before_its_answer(make_on_ray, dispatch):
    backend = jaxvec.Ray(data=DATA[dispatch])
    envs = make_on_ray(CountingEnv, 4, batch_size=2, dispatch=dispatch, backend=backend)
    envs.reset()
    envs.recv()
    for steps in range(1, 30):
        envs.send(np.zeros(4, int), np.arange(4))
        assert [*envs.get_attr("steps")] == [steps] * 4
        envs.recv()
        envs.recv()


def test_a_trace_shows_what_actors_do(make_on_ray, tmp_path):
    envs = make_on_ray(CountingEnv, 4)
    envs.reset()
    with envs.trace(tmp_path / "trace.json"):
        envs.step(np.zeros(4, int))
    assert "env 3" in (tmp_path / "trace.json").read_text()


def test_a_trace_allows_for_the_clocks_of_other_machines(make_on_ray, monkeypatch):
    """There is but one machine here, so what is told wrongly has to be seen in the trace."""
    hour = 3600 * 10**9
    actor_class = _cluster._actor_class

    def telling_an_hour_more():
        class Ahead(actor_class()):
            def clock(self):
                return super().clock() + hour

        return Ahead

    def steps(envs):
        """Returns when envs were stepped, by the trace, since it began."""
        envs.reset()
        began = time.monotonic_ns()
        envs.pool.start_trace(100)
        envs.step(np.zeros(4, int))
        _, workers = envs.pool.stop_trace()
        found = [span.began - began for record in workers for span in record.spans if "step" in span.what]
        assert len(found) == 4
        return np.array(found)

    minute = 60 * 10**9
    assert (np.abs(steps(make_on_ray(CountingEnv, 4))) < minute).all()
    monkeypatch.setattr(_cluster, "_actor_class", telling_an_hour_more)
    assert (np.abs(steps(make_on_ray(CountingEnv, 4)) + hour) < minute).all()


@pytest.mark.parametrize("data", ["tcp", "ray"])
def test_large_rows_travel(make, make_on_ray, data):
    def run(envs):
        envs.reset(seed=1)
        return [envs.step(np.zeros(2, int)) for _ in range(3)]

    envs = make_on_ray(LargeEnv, 2, backend=jaxvec.Ray(data=data))
    on_ray, local = run(envs), run(make(LargeEnv, 2, num_workers=2))
    assert_equal(on_ray, local)


class LargeEnv(CountingEnv):
    """Observes a megabyte; its episodes end at every second step."""

    def __init__(self):
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(0, 255, (512, 2048), np.uint8)

    def _large(self):
        return np.full((512, 2048), self.steps, np.uint8)

    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed, options=options)
        return self._large(), info

    def step(self, action):
        _, reward, _, _, info = super().step(action)
        return self._large(), reward, self.steps % 2 == 0, False, info


class PoolOnRay(PoolMachine):
    """The model of pools, faults included; each actor's start takes its second."""

    backend = "ray"


@pytest.mark.parametrize("mode", ["SAME_STEP", "EPISODIC"])
def test_states_go_to_actors_and_come_back(make_on_ray, mode):
    options = {"autoreset_mode": mode}
    envs = make_on_ray(
        state_game.walk, NUM_ENVS, states=state_game.CAPACITY, info={"luck": np.float32}, **options
    )
    models = [state_game.Model(state_game.walk(), mode, env_id) for env_id in range(NUM_ENVS)]
    game = state_game.Game(state_game.HostFace(envs), models, np.random.default_rng(0))
    game.play(60)
    assert game.count > 90


@pytest.mark.timeout(600)
def test_all_fields_of_all_rows_are_foretold(cluster):
    cloudpickle.register_pickle_by_value(sys.modules[PoolMachine.__module__])
    few = settings(
        PoolMachine.TestCase.settings,
        max_examples=settings.default.max_examples // 15,
        stateful_step_count=12,
    )
    run_state_machine_as_test(PoolOnRay, settings=few)


# --- Several workers in an actor ------------------------------------------------------------------

IN_PAIRS = jaxvec.Ray(workers_per_actor=2)


def parents(envs):
    """Returns the actor, by process id, of each worker."""
    pids = envs.call("parent")
    return [pids[first] for first, _ in probe.partition(envs)]


class Parented(CountingEnv):
    """Says in which actor it is. It dies if told so."""

    def parent(self):
        parent = psutil.Process(os.getppid())
        forked = "jaxvec._workers.forkserver" in parent.cmdline()
        return parent.ppid() if forked else parent.pid

    def step(self, action):
        if action == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_workers_of_one_actor_step_as_local_ones_do(make, make_on_ray, transport, dispatch):
    env_fns = ENVS["NestedEnv"]
    actions = sample_actions(env_fns, 40)
    options = {"transport": transport, "dispatch": dispatch, "num_workers": 3}
    on_ray = scan(make_on_ray(env_fns, backend=IN_PAIRS, **options), actions)
    local = scan(make(env_fns, **options), actions)
    assert_equal(on_ray, local)


def test_actors_have_as_many_workers_as_asked(make_on_ray):
    envs = make_on_ray(Parented, 3, num_workers=3, backend=IN_PAIRS)
    one, same, another = parents(envs)
    assert one == same != another


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_a_batch_is_one_request_to_each_actor_and_one_answer(make_on_ray, monkeypatch, dispatch):
    posted = []
    post = _link.Shipper.post
    monkeypatch.setattr(
        _link.Shipper, "post", lambda self, rows: (posted.append(rows.nbytes), post(self, rows))[1]
    )
    backend = jaxvec.Ray(workers_per_actor=2, data=DATA[dispatch])
    envs = make_on_ray(CountingEnv, 8, num_workers=4, backend=backend, dispatch=dispatch, step_timeout=None)
    envs.reset()

    def answers():
        del posted[:]
        for _ in range(20):
            envs.step(np.zeros(8, int))
        return len(posted)

    wait_until(lambda: answers() == 40)  # on a busy machine some take so long that they come in parts


def test_threads_step_slots_of_one_actor_at_once(make_on_ray, tmp_path):
    gate = tmp_path / "gate"
    envs = make_on_ray(lambda: GatedEnv(gate), 4, num_workers=4, backend=jaxvec.Ray(workers_per_actor=4))
    handle, _ = jaxvec.reset(envs)
    held, goes_on = (jax.tree.map(lambda leaf: leaf[part], handle) for part in (slice(0, 2), slice(2, 4)))
    waits = disasters.Background(lambda: jax.block_until_ready(jaxvec.step(held, jnp.full(2, 7))))
    for _ in range(5):  # while the others wait at the gate
        goes_on, timestep = jaxvec.step(goes_on, jnp.zeros(2, int))
    assert timestep.info["episode_length"].tolist() == [5, 5]
    gate.touch()
    assert waits.result(20)[1].info["episode_length"].tolist() == [1, 1]


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_dead_worker_of_an_actor_is_replaced_beside_the_others(make_on_ray, dispatch):
    envs = make_on_ray(
        Parented,
        4,
        num_workers=4,
        backend=jaxvec.Ray(workers_per_actor=4, data=DATA[dispatch]),
        on_fault=jaxvec.Restart("reset", None, rate=None),
        dispatch=dispatch,
    )
    handle, _ = jaxvec.reset(envs)
    before = parents(envs)
    actions = np.zeros((6, 4), int)
    actions[2, 1] = actions[4, 3] = 7
    _, rows = jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, actions)
    np.testing.assert_array_equal(rows.info["fault"], actions == 7)
    assert np.asarray(rows.info["episode_length"])[-1].tolist() == [6, 3, 6, 1]
    assert parents(envs) == before
    assert [worker.restarts for worker in envs.stats().workers] == [0, 1, 0, 1]


def test_an_actor_that_dies_takes_its_workers_with_it(make_on_ray):
    envs = make_on_ray(Parented, 4, num_workers=4, backend=IN_PAIRS, on_fault="restart")
    envs.reset()
    envs.step(np.zeros(4, int))
    victim, same, other, _ = parents(envs)
    assert victim == same
    os.kill(victim, signal.SIGKILL)
    steps = [envs.step(np.zeros(4, int)) for _ in range(3)]
    wait_until(lambda: any(rows.info["fault"].any() for rows in [*steps, envs.step(np.zeros(4, int))]))
    assert parents(envs)[2:] == [other, other]
    one, another = parents(envs)[:2]
    assert one == another != victim
    assert [worker.restarts for worker in envs.stats().workers] == [1, 1, 0, 0]


def test_a_slow_env_is_replaced_beside_the_other_workers_of_its_actor(make_on_ray):
    envs = make_on_ray(SleepingEnv, 4, backend=IN_PAIRS, step_timeout=5, on_fault=jaxvec.Restart(rate=None))
    envs.reset(seed=0)
    rows = envs.step(np.full(4, 7))
    assert rows.info["fault"].tolist() == [True, True, False, False]
    assert [worker.restarts for worker in envs.stats().workers] == [1, 0]


def test_an_actor_that_is_stopped_is_replaced(make_on_ray):
    envs = make_on_ray(Parented, 4, backend=IN_PAIRS, step_timeout=3, on_fault="restart")
    envs.reset()
    stopped, _ = parents(envs)
    os.kill(stopped, signal.SIGSTOP)
    rows = envs.step(np.zeros(4, int))
    assert rows.info["fault"].all()
    assert stopped not in parents(envs)
    wait_until(lambda: not psutil.pid_exists(stopped))


def test_envs_are_reset_in_advance_as_by_local_workers(make, make_on_ray):
    options = {"spare_envs": 1, "num_workers": 2}
    actions = sample_actions(ENVS["CartPole-v1"], 40)
    on_ray = scan(make_on_ray(ENVS["CartPole-v1"], **options), actions)
    local = scan(make(ENVS["CartPole-v1"], **options), actions)
    assert_equal(on_ray, local)


# --- Learners on many hosts -----------------------------------------------------------------------


def test_distributed_learners_train_alike_on_local_and_ray_envs(cluster):
    command = [sys.executable, "-m", "jaxvec.examples.data_parallel", "--num-envs", "4", "--num-updates", "3"]
    said = [
        subprocess.run(
            [*command, "--num-workers", "1", "--backend", backend],
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


# --- How data travel ------------------------------------------------------------------------------


@pytest.fixture
def closed_ports(monkeypatch):
    """Lets actors tell of a port at which nobody listens."""
    actor_class = _cluster._actor_class

    def behind_a_firewall():
        class Behind(actor_class()):
            def listen(self, key):
                host, _ = super().listen(key)
                with socket.create_server((host, 0)) as closed:
                    return closed.getsockname()

        return Behind

    monkeypatch.setattr(_cluster, "_actor_class", behind_a_firewall)


def test_data_take_a_connection_where_they_can(make_on_ray):
    envs = make_on_ray(CountingEnv, 2, num_workers=1)
    envs.reset()
    (link,) = probe.links(envs)
    assert isinstance(link.wire, _link.TcpWire)


def test_data_travel_through_ray_where_ports_are_closed(make_on_ray, closed_ports, caplog):
    caplog.set_level("INFO", "jaxvec")
    envs = make_on_ray(CountingEnv, 2, num_workers=1)
    envs.reset()
    assert envs.step(np.zeros(2, int)).info["episode_length"].tolist() == [1, 1]
    why = r"using Ray instead of TCP for the data of one actor: it can't be reached at [\d.]+:\d+: .*refused"
    assert re.search(why, caplog.text)


def test_a_closed_port_is_an_error_if_a_connection_was_asked_for(make_on_ray, closed_ports):
    said = r'worker 0 .* on node .* can\'t be reached at [\d.]+:\d+: .*refused.*use data="ray"'
    with pytest.raises(jaxvec.WorkerDiedError, match=said):
        make_on_ray(CountingEnv, 2, num_workers=1, backend=jaxvec.Ray(data="tcp"))


# --- Several requests in flight -------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_requests_are_on_their_way_while_others_are_served(make_on_ray, monkeypatch, tmp_path, dispatch):
    shipped = []
    wire = {"tcp": _link.TcpWire, "ray": _link.RayWire}[DATA[dispatch]]
    move = wire.move
    monkeypatch.setattr(wire, "move", lambda self, *args: (shipped.append(args), move(self, *args)))
    gate = tmp_path / "gate"
    backend = jaxvec.Ray(data=DATA[dispatch])
    envs = make_on_ray(
        lambda: GatedEnv(gate), 4, num_workers=1, batch_size=2, dispatch=dispatch, backend=backend
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
    backend = jaxvec.Ray(data=DATA[dispatch])
    envs = make_on_ray(env, 4, on_fault=on_fault, dispatch=dispatch, backend=backend)
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
    monkeypatch.setattr(_nodes, "node_identity", lambda: {what: "0.0.1"})
    with pytest.raises(
        jaxvec.WorkerDiedError, match=rf"on node .* has {what} .*, but this process has 0\.0\.1"
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
    needs = "constructor timed out after 2 s. .* no node yet, as Ray has not started .* needs {'CPU': 1}"
    with pytest.raises(jaxvec.EnvTimeoutError, match=needs):
        make_on_ray(CountingEnv, 6, num_workers=6, start_timeout=2)


def test_too_many_open_files_are_told(make_on_ray, monkeypatch):
    def connect(address, key):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(_link, "connect_to_actor", connect)
    with pytest.raises(jaxvec.WorkerDiedError, match="too many open files, .*ulimit -n"):
        make_on_ray(CountingEnv, 2, backend=jaxvec.Ray(data="auto"))


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
        ({"data": "udp"}, "data must be one of auto, tcp, ray, not 'udp'"),
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
        silent.listen(0)  # so that nobody is let in but the first
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
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "9"}
    said = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, env={**os.environ, **patience}
    )
    assert "WorkerDiedError: worker 0 (envs 0, 1) on node " in said.stdout, said.stderr
    assert "was lost: the Ray cluster's head at " in said.stdout
    assert said.stdout.endswith("closed\n")
