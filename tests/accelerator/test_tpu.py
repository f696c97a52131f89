"""Programs for TPUs, which reach their pool by callbacks, as far as they can be tried without a TPU.

JAX lowers a program for a TPU only if there is one, because a TPU's client has to make the callback. Here
another object makes it. So what is lowered and what the callback does are the real thing; sending and
receiving are not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax._src.interpreters import mlir
from support import probe
from support.ahead_of_time import ImageEnv
from support.probe import Packing, Verb, _call, _operands, check_action

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

pytestmark = pytest.mark.jax_version


@dataclass
class Client:
    """What of a TPU's client lowering asks for; keeps what it is given."""

    callbacks: list[Any] = field(default_factory=list)
    channels: list[tuple[int, int]] = field(default_factory=list)  # how many to send and to receive
    received: list[Any] = field(default_factory=list)  # shapes
    platform: str = "tpu"

    def make_python_callback_from_host_send_and_recv(self, callback, operands, results, send, recv, *_):
        assert (len(operands), len(results)) == (len(send), len(recv))
        self.callbacks.append(callback)
        self.channels.append((len(send), len(recv)))
        self.received += results
        return object()


@pytest.fixture
def tpu(monkeypatch, free_choice):
    client = Client()
    monkeypatch.setattr(mlir.ModuleContext, "get_backend", lambda *_, **__: client)
    return client


def lower(program, *arguments):
    return jax.jit(program).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


class OddEnv(CountingEnv):
    """Observes an empty array, a bool and small integers."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict(
            {
                "empty": spaces.Box(0, 1, (0, 3), np.float32),
                "flags": spaces.MultiBinary(3),
                "small": spaces.Box(-128, 127, (2,), np.int8),
                "half": spaces.Box(-1, 1, (), np.float16),
            }
        )

    def _observe(self, action):
        return {
            "empty": np.zeros((0, 3), np.float32),
            "flags": np.array([1, 0, 1], np.int8),
            "small": np.array([action % 100, self.steps], np.int8),
            "half": np.float16(0.5),
        }


@pytest.mark.parametrize("transport", ["auto", "io_callback"])
def test_tpu_programs_use_host_callbacks_and_no_custom_call(make, tpu, transport):
    handle, _ = jaxvec.reset(make(CountingEnv, 2, transport=transport))
    text = lower(lambda h: jax.lax.scan(lambda h, _: jaxvec.step(h, jnp.zeros(2, int)), h, length=3), handle)
    assert "jaxvec_call" not in text
    assert tpu.channels == [(1, 1)]  # token and actions are packed, and so are the results
    assert text.count("stablehlo.send") == text.count("stablehlo.recv") == 1
    assert "stablehlo.while" in text


@pytest.mark.parametrize("env", [CountingEnv, NestedEnv, OddEnv])
def test_the_callback_steps_the_pool(make, tpu, env):
    envs, oracle = make(env, 2), make(env, 2)
    handle, _ = jaxvec.reset(envs, seed=3)
    theirs, _ = jaxvec.reset(oracle, seed=3)
    envs.action_space.seed(0)
    action = jax.tree.map(np.asarray, envs.action_space.sample())
    lower(jaxvec.step, handle, action)
    (callback,) = tpu.callbacks
    leaves = check_action(handle.spec, action, 2, str, _operands.PROGRAM)
    transferred = callback(packed(handle, *leaves))
    packing = Packing.of(_call.Call(Verb.STEP, handle.spec, "io_callback").results(2))
    token, *rows = packing.views([np.asarray(array) for array in transferred])
    assert probe.num_moves(envs, token[:, 2]) == [2, 2]
    _, expected = jaxvec.step(theirs, action)
    assert sorted(map(describe, rows)) == sorted(map(describe, jax.tree.leaves(expected)))
    assert len(tpu.received) == len(transferred) == 1


def test_an_error_that_nobody_waited_for_comes_where_the_pool_is_left(make, tpu):
    envs = make(CountingEnv, 2)
    with pytest.raises(jaxvec.StaleHandleError), envs:
        handle, _ = jaxvec.reset(envs)
        jaxvec.step(handle, jnp.zeros(2, int))
        lower(lambda h, a: jaxvec.step(h, a), handle, jnp.zeros(2, int))
        with pytest.raises(jaxvec.StaleHandleError):
            tpu.callbacks[0](packed(handle, jnp.zeros(2, jnp.int32)))


def packed(handle, *operands):
    """Returns what a program sends."""
    operands = [handle.token, *operands]
    return np.asarray(Packing.of(operands, pack_all=True).join(operands))


def describe(array):
    array = np.asarray(array)
    return array.shape, array.dtype.str, array.tobytes()


def test_a_large_action_goes_in_pieces(make, tpu):
    class WideEnv(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Box(-1, 1, (10_000,), np.float32)

        def _observe(self, action):
            return super()._observe(0)

    handle, _ = jaxvec.reset(make(WideEnv, 2))
    lower(jaxvec.step, handle, jnp.zeros((2, 10_000)))
    ((pieces, _),) = tpu.channels
    assert pieces == 2


def test_a_large_result_goes_by_itself(make, tpu):
    handle, _ = jaxvec.reset(make(ImageEnv, 2, final_obs=False))
    lower(jaxvec.step, handle, jnp.zeros(2, int))
    assert tpu.channels == [(1, 2)]


def test_equal_calls_have_channels_of_their_own(make, tpu):
    handle, _ = jaxvec.reset(make(CountingEnv, 2))

    def program(handle):
        handle, first = jaxvec.step(handle, jnp.zeros(2, int))
        handle, second = jaxvec.step(handle, jnp.zeros(2, int))
        return handle, first, second

    channels = re.findall(r"channel_handle<handle = (\d+)", lower(program, handle))
    assert len(tpu.callbacks) == 2
    assert len(channels) == len({*channels}) == 4


def test_the_other_verbs_are_lowered_too(make, tpu):
    envs = make(CountingEnv, 4, batch_size=2)
    handle, timestep = jaxvec.reset(envs)

    def program(handle, env_id):
        handle, timestep = jaxvec.reset(handle, seed=1)
        handle = jaxvec.send(handle, env_id, env_id)
        handle, timestep = jaxvec.recv(handle)
        return handle, timestep

    lower(program, handle, timestep.info["env_id"])
    lower(lambda: jaxvec.reset(envs, seed=2))
    assert len(tpu.callbacks) == 4


def test_without_a_tpu_jax_says_so(make, free_choice):
    handle, _ = jaxvec.reset(make(CountingEnv, 2))
    with pytest.raises(ValueError, match="the platform for the specified backend cpu is different"):
        lower(lambda h: jaxvec.step(h, jnp.zeros(2, int)), handle)
