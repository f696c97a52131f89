"""Rules for derivatives of loops that call envs: a loop makes its calls as often as without the derivative.

`grad`, `vjp`, `linearize` and similar transformations linearize a loop. JAX's rule for `scan` moves
computations out of the loop that do not depend on its carry, effects or not. Its rule for `while_loop` runs
the loop again for the derivative. The rules below prevent the former and reject the latter. `jvp` and
`jacfwd` do neither.

The registry of these rules is private in JAX. No other file imports a private module of JAX.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
from jax._src.core import jaxprs_in_params
from jax._src.interpreters import ad
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import jit_p, scan_p, while_p
from jax.interpreters import partial_eval

from jaxvec.callbacks._effects import EFFECT

_LOOP_BODY = "jaxvec_loop_body"


def _linearize_scan(rule: Any, *args: Any, jaxpr: Any, **params: Any) -> Any:
    """Applies JAX's rule to the scan or, if that changes the number of calls, to one that JAX cannot split.

    The latter stores residuals of the derivative for each iteration, even if they are always equal.
    """
    num_calls = _count_calls({"jaxpr": jaxpr})
    if num_calls == 0:
        return rule(*args, jaxpr=jaxpr, **params)
    num_primals = len(jaxpr.in_avals)
    for make_body in (lambda: jaxpr, lambda: _in_one_piece(jaxpr)):
        linearize = partial(rule, jaxpr=make_body(), **params)
        program, structure, nonzero, tangent_function = _trace(linearize, args, num_primals)
        loops = [eqn for eqn in program.eqns if EFFECT in eqn.effects]
        if [loop.primitive for loop in loops] == [scan_p] and _count_calls(loops[0].params) == num_calls:
            outputs = jaxpr_as_fun(program)(*args[-num_primals:])
            results, residuals = jax.tree.unflatten(structure, outputs)
            return results, nonzero, *residuals, tangent_function
    raise NotImplementedError(
        "a derivative through jax.lax.scan, map or fori_loop with a jaxvec call in the loop, which JAX "
        "would run another number of times than without the derivative. Put the handle into the carry, and "
        "call jaxvec outside of functions with custom derivatives"
    )


def _linearize_while(rule: Any, *args: Any, **params: Any) -> Any:
    linearize = partial(rule, **params)
    if _count_calls(params):
        num_primals = params["cond_nconsts"] + len(params["body_jaxpr"].in_avals)
        _, _, nonzero, _ = _trace(linearize, args, num_primals)
        if any(nonzero):
            raise NotImplementedError(
                "a derivative through jax.lax.while_loop, or a fori_loop of traced length, with a jaxvec "
                "call in the loop: JAX would run the loop again for the derivative, and so step the envs "
                "again. Use jax.lax.scan, jax.jvp or jax.jacfwd, or pass what goes into the loop through "
                "jax.lax.stop_gradient"
            )
    return linearize(*args)


def _trace(linearize: Any, args: Any, num_primals: int) -> Any:
    """Traces a linearization rule, without running a call.

    Returns a jaxpr from the primals to the results and residuals, the structure of these, a flag for each
    result with a derivative, and the function of the tangents.
    """
    static: list[Any] = []

    def run(*primals: Any) -> Any:
        results, nonzero, *residuals, tangent_function = linearize(*args[:-num_primals], *primals)
        static.extend((nonzero, tangent_function))
        return results, residuals

    program, shapes = jax.make_jaxpr(run, return_shape=True)(*args[-num_primals:])
    return program, jax.tree.structure(shapes), *static


def _count_calls(params: Any) -> int:
    """Returns the number of calls in the jaxprs of an equation's parameters, however nested."""
    eqns = [eqn for jaxpr in jaxprs_in_params(params) for eqn in jaxpr.eqns]
    return sum(_count_calls(eqn.params) or 1 for eqn in eqns if EFFECT in eqn.effects)


def _in_one_piece(jaxpr: Any) -> Any:
    """Returns the jaxpr as a single equation, which `_evaluate_jit` leaves whole and in the loop."""

    def body(*operands: Any) -> Any:
        return jaxpr_as_fun(jaxpr)(*operands)

    body.__name__ = _LOOP_BODY
    return jax.make_jaxpr(jax.jit(body))(*jaxpr.in_avals)


def _evaluate_jit(rule: Any, trace: Any, *operands: Any, **params: Any) -> Any:
    if params["name"] != _LOOP_BODY:
        return rule(trace, *operands, **params)
    # JAX moves an equation out of the loop if the values of all operands are known before the loop.
    unknown = [trace.instantiate_const(operand) for operand in operands]
    return trace.default_process_primitive(jit_p, unknown, params)


def _evaluate_loop(rule: Any, trace: Any, *operands: Any, **params: Any) -> Any:
    if not getattr(jax.config, "jax_use_direct_linearize", True) and _count_calls(params):
        raise NotImplementedError(
            "a derivative through a loop with a jaxvec call in the loop, while jax_use_direct_linearize is "
            "off: JAX would run the call another number of times than without the derivative. Turn the "
            "option on"
        )
    return rule(trace, *operands, **params)


@cache
def install() -> None:
    """Puts the rules before JAX's, once per process."""
    linearizations = ad.primitive_linearizations
    linearizations[scan_p] = partial(_linearize_scan, linearizations[scan_p])
    linearizations[while_p] = partial(_linearize_while, partial(ad.fallback_linearize_rule, while_p))
    evaluations = partial_eval.custom_partial_eval_rules
    evaluations[jit_p] = partial(_evaluate_jit, evaluations[jit_p])
    evaluations[scan_p] = partial(_evaluate_loop, evaluations[scan_p])
    evaluations[while_p] = partial(_evaluate_loop, evaluations[while_p])
