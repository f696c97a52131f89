"""The transports: which is chosen where, and what the FFI's handlers do that others need not."""

import gc
import logging
import pickle
import weakref
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import disasters, probe
from support.disasters import ImageEnv, SlowEnv
from support.oracle import canonical
from support.probe import (
    Engine,
    Packing,
    Verb,
    _call,
    _ffi,
    _io_callback,
    _native,
    _primitive,
    choice,
    pool_of,
)
from support.probe import pool_module as pool
from support.scripts import run_python

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("device")]

needs_ffi = pytest.mark.skipif(_ffi.reason_unavailable() is not None, reason=str(_ffi.reason_unavailable()))
step = jax.jit(jaxvec.step)


def scan(handle, length, action):
    return jax.lax.scan(lambda h, _: jaxvec.step(h, action), handle, length=length)


# --- The choice -------------------------------------------------------------------------------


@needs_ffi
@pytest.mark.parametrize(
    ("transport", "platform", "chosen"),
    [
        ("auto", "cpu", "ffi"),
        ("auto", "cuda", "ffi"),
        ("auto", "tpu", "io_callback"),
        ("auto", "rocm", "io_callback"),
        ("ffi", "cpu", "ffi"),
        ("ffi", "cuda", "ffi"),
        ("io_callback", "cpu", "io_callback"),
    ],
)
def test_the_platform_decides_when_the_program_is_lowered(
    make, free_choice, monkeypatch, transport, platform, chosen
):
    """Where there is no such device, JAX can't lower the callback itself."""

    class Chosen(Exception):
        pass

    jax.clear_caches()  # of lowerings, too: another test's may be of just such a pool

    def choice(name):
        def call(*_, **__):
            raise Chosen(name)

        return call

    monkeypatch.setattr(_ffi, "call", choice("ffi"))
    monkeypatch.setattr(_io_callback, "call", choice("io_callback"))
    handle, _ = jaxvec.reset(make(CountingEnv, 2, backend="serial", transport=transport))
    with pytest.raises(Chosen, match=chosen):
        step.trace(handle, jnp.zeros(2, int)).lower(lowering_platforms=(platform,))


@needs_ffi
def test_the_ffi_is_refused_where_it_is_not(make, free_choice):
    handle, _ = jaxvec.reset(make(CountingEnv, 2, backend="serial", transport="ffi"))
    with pytest.raises(_native.NativeUnavailableError, match="on the CPU or on CUDA"):
        step.trace(handle, jnp.zeros(2, int)).lower(lowering_platforms=("tpu",))


NEWER = pytest.param(
    lambda patch: patch(_ffi, "_runtime_version", lambda: 0), "built for XLA FFI 0.1", id="abi"
)
REFUSED = pytest.param(
    lambda patch: patch(jax.ffi, "register_ffi_target", lambda *_, **__: 1 / 0),
    "jax rejected the FFI handlers: ZeroDivisionError",
    id="refused",
)


@needs_ffi
def test_the_native_library_may_be_loaded_before_jax():
    source = "from jaxvec import _native; _native.load(); import jax.numpy as jnp; print(jnp.ones(1) + 1)"
    done = run_python("-c", source)
    assert (done.stdout, done.stderr) == ("[2.]\n", "")


@needs_ffi
@pytest.mark.parametrize(("breaks", "reason"), [NEWER, REFUSED])
def test_programs_fall_back_to_io_callback_with_a_log_when_ffi_fails(
    make, free_choice, monkeypatch, caplog, breaks, reason
):
    breaks(monkeypatch.setattr)
    monkeypatch.setattr(_ffi, "reason_unavailable", _ffi.reason_unavailable.__wrapped__)
    with caplog.at_level(logging.INFO, "jaxvec"):
        assert _primitive.choose_transport("auto") == "io_callback"
    assert reason in caplog.text
    with pytest.raises(_native.NativeUnavailableError, match=reason):
        disasters.make(CountingEnv, 2, transport="ffi")


# --- Calls ------------------------------------------------------------------------------------


