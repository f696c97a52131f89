"""Options of pytest, the selection of tests, and fixtures for all tests.

The session fails if it leaves processes, descriptors, maps or shared memory behind.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import cloudpickle
import jax
import psutil
import pytest
from hypothesis import HealthCheck, settings

import jaxvec

pytest.register_assert_rewrite("support")
from support import disasters, scripts  # noqa: E402
from support.probe import _ffi, connections, fork, lifeline, native_engine, process, usable_cores  # noqa: E402

# No time limits, as the machine may be busy.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", untimed, max_examples=50)
settings.register_profile("nightly", untimed, max_examples=300)
settings.load_profile("default")

jax.config.update("jax_num_cpu_devices", 4)  # for sharded programs; others run on the first device
# As JAX's own tests do: LLVM optimises less, which makes compilation faster. XLA's passes, which may move or
# drop calls, are the same. Some sessions of noxfile.py set it to 0.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dispatch", choices=["native", "portable"], help="jaxvec.config.dispatch")
    parser.addoption("--transport", choices=["ffi", "io_callback"], help="jaxvec.config.transport")
    parser.addoption("--start-method", choices=["forkserver", "spawn"], help="what start_method='auto' means")
    parser.addoption(
        "--ways",
        choices=["default", "all"],
        default="default",
        help="ways to drive a pool, for tests that are parametrised over all of them",
    )
    parser.addoption("--slow", action="store_true", help="run all cases of tests that are marked slow")
    parser.addoption("--nightly", action="store_true", help="run slow tests and those marked nightly")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps bytecode in pytest's cache if PYTHONDONTWRITEBYTECODE is set, as it is in many containers.

    Otherwise, each of the several hundred interpreters that tests start would compile all its imports. Also
    restores the handler of Ctrl-C, for tests and for the programs that they start: a shell without job
    control ignores the signal in its background jobs.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cache = getattr(config, "cache", None)  # None with `-p no:cacheprovider`
    if cache is not None and os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache.mkdir("bytecode"))
        sys.dont_write_bytecode = False


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns 0 for one file, whose tests a debugger can reach in this process, else one more than the cores.

    Many tests wait, so one process more than there are cores keeps the cores busy.
    """
    alone = len(config.args) == 1 and ".py" in config.args[0]
    return 0 if alone or config.option.usepdb else min(usable_cores() + 1, 5)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _choose_ways(config, items)
    if not config.getoption("--nightly"):
        _leave_out(config, items, "nightly")
        if not config.getoption("--slow"):
            _leave_out(config, items, "slow")
    _send_by_value(items)
    _skip_without_gpu(items)


def _choose_ways(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps both of `TWO_WAYS` to drive a pool in tests/faults, and the first of them in other tests.

    If a test excludes such a way, or this machine does, the most similar way takes its place.
    """
    if config.getoption("--ways") == "all":
        return
    cases: dict[tuple[str, str], list[tuple[pytest.Item, disasters.Way]]] = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        way = _way(parameters)
        if way is not None:
            name = item.name
            for parameter in ("way", "dispatch", "face"):
                name = name.replace(str(parameters.get(parameter, "")), "", 1)
            cases.setdefault((item.location[0], name), []).append((item, way))
    left_out: set[pytest.Item] = set()
    for (file, _), case in cases.items():
        available = [each for each in case if each[1].reason_unavailable() is None] or case
        chosen: set[pytest.Item] = set()
        for default in disasters.TWO_WAYS if "tests/faults/" in file else disasters.TWO_WAYS[:1]:
            chosen.add(max(available, key=lambda each: each[1].similarity(default))[0])
        left_out |= {item for item, _ in case} - chosen
    _deselect(config, items, left_out)


def _way(parameters: dict[str, Any]) -> disasters.Way | None:
    """Returns the way to drive a pool among the parameters of a test, if there is one."""
    if "way" in parameters:
        return parameters["way"] if isinstance(parameters["way"], disasters.Way) else None
    if {"dispatch", "face"} <= parameters.keys():
        return disasters.Way(parameters["dispatch"], parameters["face"], False)
    return None


def _leave_out(config: pytest.Config, items: list[pytest.Item], mark: str) -> None:
    """Keeps `but` cases of each test that has the mark."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(mark):
            cases.setdefault(f"{item.location[0]} {item.originalname}", []).append(item)
    left_out: set[pytest.Item] = set()
    for group in cases.values():
        # A fixed shuffle: every n-th case would often have the same value of a parameter.
        group.sort(key=lambda item: Random(item.name).random())
        keep = max(item.get_closest_marker(mark).kwargs.get("but", 0) for item in group)
        left_out |= {*group[keep:]}
    _deselect(config, items, left_out)


def _deselect(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _send_by_value(items: list[pytest.Item]) -> None:
    """Pickles envs of test files by value: workers that load them by name would import the files, and JAX."""
    modules = {item.module for item in items if isinstance(item, pytest.Function)}
    modules |= {module for name, module in sys.modules.items() if name.startswith("support.")}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"there is no GPU: {error}"))


