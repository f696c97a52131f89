"""Page-locked memory, and whole programs on a GPU or on its replacement."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import fake_cuda
from support.ahead_of_time import with_much_to_compute
from support.disasters import ImageEnv, RaisingEnv
from support.probe import Packing, _ffi, _native, _primitive, num_moves, pool_of
from test_cuda import page_locking, pool  # noqa: F401

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.jax_version

# --- What is page-locked, and when ----------------------------------------------------------------


def test_a_reset_onto_a_gpu_page_locks_before_any_program_comes(driver, pool, monkeypatch):
    envs = pool(CountingEnv, 2)
    monkeypatch.setattr(_primitive, "_on_gpu", lambda array: True)
    jaxvec.reset(envs)
    assert driver.registered == 1


def test_no_call_of_a_program_page_locks_memory_on_any_device(cpu_as_cuda, make):
    """Of one that resets and steps, on two devices, and takes more than any call is given at least."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("envs",))
    envs, later = (make(ImageEnv, 32, num_workers=2, transport="ffi") for _ in range(2))
    shard = PartitionSpec("envs")

    def handle(envs):
        return jax.device_put(jaxvec.reset(envs)[0], NamedSharding(mesh, shard))

    def play(handle):
        handle, _ = jaxvec.reset(handle, seed=3)
        return jax.lax.scan(lambda h, _: jaxvec.step(h, jnp.ones(16, int)), handle, length=9)

    out = (shard, PartitionSpec(None, "envs"))
    program = jax.jit(jax.shard_map(play, mesh=mesh, in_specs=shard, out_specs=out))
    first = handle(envs)
    assert page_locking(cpu_as_cuda) == []
    compiled = program.lower(first).compile()
    # Two calls on each device: one with few results, as those of the reset are unread, and one with all.
    assert page_locking(cpu_as_cuda) == ["cuMemHostRegister_v2"] * 2 + ["cuMemHostAlloc"] * (4 + 4)
    for each in (first, handle(later)):
        _, timesteps = compiled(each)
        np.testing.assert_array_equal(timesteps.obs[:, :, 0, 0].T, [[11, 12, 0, 14, 15, 0, 17, 18, 0]] * 32)
    assert page_locking(cpu_as_cuda) == []


# --- Traits for XLA -------------------------------------------------------------------------------

needs_ffi = pytest.mark.skipif(_ffi.reason_unavailable() is not None, reason=str(_ffi.reason_unavailable()))


@needs_ffi
@pytest.mark.parametrize("handler", ["FFI_CALL", "FFI_CUDA_CALL"])
def test_no_command_buffer_captures_a_call(handler):
    """XLA captures those with a trait that we must not have; it asks handlers by this extension."""

    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int

    class Metadata(ctypes.Structure):
        _fields_ = [("size", size), ("version_size", size), ("version_extension", pointer)]
        _fields_ += [("major", number), ("minor", number), ("traits", ctypes.c_uint32), ("type", size)]

    class Extension(ctypes.Structure):
        _fields_ = [("size", size), ("type", number), ("next", pointer), ("metadata", pointer)]

    class Frame(ctypes.Structure):
        _fields_ = [("size", size), ("extension", pointer), ("rest", ctypes.c_char * (168 - 16))]

    metadata = Metadata(ctypes.sizeof(Metadata), 24, traits=255)
    extension = Extension(ctypes.sizeof(Extension), 1, None, ctypes.addressof(metadata))
    frame = Frame(ctypes.sizeof(Frame), ctypes.addressof(extension))
    ask = ctypes.CFUNCTYPE(pointer, pointer)(fake_cuda.pointer(getattr(_native.load(), handler)).value)
    assert ask(ctypes.byref(frame)) is None
    assert (metadata.major, metadata.minor) == (0, 1)
    assert metadata.traits == 0


# --- Whole programs -------------------------------------------------------------------------------

gpu = pytest.mark.gpu


def scan(handle, action):
    return jax.lax.scan(lambda h, _: jaxvec.step(h, action), handle, length=9)


def while_loop(handle, action):
    def go_on(carry):
        return carry[1].info["episode_length"].max() % 3 < 2  # the host must know before it goes on

    return jax.lax.while_loop(go_on, lambda carry: jaxvec.step(carry[0], action), jaxvec.step(handle, action))


def cond(handle, action):
    return jax.lax.cond(action.sum() > 0, lambda h: scan(h, action), lambda h: scan(h, action + 1), handle)


def vmap(handle, action):
    lanes = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), (handle, action))
    return jax.vmap(scan)(*lanes)


def run(make, env, program, transport="ffi"):
    """Returns a pool, and what the program makes of it."""
    envs = make(env, 4, num_workers=2, transport=transport)
    handle, _ = jax.jit(lambda: jaxvec.reset(envs, seed=3))()
    handle, timesteps = jax.jit(lambda *each: program(*each))(handle, jnp.array([1, 2, 3, 4]))
    token = np.asarray(handle.token)
    return envs, (token[..., 1], num_moves(envs, token[..., 2]), jax.device_get(timesteps))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("env", [CountingEnv, ImageEnv])
