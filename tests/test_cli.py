"""The command line: what it measures, concludes, checks and prints, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import pytest
from scripts import end, gone

import jaxvec
from jaxvec.callbacks import _ffi
from jaxvec.cli import _bench, _progress, _systems, _verdict
from jaxvec.cli._bench_setup import BenchSetup, obs_bytes, obs_leaves
from jaxvec.cli._command_line import COMMANDS, main
from jaxvec.cli._measure import _grid, default_workers
from jaxvec.cli._records import Bare, Breakdown, Measurement, Sample, Variant
from jaxvec.cli._target import Target
from jaxvec.cli._toys import BareLoop, NoOpEnv
from jaxvec.testing import CountingEnv, NestedEnv, check_env

ENVS = '''
import os, signal, time
import gymnasium
import numpy as np
from gymnasium import spaces

class Env(gymnasium.Env):
    """Computes for `ms` a step, however busy the machine is, and returns `size` bytes."""
    action_space = spaces.Discrete(2)
    def __init__(self, ms=0.0, size=4):
        print("an env says hello")
        self.observation_space = spaces.Box(0, 255, (size,), np.uint8)
        self.ms = ms
        self.steps = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.uint8), {}
    def step(self, action):
        self.steps += 1
        until = time.thread_time() + self.ms / 1e3
        while self.ms and time.thread_time() < until:
            pass
        return np.zeros(self.observation_space.shape, np.uint8), 1.0, False, False, {}

class Steady(Env):
    """Costs next to nothing but bytes."""
    def __init__(self, size):
        super().__init__(size=size)
        self.obs = np.zeros(size, np.uint8)
    def step(self, action):
        return self.obs, 1.0, False, False, {}

class Failing(Env):
    def step(self, action):
        if self.steps == 150:
            raise KeyError("no such room")
        return super().step(action)

class Lacking(Env):
    def __init__(self):
        import no_such_simulator

class Uninstalled(Env):
    def __init__(self):
        raise gymnasium.error.DependencyNotInstalled("pip install no-such-simulator")

class Unseeded(Env):
    def step(self, action):
        obs, *rest = super().step(action)
        return np.random.default_rng().integers(0, 256, obs.shape, np.uint8), *rest

class Wide(Env):
    def step(self, action):
        return np.zeros(3, np.uint8), 1.0, False, False, {}

class Outside(Env):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (2,), np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.full(2, 3.0, np.float32), 1.0, False, False, {}

class Double(Outside):
    def step(self, action):
        return np.full(2, 0.5), 1.0, False, False, {}

class Texty(Env):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Text(5)

class Waiting(Env):
    """Says who steps it, and never returns."""
    def step(self, action):
        os.write(2, b"stepping %d %d\\n" % (os.getpid(), os.getppid()))
        signal.pause()

def make_env(size=4):
    return Env(ms=2.0, size=size)

three = 3
'''

QUICK = ["--num-envs", "2", "--num-workers", "1", "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Puts each test in a folder of its own, with the package `my_package.envs`."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "envs.py").write_text(ENVS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.fixture
def run(capsys):
    """Yields `run(words...)`, which returns exit code, stdout and stderr."""

    def run(*words):
        code = main(words)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


# --- the verdict, on records made by hand ----------------------------------------------------

BARE = Bare(
    one=100_000,
    all=200_000,
    copies=2,
    core_share=1.0,
    build_seconds=0.001,
    step_us=10,
    step_us_median=9,
    step_us_p99=20,
    reset_us=0,
    reset_share=0,
)
BREAKDOWN = Breakdown(
    num_envs=64,
    num_workers=2,
    step_us=400,
    bare_us=320,
    no_op_us=50,
    flat_us=40,
    empty_us=30,
    single_us=20,
    callback_us=0,
    straggling=1.1,
    obs_bytes=16,
    num_leaves=2,
    memcpy_us=1,
)
FOUND = Measurement(
    env="Env-v0",
    kwargs={},
    cores=2,
    load=0.2,
    platform="cpu",
    transport="ffi",
    rounds=5,
    seconds=0.2,
    bare=BARE,
    samples=(Sample(64, 1, 90_000, 80_000, 0.9), Sample(64, 2, 160_000, 120_000, 0.8)),
    breakdown=BREAKDOWN,
)


def found(*, bare=None, variants=(), load=0.2, **breakdown):
    return dataclasses.replace(
        FOUND,
        load=load,
        bare=dataclasses.replace(BARE, **bare or {}),
        breakdown=dataclasses.replace(BREAKDOWN, **breakdown),
        variants=variants,
    )


def test_the_parts_are_what_each_cheaper_pool_lacks():
    parts = _verdict.parts(BREAKDOWN)
    assert parts == {"env": 320, "dispatch": 20, "python": 20, "memory": 10, "waiting": 30}
    assert sum(parts.values()) == BREAKDOWN.step_us


def test_a_callback_is_python_and_no_hand_off():
    parts = _verdict.parts(dataclasses.replace(BREAKDOWN, single_us=90, empty_us=100, callback_us=70))
    assert (parts["dispatch"], parts["python"]) == (20, 70 + 10 + 10)


def test_noise_makes_no_part_negative():
    noisy = dataclasses.replace(BREAKDOWN, no_op_us=10, flat_us=12, empty_us=15, single_us=18, callback_us=19)
    assert min(_verdict.parts(noisy).values()) == 0


@pytest.mark.parametrize(
    ("changes", "limit", "advice"),
    [
        ({}, "env", "faster env.step"),
        ({"bare": {"core_share": 0.05}}, "env", "computes for 5% .* more workers than cores"),
        ({"bare_us": 5, "step_us": 60}, "dispatch", "more num_envs"),
        ({"bare_us": 5, "step_us": 500, "no_op_us": 450}, "python", "2 arrays .* fewer and larger"),
        (
            {"bare_us": 5, "step_us": 200, "callback_us": 90, "single_us": 100, "empty_us": 110},
            "python",
            'transport="ffi"',
        ),
        ({"bare_us": 5, "step_us": 900, "flat_us": 800, "obs_bytes": 10**6}, "memory", "1,000,000 bytes"),
        ({"step_us": 1000, "straggling": 1.7}, "waiting", "1.70 times as long"),
    ],
)
def test_the_limit_is_the_largest_part_and_has_its_own_advice(changes, limit, advice):
    verdict = _verdict.judge(found(**changes))
    assert verdict.limit == limit
    assert re.search(advice, verdict.advice[0])
    assert verdict.of_limit == 0.8


def test_slow_resets_are_worth_a_word():
    (_, said) = _verdict.judge(found(bare={"reset_share": 0.4, "reset_us": 5_000})).advice
    assert "resets take 40% of the env's time, 5,000 us each" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"load": 1.4}, r"busy \(load 1\.4 on 2 cores\)"),
        ({"bare": {"all": 118_000}}, "2 loops together are only 1.18 times as fast as one"),
        ({"bare": {"all": 118_000, "core_share": 0.1}}, None),  # they wait, and need no core
        ({"bare": {"all": 190_000, "copies": 8}}, None),  # more than there are cores
    ],
)
def test_a_busy_or_shared_machine_is_told(changes, said):
    doubts = _verdict.judge(found(**changes)).doubts
    assert len(doubts) == (said is not None)
    assert said is None or re.search(said, doubts[0])


@pytest.mark.parametrize(
    ("from_us", "said"),
    [(0.2, "for a policy on an accelerator:"), (413, "that takes more than 413 us for 64 envs:")],
)
def test_the_report_counts_in_plain_words(from_us, said):
    verdict = dataclasses.replace(
        _verdict.judge(found(num_workers=1, load=9.0)), overlapping={"num_envs": 64}, overlap_from_us=from_us
    )
    text = "\n".join(_bench._report(found(num_workers=1), verdict, Target("Env-v0", "Env-v0", {}), None))
    assert "A step of 64 envs on 1 worker takes 400 us" in text
    assert "2 such loops, a process each        200,000   the limit" in text
    assert said in text
    assert "note: other programs keep this machine busy (load 9.0 on 2 cores)" in text


def test_the_best_pool_has_no_more_workers_and_envs_than_it_needs():
    samples = [
        Sample(16, 1, 70, 1, 1),
        Sample(64, 1, 98, 1, 1),
        Sample(256, 1, 97, 1, 1),
        Sample(64, 2, 100, 1, 1),
    ]
    assert _verdict.best(samples) == samples[1]
    assert _verdict.best(samples[2:]) == samples[2]
    assert _verdict.best([samples[0], samples[3]]) == samples[3]


def test_variants_are_recommended_only_for_a_gain():
    ready, spare = (
        Variant("first-ready", {"batch_size": 16}, 1.5),
        Variant("spare envs", {"spare_envs": 8}, 1.2),
    )
    base = {"num_envs": 64, "num_workers": 2}
    assert _verdict.judge(found(variants=(ready, spare))).settings == base | {"batch_size": 16}
    assert _verdict.judge(found(variants=(spare,))).settings == base | {"spare_envs": 8}
    assert _verdict.judge(found(variants=(dataclasses.replace(spare, ratio=1.05),))).settings == base
    assert _verdict.judge(found()).overlapping is None


@pytest.mark.parametrize(("ratio", "from_us"), [(0.5, 400), (1.0, 0), (1.3, 0)])
def test_halves_win_once_the_policy_takes_as_long_as_they_lose(ratio, from_us):
    halves = Variant("halves", {"batch_size": 32, "recv_order": "sent"}, ratio)
    verdict = _verdict.judge(found(variants=(halves,)))
    assert verdict.overlapping == {"num_envs": 64, "num_workers": 2, "batch_size": 32, "recv_order": "sent"}
    assert verdict.overlap_from_us == from_us
    assert "batch_size" not in verdict.settings


def test_straggling_is_the_slowest_share_over_the_mean():
    rng = np.random.default_rng(0)
    even, slow = np.full(100, 1e-3), np.full(100, 10e-3)
    wild = np.where(rng.random(1000) < 0.1, 10e-3, 1e-3)
    assert _verdict.straggling([even], 64, 4) == 1
    assert _verdict.straggling([even, slow], 2, 2) == pytest.approx(10 / 5.5)
    assert 1.5 < _verdict.straggling([wild], 4, 4) < 4
    assert _verdict.straggling([wild], 256, 4) < _verdict.straggling([wild], 16, 4)  # sums even out


def test_envs_that_wait_get_more_workers_than_cores():
    assert default_workers(2, 1.0) == [1, 2]
    assert default_workers(8, 1.0) == [1, 2, 4, 8]
    assert default_workers(2, 0.1) == [1, 2, 4, 8]
    assert default_workers(1, 1.0) == [1]


def test_each_pool_that_is_tried_has_an_env_for_each_worker():
    setup = SimpleNamespace(request=SimpleNamespace(num_envs=(2, 3), num_workers=(1, 2, 3)))
    grid, left_out = _grid(setup, cores=2, core_share=1.0, build=0.0)
    assert grid == [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]
    assert left_out == ("2 envs on 3 workers: a worker needs an env",)


# --- measuring -------------------------------------------------------------------------------


# What things cost on the machine that `modelled` makes of this one.
HAND_OFF_US, LEAF_US, BYTE_US, CALLBACK_US = 50.0, 2.0, 0.001, 400.0


@pytest.fixture
def modelled(monkeypatch):
    """Yields `modelled(env_us)`, from which on `bench` measures a machine that is never busy.

    It makes all pools, loops and programs, and runs each once. But how long a step takes follows from what
    was run: from the envs, workers, bytes and arrays that it really had.
    """

    def modelled(env_us):
        def cost(name, system, transport):
            """Returns how many envs step together, and the microseconds of it."""
            if name in ("bare", "one", "all"):
                return 1, env_us / system.envs.num_workers
            if name == "callback":
                return system._num_envs, CALLBACK_US
            envs = system.__self__.envs
            leaves = len(obs_leaves(envs.spec)) + len(envs.spec.action_leaves)
            us = HAND_OFF_US + envs.batch_size * (LEAF_US * leaves + BYTE_US * obs_bytes(envs.spec))
            if name not in ("no_op", "flat", "empty", "single"):
                us += envs.batch_size * env_us / envs.num_workers
            return envs.batch_size, us + CALLBACK_US * (transport == "io_callback")

        def turns(setup, systems, what):
            found = {}
            for name, system in systems.items():
                num_envs, us = cost(name, system, setup.request.transport)
                found[name] = dataclasses.replace(system(1e-3), rate=num_envs / us * 1e6)
            return found

        monkeypatch.setattr(BenchSetup, "turns", turns)

    return modelled


def test_bench_finds_that_a_slow_env_limits_itself(run):
    words = ["my_package.envs:Env", "--kwargs", '{"ms": 2}', *QUICK, "--json"]
    code, out, err = run("bench", *words)
    record = json.loads(out)
    assert (code, err.replace("an env says hello\n", "")) == (0, "")
    assert {*record} == {"schema", "measurement", "verdict", "make", "make_overlapping"}
    assert record["schema"] == "jaxvec.bench/1"
    measured, verdict = record["measurement"], record["verdict"]
    assert (measured["env"], measured["kwargs"]) == ("my_package.envs:Env", {"ms": 2})
    # More than 2 ms a step can't be; less can, where the machine is busy.
    assert 0 < measured["bare"]["one"] <= 500
    assert measured["bare"]["step_us_median"] > 1000
    assert [(s["num_envs"], s["num_workers"]) for s in measured["samples"]] == [(2, 1)]
    assert all(0 < sample["scan"] <= 500 and 0 < sample["host"] <= 500 for sample in measured["samples"])
    assert measured["breakdown"]["step_us"] >= 4000
    assert measured["breakdown"]["bare_us"] >= 4000
    # Of the other parts, a busy machine can make what it likes.
    assert verdict["parts"] == _verdict.parts(Breakdown(**measured["breakdown"]))
    assert verdict["parts"][verdict["limit"]] == max(verdict["parts"].values())
    assert record["make"] == (
        "import my_package.envs; envs = jaxvec.make(my_package.envs.Env, num_envs=2, num_workers=1, ms=2)"
    )
    assert run_line(record["make"]) == (2, 1, (2, 4))
    assert run_line(record["make_overlapping"]) == (2, 1, (1, 4))


def parts_of(record, env_us):
    """Returns what a modelled step of two envs on one worker is made of."""
    measured = record["measurement"]
    rest = measured["breakdown"]["obs_bytes"] - 1
    callback = CALLBACK_US * (measured["transport"] == "io_callback")
    first = second = 2 * LEAF_US + BYTE_US  # with an observation of one byte
    return {
        "env": 2 * env_us,
        "dispatch": HAND_OFF_US + first,
        "python": callback + second,
        "memory": 2 * rest * BYTE_US,
        "waiting": 0,
    }


# The one limit is the slow env's own, whatever its observations cost; the other that of its observations.
@pytest.mark.parametrize(
    ("transport", "env_us", "limit"), [("auto", 1, "memory"), ("io_callback", 2_000, "env")]
)
def test_bench_measures_what_large_observations_cost(run, modelled, free_choice, transport, env_us, limit):
    modelled(env_us)
    words = ["my_package.envs:Steady", "--kwargs", '{"size": 400000}', *QUICK, "--json"]
    code, out, _ = run("bench", *words, "--transport", transport)
    assert code == 0
    record = json.loads(out)
    parts = record["verdict"]["parts"]
    assert parts["memory"] > 0
    assert parts == pytest.approx(parts_of(record, env_us), abs=1e-6)
    assert record["verdict"]["limit"] == limit
    (sample,) = record["measurement"]["samples"]
    assert 2e6 / sample["scan"] == pytest.approx(sum(parts.values()))
    breakdown = record["measurement"]["breakdown"]
    assert (breakdown["obs_bytes"], breakdown["num_leaves"]) == (400_000, 2)
    assert (breakdown["callback_us"] > 0) == (record["measurement"]["transport"] == "io_callback")
    assert breakdown["memcpy_us"] > 0


def run_line(line):
    """Runs what bench recommends; returns the pool's size and observations."""
    scope = {"jaxvec": jaxvec}
    exec(line, scope)
    with scope["envs"] as envs:
        return envs.num_envs, envs.num_workers, envs.reset(seed=0).obs.shape


