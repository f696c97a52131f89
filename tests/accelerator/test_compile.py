"""Programs as XLA compiles them for an NVIDIA H200 and a TPU v5e, which need not be there.

See `ahead_of_time.py`. Programs for CUDA have a custom call for each of our calls; those for TPUs send to the
host, and receive from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from support.ahead_of_time import (
    NUM_ENVS,
    PROGRAMS,
    SHARD,
    Devices,
    ImageEnv,
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
    with_much_to_compute,
    without_fusions,
)
from support.probe import _ffi

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.jax_version

H200 = (Path(__file__).parents[1] / "support/h200.txtpb").read_text()
# What XLA may record into CUDA graphs, which it then launches in place of the single operations.
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,WHILE"

# Of a step of CountingEnv, in words: the token; observations and final ones, four numbers, three flags.
TOKEN = 3 * NUM_ENVS
RESULTS = 2 * 4 * NUM_ENVS + 4 * NUM_ENVS + 3

needs_gpu_compiler = [
    skip_without("jax_cuda12_plugin", "jax_cuda13_plugin"),
    pytest.mark.skipif(_ffi.reason_unavailable() is not None, reason=str(_ffi.reason_unavailable())),
]
needs_tpu_compiler = skip_without("libtpu")


@dataclass(frozen=True)
class Compiled:
    """What XLA makes of a program: the optimized operations, and what the GPU's executor runs of these."""

    hlo: str
    platform: str
    thunks: str | None = None  # after CUDA graphs were made of some; None of older releases, which don't say

    @property
    def calls(self) -> list[list[str]]:
        """The types of the results of each of our calls, in a program for CUDA."""
        text = re.sub(r"/\*.*?\*/", "", self.hlo)
        found = re.findall(r'= ([^=\n]*) custom-call\([^\n]*custom_call_target="jaxvec_call"', text)
        return [re.findall(r"\w+\[[\d,]*\]", types) for types in found]

    @property
    def num_calls(self) -> int:
        """How often the program calls the host."""
        if self.platform == "cuda":
            return len(self.calls)
        sent, received = (len(re.findall(rf" {name}\(", self.hlo)) for name in ("send", "recv"))
        assert sent == received
        return sent


def compile_for_gpu(folder: Path, **options: Any) -> Devices:
    def compile_lowered(lowered) -> Compiled:
        # The text comes by files: older releases give none of a program that no device has loaded.
        flags = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_gpu_autotune_level": 0}
        lowered.compile(compiler_options=flags | options)
        (hlo,) = folder.glob("*gpu_after_optimizations.txt")
        thunks = [*folder.glob("*thunk_sequence_after_thunk_passes.txt")]
        compiled = Compiled(hlo.read_text(), "cuda", thunks[0].read_text() if thunks else None)
        for file in folder.iterdir():
            file.unlink()
        return compiled

    return Devices(describe("cuda", target_config=H200, topology="1x1x2"), compile_lowered)


@pytest.fixture(scope="session")
def tpus(kept_by_others) -> Devices:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # else it asks the cloud what machine this is
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # by the processes that share these tests
        devices = describe("tpu", "v5e:2x2")
    kept_by_others["anon_inode"] += 8  # libtpu's own
    return Devices(devices, lambda lowered: Compiled(lowered.compile().as_text(), "tpu"))


@pytest.fixture(params=[pytest.param("cuda", marks=needs_gpu_compiler)])
def gpus(tmp_path) -> Devices:
    return compile_for_gpu(tmp_path)


@pytest.fixture(
    params=[pytest.param("cuda", marks=needs_gpu_compiler), pytest.param("tpu", marks=needs_tpu_compiler)]
)
def devices(request, tmp_path) -> Devices:
    return request.getfixturevalue("tpus") if request.param == "tpu" else compile_for_gpu(tmp_path)


@pytest.fixture
def envs(make, free_choice):
    return make(CountingEnv, NUM_ENVS, backend="serial")


@each_program
def test_programs_compile_with_each_of_their_calls(devices, envs, program, calls):
    compiled = devices.compile(program, *arguments(envs))
    assert compiled.num_calls == calls
    assert not re.search(r'custom_call_target="[^"]*callback', compiled.hlo)


def test_a_reset_from_the_pool(devices, envs):
    assert devices.compile(lambda: jaxvec.reset(envs, seed=1)).num_calls == 1


def test_send_and_recv(devices, make, free_choice):
    envs = make(CountingEnv, NUM_ENVS, batch_size=2, recv_order="sent", backend="serial")
    compiled = devices.compile(play_halves, *jaxvec.reset(envs))
    assert compiled.num_calls == 2
    if compiled.platform == "cuda":
        assert compiled.calls[0] != compiled.calls[1]
        assert [f"u32[{TOKEN}]"] in compiled.calls


def test_a_step_of_which_nothing_is_used(devices, envs):
    compiled = devices.compile(forget, *arguments(envs))
    assert compiled.num_calls == 1  # the token comes back
    if compiled.platform == "cuda":
        assert compiled.calls == [[f"u32[{TOKEN}]"]]


def test_a_read(devices, envs):
    handle, _ = arguments(envs)
    compiled = devices.compile(lambda h: jaxvec.get_attr(h, "steps", int), handle)
    assert compiled.num_calls == 1
    if compiled.platform == "cuda":
        assert compiled.calls == [[f"u32[{NUM_ENVS}]"]]


