"""Rollouts by actors of a Ray cluster: the same function run here, over a local pool, is their oracle."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.disasters import wait_until
from support.elsewhere import assert_equal
from support.runs import load_state
from support.scripts import run_python

import jaxvec
from jaxvec.examples import impala_ray
from jaxvec.testing import CountingEnv

# Not `ray`: without Ray, the name is this folder, a namespace package.
pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: the extra ray has it")
import ray

NUM_ENVS = 3
PARAMS = np.zeros((4, 2), np.float32)
ONE = jaxvec.Restart(max_restarts=1, rate=None)
LIMITED = jaxvec.Timeouts(start=200)
UNLIMITED = replace(inspect.signature(jaxvec.Rollouts).parameters["timeouts"].default, start=200)


class Steps(NamedTuple):
    """A class that Ray's own pickler would make anew."""

    obs: Any
    action: Any
    timestep: Any


def rollout(params, handle, timestep, key):
    def step(carry, key):
        handle, obs = carry
        action = jax.random.categorical(key, obs @ params)
        handle, timestep = jaxvec.step(handle, action)
        return (handle, timestep.obs), Steps(obs, action, timestep)

    (handle, obs), steps = jax.lax.scan(step, (handle, timestep.obs), jax.random.split(key, 8))
    return handle, timestep._replace(obs=obs), steps


def count(params, handle, timestep, key):
    """Takes one step, and returns what the envs and the weights are."""
    handle, timestep = jaxvec.step(handle, jnp.zeros(handle.num_envs, int))
    return handle, timestep, {"obs": timestep.obs, "params": params}


OPTIONS = {
    "rollout": rollout,
    "env": "CartPole-v1",
    "num_envs": NUM_ENVS,
    "num_actors": 2,
    "seed": 5,
    "save_states": True,
    "timeouts": UNLIMITED,
}


@pytest.fixture
def make_rollouts(cluster):
    """Yields `jaxvec.Rollouts`, with little to do, and closes all that it made."""
    made = []

    def make_rollouts(rollout=count, env=CountingEnv, **options):
        options = {
            "num_envs": 2,
            "num_actors": 1,
            "params": np.int32(0),
            "timeouts": LIMITED,
        } | options
        made.append(jaxvec.Rollouts(rollout, env, **options))
        return made[-1]

    make_rollouts.made = made
    yield make_rollouts
    for rollouts in made:
        rollouts.close()


def faults(rollouts):
    return [actor.faults for actor in rollouts.stats().actors]


def kill(rollouts, actor):
    """Kills the process of an actor."""
    ray.kill(rollouts._actors.states[actor].handle, no_restart=False)


def get(rollouts):
    return rollouts.get(timeout=200)


def check_uninterrupted(make, came, params, seed, **options):
    """Checks all rollouts of two actors against one uninterrupted run of a local pool for each."""
    program = jax.jit(rollout)
    for actor in range(2):
        ours = [done for done in came if done.actor == actor]
        assert [done.index for done in ours] == [*range(len(ours))]
        envs = make("CartPole-v1", NUM_ENVS, num_workers=1, **options)
        handle, timestep = jaxvec.reset(envs, seed=seed + actor * NUM_ENVS)
        key = jax.random.fold_in(jax.random.key(seed), actor)
        for done in ours:
            weights, one = params[done.version], jax.random.fold_in(key, done.index)
            handle, timestep, steps = program(weights, handle, timestep, one)
            assert_equal(done.trajectory, steps)
            assert isinstance(done.trajectory, Steps)
            assert isinstance(done.trajectory.obs, jax.Array)


def learn(rollouts, came, params, enough):
    """Takes rollouts and pushes new weights until `enough`."""
    while not enough():
        params.append(params[-1] + np.arange(8, dtype=np.float32).reshape(4, 2) / 10)
        rollouts.push(params[-1])
        came.append(get(rollouts))


