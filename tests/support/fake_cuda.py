"""A fake CUDA driver that delays every copy, and calls of programs as XLA makes them."""

from __future__ import annotations

import ctypes
import pickle
import shutil
import subprocess
from pathlib import Path

import cloudpickle
import jax
import numpy as np
import pytest
from support.probe import Packing, Verb, _call, _ffi, _native, _operands, check_action, pinned, pool_of

SOURCES = Path(__file__).resolve().parent / "native"
ILLEGAL_ADDRESS = 700
OUT_OF_MEMORY = 2


def build(folder: Path, name: str, *flags: str) -> Path:
    """Builds a library from a source file and returns it; skips the test if it can't be built."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to build the fake driver")
    path = folder / f"lib{name}.so"
    common = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    command = ["g++", *common, *flags, "-o", path, SOURCES / f"{name}.cc"]
    subprocess.run(command, check=True, timeout=200)
    return path


def pointer(capsule) -> ctypes.c_void_p:
    """Returns the address that a capsule holds."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(get(capsule, None))


class Driver:
    """The control of the fake driver by tests.

    Attributes:
        handler: Library that calls the handler for CUDA.
    """

    def __init__(self, path: Path, handler: ctypes.CDLL) -> None:
        self.path = path
        self.handler = handler
        self.kept: list[object] = []  # memory of the delayed copies
        self._library = ctypes.CDLL(str(path))
        self.flush = self._library.fake_flush
        self._library.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
        for name in ("cuCtxSetCurrent", "cuStreamSynchronize", "fake_advance"):
            getattr(self._library, name).argtypes = [ctypes.c_void_p]
        self._library.cuCtxGetCurrent.argtypes = [ctypes.POINTER(ctypes.c_void_p)]

    def reset(self) -> None:
        """Discards the recorded calls, planned failures and delayed copies."""
        self._library.fake_reset()
        self.kept.clear()

    def fail(self, name: str, code: int) -> None:
        """Makes a function fail with an error code; 0 makes it work again."""
        self._library.fake_fail(name.encode(), code)

    def take_calls(self) -> list[str]:
        """Returns the calls since the previous `take_calls`: their names, with an argument for some."""
        text = ctypes.create_string_buffer(1 << 20)
        assert self._library.fake_take_calls(text, len(text)) < len(text)
        return text.value.decode().splitlines()

    @property
    def registered(self) -> int:
        """Returns the number of page-locked memory regions."""
        return self._library.fake_registered()

    @property
    def context(self) -> int | None:
        """Returns the current context of this thread."""
        context = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(context))
        return context.value

    @context.setter
    def context(self, context: int | None) -> None:
        self._library.cuCtxSetCurrent(context)

    def advance(self, stream: int) -> int:
        """Makes the next copy of a stream, and returns how many are left."""
        return self._library.fake_advance(stream)

    def synchronize(self, stream: int) -> None:
        """Waits for a stream, as a program's caller does."""
        before, self.context = self.context, stream // 0x1000 * 0x1000
        assert self._library.cuStreamSynchronize(stream) == 0
        self.context = before


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dims", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class _Bytes(ctypes.Structure):
    _fields_ = ("data", ctypes.c_char_p), ("size", ctypes.c_size_t)


# The numbers of `XLA_FFI_DataType`.
_DTYPES = dict(zip("?bhilBHIL", range(1, 10), strict=True)) | {"e": 10, "f": 11, "d": 12, "F": 15, "D": 18}
_BFLOAT16 = 16


def _describe(arrays) -> tuple[ctypes.Array, list[np.ndarray]]:
    """Returns descriptions of arrays, and the memory to which they refer."""
    shapes = [np.array(array.shape, np.int64) for array in arrays]
    buffers = [
        _Buffer(array.ctypes.data, shape.ctypes.data, array.ndim, _DTYPES.get(array.dtype.char, _BFLOAT16))
        for array, shape in zip(arrays, shapes, strict=True)
    ]
    return (_Buffer * len(arrays))(*buffers), shapes


class CallError(Exception):
    """An error that the handler returned to XLA."""


