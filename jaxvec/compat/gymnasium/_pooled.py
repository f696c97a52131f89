"""What both vector envs are: a pool behind Gymnasium's `VectorEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, create_shared_memory, iterate
from numpy.typing import NDArray

from jaxvec import _seeds, _start, _vector_env
from jaxvec._actions import check_on_host
from jaxvec._config import PoolConfig
from jaxvec._errors import ActionError, EnvError, SpaceMismatchError
from jaxvec._handoff._move import Caller, Verb
from jaxvec._memory._views import Rows, copies, views
from jaxvec._spaces import Leaf, Node, as_is, map_leaves
from jaxvec._spec import Autoreset, parse_autoreset_mode
from jaxvec.compat.gymnasium._errors import as_gymnasium, raise_original
from jaxvec.compat.gymnasium._infos import batch

_NOT_CALLED = ("reset", "step", "close", "_setattr", "_check_spaces")


class PooledVectorEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """A `gymnasium.vector.VectorEnv` over a pool. Abstract.

    Attributes:
        pool: the jaxvec `VectorEnv` behind it, with what Gymnasium has no word for: `stats()`,
            `raise_if_failed()`, and the JAX face, if the dtypes are JAX's.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        *,
        copy: bool,
        observation_mode: str | tuple[Space[Any], Space[Any]],
        autoreset_mode: str | AutoresetMode,
        shared_memory: bool,
        **options: Any,
    ) -> None:
        """Starts the pool; `options` are those of `jaxvec.make`."""
        super().__init__()
        _check_mode(observation_mode)
        self.env_fns = env_fns
        self.copy = copy
        self.observation_mode = observation_mode
        self.autoreset_mode: AutoresetMode = parse_autoreset_mode(autoreset_mode)
        if options.get("episodic") and self.autoreset_mode is AutoresetMode.NEXT_STEP:  # the default
            self.autoreset_mode = AutoresetMode.DISABLED
        self.pool: _vector_env.VectorEnv = self._start(env_fns, options)
        try:
            self.num_envs: int = self.pool.num_envs
            self.metadata: dict[str, Any] = self.pool.metadata
            self.render_mode: str | None = self.pool.render_mode
            self.single_action_space: Space[Any] = self.pool.single_action_space
            self.action_space: Space[Any] = self.pool.action_space
            self.single_observation_space: Space[Any] = self.pool.single_observation_space
            self.observation_space: Space[Any] = self.pool.observation_space
            if observation_mode == "different":
                self.observation_space = batch_differing_spaces(list(self.pool.call("observation_space")))
            elif isinstance(observation_mode, tuple):
                self.observation_space, self.single_observation_space = observation_mode
            if shared_memory:
                _check_known(self.single_observation_space)
        except BaseException:
            self.pool.close()
            raise

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The seed of each env's generator."""
        return self.get_attr("np_random_seed")

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A copy of each env's generator."""
        return self.get_attr("np_random")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each env, or reads an attribute."""
        with as_gymnasium(type(self).__name__):
            return self._call(name, args, kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns an attribute of each env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each env; a list or tuple gives each its own value."""
        if isinstance(values, (list, tuple)) and len(values) != self.num_envs:  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. Got "
                f"`{len(values)}` values for {self.num_envs} environments."  # pyright: ignore[reportUnknownArgumentType]
            )
        with as_gymnasium(type(self).__name__):
            self.pool.set_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        """Returns each env's frame."""
        return self.call("render")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the pool; see `jaxvec.VectorEnv.close`.

        Args:
            timeout: seconds that the envs have for their `close`, `None` for any time.
            terminate: whether they have none.
        """
        self.pool.close(0 if terminate else timeout)

    def _call(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        begun: Callable[[], None] | None = None,
    ) -> tuple[Any, ...]:
        if name in _NOT_CALLED:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        pool = self.pool.pool
        each = [args] * self.num_envs
        return tuple(pool.questions.call(pool.move_all(Verb.CALL), name, each, kwargs, begun=begun))

    def _send_reset(self, seed: Any, options: dict[str, Any] | None) -> NDArray[np.bool_] | None:
        """Starts a reset; returns the mask of the envs that are reset, `None` for all."""
        if seed is not None and not isinstance(seed, int) and len(seed) != self.num_envs:
            raise ValueError(
                "If seeds are passed as a list the length must match "
                f"num_envs={self.num_envs} but got length={len(seed)}."
            )
        mask = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = _check_mask(options.pop("reset_mask"), self.num_envs)
        seeds = _seeds.expand(seed, self.num_envs)
        pool = self.pool.pool
        pool.send_reset(pool.move_all(Verb.RESET, Caller.HOST), seeds=seeds, mask=mask, options=options)
        return mask

    def _send_step(self, actions: Any) -> None:
        pool = self.pool.pool
        given, as_they_are = self._check_actions(actions)
        pool.send(pool.move_all(Verb.SEND, Caller.HOST), pool.all, given, as_they_are=as_they_are)

    def _step(self, actions: Any) -> Rows:
        """Steps all envs by one move, where `_send_step` and `_recv` are two."""
        pool, deliver = self.pool.pool, copies if self.copy else views
        given, as_they_are = self._check_actions(actions)
        if not as_they_are:
            return pool.step(pool.move_all(Verb.STEP, Caller.HOST), given, deliver=deliver)
        pool.send(pool.move_all(Verb.SEND, Caller.HOST), pool.all, given, as_they_are=True)
        return self._recv()

    def _check_actions(self, actions: Any) -> tuple[Sequence[Any], bool]:
        """Returns the leaves of a batch of actions, or one object for each env, and whether it is that."""
        try:
            return check_on_host(self.pool.spec, actions, self.num_envs, exact=True), False
        except ActionError:  # Gymnasium hands on whatever it gets
            given = list(iterate(self.action_space, actions))
            if len(given) != self.num_envs:
                raise
            return given, True

    def _recv(self, timeout: float | None = None) -> Rows:
        pool, deliver = self.pool.pool, copies if self.copy else views
        move = pool.move_all(Verb.RECV, Caller.HOST)
        return pool.recv(move, deliver=deliver, timeout=timeout, everything=True)

    def _after_reset(self, rows: Rows, mask: NDArray[np.bool_] | None) -> tuple[Any, dict[str, Any]]:
        infos = self._infos()
        if mask is not None:
            infos = [info if reset else {} for info, reset in zip(infos, mask.tolist(), strict=True)]
        timestep = self.pool.spec.build_timestep(rows)
        return self._observations(timestep.obs), self._batch(infos, timestep.info)

    def _after_step(self, rows: Rows) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        spec = self.pool.spec
        obs, reward, terminated, truncated, info = spec.build_timestep(rows)
        infos = self._infos()
        if spec.has_final_obs:
            for env_id in np.flatnonzero(info["_final_obs"]).tolist():
                final_obs = _row(spec.info.child("final_obs"), info["final_obs"], env_id)
                infos[env_id] = {"final_obs": final_obs, **infos[env_id]}
        if spec.has_fault:
            for env_id in np.flatnonzero(info["fault"]).tolist():
                infos[env_id] = {"fault": True, **infos[env_id]}
        scalars = (reward, terminated, truncated)
        if not self.copy:  # which is said of observations alone
            scalars = tuple(array.copy() for array in scalars)
        return self._observations(obs), *scalars, self._batch(infos, info)

    def _infos(self) -> list[dict[str, Any]]:
        return self.pool.pool.questions.known_infos() or list(self.pool.infos)

    def _batch(self, infos: Sequence[dict[str, Any]], ours: dict[str, Any]) -> dict[str, Any]:
        """Returns the infos as Gymnasium batches them; of episodic envs with `idle`, `[num_envs]` bool."""
        if self.pool.spec.autoreset is not Autoreset.EPISODIC:
            return batch(infos)
        return {**batch(infos), "idle": ours["idle"].copy(), "_idle": np.ones(self.num_envs, np.bool_)}

    def _observations(self, obs: Any) -> Any:
        return _as_batch(self.pool.spec.obs, obs, writable=not self.copy)

    @staticmethod
    def _mismatch(mode: Any) -> str:
        """Returns the rest of Gymnasium's sentence on envs whose observation spaces differ."""
        if mode == "same":
            return (
                "'same') however the sub-environments observation spaces are not equivalent. If this is "
                "intentional, use `observation_mode='different'` instead."
            )
        return (
            "'different' or custom space) however the sub-environments observation spaces do not share a "
            "common shape and dtype."
        )

    def _start(self, env_fns: Sequence[Any], options: dict[str, Any]) -> _vector_env.VectorEnv:
        name, mode = type(self).__name__, self.observation_mode
        # Gymnasium waits for ever, unless it is told otherwise.
        options = {"start_timeout": None, "reset_timeout": None, "step_timeout": None, **options}
        try:
            return _start.start(
                list(env_fns),
                None,
                PoolConfig(autoreset_mode=self.autoreset_mode, **options),
                env_kwargs={},
                policy=as_is,
                objects=True,
                equal_spaces=mode == "same",
                resets_required=False,
            )
        except SpaceMismatchError as error:
            if "action space" in str(error):
                raise RuntimeError(f"Some environments have another action space: {error}") from error
            raise RuntimeError(f"{name}(..., observation_mode={self._mismatch(mode)} {error}") from error
        except EnvError as error:
            raise_original(error)


