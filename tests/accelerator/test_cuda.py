"""Calls of programs on NVIDIA's GPUs. Without one: by a driver that makes every copy as late as it may."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import probe
from support.disasters import ImageEnv, RaisingEnv, SlowEnv
from support.fake_cuda import (
    ILLEGAL_ADDRESS,
    OUT_OF_MEMORY,
    CallError,
    Gpu,
)
from support.oracle import canonical
from support.probe import CEngine, Verb, _call, _ffi, _native, _operands, pool_of
from support.probe import pool_module as _pool

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

pytestmark = pytest.mark.jax_version

COPIES = TO_GPU, TO_HOST, ZEROS = "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemsetD8Async"


@pytest.fixture
def pool(make, driver):
    """Makes a pool with the native dispatch."""

    def pool(env, num_envs, **kwargs):
        return make(env, num_envs, transport="ffi", dispatch="native", **kwargs)

    return pool


@pytest.fixture
def start(driver, pool):
    """Makes a pool and resets it in a program; returns the pool, the program's calls and the token."""

    def start(env, num_envs, **kwargs):
        envs = pool(env, num_envs, **kwargs)
        gpu = Gpu(driver, envs)
        token, _ = gpu.reset(seed=0)
        gpu.wait()
        return envs, gpu, token

    return start


def as_timestep(envs, rows):
    return envs.spec.build_timestep(rows)


def page_locking(driver):
    return [call.split()[0] for call in driver.take_calls() if call.startswith("cuMemHost")]


# --- The same data as on the CPU --------------------------------------------------------------