@pytest.mark.parametrize("timeouts", [LIMITED, UNLIMITED], ids=["process", "serial"])
def test_resumed_rollouts_equal_an_uninterrupted_run(make_rollouts, make, timeouts):
    params, came, options = [PARAMS], [], OPTIONS | {"on_fault": ONE, "timeouts": timeouts}
    rollouts = make_rollouts(params=PARAMS, **options)

    def last(actor):
        return sum(done.actor == actor for done in came)

    learn(rollouts, came, params, lambda: last(0) and last(1))
    kill(rollouts, 0)
    learn(rollouts, came, params, lambda: faults(rollouts) == [1, 0])
    before = last(0)
    learn(rollouts, came, params, lambda: last(0) > before + 2)  # at most one was done before

    checkpoint, kept, num_versions = rollouts.checkpoint(), list(came), len(params)
    for _ in range(3):  # the learner loses these
        get(rollouts)
    for actor in range(2):
        kill(rollouts, actor)
    rollouts.close()

    came, params = kept, params[:num_versions]
    rollouts = make_rollouts(params=params[-1], resume=checkpoint, **options)
    assert rollouts.stats().version == num_versions - 1
    before = last(0), last(1)
    learn(rollouts, came, params, lambda: last(0) > before[0] + 2 and last(1) > before[1] + 2)
    assert came[-1].version > num_versions - 1
    check_uninterrupted(make, came, params, OPTIONS["seed"], on_fault=ONE)
    rollouts.close()
    with pytest.raises(ValueError, match="resume: the checkpoint has seed=5, not 6"):
        make_rollouts(params=PARAMS, **options | {"seed": 6, "resume": checkpoint})


KILLED_LEARNER = """
import pickle, sys
sys.path[:0] = {paths!r}
import cloudpickle, jaxvec, ray
import test_rollouts as tests
cloudpickle.register_pickle_by_value(tests)
ray.init(address={address!r}, log_to_driver=False)
params, came = [tests.PARAMS], []
rollouts = jaxvec.Rollouts(params=tests.PARAMS, **tests.OPTIONS)
tests.learn(rollouts, came, params, lambda: len({{done.actor for done in came}}) == 2)
pickle.dump((rollouts.checkpoint(), came, params), sys.stdout.buffer)
sys.stdout.buffer.flush()
while True:  # these rollouts are lost
    rollouts.get()
"""


def test_rollouts_go_on_after_their_learner_was_killed(make_rollouts, make, cluster):
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    script = KILLED_LEARNER.format(paths=paths, address=cluster.address)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as learner:
        try:
            checkpoint, came, params = pickle.load(learner.stdout)
        finally:
            learner.kill()
    before = [sum(done.actor == actor for done in came) for actor in range(2)]
    rollouts = make_rollouts(params=params[-1], resume=checkpoint, **OPTIONS)

    def go_on():
        return all(sum(done.actor == actor for done in came) > before[actor] + 1 for actor in range(2))

    learn(rollouts, came, params, go_on)
    check_uninterrupted(make, came, params, OPTIONS["seed"])


def test_resumed_rollouts_without_states_reset_their_envs(make_rollouts):
    rollouts = make_rollouts(in_flight=2)
    assert [get(rollouts).index for _ in range(3)] == [0, 1, 2]
    checkpoint = rollouts.checkpoint()
    rollouts.close()
    done = get(make_rollouts(resume=checkpoint))
    assert (done.index, done.trajectory["obs"][0, 1]) == (3, 1)


def test_states_that_can_not_be_saved_are_an_error_at_the_start(make_rollouts):
    class Unsaved(CountingEnv):
        def __init__(self):
            super().__init__()
            self.numbers = (number for number in range(9))

    with pytest.raises(jaxvec.RolloutError, match="when it started") as caught:
        make_rollouts(env=Unsaved, save_states=True)
    assert isinstance(caught.value.__cause__, jaxvec.EnvStateError)


@pytest.mark.parametrize("timeouts", [LIMITED, UNLIMITED], ids=["process", "serial"])
def test_trajectories_are_those_of_the_same_rollout_here(make_rollouts, make, timeouts):
    seed, params = 5, [PARAMS]
    options = {"num_envs": NUM_ENVS, "num_actors": 2, "seed": seed, "in_flight": 2, "timeouts": timeouts}
    rollouts = make_rollouts(rollout, "CartPole-v1", params=PARAMS, **options)
    came = [get(rollouts)]
    while len(came) < 12 or {done.actor for done in came} != {0, 1}:
        params.append(params[-1] + np.arange(8, dtype=np.float32).reshape(4, 2) / 10)
        rollouts.push(params[-1])
        came.append(get(rollouts))
        assert came[-1].lag == len(params) - 1 - came[-1].version

    check_uninterrupted(make, came, params, seed)
    assert max(done.version for done in came) > 0
    stats = rollouts.stats()
    assert stats.rollouts == len(came)
    assert stats.env_steps == len(came) * 8 * NUM_ENVS
    assert stats.version == len(params) - 1
    for actor, each in enumerate(stats.actors):
        taken = [done for done in came if done.actor == actor]
        assert len(taken) <= each.rollouts <= len(taken) + 2  # so many may be in flight
        assert (each.faults, each.pool_restarts, each.node[:5]) == (0, 0, "node ")
        assert each.age_s >= 0
        assert taken[-1].version <= each.version <= stats.version

    with pytest.raises(TypeError, match="can't contain JAX keys"):
        rollouts.push(jax.random.key(0))
    rollouts.close()
    rollouts.close()
    for call in (rollouts.get, partial(rollouts.push, PARAMS)):
        with pytest.raises(jaxvec.PoolClosedError):
            call()


