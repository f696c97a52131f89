"""Programs as libtpu compiles them for a TPU v5e, which need not be there; see `ahead_of_time.py`."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from support.ahead_of_time import (
    NUM_ENVS,
    PROGRAMS,
    SHARD,
    Devices,
    arguments,
    carry_more,
    copies,
    describe,
    each_program,
    forget,
    play_halves,
    restore,
    scan,
    search,
    skip_without,
)

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = [pytest.mark.jax_version, skip_without("libtpu")]


@pytest.fixture(scope="session")
def tpus(kept_by_others) -> Devices:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # else it asks the cloud what machine this is
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # by the processes that share these tests
        devices = describe("tpu", "v5e:2x2")
    kept_by_others["anon_inode"] += 8  # libtpu's own
    return Devices(devices, lambda lowered: lowered.compile().as_text())


@pytest.fixture
def envs(make, free_choice):
    return make(CountingEnv, NUM_ENVS, backend="serial")


def transfers(hlo: str) -> tuple[int, int]:
    """Returns how often the program sends to the host, and receives."""
    return len(re.findall(r" send\(", hlo)), len(re.findall(r" recv\(", hlo))


@each_program
def test_programs_compile_with_each_of_their_calls(tpus, envs, program, calls):
    sent, received = transfers(tpus.compile(program, *arguments(envs)))
    assert sent == calls
    assert received == calls


def test_a_reset_from_the_pool(tpus, envs):
    assert transfers(tpus.compile(lambda: jaxvec.reset(envs, seed=1)))[0] == 1


def test_send_and_recv(tpus, make, free_choice):
    envs = make(CountingEnv, NUM_ENVS, batch_size=2, recv_order="sent", backend="serial")
    assert transfers(tpus.compile(play_halves, *jaxvec.reset(envs)))[0] == 2


def test_a_step_of_which_nothing_is_used(tpus, envs):
    assert transfers(tpus.compile(forget, *arguments(envs))) == (1, 1)  # the token comes back


def test_a_read(tpus, envs):
    handle, _ = arguments(envs)
    assert transfers(tpus.compile(lambda h: jaxvec.get_attr(h, "steps", int), handle)) == (1, 1)


def test_a_call_receives_what_the_program_reads_and_no_more(tpus, envs):
    handle, action = arguments(envs)
    hlo = tpus.compile(jaxvec.step, handle, action)
    assert transfers(hlo) == (1, 1)
    assert "u32[63]" in hlo  # the words of all results
    hlo = tpus.compile(lambda h, a: jaxvec.step(h, a)[1].reward, handle, action)
    assert transfers(hlo) == (1, 1)
    assert "u32[4]" in hlo
    assert "u32[63]" not in hlo


def test_nothing_large_that_is_donated_is_copied(tpus, envs):
    handle, action = arguments(envs)
    large = jnp.zeros((512, 512))
    hlo = tpus.compile(carry_more, (handle, large), action, donate_argnums=0)
    assert "f32[512,512]" in hlo
    assert "f32[512,512]" not in copies(hlo)


def test_each_device_has_a_call_of_its_own(tpus, envs):
    hlo = tpus.compile_sharded(scan, (SHARD, PartitionSpec(None, "envs")), *arguments(envs))
    assert transfers(hlo)[0] == 1


@pytest.mark.parametrize("program", [restore, search])
def test_each_device_has_states_of_its_own(tpus, envs, program):
    hlo = tpus.compile_sharded(program, SHARD, *arguments(envs))
    assert transfers(hlo) == (PROGRAMS[program],) * 2


def test_pmap(tpus, envs):
    handle, action = arguments(envs)
    program = jax.pmap(scan, devices=tpus.devices[:2])
    two = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, 2, *x.shape[1:]), x.dtype), (handle, action))
    assert transfers(tpus.compile_lowered(program.lower(*two))) == (1, 1)
