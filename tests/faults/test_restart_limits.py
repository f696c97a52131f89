"""Limits of restarts, and requests to envs beside their faults."""

import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from support import probe
from support.disasters import PATIENCE, Background, wait_until
from support.probe import budget as budgets
from support.probe import fork, pool_of
from support.scripts import gone, run_python
from test_restarts import (  # noqa: F401
    FAULTS,
    FREE,
    HARM,
    REBUILD,
    FragileEnv,
    dispatch,
    face,
    fail,
    kill,
    left,
    rollout,
    start,
    throw,
)

import jaxvec
from jaxvec.compat.gymnasium import AsyncVectorEnv
from jaxvec.testing import CountingEnv

start_methods = pytest.mark.parametrize(
    "start_method",
    [
        pytest.param(
            "forkserver",
            marks=pytest.mark.skipif(
                fork.reason_unavailable() is not None, reason=str(fork.reason_unavailable())
            ),
        ),
        "spawn",
    ],
)

# --- Limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["exception", "SIGKILL"])
def test_beyond_the_limit_a_fault_is_raised_and_breaks_the_pool(make, dispatch, face, fault):
    policy = jaxvec.Restart(max_restarts=2, rate=None)
    envs = start(
        make, face, lambda: FragileEnv(FAULTS[fault]), 2, num_workers=2, on_fault=policy, dispatch=dispatch
    )
    assert rollout(envs, face, [[HARM, 1], [HARM, 1], [1, HARM]]).info["fault"].sum() == 3
    kind = jaxvec.EnvError if fault == "exception" else jaxvec.WorkerDiedError
    with pytest.raises(
        (kind, RuntimeError), match="Worker 0 was not restarted.*2 times, and max_restarts is 2"
    ):
        rollout(envs, face, [[1, HARM], [HARM, 1]])
    with pytest.raises(kind):
        envs.raise_if_failed()
    assert [worker.restarts for worker in envs.stats().workers] == [2, 2]
    with pytest.raises(jaxvec.PoolBrokenError, match="max_restarts is 2"):
        envs.reset()


@pytest.mark.parametrize(("policy", "most"), [("restart", 1), (jaxvec.Restart(rate=(3, 3600)), 3)])
def test_more_restarts_in_a_period_than_the_rate_says_are_too_many(make, backend, policy, most):
    envs = make(lambda: FragileEnv(throw), 2, num_workers=1, backend=backend, on_fault=policy)
    envs.reset()
    for _ in range(most):
        assert envs.step([HARM, 1]).info["fault"].tolist() == [True, False]
    said = rf"(?s)bad luck.*0 was not restarted: restarts in the last .* s: {most}, and rate is \({most}, "
    with pytest.raises(jaxvec.EnvError, match=said):
        envs.step([1, HARM])
    assert envs.stats().total.restarts == most


def test_a_rate_is_of_any_such_period_and_of_each_worker(monkeypatch):
    now = 100.0
    monkeypatch.setattr(budgets, "time", SimpleNamespace(monotonic=lambda: now))
    budget = budgets.Budget(jaxvec.Restart(max_restarts=None, rate=(2, 10.0)), 2)

    def spend(worker):
        try:
            budget.spend(worker, jaxvec.JaxvecError("bad luck"))
        except jaxvec.JaxvecError:
            return False
        return True

    steps = [(0.0, True), (6.0, True), (9.9, False), (10.0, True), (15.9, False), (16.0, True), (16.0, False)]
    for after, allowed in steps:
        now = 100.0 + after
        assert spend(0) is allowed, after
    assert [spend(1), spend(1), spend(1)] == [True, True, False]
    assert budget.restarts == [4, 2]