@pytest.fixture
def native(make):
    """Makes a pool whose steps need no Python in this process."""
    if _ffi.reason_unavailable() is not None:
        pytest.skip(_ffi.reason_unavailable())

    def native(env, num_envs, **kwargs):
        return make(env, num_envs, transport="ffi", dispatch="native", **kwargs)

    return native


@pytest.mark.slow(but=3)
@pytest.mark.usefixtures("patient_programs")
@pytest.mark.parametrize("env", [CountingEnv, NestedEnv, ImageEnv])
@pytest.mark.parametrize("autoreset_mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"backend": "serial"}], ids=["process", "serial"])
def test_a_step_without_trouble_needs_no_python(native, make, monkeypatch, env, autoreset_mode, options):
    envs = native(env, 3, autoreset_mode=autoreset_mode, **options)
    oracle = make(env, 3, transport="io_callback", dispatch="portable", autoreset_mode=autoreset_mode)
    envs.action_space.seed(0)
    action = canonical(envs.action_space.sample())
    program = jax.jit(lambda handle: scan(handle, 20, action))
    handles = [jaxvec.reset(each, seed=5)[0] for each in (envs, oracle)]
    theirs = program(handles[1])
    monkeypatch.setattr(pool.Pool, "step", None)
    monkeypatch.setattr(pool.Pool, "end", None)
    ours = program(handles[0])
    jax.tree.map(np.testing.assert_array_equal, ours[1], theirs[1])
    assert probe.num_moves(envs) == [21] * 3


@pytest.mark.usefixtures("patient_programs")
@pytest.mark.parametrize("order", ["ready", "sent"])
@pytest.mark.parametrize("batch_size", [2, 6])
def test_first_ready_batches_without_trouble_need_no_python(native, monkeypatch, order, batch_size):
    envs = native(CountingEnv, 6, num_workers=2, batch_size=batch_size, recv_order=order)
    handle, timestep = jaxvec.reset(envs, seed=5)
    for verb in ("send", "recv", "end"):
        monkeypatch.setattr(pool.Pool, verb, None)

    def turn(carry, _):
        handle, env_id = carry
        handle, timestep = jaxvec.recv(jaxvec.send(handle, 10 * env_id, env_id))
        return (handle, timestep.info["env_id"]), (timestep.obs, timestep.info["env_id"])

    program = jax.jit(lambda *carry: jax.lax.scan(turn, carry, length=30))
    (handle, _), (obs, env_id) = program(handle, timestep.info["env_id"])
    stepped = obs[..., 1] > 0
    np.testing.assert_array_equal(obs[..., 3][stepped], 10 * env_id[stepped])
    monkeypatch.undo()
    assert sum(envs.get_attr("steps")) == 30 * batch_size
    if batch_size == 2:  # Python has the same state of what is in flight
        handle, _ = jaxvec.recv(handle)
        jaxvec.recv(handle)
        with pytest.raises(jaxvec.PendingEnvError, match="0 are pending"):
            envs.recv()


def test_a_slow_recv_is_ended_by_python(native, monkeypatch):
    envs = native(SlowEnv, 4, num_workers=2, batch_size=2, recv_order="sent")
    handle, timestep = jaxvec.reset(envs)
    env_id = timestep.info["env_id"]
    handle = jax.jit(jaxvec.send)(handle, jnp.array([7, 0]), env_id)
    recv = jax.jit(jaxvec.recv)
    handle, _ = recv(handle)
    handle, timestep = recv(handle)
    np.testing.assert_array_equal(timestep.obs[:, 3], [7, 0])
    np.testing.assert_array_equal(timestep.info["env_id"], env_id)
    handle = jax.jit(jaxvec.send)(handle, jnp.array([7, 0]), env_id)
    handle = jax.jit(jaxvec.send)(handle, jnp.array([0, 0]), jnp.array([1, 3]))
    monkeypatch.setattr(pool.Pool, "end", None)
    with pytest.raises(RuntimeError, match="TypeError"):
        jax.block_until_ready(recv(handle))


@pytest.mark.usefixtures("patient_programs")
def test_a_step_without_trouble_under_disabled_asks_for_resets(native, monkeypatch):
    ends = [partial(CountingEnv, 2, truncate=truncate) for truncate in (False, True)]
    envs = native(ends, 2, autoreset_mode="DISABLED")
    handle, _ = jaxvec.reset(envs)
    with monkeypatch.context() as patch:
        patch.setattr(pool.Pool, "step", None)
        handle, _ = step(handle, jnp.zeros(2, int))
        handle, timestep = step(handle, jnp.zeros(2, int))
    assert (timestep.terminated.tolist(), timestep.truncated.tolist()) == ([True, False], [False, True])
    with pytest.raises(jaxvec.ResetNeededError, match=r"envs \[0, 1\] have ended"), envs:
        jax.block_until_ready(step(handle, jnp.zeros(2, int)))


def test_a_slow_step_is_ended_by_python(native, monkeypatch):
    envs = native(SlowEnv, 2, num_workers=2)
    handle, _ = jaxvec.reset(envs)
    handle, timestep = jax.jit(lambda h: scan(h, 3, jnp.array([0, 7])))(handle)
    np.testing.assert_array_equal(timestep.obs[:, 1, 1], [1, 2, 3])
    np.testing.assert_array_equal(timestep.obs[:, 1, 3], 7)
    monkeypatch.setattr(pool.Pool, "end", None)
    handle, _ = step(handle, jnp.zeros(2, int))  # the next needs none
    with pytest.raises(RuntimeError, match="TypeError"):
        jax.block_until_ready(step(handle, jnp.full(2, 7)))


def test_a_program_that_waits_counts_its_seconds_once(native):
    envs = native(SlowEnv, 2, step_timeout=1.0)  # twice this time would be enough for the step
    handle, _ = jaxvec.reset(envs)
    with (
        pytest.raises(jaxvec.EnvTimeoutError, match="step timed out after 1.0 s. Still running: env 0 "),
        envs,
    ):
        jax.block_until_ready(step(handle, jnp.full(2, 8)))


BAD_CALLS = {
    "no operands": lambda token, action: [],
    "no action": lambda token, action: [token],
    "too many": lambda token, action: [token, action, action],
    "token's dtype": lambda token, action: [token.astype(np.int32), action],
    "token's shape": lambda token, action: [token[:, :2], action],
    "token's rank": lambda token, action: [token[0], action],
    "no envs": lambda token, action: [token[:0], action[:0]],
    "fewer envs": lambda token, action: [token[:1], action[:1]],
    "action's dtype": lambda token, action: [token, action.astype(np.float32)],
    "action's size": lambda token, action: [token, action[:1]],
    "action's rank": lambda token, action: [token, action[:, None]],
    "a dtype unknown to NumPy": lambda token, action: [token, action.astype(jnp.bfloat16)],
}


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("backend", ["process", "serial"])
@pytest.mark.parametrize("bad", BAD_CALLS)
def test_calls_that_no_jaxvec_made_are_refused(native, backend, bad, device):
    envs = native(CountingEnv, 2, backend=backend)
    handle, _ = jaxvec.reset(envs)
    for verb in (Verb.RESET, Verb.STEP, Verb.SEND, Verb.RECV):
        attributes = {
            "fingerprint": np.int64(envs.spec.fingerprint),
            "verb": np.uint32(verb),
            "fresh": np.bool_(False),
            "extra": np.frombuffer(pickle.dumps((b"N.", (), ())), np.uint8),
        }

        def call(*operands, results, attributes=attributes):
            if device.platform in _ffi._PACKED:
                packing = Packing.of(results)
                results = packing.transfers
                attributes = {**attributes, "layout": packing.layout}
            bound = jax.ffi.ffi_call(_ffi._TARGET, results, has_side_effect=True)
            jax.block_until_ready(jax.jit(lambda: bound(*operands, **attributes))())

        results = _call.Call(verb, envs.spec, "ffi").results(2)
        action = jnp.zeros(2, np.int32)
        operands = BAD_CALLS[bad](handle.token, action)
        if verb == Verb.RECV and bad == "no action":
            operands = [handle.token, handle.token]  # a token is all it takes
        with pytest.raises(RuntimeError, match="operands|buffers|dtype|several pools|duplicate"):
            call(*operands, results=results)
        wrong = [jax.ShapeDtypeStruct(result.shape, np.int8) for result in results]
        with pytest.raises(RuntimeError, match="operands|buffers"):
            call(handle.token, action, results=wrong)
    step(handle, jnp.zeros(2, int))  # nothing was stepped, the pool is usable
    assert envs.get_attr("steps") == (1, 1)


@needs_ffi
def test_a_programs_error_is_nobodys_once_it_was_taken(make):
    envs = make(CountingEnv, 1, backend="serial", transport="ffi")
    handle, _ = jaxvec.reset(envs)
    step(handle, [0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="StaleHandleError"):
        jax.block_until_ready(step(handle, [0]))
    error = weakref.ref(pool_of(envs).state.take_error())
    gc.collect()
    assert error() is None


# --- Threads ----------------------------------------------------------------------------------


def test_a_program_returns_when_its_steps_are_done(make):
    """Also if it computes so much that JAX would dispatch it to a thread of its own."""
    envs = make(CountingEnv, 2)
    handle, _ = jaxvec.reset(envs)
    weights = jnp.ones((256, 256))

    @jax.jit
    def program(handle, x):
        def body(carry, _):
            handle, x = carry
            x = jnp.tanh(x @ weights)
            handle, _ = jaxvec.step(handle, (x.sum(1) > 0).astype(int))
            return (handle, x), None

        return jax.lax.scan(body, (handle, x), length=300)[0]

    x = jnp.ones((2, 256))
    for n in range(1, 4):
        handle, x = program(handle, x)
        assert probe.num_moves(envs) == [1 + 300 * n] * 2


# --- Results that nobody reads ----------------------------------------------------------------


def rollout(leaves, handle, action, split):
    """Steps; reads only these leaves of the time steps, or the last handle if there are none."""

    def body(handle, _):
        if split:
            handle, timestep = jaxvec.recv(jaxvec.send(handle, action))
        else:
            handle, timestep = jaxvec.step(handle, action)
        return handle, [jax.tree.leaves(timestep)[leaf] for leaf in leaves]

    handle, read = jax.lax.scan(body, handle, length=7)
    return read or handle


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transport", [pytest.param("ffi", marks=needs_ffi), "io_callback"])
@pytest.mark.parametrize("split", [False, True], ids=["step", "send and recv"])
def test_unread_results_are_not_copied_and_read_ones_are_unchanged(make, transport, split, device):
    envs = make(partial(NestedEnv, 3), 4, num_workers=2, transport=transport)
    action = jax.tree.map(jnp.asarray, envs.action_space.sample())
    handle, timestep = jaxvec.reset(envs, seed=0)
    shapes = [leaf.shape for leaf in jax.tree.leaves(timestep)]
    everything = tuple(range(len(shapes)))
    program = jax.jit(rollout, static_argnums=(0, 3))
    expected = program(everything, handle, action, split)
    for some in (everything[::2], everything[1::2], ()):
        handle, _ = jaxvec.reset(envs, seed=0)
        lowered = program.lower(some, handle, action, split)
        got = lowered.compile()(handle, action)
        assert ("tensor<4x4x4x3xui8>" in lowered.as_text()) == any(shapes[i] == (4, 4, 4, 3) for i in some)
        if some:
            for leaf, result in zip(some, got, strict=True):
                np.testing.assert_array_equal(result, expected[leaf])
    assert envs.stats().total.steps == 4 * 7 * 4


@pytest.fixture
def inputs(monkeypatch):
    """The types of the inputs of callbacks."""
    types, callback = [], _io_callback._Callback.__call__

    def recording(self, *pieces):
        types.extend(map(type, pieces))
        return callback(self, *pieces)

    monkeypatch.setattr(_io_callback._Callback, "__call__", recording)
    return types


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("way", ["direct", "by JAX", "by Python"])
def test_every_way_of_an_io_callback_gives_the_same_data(make, monkeypatch, inputs, device, way):
    jax.clear_caches()  # another way may have compiled the same program in this process
    if way == "by JAX":
        monkeypatch.setattr(_io_callback, "_emit", None)
    if way == "by Python":
        monkeypatch.setattr(_ffi, "reason_unavailable", lambda: "not here")
    env = partial(NestedEnv, 3)
    envs = make(env, 4, num_workers=2, transport="io_callback")
    oracle = make(env, 4, backend="serial")
    actions = envs.action_space.sample()
    handle, _ = jaxvec.reset(envs, seed=3)
    oracle.reset(seed=3)
    _, timesteps = jax.jit(scan, static_argnums=1)(handle, 7, actions)
    for index in range(7):
        expected = oracle.step(actions)
        got = jax.tree.map(itemgetter(index), timesteps)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)
    assert set(inputs) == {np.ndarray} if way != "by JAX" else np.ndarray not in inputs


@needs_ffi
def test_no_python_answers_an_ordinary_step_over_io_callback(make, monkeypatch):
    asked, answer = [], _call.answer

    def asking(call, *args, **kwargs):
        asked.append(call.verb)
        return answer(call, *args, **kwargs)

    monkeypatch.setattr(_call, "answer", asking)
    monkeypatch.setattr(_io_callback, "answer", asking)
    envs = make(CountingEnv, 4, num_workers=1, transport="io_callback", dispatch="native")

    @jax.jit
    def program():
        handle, _ = jaxvec.reset(envs)
        return scan(handle, 50, jnp.zeros(4, int))

    program()
    assert asked == [Verb.RESET]
    assert probe.num_served(envs) == 51


@pytest.mark.parametrize("transport", [pytest.param("ffi", marks=needs_ffi), "io_callback"])
def test_an_array_that_an_env_keeps_from_a_call_is_its_own(make, transport):
    """The operands of a program are valid only during the call."""

    class KeepingEnv(CountingEnv):
        def keep(self, values):
            self.__dict__.setdefault("kept", []).append(values)

    envs = make(KeepingEnv, 2, backend="serial", transport=transport)
    handle, _ = jaxvec.reset(envs)

    @jax.jit
    def program(handle, values):
        def body(carry, _):
            handle, values = carry
            handle, _ = jaxvec.call(handle, "keep", values)
            return (handle, values + 1), None

        return jax.lax.scan(body, (handle, values), length=5)[0]

    jax.block_until_ready(program(handle, jnp.zeros((2, 300))))
    for kept in envs.get_attr("kept"):
        np.testing.assert_array_equal(kept, np.arange(5)[:, None] * np.ones(300))


@needs_ffi
def test_arrays_that_do_not_fit_their_layout_are_refused():
    layout, words = np.array([1, 0, ord("u") + 256 * 4, 1, 6]), np.zeros(5, np.uint32)
    with pytest.raises(TypeError, match="not packed as the program's layouts specify"):
        _native.load().call_packed(int(Verb.STEP), False, b"", 0, layout, layout, [words], [words])


@pytest.mark.parametrize("verb", ["step", "recv"])
def test_unread_results_over_io_callback_take_the_fast_path(make, monkeypatch, verb):
    if choice.choose_dispatch("auto") != "native":
        pytest.skip("there is no native library, so every move is made in Python")
    options = {"batch_size": 4} if verb == "recv" else {}
    envs = make(CountingEnv, 8, num_workers=2, transport="io_callback", **options)
    slow = []
    move = Engine.move
    monkeypatch.setattr(Engine, "move", lambda *args, **kwargs: (slow.append(args), move(*args, **kwargs))[1])
    handle, timestep = jaxvec.reset(envs, seed=0)

    def play(carry, _):
        handle, env_id = carry
        if verb == "step":
            handle, timestep = jaxvec.step(handle, jnp.zeros(8, int))
        else:
            handle = jaxvec.send(handle, jnp.zeros(4, int), env_id)
            handle, timestep = jaxvec.recv(handle)
        # Of the time step the program reads the rewards and ids alone.
        return (handle, timestep.info["env_id"]), timestep.reward

    @jax.jit
    def run(handle, env_id):
        return jax.lax.scan(play, (handle, env_id), length=200)

    (handle, _), rewards = run(handle, timestep.info["env_id"])
    assert rewards.shape == (200, len(timestep.reward))
    assert slow == []
