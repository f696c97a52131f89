"""Calls of several threads overlap, also with steps, if their envs are of different workers, or else wait."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import probe
from support.disasters import PATIENCE, Background, wait_until, within
from support.probe import FairLocks, _native

import jaxvec
from jaxvec.testing import CountingEnv

KINDS = ["portable"] if _native.reason_unavailable() else ["portable", "native"]
HELD = 7  # action of a step, and seed of a reset, that is held up


class Meeting(CountingEnv):
    """Says by files that it is inside its code, and waits there for other files."""

    def __init__(self, env_id, folder):
        super().__init__()
        self.env_id, self.folder, self.told = env_id, folder, []

    def hold(self, who="open"):
        """Waits for the file `who`."""
        (self.folder / f"in {self.env_id}").touch()
        while not (self.folder / who).exists():
            threading.Event().wait(0.001)
        return self.env_id

    def meet(self, other):
        """Returns only if it is inside at the same time as that env."""
        return self.hold(f"in {other}")

    def tell(self, what):
        self.told.append(what)
        return what

    def step(self, action):
        if action == HELD:
            self.hold()
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        if seed == HELD:
            self.hold()
        return super().reset(seed=seed, options=options)

    def die(self):
        os._exit(3)


class Pool:
    """A pool of two workers with two such envs each; a call, or step, of which waits at the gate."""

    def __init__(self, make, dispatch, folder, **kwargs):
        self._folder = folder
        options = {
            "num_workers": 2,
            "dispatch": dispatch,
            "step_timeout": PATIENCE,
            "reset_timeout": PATIENCE,
        }
        self.envs = make(Meeting, 4, folder=folder, **options | kwargs)

    def wait_until_inside(self, env_id):
        wait_until((self._folder / f"in {env_id}").exists)

    def open(self):
        (self._folder / "open").touch()


@pytest.fixture(params=KINDS)
def pool_of(make, request, tmp_path):
    pools = []

    def pool_of(**kwargs):
        pools.append(Pool(make, request.param, tmp_path, **kwargs))
        return pools[-1]

    yield pool_of
    for pool in pools:
        pool.open()


# --- Calls beside calls ------------------------------------------------------------------------


def promises(envs):
    return [envs.call_async("meet", 3 - i, indices=i) for i in (0, 3)]


def maps(envs):
    return [Background(lambda i=i: envs.map(lambda env: env.meet(3 - i), indices=i)) for i in (0, 3)]


def programs(envs):
    handle, _ = jaxvec.reset(envs)

    def call(handle, other):
        return tuple(jaxvec.call(handle, "meet", other, result_shape_dtypes=int)[1].tolist())

    halves = [(jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], handle), 3 - i) for i in (0, 3)]
    return [Background(partial(call, *half)) for half in halves]


@pytest.mark.parametrize("begin", [promises, maps, programs])
def test_calls_for_envs_of_different_workers_are_under_way_at_once(pool_of, begin):
    """Each waits until it has met the other."""
    envs = pool_of().envs
    assert [call.result(PATIENCE) for call in begin(envs)] == [(0,), (3,)]
    assert envs.get_attr("env_id") == (0, 1, 2, 3)


def test_calls_for_envs_of_one_worker_keep_their_order(pool_of):
    envs = pool_of().envs
    futures = [envs.call_async("tell", i, indices=i % 2) for i in range(10)]
    assert [future.result(PATIENCE) for future in futures] == [(i,) for i in range(10)]
    assert envs.get_attr("told") == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9], [], [])


def test_a_call_for_all_waits_for_a_call_for_one(pool_of):
    pool = pool_of()
    one = pool.envs.call_async("hold", indices=2)
    pool.wait_until_inside(2)
    everybody = Background(lambda: pool.envs.map(lambda env: (env.folder / "open").exists()))
    assert pool.envs.call("tell", 5, indices=[1, 0]) == (5, 5)  # while that waits, it keeps nobody waiting
    pool.open()
    assert everybody.result() == (True,) * 4
    assert one.result(PATIENCE) == (2,)


def test_each_of_many_threads_gets_its_own_answer(pool_of):
    """Also while envs are stepped, some of them beside a call, some after it."""
    envs = pool_of(batch_size=2).envs
    envs.reset()
    envs.recv()

    def ask(thread):
        for i in range(20):
            env_id = (thread + i) % 4
            assert envs.call("tell", (thread, i), indices=[env_id]) == ((thread, i),)

    def step():
        envs.send([1] * 4)
        rows = []
        for _ in range(60):
            rows.append(envs.recv())
            envs.send([1] * 2, rows[-1].info["env_id"])
        return [*rows, envs.recv(), envs.recv()]

    with ThreadPoolExecutor(5) as threads:
        stepping = threads.submit(step)
        for asking in [threads.submit(ask, thread) for thread in range(4)]:
            asking.result(PATIENCE)
        rows = stepping.result(PATIENCE)
    steps = np.zeros(4, int)
    for timestep in rows:
        ids = timestep.info["env_id"]
        steps[ids] += 1
        assert timestep.obs[:, 1].tolist() == steps[ids].tolist()
    assert sum(map(len, envs.get_attr("told"))) == 80


# --- Calls beside steps and resets -----------------------------------------------------------------


def receiving(envs):
    envs.reset()
    envs.recv()
    envs.send([HELD], [3])
    return lambda: envs.recv(at_least=1).info["env_id"].tolist()


def resetting(envs):
    envs.reset()
    seeds = [0, 1, 2, HELD]
    return lambda: envs.reset(seed=seeds, mask=np.array([False] * 3 + [True])).obs[:, 1].tolist()


def stepping_in_a_program(envs):
    handle, _ = jaxvec.reset(envs)
    part = jax.tree.map(lambda leaf: leaf[3:], handle)
    return lambda: jax.jit(jaxvec.step)(part, jnp.array([HELD]))[1].obs[:, 1].tolist()


@pytest.mark.parametrize(
    ("begin", "batch_size", "expected"),
    [(receiving, 2, [3]), (resetting, None, [0] * 4), (stepping_in_a_program, None, [1])],
)
def test_calls_for_idle_envs_return_while_others_are_moved(pool_of, begin, batch_size, expected):
    pool = pool_of(batch_size=batch_size)
    envs = pool.envs
    moving = Background(begin(envs))
    pool.wait_until_inside(3)
    envs.set_attr("name", "idle", indices=[0])
    assert within(lambda: envs.get_attr("name", indices=[0])) == ("idle",)
    assert within(lambda: envs.infos([0])) == ({"seed": -1, "options": None},)
    pool.open()
    assert moving.result() == expected


def test_other_envs_are_moved_while_a_call_is_under_way(pool_of):
    pool = pool_of(batch_size=2)
    envs = pool.envs
    envs.reset()
    envs.recv()
    call = envs.call_async("hold", indices=[2])
    pool.wait_until_inside(2)
    within(lambda: envs.send([4, 5], [0, 1]))
    assert sorted(within(envs.recv).obs[:, 3].tolist()) == [4, 5]
    waits = Background(lambda: envs.send([6], [3]))  # of the same worker
    within(lambda: envs.send([4, 5], [1, 0]))
    assert sorted(within(envs.recv).obs[:, 3].tolist()) == [4, 5]
    pool.open()
    assert call.result(PATIENCE) == (2,)
    waits.result()
    assert envs.recv(at_least=1).obs[:, 3].tolist() == [6]


@pytest.mark.parametrize(
    ("move", "expected"),
    [
        (lambda envs: envs.step([1, 1, 1, HELD]), [[1, 1, 1, 1]] * 3 + [[1, 1, 1, 7]]),
        (lambda envs: envs.reset(seed=[1, 1, 1, HELD]), [[2, 0, 0, -1]] * 4),
    ],
    ids=["step", "reset"],
)
def test_an_env_that_is_moved_is_not_sent_before_the_move_is_done(pool_of, monkeypatch, move, expected):
    pool = pool_of()
    envs, engine = pool.envs, probe.engine(pool.envs)
    envs.reset()
    moving = Background(lambda: move(envs).obs.tolist())
    pool.wait_until_inside(3)
    exclusive, waits = engine.exclusive, threading.Event()
    monkeypatch.setattr(engine, "exclusive", lambda slots: waits.set() or exclusive(slots))
    sending = Background(lambda: envs.send([5], [3]))
    wait_until(lambda: waits.is_set() or not sending._thread.is_alive())
    pool.open()
    sending.result()
    assert moving.result() == expected
    resets, steps, in_episode, _ = expected[3]
    assert envs.recv(at_least=1).obs.tolist() == [[resets, steps + 1, in_episode + 1, 5]]


def test_a_handle_that_a_call_has_is_stale_for_others_at_once(pool_of):
    """Not only when the call is done: what the others do needs none of its envs."""
    pool = pool_of(batch_size=2)
    handle, timestep = jaxvec.reset(pool.envs)
    call = Background(lambda: jaxvec.call(handle, "hold", result_shape_dtypes=int))
    pool.wait_until_inside(2)
    with pytest.raises(jaxvec.StaleHandleError, match="the latest is call 2, by jaxvec.call"):
        within(lambda: jax.block_until_ready(jaxvec.recv(handle)))
    pool.open()
    after, answers = call.result()
    assert answers.tolist() == [0, 1, 2, 3]
    assert len({*timestep.info["env_id"].tolist(), *jaxvec.recv(after)[1].info["env_id"].tolist()}) == 4


# --- What fails ---------------------------------------------------------------------------------


def test_a_worker_that_dies_in_a_call_leaves_the_others_answer_right(pool_of):
    pool = pool_of(on_fault=jaxvec.Restart(rate=None))
    envs = pool.envs
    envs.reset()
    other = envs.call_async("hold", indices=[2])
    pool.wait_until_inside(2)
    with pytest.raises(jaxvec.WorkerDiedError, match="exited with code 3 while answering call") as died:
        envs.call("die", indices=[1])
    assert died.value.worker == 0
    assert envs.call("tell", 1, indices=[0]) == (1,)  # of the worker in its place
    pool.open()
    assert other.result(PATIENCE) == (2,)
    assert envs.get_attr("told") == ([1], [], [], [])
    assert [worker.restarts for worker in envs.stats().workers] == [1, 0]


def test_two_workers_that_die_at_once_are_replaced_once_each(pool_of):
    envs = pool_of(on_fault=jaxvec.Restart(rate=None)).envs
    envs.reset()
    calls = [Background(lambda i=i: envs.call("die", indices=[i])) for i in (0, 3)]
    for worker, call in enumerate(calls):
        with pytest.raises(jaxvec.WorkerDiedError, match="exited with code 3 while answering call") as died:
            call.result()
        assert died.value.worker == worker
    assert envs.call("tell", 1) == (1,) * 4
    assert [worker.restarts for worker in envs.stats().workers] == [1, 1]


def test_where_a_death_breaks_the_pool_the_other_call_says_so(pool_of):
    pool = pool_of()
    other = pool.envs.call_async("hold", indices=[2])
    pool.wait_until_inside(2)
    with pytest.raises(jaxvec.WorkerDiedError, match="while answering call") as died:
        pool.envs.call("die", indices=[1])
    with pytest.raises(jaxvec.PoolBrokenError) as broken:
        other.result(PATIENCE)
    assert broken.value.__cause__ is died.value


def test_a_pool_is_closed_during_two_calls(pool_of):
    pool = pool_of()
    calls = [pool.envs.call_async("hold", indices=[i]) for i in (1, 2)]
    for i in (1, 2):
        pool.wait_until_inside(i)
    within(pool.envs.close)
    for call in calls:
        with pytest.raises(jaxvec.PoolClosedError):
            call.result(PATIENCE)


# --- FairLocks ---------------------------------------------------------------------------------------


def test_fair_locks_are_granted_in_order_of_request():
    turns, order, ends = FairLocks(), [], {name: threading.Event() for name in "abc"}

    def take(name, *things):
        with turns.acquire(*things):
            order.append(name)
            assert name not in ends or ends[name].wait(PATIENCE)

    threads = []
    for name, things in {"a": (0,), "b": (0, 1), "c": (1, 2), "d": (2,), "e": (3,), "f": ()}.items():
        threads.append(Background(partial(take, name, *things)))
        wait_until(lambda: len(turns._queue) >= min(len(threads), 4))  # it has come, or is done
    for free in threads[4:]:
        free.result()
    assert sorted(order) == ["a", "e", "f"]
    for name, thread in zip("abcd", threads, strict=False):
        if name in ends:
            ends[name].set()
        thread.result()
    assert [name for name in order if name in "abcd"] == ["a", "b", "c", "d"]
    with turns.acquire(0), turns.acquire(0, 1):  # a thread does not wait for itself
        pass