def test_an_env_that_never_comes_back_is_raised(make):
    envs = make(lambda: FragileEnv(signal.pause), 1, on_fault=jaxvec.Restart(max_restarts=1, rate=None),
                step_timeout=0.5)  # fmt: skip
    envs.reset()
    assert envs.step([HARM]).info["fault"].all()
    with pytest.raises(jaxvec.EnvTimeoutError, match="(?s)Still running: env 0 .*max_restarts is 1"):
        envs.step([HARM])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"on_fault": "ignore"}, 'on_fault must be "raise", "restart" or a jaxvec.Restart'),
        ({"on_fault": None}, "on_fault must be"),
    ],
)
def test_an_unknown_policy_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        jaxvec.make(CountingEnv, 1, **arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"retry": "pray"}, "retry must be"),
        ({"max_restarts": -1}, "max_restarts"),
        *(({"rate": rate}, "rate must be") for rate in [(0, 60), (1, 0), (1.5, 60), 60, (1, 2, 3), ("", 1)]),
    ],
)
def test_a_policy_that_can_not_be_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        jaxvec.Restart(**arguments)


# --- What is asked of envs outside of steps -------------------------------------------------------


@pytest.mark.parametrize("end", ["kill", "hang"])
def test_a_call_that_ends_a_worker_raises_and_the_pool_goes_on(make, dispatch, end):
    class Env(CountingEnv):
        def end(self, how):
            {"kill": kill, "hang": signal.pause, "": lambda: None}[how]()

    timeout = PATIENCE if end == "kill" else 1.0
    envs = make(Env, 2, num_workers=2, on_fault=FREE, step_timeout=timeout, dispatch=dispatch)
    envs.reset(seed=0)
    kind = jaxvec.WorkerDiedError if end == "kill" else jaxvec.EnvTimeoutError
    with pytest.raises(kind):
        envs.call("end", end)
    assert pool_of(envs).state.broken_by is None
    probe.set_timeouts(envs, PATIENCE, PATIENCE, PATIENCE)
    assert envs.call("end", "") == (None, None)
    assert envs.step([1, 1]).info["fault"].all()
    assert not envs.step([1, 1]).info["fault"].any()


RENEWALS = {
    "rebuilt": (throw, {"on_fault": REBUILD}),
    "replaced": (kill, {"on_fault": FREE}),
    "rebuilt in this process": (throw, {"on_fault": REBUILD, "backend": "serial"}),
}


@pytest.mark.parametrize("how", RENEWALS)
def test_a_new_env_is_told_what_the_one_before_it_was(make, how):
    fault, options = RENEWALS[how]
    serial = options.get("backend") == "serial"
    envs = make(lambda: FragileEnv(fault, episode_length=3), 3, num_workers=1 if serial else 2, **options)
    each = [{"level": i} for i in range(3)]
    envs.reset(options=each)
    envs.reset(mask=[False, True, False], options={"level": 7})  # not of the others, which it was not for
    envs.set_attr("level", [10, 11, 12])
    envs.set_attr("level", 99, indices=2)
    goal = [1]
    envs.set_attr("goal", [goal] * 3)
    if not serial:  # which has the very list
        goal.append(2)
    timestep = envs.step([HARM, HARM, 0])  # env 1 shares its worker with env 2
    hit = [True, True, how == "replaced"]
    assert timestep.info["fault"].tolist() == hit
    told = [{"level": 0}, {"level": 7}, {"level": 2}]
    assert [info.get("options") for info in envs.infos()] == [
        one if new else None for one, new in zip(told, hit, strict=True)
    ]
    assert envs.get_attr("level") == (10, 11, 99)
    assert envs.get_attr("goal") == ([1],) * 3
    for _ in range(3):
        timestep = envs.step([0, 0, 0])
    assert timestep.terminated[:2].tolist() == [True, True]
    assert [info["options"] for info in envs.infos()[:2]] == [None, None]  # as any other autoreset
    envs.reset()
    assert envs.step([HARM, HARM, 0]).info["fault"].tolist() == hit
    assert [info.get("options") for info in envs.infos()] == [None] * 3
    assert envs.get_attr("level") == (10, 11, 99)


