"""Page-locking a pool's memory, by a driver that stands in for CUDA's."""

import logging
import mmap
import subprocess
import sys

import numpy as np
import pytest
from support import probe
from support.fake_cuda import OUT_OF_MEMORY, Gpu
from support.probe import pinned as _pinned
from support.probe import pool_of

import jaxvec
from jaxvec.testing import CountingEnv


def page():
    return np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)


def registrations(driver):
    return [call for call in driver.take_calls() if "Register" in call or "register" in call]


def test_memory_is_page_locked_until_it_is_closed(driver):
    pinned = _pinned.Pinned(page())
    assert driver.registered == 1
    pinned.close()
    pinned.close()
    assert registrations(driver) == [f"cuMemHostRegister_v2 {mmap.PAGESIZE} 1", "cuMemHostUnregister"]
    assert driver.registered == 0


def test_the_context_stays_as_it_was(driver):
    _pinned.Pinned(page()).close()
    assert driver.context is None
    driver.context = 0x3000
    _pinned.Pinned(page()).close()
    assert driver.context == 0x3000
    driver.context = None


def test_a_refusal_says_what_the_driver_says(driver):
    driver.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    with pytest.raises(
        _pinned.PinningError, match="^cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY: out of memory$"
    ):
        _pinned.Pinned(page())
    assert _pinned.reason_unavailable() == "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    driver.fail("cuMemHostRegister_v2", 999)
    with pytest.raises(_pinned.PinningError, match="^cuMemHostRegister_v2: error 999$"):
        _pinned.Pinned(page())


def test_without_a_driver_it_says_so(monkeypatch):
    monkeypatch.setattr(_pinned, "_LIBRARY", "libnosuch.so.1")
    assert _pinned.reason_unavailable().startswith(
        "no NVIDIA driver was found, as there is no libnosuch.so.1"
    )


def test_a_driver_that_lacks_a_function_is_named(driver, monkeypatch):
    monkeypatch.setattr(_pinned, "_LIBRARY", "libc.so.6")
    assert _pinned.reason_unavailable() == "CUDA's driver has no cuInit"


def test_a_pool_is_page_locked_once_and_only_for_a_gpu(driver, make):
    envs = make(CountingEnv, 2)
    envs.reset()
    assert registrations(driver) == []
    gpu = Gpu(driver, envs)
    token, _ = gpu.reset(seed=0)
    token, _ = gpu.step(token, np.zeros(2, int))
    gpu.reset(seed=0)
    segment = probe.segment(envs)
    assert registrations(driver) == [f"cuMemHostRegister_v2 {segment.nbytes} 1"]
    assert all(0 <= a.ctypes.data - segment.ctypes.data < segment.nbytes for a in probe.results(envs))
    del segment
    envs.close()
    assert registrations(driver) == ["cuMemHostUnregister"]  # which the driver refuses of what is not mapped


def test_the_first_call_may_be_a_step(driver, make):
    envs = make(CountingEnv, 2)
    envs.reset()
    probe.engine(envs).generation[:] = 1
    token = np.array([[pool_of(envs).id, slot, 1] for slot in range(2)], np.uint32)
    Gpu(driver, envs).step(token, np.zeros(2, int))
    assert driver.registered == 1


def test_a_pool_that_is_collected_is_unlocked(driver):
    envs = jaxvec.make(CountingEnv, 2)
    Gpu(driver, envs).reset(seed=0)
    assert driver.registered == 1
    del envs
    assert driver.registered == 0


def test_a_pool_goes_on_without(driver, make, caplog):
    driver.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    envs = make(CountingEnv, 2)
    gpu = Gpu(driver, envs)
    with caplog.at_level(logging.INFO, "jaxvec"):
        token, _ = gpu.reset(seed=0)
    assert "its memory is not page-locked: cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    _, rows = gpu.step(token, np.array([1, 2]))
    gpu.wait()
    assert envs.spec.build_timestep(rows).obs[:, 3].tolist() == [1, 2]


@pytest.mark.slow
def test_doctor_says_whether_it_works(built, tmp_path):
    def found(**environment):
        command = [sys.executable, "-m", "jaxvec", "doctor"]
        environment["PATH"] = "/usr/bin"
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, check=True, env=environment
        )
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("page-locking")]
        return line.split(maxsplit=1)[1]

    (tmp_path / "libcuda.so.1").symlink_to(built.path)
    assert found(LD_LIBRARY_PATH=str(tmp_path)) == "ready"
    (tmp_path / "libcuda.so.1").unlink()
    (tmp_path / "libcuda.so.1").write_text("no library")
    assert "file too short" in found(LD_LIBRARY_PATH=str(tmp_path))
