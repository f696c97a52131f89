"""The port's side of a comparison: pure functions of one env, given or converted from a library's env."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from gymnasium import spaces

FLAGS = ("terminated", "truncated")


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
    if hasattr(env, "step_env") and hasattr(env, "default_params"):
        return _gymnax(env, env.default_params if params is None else params)
    autoreset = "DISABLED"
    if type(env).__name__ == "AutoResetWrapper":  # of Brax or Jumanji
        env = getattr(env, "env", None) or env._env
        autoreset = "SAME_STEP"
    if hasattr(env, "termination_fn"):  # Navix, whose `step` resets ended episodes
        return _of_states(
            env.reset,
            lambda _, *args: env._step(*args),
            lambda state: (state.observation, state.reward, state.is_termination(), state.is_truncation()),
            env.observation_space,
            env.action_space,
            env.max_steps,
            "NEXT_STEP",
        )
    if hasattr(env, "action_size"):  # Brax
        return _of_states(
            env.reset,
            lambda _, *args: env.step(*args),
            _brax_results,
            None,
            spaces.Box(-1, 1, (env.action_size,)),
            getattr(env, "episode_length", None),
            autoreset,
        )
    if hasattr(env, "observation_spec"):  # Jumanji
        return _of_states(
            env.reset,
            lambda _, pair, action: env.step(pair[0], action),
            _jumanji_results,
            env.observation_spec,
            env.action_spec,
            getattr(env, "time_limit", None),
            autoreset,
        )
    if getattr(env, "num_players", None) == 1:  # Pgx
        return _of_states(
            env.init,
            lambda key, *args: env.step(*args, key),
            lambda state: (state.observation, state.rewards[0], state.terminated, state.truncated),
            None,
            spaces.Discrete(int(env.num_actions)),
            None,
            autoreset,
        )
    raise TypeError(
        f"{env!r} is no env of gymnax, Navix, Brax or Jumanji, or of Pgx with one player, and ports have one "
        f"agent; pass jaxvec.ports.Port(reset, step). {_FORM}"
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

    return Port(
        reset,
        step,
        env.observation_space(params),
        env.action_space(params),
        max_episode_steps=getattr(params, "max_steps_in_episode", None),
        autoreset="SAME_STEP",
    )


def _of_states(reset: Any, step: Any, results_of: Callable[[Any], tuple[Any, ...]], *declared: Any) -> Port:
    """Returns the port of an env whose states contain the results."""

    def port_reset(key: Any) -> Any:
        state = reset(key)
        return state, results_of(state)[0]

    def port_step(key: Any, state: Any, action: Any) -> Any:
        state = step(key, state, action)
        return state, dict(zip(("obs", "reward", *FLAGS), results_of(state), strict=True))

    return Port(port_reset, port_step, *declared)


def _brax_results(state: Any) -> tuple[Any, ...]:
    done = state.done > 0
    truncated = jnp.asarray(state.info.get("truncation", 0)) > 0
    return state.obs, state.reward, done & ~truncated, truncated


def _jumanji_results(pair: Any) -> tuple[Any, ...]:
    _, after = pair
    goes_on = after.discount > 0
    return after.observation, after.reward, after.last() & ~goes_on, after.last() & goes_on


_FORM = (
    "A port has functions of one env, without a batch axis: reset(key) -> (state, obs), and step(key, state, "
    "action) -> (state, results), where results is a dict with 'obs', 'reward', and 'terminated' and "
    "'truncated', or 'done'; the leaves of state and obs keep their shapes and dtypes"
)


def check_port(port: Port, policy: Callable[[jax.Array, Any, Any], Any]) -> dict[str, Any]:
    """Returns the shapes of the results of a step. Raises if `reset` and `step` do not fit together."""

    def trace(key: Any) -> Any:
        state, obs = jax.tree.map(jnp.asarray, port.reset(key))
        after, results = jax.tree.map(jnp.asarray, port.step(key, state, policy(key, obs, state)))
        before, later = (
            [f"{path} {dtype_name(leaf)}{leaf.shape}" for path, leaf in by_path(tree).items()]
            for tree in ({"obs": obs, "state": state}, {"obs": results["obs"], "state": after})
        )
        if before != later:
            raise TypeError(f"there are {before} after reset, but {later} after step")
        return results, results["reward"], is_done(results)

    return shape_of(trace)[0]


def shape_of(function: Callable[[jax.Array], Any]) -> Any:
    """Returns the shapes of a function of a key that uses a port, or raises an error about its form."""
    try:
        return jax.eval_shape(function, jax.random.key(0))
    except Exception as error:
        raise TypeError(f"{type(error).__name__}: {str(error)[:500]}. {_FORM}") from error


def dtype_name(leaf: Any) -> str:
    """Returns the dtype of a leaf, of which a port may have 64 bits for 32 with x64."""
    return str(leaf.dtype).replace("64", "32")


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree as a dict from path to array; keys as their data."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): jax.random.key_data(leaf)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def advance(port: Port, keys: jax.Array, states: Any, actions: Any) -> tuple[Any, dict[str, Any]]:
    """Steps several envs. States keep the dtypes of the reset, which sums of weakly typed numbers change."""
    after, results = jax.vmap(port.step)(keys, states, actions)
    return like(states, after), results


def like(old: Any, new: Any) -> Any:
    """Returns a pytree with the dtypes of another, which differ with x64 or by weak types."""
    return jax.tree.map(lambda a, b: b if a.dtype == b.dtype else b.astype(a.dtype), old, new)


def is_done(results: Any) -> jax.Array:
    """Returns whether episodes ended, of the results of a port."""
    done = results["done"] if "done" in results else results["terminated"] | results["truncated"]
    return done.astype(bool)
