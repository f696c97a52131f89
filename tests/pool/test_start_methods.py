"""How workers are started: they are as clean as new interpreters, whatever happens to what starts them."""

import contextlib
import functools
import importlib
import json
import math
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gymnasium
import numpy as np
import psutil
import pytest
from support import probe
from support.disasters import PATIENCE, Background, wait_until_dead
from support.probe import fork as _fork
from support.probe import fork_servers, forkserver
from support.scripts import run_python

import jaxvec
from jaxvec.testing import CountingEnv

METHODS = ["forkserver", "spawn"]
methods = pytest.mark.parametrize("method", METHODS)
FREE = jaxvec.Restart(max_restarts=None, rate=None)

pytestmark = pytest.mark.skipif(
    _fork.reason_unavailable() is not None, reason=str(_fork.reason_unavailable())
)


class AskedEnv(CountingEnv):
    """Answers what it is asked, by an expression."""

    def ask(self, expression):
        modules = "os random resource signal subprocess sys tempfile threading uuid"
        return eval(expression, {"np": np} | {name: __import__(name) for name in modules.split()})

    def step(self, action):
        if action == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def ask(make, expression, method="forkserver", num_envs=1, **options):
    """Returns what the envs of a new pool answer, whose workers have these `options`."""
    workers = jaxvec.Workers(start_method=method, **options)
    envs = make(AskedEnv, num_envs, num_workers=num_envs, workers=workers)
    return list(envs.call("ask", expression))


def server():
    """Returns the one fork server that the latest pool has."""
    return psutil.Process(list(_fork._servers.values())[-1].pid)


# --- What a worker has of the program -----------------------------------------------------------


PROGRAM = """
import json, sys, warnings
import gymnasium
import jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def facts(self):
        try:
            warnings.warn("odd", FutureWarning)
        except FutureWarning:
            raised = True
        else:
            raised = False
        filters = [(*entry[:2], entry[2].__name__, *entry[3:]) for entry in warnings.filters]
        flags = sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions
        return sys.argv, __debug__, *flags, raised, repr(filters)

warnings.filterwarnings("error", category=FutureWarning)
warnings.filterwarnings("ignore", message="[a-z]+ numbers", module="my_.*")
workers = jaxvec.Workers(start_method=sys.argv[2])
with jaxvec.make(Env, 1, workers=workers) as envs:
    print(json.dumps([envs.call("facts")[0], Env().facts()]))
"""


@pytest.mark.slow(but=1)
@methods
def test_arguments_flags_and_warning_filters_are_those_of_the_program(method):
    """As multiprocessing passes them: an env may read them, or behave differently under `-O`."""
    flags = ["-O", "-X", "dev", "-W", "error::ImportWarning"]
    run = run_python(*flags, "-c", PROGRAM, "--method", method, "--level", "7")
    assert run.returncode == 0, run.stderr
    of_worker, of_program = json.loads(run.stdout)
    assert of_worker == of_program
    argv, debug, optimize, dev_mode, warn_options, raised, _ = of_worker
    assert argv == ["-c", "--method", method, "--level", "7"]
    assert (debug, optimize, dev_mode, raised) == (False, 1, True, True)
    assert "error::ImportWarning" in warn_options


SHARING = """
import functools, multiprocessing, sys
import jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    def __init__(self, shared):
        super().__init__()
        shared.append("built")

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.list()
        workers = jaxvec.Workers(start_method=sys.argv[1])
        with jaxvec.make(functools.partial(Env, shared), 2, workers=workers):
            print(len(shared))
"""


@methods
def test_workers_connect_to_a_manager_of_the_program(method, tmp_path):
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    run = run_python(script, method)
    assert run.stdout == "2\n", run.stderr


@methods
def test_control_sockets_have_no_default_timeout(make, method):
    socket.setdefaulttimeout(0.001)
    try:
        # The variable makes a new fork server.
        assert ask(make, "os.environ['JAXVEC_NEW']", method, env={"JAXVEC_NEW": "1"}) == ["1"]
    finally:
        socket.setdefaulttimeout(None)


