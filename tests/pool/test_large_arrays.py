"""Large arrays of constructors: all workers share one copy, and so do saved states of what can't change."""

import mmap
import os
import resource
import signal
import tracemalloc
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from support.probe import StatefulEnv, prove

import jaxvec
from jaxvec._memory import large_buffers

SIZE = 64 << 20  # bytes


class Looking(gymnasium.Env):
    """Returns the entry of its table that the action names, and writes to it if its action is 0."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(100)

    def __init__(self, table):
        self.table, self.last = table, 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.last = 0.0
        return np.zeros(1), {}

    def step(self, action):
        if action == 0:
            self.table[5] = -1
        self.last += self.table[action]
        return np.array([self.table[action]]), self.last, False, False, {}


def table(*, writeable=True):
    array = np.arange(SIZE // 8, dtype=np.float64)
    array.flags.writeable = writeable
    return array


def own_memory(envs):
    """Returns the bytes of each worker that no other process shares."""
    return [psutil.Process(worker.process.pid).memory_full_info().uss for worker in envs.stats().workers]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_workers_share_an_array(make, start_method, writeable):
    mine, workers = table(writeable=writeable), jaxvec.Workers(start_method=start_method)
    envs = make(lambda: Looking(mine), 6, num_workers=3, workers=workers)
    envs.reset()
    np.testing.assert_array_equal(envs.step([1, 2, 3, 4, 5, 6]).obs[:, 0], mine[1:7])
    # Read all of it, in each worker.
    assert envs.map(lambda env: float(env.unwrapped.table.sum())) == (mine.sum(),) * 6
    assert envs.map(lambda env: env.unwrapped.table.flags.writeable) == (writeable,) * 6
    assert max(own_memory(envs)) < SIZE / 2


def test_what_one_worker_writes_no_other_sees(make):
    mine = table()
    envs = make(lambda: Looking(mine), 4, num_workers=2, on_fault="restart")
    envs.reset()
    envs.step([0, 1, 1, 1])
    # The envs of a worker share their closure.
    assert envs.step([5, 5, 5, 5]).obs[:, 0].tolist() == [-1, -1, 5, 5]
    assert mine[5] == 5
    mine[5] = 7  # also a new worker gets the values of `make`
    os.kill(envs.stats().workers[0].process.pid, signal.SIGKILL)
    assert envs.step([1, 1, 1, 1]).info["fault"].tolist() == [True, True, False, False]
    assert envs.step([5, 5, 5, 5]).obs[:, 0].tolist() == [5, 5, 5, 5]


class InAnObject(Looking):
    def __init__(self, holder):
        super().__init__(holder.table)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize("way", ["argument", "config", "list", "object"])
def test_envs_share_an_argument_until_they_write_to_it(make, start_method, way):
    mine, workers = table(), jaxvec.Workers(start_method=start_method)
    options = {"num_workers": 2, "workers": workers, "on_fault": "restart"}
    if way == "argument":
        envs = make(Looking, 6, table=mine, **options)
    elif way == "config":
        envs = make(Looking, 6, env_configs=[{"table": mine}] * 6, **options)
    elif way == "list":
        envs = make([Looking] * 6, table=mine, **options)
    else:
        envs = make(InAnObject, 6, holder=SimpleNamespace(table=mine, name="a"), **options)
    mine[5] = 7  # all envs get the values of `make`
    envs.reset()
    assert envs.step([0, 1, 2, 0, 1, 2]).obs[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert envs.step([5] * 6).obs[:, 0].tolist() == [-1, 5, 5, -1, 5, 5]
    assert envs.map(lambda env: env.unwrapped.table.flags.writeable) == (True,) * 6
    assert max(own_memory(envs)) < SIZE / 2
    os.kill(envs.stats().workers[0].process.pid, signal.SIGKILL)
    assert envs.step([1] * 6).info["fault"].tolist() == [True] * 3 + [False] * 3
    assert envs.step([5] * 6).obs[:, 0].tolist() == [5, 5, 5, -1, 5, 5]


class Several(Looking):
    def __init__(self, **arrays):
        self.arrays = arrays
        super().__init__(arrays["first"])

    def step(self, action):
        for array in self.arrays.values():
            array.reshape(-1, order="A").view(np.uint8)[action] ^= 0xFF
        return super().step(action)


def test_each_of_several_arguments_is_itself(make):
    random = np.random.default_rng(0)
    sent = {
        "first": random.random(1 << 17),
        "fortran": np.asfortranarray(random.random((500, 300))),
        "same": np.zeros(1 << 18, np.float32),
        "pixels": random.integers(256, size=(3, 700, 600), dtype=np.uint8),
        "records": np.zeros(100_000, [("id", np.int64), ("price", np.float32)]),
        "small": random.random(9),
    }
    sent["records"]["id"] = np.arange(100_000)
    envs = make(Several, 4, num_workers=2, **sent)
    envs.reset()
    envs.step([1, 1, 2, 3])
    for action, got in zip([1, 1, 2, 3], envs.get_attr("arrays"), strict=True):
        for name, array in sent.items():
            expected = array.copy(order="K")
            expected.reshape(-1, order="A").view(np.uint8)[action] ^= 0xFF
            np.testing.assert_array_equal(got[name], expected)
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)


def map_at_most_two():
    large_buffers._MAX_COPIES = 2


def test_a_worker_that_may_map_no_more_copies(make):
    mine = np.arange(1 << 17, dtype=np.float64)
    envs = make(Looking, 5, table=mine, num_workers=1, workers=jaxvec.Workers(init=map_at_most_two))
    envs.reset()
    for actions, expected in (([0] * 5, [0] * 5), ([5] * 5, [-1] * 5), ([6] * 5, [6] * 5)):
        assert envs.step(actions).obs[:, 0].tolist() == expected
    owned = envs.map(lambda env: env.unwrapped.table.flags.owndata)
    assert owned == (False, False, True, True, True)


class WithView(Looking):
    """Writes to its table by a view, which it has from its first step on."""

    def reset(self, **kwargs):
        self.part = None
        return super().reset(**kwargs)

    def step(self, action):
        if self.part is None:
            self.part = self.table[4:8]
        self.part += action
        return super().step(action)


def test_an_array_above_the_limit_of_file_sizes_names_the_limit():
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limit[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .* \(ulimit -f\) for shared memory"):
            jaxvec.make(Looking, 1, table=table())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_states_keep_views_of_an_argument(make):
    mine = np.arange(1 << 18, dtype=np.float64)
    envs = make(WithView, 4, table=mine, num_workers=2, states=8)
    envs.reset()
    envs.step([1, 2, 3, 4])
    saved = envs.save()
    expected = [envs.step([5, 6, 7, 5]), envs.step([4, 5, 6, 7])]
    for again in saved, envs.unpack_states(envs.pack_states(saved)):
        envs.reset()
        envs.restore(again[::-1])  # of the other worker
        for step, actions in zip(expected, ([5, 7, 6, 5], [7, 6, 5, 4]), strict=True):
            np.testing.assert_array_equal(envs.step(actions).reward, step.reward[::-1])


def test_several_arrays_of_all_kinds_arrive(make):
    arrays = [
        np.asfortranarray(np.random.default_rng(0).random((1000, 1000))),
        np.zeros((0, 3)),
        np.arange(2_000_000)[::2],  # with gaps
        np.ones(1 << 20, np.uint8),
        np.full(300_000, 1 + 2j),
        np.array([b"x" * 100] * 20_000),
        bytearray(b"y" * (2 << 20)),
    ]

    class Checking(Looking):
        def step(self, action):
            self.found = arrays
            return super().step(action)

    envs = make(Checking, 2, table=arrays[0][0], num_workers=2)
    envs.reset()
    envs.step([1, 2])
    for found in envs.get_attr("found"):
        for one, other in zip(found, arrays, strict=True):
            assert type(one) is type(other)
            np.testing.assert_array_equal(one, other)
            if isinstance(one, np.ndarray):
                assert one.flags.f_contiguous == other.flags.f_contiguous or other.ndim == 1


def test_states_share_what_cannot_change(make):
    mine = table(writeable=False)
    envs = make(lambda: Looking(mine), 4, num_workers=2, states=64)
    envs.reset()
    envs.step([3, 4, 5, 6])
    saved, *_ = [envs.save() for _ in range(8)]
    assert envs.stats().total.state_bytes < SIZE / 8
    assert max(own_memory(envs)) < SIZE / 2
    expected = envs.step([1, 2, 3, 4])
    envs.restore(saved)
    np.testing.assert_array_equal(envs.step([1, 2, 3, 4]).reward, expected.reward)
    envs.restore(saved[::-1])  # of other workers
    np.testing.assert_array_equal(envs.step([4, 3, 2, 1]).reward, expected.reward[::-1])


@pytest.mark.parametrize(("writeable", "copies"), [(False, 0.5), (True, 10)])
def test_a_proof_of_states_makes_few_copies(writeable, copies):
    access = mmap.ACCESS_COPY if writeable else mmap.ACCESS_READ
    descriptor = os.memfd_create("table")
    os.truncate(descriptor, 4 << 20)
    memory = mmap.mmap(descriptor, 4 << 20, access=access)
    os.close(descriptor)
    view = np.frombuffer(memoryview(memory), np.float64)
    env = Looking(view.copy() if writeable else view)
    env.action_space = spaces.Discrete(99, start=1)
    tracemalloc.start()
    try:
        prove(StatefulEnv(env), fresh=True)
        assert tracemalloc.get_traced_memory()[1] < copies * view.nbytes
    finally:
        tracemalloc.stop()


def test_states_are_exact_where_results_show_a_shared_array(make):
    class Showing(Looking):
        def step(self, action):
            reward = super().step(action)[1]
            return self.table[action : action + 1], reward, False, False, {"table": self.table.T}

    mine = np.arange(1 << 18, dtype=np.float64)  # 2 MB, as workers share arrays from 1 MB on
    mine.flags.writeable = False
    envs = make(lambda: Showing(mine), 2, num_workers=2, states=4)
    envs.reset()
    saved = envs.save()
    expected = envs.step([7, 8])
    for again in saved, envs.unpack_states(envs.pack_states(saved)):
        envs.restore(again[::-1])  # of the other worker
        np.testing.assert_array_equal(envs.step([8, 7]).obs, expected.obs[::-1])
        assert not any(envs.get_attr("table.flags.writeable"))
        np.testing.assert_array_equal(envs.infos()[0]["table"], mine)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_mapped_file_of_the_program_is_shared_by_workers_and_states(make, tmp_path, start_method):
    np.save(tmp_path / "table.npy", table())
    mine = np.load(tmp_path / "table.npy", mmap_mode="r")
    workers = jaxvec.Workers(start_method=start_method)
    options = {"num_workers": 2, "workers": workers, "states": 4}
    envs = make(lambda table: Looking((table, mine)[1]), 4, table=mine[:9], **options)
    envs.reset()
    saved = envs.save()
    assert envs.step([1, 2, 3, 4]).obs[:, 0].tolist() == [1, 2, 3, 4]
    envs.restore(saved)
    assert max(own_memory(envs)) < SIZE / 2
    assert envs.map(lambda env: type(env.unwrapped.table)) == (np.ndarray,) * 4


def test_states_share_a_file_that_is_mapped_to_be_read(make, tmp_path):
    np.save(tmp_path / "table.npy", table()[:1000])
    envs = make(lambda: Looking(np.load(tmp_path / "table.npy", mmap_mode="r")), 2, num_workers=2, states=4)
    envs.reset()
    saved = envs.save()
    expected = envs.step([7, 8])
    envs.restore(saved[::-1])
    np.testing.assert_array_equal(envs.step([8, 7]).reward, expected.reward[::-1])
    others = make(lambda: Looking(np.load(tmp_path / "table.npy", mmap_mode="c")), 1, states=4)
    others.reset()
    with pytest.raises(jaxvec.EnvStateError, match=r"Looking\.table.* mapped file.*mode='r'"):
        others.save()
