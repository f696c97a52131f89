"""Time steps and references to saved states: the results of operations on envs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np

if sys.version_info >= (3, 11):
    from typing import NamedTuple
else:  # in workers of another interpreter; typing's own can't be generic
    from typing_extensions import NamedTuple

if TYPE_CHECKING:
    import jax
    from typing_extensions import TypeVar

    Array = TypeVar("Array", default=jax.Array)
else:  # workers import this module, and must not import JAX
    from typing import TypeVar

    Array = TypeVar("Array")


STATISTICS = ("env_id", "episode_return", "episode_length")
# Keys of `info` that jaxvec adds. The others are declared, or their masks.
ADDED_KEYS = frozenset(
    {*STATISTICS, "fault", "idle", "final_obs", "_final_obs", "final_info", "reset_options", "_reset_options"}
)


class TimeStep(NamedTuple, Generic[Array]):
    """The batched result of a reset or a step, in Gymnasium's order.

    Methods of `VectorEnv` return NumPy arrays, functions such as `jaxvec.step` JAX arrays. The dtypes are
    those of the spaces, as JAX canonicalises them (float64 becomes float32 unless x64 is enabled). The
    properties have the leading axes of the arrays, such as `[num_steps, num_envs]` after a `scan`.

    Attributes:
        obs: Pytree of the observation space with leaves `[num_envs, ...]`.
        reward: Float array `[num_envs]`, or `[num_envs, ...]` for envs with a `reward_space`.
        terminated: Bool array `[num_envs]`.
        truncated: Bool array `[num_envs]`.
        info: Dict with fixed keys and shapes. `env_id` is int32 `[num_envs]`. `episode_return` (with the
            dtype of reward) and `episode_length` (int32) belong to the episode that just ended, or else to
            the running one. Same-step autoreset adds `final_obs`, zero except where an episode ended, and its
            mask `_final_obs`. Each declared key has a mask. With same-step autoreset, `final_info` has the
            same keys and masks, for the steps that ended an episode; `last_info` chooses. `fault` (bool, with
            `on_fault="restart"` or `Workers(recycle=...)`) marks steps cut short by a fault or a new worker.
            `idle` (bool, with `autoreset_mode="EPISODIC"`) marks idle envs. `reset_options`, if declared, has
            the options that started the episode of `obs`, with a mask.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            envs.reset(seed=0)
            obs, reward, terminated, truncated, info = envs.step([0, 1])
            print(obs.shape, reward, info["episode_length"])  # (2, 4) [1. 1.] [1 1]
        ```
    """

    obs: Any
    reward: Array
    terminated: Array
    truncated: Array
    info: dict[str, Any]

    @property
    def done(self) -> Array:
        """Where an episode ended in this step, bool: terminated or truncated."""
        return cast("Any", self.terminated) | self.truncated

    @property
    def discount(self) -> Array:
        """Weight of the value after this step, float32: 0 where the episode terminated, else 1."""
        return (~cast("Any", self.terminated)).astype(np.float32)

    @property
    def last_obs(self) -> Any:
        """Observation in which this step ended, also where the env has been reset since.

        It has the structure of `obs`, in every autoreset mode. So `reward + gamma * discount *
        value(last_obs)` is the value before the step.

        Raises:
            ValueError: The time step has no final observations, or `obs` was replaced by other arrays.
        """
        info = self.info or {}
        if missing := [key for key in ("final_obs", "_final_obs") if key not in info]:
            raise ValueError(
                f"last_obs: this time step has no {' and '.join(missing)} in its info. Make the pool with "
                "final_obs=True, which is the default, and read last_obs before you replace the info; change "
                "time steps by timestep._replace(...)"
            )
        return select(info["_final_obs"], info["final_obs"], self.obs, "last_obs: obs")

    @property
    def last_info(self) -> dict[str, Any]:
        """Declared infos of the step itself, also where the env has been reset since.

        It has the declared keys of `info` and their masks, in every autoreset mode; none if `make` got no
        `info`. So `timestep.last_info["score"]` is the score of the episode where `timestep.done`. Where
        `info["fault"]` cut the step, the masks are False. Without `final_obs`, read it before you replace
        `terminated` or `truncated`.

        Raises:
            ValueError: The keys of `info` were replaced, or their arrays by others.

        Example:
            ```python
            options = {"episode_length": 1, "info": {"steps": int}}
            with jaxvec.make(jaxvec.testing.CountingEnv, 2, **options) as envs:
                envs.reset(seed=0)
                timestep = envs.step([0, 0])
                print(timestep.info["steps"], timestep.last_info["steps"])  # [0 0] [1 1]
            ```
        """
        info = self.info or {}
        final = info.get("final_info", {})
        # Programs may add keys, but without masks.
        keys = [sorted(key for key in part if f"_{key}" in part) for part in (_declared(info), final)]
        if keys[0] != keys[1]:
            raise ValueError(
                f"last_info: info has the declared keys {keys[0]}, but final_info has {keys[1]}; read "
                "last_info before you replace the info, or keep both"
            )
        if not final:
            return {}
        mask = info.get("_final_obs")
        ended = self.done if mask is None else mask
        return select(ended, final, {key: info[key] for key in final}, "last_info: info")


def _declared(info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key not in ADDED_KEYS}


class LastObsTimeStep(TimeStep[Array]):
    """The time step of a pool that never resets an env in the step that ends its episode."""

    __slots__ = ()

    @property
    def last_obs(self) -> Any:
        return self.obs

    @property
    def last_info(self) -> dict[str, Any]:
        return _declared(self.info or {})


def select(ended: Any, final: Any, new: Any, name: str) -> Any:
    """Returns the leaves of `final` where an episode has ended, and the leaves of `new` elsewhere.

    The leaves, nested in dicts and tuples, are arrays of NumPy or JAX. `name` is that of `new` in errors.
    """
    if isinstance(new, dict) and isinstance(final, dict) and final.keys() == new.keys():
        return {key: select(ended, final[key], value, f"{name}[{key!r}]") for key, value in new.items()}
    if isinstance(new, tuple) and isinstance(final, tuple) and len(final) == len(new):
        pairs = enumerate(zip(final, new, strict=True))
        make: Any = getattr(type(new), "_make", tuple)  # a namedtuple's
        return make([select(ended, *pair, f"{name}[{place}]") for place, pair in pairs])
    return _select_leaf(ended, final, new, name)


def _select_leaf(ended: Any, final: Any, new: Any, name: str) -> Any:
    kinds = [(getattr(value, "dtype", type(value).__name__), np.shape(value)) for value in (final, new)]
    if kinds[0] != kinds[1] or not hasattr(new, "dtype"):
        raise ValueError(
            f"{name} is {kinds[1]}, but its final value {kinds[0]}; read last_obs and last_info before you "
            "replace obs or info, and apply the same function to them"
        )
    others = [value for value in (ended, final, new) if not isinstance(value, np.ndarray | np.generic)]
    numpy: Any = others[0].__array_namespace__() if others else np  # without an import of JAX
    return numpy.where(ended.reshape(*ended.shape, *[1] * (final.ndim - ended.ndim)), final, new)


@dataclass(frozen=True)
class EnvState:
    """Saved states of envs: a pytree with one small array; its last axis identifies a state.

    The workers keep the states themselves. So you can index, reshape, gather, stack and select states as you
    would observations, also with `jax.tree.map`. `state[i]` indexes all axes except the last. A
    state is valid until newer states replace it (`jaxvec.make(states=...)`).

    Attributes:
        ids: Array `[num_envs, 3]` of uint32: the pool id, and the low and high word of the state's number.
            All zero for no state.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 4, states=10) as envs:
            envs.reset(seed=0)
            state = envs.save()
            timestep = envs.restore(state[[0, 0, 2, 2]])  # env 1 from env 0's state, and env 3 from env 2's
            print((timestep.obs[0] == timestep.obs[1]).all())  # True
        ```
    """

    ids: Any

    def __getitem__(self, index: Any) -> EnvState:
        """Selects or reshapes states, as NumPy and JAX index arrays."""
        return EnvState(self.ids[index])


def check_states(state: Any, num_envs: int | None = None, as_array: Callable[[Any], Any] = np.asarray) -> Any:
    """Returns the ids of states as an array `[num_envs, 3]`; `None` allows any `num_envs`."""
    if not isinstance(state, EnvState):
        raise TypeError(f"state must be an EnvState from save or simulate, not {type(state).__name__}")
    ids = as_array(state.ids)
    if num_envs is None:
        num_envs = len(ids) if ids.ndim else 0
    if ids.shape != (num_envs, 3) or ids.dtype != np.uint32:
        raise ValueError(
            f"state: expected one for each of {num_envs} envs, as uint32 ids of shape ({num_envs}, 3); got "
            f"{ids.dtype} of shape {ids.shape}"
        )
    return ids