def test_an_edited_module_is_preloaded_again(make, tmp_path, monkeypatch):
    """Also one that a preloaded module imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "edited_outer.py").write_text("from edited_inner import LEVEL")
    inner = tmp_path / "edited_inner.py"
    inner.write_text("LEVEL = 1")
    level = "sys.modules['edited_outer'].LEVEL, os.getppid()"
    options = {"preload": ["edited_outer"]}
    (before, first_server), *_ = ask(make, level, **options)
    assert ask(make, level, **options) == [(1, first_server)]
    inner.write_text("LEVEL = 200")
    ((after, second_server),) = ask(make, level, **options)
    assert (before, after) == (1, 200)
    assert ask(make, level, **options) == [(200, second_server)]


LIBRARY = """
import math, time
import gymnasium
from jaxvec.testing import CountingEnv

SPEED = 1.0
LEVELS: int = 3
TURN = 2 * math.pi * LEVELS
CONFIG = {"wind": [1, None]}
STARTED = time.time()
made = 0
counts = [0]
names = ["all"]
cache = {}

def helper(): return 1

class Cart(CountingEnv):
    metadata = {"render_modes": []}
    gravity = 9.8
    limits = (1, 2)
    count = 0

    def __init__(self):
        global made
        from SETTINGS import LEVEL
        super().__init__()
        made += 1
        counts[0] += 1
        names.append("cart")
        vars()["cache"] = cache
        vars()["cache"][made] = LEVEL
        type(self).count += 1

    def fall(self): return SPEED, self.gravity, helper()
    @staticmethod
    def color(): return "red"

class Carts(gymnasium.vector.SyncVectorEnv):
    def __init__(self): super().__init__([Cart] * 2)

def make_cart(): return gymnasium.make("ACart-v0")

