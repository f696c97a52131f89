"""`on_fault="restart"`: a fault costs the rows of its envs, one step of them, and nothing else."""

import logging
import os
import signal
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import probe
from support.disasters import wait_until_dead
from support.probe import _native, pool_of

import jaxvec
from jaxvec.testing import CountingEnv

FREE = jaxvec.Restart(max_restarts=None, rate=None)
REBUILD = jaxvec.Restart(retry="rebuild", max_restarts=None, rate=None)
HARM = 7  # the action that does harm


def throw():
    raise ValueError("bad luck")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "exception": throw,
    "SIGKILL": kill,
    "exit": lambda: os._exit(3),
    "hang": signal.pause,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


class FragileEnv(CountingEnv):
    """Does `fault()` at action 7, if `once()` says so; reports its process."""

    def __init__(self, fault, once=lambda: True, **kwargs):
        super().__init__(**kwargs)
        self._fault, self._once = fault, once

    def step(self, action):
        if action == HARM and self._once():
            self._fault()
        return super().step(action)

    def pid(self):
        return os.getpid()


@pytest.fixture(params=["native", "portable"])
def dispatch(request):
    if request.param == "native" and _native.reason_unavailable() is not None:
        pytest.skip(str(_native.reason_unavailable()))
    return request.param


@pytest.fixture(params=["python", "io_callback", "ffi"])
def face(request):
    return request.param


def rollout(envs, face, actions):
    """Resets with seed 0, then takes `actions`, `[steps, num_envs]`; returns the stacked time steps."""
    if face == "python":
        timesteps = [envs.reset(seed=0)] + [envs.step(action) for action in actions]
        return jax.tree.map(lambda *rows: np.stack(rows), *timesteps)

    timesteps = program(probe.fresh_handle(envs, envs.num_envs), jnp.asarray(actions))
    return jax.tree.map(np.asarray, jax.block_until_ready(timesteps))


@jax.jit
def program(handle, actions):
    """Resets the pool as `jaxvec.reset(envs, seed=0)` does; compiled once for all pools of an equal spec."""
    handle, first = probe.bind_reset(handle, 0, None, None, fresh=True)
    _, rest = jax.lax.scan(jaxvec.step, handle, actions)
    return jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), first, rest)


def start(make, face, *args, **kwargs):
    if face != "python":
        kwargs["transport"] = face
    return make(*args, **{"on_fault": FREE, "step_timeout": 30, **kwargs})


# --- A fault in a loop -------------------------------------------------------------------------


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_one_step_of_its_envs_and_the_program_goes_on(make, dispatch, face, fault):
    """Env 2 fails at the third of six steps. It shares its worker with env 3; 0 and 1 have another."""
    timeout = 1.0 if fault in ("hang", "stop") else 30
    envs = start(make, face, lambda: FragileEnv(FAULTS[fault]), 4, dispatch=dispatch, step_timeout=timeout)
    actions = np.tile(np.arange(1, 7)[:, None], 4)
    actions[2, 2] = HARM
    timesteps = rollout(envs, face, actions)

    hit = np.zeros((7, 4), bool)
    hit[3, 2:] = True if fault != "exception" else [True, False]
    np.testing.assert_array_equal(timesteps.info["fault"], hit)
    np.testing.assert_array_equal(timesteps.truncated, hit)
    assert not timesteps.terminated.any()
    # The observation is [resets, steps, steps in this episode, last action]. The undisturbed go on.
    for env in (0, 1, *([3] if fault == "exception" else [])):
        expected = [[1, t, t, actions[t - 1, env] if t else -1] for t in range(7)]
        np.testing.assert_array_equal(timesteps.obs[:, env], expected)
        np.testing.assert_array_equal(timesteps.reward[1:, env], np.arange(1, 7))
    # The others end with what they had, and begin anew: in the same env, or in another.
    resets, steps = (2, 2) if fault == "exception" else (1, 0)
    for env in np.flatnonzero(hit[3]):
        np.testing.assert_array_equal(timesteps.obs[2, env], [1, 2, 2, 2])
        np.testing.assert_array_equal(timesteps.info["final_obs"][3, env], timesteps.obs[2, env])
        np.testing.assert_array_equal(timesteps.obs[3, env], [resets, steps, 0, -1])
        np.testing.assert_array_equal(timesteps.obs[6, env], [resets, steps + 3, 3, 6])
        assert timesteps.reward[3, env] == 0
        assert timesteps.info["episode_return"][3, env] == 1 + 2
        assert timesteps.info["episode_length"][3, env] == 2
    assert envs.stats().total.faults == hit.sum()
    assert envs.stats().total.restarts == 1
    assert envs.stats().total.steps == 6 * 4 - hit.sum()
    assert pool_of(envs).state.broken_by is None


