"""Pools on a Ray cluster: the local pool is their oracle, and Ray's own test cluster breaks under them."""

from __future__ import annotations

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

import cloudpickle
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support import disasters, padded, probe, recycling, state_game
from support.disasters import GatedEnv, SleepingEnv, wait_until
from support.elsewhere import assert_equal, play_in_order
from support.pool_machine import PoolMachine
from support.probe import fork, pool_of, ray_backend, wire
from support.probe import link as _link
from support.scripts import leftovers

import jaxvec
from jaxvec.examples import data_parallel
from jaxvec.spaces import pad
from jaxvec.testing import CountingEnv, NestedEnv

# Not `ray`: without Ray, the name is this folder, a namespace package.
pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: the extra ray has it")
import ray

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
cloudpickle.register_pickle_by_value(recycling)

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
    """Yields `make` for pools on the cluster, of two workers at two hosts."""
    # A task has an interpreter of Ray's, which takes a minute to start where everything is busy.
    return partial(make, backend=jaxvec.Ray(hosts=2), num_workers=2, start_timeout=200, step_timeout=200)


def sample_actions(env_fns, num_steps):
    space = SyncVectorEnv(env_fns).action_space
    space.seed(3)
    samples = [space.sample() for _ in range(num_steps)]
    return jax.tree.map(lambda *each: np.stack(each), *samples)


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_recycling_in_actors_changes_no_row(make, make_on_ray, dispatch):
    recycle, chosen = {"workers": jaxvec.Workers(recycle=recycling.OFTEN)}, recycling.actions(high=2)
    local, exact = (
        each(state_game.walk, recycling.NUM_ENVS, dispatch=dispatch, **more)
        for each, more in ((make, {}), (make_on_ray, recycle))
    )
    recycling.assert_equal(recycling.scan(exact, chosen), recycling.scan(local, chosen))
    inexact = make_on_ray(recycling.Opened, recycling.NUM_ENVS, episode_length=7, **recycle)
    _, rows = recycling.scan(inexact, chosen)
    recycling.check_rows(rows, chosen, rows.info["fault"])
    assert (rows.info["fault"].sum(0) >= 1).all()
    assert min(recycling.recycled(exact)) >= 1
    assert min(recycling.recycled(inexact)) >= 1


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

    envs = make_on_ray(Env, 4, backend=ONE_HOST, workers=jaxvec.Workers(init=prepare))
    assert envs.get_attr("mine") == ("worker 0", "worker 0", "worker 1", "worker 1")


# --- The local pool is the oracle -----------------------------------------------------------------

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
    on_ray = scan(make_on_ray(ENVS[name], **options), actions)
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
    on_ray = scan(make_on_ray(env_fns, max_sizes=maxima), actions)
    local = scan(make(env_fns, num_workers=2, max_sizes=maxima), actions)
    assert_equal(on_ray, local)
    first_obs, first_actions = jax.tree.map(lambda leaf: leaf[0], (on_ray[1].obs, actions))
    assert_equal(first_obs, first_actions)


def test_batches_in_the_order_sent_are_those_of_local_workers(make, make_on_ray):
    options = {"batch_size": 2, "recv_order": "sent"}
    on_ray, local = (
        play_in_order(each("CartPole-v1", 4, **options))
        for each in (make_on_ray, partial(make, num_workers=2))
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


@pytest.mark.parametrize("hosts", [1, 2])
def test_envs_can_be_asked_and_set(make_on_ray, tmp_path, hosts):
    envs = make_on_ray(CountingEnv, 4, backend=jaxvec.Ray(hosts=hosts))
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


def test_a_trace_shows_what_actors_do(make_on_ray, tmp_path):
    envs = make_on_ray(CountingEnv, 4)
    envs.reset()
    with envs.trace(tmp_path / "trace.json"):
        envs.step(np.zeros(4, int))
    assert "env 3" in (tmp_path / "trace.json").read_text()


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


def test_large_rows_travel(make, make_on_ray):
    def run(envs):
        envs.reset(seed=1)
        return [envs.step(np.zeros(2, int)) for _ in range(3)]

    envs = make_on_ray(LargeEnv, 2)
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
    """The model of pools, faults included; each host's start takes its second."""

    hosts = 2


@pytest.mark.parametrize("mode", ["SAME_STEP", "EPISODIC"])
def test_states_go_to_actors_and_come_back(make_on_ray, mode):
    options = {"autoreset_mode": mode}
    envs = make_on_ray(
        state_game.walk, NUM_ENVS, states=state_game.CAPACITY, info={"luck": np.float32}, **options
    )
    models = [state_game.Model(state_game.walk(), mode, env_id) for env_id in range(NUM_ENVS)]
    game = state_game.Game(state_game.HostFace(envs), models, np.random.default_rng(0))
    game.play(80)
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


# --- Several workers at a host --------------------------------------------------------------------

ONE_HOST = jaxvec.Ray()


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
    on_ray = scan(make_on_ray(env_fns, **options), actions)
    local = scan(make(env_fns, **options), actions)
    assert_equal(on_ray, local)


def test_actors_have_as_many_workers_as_asked(make_on_ray):
    envs = make_on_ray(Parented, 3, num_workers=3)
    one, another, same = parents(envs)
    assert one != another == same


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


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_dead_worker_of_an_actor_is_replaced_beside_the_others(make_on_ray, dispatch):
    envs = make_on_ray(
        Parented,
        4,
        num_workers=4,
        backend=ONE_HOST,
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
    envs = make_on_ray(Parented, 4, num_workers=4, on_fault="restart")
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
    envs = make_on_ray(SleepingEnv, 4, backend=ONE_HOST, step_timeout=5, on_fault=jaxvec.Restart(rate=None))
    envs.reset(seed=0)
    rows = envs.step(np.full(4, 7))
    assert rows.info["fault"].tolist() == [True, True, False, False]
    assert [worker.restarts for worker in envs.stats().workers] == [1, 0]


def test_an_actor_that_is_stopped_is_replaced(make_on_ray):
    envs = make_on_ray(Parented, 4, backend=ONE_HOST, step_timeout=3, on_fault="restart")
    envs.reset()
    stopped, _ = parents(envs)
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED)
    rows = envs.step(np.zeros(4, int))
    assert rows.info["fault"].all()
    assert stopped not in parents(envs)
    os.kill(stopped, signal.SIGKILL)  # Ray waits until it goes on


def test_envs_are_reset_in_advance_as_by_local_workers(make, make_on_ray):
    options = {"spare_envs": 1, "num_workers": 2}
    actions = sample_actions(ENVS["CartPole-v1"], 40)
    on_ray = scan(make_on_ray(ENVS["CartPole-v1"], **options), actions)
    local = scan(make(ENVS["CartPole-v1"], **options), actions)
    assert_equal(on_ray, local)


# --- Learners on many hosts -----------------------------------------------------------------------


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


# --- How data travel ------------------------------------------------------------------------------


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


# --- Several requests in flight -------------------------------------------------------------------


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