class Gated(CountingEnv):
    """Waits in each step for a file that is named by its seed."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed if seed is None else seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        (self.folder / f"began {self.seed}").touch()
        gate = self.folder / f"gate {self.seed}"
        while not gate.exists():
            time.sleep(0.01)
        gate.unlink()
        return super().step(action)


class Late(CountingEnv):
    """Starts, in the second actor only after the first actor has finished its first rollout."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        with suppress(FileExistsError):
            (folder / "first").mkdir()
            return
        wait_until((folder / "done").exists)

    def step(self, action):
        if self.steps == 1:  # in the second rollout
            (self.folder / "done").touch()
        return super().step(action)


def test_no_rollout_is_lost_while_other_actors_start(make_rollouts, tmp_path):
    rollouts = make_rollouts(env=partial(Late, tmp_path), num_envs=1, num_actors=(2, 2), in_flight=2)
    indices = {0: [], 1: []}
    while not all(indices.values()):
        done = get(rollouts)
        indices[done.actor].append(done.index)
    assert indices == {actor: [*range(len(came))] for actor, came in indices.items()}


def test_rollouts_return_in_order_of_completion(make_rollouts, tmp_path):
    rollouts = make_rollouts(env=partial(Gated, tmp_path), num_envs=1, num_actors=2, in_flight=2)

    def begun(actor):
        wait_until((tmp_path / f"began {actor}").exists)

    def finish(actor):
        begun(actor)
        (tmp_path / f"began {actor}").unlink()
        (tmp_path / f"gate {actor}").touch()

    begun(0)
    with pytest.raises(jaxvec.NotReadyError, match=r"no rollout was done within 0.1 s"):
        rollouts.get(timeout=0.1)
    finish(1)
    assert get(rollouts).actor == 1
    finish(0)
    assert get(rollouts).actor == 0
    # Both have begun anew, with the first weights.
    begun(0)
    begun(1)
    for version in (1, 2, 3):
        rollouts.push(np.int32(version))
    finish(0)
    begun(0)
    finish(0)
    come = [get(rollouts) for _ in range(2)]
    assert [(done.actor, done.index, done.version, done.lag) for done in come] == [(0, 1, 0, 3), (0, 2, 3, 0)]
    assert come[1].trajectory["params"] == 3

    # What nobody holds any more ends, though a rollout is under way.
    assert ray.available_resources().get("CPU", 0) == 2
    make_rollouts.made.clear()
    del rollouts
    gc.collect()
    wait_until(lambda: ray.available_resources().get("CPU") == 4)


def test_rollouts_of_one_call_have_the_same_weights(make_rollouts):
    class Fragile(CountingEnv):
        def step(self, action):
            obs, *rest = super().step(action)
            if obs[1] == 8:
                raise OSError("no simulator")
            return obs, *rest

    rollouts = make_rollouts(env=Fragile, num_envs=1, rollouts_per_call=3)
    came = [get(rollouts)]
    rollouts.push(np.int32(1))  # the next call starts when all rollouts of this one are taken
    came += [get(rollouts) for _ in range(6)]
    assert [done.index for done in came] == [*range(7)]
    assert [done.version for done in came] == [0, 0, 0, 1, 1, 1, 1]
    assert [int(done.trajectory["params"]) for done in came] == [0, 0, 0, 1, 1, 1, 1]
    assert [int(done.trajectory["obs"][0, 1]) for done in came] == [*range(1, 8)]
    said = "actor 0 on node .* raised EnvError in rollout 7: env 0"
    with pytest.raises(jaxvec.RolloutError, match=said) as caught:
        get(rollouts)
    assert isinstance(caught.value.__cause__, jaxvec.EnvError)
    assert (caught.value.actor, caught.value.__cause__.env_id) == (0, 0)