def test_a_spare_env_that_is_rebuilt_is_told_its_options(make):
    envs = make(lambda: FragileEnv(throw, episode_length=2), 1, spare_envs=1, on_fault=REBUILD)
    envs.reset(options={"level": 3})
    envs.set_attr("level", 5)
    assert envs.step([HARM]).info["fault"].all()  # the spare env takes over
    assert (envs.infos()[0]["options"], envs.call("get_wrapper_attr", "resets")) == (None, (1,))
    for _ in range(2):
        timestep = envs.step([0])
    assert timestep.terminated.all()
    assert (envs.infos()[0]["options"], envs.get_attr("level")) == ({"level": 3}, (5,))


@pytest.mark.parametrize("how", RENEWALS)
def test_what_can_not_be_told_again_is_logged_as_lost(make, how, caplog):
    fault, options = RENEWALS[how]
    serial = options.get("backend") == "serial"
    envs = make(lambda: FragileEnv(fault), 3, num_workers=1 if serial else 2, **options)
    envs.reset()
    envs.get_attr("pid")
    envs.step([0, HARM, 0])
    envs.map(lambda env: None)
    envs.step([0, HARM, 0])
    envs.step([0, HARM, 0])  # the new env was never called
    lost = "changes that call or map made to " + ("envs 1, 2" if how == "replaced" else "env 1")
    assert [lost in record.getMessage() for record in caplog.records] == [False, True, False]


def test_a_worker_that_is_replaced_gets_the_options_of_resets(make):
    envs = make(lambda: FragileEnv(kill), 1, on_fault=FREE)
    envs.reset(seed=0, options={"level": 3})
    with pytest.raises(jaxvec.NotPicklableError):
        envs.reset(
            options={"level": threading.Lock()}
        )  # rejected, so no worker gets it, not the next one either
    envs.step([HARM])
    assert envs.infos()[0]["final_info"] == {}
    envs.step([1])
    envs.reset(options={"level": 3})
    assert envs.infos()[0]["options"] == {"level": 3}


def test_a_new_worker_with_other_spaces_breaks_the_pool(make, left):
    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            if list(left.iterdir()):
                self.action_space = spaces.Discrete(3)

        def step(self, action):
            os._exit(1)

    envs = make(Env, 1, on_fault=FREE)
    envs.reset()
    fail(left, 1)
    with pytest.raises(jaxvec.SpaceMismatchError, match=r"env 0 has action space Discrete\(3\)"):
        envs.step([1])


def test_each_restart_is_logged_with_its_cause(make, caplog):
    envs = make(lambda: FragileEnv(throw), 1, on_fault=FREE)
    envs.reset()
    with caplog.at_level(logging.WARNING, "jaxvec"):
        envs.step([HARM])
    (record,) = caplog.records
    assert "worker 0 recovers from fault 1: env 0 (worker 0) raised ValueError in step" in record.message


def make_fragile(make, start_method):
    workers = jaxvec.Workers(start_method=start_method)
    envs = make(lambda: FragileEnv(kill), 2, num_workers=2, workers=workers, on_fault=FREE)
    envs.reset()
    return envs


@pytest.mark.slow(but=1)
@start_methods
@pytest.mark.parametrize("launched", [False, True])
def test_close_during_a_launch_reaps_its_process(make, new_workers, start_method, launched):
    """`close` waits less long than the launch of a replacement may take."""
    envs = make_fragile(make, start_method)
    launching, closed = threading.Event(), threading.Event()

    def launch(original, worker):
        started = original(worker) if launched else None
        launching.set()
        assert closed.wait(PATIENCE)
        return started or original(worker)

    probe.wrap_launch(envs, launch)
    step = Background(partial(envs.step, [HARM, 1]))
    assert launching.wait(PATIENCE)
    envs.close()
    closed.set()
    with pytest.raises(jaxvec.PoolClosedError):
        step.result()
    wait_until(lambda: new_workers() == [])


