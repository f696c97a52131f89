"""Compares a JAX env with the Python env of which it is a port, inside one compiled program.

port's state ---- select_state, set_state --> original's state  (_ports/program.py)
     |                                         |
     port.step(key, state, action)             env.step(action), in the workers (_ports/original.py)
     |                                         |
     results -------- errors per leaf -------- results --> `Comparison` (_ports/comparison.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvec._ports.comparison import Comparison, Mode, SpaceResult
from jaxvec._ports.distributions import Distributions, compare_distributions, compare_resets
from jaxvec._ports.original import GetState, SetState
from jaxvec._ports.port import FLAGS, Port, as_port, by_path, check_port
from jaxvec._ports.port_spaces import NOT_DECLARED, compare_spaces, find_unplayed, random_action
from jaxvec._ports.program import Adapter, Program, errors_of, is_of_reset
from jaxvec._settings import check_choice, check_count
from jaxvec.callbacks._functions import reset, step
from jaxvec.callbacks._make import make

__all__ = [
    "Comparison",
    "Distributions",
    "Port",
    "as_port",
    "compare_distributions",
    "compare_pools",
    "compare_port",
]


def compare_port(
    port: Any,
    original: Any,
    *,
    set_state: SetState | None = None,
    get_state: GetState | None = None,
    select_state: Callable[[Any], Any] | None = None,
    draws: Callable[[jax.Array], Any] | None = None,
    actions: Callable[[Any], Any] | None = None,
    observe: Callable[[Any], Any] | None = None,
    policy: Callable[[jax.Array, Any, Any], Any] | None = None,
    mode: Mode = "one_step",
    num_envs: int = 64,
    num_steps: int = 1000,
    seed: int = 0,
    tolerances: float | Mapping[str, float] = 0.0,
    info: Mapping[str, Any] | None = None,
    episode: Any = None,
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
        draws: Function that returns the random numbers of a step of the port, of the step's key, as a pytree.
            `set_state` gets them as `state["draws/..."]`, and can make the original use them.
        actions: Function in JAX that returns the original's action for one of the port, if they differ.
        observe: Function in JAX that returns an observation of the original in the form of the port's.
        policy: Function `(key, obs, state) -> action` of one env of the port. By default, actions are random.
        mode: `"one_step"` sets the original to the port's state before each step, so errors do not add up.
            `"free_running"` sets it only when an episode starts, or resets it with a seed if there is no
            `set_state`. An episode then ends at its first difference.
        num_envs: Number of envs.
        num_steps: Number of steps of each env.
        seed: Seed of the resets, actions and steps.
        tolerances: Largest accepted error, for all leaves, or by path: `{"obs": 1e-6, "reward": 0}`. A path
            includes the paths below it. Errors of floats are relative for values above 1. In free running,
            errors may also be those of a copy of the port with 16 times the rounding error of float32 in each
            step, and flags may flip as in this copy.
        info: Declared infos to compare, as in `make`.
        episode: Key of one episode, which all envs then play, `[2]` of uint32, such as
            `result.leaves["reward"].worst.key`. By default, episodes have other keys.
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
    check_choice("mode", mode, ("one_step", "free_running"))
    each_step = mode == "one_step"
    checks = (
        (
            not each_step or set_state is not None,
            "mode='one_step' sets the original to the port's state before each step, which needs set_state. "
            "Pass set_state=lambda env, state: ..., or, if the original cannot be set to a state, "
            "mode='free_running', whose episodes start from the original's own resets",
        ),
        (each_step or draws is None, "draws are for set_state in each step; pass mode='one_step'"),
        (
            check_count("num_envs", num_envs, 1) * check_count("num_steps", num_steps, 1) < 2**31,
            f"{num_envs} envs of {num_steps} steps are too many to count",
        ),
        (
            all(isinstance(value, Real) and 0 <= value < np.inf for value in by_prefix.values()),
            f"tolerances must be numbers of at least 0, not {tolerances!r}",
        ),
    )
    for is_valid, text in checks:
        if not is_valid:
            raise ValueError(text)
    adapter = Adapter(set_state, get_state, select_state, draws, actions, observe)
    with make(adapter.env_fn(port, original, each_step=each_step), num_envs, info=info, **options) as envs:
        own, beyond = envs.call("describe", indices=[0])[0]
        action_space = own["action space"] if actions is None else port.action_space
        program = Program(
            port=port,
            policy=policy or partial(random_action, action_space, beyond=beyond),
            adapter=adapter,
            each_step=each_step,
            num_envs=num_envs,
            num_steps=num_steps,
            tolerances=by_prefix,
            infos=tuple(info or ()),
            episode=episode,
        )
        check_port(port, program.policy)
        cases, (port_resets, original_resets), steps = jax.device_get(jax.jit(partial(program, envs))(seed))
        is_repeatable = all(envs.call("is_repeatable"))
    leaves = {path: program.result(path, cases[path], steps) for path in cases}
    episodes = int((steps["time"] == 1).sum())
    properties = {
        **compare_spaces(
            {
                "observation space": port.observation_space if observe is None else None,
                "action space": port.action_space if actions is None else None,
                "time limit": port.max_episode_steps,
                "autoreset": port.autoreset,
            },
            own,
        ),
        **program.mismatches,
        "transitions": SpaceResult(
            "not repeated",
            "not repeated"
            if set_state is None
            else "equal from a state"
            if is_repeatable
            else "other results after another reset: random, or set_state leaves a part",
            is_repeatable,
        ),
    }
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
    drifted = int(steps["drifted"].sum())
    limit = own["time limit"] or port.max_episode_steps or 0
    longest = int(steps["time"].max())
    coverage = {
        **{path: "" if any(leaf.ones) else "always 0" for path, leaf in leaves.items() if leaf.ones},
        "actions": find_unplayed(action_space, steps["action"], beyond),
        "resets": "" if episodes >= _MIN_RESETS else f"only {episodes} episodes were started",
        "time limit": "" if longest >= limit else f"the longest episode has {longest} of {limit} steps",
        "drift": f"{drifted:,} of {episodes:,} episodes ended by it" if 2 * drifted > episodes else "",
        "reset options": "resets had none" if options.get("reset_options") else "",
    }
    parted_after = steps["time"][steps["parted"]]
    mean_parted = float(parted_after.mean()) if parted_after.size else float("nan")
    when = "before each step" if each_step else "when an episode starts"
    return Comparison(
        heading=f"{num_envs * num_steps:,} steps ({num_envs} envs, seed {seed}), original set to states of "
        f"the port {when if set_state else 'never: each episode starts from its own reset'}; "
        f"{parted_after.size:,} of {episodes:,} episodes differ"
        f"{f', after {mean_parted:.1f} steps on average' if parted_after.size else ''}; {drifted:,} drifted"
        f"{'' if get_state else '; states were not compared, without get_state'}",
        mode=mode,
        set_to_states=set_state is not None,
        arguments=[
            name
            for name, value in {**vars(adapter), "policy": policy, "info": info}.items()
            if value is not None
        ],
        seed=seed,
        num_envs=num_envs,
        num_steps=num_steps,
        spaces=properties,
        leaves=leaves,
        resets=compare_resets(port_resets, original_resets, episodes, program.tolerance),
        coverage=coverage,
        episodes=episodes,
        parted=parted_after.size,
        parted_after=mean_parted,
        drifted=drifted,
    )


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
        action = jax.vmap(draw)(jax.random.split(key, original.num_envs))
        return tuple(step(handle, action) for handle, _ in sides), jax.tree.map(errors_of, *results)

    sides = reset(port, seed=seed), reset(original, seed=seed)
    draw = partial(random_action, original.single_action_space)
    return jax.device_get(
        jax.jit(partial(jax.lax.scan, body))(
            sides, jax.random.split(jax.random.key(seed), check_count("num_steps", num_steps, 1))
        )[1]
    )


_MIN_RESETS = 16  # number of samples with which two-sample tests can find a difference
