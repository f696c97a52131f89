"""Pools in actors of a Ray cluster: Gymnasium's `SyncVectorEnv` and the local pool are their oracles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support import probe
from support.disasters import wait_until, within
from support.elsewhere import assert_equal

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

# Not `ray`: without Ray, the name is this folder, a namespace package.
pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: the extra ray has it")
import ray

LOCK = threading.Lock()
NUM_ENVS = 5  # so that actors hold slices of different size


class Env(CountingEnv):
    """Ends itself or its actor, or raises, at some actions."""

    def step(self, action):
        if action == 7:
            raise ValueError("seven")
        if action == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    def add(self, number):
        return self.steps + number


@pytest.fixture
def make_on_ray(make, cluster):
    """Yields `make` for pools of three workers in two actors."""
    backend = jaxvec.Ray(num_actors=2, options={"num_cpus": 1})
    return partial(make, backend=backend, num_workers=3, start_timeout=200, step_timeout=200)


def pids(envs):
    """Returns the process ids of the actors of a pool."""
    return ray.get([each.__ray_call__.remote(lambda actor: os.getpid()) for each in probe.env_actors(envs)])


def play(envs, actions):
    """Returns the time steps of a reset and a compiled loop."""
    handle, first = jaxvec.reset(envs, seed=7)
    return first, jax.jit(lambda handle: jax.lax.scan(jaxvec.step, handle, actions))(handle)[1]


# --- Data ------------------------------------------------------------------------------------------------


def test_compiled_loop_gets_the_data_of_gymnasium(make_on_ray):
    actions = np.random.default_rng(0).integers(0, 2, (60, NUM_ENVS))
    oracle = SyncVectorEnv(
        [partial(gymnasium.make, "CartPole-v1")] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP
    )
    first, rest = play(make_on_ray("CartPole-v1", NUM_ENVS), actions)
    np.testing.assert_array_equal(first.obs, oracle.reset(seed=7)[0])
    for step, action in enumerate(actions):
        obs, reward, terminated, truncated, _ = oracle.step(action)
        np.testing.assert_array_equal(rest.obs[step], obs)
        np.testing.assert_array_equal(rest.reward[step], reward.astype(np.float32))
        np.testing.assert_array_equal(rest.terminated[step], terminated)
        np.testing.assert_array_equal(rest.truncated[step], truncated)
    assert rest.terminated.any()


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_all_fields_are_those_of_a_local_pool(make, make_on_ray, mode):
    options = {"autoreset_mode": mode, "info": {"steps": np.int32}, "episode_length": 4}
    pools = [each(CountingEnv, NUM_ENVS, **options) for each in (make_on_ray, make)]
    rows = []
    for envs in pools:
        found = [envs.reset(seed=3, options={"start": 2})]
        for step in range(9):
            found.append(envs.step(np.full(NUM_ENVS, step)))
            if mode == "DISABLED" and found[-1].terminated.any():
                found.append(envs.reset(mask=found[-1].terminated))
        rows.append((found, envs.infos(), envs.get_attr("steps")))
    assert_equal(*rows)


def test_nested_spaces_and_reset_options_are_those_of_a_local_pool(make, make_on_ray):
    space = gymnasium.spaces.Dict(level=gymnasium.spaces.Discrete(9))
    rows = []
    for each in (make_on_ray, make):
        envs = each(NestedEnv, NUM_ENVS, reset_options=space)
        envs.action_space.seed(0)
        first = envs.reset(seed=1, options={"level": np.arange(NUM_ENVS)})
        rows.append((first, [envs.step(envs.action_space.sample()) for _ in range(10)]))
    assert_equal(*rows)


def test_batches_come_from_the_actor_that_is_first(make_on_ray):
    envs = make_on_ray(CountingEnv, 4, num_workers=2, batch_size=2)
    handle, timestep = jaxvec.reset(envs)
    counts = np.zeros(4, int)

    @jax.jit
    def turn(handle, ids):
        handle, timestep = jaxvec.recv(jaxvec.send(handle, jnp.zeros(2, int), ids))
        return handle, timestep.info["env_id"], timestep.info["episode_length"]

    ids = timestep.info["env_id"]
    for _ in range(20):
        handle, ids, lengths = turn(handle, ids)
        counts[ids] += np.asarray(lengths) > 0
        assert (np.asarray(lengths) <= counts[ids]).all()
    assert counts.sum() >= 36


def test_threads_step_the_envs_of_two_actors_at_once(make_on_ray):
    envs = make_on_ray(CountingEnv, 4, num_workers=2)
    handle, _ = jaxvec.reset(envs)
    lengths = {}

    def step(part):
        own = jax.tree.map(lambda leaf: leaf[part], handle)
        for _ in range(10):
            own, timestep = jaxvec.step(own, jnp.zeros(2, int))
        lengths[part.start] = timestep.info["episode_length"].tolist()

    threads = [threading.Thread(target=step, args=(slice(first, first + 2),)) for first in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert lengths == {0: [10, 10], 2: [10, 10]}


# --- Calls of envs ---------------------------------------------------------------------------------------


def test_envs_can_be_called_and_set(make_on_ray):
    envs = make_on_ray(Env, NUM_ENVS, info={"steps": np.int32})
    envs.reset()
    envs.step(np.zeros(NUM_ENVS, int))
    envs.set_attr("steps", [*range(NUM_ENVS)])
    assert envs.get_attr("steps") == (0, 1, 2, 3, 4)
    assert envs.call("add", 10, indices=[4, 0]) == (14, 10)
    assert envs.map(lambda env, by: env.steps + by, 1) == (1, 2, 3, 4, 5)
    assert [info["steps"] for info in envs.infos()] == [1] * NUM_ENVS
    assert envs.stats().total.steps == NUM_ENVS
    assert [worker.steps for worker in envs.stats().workers] == [1, 2, 2]
    with pytest.raises(jaxvec.EnvError, match=r"no env attribute 'no_such' \(env 0"):
        envs.get_attr("no_such")
    assert envs.step(np.zeros(NUM_ENVS, int)).info["episode_length"].tolist() == [2] * NUM_ENVS


def test_a_trace_has_the_spans_of_this_process(make_on_ray, tmp_path):
    envs = make_on_ray(CountingEnv, NUM_ENVS)
    envs.reset()
    with envs.trace(tmp_path / "trace.json"):
        envs.step(np.zeros(NUM_ENVS, int))
    text = (tmp_path / "trace.json").read_text()
    assert "wait for workers" in text
    assert "workers on a Ray cluster record no spans" in text


# --- Faults ----------------------------------------------------------------------------------------------


def kill_actor(envs, number):
    os.kill(pids(envs)[number], signal.SIGKILL)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_a_lost_actors_envs_are_cut_and_others_go_on(make_on_ray, mode):
    envs = make_on_ray(Env, NUM_ENVS, autoreset_mode=mode, on_fault="restart")
    handle, _ = jaxvec.reset(envs, options={"start": 1})
    envs.set_attr("kept", ["yes"] * NUM_ENVS)
    handle, before = jaxvec.step(jaxvec.reset(envs, seed=1)[0], np.zeros(NUM_ENVS, int))
    kill_actor(envs, 0)
    handle, timestep = jax.jit(jaxvec.step)(handle, np.zeros(NUM_ENVS, int))
    lost = np.arange(NUM_ENVS) < 1  # of the three workers, the first actor has one
    assert (timestep.info["fault"] == lost).all()
    assert (timestep.truncated == lost).all()
    assert not timestep.terminated.any()
    assert (timestep.discount == 1).all()
    np.testing.assert_array_equal(timestep.last_obs[lost], before.obs[lost])
    assert timestep.info["episode_length"].tolist() == [1, 2, 2, 2, 2]
    assert envs.get_attr("kept") == ("yes",) * NUM_ENVS
    if mode == "DISABLED":
        handle, _ = jaxvec.reset(envs, mask=lost)
    handle, timestep = jaxvec.step(handle, np.zeros(NUM_ENVS, int))
    assert not timestep.info["fault"].any()
    assert timestep.info["episode_length"].tolist() == [0 if mode == "NEXT_STEP" else 1, 3, 3, 3, 3]
    assert envs.stats().total.restarts == 1


def test_a_lost_actor_breaks_a_pool_without_restarts(make_on_ray):
    envs = make_on_ray(Env, NUM_ENVS)
    envs.reset()
    kill_actor(envs, 1)
    with pytest.raises(
        jaxvec.WorkerDiedError, match=r"^actor 1 \(envs 1 to 4\) on node .* was lost: "
    ) as died:
        envs.step(np.zeros(NUM_ENVS, int))
    assert died.value.env_ids == (1, 2, 3, 4)
    with pytest.raises(jaxvec.PoolBrokenError):
        envs.step(np.zeros(NUM_ENVS, int))
    within(envs.close)


def test_an_actor_is_restarted_within_the_limits(make_on_ray):
    envs = make_on_ray(Env, NUM_ENVS, on_fault=jaxvec.Restart(max_restarts=1, rate=None))
    envs.reset()
    kill_actor(envs, 0)
    assert envs.step(np.zeros(NUM_ENVS, int)).info["fault"].sum() == 1
    kill_actor(envs, 0)
    with pytest.raises(jaxvec.WorkerDiedError, match="Actor 0 was not restarted: .* max_restarts is 1"):
        envs.step(np.zeros(NUM_ENVS, int))


def test_rays_own_limit_of_restarts_applies(make_on_ray):
    backend = jaxvec.Ray(num_actors=2, options={"num_cpus": 1, "max_restarts": 0})
    envs = make_on_ray(Env, NUM_ENVS, backend=backend, on_fault="restart")
    envs.reset()
    kill_actor(envs, 0)
    with pytest.raises(jaxvec.WorkerDiedError, match=r"actor 0 \(env 0\) on node .* was lost"):
        envs.step(np.zeros(NUM_ENVS, int))


def test_a_lost_node_is_replaced(make_on_ray, cluster):
    add_node = partial(cluster.add_node, num_cpus=1, resources={"stage": 1}, object_store_memory=100 * 2**20)
    nodes = [add_node(), add_node()]
    cluster.wait_for_nodes()
    backend = jaxvec.Ray(num_actors=2, options={"num_cpus": 0, "resources": {"stage": 1}})
    try:
        envs = make_on_ray(Env, 4, num_workers=2, backend=backend, on_fault="restart")
        envs.reset()
        envs.step(np.zeros(4, int))
        cluster.remove_node(nodes[0], allow_graceful=False)
        nodes[0] = add_node()
        faults, timestep = np.zeros(4, int), None
        while not faults.any():  # Ray takes a moment to notice it
            timestep = envs.step(np.zeros(4, int))
            faults += timestep.info["fault"]
        assert sorted(faults.tolist()) == [0, 0, 1, 1]
        assert (timestep.info["episode_length"][faults == 0] > 1).all()
        assert envs.step(np.zeros(4, int)).info["fault"].sum() == 0
        envs.close()
    finally:
        for node in nodes:
            cluster.remove_node(node)


@pytest.mark.parametrize("action", [7, 8])
def test_a_fault_of_one_env_is_handled_beside_it(make_on_ray, action):
    actions = np.array([0, 0, action, 0, 0])
    envs = make_on_ray(Env, NUM_ENVS, on_fault="restart")
    envs.reset()
    fault = envs.step(actions).info["fault"]
    assert fault.tolist() == (
        [False, False, True, False, False] if action == 7 else [False, True, True, False, False]
    )
    assert envs.stats().total.restarts == 1
    broken = make_on_ray(Env, NUM_ENVS)
    broken.reset()
    kind = jaxvec.EnvError if action == 7 else jaxvec.WorkerDiedError
    with pytest.raises(kind, match=r"^actor 1 \(envs 1 to 4\) on node .*env 2"):
        broken.step(actions)


# --- Start, end and options ------------------------------------------------------------------------------


def test_actors_end_with_the_pool(make_on_ray):
    envs = make_on_ray(Env, NUM_ENVS)
    envs.reset()
    processes = [*pids(envs), *envs.map(lambda env: os.getpid())]
    assert len({*processes}) == 5  # two actors and three workers
    envs.close()
    wait_until(lambda: not any(map(psutil.pid_exists, processes)))


def test_workers_follow_the_cpus_of_the_actors(make, cluster):
    backend = jaxvec.Ray(num_actors=2, options={"num_cpus": 2})
    assert make(CountingEnv, 3, backend=backend, start_timeout=200).num_workers == 3
    assert backend.num_workers(9, None) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"states": 3}, 'states does not go with backend="ray"'),
        ({"spare_envs": 1}, 'spare_envs does not go with backend="ray"'),
        (
            {"workers": jaxvec.Workers(recycle=jaxvec.Recycle(steps=9))},
            r"Workers\(recycle=\.\.\.\) does not go",
        ),
        ({"workers": jaxvec.Workers(python=sys.executable)}, r"Workers\(python=\.\.\.\) does not go"),
        ({"backend": jaxvec.Ray(num_actors=4)}, "num_actors is 4, but there are 3 workers"),
        ({"backend": jaxvec.Ray(options={"max_fly": 1})}, "max_fly"),
        (
            {"env": [lambda: LOCK and CountingEnv()] * NUM_ENVS},
            "constructor of env 0: .* be pickled",
        ),
    ],
)
def test_what_does_not_go_is_refused(make_on_ray, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make_on_ray(options.pop("env", CountingEnv), NUM_ENVS, **options)


def test_num_actors_is_checked():
    with pytest.raises(ValueError, match="num_actors must be an integer of at least 1, not 0"):
        jaxvec.Ray(num_actors=0)


def test_an_actor_without_room_times_out(make_on_ray):
    backend = jaxvec.Ray(options={"resources": {"nowhere": 1}})
    with pytest.raises(jaxvec.EnvTimeoutError, match=r"nowhere.*`ray status` shows"):
        make_on_ray(CountingEnv, 1, num_workers=1, backend=backend, start_timeout=0.1)


def test_nobody_imports_ray_unasked():
    script = "import sys, jaxvec; jaxvec.make('CartPole-v1', 2).close(); print('ray' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert said.stdout == "False\n"
