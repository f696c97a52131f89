"""The dispatches: chosen by name, equal in what they do, and sound under load."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import disasters, probe
from support.scripts import run_python
from support.segments import KINDS, board

from jaxvec import _native
from jaxvec._engine import choice, dispatch
from jaxvec._engine.move import Verb, requests
from jaxvec._memory import segment
from jaxvec._settings import CANDIDATES
from jaxvec.cli._main import main
from jaxvec.testing import CountingEnv

REQUESTED = [Verb.RESET, Verb.STEP, Verb.SAVE, Verb.RESTORE]


class LoopbackChannel:
    """A control socket whose wakes stay in this process."""

    def __init__(self):
        self.has_wake = 0

    def fileno(self):
        return -1

    def wake(self):
        self.has_wake += 1

    def receive(self):
        return dispatch.WAKE

    def ready(self):
        return False


class LoggedArray(np.ndarray):
    """Notes each access to an array of marks."""

    def __getitem__(self, index):
        self.log.append(f"read {self.name}")
        return np.asarray(self)[index]

    def __setitem__(self, index, value):
        self.log.append(f"write {self.name}")
        np.asarray(self)[index] = value


def test_the_portable_dispatch_fences_rows_from_marks(monkeypatch):
    """ARM would reorder the accesses, but no machine that runs these tests may be one."""
    log = []
    marks, slices = board(4, 1)
    for name in ("requested", "completed", "target"):
        array = getattr(marks, name).view(LoggedArray)
        array.log, array.name = log, name
        object.__setattr__(marks, name, array)
    for module in (dispatch, segment):
        monkeypatch.setattr(module, "fence", lambda: log.append("fence"))
    channel = LoopbackChannel()
    parent = choice.parent_end("portable", marks, slices=slices, channels=[channel], spin_ns=0)
    worker = choice.worker_end("portable", marks, worker=0, slots=slices[0], channel=channel, spin_ns=0)

    def accesses():
        """Returns the accesses since the last call, without repetitions."""
        accesses = [entry for entry, _ in groupby(log)]
        log.clear()
        return accesses

    parent.send(Verb.STEP, np.arange(4))
    counted = ["read target", "write target"]
    assert accesses() == [*counted, "fence", "write requested", "fence", *counted]
    worker.receive()
    assert accesses()[:5] == ["read target", "fence", "read requested", "fence", "read target"]
    worker.post(np.arange(4))
    assert accesses() == ["fence", "read requested", "write completed"]
    assert parent.enough_completed(np.arange(4), 4)
    assert accesses()[-1] == "fence"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), num_envs=st.integers(1, 20), rounds=st.integers(1, 12))
def test_every_slot_sent_comes_back_once_and_in_its_order(kind, data, num_envs, rounds):
    """Both ends in one process, in any order of workers that a schedule could bring about."""
    num_workers = data.draw(st.integers(1, num_envs))
    marks, slices = board(num_envs, num_workers)
    channels = [LoopbackChannel() for _ in slices]
    parent = choice.parent_end(kind, marks, slices=slices, channels=channels, spin_ns=0)
    workers = [
        choice.worker_end(kind, marks, worker=w, slots=slices[w], channel=channel, spin_ns=0)
        for w, channel in enumerate(channels)
    ]
    for _ in range(rounds):
        operation = data.draw(st.sampled_from(REQUESTED))
        slots = np.array(data.draw(st.lists(st.integers(0, num_envs - 1), min_size=1, unique=True)))
        parent.send(operation, slots)
        assert parent.unfinished().tolist() == sorted(slots)
        owners = [w for w, (a, b) in enumerate(slices) if ((slots >= a) & (slots < b)).any()]
        posts: list[list[int]] = []
        for w in data.draw(st.permutations(owners)):
            work = workers[w].receive()
            first, stop = slices[w]
            assert work.verb == operation
            assert work.slots.tolist() == [slot for slot in slots if first <= slot < stop]
            for half in np.array_split(work.slots, data.draw(st.integers(1, 2))):
                if half.size:
                    workers[w].post(half)
                    posts.append(half.tolist())
        while not parent.wait(slots, len(slots), 0):  # also to look at its sockets
            assert parent.start_poll(slots, len(slots), 60) == 0  # it need not sleep
        assert parent.unfinished().size == 0
        count = data.draw(st.integers(1, len(slots)))
        in_order, backwards = (np.concatenate(order) for order in (posts, posts[::-1]))
        assert parent.first_completed(backwards, count).tolist() == in_order[:count].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_takes_what_is_asked_for_by_other_verbs_apart(kind):
    marks, slices = board(7, 1)
    channel = LoopbackChannel()
    parent = choice.parent_end(kind, marks, slices=slices, channels=[channel], spin_ns=0)
    worker = choice.worker_end(kind, marks, worker=0, slots=slices[0], channel=channel, spin_ns=0)
    sent = [
        (Verb.RESET, [3, 1]),
        (Verb.STEP, [0]),
        (Verb.SAVE, [4]),
        (Verb.RESTORE, [2, 5]),
        (Verb.RESET, [6]),
    ]
    for operation, slots in sent:
        parent.send(operation, np.array(slots))
    taken = []
    while not worker.idle():
        for slot in range(7):
            resets = slot in (1, 3, 6) and slot in parent.unfinished()
            assert parent.any_resetting(np.array([slot])) == resets
        work = worker.receive()
        taken.append((work.verb, work.slots.tolist()))
        worker.post(work.slots.copy())
    assert taken == sent


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_envs", "num_workers"), [(1, 1), (7, 3), (64, 20)])
@pytest.mark.parametrize("words", ["", ",".join(CANDIDATES)])
def test_more_workers_than_cores_lose_no_step(make, monkeypatch, kind, num_envs, num_workers, words):
    monkeypatch.setenv("JAXVEC_CANDIDATES", words)
    envs = make(CountingEnv, num_envs, num_workers=num_workers, dispatch=kind, episode_length=11)
    envs.reset(seed=0)
    total = np.zeros(num_envs, np.int64)
    for step in range(300):
        action = (np.arange(num_envs) + step) % 1000
        timestep = envs.step(action)
        total += 1
        over = timestep.terminated
        assert timestep.obs[:, 1].tolist() == total.tolist()
        assert timestep.obs[~over, 3].tolist() == action[~over].tolist()
    assert envs.get_attr("steps") == (300,) * num_envs


def test_without_the_library_auto_is_portable_and_native_says_why(monkeypatch):
    def missing():
        raise _native.NativeUnavailableError("the native library was not built")

    monkeypatch.setattr(choice, "load", missing)
    assert choice.choose_dispatch("portable") == "portable"
    with pytest.raises(ImportError, match="was not built"):
        disasters.make(CountingEnv, 1, dispatch="native")


# --- Short slices of the scheduler --------------------------------------------------------------


def slice_of_thread():
    """Returns the scheduler's slice of this thread, in ns; 0 of a kernel that does not say."""
    attributes = (ctypes.c_uint64 * 6)()
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]  # sched_getattr
    assert ctypes.CDLL(None).syscall(number, 0, attributes, 48, 0) == 0
    return attributes[3]


