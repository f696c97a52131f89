"""The command line: what it measures, concludes, checks and prints, and how it ends."""

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import psutil
import pytest
from support.scripts import end, gone

import jaxvec
from jaxvec import _native
from jaxvec.callbacks import _ffi
from jaxvec.cli import _bench
from jaxvec.cli._bench import Sample
from jaxvec.cli._main import COMMANDS, main
from jaxvec.testing import CountingEnv

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

class Orchard(Env):
    def reset(self, *, seed=None, options=None):
        self.apples = options["num_apples"]
        return super().reset(seed=seed)

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

class Global(Env):
    """Has one generator for all envs of a process, which each reset seeds."""
    generator = None
    def reset(self, *, seed=None, options=None):
        if seed is not None:
            Global.generator = np.random.default_rng(seed)
        return super().reset(seed=seed)
    def step(self, action):
        obs, *rest = super().step(action)
        return Global.generator.integers(0, 256, obs.shape, np.uint8), *rest

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
        self.observation_space = spaces.Sequence(spaces.Text(5))

class Masked(Env):
    """Allows one of three actions."""
    action_space = spaces.Discrete(3, start=1)
    key = "legal"
    def _info(self):
        return {self.key: np.arange(3) == self.steps % 3}
    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)[0], self._info()
    def step(self, action):
        assert self.action_space.contains(action)
        if action != 1 + self.steps % 3:
            raise ValueError(f"{action} is no legal move")
        return *super().step(action)[:4], self._info()

class UsuallyMasked(Masked):
    key = "action_mask"

class ManyMasked(Masked):
    """Allows one value of each of two numbers, and tells it as a flat mask, or as Gymnasium's tuple."""
    action_space = spaces.MultiDiscrete([3, 2], start=[1, 0])
    key = "action_mask"
    is_flat = True
    def _info(self):
        masks = np.arange(3) == self.steps % 3, np.arange(2) == 1
        return {self.key: np.concatenate(masks) if self.is_flat else masks}
    def step(self, action):
        assert self.action_space.contains(action)
        if action.tolist() != [1 + self.steps % 3, 1]:
            raise ValueError(f"{action} is no legal move")
        return *Env.step(self, action)[:4], self._info()

class ManyMaskedByATuple(ManyMasked):
    is_flat = False

class Late(Env):
    """Gets a generator in the course of an episode."""
    def step(self, action):
        if self.steps == 80:
            self.moves = (each for each in range(9))
        return super().step(action)

class Walking(Env):
    """Observes the order of a set of texts that it keeps."""
    def reset(self, *, seed=None, options=None):
        self.names = {f"name {n}" for n in range(9)}
        return super().reset(seed=seed)
    def places(self):
        return [int(name[5:]) for name in self.names]
    def step(self, action):
        obs, *others = super().step(action)
        number = sum(9**n * place for n, place in enumerate(self.places()))
        return (number % np.array([251, 241, 239, 233])).astype(np.uint8), *others

class WalkingViews(Walking):
    """Keeps a dict, and walks the intersection of its keys with others, which is a set."""
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.names = dict.fromkeys(sorted(self.names))
        return obs, info
    def places(self):
        return [int(name[5:]) for name in self.names.keys() & {*self.names}]

class OnlyOne(Env):
    """Stands for a simulator that a process can have once."""
    exists = False
    def __init__(self):
        if OnlyOne.exists:
            raise RuntimeError("cannot create multiple instances per process")
        super().__init__()
        OnlyOne.exists = True
    def close(self):
        OnlyOne.exists = False

class InJax(Env):
    def __init__(self):
        import jax
        super().__init__()

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


# --- what bench concludes, from records made by hand ------------------------------------------

FOUND = _bench.Measurement(
    cores=2,
    load=0.2,
    platform="cpu",
    seconds=0.2,
    one=100_000,
    all=200_000,
    copies=2,
    core_share=1.0,
    samples=(Sample(64, 1, 80_000, 90_000), Sample(64, 2, 120_000, 160_000)),
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"load": 1.4}, r"busy \(load 1\.4, usable cores 2\)"),
        ({"all": 148_000}, "2 loops together are only 1.48 times as fast as one"),
        ({"all": 148_000, "core_share": 0.1}, None),  # they wait, and need no core
        ({"all": 190_000, "copies": 8}, None),  # more than there are cores
        (
            {"samples": (Sample(64, 1, 250_000, 90_000),)},
            "a pool of 64 envs is faster than its bound, .* --seconds 1 measures longer",
        ),
        ({"reset_share": 0.5}, r"resets take 50% of the time; make\(\.\.\., spare_envs=1\)"),
        ({"reset_share": None}, "no episode ended in 2 s, .* --seconds 2 measures longer"),
        ({"left_out": (64, 256)}, "pools of 64, 256 envs were not measured; --num-envs 64 measures them"),
    ],
)
def test_a_busy_or_shared_machine_is_told(changes, said):
    notes = [*_bench.notes(dataclasses.replace(FOUND, **changes))]
    assert len(notes) == (said is not None)
    assert said is None or re.search(said, notes[0])


