"""Compares two pools of envs, for ports that are no JAX envs, such as batched envs in C++."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxvec._ports.port import FLAGS, by_path
from jaxvec._ports.program import errors_of, random_action
from jaxvec.callbacks._functions import reset, step


def compare_pools(port: Any, original: Any, *, num_steps: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Steps two pools with equal seeds and actions, in one program, and returns the errors of all results.

    This compares a port that is no JAX env, such as a batched env in C++. Actions are random. EnvPool's envs
    ignore seeds of resets. A batched env as the *original* of a JAX env needs no pool: pass `compare_port` a
    function that wraps one with one env as a `gymnasium.Env`, which adds and removes the first axis.

    Args:
        port: A pool that `make` returned.
        original: A pool of the original, with as many envs and the same autoreset mode.
        num_steps: Number of results of each env, with the reset.
        seed: Seed of the first resets and of the actions.

    Returns:
        Errors by path, such as `"reward"`: arrays `[num_steps, num_envs]` of float32, with 0 where both
        results are equal. Row 0 has those of the reset. Errors of floats are relative for values above 1.
        What follows the first difference of an env may be its consequence.

    Raises:
        ValueError: The results of the pools have different shapes.

    Example:
        ```python
        from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

        port = jaxvec.make(lambda: CartPoleVectorEnv(1), 2, envs_per_instance=1)
        original = jaxvec.make("CartPole-v1", 2, autoreset_mode="NEXT_STEP")
        errors = jaxvec.ports.compare_pools(port, original, num_steps=100)
        print(max(float(error.max()) for error in errors.values()))  # 0.0
        port.close()
        original.close()
        ```
    """

    def body(sides: Any, key: jax.Array) -> tuple[Any, Any]:
        results = [
            by_path({name: getattr(timestep, name) for name in ("obs", "reward", *FLAGS)})
            for _, timestep in sides
        ]
        shapes = [jax.tree.map(jnp.shape, leaves) for leaves in results]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the port's results have the shapes {shapes[0]}, and the original's {shapes[1]}"
            )
        keys = jax.random.split(key, original.num_envs)
        action = jax.vmap(partial(random_action, original.single_action_space))(keys)
        return tuple(step(handle, action) for handle, _ in sides), jax.tree.map(errors_of, *results)

    sides = reset(port, seed=seed), reset(original, seed=seed)
    keys = jax.random.split(jax.random.key(seed), num_steps)
    return jax.device_get(jax.jit(partial(jax.lax.scan, body))(sides, keys)[1])