@jax.jit
def update_slowly(params):
    zeros = jax.lax.fori_loop(0, 300, lambda _, x: jnp.sin(x @ x), jnp.zeros((400, 400)))
    return params + 1 + zeros.sum().astype(int)


def test_push_does_not_wait_for_an_update(make_rollouts):
    params = jnp.int32(0)
    rollouts = make_rollouts(params=params)
    get(rollouts)
    jax.block_until_ready(update_slowly(params))  # compiles
    params = update_slowly(params)
    rollouts.push(params)
    assert not params.is_ready()
    params.block_until_ready()
    params.delete()  # as donation does; actors get a copy
    done = get(rollouts)
    while done.version == 0:
        done = get(rollouts)
    assert (done.version, done.trajectory["params"]) == (1, 1)


@pytest.mark.parametrize("size", [1, 100_000], ids=["sent with each call", "stored"])
def test_later_changes_of_params_do_not_affect_actors(make_rollouts, size):
    params = np.zeros(size, np.float32)
    rollouts = make_rollouts(params=params, on_fault=ONE)
    params += 1
    kill(rollouts, 0)
    came = [get(rollouts)]
    while faults(rollouts) != [1]:
        came.append(get(rollouts))
    rollouts.push(params)
    params += 1
    while came[-1].version == 0:
        came.append(get(rollouts))
    for done in came:
        np.testing.assert_array_equal(done.trajectory["params"], np.full(size, done.version))


@pytest.mark.parametrize("options", [{}, {"num_actors": 2, "on_fault": ONE}], ids=["raise", "restart"])
def test_rollout_exception_is_raised_and_breaks_the_rollouts(make_rollouts, options):
    def failing(params, handle, timestep, key):
        raise LookupError("no such layer")

    rollouts = make_rollouts(failing, **options)
    with pytest.raises(
        jaxvec.RolloutError, match=r"actor \d on node .* raised LookupError in rollout 0: no such"
    ) as caught:
        get(rollouts)
    error = caught.value
    assert "in failing" in error.remote_traceback
    assert isinstance(error.__cause__, LookupError)
    for call in (rollouts.get, partial(rollouts.push, 1)):
        with pytest.raises(jaxvec.PoolBrokenError, match="no such layer"):
            call()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"timeouts": UNLIMITED}, jaxvec.ActorDiedError),
        ({"timeouts": LIMITED}, jaxvec.RolloutError),
        ({"timeouts": UNLIMITED, "workers": jaxvec.Workers()}, jaxvec.RolloutError),
        ({"timeouts": UNLIMITED, "num_workers": 2}, jaxvec.RolloutError),
        ({"timeouts": UNLIMITED, "actor_options": {"num_gpus": 1}}, jaxvec.RolloutError),
    ],
    ids=["serial", "limits", "workers", "two workers", "GPU"],
)
def test_an_env_that_crashes_ends_its_actor_or_its_worker(make_rollouts, cluster, options, error):
    class Crashing(CountingEnv):
        def step(self, action):
            os._exit(3)

    node = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20)
    with pytest.raises(error) as caught:
        get(make_rollouts(env=Crashing, **options))
    first, *others = str(caught.value).splitlines()
    if error is jaxvec.ActorDiedError:
        assert re.fullmatch(
            r"actor 0 on node \S+ \(\w+\), with envs 0 to 1, was lost in rollout 0: its process or its node "
            r"ended; on_fault=.*, and workers=jaxvec.Workers\(\) .*",
            first,
        )
        assert "The actor" in "".join(others)  # Ray's own text
    assert isinstance(caught.value.__cause__, jaxvec.WorkerDiedError) == (error is jaxvec.RolloutError)
    assert (caught.value.actor, caught.value.node.startswith("node ")) == (0, True)
    cluster.remove_node(node)


def test_an_actor_that_dies_is_replaced_within_limits(make_rollouts, caplog):
    rollouts = make_rollouts(on_fault=jaxvec.Restart(max_restarts=1))
    came = [get(rollouts) for _ in range(3)]
    kill(rollouts, 0)
    rollouts.push(np.int32(1))
    while faults(rollouts) != [1]:
        came.append(get(rollouts))
    came += [get(rollouts) for _ in range(2)]  # at most one was done before
    assert [done.index for done in came] == [*range(len(came))]  # none is lost that was done
    assert came[-1].version == 1
    assert came[-1].trajectory["obs"][0, 1] < len(came)  # new envs have made fewer steps
    assert "actor 0 recovers from fault 1, and resets its envs: actor 0 on node" in caplog.text
    kill(rollouts, 0)
    with pytest.raises(jaxvec.ActorDiedError, match=r"Actor 0 was not restarted: .* max_restarts is 1"):
        while True:
            get(rollouts)


