"""`send` and `recv`: steps in two halves, batches of the envs that are ready first, and what is refused."""

import threading
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import probe
from support.disasters import PATIENCE, GatedEnv, unfinished, wait_until
from support.probe import pool_of

import jaxvec
from jaxvec.testing import CountingEnv

BACKENDS = {
    "native": {"dispatch": "native"},
    "portable": {"dispatch": "portable"},
    "serial": {"backend": "serial"},
}


@pytest.fixture(params=BACKENDS)
def how(request):
    return BACKENDS[request.param]


# --- In programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_batch_of_all_envs_comes_in_the_order_sent(make, how, transport, batch_size):
    workers = {} if how.get("backend") else {"num_workers": 2}
    options = {"batch_size": batch_size, "recv_order": "sent", "transport": transport, **how, **workers}
    envs = make(CountingEnv, 4, **options)
    handle, timestep = jaxvec.reset(envs, seed=0)
    assert timestep.info["env_id"].tolist() == [0, 1, 2, 3]
    env_id = np.array([2, 0, 3, 1])

    def check(timestep):
        assert timestep.info["env_id"].tolist() == env_id.tolist()
        assert timestep.obs[:, 3].tolist() == [20, 0, 30, 10]

    @jax.jit
    def program(handle):
        return jaxvec.recv(jaxvec.send(handle, 10 * env_id, env_id))

    _, timestep = program(handle)
    check(timestep)
    for options in ({}, {"timeout": 60}, {"at_least": 4}, {"copy": False}):
        envs.send(10 * env_id[:1], env_id[:1])  # in two parts
        envs.send(10 * env_id[1:], env_id[1:])
        check(envs.recv(**options))


def test_without_batch_size_recv_returns_all_in_env_order(make, how, transport):
    workers = {} if how.get("backend") else {"num_workers": 3}
    envs = make(CountingEnv, 5, transport=transport, **how, **workers)
    handle, _ = jaxvec.reset(envs)

    @jax.jit
    def program(handle):
        handle = jaxvec.send(handle, jnp.array([1, 3]), jnp.array([4, 0]))
        handle = jaxvec.send(handle, jnp.array([5, 6, 7]), jnp.array([2, 1, 3]))
        return jaxvec.recv(handle)

    handle, timestep = program(handle)
    np.testing.assert_array_equal(timestep.info["env_id"], range(5))
    np.testing.assert_array_equal(timestep.obs[:, 3], [3, 6, 5, 7, 1])
    handle, _ = jaxvec.step(handle, jnp.zeros(5, int))  # all are received
    handle = jaxvec.send(handle, jnp.zeros(5, int))
    _, timestep = jaxvec.recv(handle)
    np.testing.assert_array_equal(timestep.obs[:, 1], 3)


def test_those_that_are_done_first_come_first(make, transport, tmp_path):
    envs = make(lambda: GatedEnv(tmp_path / "open"), 4, num_workers=4, batch_size=1, transport=transport)
    handle, timestep = jaxvec.reset(envs)
    arrived = timestep.info["env_id"].tolist()
    for _ in range(3):
        handle, timestep = jaxvec.recv(handle)
        arrived += timestep.info["env_id"].tolist()
    assert sorted(arrived) == [0, 1, 2, 3]
    handle = jaxvec.send(handle, jnp.array([7]), jnp.array([1]))
    for other in (3, 0, 2):  # one after the other: each is done before the next is sent
        handle = jaxvec.send(handle, jnp.array([0]), jnp.array([other]))
        while probe.unfinished(envs) != [1]:
            threading.Event().wait(0.001)
    order = []
    for _ in range(3):
        handle, timestep = jaxvec.recv(handle)
        order += timestep.info["env_id"].tolist()
    assert order == [3, 0, 2]
    (tmp_path / "open").touch()
    assert jaxvec.recv(handle)[1].info["env_id"].tolist() == [1]


def test_within_a_batch_they_are_in_the_order_in_which_they_were_done(make, transport):
    """One worker steps them as they were sent."""
    envs = make(CountingEnv, 4, num_workers=1, batch_size=2, transport=transport)
    handle, _ = jaxvec.reset(envs)
    handle, _ = jaxvec.recv(handle)
    turn = jax.jit(lambda h, ids: jaxvec.recv(jaxvec.send(h, ids, ids)))
    for ids in ([3, 0], [0, 3], [2, 1]):
        handle, timestep = turn(handle, jnp.array(ids))
        assert timestep.info["env_id"].tolist() == ids
        assert timestep.obs[:, 3].tolist() == ids


