"""Programs as XLA compiles them for an NVIDIA H200, which need not be there; see `ahead_of_time.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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

pytestmark = [
    pytest.mark.jax_version,
    skip_without("jax_cuda12_plugin", "jax_cuda13_plugin"),
    pytest.mark.skipif(_ffi.reason_unavailable() is not None, reason=str(_ffi.reason_unavailable())),
]

H200 = (Path(__file__).parents[1] / "support/h200.txtpb").read_text()
# What XLA may record into CUDA graphs, which it then launches in place of the single operations.
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,WHILE"

# Of a step of CountingEnv, in words: the token; observations and final ones, four numbers, three flags.
TOKEN = 3 * NUM_ENVS
RESULTS = 2 * 4 * NUM_ENVS + 4 * NUM_ENVS + 3


@dataclass(frozen=True)
class Compiled:
    """What XLA makes of a program: the optimized operations, and what the GPU's executor runs of these."""

    hlo: str
    thunks: str | None  # after CUDA graphs were made of some; None of older releases, which don't say

    @property
    def calls(self) -> list[list[str]]:
        """The types of the results of each of our calls."""
        text = re.sub(r"/\*.*?\*/", "", self.hlo)
        found = re.findall(r'= ([^=\n]*) custom-call\([^\n]*custom_call_target="jaxvec_call"', text)
        return [re.findall(r"\w+\[[\d,]*\]", types) for types in found]


@pytest.fixture(params=["graphs by default", "graphs of all"])
def graphs(request):
    return {} if "default" in request.param else {"xla_gpu_enable_command_buffer": GRAPHS}


@pytest.fixture
def gpus(tmp_path) -> Devices:
    return devices(tmp_path)


def devices(folder, **options) -> Devices:
    def compile_lowered(lowered) -> Compiled:
        # The text comes by files: older releases give none of a program that no device has loaded.
        flags = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_gpu_autotune_level": 0}
        lowered.compile(compiler_options=flags | options)
        (hlo,) = folder.glob("*gpu_after_optimizations.txt")
        thunks = [*folder.glob("*thunk_sequence_after_thunk_passes.txt")]
        compiled = Compiled(hlo.read_text(), thunks[0].read_text() if thunks else None)
        for file in folder.iterdir():
            file.unlink()
        return compiled

    description = describe("cuda", target_config=H200, topology="1x1x2")
    return Devices(description, compile_lowered)


@pytest.fixture
def envs(make, free_choice):
    return make(CountingEnv, NUM_ENVS, backend="serial")


@each_program
def test_programs_compile_with_each_of_their_calls_and_no_callback(gpus, envs, program, calls):
    compiled = gpus.compile(program, *arguments(envs))
    assert len(compiled.calls) == calls
    assert not re.search(r'custom_call_target="[^"]*callback', compiled.hlo)


def test_a_reset_from_the_pool(gpus, envs):
    assert len(gpus.compile(lambda: jaxvec.reset(envs, seed=1)).calls) == 1


def test_send_and_recv(gpus, make, free_choice):
    envs = make(CountingEnv, NUM_ENVS, batch_size=2, recv_order="sent", backend="serial")
    calls = gpus.compile(play_halves, *jaxvec.reset(envs)).calls
    assert calls[0] != calls[1]
    assert [f"u32[{TOKEN}]"] in calls


def test_a_step_of_which_nothing_is_used(gpus, envs):
    assert gpus.compile(forget, *arguments(envs)).calls == [[f"u32[{TOKEN}]"]]


def test_a_read(gpus, envs):
    handle, _ = arguments(envs)
    compiled = gpus.compile(lambda h: jaxvec.get_attr(h, "steps", int), handle)
    assert compiled.calls == [[f"u32[{NUM_ENVS}]"]]


def test_each_device_has_a_call_of_its_own(gpus, envs):
    compiled = gpus.compile_sharded(scan, (SHARD, PartitionSpec(None, "envs")), *arguments(envs))
    assert compiled.calls == [[f"u32[{(TOKEN + RESULTS - 3) // 2 + 3}]"]]


@pytest.mark.parametrize("program", [restore, search])
def test_each_device_has_states_of_its_own(gpus, envs, program):
    assert len(gpus.compile_sharded(program, SHARD, *arguments(envs)).calls) == PROGRAMS[program]


def test_a_collective_beside_it(gpus, envs):
    def program(handle, action):
        handle, timesteps = scan(handle, action)
        return handle, jax.lax.psum(timesteps.reward.sum(), "envs")

    compiled = gpus.compile_sharded(program, (SHARD, PartitionSpec()), *arguments(envs))
    assert len(compiled.calls) == 1
    assert "all-reduce" in compiled.hlo


def test_a_call_returns_what_the_program_reads_and_no_more(gpus, envs):
    handle, action = arguments(envs)
    assert gpus.compile(jaxvec.step, handle, action).calls == [[f"u32[{TOKEN + RESULTS}]"]]
    reward = gpus.compile(lambda h, a: jaxvec.step(h, a)[1].reward, handle, action)
    assert reward.calls == [[f"u32[{TOKEN + NUM_ENVS}]"]]


def test_a_large_result_is_an_array_of_its_own_that_nobody_copies(gpus, make, free_choice):
    envs = make(ImageEnv, NUM_ENVS, backend="serial", final_obs=False)
    compiled = gpus.compile(jaxvec.step, *arguments(envs))
    ((_, images),) = compiled.calls
    assert images == f"u8[{NUM_ENVS * 100 * 100}]"
    assert f"u8[{NUM_ENVS},100,100]" in compiled.hlo
    assert "fusion(%" not in "".join(line for line in compiled.hlo.splitlines() if "= u8[" in line)
    assert not [each for each in copies(compiled.hlo) if each.startswith("u8")]


def test_nothing_donated_is_copied_but_the_token(gpus, envs):
    handle, action = arguments(envs)
    large = jnp.zeros((64, 64))
    compiled = gpus.compile(carry_more, (handle, large), action, donate_argnums=0)
    assert "f32[64,64]" in compiled.hlo
    assert "f32[64,64]" not in copies(compiled.hlo)
    token = f"u32[{NUM_ENVS},3]"
    assert {*copies(without_fusions(compiled.hlo))} <= {token, "s32[]"}  # and the loop's counter
    assert {*copies(gpus.compile(jaxvec.step, handle, action, donate_argnums=0).hlo)} <= {token}


def test_without_donation_it_is_copied_once(gpus, envs):
    """What the test above rests on."""
    handle, action = arguments(envs)
    compiled = gpus.compile(carry_more, (handle, jnp.zeros((64, 64))), action)
    assert copies(compiled.hlo).count("f32[64,64]") == 1


def test_no_cuda_graph_has_a_call_in_it(tmp_path, graphs, envs):
    """A graph is recorded once and then repeated, without the host's part in it."""
    gpus = devices(tmp_path, xla_gpu_graph_min_graph_size=1, **graphs)
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
