"""The effects of calls in JAX programs, and batching rules that reject programs which would step wrong envs.

The effect of a call is a subclass of `io_callback`'s: JAX neither drops, repeats nor reorders the call, and
`checkpoint` rejects it. Under `vmap`, a `cond` with an unbatched predicate may contain calls, unlike
`io_callback`. With a batched predicate, JAX would run all branches and select from the results, and a
`while_loop` would step every instance until the last is done. The batching rules below reject both.

JAX's own rules for `cond` and `while_loop` know only its own effects. So the first `jaxvec.make` puts the
rules below before them. They pass programs without calls of jaxvec on to JAX's rules unchanged.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
from jax.experimental import io_callback
from jax.extend.core import Jaxpr
from jax.interpreters import batching

# The effect class is private in JAX, but every jaxpr with a callback contains an instance. JAX registers
# effects by class, while the batching rules of `cond` and `while_loop` compare instances.
(_IO,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects

# JAX's errors show the effect: "Effects not supported in partial-eval of `checkpoint`/`remat`: [...]".
_EFFECT = (
    "jaxvec.step or another call of jaxvec, which would run again for the backward pass. Call it outside of "
    "jax.checkpoint, which may contain the network (docs/contract.md)"
)
EFFECT: Any = type("CallEffect", (type(_IO),), {"__repr__": lambda _: _EFFECT})()

# The effect of pure calls, which every transformation allows. Without an effect, JAX would dispatch a program
# with only such calls from C++, from its second run on, and then raises a plain ValueError for their errors.
(PURE_EFFECT,) = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects


def _batch_cond(rule: Any, axis_data: Any, args: Any, dims: Any, *, branches: Any, **params: Any) -> Any:
    # The index of `platform_dependent` may be batched, but is equal for all vmapped instances.
    differs = dims[0] is not None and "branches_platforms" not in params
    if differs and any(EFFECT in branch.effects for branch in branches):
        raise NotImplementedError(
            "vmap of jax.lax.cond or switch, with a jaxvec call in a branch, and a predicate that differs "
            "between the vmapped instances: JAX would run all branches for all instances, and so step the "
            "wrong envs. Step all envs and choose between the results with jnp.where, reset some envs with "
            "mask=, use one predicate for all instances, or run them one by one with "
            "jax.custom_batching.sequential_vmap"
        )
    return rule(axis_data, args, dims, branches=branches, **params)


def _batch_while(rule: Any, *args: Any, cond_jaxpr: Any, body_jaxpr: Any, **params: Any) -> Any:
    if EFFECT not in {*cond_jaxpr.effects, *body_jaxpr.effects}:
        return rule(*args, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **params)
    # Only the rule knows whether the predicate is batched: if so, it rejects JAX's own effect.
    try:
        return rule(*args, cond_jaxpr=_with_jax_effect(cond_jaxpr), body_jaxpr=body_jaxpr, **params)
    except Exception as error:
        if "batched predicate" not in str(error):
            raise
        raise NotImplementedError(
            "vmap of jax.lax.while_loop, with a jaxvec call in it, and a predicate that differs between the "
            "vmapped instances: JAX would step the envs of all instances until the last is done. Use one "
            'predicate for all instances, such as .all() of theirs; with autoreset_mode="EPISODIC", envs '
            "that are done stay idle"
        ) from None


def _with_jax_effect(jaxpr: Any) -> Any:
    effects = {*jaxpr.effects, _IO}
    if isinstance(jaxpr, Jaxpr):
        return jaxpr.replace(effects=effects)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(effects=effects))  # a ClosedJaxpr, up to jax 0.11


@cache
def install() -> None:
    """Puts the batching rules before JAX's, once per process."""
    rules = batching.fancy_primitive_batchers
    for primitive, rule in ((jax.lax.cond_p, _batch_cond), (jax.lax.while_p, _batch_while)):
        rules[primitive] = partial(rule, rules[primitive])