def test_a_slow_env_neither_starves_nor_holds_up_the_others(make, transport, tmp_path):
    """Env 0 waits while the others step on, and is served as soon as it is done."""
    envs = make(lambda: GatedEnv(tmp_path / "open"), 4, num_workers=4, batch_size=2, transport=transport)
    handle, timestep = jaxvec.reset(envs)

    @jax.jit
    def turn(handle, timestep):
        env_id = timestep.info["env_id"]
        handle = jaxvec.send(handle, jnp.where(env_id == 0, 7, 1), env_id)
        return jaxvec.recv(handle)

    seen = set()
    while timestep.obs[:, 1].max() < 100:
        handle, timestep = turn(handle, timestep)
        seen |= set(zip(timestep.info["env_id"].tolist(), timestep.obs[:, 1].tolist(), strict=True))
    assert {step for env_id, step in seen if env_id == 0} <= {0}
    (tmp_path / "open").touch()
    served = 0
    for _ in range(400):
        handle, timestep = turn(handle, timestep)
        served += 0 in timestep.info["env_id"]
    assert served >= 10


# --- On the host ------------------------------------------------------------------------------


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("on_fault", ["raise", "restart"])
@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_an_env_that_hangs_is_noticed_though_others_are_ready(make, dispatch, transport, on_fault, tmp_path):
    class Steady(GatedEnv):
        def step(self, action):
            threading.Event().wait(0.02)  # so some env of the other worker always runs
            return super().step(action)

    envs = make(
        lambda: Steady(tmp_path / "gate"),
        4,
        num_workers=2,
        batch_size=1,
        dispatch=dispatch,
        transport=transport,
        step_timeout=1.0,
        on_fault=on_fault,
    )
    handle, timestep = jaxvec.reset(envs)
    turn = jax.jit(lambda h, ids: jaxvec.recv(jaxvec.send(h, jnp.where(ids == 3, 7, 1), ids)))
    running = r"Still running: env 3 \(worker 1, action 7\)\.( Also unfinished: env 2\.)? Raise"
    late = rf"step timed out after 1.0 s\. {running}"
    faults = 0
    with pytest.raises(RuntimeError, match=late) if on_fault == "raise" else nullcontext():
        while not faults:
            handle, timestep = turn(handle, timestep.info["env_id"])
            faults += int(timestep.info["fault"].sum()) if on_fault == "restart" else 0
    assert envs.stats().total.restarts == faults


def test_one_thread_sends_while_another_receives(make, tmp_path):
    envs = make(lambda: GatedEnv(tmp_path / "open"), 2, num_workers=2, batch_size=1)
    envs.reset()
    envs.recv()
    envs.send([7], [0])
    got = []
    receiver = threading.Thread(target=lambda: got.append(envs.recv().info["env_id"].tolist()))
    receiver.start()
    while probe.num_moves(envs)[0] < 4:  # until the receiver waits
        threading.Event().wait(0.001)
    envs.send([0], [1])  # is not held up by it
    (tmp_path / "open").touch()
    receiver.join(PATIENCE)
    assert got == [[0]]
    assert envs.recv().info["env_id"].tolist() == [1]


def test_views_are_read_only_and_show_the_segment(make):
    envs = make(CountingEnv, 4, num_workers=2, batch_size=2, recv_order="sent")
    envs.reset()
    views = envs.recv(copy=False)
    assert views.info["env_id"].tolist() == [1, 3]
    assert not views.obs.flags.writeable
    assert views.obs.base is not None
    copies = views.obs.copy()
    envs.send([5, 6], [1, 3])
    envs.send([1, 2], [0, 2])
    np.testing.assert_array_equal(envs.recv(copy=False).obs[:, 3], [5, 6])
    np.testing.assert_array_equal(views.obs[:, 3], [5, 6])  # the same memory
    assert copies[:, 3].tolist() == [-1, -1]
    envs.send([8, 9], [3, 1])
    envs.recv()
    backwards = envs.recv(copy=False)  # such rows are copied
    assert backwards.obs[:, 3].tolist() == [8, 9]
    assert backwards.obs.flags.writeable