def test_the_report_has_rates_notes_and_the_line_to_copy():
    text = "\n".join(_bench.report(dataclasses.replace(FOUND, load=9.0), "Env-v0", "envs = ..."))
    assert re.search(r"2 loops in parallel \(upper bound here\) +200,000\n", text)
    assert re.search(r"64 +2 +160,000 +0\.80 +120,000 +0\.60\n", text)
    assert "note: other programs keep this machine busy (load 9.0" in text
    assert text.endswith("Recommended:\n  envs = ...")


def test_the_best_pool_has_no_more_workers_and_envs_than_it_needs():
    samples = [Sample(16, 1, 1, 70), Sample(64, 1, 1, 98), Sample(256, 1, 1, 97), Sample(64, 2, 1, 100)]
    assert _bench.best(samples) == samples[1]
    assert _bench.best(samples[2:]) == samples[2]
    assert _bench.best([samples[0], samples[3]]) == samples[3]


def test_envs_that_wait_get_more_workers_than_cores():
    assert _bench.default_workers(2, 1.0) == [1, 2]
    assert _bench.default_workers(8, 1.0) == [1, 2, 4, 8]
    assert _bench.default_workers(2, 0.1) == [1, 2, 4, 8]
    assert _bench.default_workers(1, 1.0) == [1]


# --- measuring -------------------------------------------------------------------------------


def test_bench_measures_an_env_alone_and_in_pools(run):
    words = ["my_package.envs:Env", "--kwargs", '{"ms": 2}', *QUICK, "--json"]
    code, out, err = run("bench", *words)
    record = json.loads(out)
    assert (code, err.replace("an env says hello\n", "")) == (0, "")
    assert {*record} == {"schema", "env", "kwargs", "measurement", "notes", "make"}
    assert record["schema"] == "jaxvec.bench/1"
    assert (record["env"], record["kwargs"]) == ("my_package.envs:Env", {"ms": 2})
    measured = record["measurement"]
    # More than 2 ms a step can't be; less can, where the machine is busy.
    assert 0 < measured["one"] <= 500
    assert [(s["num_envs"], s["num_workers"]) for s in measured["samples"]] == [(2, 1)]
    assert all(0 < sample["scan"] <= 500 and 0 < sample["host"] <= 500 for sample in measured["samples"])
    assert record["make"] == (
        "import my_package.envs; envs = jaxvec.make(my_package.envs.Env, num_envs=2, num_workers=1, ms=2)"
    )
    assert run_line(record["make"]) == (2, 1, (2, 4))


def test_each_pool_that_is_tried_has_an_env_for_each_worker(run):
    words = ["--num-envs", "2,3", "--num-workers", "1,3", "--seconds", "0.01", "--json"]
    _, out, _ = run("bench", "my_package.envs:Env", *words)
    samples = json.loads(out)["measurement"]["samples"]
    assert [(s["num_envs"], s["num_workers"]) for s in samples] == [(2, 1), (3, 1), (3, 3)]


def test_slow_envs_are_measured_in_small_pools(run):
    words = ["--kwargs", '{"ms": 40}', "--num-workers", "1", "--seconds", "0.01", "--json"]
    _, out, _ = run("bench", "my_package.envs:Env", *words)
    measured = json.loads(out)["measurement"]
    assert [(s["num_envs"], s["num_workers"]) for s in measured["samples"]] == [(1, 1)]
    assert measured["left_out"] == [16, 64, 256]


def run_line(line):
    """Runs what bench recommends; returns the pool's size and observations."""
    scope = {"jaxvec": jaxvec}
    exec(line, scope)
    with scope["envs"] as envs:
        return envs.num_envs, envs.num_workers, envs.reset(seed=0).obs.shape


