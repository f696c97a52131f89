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
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxvec._leaves import full_box
from jaxvec._ports.comparison import Comparison, Mode, SpaceResult
from jaxvec._ports.distributions import Distributions, compare_distributions, compare_resets
from jaxvec._ports.original import GetState, Original, SetState, constructor
from jaxvec._ports.pools import compare_pools
from jaxvec._ports.port import Port, as_port, by_path, check_port, shape_of
from jaxvec._ports.port_spaces import NOT_DECLARED, compare_spaces
from jaxvec._ports.program import (
    Program,
    find_unplayed,
    is_of_reset,
    random_action,
    restored,
    seed_of,
    sent_state,
    step_keys,
)
from jaxvec.callbacks._make import make

__all__ = [
    "Comparison",
    "Distributions",
    "Port",
    "as_port",
    "compare_distributions",
    "compare_pools",
    "compare_port",
    "replay",
]

Policy = Callable[[jax.Array, Any, Any], Any]


def compare_port(
    port: Any,
    original: Any,
    *,
    set_state: SetState | None = None,
    get_state: GetState | None = None,
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
        get_state: Function `env -> state` that returns the original's state as such a dict, or a part of it.
            Then states are compared after each step and each reset.
        select_state: Function that returns the part of the port's state that `set_state` and `get_state` use,
            as a pytree. By default, all of it.
        policy: Function `(key, obs, state) -> action` of one env of the port. By default, actions are random.
        mode: `"one_step"` sets the original to the port's state before each step, so errors do not add up.
            `"free_running"` sets it only when an episode starts, or resets it with a seed if there is no
            `set_state`. An episode then ends at its first difference.
        num_envs: Number of envs.
        num_steps: Number of steps of each env.
        seed: Seed of the resets, actions and steps.
        tolerances: Largest accepted error, for all leaves, or by path: `{"obs": 1e-6, "reward": 0}`. A path
            includes the paths below it. Errors of floats are relative for values above 1. In free running,
            an error may also be 16 times that of a copy of the port whose state is rounded in each step.
        info: Declared infos to compare, as in `make`.
        **options: Further options of `make`, such as `num_workers`.

    Returns:
        The differences, as a record that prints as a table.

    Raises:
        TypeError: The port does not have the form of a `Port`.
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
    by_prefix = tolerances if isinstance(tolerances, Mapping) else {"": tolerances}
    _check(mode in ("one_step", "free_running"), f"mode must be 'one_step' or 'free_running', not {mode!r}")
    _check(mode == "free_running" or set_state is not None, _NEEDS_SET_STATE)
    _check(
        all(isinstance(number, Integral) and number > 0 for number in (num_envs, num_steps))
        and num_envs * num_steps < 2**31,
        f"{num_envs} envs of {num_steps} steps are too few, or too many to count: pass integers above 0 with "
        "a product below 2**31",
    )
    _check(
        all(isinstance(value, Real) and value >= 0 for value in by_prefix.values()),
        f"tolerances must be numbers of at least 0, not {tolerances!r}",
    )
    sent, env_fn = _original(port, original, set_state, get_state, select_state, mode == "one_step")
    with make(env_fn, num_envs, info=info, **options) as envs:
        own, beyond = envs.call("describe", indices=[0])[0]
        program = Program(
            port=port,
            policy=policy or partial(random_action, own["action space"], beyond=beyond),
            sent=sent,
            each_step=mode == "one_step",
            num_envs=num_envs,
            num_steps=num_steps,
            tolerances=by_prefix,
            infos=tuple(info or ()),
        )
        check_port(port, program.policy)
        compiled = jax.jit(partial(program, envs)).lower(seed).compile()
        start = time.perf_counter()
        cases, (port_resets, original_resets), steps = jax.device_get(compiled(seed))
        seconds = time.perf_counter() - start
        is_repeatable = all(envs.get_attr("is_repeatable"))
    leaves = {path: program.result(path, cases[path], steps) for path in cases}
    episodes = int((steps["time"] == 1).sum())
    port_fields = port.observation_space, port.action_space, port.max_episode_steps, port.autoreset
    properties = {**compare_spaces(dict(zip(own, port_fields, strict=True)), own), **program.mismatches}
    observed = {path: leaf for path, leaf in leaves.items() if path.split("/")[0] == "obs" and not leaf.equal}
    if observed and all(
        leaf.earliest is not None
        and leaf.at_ends == leaf.different
        and is_of_reset(port, path, leaf.earliest)
        for path, leaf in observed.items()
    ):
        properties["autoreset"] = SpaceResult(
            "step returns obs of a reset at ends", own["autoreset"] or NOT_DECLARED, False
        )
    properties["transitions"] = SpaceResult(
        "not repeated",
        "equal from a state"
        if is_repeatable
        else "other results after another reset: random, or set_state leaves a part",
        is_repeatable,
    )
    limit = own["time limit"] or port.max_episode_steps or 0
    longest = int(steps["time"].max())
    coverage = {
        **{path: "" if any(leaf.ones) else "always 0" for path, leaf in leaves.items() if leaf.ones},
        "actions": find_unplayed(own["action space"], steps["action"], beyond),
        "resets": "" if episodes >= _MIN_RESETS else f"only {episodes} episodes were started",
        "time limit": "" if longest >= limit else f"the longest episode has {longest} of {limit} steps",
        "reset options": "resets had none" if options.get("reset_options") else "",
    }
    parted_after = steps["time"][steps["parted"]]
    return Comparison(
        mode=mode,
        set_to_states=set_state is not None,
        seed=seed,
        num_envs=num_envs,
        num_steps=num_steps,
        spaces=properties,
        leaves=leaves,
        resets=compare_resets(port_resets, original_resets, episodes, program.tolerance),
        coverage=coverage,
        episodes=episodes,
        parted=parted_after.size,
        parted_after=float(parted_after.mean()) if parted_after.size else float("nan"),
        drifted=int(steps["drifted"].sum()),
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
    get_state: GetState | None = None,
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
        get_state: As for `compare_port`.

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
    sent, env_fn = _original(port, original, set_state, get_state, select_state, each_step)
    env = env_fn()
    own, beyond = env.describe()
    policy = policy or partial(random_action, own["action space"], beyond=beyond)
    sides: tuple[Any, Any] = {}, {}
    if state is not None:
        now = restored(now, state)
    for number in [step] if each_step else range(1, step + 1):
        policy_key, step_key = step_keys(key, number)
        chosen = action if each_step else policy(policy_key, obs, now)
        asked = {"action": chosen, "step": number, "seed": seed_of(key), "state": sent(now)}
        now, results = port_step(step_key, now, jax.tree.map(jnp.asarray, chosen))
        observed, reward, _, _, info = env.step(jax.tree.map(lambda leaf: np.asarray(leaf)[()], asked))
        obs = results["obs"]
        original_results = {
            **observed,
            "reward": reward,
            "done": observed["terminated"] or observed["truncated"],
            "info": info,
        }
        sides = {**results, "state": sent(now)}, original_results
    env.close()
    return by_path(sides[0]), by_path(sides[1])


_NEEDS_SET_STATE = (
    "mode='one_step' sets the original to the port's state before each step, which needs set_state. "
    "Pass set_state=lambda env, state: ..., or, if the original cannot be set to a state, "
    "mode='free_running', whose episodes start from the original's own resets"
)
_MIN_RESETS = 16  # number of samples with which two-sample tests can find a difference


def _check(valid: bool, text: str) -> None:
    if not valid:
        raise ValueError(text)


def _original(
    port: Port, original: Any, set_state: Any, get_state: Any, select_state: Any, each_step: bool
) -> tuple[Any, Any]:
    """Returns the functions that select what workers get of a state, and that make their env."""
    sent: Any = partial(sent_state, select_state) if set_state or get_state else lambda _: {}
    shapes = shape_of(lambda key: sent(port.reset(key)[0]))
    space = spaces.Dict({path: full_box(shape.shape, shape.dtype) for path, shape in shapes.items()})
    return sent, partial(Original, constructor(original), set_state, get_state, space, each_step=each_step)