def check_rows(timestep, ids, actions, resets=1):
    """Checks all fields of the rows of envs that were stepped once since their reset; by -1, not at all."""
    steps = [int(action >= 0) for action in actions]
    np.testing.assert_array_equal(timestep.obs[:, 0], resets)
    assert timestep.obs[:, 2].tolist() == timestep.reward.tolist() == steps
    assert timestep.obs[:, 3].tolist() == list(actions)
    assert not timestep.terminated.any()
    assert not timestep.truncated.any()
    assert timestep.info.keys() == {"env_id", "episode_return", "episode_length", "final_obs", "_final_obs"}
    assert timestep.info["env_id"].tolist() == list(ids)
    assert timestep.info["episode_return"].tolist() == timestep.info["episode_length"].tolist() == steps
    assert timestep.info["final_obs"].tolist() == [[0] * 4] * len(steps)
    assert not timestep.info["_final_obs"].any()


@pytest.mark.parametrize("order", ["ready", "sent"])
@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_all_that_are_ready_are_returned_and_one_at_least(make, dispatch, order, tmp_path):
    gate = tmp_path / "open"
    envs = make(GatedEnv, 4, gate=gate, num_workers=4, batch_size=2, recv_order=order, dispatch=dispatch)
    envs.reset()
    envs.recv()
    with pytest.raises(jaxvec.PendingEnvError, match="recv returns at least 1 envs, but only 0 are pending"):
        envs.recv(at_least=1)
    envs.send([7], [1])
    for other in (3, 0, 2):  # one after the other: each is done before the next is sent
        envs.send([other], [other])
        wait_until(lambda: unfinished(envs) == [1])
    if order == "ready":
        check_rows(envs.recv(at_least=1), [3, 0, 2], [3, 0, 2])  # more than batch_size
        with pytest.raises(jaxvec.PendingEnvError, match="recv returns at least 2 envs, but only 1 are"):
            envs.recv(at_least=2)
    with pytest.raises(jaxvec.NotReadyError):
        envs.recv(at_least=1, timeout=0)
    gate.touch()
    ids = [1] if order == "ready" else [1, 3, 0, 2]
    check_rows(envs.recv(at_least=1, timeout=PATIENCE), ids, [7, 3, 0, 2][: len(ids)])


