"""The port's side of a comparison: pure functions of one env, given or converted from a library's env."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from gymnasium import spaces


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
        autoreset: Autoreset mode of the env for its users, `"SAME_STEP"`, `"NEXT_STEP"` or `"DISABLED"`;
            `None` if none is declared.

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
    autoreset: str | None = None


def as_port(env: Any, params: Any = None) -> Port:
    """Converts an env of gymnax, Navix, Brax or Jumanji, or of Pgx with one player.

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
    if hasattr(env, "step_env"):
        return _gymnax(env, env.default_params if params is None else params)
    autoreset = "DISABLED"
    if type(env).__name__ == "AutoResetWrapper":  # of Brax or Jumanji
        env = getattr(env, "env", None) or env._env
        autoreset = "SAME_STEP"
    if hasattr(env, "termination_fn"):  # Navix, whose `step` resets ended episodes
        declared = env.observation_space, env.action_space, env.max_steps, "NEXT_STEP"
        return _of_states(env.reset, lambda _, *args: env._step(*args), _navix_results, *declared)
    if hasattr(env, "action_size"):  # Brax
        limit = getattr(env, "episode_length", None)
        declared = None, spaces.Box(-1, 1, (env.action_size,)), limit, autoreset
        return _of_states(env.reset, lambda _, *args: env.step(*args), _brax_results, *declared)
    if hasattr(env, "observation_spec"):  # Jumanji
        declared = env.observation_spec, env.action_spec, getattr(env, "time_limit", None), autoreset
        return _of_states(
            env.reset, lambda _, pair, action: env.step(pair[0], action), _jumanji_results, *declared
        )
    if getattr(env, "num_players", None) == 1:  # Pgx
        declared = None, spaces.Discrete(int(env.num_actions)), None, autoreset
        return _of_states(env.init, lambda key, *args: env.step(*args, key), _pgx_results, *declared)
    raise TypeError(
        f"{env!r} is no env of gymnax, Navix, Brax or Jumanji, or of Pgx with one player; pass "
        "jaxvec.ports.Port(reset, step)"
    )


def _gymnax(env: Any, params: Any) -> Port:
    def reset(key: Any) -> Any:
        return env.reset_env(key, params)[::-1]

    def step(key: Any, state: Any, action: Any) -> Any:  # unlike the env's `step`, without a reset
        obs, state, reward, done, _ = env.step_env(key, state, action, params)
        if not hasattr(env, "is_truncated"):  # before gymnax 1.0
            return state, {"obs": obs, "reward": reward, "done": done}
        truncated = env.is_truncated(state, params)
        return state, {"obs": obs, "reward": reward, "terminated": done, "truncated": truncated}

    limit = getattr(params, "max_steps_in_episode", None)
    return Port(reset, step, env.observation_space(params), env.action_space(params), limit, "SAME_STEP")


def _of_states(reset: Any, step: Any, results_of: Callable[[Any], tuple[Any, ...]], *declared: Any) -> Port:
    """Returns the port of an env whose states contain the results."""

    def port_reset(key: Any) -> Any:
        state = reset(key)
        return state, results_of(state)[0]

    def port_step(key: Any, state: Any, action: Any) -> Any:
        state = step(key, state, action)
        return state, dict(zip(("obs", "reward", "terminated", "truncated"), results_of(state), strict=True))

    return Port(port_reset, port_step, *declared)


def _navix_results(state: Any) -> tuple[Any, ...]:
    return state.observation, state.reward, state.is_termination(), state.is_truncation()


def _brax_results(state: Any) -> tuple[Any, ...]:
    done = state.done > 0
    truncated = jnp.asarray(state.info.get("truncation", 0)) > 0
    return state.obs, state.reward, done & ~truncated, truncated


def _jumanji_results(pair: Any) -> tuple[Any, ...]:
    _, after = pair
    goes_on = after.discount > 0
    return after.observation, after.reward, after.last() & ~goes_on, after.last() & goes_on


def _pgx_results(state: Any) -> tuple[Any, ...]:
    return state.observation, state.rewards[0], state.terminated, state.truncated


def advance(port: Port, keys: jax.Array, states: Any, actions: Any) -> tuple[Any, dict[str, Any]]:
    """Steps several envs. States keep the dtypes of the reset, which sums of weakly typed numbers change."""
    after, results = jax.vmap(port.step)(keys, states, actions)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), after, states), results


def is_done(results: Any) -> jax.Array:
    """Returns whether episodes ended, of the results of a port."""
    done = results["done"] if "done" in results else results["terminated"] | results["truncated"]
    return done.astype(bool)
