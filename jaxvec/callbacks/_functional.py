"""`reset` and `step`: the verbs of the JAX face, inside `jit` and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxvec import _pickling
from jaxvec._handoff._move import Verb
from jaxvec._timestep import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks import _arguments, _primitive, _transports
from jaxvec.callbacks._handle import Handle
from jaxvec.callbacks._program import Call


def reset(
    envs: VectorEnv | Handle,
    *,
    num_envs: int | None = None,
    seed: Any = None,
    mask: Any = None,
    options: Any = None,
) -> tuple[Handle, TimeStep]:
    """Resets all envs, or those of `mask`; the results of the others stay as they are.

    Without a mask, pending envs are waited for, and what they return is lost.

    Works inside `jit`, `scan`, `vmap` and the like, and eagerly. In a program that has stepped the pool
    already, pass the latest handle rather than the `VectorEnv`: it puts the reset after that step.

    Args:
        envs: the pool, or the latest handle to envs of it.
        num_envs: under `vmap`, how many of the pool's envs each vmapped instance gets: all of them
            divided by the instances, whose seeds or masks must then be batched: what is the same for all
            instances is made once. Not for a handle, which says itself how many it is for.
        seed: `None`; an int (env *i* gets `seed + i`); `[num_envs]` integers; or a JAX key, from
            which each env gets a seed of its own. Arrays and keys may be traced.
        mask: `[num_envs]` bool, may be traced, of envs that are not pending; `None` for all.
        options: a dict for every env's `reset`, or one for each env; fixed when the program is traced.

    Returns:
        The handle for the next step, and the time step: reward 0 and flags false for envs reset. Of a
        pool with `batch_size`, the envs that are ready first, as from `recv`: with a mask, perhaps others
        that were pending before.

    Raises:
        StaleHandleError: the handle is not the latest.
        InFlightError: an env of `mask` is pending; or, with `batch_size`, fewer envs than that would be.
            Nothing was reset.
        EnvIdError: the sizes don't fit: `num_envs` times the instances is not what the pool has.
        EnvError, WorkerDiedError, EnvTimeoutError: an env failed; the pool is broken by it.
        PoolBrokenError, PoolClosedError: the pool was broken, or closed, before.
        ValueError, TypeError: a bad argument; nothing was reset.

    A compiled program raises them as `jax.errors.JaxRuntimeError` with the same text; inside
    `with envs:`, or by `envs.raise_if_failed()`, they come typed.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            handle, timestep = jaxvec.step(handle, jnp.array([0, 1]))
            handle, timestep = jaxvec.reset(handle, mask=jnp.array([True, False]))
            print(timestep.info["episode_length"])  # [0 1]
        ```
    """
    if isinstance(envs, Handle):
        handle, fresh = envs, False
        if num_envs is not None:
            raise TypeError("num_envs goes with a VectorEnv; a handle says itself how many envs it is for")
    elif not isinstance(envs, VectorEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = f"; make the pool first: jaxvec.make({envs!r}, num_envs)" if isinstance(envs, str) else ""
        raise TypeError(
            "reset takes the pool that jaxvec.make returned, or a handle to envs of it, not "
            f"{type(envs).__name__}{hint}"
        )
    else:
        token = np.zeros((envs.num_envs if num_envs is None else num_envs, 3), np.uint32)
        token[:, 0], token[:, 1] = envs.pool.id, np.arange(len(token))
        handle, fresh = Handle(token, envs.spec, _transports.choose(envs.transport)), True  # pyright: ignore[reportArgumentType]
    spec = _arguments.check_is_handle(handle, "reset")
    extra = _pickling.dumps((options, mask is not None))
    token, *rows = _primitive.bind(
        Call(Verb.RESET, spec, handle.transport, fresh=fresh, extra=extra),
        handle.token,
        _arguments.seed_words(seed, handle.num_envs),
        _arguments.check_mask(mask, handle.num_envs),
    )
    return handle.next(token), spec.build_timestep(rows)


def step(handle: Handle, action: Any) -> tuple[Handle, TimeStep]:
    """Steps every env of the handle once, whether or not the result is used.

    Works inside `jit`, `scan`, `while_loop`, `fori_loop`, `cond`, `vmap`, `grad` and `shard_map`, and
    eagerly. To a derivative, what the envs return is a constant.

    Args:
        handle: that the latest reset or step returned.
        action: pytree of the action space, leaves `[num_envs, ...]`; bools stand for integers and
            integers for floats, but not the other way round.

    Returns:
        The handle for the next step, and the time step.

    Raises:
        ActionError: wrong structure, shape or dtype, when the program is traced.
        StaleHandleError: the handle is not the latest; nothing was stepped.
        ResetNeededError: without autoreset, an env has ended its episode; nothing was stepped.
        EnvIdError: the handle names an env twice, as two vmapped instances with the same handle do.
        InFlightError: an env was sent, and not received.
        EnvError, WorkerDiedError, EnvTimeoutError: an env failed; the pool is broken by it.
        PoolBrokenError, PoolClosedError: the pool was broken, or closed, before.

    A compiled program raises them as `jax.errors.JaxRuntimeError` with the same text; inside
    `with envs:`, or by `envs.raise_if_failed()`, they come typed.

    Example:
        ```python
        @jax.jit
        def rollout(handle):
            def body(handle, key):
                return jaxvec.step(handle, jax.random.randint(key, (2,), 0, 2))

            return jax.lax.scan(body, handle, jax.random.split(jax.random.key(0), 10))

        with jaxvec.make("CartPole-v1", 2) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            handle, trajectory = rollout(handle)
            print(trajectory.obs.shape)  # (10, 2, 4)
        ```
    """
    spec = _arguments.check_is_handle(handle, "step")
    actions = _arguments.check_action(spec, action, handle.num_envs)
    token, *rows = _primitive.bind(Call(Verb.STEP, spec, handle.transport), handle.token, *actions)
    return handle.next(token), spec.build_timestep(rows)