gymnasium.register("ACart-v0", entry_point=Cart, max_episode_steps=9)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    name = f"library_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(LIBRARY.replace("SETTINGS", f"{name}_settings"))
    (tmp_path / f"{name}_settings.py").write_text("LEVEL = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(name)
    gymnasium.registry.pop("ACart-v0", None)


@methods
def test_a_value_that_only_the_program_has_changed_is_named_once(make, library, method):
    workers = jaxvec.Workers(start_method=method)
    library.Cart()  # changes its counters, which are no settings
    # As the vector envs of Gymnasium 1.3 write to the metadata of a class.
    library.Cart.metadata["autoreset_mode"] = gymnasium.vector.AutoresetMode.NEXT_STEP
    assert make(library.Cart, 2, workers=workers).call("fall") == ((1.0, 9.8, 1),) * 2

    def change():
        library.SPEED = 3
        library.TURN = 7
        library.Cart.gravity = 1.6
        library.Cart.color = library.helper

    for name, old, new in (
        ("SPEED", "1.0", 3),
        ("LEVELS", "3", 4),
        ("TURN", f"{6 * math.pi}", None),
        ("CONFIG", "{'wind': [1, None]}", {"wind": [1, 2]}),
        ("Cart.gravity", "9.8", 1.6),
        ("Cart.limits", "(1, 2)", (7, 8)),
        ("helper", None, lambda: 2),
        ("Cart.fall", None, library.helper),
        ("Cart.color", None, staticmethod(library.helper)),
    ):
        owner = library.Cart if "." in name else library
        text = (
            f" is {new or 'something else'} here, but {old} in the workers" if old else " is another function"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name.rpartition(".")[2], np.array(1) if new is None else new)
            with pytest.warns(UserWarning, match=re.escape(f"{library.__name__}.{name}{text}")) as caught:
                make(library.Cart, 2, workers=workers)
        assert len(caught) == 1
        assert "jaxvec.Workers(init=function)" in str(caught[0].message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{library.__name__}_settings.LEVEL", 2)
        with pytest.warns(UserWarning, match="settings.LEVEL is 2 here, but 1 in the workers"):
            make(library.Cart, 2, workers=workers)
    change()
    with pytest.warns(UserWarning, match="; .*; .*, and 1 more"):
        make(library.Cart, 2, workers=workers)
    with pytest.warns(UserWarning, match="SPEED is 3 here, but 1.0 in the workers"):
        make(library.Carts, 2, envs_per_instance=2, workers=workers)
    make(library.Cart, 2, backend="serial")
    make(library.Cart, 2, workers=replace(workers, init=change))


@methods
def test_entries_of_the_registry_are_those_of_the_program(make, library, method):
    class Own(CountingEnv):
        pass

    gymnasium.registry["ACart-v0"].max_episode_steps = 5
    gymnasium.register("AnOwn-v2", entry_point=Own, max_episode_steps=7)
    env_id = "AnOwn-v2"
    workers = jaxvec.Workers(start_method=method)
    try:
        for env_fn, limit in (
            ("ACart-v0", 5),
            (library.make_cart, 5),
            (lambda: gymnasium.make("ACart-v0"), 5),
            (eval(f'lambda: gymnasium.make("{library.__name__}:ACart-v0")', {"gymnasium": gymnasium}), 5),
            (lambda: gymnasium.make(env_id), 7),
            (functools.partial(gymnasium.make, "AnOwn-v2"), 7),
        ):
            envs = make([env_fn] * 2 if callable(env_fn) else env_fn, 2, num_workers=1, workers=workers)
            assert [spec.max_episode_steps for spec in envs.get_attr("spec")] == [limit] * 2
        with pytest.warns(UserWarning, match="'ACart-v0'].max_episode_steps is 5 here, but 9 in the workers"):
            make(lambda: library.gymnasium.make(f"ACart-v{len(env_id) - 8}"), 2, workers=workers)
    finally:
        del gymnasium.registry["AnOwn-v2"]


# --- What a worker runs first -------------------------------------------------------------------


@methods
def test_worker_init_runs_before_the_envs_of_workers_and_replacements(make, method, tmp_path, monkeypatch):
    log, env_class = tmp_path / "log", AskedEnv

    def define():
        module = types.ModuleType("made_by_init")
        module.env_class = env_class
        exec("def make_env():\n    return env_class()", vars(module))
        return module

    def prepare(worker_id):
        sys.modules["made_by_init"] = define()
        os.environ["JAXVEC_MINE"] = f"worker {worker_id}"
        with log.open("a") as file:
            file.write(f"{worker_id} {os.getpid()}\n")

    monkeypatch.setitem(sys.modules, "made_by_init", define())
    make_env = sys.modules["made_by_init"].make_env  # which is sent by its name
    envs = make(
        make_env, 3, num_workers=2, workers=jaxvec.Workers(start_method=method, init=prepare), on_fault=FREE
    )
    envs.reset()
    mine, pid = "os.environ['JAXVEC_MINE']", "os.getpid()"
    assert envs.call("ask", mine) == ("worker 0", "worker 1", "worker 1")
    old = dict(enumerate(envs.call("ask", pid, indices=[0, 1])))
    assert sorted(log.read_text().split("\n")[:-1]) == [f"{worker} {old[worker]}" for worker in (0, 1)]
    assert envs.step([0, 7, 0]).info["fault"].tolist() == [False, True, True]
    assert envs.call("ask", mine) == ("worker 0", "worker 1", "worker 1")
    assert log.read_text().split("\n")[2:] == [f"1 {envs.call('ask', pid, indices=1)[0]}", ""]
    assert "JAXVEC_MINE" not in os.environ


def test_what_worker_init_raises_names_the_worker_and_its_traceback(make):
    def prepare(worker_id):
        if worker_id == 1:
            raise LookupError("no licence")

    with pytest.raises(
        jaxvec.EnvError, match="(?s)^worker 1 raised LookupError in worker_init: no licence.*in prepare"
    ) as caught:
        make(CountingEnv, 4, num_workers=2, workers=jaxvec.Workers(init=prepare))
    error = caught.value
    assert (error.worker, error.env_id, error.operation) == (1, 2, "worker_init")
    assert isinstance(error.__cause__, LookupError)


def test_worker_init_error_in_a_replacement_is_raised_at_the_limit(make, tmp_path):
    done = tmp_path / "done"

    def prepare():
        if done.exists():
            raise LookupError("no licence")

    policy = jaxvec.Restart(max_restarts=2, rate=None)
    envs = make(AskedEnv, 1, workers=jaxvec.Workers(init=prepare), on_fault=policy)
    envs.reset()
    done.touch()
    with pytest.raises(jaxvec.EnvError, match="(?s)in worker_init: no licence.*max_restarts is 2"):
        envs.step([7])


def test_worker_init_needs_workers_and_a_function_that_can_be_sent():
    lock = threading.Lock()
    text = r"Workers\(init=...\) can't be pickled, .*create the objects that it needs inside"
    with pytest.raises(TypeError, match=text):
        jaxvec.make(CountingEnv, 1, workers=jaxvec.Workers(init=lambda: lock))
    with pytest.raises(TypeError, match=r"Workers\(init=...\) must be a function, or None, not 'prepare'"):
        jaxvec.Workers(init="prepare")


def test_a_pool_is_made_in_the_background_or_its_future_says_why_not():
    def prepare():
        raise LookupError("no licence")

    with ThreadPoolExecutor() as executor:
        pools = [executor.submit(jaxvec.make, CountingEnv, 2) for _ in range(2)]
        failed = executor.submit(jaxvec.make, CountingEnv, 2, workers=jaxvec.Workers(init=prepare))
        for pool in pools:
            pool.result(timeout=200)
        with pytest.raises(jaxvec.EnvError, match="no licence"):
            failed.result(timeout=200)
    for pool in pools:  # whose threads have ended by now
        with pool.result() as envs:
            envs.reset()
            assert envs.step([1, 1]).reward.tolist() == [1, 1]


# --- As clean as a new interpreter -------------------------------------------------------------


@methods
def test_workers_are_no_members_of_the_mpi_job_of_the_program(make, monkeypatch, method):
    """A library that is imported there and initialises MPI would take itself for this process."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_MINE"):
        monkeypatch.setenv(name, "3")
    names = "{name: value for name, value in os.environ.items() if 'MPI' in name or 'PMI' in name}"
    assert ask(make, names, method) == [{"MPI_MINE": "3"}]
    worker_env = {"PMI_RANK": "0", "OMPI_MINE": "yes"}
    assert ask(make, names, method, env=worker_env) == [{"MPI_MINE": "3", **worker_env}]


@methods
def test_a_worker_has_what_the_program_has_at_the_moment_of_make(make, method, tmp_path, monkeypatch):
    ask(make, "0", method)  # what it is forked from is older than all that follows
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXVEC_MINE", "yes")
    monkeypatch.delenv("HOME")
    monkeypatch.syspath_prepend(str(tmp_path))
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(cores)})
        expression = (
            "os.getcwd(), os.environ.get('JAXVEC_MINE'), os.environ.get('HOME'), sys.path, "
            "os.sched_getaffinity(0), signal.getsignal(signal.SIGTERM)"
        )
        (found,) = ask(make, f"[__import__('signal') for signal in [0]] and ({expression})", method)
    finally:
        os.sched_setaffinity(0, cores)
    assert found == (str(tmp_path), "yes", None, sys.path, {max(cores)}, signal.SIG_DFL)


def test_a_new_interpreter_has_the_limits_of_the_moment_of_make(make):
    ask(make, "0", "spawn")
    umask, files = os.umask(0o057), resource.getrlimit(resource.RLIMIT_NOFILE)
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
        expression = (
            "os.umask(0), resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0), "
            "signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, signal.pthread_sigmask(signal.SIG_BLOCK, [])"
        )
        (found,) = ask(make, f"[__import__('signal') for signal in [0]] and ({expression})", "spawn")
    finally:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        signal.signal(signal.SIGHUP, handler)
    assert found == (0o057, (files[0] - 1, files[1]), os.getpriority(os.PRIO_PROCESS, 0), True, set())


def test_a_forked_worker_has_the_file_limits_of_its_program(make):
    expression = "resource.getrlimit(resource.RLIMIT_NOFILE)"
    assert ask(make, expression) == [resource.getrlimit(resource.RLIMIT_NOFILE)]


@methods
def test_worker_has_its_own_process_group_one_thread_and_no_jax(make, monkeypatch, method):
    monkeypatch.setenv("JAXVEC_SHORT_SLICES", "0")  # else it has a ticker while its core is busy
    found = ask(
        make,
        "os.getpid() == os.getpgrp(), len(os.listdir('/proc/self/task')), 'jax' in sys.modules, "
        "threading.current_thread() is threading.main_thread(), sys.stdin.read(), "
        "[name for name in sys.modules if name.startswith('test_')]",
        method,
        2,
    )
    assert found == [(True, 1, False, True, "", [])] * 2


@methods
def test_a_worker_has_no_descriptors_but_its_own(make, method):
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(tempfile.TemporaryFile())
        make(AskedEnv, 2, workers=jaxvec.Workers(start_method=method))  # whose sockets are nobody else's
        numbers = "fd in range(3, 100) if os.path.islink(f'/proc/self/fd/{fd}')"
        expression = f"sorted(os.readlink(f'/proc/self/fd/{{fd}}') for {numbers})"
        (found,) = ask(make, expression, method)
    kinds = [name.split(":")[0] for name in found]
    # Segment, the memory for its stack, lifeline, control socket.
    assert kinds == ["/memfd", "/memfd", "pipe", "socket"], found


@methods
def test_what_an_env_starts_inherits_the_standard_descriptors_only(make, method):
    expression = (
        "subprocess.run(['ls', '/proc/self/fd'], capture_output=True, text=True, close_fds=False).stdout"
    )
    (found,) = ask(make, expression, method)
    assert found.split() == ["0", "1", "2", "3"]  # the last is ls's own


@methods
def test_no_two_workers_share_a_random_stream(make, method):
    expression = (
        "[random.random(), np.random.random(), np.random.default_rng().random(), uuid.uuid1().hex, "
        "uuid.uuid4().hex, next(tempfile._get_candidate_names()), os.urandom(8), id(0) and uuid.uuid4().hex]"
    )
    found = ask(make, expression, method, 3) + ask(make, expression, method, 3)
    for stream in zip(*found, strict=True):
        assert len(set(stream)) == 6, stream


def test_interpreters_of_their_own_have_hash_seeds_of_their_own(make, monkeypatch):
    """Forks have that of their server: it can't be changed in an interpreter that runs."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert len(set(ask(make, "hash('a')", "spawn", 3))) == 3
    (ours,) = {*ask(make, "hash('a')", "forkserver", 3)}
    assert ours != hash("a")


@methods
def test_a_worker_finds_modules_that_are_newer_than_its_server(make, method, tmp_path, monkeypatch):
    folder = tmp_path / "later"
    monkeypatch.syspath_prepend(str(folder))
    ask(make, "0", method)
    folder.mkdir()
    (folder / "made_later.py").write_text("answer = 42")
    assert ask(make, "__import__('made_later').answer", method) == [42]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
@methods
@pytest.mark.nightly(but=3)
def test_a_program_without_standard_descriptors_can_make_a_pool(method, closed):
    """As daemons are, and what supervisors start."""
    source = """
        import os, sys
        report = os.dup2(int(sys.argv[1]), 50)
        for fd in map(int, sys.argv[3].split()):
            os.close(fd)
        import numpy as np, jaxvec
        from jaxvec.testing import CountingEnv
        workers = jaxvec.Workers(start_method=sys.argv[2])
        with jaxvec.make(CountingEnv, 2, num_workers=2, workers=workers) as envs:
            envs.reset(seed=0)
            os.write(report, str(envs.step(np.full(2, 5)).obs[:, 3].tolist()).encode())
    """
    ours, theirs = os.pipe()
    with os.fdopen(ours) as report:
        with os.fdopen(theirs):
            words = [sys.executable, "-c", textwrap.dedent(source), str(theirs), method, closed]
            done = subprocess.run(words, pass_fds=[theirs], timeout=200, check=False)
        assert (done.returncode, report.read()) == (0, "[5, 5]")


@methods
def test_a_file_that_took_the_number_of_a_closed_stream_gets_no_output(method, tmp_path):
    source = """
        import os, sys
        os.close(1)
        file = open(sys.argv[2], "w")
        assert file.fileno() == 1
        import numpy as np, jaxvec
        from jaxvec.testing import CountingEnv
        class Printing(CountingEnv):
            def step(self, action):
                print("printed")
                return super().step(action)
        workers = jaxvec.Workers(start_method=sys.argv[1])
        with jaxvec.make(Printing, 1, workers=workers) as envs:
            envs.reset()
            envs.step([0])
    """
    words = [sys.executable, "-c", textwrap.dedent(source), method, str(tmp_path / "file")]
    subprocess.run(words, timeout=200, check=True)
    assert (tmp_path / "file").read_text() == ""


# --- Fork servers ------------------------------------------------------------------------------


def test_pools_of_equal_environment_share_a_server_and_others_do_not(make, monkeypatch):
    parent = "os.getppid()"
    first = ask(make, parent)
    monkeypatch.setenv("JAXVEC_MINE", "no matter")  # nothing reads it as it starts
    assert ask(make, parent) == first
    with_changes = ask(make, parent, env={"MINE": "1"})
    assert with_changes != first
    assert ask(make, parent, env={"MINE": "1"}) == with_changes
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # which is read once
    assert ask(make, parent) not in (first, with_changes)
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    assert ask(make, parent) == first
    monkeypatch.setattr(os, "getgroups", lambda: [12345])  # as if the program had given up rights
    assert ask(make, parent) != first


def test_servers_without_pools_are_few():
    for number in range(4):
        jaxvec.make(CountingEnv, 1, workers=jaxvec.Workers(env={"NUMBER": str(number)})).close()
    idle = [each for each in _fork._servers.values() if not each.users]
    assert len(idle) <= _fork._MAX_IDLE
    assert all(psutil.pid_exists(pid) for pid in fork_servers())


def test_a_server_with_an_unread_answer_outlives_its_program_and_its_workers(make):
    """A signal may interrupt the program between its request and the answer; the socket is then reset."""
    doomed, envs = make(AskedEnv, 1, num_workers=1), make(CountingEnv, 1, num_workers=1)
    shared, process = list(_fork._servers.values())[-1], server()
    worker = probe.processes(doomed)[0]
    number = next(shared.numbers) - 2  # of the worker of `doomed`
    worker.kill()
    wait_until_dead(worker)
    shared._requests.send(forkserver.REAP + forkserver.NUMBER.pack(number))
    assert select.select([shared._requests], [], [], PATIENCE)[0]
    _fork.end_all()
    envs.reset()
    envs.step(np.zeros(1, int))
    envs.close()
    assert process.wait(PATIENCE) == 0


def test_what_numpy_reads_at_its_import_takes_effect(make, tmp_path, monkeypatch):
    (tmp_path / "reads_early.py").write_text(
        "import os; seen = os.environ.get('OMP_NUM_THREADS'), os.getpid()"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"env": {"OMP_NUM_THREADS": "3"}, "preload": ["reads_early"]}
    seen = ask(make, "sys.modules['reads_early'].seen", num_envs=2, **options)
    assert seen == [("3", server().pid)] * 2  # imported once, in the server


def test_pools_of_several_threads_share_a_server(make):
    calls = [Background(lambda: ask(make, "os.getppid()", num_envs=2)) for _ in range(6)]
    assert len({pid for call in calls for pid in call.result()}) == 1


def test_a_module_that_can_not_be_preloaded_is_named(make, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise KeyError('no such room')")
    monkeypatch.syspath_prepend(str(tmp_path))
    errors = {"no_such_module": "No module named", "broken_module": "KeyError: 'no such room'"}
    for module, said in errors.items():
        with pytest.raises(ImportError, match=f"preload: '{module}' can't be imported: .*{said}"):
            make(CountingEnv, 1, workers=jaxvec.Workers(preload=(module,)))
    (tmp_path / "no_such_module.py").touch()
    assert ask(make, "'no_such_module' in sys.modules", preload="no_such_module") == [True]


def test_what_starts_threads_is_not_forked(make, tmp_path, monkeypatch):
    source = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "threaded_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match='its imports started 1 threads.*start_method="spawn"'):
        make(CountingEnv, 1, workers=jaxvec.Workers(preload=["threaded_module"]))
    # Without preload, what starts them is a plug-in of Gymnasium's, or NumPy's BLAS.
    start = _fork._ForkServer.__init__
    monkeypatch.setattr(
        _fork._ForkServer,
        "__init__",
        lambda self, env, modules, interpreter: start(self, env, ("threaded_module",), interpreter),
    )
    worker_env = {"JAXVEC": "threads"}
    (parent,) = ask(make, "os.getppid()", "auto", env=worker_env)
    assert parent == os.getpid()
    with pytest.raises(RuntimeError, match="its imports started 1 threads"):
        make(CountingEnv, 1, workers=jaxvec.Workers(start_method="forkserver", env=worker_env))