_choose_start_method = process.choose_start_method


@pytest.fixture
def free_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes `--dispatch`, `--transport` and `--start-method` for one test."""
    monkeypatch.setattr(process, "choose_start_method", _choose_start_method)
    with jaxvec.config.override(dispatch="auto", transport="auto"):
        yield


@pytest.fixture
def patient_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes native waits so long that even on a busy machine no step falls back to Python."""
    monkeypatch.setattr(native_engine, "_WAIT", disasters.PATIENCE * 10**9)


@pytest.fixture(scope="session", autouse=True)
def _defaults(request: pytest.FixtureRequest) -> None:
    options = request.config.option
    jaxvec.config.dispatch = options.dispatch or jaxvec.config.dispatch
    jaxvec.config.transport = options.transport or jaxvec.config.transport
    if default := options.start_method:
        process.choose_start_method = lambda name: _choose_start_method(default if name == "auto" else name)


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Restores `jaxvec.config` after each test: Ctrl-C in a test may prevent `override` from doing so."""
    before = {**vars(jaxvec.config)}
    yield
    vars(jaxvec.config).update(before)


@pytest.fixture(scope="session")
def kept_by_others() -> Counter[str]:
    """Counts the resources that other libraries never release; a test that uses one adds to it."""
    return Counter()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(kept_by_others: Counter[str]) -> Iterator[None]:
    """Fails the session if it leaves children, descriptors, maps or /dev/shm entries."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1))  # JAX opens its descriptors now
    lifeline.read_end(is_kept=True)
    before = scripts.leftovers()
    yield
    fork.end_all()
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        after = scripts.leftovers()
        more = {kind: n for kind, n in after.items() if n > before.get(kind, 0) + kept_by_others[kind]}
        if not more or time.monotonic() > deadline:
            break
        time.sleep(0.05)  # a killed process is reaped a moment later
    assert not more, f"left behind: {more}; before: {before}"


@pytest.fixture(scope="session", autouse=True)
def _workers_save_coverage() -> None:
    """Waits for workers to exit before they are killed, if coverage is measured, as they save it at exit."""
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        dismiss = connections.Connections._dismiss

        def dismiss_and_wait(self: connections.Connections, timeout: float | None, *, tell: bool) -> None:
            deadline = time.monotonic() + (5 if timeout is None else min(timeout, 5))
            dismiss(self, timeout, tell=tell)
            for process in self.processes:
                process.wait(max(0, deadline - time.monotonic()))

        connections.Connections._dismiss = dismiss_and_wait


@pytest.fixture
def new_workers() -> Callable[[], list[psutil.Process]]:
    """Returns a function that lists the workers that were started during the test and still exist."""
    before = {*scripts.workers()}
    return lambda: [each for each in scripts.workers() if each not in before]


@pytest.fixture(params=["process", "serial"])
def backend(request: pytest.FixtureRequest) -> str:
    """Parametrises a test over both backends."""
    return request.param


@pytest.fixture(params=["ffi", "io_callback"])
def transport(request: pytest.FixtureRequest) -> str:
    """Parametrises a test over the transports of compiled programs."""
    if request.param == "ffi" and _ffi.reason_unavailable() is not None:
        pytest.skip(str(_ffi.reason_unavailable()))
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    """Parametrises a test over the CPU and, if there is one, a GPU as JAX's default device."""
    device = jax.devices(request.param)[0]
    with jax.default_device(device):
        yield device


@pytest.fixture
def make() -> Iterator[object]:
    """Yields `disasters.make`, and closes the pools that it made."""

    def make(*args: object, **kwargs: object) -> jaxvec.VectorEnv:
        return disasters.make(*args, **{"start_timeout": disasters.PATIENCE} | kwargs)

    with disasters.closing_all(make) as make_and_remember:
        yield make_and_remember


@pytest.fixture(params=disasters.WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> disasters.Way:
    """Parametrises a test over the ways to drive a pool, whatever `--dispatch` and `--transport` are."""
    reason = request.param.reason_unavailable()
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def no_jax_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops JAX from logging errors of an io_callback.

    The log records hold the frames, and so the pool's memory. pytest keeps the log of the session's last
    test until `nothing_left_behind` has checked for leaks.
    """
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)


@pytest.fixture
def drive(way: disasters.Way, no_jax_log: None) -> Iterator[object]:
    """Yields `drive(env, num_envs, **kwargs)`, which makes a pool that is driven this way, and closes it."""
    with disasters.closing_all(partial(disasters.Driver, way)) as drive:
        yield drive