BESIDE = """
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "library"))
import beside, jax.numpy as jnp, jaxvec, ray

def rollout(params, handle, timestep, key):
    handle, timestep = jaxvec.step(handle, jnp.zeros(handle.num_envs, int))
    return handle, timestep, timestep.obs

if __name__ == "__main__":
    ray.init(address={address!r}, log_to_driver=False)
    with jaxvec.Rollouts(rollout, beside.Env, 1, num_actors=1, params=0, {options}) as rollouts:
        print(rollouts.get().trajectory.tolist())
"""


@pytest.mark.parametrize("options", ["", "workers=jaxvec.Workers()"], ids=["actor", "workers"])
def test_modules_beside_the_program_are_found_in_actors(cluster, tmp_path, options):
    script = tmp_path / "program" / "script.py"
    (script.parent / "library").mkdir(parents=True)
    script.write_text(BESIDE.format(address=cluster.address, options=options))
    (script.parent / "beside.py").write_text("import on_path\nclass Env(on_path.Env): ...")
    (script.parent / "library" / "on_path.py").write_text(
        "from jaxvec import testing\nclass Env(testing.CountingEnv): ..."
    )
    run = run_python(script, cwd=tmp_path)
    assert run.stdout == "[[1, 1, 1, 0]]\n", run.stderr


def test_actors_keep_their_compiled_rollouts(make_rollouts, tmp_path):
    env = {"env_vars": {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}}
    get(make_rollouts(actor_options={"runtime_env": env}))
    assert len([*tmp_path.glob("jit_count-*-cache")]) == 1


class Leaving(CountingEnv):
    """Ends its process in the methods that a file names, one after the other."""

    def __init__(self, path):
        super().__init__()
        self.action_space = gymnasium.spaces.Discrete(9, start=1)
        self._path = path
        self._leave("__init__")

    def step(self, action):
        if action == 0:  # of a rollout; when states are saved first, envs are tried with actions of the space
            self._leave("step")
        return super().step(action)

    def _leave(self, method):
        first, _, rest = self._path.read_text().partition(" ")
        if first == method:
            self._path.write_text(rest)
            os._exit(3)


def test_an_actor_that_is_lost_while_it_starts_is_replaced(make_rollouts, tmp_path):
    (path := tmp_path / "methods").write_text("__init__")
    rollouts = make_rollouts(env=partial(Leaving, path), on_fault=ONE, timeouts=UNLIMITED)
    assert get(rollouts).trajectory["obs"][0].tolist() == [1, 1, 1, 0]
    assert faults(rollouts) == [1]
    path.write_text("__init__")
    with pytest.raises(jaxvec.ActorDiedError, match="actor 0 on node .* was lost"):
        make_rollouts(env=partial(Leaving, path), timeouts=UNLIMITED)


@pytest.mark.parametrize(
    ("methods", "lost", "restored"),
    [("step __init__", 1, True), ("step step", 2, True), ("step step step", 3, False)],
    ids=["before its envs are there", "in the next rollout", "more often than a snapshot is used"],
)
def test_the_envs_of_an_actor_that_is_lost_again(
    make_rollouts, tmp_path, monkeypatch, caplog, methods, lost, restored
):
    """The loss in a constructor soon after another one is no further fault."""
    monkeypatch.setattr("jaxvec._backends.ray.rollouts._MAX_SNAPSHOT_USES", 2)
    monkeypatch.setattr("jaxvec._backends.ray.rollouts._SAME_FAULT_INTERVAL", 200.0)
    (path := tmp_path / "methods").touch()
    options = {"on_fault": jaxvec.Restart(max_restarts=None, rate=None), "save_states": True}
    rollouts = make_rollouts(env=partial(Leaving, path), timeouts=UNLIMITED, **options)
    get(rollouts)
    wait_until(lambda: rollouts.stats().actors[0].rollouts == 2)  # and no third one may start yet
    path.write_text(methods)
    came = [get(rollouts) for _ in range(3)]
    assert path.read_text() == ""
    assert [done.index for done in came] == [1, 2, 3]
    steps = [2, 3, 4] if restored else [2, 1, 2]
    assert [done.trajectory["obs"][0].tolist() for done in came] == [[1, n, n, 0] for n in steps]
    assert faults(rollouts) == [lost]
    assert "actor 0 recovers from fault 1, and restores its envs: actor 0 on node" in caplog.text
    assert (f"fault {lost}, and resets its envs" in caplog.text) == (not restored)