def test_without_batch_size_those_that_are_ready_are_returned_too(make, tmp_path):
    """As programs with ML-Agents go: a worker with one env each, and whoever has answered is next."""
    gate = tmp_path / "open"
    envs = make(GatedEnv, 3, gate=gate, num_workers=3)
    envs.reset()
    envs.send([5, 7, 6])
    wait_until(lambda: unfinished(envs) == [1])
    timestep = envs.recv(at_least=2)
    ids = timestep.info["env_id"].tolist()
    assert sorted(ids) == [0, 2]
    check_rows(timestep, ids, [5 + env_id // 2 for env_id in ids])
    gate.touch()
    check_rows(envs.recv(at_least=1), [1], [7])
    assert envs.step([0, 0, 0]).obs[:, 2].tolist() == [2, 2, 2]  # all are received


# --- What is refused --------------------------------------------------------------------------


REFUSED = {
    "nothing in flight": (
        lambda h: jaxvec.recv(h),
        jaxvec.PendingEnvError,
        "recv returns 2 envs, but only 0 are",
    ),
    "in flight": (
        lambda h: jaxvec.send(
            jaxvec.send(h, jnp.zeros(2, int), jnp.array([0, 1])), jnp.zeros(2, int), jnp.array([2, 1])
        ),
        jaxvec.PendingEnvError,
        r"envs \[1\] are pending",
    ),
    "a step of envs in flight": (
        lambda h: jaxvec.step(jaxvec.send(h, jnp.zeros(1, int), jnp.array([3])), jnp.zeros(4, int)),
        jaxvec.PendingEnvError,
        r"envs \[3\] are pending",
    ),
    "twice": (
        lambda h: jaxvec.send(h, jnp.zeros(2, int), jnp.array([1, 1])),
        jaxvec.EnvIdError,
        "duplicate env_id 1",
    ),
    "foreign": (
        lambda h: jaxvec.send(h, jnp.zeros(2, int), jnp.array([1, 4])),
        jaxvec.EnvIdError,
        "env_id 4 is out of range for pool",
    ),
    "a part of the pool's handle": (
        lambda h: jaxvec.recv(jax.tree.map(lambda x: x[:2], h)),
        jaxvec.EnvIdError,
        "all 4 envs, not to 2",
    ),
    "a reset of some": (
        lambda h: jaxvec.reset(jax.tree.map(lambda x: x[:2], h)),
        jaxvec.EnvIdError,
        "all 4 envs, not to 2",
    ),
    "a reset by mask of all, one in flight": (
        lambda h: jaxvec.reset(jaxvec.send(h, jnp.zeros(1, int), jnp.array([2])), mask=np.ones(4, bool)),
        jaxvec.PendingEnvError,
        r"envs \[2\] are pending",
    ),
    "a reset by mask of too few": (
        lambda h: jaxvec.reset(h, mask=np.array([True, False, False, False])),
        jaxvec.PendingEnvError,
        "reset returns 2 envs, as recv does, but with the 1 of mask only 1 would be pending",
    ),
    "a handle with an env twice": (
        lambda h: jaxvec.send(
            jax.tree.map(lambda x: x[jnp.array([0, 0, 2, 3])], h), jnp.zeros(1, int), jnp.array([1])
        ),
        jaxvec.EnvIdError,
        "duplicate env_id 0",
    ),
    "a handle with an env twice, at recv": (
        lambda h: jaxvec.recv(
            jax.tree.map(lambda x: x[jnp.array([0, 0, 2, 3])], jaxvec.send(h, jnp.zeros(4, int)))
        ),
        jaxvec.EnvIdError,
        "duplicate env_id 0",
    ),
    "stale": (
        lambda h: (
            jaxvec.send(h, jnp.zeros(1, int), jnp.array([0])),
            jaxvec.send(h, jnp.zeros(1, int), jnp.array([1])),
        ),
        jaxvec.StaleHandleError,
        "stale handle.*the latest is call .*, by jaxvec.send",
    ),
}


@pytest.mark.slow(but=14)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_moves_nothing_and_leaves_the_pool_usable(make, transport, case, jit):
    call, error, match = REFUSED[case]
    envs = make(CountingEnv, 4, num_workers=2, batch_size=2, transport=transport)
    handle, _ = jaxvec.reset(envs)
    handle, _ = jaxvec.recv(handle)  # all are received
    with pytest.raises((error, RuntimeError), match=match):
        jax.block_until_ready((jax.jit(call) if jit else call)(handle))
    handle, timestep = jaxvec.reset(envs)
    handle, _ = jaxvec.recv(handle)
    handle = jaxvec.send(handle, jnp.zeros(4, int))
    _, timestep = jaxvec.recv(handle)
    assert (timestep.obs[:, 1] <= 2).all()
    assert pool_of(envs).state.broken_by is None


def test_a_handle_in_another_order_is_the_same_handle(make, transport):
    envs = make(CountingEnv, 4, batch_size=2, transport=transport)
    handle, _ = jaxvec.reset(envs)
    handle, first = jaxvec.recv(jax.tree.map(lambda x: x[::-1], handle))
    handle = jaxvec.send(handle, jnp.array([3, 4]), first.info["env_id"])
    _, second = jaxvec.recv(handle)
    assert sorted(first.info["env_id"].tolist()) == sorted(second.info["env_id"].tolist())
    assert sorted(second.obs[:, 3].tolist()) == [3, 4]


def test_arguments_that_can_not_be_are_refused(make, transport):
    envs = make(CountingEnv, 4, batch_size=2, transport=transport)
    handle, _ = jaxvec.reset(envs)
    with pytest.raises(jaxvec.EnvIdError, match="integers of shape"):
        jaxvec.send(handle, jnp.zeros(2, int), jnp.array([0.0, 1.0]))
    with pytest.raises(jaxvec.ActionError, match=r"of shape \(3,\), .* got .*\(2,\)"):
        jaxvec.send(handle, jnp.zeros(2, int), jnp.array([0, 1, 2]))
    for wrong in (0, 5, True, 2.0):
        with pytest.raises(ValueError, match=r"at_least must be an integer from 1 to num_envs \(4\), not"):
            envs.recv(at_least=wrong)
    with pytest.raises(NotImplementedError, match="can't be split over vmapped instances"):
        jax.vmap(jaxvec.recv)(jax.tree.map(lambda x: x[None], handle))
    for wrong in (0, 5, True, 2.0):
        with pytest.raises(ValueError, match="batch_size must be an integer from 1 to num_envs"):
            make(CountingEnv, 4, batch_size=wrong)
    with pytest.raises(ValueError, match="recv_order must be"):
        make(CountingEnv, 4, batch_size=2, recv_order="first")
    with pytest.raises(ValueError, match="reset themselves"):
        make(CountingEnv, 4, batch_size=2, autoreset_mode="DISABLED")