def test_what_bench_recommends_can_be_run(run, monkeypatch):
    halves = Variant("halves", {"batch_size": 1, "recv_order": "sent"}, 1.0)
    measured = dataclasses.replace(found(variants=(halves,)), samples=(Sample(2, 1, 500, 400, 0.9),))
    monkeypatch.setattr(_bench, "measure", lambda target, request, progress: measured)
    code, out, _ = run("bench", "CartPole-v1", "--kwargs", '{"render_mode": "rgb_array"}', *QUICK, "--json")
    assert code == 0
    record = json.loads(out)
    assert record["make"].endswith('("CartPole-v1", num_envs=2, num_workers=1, render_mode="rgb_array")')
    assert run_line(record["make"]) == (2, 1, (2, 4))
    assert run_line(record["make_overlapping"]) == (2, 1, (1, 4))


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}], ids=["all", "first-ready"])
def test_a_rate_is_of_the_envs_that_stepped(make, monkeypatch, options):
    with contextlib.ExitStack() as stack:
        envs = make(CountingEnv, 4, num_workers=1, **options)
        pool = _systems.Pool(stack, envs, length=3)
        monkeypatch.setattr(_systems, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
        assert pool.scan(0).rate == 3 * envs.batch_size  # in a second by this clock


def test_a_no_op_env_and_a_bare_loop_keep_the_contract():
    nested = NestedEnv()
    nested.observation_space.seed(0)
    no_op = NoOpEnv(nested.observation_space, nested.action_space)
    check_env(lambda: no_op)
    loop = BareLoop(lambda: CountingEnv(10))
    assert loop.loop(0.001).steps > 0
    times = loop.times(0)
    assert len(times.steps) == 10
    assert len(times.resets) == 1


# --- check -----------------------------------------------------------------------------------

STATUSES = {
    "my_package.envs:Env": ["ok", "ok", "ok", "ok", "ok", "ok"],
    "my_package.envs:Unseeded": ["ok", "ok", "ok", "FAIL", "ok", "FAIL"],
    "my_package.envs:Wide": ["ok", "ok", "FAIL", "not run", "not run", "ok"],  # of which Gymnasium only warns
    "my_package.envs:Outside": ["ok", "ok", "FAIL", "not run", "not run", "ok"],
    "my_package.envs:Double": ["ok", "ok", "FAIL", "not run", "not run", "ok"],
    "my_package.envs:Texty": ["ok", "FAIL", "not run", "not run", "not run", "FAIL"],
    "builtins:dict": ["FAIL", "not run", "not run", "not run", "not run", "not run"],
}


@pytest.mark.parametrize("env", STATUSES)
def test_check_lists_what_holds_and_what_does_not(run, env):
    code, out, _ = run("check", env, "--json")
    record = json.loads(out)
    assert {*record} == {"schema", "env", "kwargs", "ok", "checks"}
    assert (record["schema"], record["env"], record["kwargs"]) == ("jaxvec.check/1", env, {})
    checks = record["checks"]
    assert [check["status"].replace("warn", "ok") for check in checks] == STATUSES[env]
    assert all(bool(check["reason"]) == (check["status"] in ("FAIL", "warn")) for check in checks)
    assert all(bool(check["warnings"]) for check in checks if check["status"] == "warn")
    sound = "FAIL" not in STATUSES[env]
    assert (record["ok"], code) == (sound, 0 if sound else 1)


def test_check_tells_people_the_same(run):
    code, out, _ = run("check", "my_package.envs:Unseeded")
    assert code == 1
    assert "ok       the constructor returns a gymnasium.Env\n" in out
    assert "FAIL     the same seed and actions give the same data\n         obs: " in out
    assert out.endswith("my_package.envs:Unseeded: 2 of 6 checks failed\n")


def test_an_env_that_uses_its_memory_again_is_only_warned_of(run):
    code, out, _ = run("check", "my_package.envs:Steady", "--kwargs", '{"size": 4}')
    assert code == 0
    assert "FAIL" not in out
    assert out.count("Gymnasium's check_env") == 1
    minds = tuple(map(int, gymnasium.__version__.split(".")[:2])) >= (1, 4)  # before, it did not look
    assert out.endswith(f"my_package.envs:Steady: ok{', with 1 warning' if minds else ''}\n")
    assert ("A pool doesn't mind." in out) == minds


def test_what_is_outside_its_space_is_told_with_its_dtype(run):
    code, out, _ = run("check", "my_package.envs:Double")
    assert code == 1
    assert "obs: array([0.5, 0.5]) (float64) is not in Box(0.0, 1.0, (2,), float32)" in out


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["bench", "check", "trace"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Nope-v0"], "Nope-v0: Environment `Nope` doesn't exist"),
        (["CartPole-v99"], "CartPole-v99: Environment version `v99`"),
        (["no_such_module:f"], "there is no module 'no_such_module' here"),
        (["my_package.envs:nothing"], "module 'my_package.envs' has no 'nothing'"),
        (["my_package.envs:three"], "is a int, not a callable"),
        (["my_package.envs:Lacking"], "the env lacks a package: No module named 'no_such_simulator'"),
        (["my_package.envs:Uninstalled"], "the env lacks a package: pip install no-such-simulator"),
        (["CartPole-v1", "--kwargs", "{x"], "--kwargs is not valid JSON"),
        (["CartPole-v1", "--kwargs", "[1]"], "--kwargs must be a JSON object"),
        (["CartPole-v1", "--kwargs", '{"num_envs": 1}'], "jaxvec.make has an argument 'num_envs', too"),
        (["my_package.envs:Env", "--kwargs", '{"width": 1}'], "unexpected keyword argument 'width'"),
    ],
)
def test_what_can_not_be_done_is_told_in_a_line(run, command, words, said):
    code, out, err = run(command, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"python -m jaxvec {command}: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["bench"],
        ["bench", "CartPole-v1", "--num-envs", "0"],
        ["bench", "CartPole-v1", "--num-workers", "two"],
        ["bench", "CartPole-v1", "--seconds", "0"],
        ["bench", "CartPole-v1", "--transport", "pigeon"],
        ["trace", "CartPole-v1", "--num-steps", "0"],
    ],
)
def test_words_that_are_not_understood_end_with_the_usage(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: python -m jaxvec" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-envs", "1", "--num-workers", "2"], "more workers than envs"),
        (["--plot", "speed.txt"], "speed.txt should end in one of .png"),
        (["--plot", "nowhere/speed.png"], "there is no folder nowhere"),
    ],
)
def test_bench_refuses_before_it_measures(run, words, said):
    code, _, err = run("bench", "my_package.envs:Env", *words, "--seconds", "0.01")
    assert code == 2
    assert said in err


