"""`envs.trace`: what the file says is what was done, in every way to drive a pool, and whatever fails."""

import gzip
import json
import os
import threading
import time
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from support import probe
from support.disasters import bad_luck, failing, in_two_ways, wait_until, wait_until_dead
from support.probe import Span, Trace, _ffi, _native, build_timeline, pool_of

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.jax_version

EPSILON = 1e-3  # µs: times are written in µs, and taken in ns
FREE = jaxvec.Restart(max_restarts=None, rate=None)


class Timeline:
    """A trace file, by the names of its tracks."""

    def __init__(self, path):
        content = path.read_bytes()
        file = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        self.about = file["otherData"]
        self.duration = self.about["duration_ns"] / 1e3
        tracks = {e["tid"]: e["args"]["name"] for e in file["traceEvents"] if e["name"] == "thread_name"}
        self.spans = {name: [] for name in tracks.values()}
        self.remarks = {name: [] for name in tracks.values()}
        for event in file["traceEvents"]:
            if event["ph"] == "X":
                self.spans[tracks[event["tid"]]].append(event)
            elif event["ph"] == "i":
                self.remarks[tracks[event["tid"]]].append(event["name"])

    @property
    def workers(self):
        return [name for name in self.spans if name.startswith("worker")]

    def worker(self, index):
        """Counts the spans of a worker by name."""
        return Counter(span["name"] for span in self.spans[self.workers[index]])

    @property
    def program(self):
        """Counts the program's spans by name."""
        return Counter(
            s["name"] for name, spans in self.spans.items() for s in spans if name.startswith("program")
        )

    def count(self, name):
        """Counts the spans of all workers with this name."""
        return sum(self.worker(index)[name] for index in range(len(self.workers)))

    def assert_sound(self):
        """All is in the block; a worker does one thing at a time; a program's parts lie in one another."""
        for name, spans in self.spans.items():
            opened = []
            for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
                start, end = span["ts"], span["ts"] + span["dur"]
                assert -EPSILON <= start <= end <= self.duration + EPSILON
                while opened and opened[-1] <= start + EPSILON:
                    opened.pop()
                assert not opened or (name.startswith("program") and end <= opened[-1] + EPSILON)
                opened.append(end)


def run(envs, path, steps, **options):
    """Traces so many steps of a program."""
    with envs.trace(path, **options):
        handle, _ = jaxvec.reset(envs)
        scan = partial(jax.lax.scan, jaxvec.step)
        jax.block_until_ready(jax.jit(scan)(handle, jnp.zeros((steps, envs.num_envs), int)))
    return Timeline(path)