def slice_of_child():
    """Returns the same of a process that this one starts."""
    command = f"import ctypes, platform\n{inspect.getsource(slice_of_thread)}print(slice_of_thread())"
    done = run_python("-c", command, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(_native.reason_unavailable() is not None, reason="there is no native library")
@pytest.mark.parametrize("setting", [None, "0"])
def test_threads_that_wait_for_steps_get_short_slices(make, monkeypatch, setting):
    default = slice_of_child()
    if not default:
        pytest.skip("this kernel has no slices that a thread can ask for")
    if setting is not None:
        monkeypatch.setenv("JAXVEC_SHORT_SLICES", setting)
    envs = make(CountingEnv, 2, num_workers=1, dispatch="native")
    envs.reset()

    def step():  # in a thread that has never waited before
        envs.step([0, 0])
        return slice_of_thread(), slice_of_child()

    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(step).result(disasters.PATIENCE)
    there = envs.map(lambda env: (slice_of_thread(), slice_of_child()), indices=0)
    expected = 100_000 if setting is None else default
    assert (here, there) == ((expected, default), ((expected, default),))


@pytest.mark.skipif(_native.reason_unavailable() is not None, reason="there is no native library")
def test_worker_has_a_ticker_while_its_core_is_busy(make):
    if not slice_of_child():
        pytest.skip("this kernel has no slices that a thread can ask for")
    envs = make(CountingEnv, 1, num_workers=1, dispatch="native")
    envs.reset()
    (worker,) = probe.pids(envs)

    def ticks():
        names: list[str] = []
        # Not by a glob, whose own questions fail for a thread that ends meanwhile.
        for thread in os.listdir(f"/proc/{worker}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since it was listed
                names.append(Path(f"/proc/{worker}/task/{thread}/comm").read_text())
        return "jaxvec ticker\n" in names

    def steps_until_it_ticks():
        envs.step([0])
        return ticks()

    with ExitStack() as stack:
        for _ in range(2 * os.cpu_count()):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        disasters.wait_until(steps_until_it_ticks)
        disasters.wait_until(lambda: not ticks())  # it ends soon after the steps


@pytest.mark.skipif(_native.reason_unavailable() is not None, reason="there is no native library")
def test_candidate_home_binds_worker_only_in_its_sleep(make, monkeypatch):
    monkeypatch.setenv("JAXVEC_CANDIDATES", "home")
    envs = make(CountingEnv, 1, num_workers=1, dispatch="native")
    envs.reset()
    (worker,) = probe.pids(envs)

    def was_bound_before_step():
        cores = os.sched_getaffinity(worker)
        envs.step([0])
        return len(cores) == 1

    disasters.wait_until(was_bound_before_step)
    assert envs.map(lambda env: os.sched_getaffinity(0)) == (os.sched_getaffinity(0),)


@pytest.fixture
def doctor_on_slices(capsys):
    def doctor_on_slices():
        assert main(["doctor", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["found"]["short slices"]

    return doctor_on_slices


@pytest.mark.skipif(_native.reason_unavailable() is not None, reason="there is no native library")
def test_doctor_reports_whether_kernel_grants_short_slices(doctor_on_slices, monkeypatch):
    before = slice_of_thread()
    granted = doctor_on_slices()
    assert slice_of_thread() == before
    release = tuple(map(int, platform.release().split(".")[:2]))
    if before:
        assert granted == "granted"
    elif release < (6, 12):
        assert granted == "off: this kernel has none; Linux 6.12 and newer have"
    monkeypatch.setenv("JAXVEC_SHORT_SLICES", "0")
    assert doctor_on_slices() == "off: JAXVEC_SHORT_SLICES is 0"


def test_doctor_gives_reason_for_missing_native_library(doctor_on_slices, monkeypatch):
    monkeypatch.setattr(_native, "_reason", "not built")
    assert doctor_on_slices() == "off: not built"


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_is_being_written_is_not_received(kind):
    # A batched env needs all of its slots at once.
    marks, slices = board(4, 1)
    end = choice.worker_end(kind, marks, worker=0, slots=slices[0], channel=LoopbackChannel(), spin_ns=0)
    marks.target[1] += 1  # as at the start of a send
    marks.requested[:2] = requests(np.array([1, 2]), Verb.STEP)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(end.receive)
        marks.requested[2:] = requests(np.array([3, 4]), Verb.STEP)
        marks.target[1] += 1
        assert receiving.result(disasters.PATIENCE).slots.tolist() == [0, 1, 2, 3]