def test_a_plot_without_matplotlib_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run("bench", "CartPole-v1", "--plot", "speed.png")
    assert code == 2
    assert re.search('pip install .*"matplotlib>=', err)
    assert not Path("speed.png").exists()


def test_a_transport_that_can_not_be_had_says_why(run, monkeypatch, free_choice):
    monkeypatch.setattr(_ffi, "reason_unavailable", lambda: "the native library was not built")
    code, _, err = run("bench", "my_package.envs:Env", *QUICK, "--transport", "ffi")
    assert (code, err.splitlines()[-1]) == (2, "python -m jaxvec bench: the native library was not built")


@pytest.mark.parametrize("transport", ["auto", "io_callback"])
def test_an_env_that_fails_on_the_way_is_an_error_of_its_own(run, transport):
    code, out, err = run("bench", "my_package.envs:Failing", *QUICK, "--transport", transport)
    assert (code, out) == (1, "")
    assert "raised KeyError in " in err
    assert "no such room" in err
    assert "JaxRuntimeError" not in err


def test_ctrl_c_ends_it_cleanly():
    words = ["bench", "my_package.envs:Waiting"]
    process = subprocess.Popen(
        # A shell may start its jobs without SIGINT.
        [sys.executable, "-c", f"{INTERRUPTIBLE}sys.exit(main({words}))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = iter(process.stderr.readline, "")
        line = next(line for line in lines if line.startswith("stepping"))
        assert int(line.split()[1]) == process.pid  # the first loop is here
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        end(process)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("python -m jaxvec bench: interrupted\n")
    assert "Traceback" not in err


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxvec.cli._command_line import main
"""


def test_ctrl_c_leaves_no_worker():
    words = ["check", "my_package.envs:Env", "--kwargs", '{"ms": 1}']
    source = f"""{INTERRUPTIBLE}
from jaxvec import testing
testing.check_env = lambda *args, **kwargs: None  # that runs here; we want the workers
from my_package import envs
envs.Env.step = envs.Waiting.step
import cloudpickle
cloudpickle.register_pickle_by_value(envs)
sys.exit(main({words}))"""
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = next(line for line in iter(process.stderr.readline, "") if line.startswith("stepping"))
        worker, parent = map(int, line.split()[1:])
        assert process.pid in (parent, psutil.Process(parent).ppid())  # there may be a fork server between
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=200)
    finally:
        end(process)
    assert process.returncode == 130
    assert gone([worker], timeout=200)  # an end to the wait; it is a moment


# --- trace -----------------------------------------------------------------------------------


def test_trace_writes_a_timeline_of_all_steps_and_says_what_they_went_into(run, tmp_path):
    words = ["my_package.envs:Env", "--num-envs", "4", "--num-workers", "2", "--num-steps", "7"]
    code, out, _ = run("trace", *words, "--out", str(tmp_path / "pool.json"), "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["num_envs"], found["num_workers"], found["num_steps"]) == (4, 2, 7)
    assert found["path"] == str(tmp_path / "pool.json")
    assert len(found["shares"]["workers"]) == 2
    events = json.loads((tmp_path / "pool.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("step env") for event in events) == 4 * 7
    code, out, _ = run("trace", *words, "--out", str(tmp_path / "again.json"))
    assert code == 0
    assert "worker 1 (envs 2-3): step" in out
    assert f"Written to {tmp_path / 'again.json'}" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "no/such/folder/pool.json"], "name a file in an existing folder"),
        (["--out", "."], "name a file in an existing folder"),
        (["--num-envs", "1", "--num-workers", "2"], "more workers than envs"),
    ],
)
def test_trace_refuses_before_it_runs(run, words, said):
    code, _, err = run("trace", "CartPole-v1", *words)
    assert code == 2
    assert said in err


# --- help, JSON, progress --------------------------------------------------------------------

EXAMPLES = [
    line.strip()
    for command in COMMANDS
    for line in command.details.splitlines()
    if line.startswith("  python -m jaxvec ")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_run(run, example):
    words = shlex.split(example)[3:]
    if "ALE/Pong-v5" in words and importlib.util.find_spec("ale_py") is None:
        assert run(*words)[0] == 2
        pytest.skip("ale_py is not installed, which the command says")
    code, out, _ = run(*words, *(QUICK if words[0] == "bench" else []))
    assert code == 0
    if "--json" in words:
        assert json.loads(out)["schema"] == f"jaxvec.{words[0]}/1"
    if words[0] == "bench" and "--json" not in words:
        assert "Limited by " in out
        assert "Recommended:\n  " in out
    if "--plot" in words:
        assert Path("speed.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_examples_exit_codes_and_the_shape_of_json(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command.name, "--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"jaxvec.{command.name}/1" in said
    assert f"python -m jaxvec {command.name}" in said
    assert "130  Ctrl-C" in said


def test_doctor_says_the_same_to_people_and_programs(run):
    (code, text, _), (_, record, _) = run("doctor"), run("doctor", "--json")
    found = json.loads(record)["found"]
    assert code == 0
    assert text == "".join(f"{what:15} {said}\n" for what, said in found.items())
    assert found["jaxvec"] == jaxvec.__version__


def test_a_folder_named_ray_is_not_ray(run, tmp_path, monkeypatch):
    """As Ray itself leaves one in /tmp. It can be imported from there, if Ray is not installed."""
    (tmp_path / "ray").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    installed = importlib.util.find_spec("ray.actor") is not None
    assert ("Ray is not installed" in run("doctor")[1]) == (not installed)
    if not installed:
        with pytest.raises(ImportError, match='backend="ray" needs Ray'):
            jaxvec.make("CartPole-v1", 2, backend="ray")
        sys.modules.pop("ray")  # the folder


def test_stdout_has_only_the_record_though_envs_print():
    done = subprocess.run(
        [sys.executable, "-m", "jaxvec", "check", "my_package.envs:Env", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert json.loads(done.stdout)["ok"]
    assert "an env says hello" in done.stderr


def test_a_reader_that_has_enough_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)  # as `head` does once it has its lines
    try:
        words = [sys.executable, "-m", "jaxvec", "doctor"]
        done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=200)
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("tqdm", [True, False])
def test_progress_shows_on_a_terminal_and_clears_its_line(monkeypatch, tqdm):
    monkeypatch.setattr(sys, "stderr", Terminal())
    if not tqdm:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with _progress.progress(quiet=False)("pools", 2) as advance:
        advance()
        advance()
    shown = sys.stderr.getvalue()
    assert "pools" in shown
    assert "2/2" in shown or tqdm  # which shows what it finds worth the time
    assert "\n" not in shown


def test_progress_is_quiet_for_programs(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert _progress.progress(quiet=True) is _progress.silent
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert _progress.progress(quiet=False) is _progress.silent