def test_a_call_meets_a_death_while_another_worker_starts(make):
    envs = make(CountingEnv, 2, num_workers=2, on_fault=FREE)
    envs.reset()
    for worker in (1, 0, 1):  # worker 1 still starts when worker 0 is asked
        probe.processes(envs)[worker].kill()
        wait_until_dead(probe.processes(envs)[worker])
        with pytest.raises(jaxvec.WorkerDiedError, match=f"worker {worker} .*while answering call"):
            envs.get_attr("steps")
    assert envs.get_attr("steps") == (0, 0)


# --- Resets, constructors and data --------------------------------------------------------------


class Flaky(CountingEnv):
    """Fails in `where`, once for each file in the folder `left`, which all envs share."""

    def __init__(self, left, where, fault=throw, **kwargs):
        super().__init__(**kwargs)
        self._left, self._where, self._fault = left, where, fault
        self._fail("constructor")

    def _fail(self, where):
        if where != self._where:
            return
        for file in self._left.iterdir():
            with suppress(FileNotFoundError):
                file.unlink()  # one process only is able to
                self._fault()

    def reset(self, *, seed=None, options=None):
        self._fail("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if action == HARM:
            self._fail("step")
        return super().step(action)


@pytest.fixture
def left(tmp_path):
    folder = tmp_path / "left"
    folder.mkdir()
    return folder


def fail(left, times):
    for i in range(times):
        (left / str(i)).touch()


def give_replacements(envs, seconds):
    """Sets `Timeouts.start` for workers that start from now on."""
    probe.set_start_timeout(envs, seconds)


@pytest.mark.slow(but=1)
def test_hanging_constructor_in_a_replacement_is_retried(make, face, left, caplog):
    envs = start(make, face, lambda: Flaky(left, "constructor", signal.pause), 2, step_timeout=None)
    envs.reset()
    give_replacements(envs, 1)
    fail(left, 1)
    probe.processes(envs)[0].kill()
    with caplog.at_level(logging.WARNING, "jaxvec"):
        timesteps = rollout(envs, face, np.ones((2, 2), int))
    assert timesteps.obs[-1, :, 2].tolist() == [2, 2]
    assert envs.stats().total.restarts >= 2  # on a busy machine it may take more turns
    assert "did not start within 1 s (Timeouts.start)" in caplog.text


def test_hanging_constructor_in_a_replacement_raises_at_the_limit(make, left):
    policy = jaxvec.Restart(max_restarts=1, rate=None)
    envs = make(lambda: Flaky(left, "constructor", signal.pause), 2, num_workers=1, on_fault=policy)
    envs.reset()
    give_replacements(envs, 0.1)
    fail(left, 1)
    probe.processes(envs)[0].kill()
    with pytest.raises(
        jaxvec.EnvTimeoutError,
        match=r"(?s)replacement of worker 0 \(envs 0, 1\) did not start within 0\.1 s.*max_restarts is 1",
    ) as caught:
        envs.step([1, 1])
    assert caught.value.env_ids == (0, 1)


@pytest.mark.parametrize("fault", [throw, kill], ids=["exception", "SIGKILL"])
def test_a_reset_that_fails_is_repeated_with_its_seed_and_options(make, left, fault):
    envs = make(lambda: Flaky(left, "reset", fault), 2, num_workers=2, on_fault=FREE)
    fail(left, 2)
    timestep = envs.reset(seed=2**100, options={"hard": True})
    assert [info["seed"] for info in envs.infos()] == [2**100, 2**100 + 1]
    assert [info["options"] for info in envs.infos()] == [{"hard": True}] * 2
    assert not timestep.info["fault"].any()
    assert envs.stats().total.restarts == 2


def test_reset_that_kills_a_worker_is_repeated_with_its_own_options(make, left):
    envs = make([CountingEnv, lambda: Flaky(left, "reset", kill)], num_workers=2, on_fault=FREE)
    fail(left, 1)
    options = [{"level": 3}, {"level": 4}]
    envs.reset(options=options)
    assert [info["options"] for info in envs.infos()] == options
    assert envs.stats().total.restarts == 1


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("retry", ["reset", "rebuild"])
def test_an_automatic_reset_that_fails_costs_no_step(make, left, mode, retry):
    envs = make(
        lambda: Flaky(left, "reset", episode_length=2),
        1,
        on_fault=jaxvec.Restart(retry=retry, rate=None),
        autoreset_mode=mode,
    )
    envs.reset(seed=0)
    envs.step([1])
    fail(left, 1)
    over = envs.step([1])
    assert over.terminated.all()
    assert over.reward == [2]
    following = envs.step([1])
    assert not (over.info["fault"] | following.info["fault"]).any()
    assert following.obs[0, 2] == (1 if mode == "SAME_STEP" else 0)
    total = envs.stats().total
    assert (total.restarts, total.faults, total.episodes) == (1, 0, 1)
    assert total.steps == (3 if mode == "SAME_STEP" else 2)
    if mode == "SAME_STEP":
        assert over.info["final_obs"][0, 2] == 2


def test_a_constructor_that_fails_is_tried_again_within_the_limits(make, left):
    envs = make(lambda: Flaky(left, "constructor", throw), 1, on_fault=FREE)
    envs.reset()
    fail(left, 2)
    (worker,) = probe.processes(envs)
    worker.kill()
    assert envs.step([1]).info["fault"].tolist() == [True]
    assert envs.stats().total.restarts == 3


def test_a_constructor_that_fails_in_a_rebuild_names_its_env(make, left):
    class Breaks(CountingEnv):
        def __init__(self):
            super().__init__()
            if any(left.iterdir()):
                throw()

        def step(self, action):
            if action == HARM:
                fail(left, 1)
                throw()
            return super().step(action)

    once = jaxvec.Restart(retry="rebuild", max_restarts=1, rate=None)
    envs = make(Breaks, 4, num_workers=2, on_fault=once)
    envs.reset()
    with pytest.raises(
        jaxvec.EnvError, match=r"^env 3 \(worker 1\) raised ValueError in constructor"
    ) as caught:
        envs.step([1, 1, 1, HARM])
    assert caught.value.env_id == 3


def test_wrong_data_is_a_fault_of_its_env_alone(make, backend):
    class Wrong(CountingEnv):
        def step(self, action):
            obs, *rest = super().step(action)
            return (obs * 0.5 if action == HARM else obs), *rest

    envs = make(Wrong, 3, backend=backend, on_fault=FREE)
    envs.reset(seed=0)
    timestep = envs.step([1, HARM, 2])
    assert timestep.info["fault"].tolist() == [False, True, False]
    assert timestep.obs[:, 1].tolist() == [1, 1, 1]
    assert timestep.obs[[0, 2], 3].tolist() == [1, 2]
    assert envs.step([1, 1, 1]).obs[:, 1].tolist() == [2, 2, 2]


def test_the_serial_backend_goes_on_after_exceptions(make):
    envs = make(lambda: FragileEnv(throw), 3, backend="serial", on_fault=FREE)
    timesteps = rollout(envs, "io_callback", np.array([[1, 1, 1], [1, HARM, 1], [1, 1, 1]]))
    assert timesteps.info["fault"].tolist() == [[False] * 3, [False] * 3, [False, True, False], [False] * 3]
    assert timesteps.obs[-1, :, 1].tolist() == [3, 2, 3]
    assert timesteps.info["final_obs"][2, 1].tolist() == timesteps.obs[1, 1].tolist() == [1, 1, 1, 1]
    assert timesteps.info["episode_return"][2].tolist() == [3, 1, 3]
    assert timesteps.info["episode_length"][2].tolist() == [2, 1, 2]


# --- Seeds -------------------------------------------------------------------------------------


class SeededEnv(FragileEnv):
    """Its observation ends with a random number, its info has the seed."""

    def _observe(self, action):
        obs = super()._observe(action)
        obs[3] = self.np_random.integers(1 << 30)
        return obs


@pytest.mark.parametrize("fault", ["exception", "SIGKILL"])
def test_what_follows_a_fault_depends_on_the_seed_alone(make, fault):
    actions = np.ones((6, 2), int)
    actions[2, 0] = actions[4, 0] = HARM
    runs = [
        rollout(make(lambda: SeededEnv(FAULTS[fault]), 2, on_fault=REBUILD), "python", actions).obs[:, :, 3]
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*runs)
    assert len(np.unique(runs[0])) > 10  # no episode is a repetition of another
