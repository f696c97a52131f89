"""Derivatives of loops that call envs: the calls of a loop run as often as without the derivative.

The derivatives are compared with those of equal programs that read the values of the envs from an array.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxvec
from jaxvec.testing import CountingEnv

pytestmark = pytest.mark.jax_version

LENGTH = 4
ACTION = jnp.zeros(2, int)


class TallyEnv(CountingEnv):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def tally(self):
        self.calls += 1
        return float(self.calls)


# --- Calls that do not depend on the carry of the loop ------------------------------------------------


def total(timestep):
    return timestep.obs.sum().astype(jnp.float32)


def reset(envs):
    return total(jaxvec.reset(envs)[1])


def reset_seeded(envs):
    return total(jaxvec.reset(envs, seed=jax.random.key(0))[1])


def reset_unread(envs):
    jaxvec.reset(envs)
    return 2.0


def step(envs):
    handle, _ = jaxvec.reset(envs)
    return total(jaxvec.step(handle, ACTION)[1])


def send_and_recv(envs):
    handle, _ = jaxvec.reset(envs)
    return total(jaxvec.recv(jaxvec.send(handle, ACTION))[1])


def call(envs):
    handle, _ = jaxvec.reset(envs)
    return jaxvec.call(handle, "tally", result_shape_dtypes=float)[1].sum()


def save_and_restore(envs):
    handle, state = jaxvec.save(jaxvec.reset(envs)[0])
    handle, _ = jaxvec.step(handle, ACTION)
    _, ahead = jaxvec.simulate(handle, state, ACTION)
    return total(jaxvec.restore(handle, state)[1]) + total(ahead)


def jitted(envs):
    return jax.jit(lambda: reset(envs))()


def inner_scan(envs):
    return jax.lax.scan(lambda carry, _: (carry, step(envs)), 0.0, length=2)[1].sum()


def inner_while(envs):
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + step(envs)), (0, 0.0))[1]


def inner_cond(envs):
    return jax.lax.cond(jnp.ones(()) > 0, lambda: step(envs), lambda: jnp.float32(0))


def custom_jvp(envs):
    @jax.custom_jvp
    def read(x):
        return step(envs) + x

    read.defjvp(lambda primals, tangents: (read(*primals), jnp.zeros(())))
    return read(1.0)


def custom_vjp(envs):
    @jax.custom_vjp
    def read(x):
        return step(envs) + x

    read.defvjp(lambda x: (read(x), None), lambda _, cotangent: (cotangent,))
    return read(1.0)


CALLS = [
    *(reset, reset_seeded, reset_unread, step, send_and_recv, call, save_and_restore),
    *(jitted, inner_scan, inner_while, inner_cond, custom_jvp, custom_vjp),
]


# --- Loops and derivatives ----------------------------------------------------------------------------


def scan(term, weight):
    def body(carry, index):
        value = term(carry, index)
        return carry * 1.5, value

    return jax.lax.scan(body, weight, jnp.arange(LENGTH))[1].sum()


def reversed_scan(term, weight):
    def body(carry, index):
        return carry * 1.5, term(carry, LENGTH - 1 - index)

    return jax.lax.scan(body, weight, jnp.arange(LENGTH), reverse=True)[1].sum()


def lax_map(term, weight):
    return jax.lax.map(lambda index: term(weight, index), jnp.arange(LENGTH)).sum()


def fori(term, weight):
    return jax.lax.fori_loop(0, LENGTH, lambda index, result: result + term(weight, index), 0.0)


LOOPS = [scan, reversed_scan, lax_map, fori]

DERIVATIVES = {
    "grad": jax.grad,
    "jit_grad": lambda f: jax.jit(jax.grad(f)),
    "grad_jit": lambda f: jax.grad(jax.jit(f)),
    "value_and_grad": lambda f: lambda w: jnp.stack(jax.value_and_grad(f)(w)),
    "vjp": lambda f: lambda w: jax.vjp(f, w)[1](1.0)[0],
    "linearize": lambda f: lambda w: jax.linearize(f, w)[1](1.0),
    "jacrev": jax.jacrev,
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "grad_grad": lambda f: jax.grad(jax.grad(f)),
    "vmap_of_a_loop": lambda f: jax.grad(lambda w: jax.vmap(lambda x: f(w) * x)(jnp.ones(3)).sum()),
}


def counts(envs):
    return [envs.get_attr(name) for name in ("resets", "steps", "calls")]


def check(make, loop, function, derivative, **options):
    """Compares counts with those of the loop alone, and the derivative with that of recorded values."""
    plain, differentiated = (make(TallyEnv, 2, states=10, **options) for _ in range(2))
    recorded = []

    def record(weight, index):
        value = function(plain)
        jax.debug.callback(lambda index, value: recorded.append((int(index), float(value))), index, value)
        return weight**3 * value

    jax.block_until_ready(jax.jit(lambda weight: loop(record, weight))(2.0))
    jax.effects_barrier()
    values = jnp.array([value for _, value in sorted(recorded)])
    result = derivative(lambda weight: loop(lambda w, _: w**3 * function(differentiated), weight))(2.0)
    expected = derivative(lambda weight: loop(lambda w, index: w**3 * values[index], weight))(2.0)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert counts(differentiated) == counts(plain)
    assert counts(plain)[0][0] >= LENGTH


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_a_loop_under_a_derivative_calls_as_often_as_without(make, transport, function, derivative):
    check(make, scan, function, DERIVATIVES[derivative], transport=transport)


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_every_call_runs_in_each_iteration_under_grad(make, function):
    check(make, scan, function, jax.grad, backend="serial")


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda function: function.__name__)
def test_each_loop_under_a_derivative_calls_as_often_as_without(make, loop, derivative):
    check(make, loop, step, DERIVATIVES[derivative])


def test_nnx_grad_of_a_scan_calls_as_often_as_without(make):
    nnx = pytest.importorskip("flax.nnx")

    class Scale(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.float32(2))

    def derivative(function):
        return lambda _: nnx.grad(lambda module: function(module.weight[...]))(Scale()).weight[...]

    check(make, scan, step, lambda f: lambda w: derivative(f)(w))
    check(make, scan, step, lambda f: nnx.jit(derivative(f)))


# --- Handles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_handle_outside_of_the_carry_is_stale_under_grad_too(make, transport, jit):
    envs = make(CountingEnv, 2, transport=transport)
    handle, _ = jaxvec.reset(envs)
    gradient = jax.grad(lambda w: scan(lambda w, _: w * total(jaxvec.step(handle, ACTION)[1]), w))
    with pytest.raises(RuntimeError, match="StaleHandleError"):
        jax.block_until_ready((jax.jit(gradient) if jit else gradient)(2.0))
    assert envs.get_attr("steps") == (1, 1)


def carried(handle, weight):
    def body(carry, index):
        handle, weight = carry
        handle, timestep = jaxvec.step(handle, jnp.zeros(handle.num_envs, int))
        return (handle, weight * 1.5), jnp.tanh(weight) * total(timestep)

    (handle, _), values = jax.lax.scan(body, (handle, weight), length=LENGTH)
    return values.sum()


def test_loops_with_a_carried_handle_keep_jaxs_derivative(make):
    """So constant residuals are still stored once, not for each iteration."""
    envs = make(CountingEnv, 2)
    handle, _ = jaxvec.reset(envs)
    matrix = jnp.full((50, 50), 0.01)

    def loss(matrix):
        def body(carry, _):
            handle, vector = carry
            handle, timestep = jaxvec.step(handle, ACTION)
            return (handle, jnp.tanh(jnp.exp(matrix) @ vector) + total(timestep)), None

        return jax.lax.scan(body, (handle, jnp.ones(50)), length=7)[0][1].sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(matrix))
    assert "[7,50]" in program
    assert "[7,50,50]" not in program


def test_instances_of_vmap_under_grad_and_grad_under_vmap(make):
    envs = make(CountingEnv, 4, backend="serial")

    def loss(weight, key):
        def term(weight, _):
            return weight * total(jaxvec.reset(envs, num_envs=2, seed=key)[1])

        return scan(term, weight)

    keys = jax.random.split(jax.random.key(0), 2)
    inside = np.asarray(jax.vmap(jax.grad(loss), (None, 0))(2.0, keys))
    assert envs.get_attr("resets") == (LENGTH,) * 4
    outside = float(jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, keys).sum())(2.0))
    assert envs.get_attr("resets") == (2 * LENGTH,) * 4
    assert inside.shape == (2,)
    assert outside > inside.sum()  # later resets have larger counters


def test_devices_of_shard_map_under_grad(make):
    envs = make(CountingEnv, 8, num_workers=2)
    handle, _ = jaxvec.reset(envs)
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))

    def loss(weight, handle):
        return carried(handle, weight[0])[None]

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    gradient = jax.jit(jax.grad(lambda weight: sharded(weight, handle).sum()))(jnp.ones(4))
    np.testing.assert_allclose(gradient, gradient[0])
    assert envs.get_attr("steps") == (LENGTH,) * 8


def test_calls_outside_of_loops_run_once_and_have_values(make, transport):
    envs = make(CountingEnv, 2, transport=transport)
    handle, _ = jaxvec.reset(envs)

    def loss(weight):
        first, before = jaxvec.step(handle, ACTION)
        _, after = jaxvec.step(first, ACTION)
        return weight**2 * (before.reward + 3 * after.reward).sum(), after.reward

    gradient, reward = jax.grad(loss, has_aux=True)(2.0)
    assert gradient == 2 * 2 * (2 * 1 + 2 * 3 * 2)
    assert reward.tolist() == [2, 2]
    assert envs.get_attr("steps") == (2, 2)


# --- Loops of unknown length --------------------------------------------------------------------------

REVERSE = ["grad", "jit_grad", "grad_jit", "vjp", "linearize", "jacrev", "hessian"]


@pytest.mark.parametrize("derivative", REVERSE)
def test_a_derivative_through_a_while_loop_is_refused_before_a_step(make, derivative):
    """JAX refuses `grad` too, after the steps, and for `linearize` it steps twice."""
    envs = make(CountingEnv, 2)
    handle, _ = jaxvec.reset(envs)

    def loss(weight):
        def body(carry):
            count, handle, weight = carry
            handle, timestep = jaxvec.step(handle, ACTION)
            return count + 1, handle, weight * total(timestep)

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, handle, weight))[2]

    with pytest.raises(NotImplementedError, match=r"while_loop.*step the envs again.*jax\.lax\.scan"):
        DERIVATIVES[derivative](loss)(2.0)
    assert envs.get_attr("steps") == (0, 0)
    assert jax.jacfwd(loss)(2.0) == 6 * 10 * 14
    assert envs.get_attr("steps") == (3, 3)


@pytest.mark.parametrize("derivative", ["grad", "jit_grad", "linearize"])
def test_a_while_loop_without_a_derivative_of_its_results_steps_once(make, derivative):
    """As with a policy that chooses integers."""
    envs = make(CountingEnv, 2)
    handle, _ = jaxvec.reset(envs)

    def loss(weight):
        def body(carry):
            handle, timestep = jaxvec.step(carry[1], jnp.full(2, weight).astype(int))
            return carry[0] + 1, handle, timestep.reward

        return (
            weight * jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, handle, jnp.zeros(2)))[2].sum()
        )

    assert DERIVATIVES[derivative](loss)(2.0) == 6
    assert envs.get_attr("steps") == (3, 3)


def test_without_direct_linearization_loops_are_refused_or_right(make):
    """The option has no effect in newer versions of JAX."""
    envs = make(CountingEnv, 2)
    if not hasattr(jax.config, "jax_use_direct_linearize"):
        pytest.skip("this version of JAX has no such option")
    jax.config.update("jax_use_direct_linearize", False)
    refusal = None
    try:
        jax.block_until_ready(jax.grad(lambda w: scan(lambda w, _: w * reset(envs), w))(2.0))
    except NotImplementedError as error:
        refusal = str(error)
    finally:
        jax.config.update("jax_use_direct_linearize", True)
    assert refusal is None or "jax_use_direct_linearize" in refusal
    assert envs.get_attr("resets") == ((LENGTH, LENGTH) if refusal is None else (0, 0))
