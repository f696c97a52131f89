"""`get_attr` and `call` inside programs and out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.probe import _ffi, pool_of

import jaxvec
from jaxvec.testing import CountingEnv


class MaskedEnv(CountingEnv):
    """Allows the actions up to its level, and remembers what was asked of it."""

    def __init__(self, level=0):
        super().__init__()
        self.level = level
        self.asked = []

    @property
    def mask(self):
        return np.arange(4) <= self.level

    def state(self):
        return {"mask": self.mask, "steps": (self.steps, 0.5)}

    def raise_level(self, by, tag="none", extra=None):
        self.level += int(by)
        self.asked.append((int(by), tag, None if extra is None else np.asarray(extra["x"]).tolist()))
        return self.level

    def fail(self):
        raise ValueError("not today")


@pytest.fixture(params=["ffi", "io_callback", "serial"])
def envs(request, make):
    if request.param == "ffi" and _ffi.reason_unavailable() is not None:
        pytest.skip(str(_ffi.reason_unavailable()))
    if request.param == "serial":
        return make(lambda i: MaskedEnv(i), 4, backend="serial")
    return make(lambda i: MaskedEnv(i), 4, num_workers=2, transport=request.param)


JIT = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
MASK = jax.ShapeDtypeStruct((4,), bool)
STATE = {"mask": MASK, "steps": (int, np.zeros((), np.float32))}


@JIT
def test_get_attr_reads_an_attribute_or_a_method(envs, jit):
    handle, _ = jaxvec.reset(envs)
    wrap = jax.jit if jit else lambda f: f
    mask = wrap(lambda h: jaxvec.get_attr(h, "mask", MASK))(handle)
    np.testing.assert_array_equal(mask, np.tri(4, dtype=bool))
    state = wrap(lambda h: jaxvec.get_attr(h, "state", STATE))(handle)
    np.testing.assert_array_equal(state["mask"], mask)
    np.testing.assert_array_equal(state["steps"], [[0] * 4, [0.5] * 4])
    jaxvec.step(handle, jnp.zeros(4, int))  # the handle is still fresh


def test_a_policy_masks_its_actions_inside_a_scan(envs):
    handle, _ = jaxvec.reset(envs)

    @jax.jit
    def program(handle):
        def body(handle, _):
            mask = jaxvec.get_attr(handle, "mask", MASK)
            handle, timestep = jaxvec.step(handle, jnp.where(mask, jnp.arange(4), -1).max(1))
            handle, level = jaxvec.call(
                handle, "raise_level", timestep.obs[:, 1] % 2, result_shape_dtypes=int
            )
            return handle, (timestep.obs[:, 3], level)

        return jax.lax.scan(body, handle, length=4)[1]

    actions, levels = program(handle)
    np.testing.assert_array_equal(levels[:, 0], [1, 1, 2, 2])
    np.testing.assert_array_equal(actions[:, 0], [0, 1, 1, 2])


@JIT
def test_call_takes_arrays_scalars_and_objects_in_order(envs, jit):
    handle, _ = jaxvec.reset(envs)

    def program(handle, rows):
        handle, _ = jaxvec.call(handle, "raise_level", rows, "first")
        handle, _ = jaxvec.call(handle, "raise_level", 2, "second", {"x": rows[:, None] * jnp.ones((4, 2))})
        return jaxvec.step(handle, jnp.zeros(4, int))[0]

    (jax.jit(program) if jit else program)(handle, jnp.array([5, 6, 7, 8]))
    expected = [[(5 + i, "first", None), (2, "second", [5.0 + i] * 2)] for i in range(4)]
    assert list(envs.get_attr("asked")) == expected
    assert envs.get_attr("level") == (7, 9, 11, 13)


def test_calls_whose_results_are_not_used_are_made_all_the_same(envs):
    handle, _ = jaxvec.reset(envs)

    @jax.jit
    def program(handle):
        def body(handle, _):
            return jaxvec.call(handle, "raise_level", 1, result_shape_dtypes=int)[0], None

        jax.lax.scan(body, handle, length=10)
        return 0

    jax.block_until_ready(program(handle))
    jax.effects_barrier()
    assert envs.get_attr("level") == (10, 11, 12, 13)


def test_lanes_and_parts_of_a_handle_ask_their_own_envs(envs):
    handle, _ = jaxvec.reset(envs)
    lanes = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), handle)
    levels = jax.jit(jax.vmap(lambda h: jaxvec.get_attr(h, "level", int)))(lanes)
    np.testing.assert_array_equal(levels, [[0, 1], [2, 3]])
    backwards = jax.tree.map(lambda x: x[::-1], handle)
    np.testing.assert_array_equal(jaxvec.get_attr(backwards, "level", int), [3, 2, 1, 0])
    lanes, levels = jax.vmap(lambda h, by: jaxvec.call(h, "raise_level", by, result_shape_dtypes=int))(
        lanes, jnp.array([10, 20])
    )
    np.testing.assert_array_equal(levels, [[10, 11], [22, 23]])
    part = jax.tree.map(lambda x: x[1], lanes)
    jaxvec.call(part, "raise_level", 1)
    assert envs.get_attr("level") == (10, 11, 23, 24)


FAILURES = {
    "no attribute": (
        lambda h: jaxvec.call(h, "nothing", result_shape_dtypes=int),
        jaxvec.EnvError,
        "no env attribute 'nothing'",
    ),
    "raises": (lambda h: jaxvec.call(h, "fail"), jaxvec.EnvError, "env 0.*not today"),
    "structure": (
        lambda h: jaxvec.call(h, "state", result_shape_dtypes=int),
        jaxvec.EnvDataError,
        r"env 0 returned wrong data from state: expected the structure PyTreeDef\(\*\), got",
    ),
    "dtype": (
        lambda h: jaxvec.call(h, "mask", result_shape_dtypes=jax.ShapeDtypeStruct((3,), bool)),
        jaxvec.EnvDataError,
        "expected shape",
    ),
    "read": (lambda h: jaxvec.get_attr(h, "nothing", int), jaxvec.EnvError, "no env attribute 'nothing'"),
}


@pytest.mark.slow(but=9)
@JIT
@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_call_is_an_error_and_the_pool_stays_usable(envs, jit, case):
    call, error, match = FAILURES[case]
    handle, _ = jaxvec.reset(envs)
    with pytest.raises((error, RuntimeError), match=f"(?s){match}") as caught:
        jax.block_until_ready((jax.jit(call) if jit else call)(handle))
    if not isinstance(caught.value, error):
        with pytest.raises(error, match=f"(?s){match}"):
            envs.raise_if_failed()
    assert pool_of(envs).state.broken_by is None
    handle = handle if error is jaxvec.EnvError else jaxvec.reset(envs)[0]
    jaxvec.step(handle, jnp.zeros(4, int))


def test_a_read_by_an_old_handle_is_an_error(envs):
    handle, _ = jaxvec.reset(envs)
    jaxvec.step(handle, jnp.zeros(4, int))
    with pytest.raises(jaxvec.StaleHandleError, match="stale handle"):
        jaxvec.get_attr(handle, "level", int)
    with pytest.raises(RuntimeError, match="stale handle"):
        jax.block_until_ready(jax.jit(lambda h: jaxvec.get_attr(h, "level", int))(handle))


def test_rows_that_do_not_fit_are_refused(envs):
    handle, _ = jaxvec.reset(envs)
    with pytest.raises(ValueError, match=r"shape \(3,\), but its first axis must have one entry"):
        jaxvec.call(handle, "raise_level", jnp.zeros(3))