@start_methods
@pytest.mark.parametrize("launched", [False, True])
def test_close_in_a_signal_handler_reaps_a_launch(make, new_workers, start_method, launched):
    envs = make_fragile(make, start_method)

    def launch(original, worker):
        started = original(worker) if launched else None
        signal.raise_signal(signal.SIGUSR1)
        return started or original(worker)

    probe.wrap_launch(envs, launch)
    before = signal.signal(signal.SIGUSR1, lambda *_: envs.close())
    try:
        with pytest.raises(jaxvec.PoolClosedError):
            envs.step([HARM, 1])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert envs.closed
    wait_until(lambda: new_workers() == [])


@start_methods
def test_ctrl_c_during_a_launch_leaves_no_worker(make, new_workers, start_method):
    envs = make_fragile(make, start_method)

    def launch(original, worker):
        started = original(worker)
        if started:  # the error's traceback refers to it
            raise KeyboardInterrupt

    probe.wrap_launch(envs, launch)
    with pytest.raises(KeyboardInterrupt) as caught:
        envs.step([HARM, 1])
    envs.close()
    wait_until(lambda: new_workers() == [])
    assert pool_of(envs).state.broken_by is caught.value


@start_methods
@pytest.mark.parametrize("ended_by", ["restart", "close"])
def test_worker_that_ends_too_late_is_reaped(make, monkeypatch, new_workers, start_method, ended_by):
    envs = make_fragile(make, start_method)
    (process,) = {type(each) for each in probe.supervisor(envs).connections.processes}
    with monkeypatch.context() as patch:  # whoever waits for it gives up
        patch.setattr(process, "wait", lambda self, timeout: False)
        patch.setattr(process, "ended", lambda self: False)
        if ended_by == "restart":
            assert envs.step([HARM, 1]).info["fault"].tolist() == [True, False]
            wait_until(lambda: len(new_workers()) == 2)
        else:
            envs.close()
    envs.close()
    wait_until(lambda: new_workers() == [])


def test_close_during_a_restart_leaves_nothing(make, new_workers):
    def slow():
        if os.environ.get("JAXVEC_SLOW"):
            signal.pause()
        return FragileEnv(kill)

    envs = make(slow, 2, num_workers=2, on_fault=FREE)
    envs.reset()
    os.environ["JAXVEC_SLOW"] = "1"  # workers that are started from now on hang
    try:
        step = Background(partial(envs.step, [HARM, 1]))
        wait_until(lambda: probe.supervisor(envs).deadlines.starting)
        envs.close()
        with pytest.raises(jaxvec.PoolClosedError):
            step.result()
    finally:
        del os.environ["JAXVEC_SLOW"]
    assert new_workers() == []


def test_call_before_the_reply_to_a_failed_env_is_answered(make, dispatch):
    envs = make(
        lambda: FragileEnv(throw),
        2,
        num_workers=2,
        batch_size=1,
        recv_order="sent",
        on_fault=FREE,
        dispatch=dispatch,
    )
    envs.reset(seed=0)
    envs.recv()
    worker = probe.supervisor(envs).connections.channels[0]
    while worker.ready():  # wakes for what was received
        worker.receive()
    envs.send([HARM], [0])
    assert select.select([worker], [], [], PATIENCE)[0]  # its report is still unread
    assert envs.call("steps") == (0, 0)
    assert envs.recv().info["fault"].tolist() == [True]
    assert envs.stats().total.restarts == 1


def test_a_wake_that_never_comes_holds_up_nothing(make):
    """A worker is stopped after its rows are marked as done, and before it has told so."""

    class Stopped(CountingEnv):
        def step(self, action):
            if action == 7:
                from jaxvec._engine.channel import Channel

                def wake(channel):
                    os.kill(os.getpid(), signal.SIGSTOP)

                Channel.wake = wake
            return super().step(action)

    envs = make(Stopped, 2, num_workers=2, dispatch="portable", step_timeout=2)
    envs.reset(seed=0)
    assert envs.step([0, 7]).obs[:, 3].tolist() == [0, 7]
    with pytest.raises(jaxvec.EnvTimeoutError, match="step timed out .*Unfinished: env 1\\."):
        envs.step([0, 0])


