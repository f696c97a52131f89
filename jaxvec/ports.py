"""Compares a JAX env with the Python env of which it is a port, inside one compiled program.

port's state --select_state, set_state--> original's state
     |                                         |
     port.step(key, state, action)             env.step(action), in the workers (_ports/original.py)
     |                                         |
     results -------- errors per leaf -------- results --> `Comparison` (_ports/comparison.py)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jaxvec._ports.comparison import Comparison, Mode
from jaxvec._ports.distributions import Distributions, compare_distributions
from jaxvec._ports.original import Original, SetState, constructor, space_like
from jaxvec._ports.port_spaces import compare_spaces
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


@final
@dataclass(frozen=True)
class Port:
    """A JAX env for comparisons: pure functions of one env, which do not reset it when an episode ends.

    Attributes:
        reset: Function `key -> (state, obs)`.
        step: Function `(key, state, action) -> (state, results)`. The results are a dict with `obs`,
            `reward`, and `terminated` and `truncated`, or only `done`. Leaves in its `info` are compared if
            `compare_port(info=...)` declares them.
        observation_space: Observation space of one env; `None` if there is none.
        action_space: Action space of one env; `None` if there is none.
        max_episode_steps: Time limit; `None` if none is declared.

    Example:
        ```python
        def count(key, state, action):
            over = state + 1 >= 5
            return state + 1, {"obs": jnp.float32(state + 1), "reward": 1.0, "done": over}

        port = jaxvec.ports.Port(lambda key: (jnp.int32(0), jnp.float32(0)), count)
        print(port.step(jax.random.key(0), 4, 0)[1]["done"])  # True
        ```
    """

    reset: Callable[[jax.Array], tuple[Any, Any]]
    step: Callable[[jax.Array, Any, Any], tuple[Any, Any]]
    observation_space: Any = None
    action_space: Any = None
    max_episode_steps: int | None = None


def as_port(env: Any, params: Any = None) -> Port:
    """Converts an env of gymnax, Navix or Pgx with one player.

    Args:
        env: The env.
        params: Params of a gymnax env; by default its `default_params`.

    Raises:
        TypeError: The env has another API. Write its `reset` and `step` as a `Port`.

    Example:
        ```python
        import gymnax

        print(jaxvec.ports.as_port(*gymnax.make("CartPole-v1")).max_episode_steps)  # 500
        ```
    """
    if isinstance(env, Port):
        return env
    if hasattr(env, "step_env"):  # gymnax
        params = env.default_params if params is None else params

        def gymnax_reset(key: Any) -> Any:
            return env.reset_env(key, params)[::-1]

        def gymnax_step(key: Any, state: Any, action: Any) -> Any:
            obs, state, reward, done, _ = env.step_env(key, state, action, params)
            if not hasattr(env, "is_truncated"):  # before gymnax 1.0
                return state, {"obs": obs, "reward": reward, "done": done}
            truncated = env.is_truncated(state, params)
            return state, {"obs": obs, "reward": reward, "terminated": done, "truncated": truncated}

        own = env.observation_space(params), env.action_space(params)
        return Port(gymnax_reset, gymnax_step, *own, getattr(params, "max_steps_in_episode", None))
    if hasattr(env, "_step") and hasattr(env, "termination_fn"):  # Navix; its `step` resets ended episodes

        def navix_reset(key: Any) -> Any:
            timestep = env.reset(key)
            return timestep, timestep.observation

        def navix_step(key: Any, state: Any, action: Any) -> Any:
            after = env._step(state, action)
            ends = {"terminated": after.is_termination(), "truncated": after.is_truncation()}
            return after, {"obs": after.observation, "reward": after.reward, **ends}

        return Port(navix_reset, navix_step, env.observation_space, env.action_space, env.max_steps)
    if hasattr(env, "init") and getattr(env, "num_players", None) == 1:  # Pgx

        def pgx_reset(key: Any) -> Any:
            state = env.init(key)
            return state, state.observation

        def pgx_step(key: Any, state: Any, action: Any) -> Any:
            after = env.step(state, action, key)
            ends = {"terminated": after.terminated, "truncated": after.truncated}
            return after, {"obs": after.observation, "reward": after.rewards[0], **ends}

        return Port(pgx_reset, pgx_step, None, spaces.Discrete(int(env.num_actions)))
    raise TypeError(
        f"{env!r} is no env of gymnax, Navix or Pgx with one player; pass jaxvec.ports.Port(reset, step)"
    )


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
    progress: bool = True,
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
        progress: Whether to show the progress on a terminal.
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
        raise ValueError(_NO_SET_STATE)
    if num_envs * num_steps >= 2**31:
        raise ValueError(
            f"{num_envs} envs of {num_steps} steps are too many to count; make several comparisons"
        )
    sent = partial(sent_state, select_state, set_state is not None)
    shapes = jax.eval_shape(lambda key: sent(port.reset(key)[0]), jax.random.key(0))
    state_space = spaces.Dict({path: space_like(each.shape, each.dtype) for path, each in shapes.items()})
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
            progress=progress and sys.stderr.isatty(),
        )
        tallies, counts = jax.device_get(jax.jit(partial(program, envs))(seed))
    parted, limit = int(counts["parted"]), port.max_episode_steps
    declared = dict(zip(own, (port.observation_space, port.action_space, limit), strict=True))
    return Comparison(
        mode=mode,
        set_to_states=set_state is not None,
        seed=seed,
        num_envs=num_envs,
        num_steps=num_steps,
        spaces={**compare_spaces(declared, own), **program.mismatches},
        leaves={path: program.result(path, tally) for path, tally in tallies.items()},
        episodes=int(counts["episodes"]),
        parted=parted,
        parted_after=float(counts["parted_steps"]) / parted if parted else float("nan"),
    )


_NO_SET_STATE = (
    "mode='one_step' sets the original to the port's state before each step, which needs set_state. Pass "
    "set_state=lambda env, state: ..., or, if the original cannot be set to a state, mode='free_running', "
    "whose episodes start from the original's own resets"
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
    if state is not None:
        now = restored(now, state)
    results: Any = None
    for number in [step] if each_step else range(1, step + 1):
        policy_key, step_key = step_keys(key, number)
        chosen = action if each_step else policy(policy_key, obs, now)
        asked = {
            "action": chosen,
            "step": number,
            "seed": seed_of(key),
            "state": sent(now),
        }
        now, ours = port_step(step_key, now, jax.tree.map(jnp.asarray, chosen))
        theirs, reward, _, _, infos = env.step(jax.tree.map(lambda leaf: np.asarray(leaf)[()], asked))
        done = theirs["terminated"] or theirs["truncated"]
        obs, results = ours["obs"], (ours, {**theirs, "reward": reward, "done": done, "info": infos})
    env.close()
    return by_path(results[0]), by_path(results[1])