def test_all_steps_resets_and_hand_offs_are_in_the_file(drive, way, tmp_path):
    driver, path = drive(partial(CountingEnv, 3)), tmp_path / "pool.json"
    driver.reset()
    driver.step()
    with driver.envs.trace(path) as given:
        driver.reset()
        driver.step(times=5)
    driver.step()
    timeline = Timeline(path)
    timeline.assert_sound()
    assert given == path
    assert list(timeline.workers) == ["worker 0 (envs 0-1)", "worker 1 (envs 2-3)"]
    for env in range(4):
        assert timeline.worker(env // 2)[f"step env {env}"] == 5
        assert timeline.worker(env // 2)[f"reset env {env}"] == 2  # the second where the episode ends
    assert all(timeline.worker(index)["wait"] > 1 for index in range(2))
    program = timeline.program
    name = {"python": "VectorEnv.{} on the host"}.get(way.face, "jaxvec.{}").format
    assert program[name("reset")] == 1
    if way.first_ready:
        assert (program[name("send")], program[name("recv")]) == (5, 10 + 1)
    else:
        assert program[name("step")] == 5
    assert program["write actions"] == 5
    assert program["dispatch"] == 6
    assert program["copy results"] == (12 if way.first_ready else 5)
    assert program["wait for workers"] >= program["copy results"]
    calls = 1 + (5 + 11 if way.first_ready else 5)
    in_cpp = calls - 1 if way.dispatch == "native" else 0
    assert program["by Python"] == (0 if way.face == "python" else calls - in_cpp)
    assert (timeline.about["dropped"], timeline.about["lost"]) == ({}, {})


@pytest.mark.skipif(_ffi.reason_unavailable() is not None, reason="FFI")
def test_a_wait_that_cpp_leaves_to_python_has_a_span(make, monkeypatch, tmp_path):
    class Slow(CountingEnv):
        def step(self, action):
            time.sleep(0.01)  # longer than C++ waits
            return super().step(action)

    monkeypatch.setattr("jaxvec._engine.native_engine._WAIT", 1)  # ns, after which Python waits
    envs = make(Slow, 2, num_workers=1, transport="ffi", dispatch="native")
    program = run(envs, tmp_path / "pool.json", 10).program
    assert program["jaxvec.step"] == 10
    assert program["finish in Python"] == 10


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_spans_are_as_many_as_the_statistics_say(make, backend, mode, tmp_path):
    more = {} if backend == "serial" else {"num_workers": 2}
    envs = make(CountingEnv, 3, backend=backend, episode_length=4, autoreset_mode=mode, **more)
    timeline = run(envs, tmp_path / "pool.json", 10)
    timeline.assert_sound()
    total = envs.stats().total
    assert sum(timeline.count(f"step env {env}") for env in range(3)) == total.steps
    assert sum(timeline.count(f"reset env {env}") for env in range(3)) == total.resets
    assert timeline.program["jaxvec.step"] == 10
    assert len(timeline.workers) == envs.num_workers


def test_of_batched_envs_each_instance_has_its_spans(make, tmp_path):
    def batched():
        return SyncVectorEnv([partial(CountingEnv, 4)] * 2, autoreset_mode="SameStep")

    in_worker = make(batched, 4, envs_per_instance=2, num_workers=1)
    for envs in (make(batched(), transport="io_callback"), in_worker):
        timeline = run(envs, tmp_path / "pool.json", 7)
        timeline.assert_sound()
        assert timeline.count("step envs 0-1") == 7
        assert timeline.count("reset envs 0-1") == 1  # its envs reset themselves
        assert timeline.count("step envs 2-3") == 7 * (envs.num_envs == 4)


def test_resets_in_advance_and_questions_are_there_too(make, tmp_path):
    envs = make(CountingEnv, 2, num_workers=1, spare_envs=1)
    envs.reset()
    wait_until(lambda: envs.stats().total.resets == 2 + 1)
    with envs.trace(tmp_path / "pool.json"):
        envs.reset(seed=3)  # a spare env gets a seed, and so another reset
        envs.call("render_mode")
        wait_until(lambda: envs.stats().total.resets == 3 + 2 + 1)
    timeline = Timeline(tmp_path / "pool.json")
    timeline.assert_sound()
    assert timeline.count("reset env 0") == 1
    assert timeline.count("reset a spare env") == 1
    assert timeline.count("answer call") == 1
    assert timeline.program["call"] == 1
    assert timeline.program["VectorEnv.reset on the host"] == 1


def test_only_what_is_not_ordinary_of_states_is_asked_for(make, tmp_path):
    envs = make(CountingEnv, 4, num_workers=2, states=30)
    envs.reset()
    with envs.trace(tmp_path / "pool.json"):
        state = envs.save()  # the first one has to be proved
        envs.save()
        envs.restore(state)
        envs.restore(state[::-1])  # the workers have each other's
    timeline = Timeline(tmp_path / "pool.json")
    timeline.assert_sound()
    for index in range(2):
        spans = timeline.worker(index).items()
        assert {what: count for what, count in spans if what.startswith(("answer", "save", "restore"))} == {
            "save": 2,
            "answer save": 1,
            "restore": 1,
            "answer export_states": 1,
            "answer receive_states": 1,
            "answer restore": 1,
        }


def test_trace_names_the_env_that_has_taken_a_slot(make, tmp_path):
    envs = make(partial(CountingEnv, 2), 1, spare_envs=1)
    envs.reset()
    with envs.trace(tmp_path / "pool.json"):
        timesteps = [envs.step([0]) for _ in range(6)]
    assert [timestep.obs[0, 2] for timestep in timesteps] == [1, 0] * 3  # steps in this episode
    assert [timestep.terminated.item() for timestep in timesteps] == [False, True] * 3
    assert Timeline(tmp_path / "pool.json").count("step env 0") == 6


@pytest.mark.usefixtures("patient_programs")  # else Python is asked, which has spans of its own
@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
def test_the_earliest_events_are_dropped_and_counted(make, transport, tmp_path):
    if transport == "ffi" and _native.reason_unavailable():
        pytest.skip(_native.reason_unavailable())
    envs = make(CountingEnv, 2, num_workers=1, transport=transport)
    full = run(envs, tmp_path / "full.json", 50)
    timeline = run(envs, tmp_path / "pool.json", 50, max_events=10)
    timeline.assert_sound()
    (worker,) = timeline.workers
    assert len(timeline.spans[worker]) == 10
    assert timeline.count("step env 1") > 0
    dropped = timeline.about["dropped"]
    assert dropped[worker] == sum(full.worker(0).values()) - 10
    assert timeline.remarks[worker] == [
        f"{dropped[worker]} earlier events were dropped; max_events= keeps more"
    ]
    programs = set(timeline.spans) - {worker}  # an XLA thread may run the steps after the main thread's reset
    assert sum(dropped.get(program, 0) for program in programs) + sum(timeline.program.values()) == sum(
        full.program.values()
    )
    assert sum(timeline.program.values()) <= 2 * 10  # of each way to the pool


def test_a_killed_workers_events_are_lost_and_the_file_says_so(drive, tmp_path):
    driver, path = drive(CountingEnv), tmp_path / "pool.json"
    driver.reset()
    with pytest.raises(jaxvec.WorkerDiedError):
        with driver.envs.trace(path):
            driver.step(times=3)
            driver.workers[0].kill()
            wait_until_dead(driver.workers[0])
            driver.step()
    timeline = Timeline(path)
    timeline.assert_sound()
    dead, alive = timeline.workers
    assert timeline.spans[dead] == []
    (why,) = timeline.about["lost"][dead]
    assert "worker 0 (envs 0, 1) was killed by SIGKILL" in why
    assert timeline.remarks[dead] == [f"events are lost: {why}"]
    assert dead in timeline.about["lost"]
    assert alive not in timeline.about["lost"]
    assert timeline.worker(1)["step env 3"] in (3, 4)


@in_two_ways
def test_a_worker_that_died_unnoticed_is_noticed_at_the_end(drive, tmp_path):
    driver, path = drive(CountingEnv), tmp_path / "pool.json"
    driver.reset()
    with driver.envs.trace(path):
        driver.step(times=3)
        driver.workers[1].kill()
        wait_until_dead(driver.workers[1])
    timeline = Timeline(path)
    assert list(timeline.about["lost"]) == [timeline.workers[1]]
    assert timeline.worker(0)["step env 0"] == 3
    with pytest.raises(jaxvec.PoolBrokenError, match="SIGKILL"):
        driver.step()


@pytest.mark.parametrize("options", [{}, {"envs_per_instance": 2}], ids=["envs", "batched"])
def test_a_record_is_not_lost_to_whoever_asks_again(make, options):
    fn = (lambda: SyncVectorEnv([CountingEnv] * 2)) if options else CountingEnv
    envs = make(fn, 2, backend="serial", **options)
    envs.reset(seed=0)
    pool_of(envs).workers.start_trace(100)
    envs.step([0, 0])
    first = probe.local_slice(envs).stop_trace()
    envs.step([0, 0])
    assert len(first.spans) in (1, 2)
    assert probe.local_slice(envs).stop_trace() == first


def test_the_worker_in_anothers_place_is_traced(drive, tmp_path):
    driver, path = drive(CountingEnv, on_fault=FREE), tmp_path / "pool.json"
    driver.reset()
    with driver.envs.trace(path):
        driver.step(times=3)
        driver.workers[0].kill()
        wait_until_dead(driver.workers[0])
        driver.step(times=4)
    timeline = Timeline(path)
    timeline.assert_sound()
    assert timeline.worker(1)["step env 2"] == 7
    new = timeline.worker(0)  # the first of its steps, and of each env's, was to end the episode that was cut
    assert 2 <= new["step env 0"] <= 3
    assert new["reset env 0"] == 1
    (why,) = timeline.about["lost"][timeline.workers[0]]
    assert "SIGKILL" in why
    again = tmp_path / "again.json"
    with driver.envs.trace(again):
        driver.step(times=2)
    assert Timeline(again).worker(0)["step env 0"] == 2
    assert Timeline(again).about["lost"] == {}


@pytest.mark.parametrize("retry", ["reset", "rebuild"])
def test_an_env_that_failed_is_traced_on(make, backend, retry, tmp_path):
    restart = jaxvec.Restart(retry=retry, max_restarts=None, rate=None)
    envs = make(failing("step", bad_luck), 4, backend=backend, on_fault=restart)
    envs.reset()
    with envs.trace(tmp_path / "pool.json"):
        for action in (0, 7, 0):
            envs.step(np.full(4, action))
    timeline = Timeline(tmp_path / "pool.json")
    timeline.assert_sound()
    assert timeline.count("step env 2") == 3  # with the step that raised
    assert timeline.count("reset env 2") == 1
    assert timeline.count("step env 1") == 3
    assert timeline.about["lost"] == {}


def test_an_env_that_breaks_the_pool_is_in_the_file(drive, tmp_path):
    driver, path = drive(failing("step", bad_luck)), tmp_path / "pool.json"
    driver.reset()
    with pytest.raises(jaxvec.EnvError, match="bad luck"):
        with driver.envs.trace(path):
            driver.step(times=3)
            driver.step(7)
    timeline = Timeline(path)
    timeline.assert_sound()
    assert timeline.about["lost"] == {}
    assert timeline.worker(1)["step env 2"] == 4
    driver.close()


def test_an_exception_in_the_block_is_raised_and_the_file_written(make, backend, tmp_path):
    envs = make(CountingEnv, 2, backend=backend)
    envs.reset()
    with pytest.raises(ZeroDivisionError):
        with envs.trace(tmp_path / "pool.json"):
            envs.step(np.zeros(2, int))
            1 / 0  # noqa: B018
    assert Timeline(tmp_path / "pool.json").count("step env 1") == 1
    envs.step(np.zeros(2, int))


def test_a_pool_that_is_closed_in_the_block(make, backend, tmp_path):
    envs = make(CountingEnv, 2, backend=backend)
    with envs.trace(tmp_path / "pool.json"):
        envs.reset()
        envs.close()
    timeline = Timeline(tmp_path / "pool.json")
    assert timeline.program["VectorEnv.reset on the host"] == 1
    for worker in timeline.workers:
        assert timeline.about["lost"][worker] == ["the pool was closed within the block"]
    with pytest.raises(jaxvec.PoolClosedError):
        with envs.trace(tmp_path / "pool.json"):
            pass


def test_what_the_program_does_before_and_after_is_not_traced(make, tmp_path):
    envs = make(CountingEnv, 2, num_workers=2)
    envs.reset()
    for _ in range(2):
        with envs.trace(tmp_path / "pool.json"):
            pass
        envs.step(np.zeros(2, int))
    timeline = Timeline(tmp_path / "pool.json")
    timeline.assert_sound()
    assert timeline.program == Counter()
    assert all(set(timeline.worker(index)) <= {"wait"} for index in range(2))


def test_each_thread_of_the_program_has_a_row(make, tmp_path):
    envs = make(CountingEnv, 4, num_workers=2, batch_size=2)
    envs.reset()
    with envs.trace(tmp_path / "pool.json"):
        first = envs.recv().info["env_id"]
        sender = threading.Thread(target=envs.send, args=(np.zeros(2, int), first), name="the sender")
        sender.start()
        sender.join()
        envs.recv()
    timeline = Timeline(tmp_path / "pool.json")
    timeline.assert_sound()
    programs = {name: spans for name, spans in timeline.spans.items() if name.startswith("program")}
    assert len(programs) == 2
    assert sorted(len([s for s in spans if "recv" in s["name"]]) for spans in programs.values()) == [0, 2]


def test_one_trace_at_a_time(make, tmp_path):
    envs = make(CountingEnv, 2)
    with envs.trace(tmp_path / "pool.json"):
        with pytest.raises(RuntimeError, match=r"pool \d+ is being traced already; end that trace first"):
            with envs.trace(tmp_path / "second.json"):
                pass
        envs.reset()
    assert Timeline(tmp_path / "pool.json").count("reset env 1") == 1
    assert not (tmp_path / "second.json").exists()


def test_bad_arguments_are_told_before_anything_runs(make, tmp_path):
    envs = make(CountingEnv, 2)
    cases = [
        (tmp_path / "none" / "pool.json", {}, FileNotFoundError, r"there is no folder .*none; make it first"),
        (tmp_path, {}, IsADirectoryError, r"is a folder; name a file in it"),
        (
            tmp_path / "pool.json",
            {"max_events": 0},
            ValueError,
            "max_events must be an integer of at least 1",
        ),
    ]
    for path, options, error, match in cases:
        with pytest.raises(error, match=match):
            with envs.trace(path, **options):
                pytest.fail("the block ran")
    assert os.listdir(tmp_path) == []
    envs.reset()


def test_jax_profiler_sees_the_calls_of_the_host(make, tmp_path):
    envs = make(CountingEnv, 2, transport="io_callback")
    with jax.profiler.trace(tmp_path):
        run(envs, tmp_path / "pool.json", 5)
    (profile,) = tmp_path.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "jaxvec.step (io_callback)" for event in events) == 5


def test_dropped_trace_events_are_counted_once_across_threads():
    spans = [Span("jaxvec.step", 0, 1_000, thread) for thread in (1, 2)]
    built = build_timeline(
        [Trace(spans, dropped=3), Trace([], dropped=4)],
        [Trace([], dropped=5)],
        [(0, 1)],
        pool_id=1,
        epoch_ns=0,
        began_ns=0,
        ended_ns=1_000,
    )
    assert list(built["otherData"]["dropped"].values()) == [7, 5]
    remarks = [event["name"] for event in built["traceEvents"] if event["ph"] == "i"]
    assert [remark.split()[0] for remark in remarks] == ["7", "5"]