@pytest.mark.slow(but=3)
@pytest.mark.usefixtures("patient_programs")
@pytest.mark.parametrize("env", [CountingEnv, NestedEnv, ImageEnv])
@pytest.mark.parametrize("autoreset_mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"backend": "serial"}], ids=["process", "serial"])
def test_steps_are_those_of_the_cpu_and_need_no_python(
    driver, pool, make, monkeypatch, env, autoreset_mode, options
):
    envs = pool(env, 3, autoreset_mode=autoreset_mode, **options)
    oracle = make(env, 3, autoreset_mode=autoreset_mode)
    gpu = Gpu(driver, envs)
    token, rows = gpu.reset(seed=5)
    handle, timestep = jaxvec.reset(oracle, seed=5)
    monkeypatch.setattr(_pool.Pool, "end", None)
    envs.action_space.seed(0)
    step = jax.jit(jaxvec.step)
    for _ in range(8):
        action = canonical(envs.action_space.sample())
        with monkeypatch.context() as patch:
            patch.setattr(_pool.Pool, "step", None)
            token, rows = gpu.step(token, action)
        handle, timestep = step(handle, action)
        gpu.wait()
        jax.tree.map(np.testing.assert_array_equal, as_timestep(envs, rows), timestep)
    assert probe.num_moves(envs, token[:, 2]) == [9] * 3


# Images, final images, all of which are zeros, and what is packed: the token and small results.
@pytest.mark.parametrize(("env", "copies"), [(ImageEnv, (TO_GPU, ZEROS, TO_GPU)), (NestedEnv, (TO_GPU,))])
def test_a_step_waits_for_its_stream_once_and_for_nothing_else(driver, start, env, copies):
    envs, gpu, token = start(env, 3)
    action = canonical(envs.action_space.sample())
    token, _ = gpu.step(token, action)
    gpu.wait()  # for its buffer of page-locked memory
    driver.take_calls()
    gpu.step(token, action)
    calls = driver.take_calls()
    assert [call for call in calls if "Synchronize" in call] == ["cuStreamSynchronize"]
    operands = 1 + len(jax.tree.leaves(action))
    assert [call for call in calls if call in COPIES] == [*[TO_HOST] * operands, *copies]
    assert "cuMemHostAlloc" not in calls


class DigitsEnv(ImageEnv):
    """Any env may take more than ten of the steps here, if the other worker is slow."""

    def _observe(self, action):
        return super()._observe(action) - np.uint8(self.steps // 10 * 10 if action >= 0 else 0)


@pytest.mark.parametrize("env", [CountingEnv, DigitsEnv])
@pytest.mark.parametrize("order", ["ready", "sent"])
def test_first_ready_batches(driver, pool, monkeypatch, env, order):
    envs = pool(env, 6, num_workers=2, batch_size=2, recv_order=order)
    gpu = Gpu(driver, envs)
    token, rows = gpu.reset(seed=5)
    for verb in ("send", "recv", "end"):
        monkeypatch.setattr(_pool.Pool, verb, None)
    counted = np.zeros(6, int)
    for _ in range(20):
        gpu.wait()
        env_id = as_timestep(envs, rows).info["env_id"].copy()
        counted[env_id] += 1
        token = gpu.send(token, env_id, env_id)
        token, rows = gpu.recv(token)
        gpu.wait()
        timestep = as_timestep(envs, rows)
        received = timestep.info["env_id"]
        if env is DigitsEnv:
            assert (timestep.obs == timestep.obs[:, :1, :1]).all()
            late = timestep.obs[:, 0, 0] // 10
            np.testing.assert_array_equal(
                late[timestep.obs[:, 0, 0] % 10 > 0], received[timestep.obs[:, 0, 0] % 10 > 0]
            )
        else:
            stepped = timestep.obs[:, 1] > 0
            np.testing.assert_array_equal(timestep.obs[stepped, 3], received[stepped])
    monkeypatch.undo()
    assert counted.sum() == 40


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_pools_of_every_kind_are_served(driver, make, dispatch):
    for backend in ("process", "serial"):
        envs = make(CountingEnv, 2, dispatch=dispatch, backend=backend)
        gpu = Gpu(driver, envs)
        token, _ = gpu.reset(seed=1)
        token, rows = gpu.step(token, np.array([3, 4], np.int32))
        gpu.wait()
        np.testing.assert_array_equal(as_timestep(envs, rows).obs[:, 3], [3, 4])


def test_a_slow_step_is_ended_by_python(start):
    envs, gpu, token = start(SlowEnv, 2, num_workers=2)
    for step in range(1, 4):
        token, rows = gpu.step(token, np.array([0, 7], np.int32))
        gpu.wait()
        timestep = as_timestep(envs, rows)
        assert timestep.obs[:, 1].tolist() == [step] * 2
        assert timestep.obs[:, 3].tolist() == [0, 7]


# --- No row is overwritten while its copy is in flight -------------------------------------------


def images(rows, envs):
    return as_timestep(envs, rows).obs[:, 0, 0].tolist()


def test_copies_are_late_here(start):
    """What the next tests rest on: a step returns before its rows were read."""
    envs, gpu, token = start(ImageEnv, 3)
    token, rows = gpu.step(token, np.array([1, 2, 3], np.int32))
    assert images(rows, envs) == [77] * 3
    gpu.wait()
    assert images(rows, envs) == [11, 21, 31]


def test_the_next_step_of_a_program_leaves_the_rows_in_flight_alone(start):
    envs, gpu, token = start(ImageEnv, 3)
    seen = []
    for action in range(1, 6):
        token, rows = gpu.step(token, np.full(3, action, np.int32))
        seen.append(rows)
    gpu.wait()
    assert [images(rows, envs)[0] for rows in seen] == [11, 22, 0, 44, 55]  # the third ends an episode


def test_the_token_comes_after_all_rows(driver, pool):
    envs = pool(ImageEnv, 3)
    gpu = Gpu(driver, envs)
    token, rows = gpu.reset(seed=0)
    for _ in range(4):  # the first is Python's, the fourth ends episodes
        copies = 0
        while not (token[:, 0] == pool_of(envs).id).all():
            assert driver.advance(gpu.stream) >= 0
            copies += 1
            assert copies < 100
        there = [row.copy() for row in rows]
        assert copies == 3  # images, those of ends of episodes, and what is packed with the token
        gpu.wait()
        for before, after in zip(there, rows, strict=True):
            np.testing.assert_array_equal(before, after)
        token, rows = gpu.step(token, np.array([1, 2, 3], np.int32))


def test_a_token_that_was_not_copied_yet_moves_nothing(driver, pool):
    """The token comes last, so a stream that sees it sees that all rows were read."""
    envs = pool(ImageEnv, 3)
    gpu, other = Gpu(driver, envs, 0x1001), Gpu(driver, envs, 0x1002)
    token, _ = gpu.reset(seed=0)
    gpu.wait()
    token, rows = gpu.step(token, np.array([1, 2, 3], np.int32))
    with pytest.raises(CallError, match="env_id 77|several pools|no pool 77|foreign handle: pool 77"):
        other.step(token, np.zeros(3, np.int32))
    gpu.wait()
    other.step(token, np.zeros(3, np.int32))
    assert images(rows, envs) == [11, 21, 31]


HOST = {
    "step": lambda envs: envs.step(np.zeros(3, np.int32)),
    "reset": lambda envs: envs.reset(seed=1),
    "send": lambda envs: (envs.send(np.zeros(3, np.int32)), envs.recv()),
    "reset_async": lambda envs: (envs.reset_async(seed=1), envs.recv()),
    "a program's first reset": lambda envs: jaxvec.reset(envs),
}


@pytest.mark.parametrize("verb", HOST)
def test_who_needs_no_token_waits_for_the_rows_in_flight(start, verb):
    envs, gpu, token = start(ImageEnv, 3)
    _, rows = gpu.step(token, np.array([1, 2, 3], np.int32))
    HOST[verb](envs)
    gpu.wait()
    assert images(rows, envs) == [11, 21, 31]


def test_else_they_would_be_overwritten(start, monkeypatch):
    """That the last test can fail."""
    envs, gpu, token = start(ImageEnv, 3)
    _, rows = gpu.step(token, np.array([1, 2, 3], np.int32))
    monkeypatch.setattr(CEngine, "wait_for_copies", lambda self: None)
    HOST["step"](envs)
    gpu.wait()
    assert images(rows, envs) == [2] * 3


def test_close_waits_for_the_rows_in_flight(driver, start):
    envs, gpu, token = start(ImageEnv, 3)
    _, rows = gpu.step(token, np.array([1, 2, 3], np.int32))
    assert driver.registered == 1
    envs.close()
    assert driver.registered == 0
    assert images(rows, envs) == [11, 21, 31]
    with pytest.raises(CallError, match="PoolClosedError"):
        gpu.step(token, np.zeros(3, np.int32))


def test_devices_step_their_own_envs_concurrently(driver, start, monkeypatch):
    envs, _, token = start(ImageEnv, 4, num_workers=2)
    monkeypatch.setattr(_ffi, "_PACKED", ("cpu",))
    step = _call.Call(Verb.STEP, envs.spec, "ffi")
    _ffi.prepare(step, step.operands(2, 2), platform="cpu", copies=2)
    assert len(page_locking(driver)) >= 3
    outcomes = {}

    def run(device, token):
        gpu = Gpu(driver, envs, 0x1000 * device + 1)
        seen = []
        for step in range(1, 51):
            token, rows = gpu.step(token, np.full(2, step % 10 + 2 * device, np.int32))
            seen.append((step % 10 + 2 * device, rows))
        gpu.wait()
        outcomes[device] = [(action, images(rows, envs)) for action, rows in seen]

    threads = [
        threading.Thread(target=run, args=(1, token[:2])),
        threading.Thread(target=run, args=(2, token[2:])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for device in (1, 2):
        for step, (action, seen) in enumerate(outcomes[device], 1):
            assert seen == [(10 * action + step) % 256 if step % 3 else 0] * 2
    assert page_locking(driver) == []


# --- Errors ---------------------------------------------------------------------------------------


def test_errors_are_those_of_the_cpu(start):
    envs, gpu, first = start(CountingEnv, 2)
    second, _ = gpu.step(first, np.zeros(2, np.int32))
    with pytest.raises(CallError, match="StaleHandleError: stale handle: it is from call 1 to env 0"):
        gpu.step(first, np.zeros(2, np.int32))
    with pytest.raises(jaxvec.StaleHandleError):
        envs.raise_if_failed()
    action = _operands.types_of([np.zeros(2, np.int32)])
    with pytest.raises(CallError, match="buffers"):
        gpu.call(Verb.STEP, [second, np.zeros(2, np.float32)], arguments=action)
    with pytest.raises(CallError, match="buffers"):
        gpu.call(Verb.STEP, [second], arguments=action)
    with pytest.raises(CallError, match="dtype that NumPy does not have"):
        gpu.call(Verb.STEP, [second, np.zeros(2, "V4")])
    gpu.step(second, np.zeros(2, np.int32))
    assert envs.get_attr("steps") == (2, 2)


def test_an_env_that_raises_breaks_the_pool(start):
    envs, gpu, token = start(RaisingEnv, 2)
    with pytest.raises(CallError, match="bad luck"):
        gpu.step(token, np.array([0, 7], np.int32))
    with pytest.raises(CallError, match="PoolBrokenError"):
        gpu.step(token, np.zeros(2, np.int32))
    with pytest.raises(jaxvec.PoolBrokenError):
        envs.raise_if_failed()


def test_an_error_that_nobody_waited_for_comes_where_the_pool_is_left(start):
    """A GPU's client tells of it only who waits for the program's results."""
    envs, gpu, token = start(RaisingEnv, 2)
    with pytest.raises(jaxvec.EnvError, match="bad luck"), envs, pytest.raises(CallError):
        gpu.step(token, np.array([0, 7], np.int32))


def test_an_error_is_old_news_once_a_program_went_on_or_it_was_taken(start):
    for take in (False, True):
        envs, gpu, first = start(CountingEnv, 2)
        with envs:
            second, _ = gpu.step(first, np.zeros(2, np.int32))
            with pytest.raises(CallError, match="StaleHandleError"):
                gpu.step(first, np.zeros(2, np.int32))
            if take:
                with pytest.raises(jaxvec.StaleHandleError):
                    envs.raise_if_failed()
            else:
                gpu.step(second, np.zeros(2, np.int32))


def test_on_the_cpu_whoever_caught_an_error_has_heard_it(make):
    with make(CountingEnv, 2) as envs:
        first, _ = jaxvec.reset(envs)
        step = jax.jit(lambda h: jaxvec.step(h, jnp.zeros(2, int)))
        step(first)
        with pytest.raises(RuntimeError, match="StaleHandleError"):
            step(first)


@pytest.mark.parametrize("function", [*COPIES, "cuStreamSynchronize"])
def test_what_the_driver_refuses_is_an_error_in_its_words(driver, start, function):
    _, gpu, token = start(ImageEnv, 3)
    driver.fail(function, ILLEGAL_ADDRESS)
    name = function.removesuffix("_v2")
    with pytest.raises(CallError, match=rf"{name}: CUDA_ERROR_ILLEGAL_ADDRESS \(an illegal memory access\)"):
        gpu.step(token, np.zeros(3, np.int32))
    driver.fail(function, 0)


def test_without_page_locked_memory_any_will_do(driver, pool):
    driver.fail("cuMemHostAlloc", OUT_OF_MEMORY)
    envs = pool(CountingEnv, 200)  # more than the memory that earlier tests have left
    gpu = Gpu(driver, envs, 0x7001)
    token, _ = gpu.reset(seed=0)
    _, rows = gpu.step(token, np.arange(200, dtype=np.int32) % 5)
    gpu.wait()
    assert as_timestep(envs, rows).obs[:, 3].tolist() == [0, 1, 2, 3, 4] * 40


def test_the_context_is_that_of_the_stream_and_then_again_what_it_was(driver, pool):
    envs = pool(CountingEnv, 2)
    driver.context = 0x5000
    gpu = Gpu(driver, envs, 0x2001)
    token, _ = gpu.reset(seed=0)
    gpu.step(token, np.zeros(2, np.int32))
    assert driver.context == 0x5000
    driver.context = None


def test_without_a_driver_a_call_says_so(driver, pool):
    envs = pool(CountingEnv, 2)
    gpu = Gpu(driver, envs)
    _native.load().use_cuda("libnosuch.so.1")
    with pytest.raises(CallError, match=r"CUDA's driver can't be opened: libnosuch.so.1: cannot open"):
        gpu.reset(seed=0)