def test_what_bench_recommends_can_be_run(run, monkeypatch):
    measured = dataclasses.replace(FOUND, samples=(Sample(2, 1, 400, 500),))
    monkeypatch.setattr(_bench, "measure", lambda make, **options: measured)
    code, out, _ = run("bench", "CartPole-v1", "--kwargs", '{"render_mode": "rgb_array"}', *QUICK, "--json")
    assert code == 0
    line = json.loads(out)["make"]
    assert line.endswith('("CartPole-v1", num_envs=2, num_workers=1, render_mode="rgb_array")')
    assert run_line(line) == (2, 1, (2, 4))


def test_a_rate_is_of_the_envs_that_stepped(make, monkeypatch):
    host, scan = _bench._host_and_scan(make(CountingEnv, 4, num_workers=1), length=3)
    monkeypatch.setattr(_bench, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    assert (host(0), scan(0)) == (4, 3 * 4)  # in a second by this clock


def test_a_bare_loop_resets_its_env_and_returns_its_rate():
    class Env(CountingEnv):
        resets = 0

        def reset(self, **kwargs):
            self.resets += 1
            return super().reset(**kwargs)

    env = Env(10)
    rate, core_share, reset_share = _bench.bare_loop(env, 0.01)
    assert env.resets > 1
    assert 0 < reset_share < 1
    assert rate > 0
    assert 0 < core_share <= 1.5  # of several threads' time, and clocks that differ


def test_a_bare_loop_waits_for_an_end_of_an_episode(monkeypatch):
    clock = SimpleNamespace(perf_counter=itertools.count().__next__, process_time=lambda: 0.0)
    monkeypatch.setattr(_bench, "time", clock)
    assert _bench.bare_loop(CountingEnv(7), 3, patience=100)[2] is not None
    assert _bench.bare_loop(CountingEnv(7), 3)[2] is None
    assert _bench.bare_loop(CountingEnv(1000), 3, patience=4)[2] is None


def test_measurements_of_a_pool_go_on_with_its_episodes(make):
    envs = make(CountingEnv, 2, num_workers=1)
    host, scan = _bench._host_and_scan(envs, 3)
    before = envs.stats().total
    assert (before.steps, before.resets) == (6, 2)  # of the compilation
    host(0)
    scan(0)
    assert (envs.stats().total.steps, envs.stats().total.resets) == (14, 2)


# --- check -----------------------------------------------------------------------------------

STATUSES = {
    "my_package.envs:Env": ["ok"] * 9,
    "my_package.envs:Unseeded": ["ok", "ok", "ok", "FAIL", "ok", "not run", "ok", "ok", "FAIL"],
    "my_package.envs:Global": ["ok", "ok", "ok", "ok", "ok", "FAIL", "ok", "ok", "ok"],
    "my_package.envs:Wide": ["ok", "ok", "FAIL", *["not run"] * 5, "ok"],  # of which Gymnasium only warns
    "my_package.envs:Outside": ["ok", "ok", "FAIL", *["not run"] * 5, "ok"],
    "my_package.envs:Double": ["ok", "ok", "FAIL", *["not run"] * 5, "ok"],
    "my_package.envs:Texty": ["ok", "FAIL", *["not run"] * 6, "FAIL"],
    "my_package.envs:UsuallyMasked": ["ok"] * 9,
    "my_package.envs:OnlyOne": [*["ok"] * 5, "FAIL", "ok", "ok", "ok"],
    "builtins:dict": ["FAIL", *["not run"] * 8],
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


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            "Unseeded",
            r"^ok       the constructor returns a gymnasium\.Env\n(?s:.*)"
            r"\nFAIL     equal seeds and actions give equal data\n         obs: (?s:.*)"
            r"\nmy_package\.envs:Unseeded: 2 of 9 checks failed, with 1 warning\n$",
        ),
        (
            "Global",
            r"obs: env 0 returned \[.*\] at step 1 in one process with env 1, but \[.*\] alone"
            r"(?s:.*)num_workers=num_envs",
        ),
        (
            "OnlyOne",
            r"ok +it runs in a worker process\nFAIL +two envs of one process(?s:.*)num_workers=num_envs",
        ),
        ("Double", r"obs: array\(\[0\.5, 0\.5\]\) \(float64\) is not in Box\(0\.0, 1\.0, \(2,\), float32\)"),
    ],
)
def test_check_tells_people_the_same(run, env, said):
    code, out, _ = run("check", f"my_package.envs:{env}")
    assert code == 1
    assert re.search(said, out)