FEW = """
import os, resource, sys
import jaxvec, numpy as np
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def step(self, action):
        if action == 7:
            os.kill(os.getpid(), 9)
        return super().step(action)

policy = jaxvec.Restart(max_restarts=None, rate=None)
envs = jaxvec.make(Env, 2, num_workers=2, on_fault=policy, workers=jaxvec.Workers(start_method=sys.argv[1]))
envs.reset(seed=0)
highest = max(fd for fd in range(1000) if os.path.exists(f"/proc/self/fd/{fd}"))
for fd in range(highest):
    if not os.path.exists(f"/proc/self/fd/{fd}"):
        os.dup2(1, fd)
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    envs.step(np.array([0, 7]))
except jaxvec.WorkerDiedError as error:
    print(error)
    print(error.__cause__)
envs.close()
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_too_few_descriptors_for_a_replacement_are_a_typed_error(method):
    done = run_python("-c", FEW, method)
    assert done.returncode == 0, done.stderr
    error, cause = done.stdout.splitlines()
    assert re.match(r"worker 1 \(env 1\) could not be started: .*Too many open files", error)
    assert cause.startswith("worker 1 was killed by SIGKILL")


class Simulated(CountingEnv):
    """Has a simulator with a session of its own, and a daemon that has left it."""

    def __init__(self):
        super().__init__()
        daemon = (
            "import os, time; os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(1000)"
        )
        self.pids = []
        for words in (["sleep", "1000"], [sys.executable, "-c", daemon]):
            process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE, text=True)
            self.pids.append(process.pid if words[0] == "sleep" else int(process.stdout.readline()))

    def step(self, action):
        if action == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_simulators_in_their_own_sessions_end_with_their_worker(make):
    envs = make(Simulated, 2, num_workers=2, workers=jaxvec.Workers(start_method="forkserver"), on_fault=FREE)
    envs.reset()
    gone_by_now = []
    for _ in range(3):
        gone_by_now += envs.get_attr("pids")[0]
        envs.step([7, 1])
        assert gone(gone_by_now)
    living = [pid for pids in envs.get_attr("pids") for pid in pids]
    assert all(map(psutil.pid_exists, living))
    envs.close()
    assert gone(living)


def test_of_objects_the_last_observation_is_kept_too():
    """Those are in no shared memory: who had them last is the program."""

    class Talking(gymnasium.Env):
        observation_space = spaces.Dict(text=spaces.Text(20), count=spaces.Box(0, 99, (1,), np.int64))
        action_space = spaces.Discrete(9)

        def __init__(self):
            self.count = 0

        def observe(self):
            return {"text": f"step {self.count}", "count": np.array([self.count])}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.count = 0
            return self.observe(), {}

        def step(self, action):
            if action == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return self.observe(), 1.0, False, False, {}

    envs = AsyncVectorEnv([Talking] * 2, num_workers=1, autoreset_mode="SameStep", on_fault=FREE)
    try:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([0, 0])
        obs, rewards, _, truncated, infos = envs.step([0, 7])
        assert (truncated.tolist(), rewards.tolist()) == ([True, True], [0, 0])
        assert obs["text"] == ("step 0", "step 0")
        assert [final["text"] for final in infos["final_obs"]] == ["step 2", "step 2"]
        assert [final["count"].tolist() for final in infos["final_obs"]] == [[2], [2]]
    finally:
        envs.close()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_a_worker_that_died_has_started_in_its_group_ends(make, method):
    class Starting(CountingEnv):
        def __init__(self):
            super().__init__()
            self.child = subprocess.Popen(["sleep", "1000"]).pid

        def step(self, action):
            if action == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    envs = make(Starting, 1, workers=jaxvec.Workers(start_method=method), on_fault=FREE)
    envs.reset()
    (child,) = envs.get_attr("child")
    envs.step([7])
    assert gone([child])