class Sick(CountingEnv):
    """Raises in each step while a file exists, unless it was reset with the seed of a healthy env."""

    def __init__(self, path, is_healthy):
        super().__init__()
        self._path, self._is_healthy = path, is_healthy

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._fails = not self._is_healthy(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self._fails and self._path.exists():
            raise OSError("no simulator")
        return super().step(action)


def rollouts_of_two(make_rollouts, path, is_healthy):
    """Returns rollouts of two actors, with the seeds 0 and 1, and 2 and 3, once both work."""
    rollouts = make_rollouts(env=partial(Sick, path, is_healthy), num_actors=2, on_fault=ONE)
    while {get(rollouts).actor for _ in range(6)} != {0, 1}:
        pass
    path.touch()
    return rollouts


def test_an_actor_with_a_broken_pool_is_replaced(make_rollouts, tmp_path):
    # The envs of a replacement have other seeds.
    rollouts = rollouts_of_two(make_rollouts, tmp_path / "sick", lambda seed: seed > 1)
    while faults(rollouts) != [1, 0]:
        get(rollouts)
    # Its pool recovered from the fault of one env, and not from the next one in the same rollout.
    assert [actor.pool_restarts for actor in rollouts.stats().actors] == [1, 0]
    while get(rollouts).actor == 1:
        pass


def test_an_actor_beyond_its_limits_is_given_up(make_rollouts, tmp_path, caplog):
    rollouts = rollouts_of_two(make_rollouts, tmp_path / "sick", lambda seed: seed in (2, 3))
    while "The other actors continue: 1 are left" not in caplog.text:
        get(rollouts)
    assert "Actor 0 was not restarted: it was restarted 1 times, and max_restarts is 1" in caplog.text
    assert faults(rollouts) == [2, 0]
    assert rollouts.stats().actors[0].version == -1
    while get(rollouts).actor == 0:  # one that was done before
        pass
    assert [get(rollouts).actor for _ in range(5)] == [1] * 5


def test_actors_use_nodes_that_join_and_leave_those_lost(make_rollouts, cluster):
    add = partial(cluster.add_node, num_cpus=1, resources={"spot": 1}, object_store_memory=80 * 2**20)
    first = add()
    rollouts = make_rollouts(num_actors=(1, 2), on_fault=ONE, actor_options={"resources": {"spot": 1}})
    alone = get(rollouts).actor
    assert [get(rollouts).actor for _ in range(3)] == [alone] * 3
    stats = rollouts.stats().actors
    assert (stats[1 - alone].rollouts, stats[1 - alone].age_s, stats[1 - alone].version) == (0, None, -1)
    assert first.node_id[:12] in stats[alone].node
    second = add()
    joined = get(rollouts)
    while joined.actor == alone:
        joined = get(rollouts)
    assert joined.index == 0
    cluster.remove_node(first, allow_graceful=False)
    # Rollouts of the lost actor may have been finished before.
    while faults(rollouts)[alone] == 0 or get(rollouts).actor == alone:
        get(rollouts)
    third = add()
    while (moved := get(rollouts)).actor != alone:
        pass
    assert moved.trajectory["obs"][0, 1] == 1  # the first step of new envs
    assert third.node_id[:12] in rollouts.stats().actors[alone].node
    assert faults(rollouts)[1 - alone] == 0
    rollouts.close()
    for node in (second, third):
        cluster.remove_node(node)


class Traced(CountingEnv):
    """Tells its process and seed in each observation, and takes 0.05 s per step."""

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed if seed is None else seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(0.05)
        _, *others = super().step(action)
        return np.array([os.getpid(), self.seed, self.steps, 0], np.int32), *others


def get_while_another_waits(rollouts, actor):
    """Returns the next rollout, once `actor` has finished one, so that `get` need not wait for any."""

    def is_finished():  # the last one before an error was the last one at all
        finished = rollouts.stats().actors[actor].rollouts
        return finished > rollouts._progress[actor][0] or rollouts._actors._error is not None

    wait_until(is_finished)
    return get(rollouts)


def process_of(rollouts, actor):
    """Returns the id of the process of an actor whose env is `Traced`."""
    while (done := get(rollouts)).actor != actor:
        pass
    return int(done.trajectory["obs"][0, 0])


@contextmanager
def stopped(process):
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


STOPPED = {"env": Traced, "num_envs": 1, "num_actors": (2, 2), "timeouts": UNLIMITED, "rollout_timeout": 5}


def test_stopped_actor_times_out_while_another_delivers(make_rollouts):
    rollouts = make_rollouts(**STOPPED)
    with stopped(process_of(rollouts, 0)):
        # In 5 s, the other actor finishes at most 100 rollouts.
        with pytest.raises(
            jaxvec.ActorDiedError,
            match=r"actor 0 on node .* did not finish rollout \d+ within rollout_timeout, 5 s",
        ):
            for _ in range(300):
                get_while_another_waits(rollouts, 1)


def test_stopped_actor_is_replaced_while_another_delivers(make_rollouts):
    rollouts = make_rollouts(**STOPPED, on_fault=ONE, save_states=True)
    process = process_of(rollouts, 0)
    with stopped(process):
        before = rollouts._progress[0][0]
        indices = []
        for _ in range(600):
            if faults(rollouts) != [0, 0]:
                break
            done = get_while_another_waits(rollouts, 1)
            indices += [done.index] if done.actor == 0 else []
        assert faults(rollouts) == [1, 0]
    while (done := get(rollouts)).actor == 1 or done.trajectory["obs"][0, 0] == process:
        indices += [done.index] if done.actor == 0 else []
    assert [*indices, done.index] == [*range(before, done.index + 1)]
    assert done.trajectory["obs"][0].tolist()[1:] == [0, done.index + 1, 0]


class Stuck(Traced):
    """Waits in its constructor while a file exists."""

    def __init__(self, path):
        super().__init__()
        wait_until(lambda: not path.exists())


def test_restarted_actor_times_out_while_another_delivers(make_rollouts, tmp_path):
    options = STOPPED | {"env": partial(Stuck, tmp_path / "stuck"), "rollout_timeout": None}
    rollouts = make_rollouts(**options, on_fault=ONE)
    process_of(rollouts, 0)
    rollouts._actors.start_timeout = 2.0
    (tmp_path / "stuck").touch()
    kill(rollouts, 0)
    try:
        with pytest.raises(
            jaxvec.ActorDiedError, match=r"actor 0 .* was not ready within Timeouts.start, 2.0 s"
        ):
            for _ in range(600):
                get_while_another_waits(rollouts, 1)
    finally:
        (tmp_path / "stuck").unlink()


def test_the_log_reports_a_late_rollout_while_another_delivers(make_rollouts, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(jaxvec._backends.ray.rollouts, "_LATE_SECONDS", 1.0)
    rollouts = make_rollouts(env=partial(Gated, tmp_path), num_envs=1, num_actors=(2, 2))
    for _ in range(2000):
        if "actor 0 on node" in caplog.text:
            break
        (tmp_path / "gate 1").touch()
        assert get_while_another_waits(rollouts, 1).actor == 1
    assert re.search(r"actor 0 on node .* has not finished rollout 0 after", caplog.text)
    (tmp_path / "gate 0").touch()
    while get(rollouts).actor == 1:
        (tmp_path / "gate 1").touch()


def test_the_log_reports_a_rollout_that_is_late(make_rollouts, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(jaxvec._backends.ray.rollouts, "_LATE_SECONDS", 0.1)
    rollouts = make_rollouts(env=partial(Gated, tmp_path), num_envs=1)

    def reported():
        with pytest.raises(jaxvec.NotReadyError):
            rollouts.get(timeout=0.1)
        return "has not finished rollout 0 after" in caplog.text

    wait_until(reported)
    (tmp_path / "gate 0").touch()
    assert get(rollouts).index == 0


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 2])
def test_an_actor_of_a_lost_node_waits_for_another(make_rollouts, cluster, caplog, least):
    add = partial(cluster.add_node, num_cpus=1, resources={"spot": 1}, object_store_memory=80 * 2**20)
    spots = [add(), add()]
    rollouts = make_rollouts(num_actors=(least, 2), on_fault=ONE, actor_options={"resources": {"spot": 1}})
    while {get(rollouts).actor for _ in range(6)} != {0, 1}:
        pass
    rollouts._actors.start_timeout = 1.0
    cluster.remove_node(spots.pop(), allow_graceful=False)
    while "the cluster has had no free resources for actor" not in caplog.text:
        get(rollouts)
    assert sum(faults(rollouts)) <= 1  # the loss itself; the wait costs nothing
    rollouts._actors.start_timeout = 200.0
    spots.append(add())
    lost = [actor.version for actor in rollouts.stats().actors].index(-1)
    while get(rollouts).actor != lost or rollouts.stats().actors[lost].version == -1:
        pass
    rollouts.close()
    for spot in spots:
        cluster.remove_node(spot)


def test_actors_that_find_no_room_or_take_too_long_are_told(make_rollouts):
    taken = ray.util.placement_group([{"CPU": 1}] * 3)
    ray.get(taken.ready(), timeout=200)
    with pytest.raises(
        jaxvec.ActorDiedError, match=r"not ready within Timeouts.start, 2 s: Ray has not started"
    ):
        make_rollouts(num_workers=2, timeouts=jaxvec.Timeouts(start=2))
    ray.util.remove_placement_group(taken)
    wait_until(lambda: ray.available_resources().get("CPU") == 4)


def test_params_with_jax_keys_start_no_actor(make_rollouts):
    wait_until(lambda: ray.available_resources().get("CPU") == 4)  # until actors of earlier tests have ended
    with pytest.raises(TypeError, match="can't contain JAX keys"):
        make_rollouts(params=jax.random.key(0))
    assert ray.available_resources().get("CPU") == 4


def test_who_waits_for_a_rollout_hears_that_ray_was_shut_down(make_rollouts, cluster, tmp_path):
    rollouts = make_rollouts(env=partial(Gated, tmp_path))
    waiting = threading.Thread(target=_shut_down, args=(tmp_path,), daemon=True)
    waiting.start()
    try:
        with pytest.raises(jaxvec.ActorDiedError, match=r"actor 0 on node .* was lost"):
            rollouts.get()
    finally:
        waiting.join(200)
        ray.init(address=cluster.address, log_to_driver=False)
    with pytest.raises(jaxvec.PoolBrokenError, match="failed before"):
        rollouts.get()


def test_ray_shutdown_is_noticed_though_rollouts_are_left(make_rollouts, cluster):
    rollouts = make_rollouts(in_flight=3)
    wait_until(lambda: rollouts.stats().actors[0].rollouts == 3)
    try:
        ray.shutdown()
        with pytest.raises(jaxvec.ActorDiedError, match=r"actor 0 on node .* was lost: Ray was shut down"):
            rollouts.get()
    finally:
        ray.init(address=cluster.address, log_to_driver=False)


def _shut_down(folder):
    wait_until(lambda: (folder / "began 0").exists())
    ray.shutdown()


def test_the_example_trains(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    size = "--num-actors 1 --num-envs 4 --num-steps 50 --total-steps 600 --name a --stop-at=-1e9"
    stopped = impala_ray.main(size.split())  # when the first episode ends
    assert stopped.env_steps < 600
    run = impala_ray.main(["--resume", "runs/a", "--stop-at", "1e9"])
    assert run.metrics()["env_steps"].tolist() == [200, 400, 600]
    assert (run.metrics()["lag"] >= 0).all()
    assert 8 < run.latest("episode_return") < 100
    leaves = load_state("runs/a")["leaves"]
    assert [leaves[name] for name in leaves if name.endswith(".obs_stats.count")] == [600]
    said = capsys.readouterr().out
    assert said.count("faults of actors: 0\n") == 2


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"rollout": 3}, TypeError, "rollout must be a function"),
        ({"num_actors": 0}, ValueError, "num_actors must be an integer of at least 1, not 0"),
        ({"num_actors": (3, 2)}, ValueError, r"num_actors must be \(least, most\), not"),
        ({"num_actors": (0, 2)}, ValueError, r"num_actors\[0\] must be an integer of at least 1, not 0"),
        ({"backend": "process"}, TypeError, "no option 'backend': actor_options="),
        ({"actor_options": {"max_fly": 1}}, ValueError, "max_fly"),
        ({"recv_order": "random"}, ValueError, "recv_order must be"),
        ({"numbers": (number for number in "12")}, jaxvec.NotPicklableError, "can't be pickled.*generator"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(cluster, options, kind, said):
    defaults = {"rollout": count, "env": CountingEnv, "num_envs": 1, "num_actors": 1, "params": 0}
    with pytest.raises(kind, match=re.compile(said, re.DOTALL)):
        jaxvec.Rollouts(**defaults | options)