def test_check_takes_legal_actions_from_the_mask(run):
    words = "check", "my_package.envs:Masked"
    code, out, _ = run(*words, "--mask-info", "legal")
    assert (code, "FAIL" in out) == (0, False)
    assert "is no legal move" in run(*words)[1]
    code, _, err = run(*words, "--mask-info", "mask")
    assert code == 2
    assert "no mask of Discrete(3, start=1) at 'mask', only ['legal']" in err


def test_check_resets_with_options(run):
    words = "check", "my_package.envs:Orchard"
    code, out, _ = run(*words, "--reset-options", '{"num_apples": 3}')
    assert (code, "FAIL" in out) == (0, False), out
    assert "or pass --reset-options JSON" in run(*words)[1]


@pytest.mark.parametrize("env", ["ManyMasked", "ManyMaskedByATuple"])
def test_check_takes_legal_numbers_from_the_masks_of_a_multi_discrete_action(run, env):
    code, out, _ = run("check", f"my_package.envs:{env}")
    assert (code, "FAIL" in out) == (0, False), out


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("Late", r"attribute Late\.moves"),
        ("InJax", "Each worker imports JAX"),
        ("Walking", r"obs differs\. .*in the order of a set"),
        ("WalkingViews", r"obs: in another process, which got the state, the env returned [\s\S]*sort it"),
    ],
)
def test_check_warns_of_jax_and_of_states_that_are_not_exact(run, env, said):
    code, out, _ = run("check", f"my_package.envs:{env}")
    assert code == 0
    assert "its states can be saved" in out
    assert re.search(rf"(?m)^warn (?s:.*){said}", out)


def test_an_env_that_uses_its_memory_again_is_only_warned_of(run):
    code, out, _ = run("check", "my_package.envs:Steady", "--kwargs", '{"size": 4}')
    assert code == 0
    assert "FAIL" not in out
    assert out.count("Gymnasium's check_env") == 1
    minds = tuple(map(int, gymnasium.__version__.split(".")[:2])) >= (1, 4)  # before, it did not look
    assert out.endswith(f"my_package.envs:Steady: ok{', with 1 warning' if minds else ''}\n")
    assert ("jaxvec copies observations, so its pools work with this env." in out) == minds


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["bench", "check"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Nope-v0"], "Nope-v0: Environment `Nope` doesn't exist"),
        (["CartPole-v99"], "CartPole-v99: Environment version `v99`"),
        (["no_such_module:f"], "there is no module named 'no_such_module'; start in the folder of no_such"),
        (["my_package.envs.Steady"], "write my_package.envs:Steady, or MODULE:ID"),
        (["my_package.envs.Steady"], "Import the class and pass it: jaxvec.make(Steady, …)"),
        (["my_package.envs:nothing"], "module 'my_package.envs' has no 'nothing'"),
        (["my_package.envs:three"], "three must be a callable that returns an env, not of type int"),
        (
            ["my_package.envs:Lacking"],
            "a package of the env is not installed: No module named 'no_such_simulator'",
        ),
        (
            ["my_package.envs:Uninstalled"],
            "a package of the env is not installed: pip install no-such-simulator",
        ),
        (["CartPole-v1", "--kwargs", "{x"], "--kwargs is not valid JSON"),
        (["CartPole-v1", "--kwargs", "[1]"], "--kwargs must be a JSON object"),
        (["CartPole-v1", "--kwargs", '{"num_envs": 1}'], "jaxvec.make also has an argument 'num_envs'"),
        (["my_package.envs:Env", "--kwargs", '{"width": 1}'], "unexpected keyword argument 'width'"),
    ],
)
def test_what_can_not_be_done_is_told_in_a_line(run, command, words, said):
    code, out, err = run(command, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"jaxvec {command}: ")
    assert said in err
    assert err.count("\n") == 1