class Gpu:
    """A program's calls to a pool on one stream, with NumPy arrays as device memory."""

    def __init__(self, driver: Driver, envs, stream: int = 0x1001) -> None:
        self.driver, self.envs, self.stream = driver, envs, stream

    def reset(self, seed: int):
        """Returns the token and the rows, which later copies may still fill."""
        n = self.envs.num_envs
        token = np.zeros((n, 3), np.uint32)
        token[:, 0], token[:, 1] = pool_of(self.envs).id, np.arange(n)
        seeds = np.zeros((n, 6), np.uint32)
        seeds[:, 0] = seed + np.arange(n)
        extra = cloudpickle.dumps((None, False))  # no options, no mask
        return self.call(Verb.RESET, [token, seeds, np.ones(n, np.bool_)], fresh=True, extra=extra)

    def step(self, token, action):
        """As `reset`."""
        leaves = self._leaves(action, len(token))
        return self.call(Verb.STEP, [token, *leaves], arguments=_operands.types_of(leaves))

    def send(self, token, action, env_id):
        """As `reset`, without rows."""
        leaves = self._leaves(action, len(env_id))
        operands = [token, *leaves, env_id.astype(np.int32)]
        return self.call(Verb.SEND, operands, arguments=_operands.types_of(leaves))[0]

    def _leaves(self, action, rows):
        return [
            np.asarray(leaf) for leaf in check_action(self.envs.spec, action, rows, str, _operands.PROGRAM)
        ]

    def recv(self, token):
        """As `reset`."""
        return self.call(Verb.RECV, [token])

    def call(self, verb, operands, *, fresh=False, extra=b"", arguments=()):
        """Makes a call; returns the token and the rows."""
        spec = self.envs.spec
        operands = [np.ascontiguousarray(operand) for operand in operands]
        packing = Packing.of(_call.Call(verb, spec, "ffi").results(len(operands[0])))
        arrays = [np.full(each.shape, 77).astype(each.dtype) for each in packing.transfers]
        results = packing.views(arrays)
        self.driver.kept.append((operands, arrays))
        extra = pickle.dumps((extra, arguments, ()))
        buffers, _shapes = _describe([*operands, *arrays])
        layout = packing.layout.tobytes()
        text = ctypes.create_string_buffer(1 << 16)
        self.driver.handler.call_on(
            ctypes.c_void_p(self.stream),
            ctypes.c_uint32(verb),
            ctypes.c_bool(fresh),
            ctypes.c_int64(spec.fingerprint),
            _Bytes(extra, len(extra)),
            _Bytes(layout, len(layout)),
            buffers,
            ctypes.c_int64(len(operands)),
            ctypes.c_int64(len(arrays)),
            text,
            ctypes.c_size_t(len(text)),
        )
        if text.value:
            raise CallError(text.value.decode(errors="replace"))
        return results[0], results[1:]

    def wait(self) -> None:
        """Waits for the stream."""
        self.driver.synchronize(self.stream)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Driver:
    folder = tmp_path_factory.mktemp("driver")
    handler = ctypes.CDLL(str(build(folder, "cpu_as_cuda", "-isystem", jax.ffi.include_dir())))
    driver = Driver(build(folder, "fake_cuda"), handler)
    handler.prepare(pointer(_native.load().FFI_CUDA_CALL), driver.flush)
    return driver


@pytest.fixture
def driver(built, monkeypatch):
    """Replaces the machine's driver by the fake one."""
    if _ffi.reason_unavailable() is not None:
        pytest.skip(_ffi.reason_unavailable())
    native = _native.load()
    native.use_cuda(str(built.path))
    monkeypatch.setattr(pinned, "_LIBRARY", str(built.path))
    built.reset()
    yield built
    assert built.context is None
    built.reset()
    native.use_cuda("libcuda.so.1")


_XLA_TARGET = "jaxvec_test_cuda_call"


@pytest.fixture(scope="session")
def _registered(built) -> None:
    jax.ffi.register_ffi_target(_XLA_TARGET, jax.ffi.pycapsule(built.handler.call), platform="cpu")


@pytest.fixture
def cpu_as_cuda(driver, _registered, monkeypatch) -> Driver:
    """Runs the calls of programs on the CPU in the handler for CUDA, and waits for their copies."""
    monkeypatch.setattr(_ffi, "_TARGET", _XLA_TARGET)
    monkeypatch.setattr(_ffi, "_PACKED", ("cpu",))
    return driver