def test_each_device_has_a_call_of_its_own(devices, envs):
    compiled = devices.compile_sharded(scan, (SHARD, PartitionSpec(None, "envs")), *arguments(envs))
    assert compiled.num_calls == 1
    if compiled.platform == "cuda":
        assert compiled.calls == [[f"u32[{(TOKEN + RESULTS - 3) // 2 + 3}]"]]


@pytest.mark.parametrize("program", [restore, search])
def test_each_device_has_states_of_its_own(devices, envs, program):
    compiled = devices.compile_sharded(program, SHARD, *arguments(envs))
    assert compiled.num_calls == PROGRAMS[program]


def test_a_call_returns_what_the_program_reads_and_no_more(devices, envs):
    handle, action = arguments(envs)
    every = devices.compile(jaxvec.step, handle, action)
    reward = devices.compile(lambda h, a: jaxvec.step(h, a)[1].reward, handle, action)
    assert (every.num_calls, reward.num_calls) == (1, 1)
    assert f"u32[{TOKEN + RESULTS}]" in every.hlo  # the words of all results
    assert f"u32[{TOKEN + RESULTS}]" not in reward.hlo
    if every.platform == "cuda":
        assert every.calls == [[f"u32[{TOKEN + RESULTS}]"]]
        assert reward.calls == [[f"u32[{TOKEN + NUM_ENVS}]"]]
    else:
        assert f"u32[{NUM_ENVS}]" in reward.hlo


def test_nothing_large_that_is_donated_is_copied(devices, envs):
    handle, action = arguments(envs)
    compiled = devices.compile(carry_more, (handle, jnp.zeros((512, 512))), action, donate_argnums=0)
    assert "f32[512,512]" in compiled.hlo
    assert "f32[512,512]" not in copies(compiled.hlo)


# --- CUDA -----------------------------------------------------------------------------------------------


def test_a_collective_beside_it(gpus, envs):
    def program(handle, action):
        handle, timesteps = scan(handle, action)
        return handle, jax.lax.psum(timesteps.reward.sum(), "envs")

    compiled = gpus.compile_sharded(program, (SHARD, PartitionSpec()), *arguments(envs))
    assert compiled.num_calls == 1
    assert "all-reduce" in compiled.hlo


def test_a_large_result_is_an_array_of_its_own_that_nobody_copies(gpus, make, free_choice):
    envs = make(ImageEnv, NUM_ENVS, backend="serial", final_obs=False)
    compiled = gpus.compile(jaxvec.step, *arguments(envs))
    ((_, images),) = compiled.calls
    assert images == f"u8[{NUM_ENVS * 100 * 100}]"
    assert f"u8[{NUM_ENVS},100,100]" in compiled.hlo
    assert "fusion(%" not in "".join(line for line in compiled.hlo.splitlines() if "= u8[" in line)
    assert not [name for name in copies(compiled.hlo) if name.startswith("u8")]


def test_nothing_donated_is_copied_but_the_token(gpus, envs):
    handle, action = arguments(envs)
    compiled = gpus.compile(carry_more, (handle, jnp.zeros((64, 64))), action, donate_argnums=0)
    token = f"u32[{NUM_ENVS},3]"
    assert {*copies(without_fusions(compiled.hlo))} <= {token, "s32[]"}  # and the loop's counter
    assert {*copies(gpus.compile(jaxvec.step, handle, action, donate_argnums=0).hlo)} <= {token}


def test_without_donation_it_is_copied_once(gpus, envs):
    """What the tests of donated arguments rest on."""
    handle, action = arguments(envs)
    compiled = gpus.compile(carry_more, (handle, jnp.zeros((64, 64))), action)
    assert copies(compiled.hlo).count("f32[64,64]") == 1


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("options", [{}, {"xla_gpu_enable_command_buffer": GRAPHS}], ids=["default", "all"])
def test_no_cuda_graph_has_a_call_in_it(tmp_path, options, envs):
    """A graph is recorded once and then repeated, without the host's part in it."""
    gpus = compile_for_gpu(tmp_path, xla_gpu_graph_min_graph_size=1, **options)
    thunks = gpus.compile(with_much_to_compute, *arguments(envs)).thunks
    if thunks is None:
        pytest.skip("this release of XLA does not say what is in its CUDA graphs")
    around: list[tuple[int, str]] = []  # what a line is within: indentations and kinds
    calls = graphs_seen = 0
    for indent, kind in re.findall(r"^( *)(?:\d+: )?(\w+)", thunks, re.MULTILINE):
        around = [(outer, name) for outer, name in around if outer < len(indent)] + [(len(indent), kind)]
        graphs_seen += kind == "kCommandBuffer"
        if kind == "kCustomCall":
            calls += 1
            assert "kCommandBuffer" not in [name for _, name in around], thunks
    assert calls == 1
    assert graphs_seen > 0, thunks


def test_one_cuda_graph_splits_and_stacks_all_results(gpus, envs):
    thunks = gpus.compile(scan, *arguments(envs)).thunks
    if thunks is None:
        pytest.skip("this release of XLA does not say what is in its CUDA graphs")
    body = thunks.partition("body:")[2]
    assert re.findall(r"^    \d+: (\w+)", body, re.MULTILINE)[-2:] == ["kCustomCall", "kCommandBuffer"]


# --- TPUs -----------------------------------------------------------------------------------------------


@needs_tpu_compiler
def test_pmap(tpus, envs):
    handle, action = arguments(envs)
    program = jax.pmap(scan, devices=tpus.devices[:2])
    two = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, 2, *x.shape[1:]), x.dtype), (handle, action))
    assert tpus.compile_lowered(program.lower(*two)).num_calls == 1
