"""Compares a JAX env with the Python env of which it is a port, inside one compiled program.

port's state --select_state, set_state--> original's state
     |                                         |
     port.step(key, state, action)             env.step(action), in the workers (_ports/original.py)
     |                                         |
     results -------- errors per leaf -------- results --> `Comparison` (_ports/comparison.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxvec._ports.comparison import Comparison, Mode, SpaceResult
from jaxvec._ports.distributions import Distributions, compare_distributions
from jaxvec._ports.original import Original, SetState, constructor, space_like
from jaxvec._ports.port import Port, as_port
from jaxvec._ports.port_spaces import NOT_DECLARED, compare_spaces
from jaxvec._ports.program import Program, by_path, random_action, restored, seed_of, sent_state, step_keys
from jaxvec.callbacks._make import make

__all__ = [
    "Comparison",
    "Distributions",
    "Port",
    "as_port",
    "compare_distributions",
    "compare_port",
    "replay",
]

Policy = Callable[[jax.Array, Any, Any], Any]


def compare_port(
    port: Any,
    original: Any,
    *,
    set_state: SetState | None = None,
    select_state: Callable[[Any], Any] | None = None,
    policy: Policy | None = None,
    mode: Mode = "one_step",
    num_envs: int = 64,
    num_steps: int = 1000,
    seed: int = 0,
    tolerances: float | Mapping[str, float] = 0.0,
    info: Mapping[str, Any] | None = None,
    **options: Any,
) -> Comparison:
    """Steps a port and its original with equal actions, in one program, and compares all results.

    Args:
        port: A `Port`, or an env that `as_port` converts.
        original: A Gymnasium id, an `EnvSpec`, or a function that makes the Python env.
        set_state: Function `(env, state)` that sets the original to a state of the port. It runs in the
            workers. The state is a dict from path to NumPy array, such as `state["x"]`. At the start of an
            episode, the env has been reset before. Gymnasium's `TimeLimit` counts the port's steps.
            `None` if the original cannot be set to a state.
        select_state: Function that returns the part of the port's state that `set_state` needs, as a pytree.
            By default, all of it.
        policy: Function `(key, obs, state) -> action` of one env of the port. By default, actions are random.
        mode: `"one_step"` sets the original to the port's state before each step, so errors do not add up.
            `"free_running"` sets it only when an episode starts, or resets it with a seed if there is no
            `set_state`. An episode then ends at its first difference.
        num_envs: Number of envs.
        num_steps: Number of steps of each env.
        seed: Seed of the resets, actions and steps.
        tolerances: Largest accepted error, for all leaves, or by path: `{"obs": 1e-6, "reward": 0}`. A path
            includes the paths below it. Errors of floats are relative for values above 1.
        info: Declared infos to compare, as in `make`.
        **options: Further options of `make`, such as `num_workers`.

    Returns:
        The differences, as a record that prints as a table.

    Raises:
        ValueError: An argument is invalid, or `mode="one_step"` has no `set_state`.
        JaxvecError: The original failed, or `set_state` did.

    Example:
        ```python
        class Sum(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 9, (), np.float32)
            action_space = gymnasium.spaces.Discrete(3)

            def reset(self, *, seed=None, options=None):
                self.total = 0
                return np.float32(0), {}

            def step(self, action):
                self.total += int(action)
                return np.float32(self.total), float(action), self.total >= 5, False, {}

        def step(key, total, action):
            total += action
            return total, {"obs": jnp.float32(total), "reward": jnp.float32(action), "done": total > 5}

        port = jaxvec.ports.Port(lambda key: (jnp.int32(0), jnp.float32(0)), step)
        set_state = lambda env, state: setattr(env, "total", int(state["state"]))
        print(jaxvec.ports.compare_port(port, Sum, set_state=set_state).differences)  # ['done']
        ```
    """
    port = as_port(port)
    if mode not in ("one_step", "free_running"):
        raise ValueError(f"mode must be 'one_step' or 'free_running', not {mode!r}")
    if mode == "one_step" and set_state is None:
        raise ValueError(
            "mode='one_step' sets the original to the port's state before each step, which needs set_state. "
            "Pass set_state=lambda env, state: ..., or, if the original cannot be set to a state, "
            "mode='free_running', whose episodes start from the original's own resets"
        )
    if num_envs * num_steps >= 2**31:
        raise ValueError(
            f"{num_envs} envs of {num_steps} steps are too many to count; make several comparisons"
        )
    sent = partial(sent_state, select_state, set_state is not None)
    shapes = jax.eval_shape(lambda key: sent(port.reset(key)[0]), jax.random.key(0))
    state_space = spaces.Dict({path: space_like(shape.shape, shape.dtype) for path, shape in shapes.items()})
    each_step = mode == "one_step"
    env_fn = partial(Original, constructor(original), set_state, state_space, each_step=each_step)
    with make(env_fn, num_envs, info=info, **options) as envs:
        (own,) = envs.get_attr("described", indices=[0])
        program = Program(
            port=port,
            policy=policy or partial(random_action, own["action space"]),
            sent=sent,
            each_step=each_step,
            num_envs=num_envs,
            num_steps=num_steps,
            tolerances=tolerances if isinstance(tolerances, Mapping) else {"": tolerances},
            infos=tuple(info or ()),
        )
        compiled = jax.jit(partial(program, envs)).lower(seed).compile()
        start = time.perf_counter()
        tallies, counts = jax.device_get(compiled(seed))
        seconds = time.perf_counter() - start
    parted, leaves = (
        int(counts["parted"]),
        {path: program.result(path, tally) for path, tally in tallies.items()},
    )
    port_fields = port.observation_space, port.action_space, port.max_episode_steps, port.autoreset
    properties = {**compare_spaces(dict(zip(own, port_fields, strict=True)), own), **program.mismatches}
    observed = [leaf for path, leaf in leaves.items() if path.split("/")[0] == "obs" and leaf.different]
    if observed and all(leaf.at_ends == leaf.different for leaf in observed):
        properties["autoreset"] = SpaceResult(
            "obs differ only in steps that end episodes, as if step reset the env",
            own["autoreset"] or NOT_DECLARED,
            False,
        )
    return Comparison(
        mode=mode,
        set_to_states=set_state is not None,
        seed=seed,
        num_envs=num_envs,
        num_steps=num_steps,
        spaces=properties,
        leaves=leaves,
        episodes=int(counts["episodes"]),
        parted=parted,
        parted_after=float(counts["parted_steps"]) / parted if parted else float("nan"),
        seconds=seconds,
    )


def replay(
    port: Any,
    original: Any,
    set_state: SetState | None = None,
    policy: Policy | None = None,
    *,
    key: jax.Array,
    step: int,
    state: Mapping[str, Any] | None = None,
    action: Any = None,
    select_state: Callable[[Any], Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Repeats a step of a comparison in this process, as `Comparison.replay` writes it.

    Args:
        port: The port, as for `compare_port`.
        original: The original, as for `compare_port`.
        set_state: As for `compare_port`.
        policy: As for `compare_port`.
        key: Key of the episode.
        step: Number of the step in its episode, from 1.
        state: The port's state before the step, as a dict from path to array. `None` plays the episode from
            its reset.
        action: Action of the step, if there is a state.
        select_state: As for `compare_port`.

    Returns:
        The results of the port and of the original, as dicts from path to array.

    Example:
        ```python
        def count(key, steps, action):
            obs = jnp.array([1, steps + 1, steps + 1, action])
            return steps + 1, {"obs": obs, "reward": steps + 1.0, "done": False}

        port = jaxvec.ports.Port(lambda key: (jnp.int32(0), jnp.zeros(4, int)), count)
        sides = jaxvec.ports.replay(port, jaxvec.testing.CountingEnv, key=jax.random.key(0), step=2)
        print(*(float(side["reward"]) for side in sides))  # 2.0 2.0
        ```
    """
    port = as_port(port)
    port_step = jax.jit(port.step)  # compiled, to be rounded more like the comparison
    now, obs = jax.jit(port.reset)(jax.random.fold_in(key, 0))
    each_step = state is not None
    sent = partial(sent_state, select_state, set_state is not None)
    env: Any = Original(constructor(original), set_state, spaces.Dict(), each_step=each_step)
    policy = policy or partial(random_action, env.described["action space"])
    ours = {}
    theirs = {}
    for number in [step] if each_step else range(1, step + 1):
        if state is not None:
            now = restored(now, state)
        policy_key, step_key = step_keys(key, number)
        chosen = action if each_step else policy(policy_key, obs, now)
        asked = {"action": chosen, "step": number, "seed": seed_of(key), "state": sent(now)}
        now, ours = port_step(step_key, now, jax.tree.map(jnp.asarray, chosen))
        theirs, reward, _, _, info = env.step(jax.tree.map(lambda leaf: np.asarray(leaf)[()], asked))
        done = theirs["terminated"] or theirs["truncated"]
        obs = ours["obs"]
        theirs |= {"reward": reward, "done": done, "info": info}
    env.close()
    return by_path(ours), by_path(theirs)