def test_no_command_prints_the_help_and_version_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    help_text = capsys.readouterr().err
    assert all(f"\n    {command.name} " in help_text for command in COMMANDS)
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"jaxvec {jaxvec.__version__}\n"


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
    ],
)
def test_words_that_are_not_understood_end_with_the_usage(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: jaxvec" in capsys.readouterr().err


def test_bench_refuses_before_it_measures(run):
    words = ["--num-envs", "1", "--num-workers", "2", "--seconds", "0.01"]
    code, _, err = run("bench", "my_package.envs:Env", *words)
    assert code == 2
    assert "more workers than envs" in err


def test_a_transport_that_can_not_be_had_says_why(run, monkeypatch, free_choice):
    monkeypatch.setattr(_ffi, "reason_unavailable", lambda: "the native library was not built")
    code, _, err = run("bench", "my_package.envs:Env", *QUICK, "--transport", "ffi")
    assert (code, err.splitlines()[-1]) == (2, "jaxvec bench: the native library was not built")


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
        [sys.executable, "-m", "jaxvec", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
    assert err.endswith("jaxvec bench: interrupted\n")
    assert "Traceback" not in err


def test_ctrl_c_leaves_no_worker():
    words = ["check", "my_package.envs:Env", "--kwargs", '{"ms": 1}']
    source = f"""
import sys
from jaxvec import testing
from jaxvec.cli._main import main
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


# --- help, JSON ------------------------------------------------------------------------------

EXAMPLES = [
    line.strip()
    for command in COMMANDS
    if command.name != "stack"  # which needs another program's pid: tests/faults/test_stacks.py
    for line in command.details.splitlines()
    if line.startswith("  jaxvec ")
]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_run(run, example):
    words = shlex.split(example)[1:]
    if "ALE/Pong-v5" in words and importlib.util.find_spec("ale_py") is None:
        assert run(*words)[0] == 2
        pytest.skip("ale_py is not installed, which the command says")
    if words[0] == "top":
        words[1:] = str(os.getpid()), *(words[2:3] or ["--once"])
    with jaxvec.make(CountingEnv, 1) if words[0] == "top" else nullcontext():
        code, out, _ = run(*words, *(QUICK if words[0] == "bench" else []))
    assert code == 0
    if "--json" in words:
        assert json.loads(out)["schema"] == f"jaxvec.{words[0]}/1"
    if words[0] == "bench" and "--json" not in words:
        assert "Recommended:\n  " in out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_examples_exit_codes_and_the_shape_of_json(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command.name, "--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"jaxvec.{command.name}/1" in said
    assert f"jaxvec {command.name}" in said
    assert "130  Ctrl-C" in said


def test_doctor_says_the_same_to_people_and_programs(run):
    (code, text, _), (_, record, _) = run("doctor"), run("doctor", "--json")
    found = json.loads(record)["found"]
    assert code == 0
    assert text == "".join(f"{what:15} {said}\n" for what, said in found.items())
    assert found["jaxvec"] == jaxvec.__version__


@pytest.mark.skipif(_native.ext is None, reason="there is no native library")
def test_doctor_names_a_native_library_of_other_sources(tmp_path):
    """As after `git pull`, before the library is built again."""
    folder = shutil.copytree(Path(jaxvec.__file__).parent, tmp_path / "jaxvec") / "_native"
    shutil.copy(_native.ext.__file__, folder)

    def doctor():
        # -S: without the finder of an editable install
        command = [sys.executable, "-S", "-m", "jaxvec", "doctor"]
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        env = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=True)

    assert re.search(r"^native library +loaded$", doctor().stdout, re.MULTILINE)
    (folder / "engine.h").write_text("// another version")
    done = doctor()
    assert re.search(
        r"^native library +off: .*other sources.*`pip install -e \.` again", done.stdout, re.MULTILINE
    )
    assert "RuntimeWarning: the native library was built from other sources" in done.stderr


def test_a_folder_named_ray_is_not_ray(run, tmp_path, monkeypatch):
    """As Ray itself leaves one in /tmp. It can be imported from there, if Ray is not installed."""
    (tmp_path / "ray").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    installed = importlib.util.find_spec("ray.actor") is not None
    assert ("Ray is not installed" in run("doctor")[1]) == (not installed)


@pytest.mark.parametrize(
    "entry",
    [[sys.executable, "-m", "jaxvec"], [Path(sysconfig.get_path("scripts"), "jaxvec")]],
    ids=["module", "command"],
)
def test_stdout_has_only_the_record_though_envs_print(entry):
    """Both ways to start it find an env in the current folder."""
    command = [*entry, "check", "my_package.envs:Env", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
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


@pytest.mark.parametrize("program", ["data_parallel", "impala", "plr", "server_envs"])
def test_new_copies_any_program(program, tmp_path, monkeypatch):
    """The copy runs from a folder of its own: it shows its options."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", program, "mine.py"]) == 0
    command = [sys.executable, "mine.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    # data_parallel starts its processes by other words than those of the user.
    name = program if program == "data_parallel" else "(python )?mine.py"
    assert re.match(rf"usage: {name} \[-h\]", done.stdout)
