"""The doors for extensions: one as `docs/developers/design.md` describes, with an array and a request."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.disasters import RaisingEnv

import jaxvec
from jaxvec import _envs, _extension
from jaxvec._engine.move import Move, Verb
from jaxvec._envs.slice import Retirement, SliceExtension
from jaxvec._extension import Extension
from jaxvec._leaves import as_is
from jaxvec._options import PoolConfig, Restart
from jaxvec._pool.pool_extension import PoolExtension
from jaxvec._pool.state import ActiveMove
from jaxvec._start import start
from jaxvec._vector_env import pool_of
from jaxvec._workers.interpreter import Interpreter
from jaxvec.testing import CountingEnv


class Builds(Extension):
    """Counts how many envs each slot has had, in an array of the segment."""

    def arrays(self, spec):
        yield ("builds",), (spec.num_envs,), np.dtype(np.int64)

    def on_slice(self, env_slice):
        return SliceBuilds(env_slice)

    def on_pool(self, pool, arrays):
        return PoolBuilds(arrays["builds",])


class SliceBuilds(SliceExtension):
    """Its half in a worker."""

    def __init__(self, env_slice):
        self.first, self.builds = env_slice.first, env_slice.arrays["builds",]
        self.builds[self.first : self.first + len(env_slice.slots.envs)] += 1

    def env_built(self, index):
        self.builds[self.first + index] += 1

    def forget_builds(self, slots, values):
        self.builds[slots] = values


class PoolBuilds(PoolExtension):
    """Its half in the program."""

    def __init__(self, builds):
        self.builds = builds

    def forget_builds(self, pool, values):
        pool.env_calls.request_each(SliceBuilds.forget_builds, pool.all, values)

    def forget(self):
        self.builds = None


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_both_halves_of_an_extension_share_an_array_and_a_request(backend, monkeypatch):
    monkeypatch.setattr(_extension, "extensions", [lambda config: Builds()])
    config = PoolConfig(backend=backend, on_fault=Restart(retry="rebuild", rate=None))
    with start(RaisingEnv, 3, config, Interpreter(), env_kwargs={}, policy=as_is) as envs:
        mine = pool_of(envs).extension(PoolBuilds)
        assert mine.builds.tolist() == [1, 1, 1]
        envs.reset(seed=0)
        envs.step([0, 7, 0])
        assert mine.builds.tolist() == [1, 2, 1]
        mine.forget_builds(pool_of(envs), [5, 6, 7])
        assert mine.builds.tolist() == [5, 6, 7]
    assert mine.builds is None


class OneStep(Extension):
    """Has each worker replaced after a step."""

    retires_workers = True

    def on_slice(self, env_slice):
        half = SliceExtension()
        half.find_retirement = lambda: (
            Retirement("it has stepped", "steps") if env_slice.episodes.lengths[0] else None
        )
        return half


def test_an_extension_may_have_a_worker_replaced(monkeypatch, caplog):
    monkeypatch.setattr(_extension, "extensions", [lambda config: OneStep()])
    with (
        caplog.at_level("INFO", "jaxvec"),
        start(CountingEnv, 1, PoolConfig(), Interpreter(), env_kwargs={}, policy=as_is) as envs,
    ):
        envs.reset(seed=0)
        timesteps = [envs.step([7]) for _ in range(4)]
        assert [timestep.info["fault"].item() for timestep in timesteps] == [False, True] * 2
        assert [timestep.obs[0, 2] for timestep in timesteps] == [1, 0] * 2
        assert envs.stats().total.recycled == 2
    assert caplog.messages == [
        *["worker 0 (env 0) is recycled, as it has stepped", "worker 0 (env 0) steps"],
        "worker 0 (env 0) is recycled, as it has stepped",
    ]


@pytest.fixture
def builds_pool(make, monkeypatch):
    monkeypatch.setattr(_extension, "extensions", [lambda config: Builds()])
    return pool_of(make(CountingEnv, 2, backend="serial"))


def test_two_extensions_with_one_operation_are_an_error(monkeypatch):
    monkeypatch.setattr(PoolBuilds, "verbs", {Verb.SAVE: lambda *_: []})
    monkeypatch.setattr(_extension, "extensions", [lambda config: Builds()] * 2)
    with pytest.raises(ValueError, match="two extensions of the pool perform save; remove one"):
        start(CountingEnv, 2, PoolConfig(backend="serial"), Interpreter(), env_kwargs={}, policy=as_is)
    monkeypatch.setattr(SliceBuilds, "verbs", {Verb.RESTORE: lambda slots: None})
    monkeypatch.setattr(PoolBuilds, "verbs", {})
    with pytest.raises(jaxvec.EnvError, match="two extensions of the pool perform restore"):
        start(CountingEnv, 2, PoolConfig(num_workers=1), Interpreter(), env_kwargs={}, policy=as_is)


def test_what_no_extension_has_is_an_error(builds_pool):
    with pytest.raises(ValueError, match=r"simulate: pool \d+ keeps no states; make it with states=n"):
        builds_pool.perform(Move(Verb.SIMULATE, builds_pool.all), [])
    with pytest.raises(NotImplementedError, match="no extension of the pool performs save"):
        builds_pool.dispatch(
            ActiveMove(Move(Verb.SAVE, builds_pool.all), lambda: None), Verb.SAVE, builds_pool.all
        )


def test_a_request_to_no_extension_is_an_error(make):
    pool = pool_of(make(CountingEnv, 2, backend="serial"))
    with pytest.raises(NotImplementedError, match=r"no extension .* method SliceBuilds\.forget_builds"):
        pool.env_calls.request_each(SliceBuilds.forget_builds, pool.all, [1, 2])


def test_the_core_names_no_extension_and_no_other_backend():
    root = Path(_envs.__file__).parents[1]
    names = "_engine", "_envs", "_memory", "_native", "_pool", "_workers", "callbacks"
    rooms = [path for name in names for path in (root / name).glob("*.py")]
    top = [path for path in root.glob("_*.py") if path.name != "__init__.py"]
    assert len(rooms) > 40
    assert len(top) > 10
    words = re.compile(r"jaxvec\._extensions|_backends|snapshot|StatefulEnv|StateTable|Rollouts\b")
    imports = re.compile(r"jaxvec\._extensions|import.*\b_extensions\b|_backends")
    for pattern, paths in ((words, rooms), (imports, top)):
        lines = [(path.name, line) for path in paths for line in path.read_text().splitlines()]
        assert not [each for each in lines if pattern.search(each[1])]


def test_a_pool_has_no_extension_that_it_does_not_need(make):
    envs = make("CartPole-v1", 2, backend="serial")
    assert pool_of(envs).extension(PoolExtension) is None