def _as_batch(node: Node, value: Any, *, writable: bool) -> Any:
    """Returns a batch of observations as Gymnasium's: tuples of objects, arrays that can be written to."""

    def convert(leaf: Leaf, part: Any) -> Any:
        if leaf.is_object:
            return tuple(part)
        if writable:
            part.flags.writeable = True
        return part

    return map_leaves(node, value, convert)


def _row(node: Node, value: Any, index: int) -> Any:
    """Returns one env's value of a batch, as most envs would: with Python's integers."""

    def pick(leaf: Leaf, part: Any) -> Any:
        return int(part[index]) if leaf.shape == () and leaf.dtype.kind in "iu" else part[index]

    return map_leaves(node, value, pick)


def _check_mask(mask: Any, num_envs: int) -> NDArray[np.bool_]:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            "`options['reset_mask']` must contain a boolean array with at least one True value, got "
            f"reset_mask={mask}"
        )
    return cast("NDArray[np.bool_]", mask)


def _check_mode(mode: Any) -> None:
    if isinstance(mode, tuple) and len(mode) == 2:  # pyright: ignore[reportUnknownArgumentType]
        batched, single = cast("tuple[Any, Any]", mode)
        if not (isinstance(batched, Space) and isinstance(single, Space)):
            raise TypeError(
                "Expected both elements of observation_mode to be Spaces, got "
                f"{type(batched)} and {type(single)}"
            )
    elif mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch "
            f"observation space, actual got {mode}"
        )


def _check_known(space: Space[Any]) -> None:
    """Refuses spaces of the user's own under `shared_memory`, as Gymnasium does."""
    match space:
        case gymnasium.spaces.Dict():
            children = list(space.spaces.values())
        case gymnasium.spaces.Tuple():
            children = list(space.spaces)
        case _:
            children = []
    for child in children:
        _check_known(child)
    if create_shared_memory.dispatch(type(space)) is create_shared_memory.dispatch(object):  # pyright: ignore
        raise ValueError(
            "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature with "
            f"`shared_memory=False` however this is slower. {space} is not one of Gymnasium's own spaces."
        )
