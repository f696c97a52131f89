"""The effect of a call: what JAX may do to the program around it.

It is a kind of `io_callback`'s: JAX neither drops, repeats nor reorders a call, and refuses `checkpoint`.
Under `vmap`, a `cond` whose predicate is the same for all lanes stays one, so calls may stand in it, though
JAX refuses an `io_callback` there, too. Where the predicate differs, JAX would run all branches and select
from the results, and a `while_loop` would step all lanes until the last is done. So the batching rules of
both are asked here first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.experimental import io_callback
from jax.extend.core import Jaxpr
from jax.interpreters import batching

from jaxvec._handoff._move import Verb

# The class is not public, but what a callback does is written into every jaxpr. JAX's registries of effects
# go by class, and the rules of `cond` and `while_loop` by instance.
(_IO,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None))().effects

EFFECT: Any = type("CallEffect", (type(_IO),), {"__repr__": lambda _: "jaxvec"})()

# Calls that have no effect: JAX may drop or repeat them.
PURE = (Verb.GET_ATTR, Verb.SIMULATE)

_COND = (
    "vmap of jax.lax.cond or switch, with a jaxvec call in a branch, and a predicate that differs between "
    "the vmapped instances: JAX would run all branches for all instances, and step envs that are not to be "
    "stepped. Step all envs, and choose between the results with jnp.where; reset some by mask=; or let one "
    "predicate serve all instances"
)
_WHILE = (
    "vmap of jax.lax.while_loop, with a jaxvec call in it, and a predicate that differs between the vmapped "
    "instances: JAX would step the envs of all instances until the last is done. Let one predicate serve all "
    "instances, such as .all() of theirs; envs that are done idle in a pool with episodic=True"
)


def _batch_cond(
    rule: Callable[..., Any],
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    branches: Sequence[Any],
    **params: Any,
) -> Any:
    # The index of `platform_dependent` is the same for all lanes, even where it is batched.
    differs = dims[0] is not None and "branches_platforms" not in params
    if differs and any(EFFECT in branch.effects for branch in branches):
        raise NotImplementedError(_COND)
    return rule(axis_data, args, dims, branches=branches, **params)


def _batch_while(
    rule: Callable[..., Any], *args: Any, cond_jaxpr: Any, body_jaxpr: Any, **params: Any
) -> Any:
    if EFFECT not in {*cond_jaxpr.effects, *body_jaxpr.effects}:
        return rule(*args, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **params)
    # Whether the predicate differs, the rule finds out, and then refuses JAX's own effect.
    try:
        return rule(*args, cond_jaxpr=_with_jax_effect(cond_jaxpr), body_jaxpr=body_jaxpr, **params)
    except Exception as error:
        if "batched predicate" not in str(error):
            raise
        raise NotImplementedError(_WHILE) from None


def _with_jax_effect(jaxpr: Any) -> Any:
    effects = {*jaxpr.effects, _IO}
    if isinstance(jaxpr, Jaxpr):
        return jaxpr.replace(effects=effects)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(effects=effects))  # up to jax 0.11 a closed one is another


for _primitive, _batch in ((jax.lax.cond_p, _batch_cond), (jax.lax.while_p, _batch_while)):
    _rules = batching.fancy_primitive_batchers
    _rules[_primitive] = partial(_batch, _rules[_primitive])