@pytest.mark.parametrize("program", [scan, while_loop, cond, vmap, with_much_to_compute])
@pytest.mark.nightly(but=6)
def test_programs_by_the_handler_for_cuda_are_those_by_the_cpus(driver, request, make, env, program):
    _, theirs = run(make, env, program)
    request.getfixturevalue("cpu_as_cuda")
    envs, ours = run(make, env, program)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert pool_of(envs).finalizer.pinned is not None
    assert driver.take_calls().count("cuStreamSynchronize") >= 3  # reset and steps


def test_a_read_moves_nothing(cpu_as_cuda, make):
    envs = make(CountingEnv, 4, num_workers=2, transport="ffi")
    handle, _ = jaxvec.reset(envs)

    handle, _ = jax.jit(lambda h: jaxvec.step(h, jnp.zeros(4, int)))(handle)
    read = jax.jit(lambda h: jaxvec.get_attr(h, "steps", int))
    for _ in range(2):
        assert read(handle).tolist() == [1] * 4
    assert cpu_as_cuda.take_calls().count("cuStreamSynchronize") == 3


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    "layout",
    [
        [],
        [0, ord("u") + 256 * 4, 2, 2],
        [0, ord("u") + 256 * 4, -1],
        [0, ord("u") + 256 * 4],
        [0, ord("u") + 256 * 4, 2, 2, 1000],
        [1 << 40, ord("u") + 256 * 4, 2, 2, 3],
        [-1, ord("u") + 256 * 4, 2, 2, 3],
    ],
)
def test_a_layout_that_does_not_fit_is_an_error(cpu_as_cuda, make, monkeypatch, layout):
    handle, _ = jaxvec.reset(make(CountingEnv, 2, transport="ffi"))
    monkeypatch.setattr(Packing, "layout", np.array([1, *layout], np.int64))
    with pytest.raises(RuntimeError, match="not packed as its layout" if layout else "do not match"):
        jax.block_until_ready(jax.jit(lambda h: jaxvec.step(h, jnp.zeros(2, int)))(handle))


@gpu
@pytest.mark.parametrize("env", [CountingEnv, ImageEnv])
@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
@pytest.mark.parametrize("program", [scan, while_loop, cond, vmap, with_much_to_compute])
def test_programs_on_a_gpu_are_those_of_the_cpu(make, env, transport, program):
    outcomes = []
    for platform in ("cuda", "cpu"):
        with jax.default_device(jax.devices(platform)[0]):
            envs, outcome = run(make, env, program, transport)
            outcomes.append(outcome)
            if platform == "cuda" and transport == "ffi":
                assert pool_of(envs).finalizer.pinned is not None
    jax.tree.map(np.testing.assert_array_equal, *outcomes)


@gpu
def test_rows_in_flight_on_a_gpu_are_left_alone(make):
    """Large rows, steps that follow at once, and a host that steps as soon as a program has returned."""

    class LargeEnv(ImageEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Box(0, 255, (1000, 1000), np.uint8)

        def _observe(self, action):
            return np.full((1000, 1000), self.steps % 256, np.uint8)

    with jax.default_device(jax.devices("cuda")[0]):
        envs = make(LargeEnv, 8)
        step = jax.jit(jaxvec.step)
        for _ in range(20):
            handle, _ = jaxvec.reset(envs)
            seen = []
            for _ in range(2):
                handle, timestep = step(handle, jnp.zeros(8, int))
                seen.append(timestep.obs)
            envs.step(np.zeros(8, np.int32))
            for obs in seen:
                assert (obs == obs[0, 0, 0]).all()


@gpu
def test_errors_on_a_gpu_come_typed(make):
    with jax.default_device(jax.devices("cuda")[0]):
        envs = make(RaisingEnv, 2)
        handle, _ = jaxvec.reset(envs)
        with pytest.raises(jaxvec.EnvError, match="bad luck"), envs:
            jax.block_until_ready(jax.jit(jaxvec.step)(handle, jnp.array([0, 7])))


@gpu
def test_a_policy_on_the_gpu_and_its_envs_program_on_the_cpu(make):
    device, host = jax.devices("cuda")[0], jax.devices("cpu")[0]
    envs = make(CountingEnv, 4)
    with jax.default_device(host):
        handle, timestep = jaxvec.reset(envs)
    policy = jax.jit(lambda obs: obs[:, 1] + 1)
    step = jax.jit(jaxvec.step)
    for count in range(1, 6):
        action = policy(jax.device_put(timestep.obs, device))
        handle, timestep = step(handle, jax.device_put(action, host))
        assert timestep.obs[:, 3].tolist() == [count] * 4


@gpu
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_two_gpus_step_envs_of_their_own(make):
    mesh = Mesh(np.array(jax.devices("cuda")[:2]), ("envs",))
    envs = make(CountingEnv, 4, num_workers=2)
    handle, _ = jaxvec.reset(envs)
    shard = PartitionSpec("envs")
    handle = jax.device_put(handle, NamedSharding(mesh, shard))
    program = jax.jit(
        jax.shard_map(scan, mesh=mesh, in_specs=shard, out_specs=(shard, PartitionSpec(None, "envs")))
    )
    handle, timesteps = program(handle, jax.device_put(jnp.arange(4), NamedSharding(mesh, shard)))
    assert np.asarray(timesteps.obs)[-1, :, 3].tolist() == [0, 1, 2, 3]
