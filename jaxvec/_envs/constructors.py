"""Functions that make envs, what is learnt of the envs, and the kind of slice that they form."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import (
    EnvSpec,
    find_highest_version,
    get_env_id,
    load_env_creator,
    parse_env_id,
)
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import VectorEnv

from jaxvec._envs.batch_slice import BatchSlice
from jaxvec._envs.env_rows import one_of
from jaxvec._envs.env_slice import EnvSlice
from jaxvec._envs.env_states import StateFunctions
from jaxvec._envs.envs import BatchedEnv, Env, EnvFn, Failing
from jaxvec._envs.slice import Slice
from jaxvec._envs.slot_envs import Spares
from jaxvec._spec import EnvSpaces

# ----------------------------------------------------------------------------------------------------------
# Turns what the user calls an env into one constructor for each env of the pool.
# ----------------------------------------------------------------------------------------------------------

_PUBLISHERS = {"ALE": "ale_py", "BabyAI": "minigrid"}  # where the package has another name than its ids


def listed(env: Any) -> Any:
    """Returns what the user calls an env, where that is a generator, or the like, of callables, as a list."""
    if isinstance(env, Iterable) and not callable(env) and not isinstance(env, (str, Sequence)):
        return list(cast("Iterable[Any]", env))
    return env


def count(env: Any, num_envs: int | None, size: int | None) -> int:
    """Returns how many envs there will be.

    Args:
        env: what the user calls an env.
        num_envs: how many; may be `None` for a list.
        size: how many envs each constructor makes, if they are batched.

    Raises:
        ValueError: `num_envs` is below 1, missing, not the list's length, or no multiple of `size`.
    """
    if _is_list(env):
        listed = len(env) * (size or 1)
        if num_envs is not None and num_envs != listed:
            raise ValueError(f"num_envs is {num_envs}, but the list has {len(env)} callables")
        num_envs = listed
    elif num_envs is None:
        raise ValueError("num_envs is missing; only a list of callables says how many envs there are")
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"num_envs must be an integer of at least 1, not {num_envs!r}")
    if num_envs % (size or 1):
        raise ValueError(f"num_envs, {num_envs}, must be a multiple of envs_per_instance, {size}")
    return num_envs


def resolve(
    env: str | EnvSpec | Callable[..., Any] | Sequence[Callable[..., Any]],
    slices: Sequence[tuple[int, int]],
    env_kwargs: dict[str, Any],
    *,
    configs: Sequence[Mapping[str, Any]] | None = None,
    size: int | None = None,
) -> list[EnvFn]:
    """Returns one constructor without arguments for each env, or for each batch of `size` envs.

    Args:
        env: a Gymnasium id, an `EnvSpec`, a callable, or a list of callables. A callable with one
            required positional parameter gets the env's index, and so does one with a parameter `env_id` that
            is no text; one with a parameter `worker_id` gets its worker's index.
        slices: `(first, stop)` of each worker's envs.
        env_kwargs: for `gymnasium.make`, or the callables.
        configs: more of them, of each env's own.
        size: of batches; `None` for envs one by one.

    Raises:
        TypeError: `env` is none of these, or a callable can't be called so.
        ValueError: there is not a config for each env.
        gymnasium.error.Error: there is no env of this id.
    """
    step = size or 1
    places = [
        (index, worker) for worker, (first, stop) in enumerate(slices) for index in range(first, stop, step)
    ]
    if configs is not None and len(configs) != len(places):
        raise ValueError(f"env_configs has {len(configs)} configs, but there are {len(places)} envs to make")
    each = [{}] * len(places) if configs is None else configs
    if isinstance(env, (str, EnvSpec)):
        if size is not None:
            raise TypeError("envs_per_instance goes with a callable that makes a gymnasium.vector.VectorEnv")
        # Resolved here, so that an env registered only in this process works in a worker.
        spec = _portable(_find_spec(env) if isinstance(env, str) else env)
        return [partial(gymnasium.make, spec, **{**env_kwargs, **config}) for config in each]
    env_fns = list(cast("Sequence[Any]", env)) if _is_list(env) else [env] * len(places)
    return [
        _bind(env_fn, index, worker, {**env_kwargs, **config})
        for env_fn, (index, worker), config in zip(env_fns, places, each, strict=True)
    ]


def of_worker(function: Callable[..., Any], worker: int) -> Callable[[], Any]:
    """Returns a function that gets its worker's index, if it has a parameter `worker_id`."""
    parameter = _parameters(function).get("worker_id")
    return (
        function
        if parameter is None or not _is_for_us(parameter, function)
        else partial(function, worker_id=worker)
    )


def takes(env: Any, name: str) -> bool:
    """Says whether the constructor of some env takes a keyword, or may."""
    for each in env if _is_list(env) else [env]:
        if isinstance(each, (str, EnvSpec)):
            entry_point: Any = (_find_spec(each) if isinstance(each, str) else each).entry_point
            each = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        parameters = _parameters(each)
        if not parameters or name in parameters:
            return True
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return True
    return False


def _is_list(env: Any) -> bool:
    return isinstance(env, Sequence) and not isinstance(env, str)


def _bind(env_fn: Any, index: int, worker: int, env_kwargs: dict[str, Any]) -> EnvFn:
    if not callable(env_fn):
        raise TypeError(
            f"env must be a Gymnasium id, an EnvSpec, a callable or a list of callables; got "
            f"{type(env_fn).__name__} for env {index}"
            + (
                "; pass a function that makes the env, not the env"
                if isinstance(env_fn, gymnasium.Env)
                else ""
            )
        )
    parameters = _parameters(env_fn)
    by_name = {
        name: number
        for name, number in (("env_id", index), ("worker_id", worker))
        if name in parameters and _is_for_us(parameters[name], env_fn)
    }
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in env_kwargs
        and (name == "env_id" or name not in by_name)
    ]
    if len(required) > 1:
        raise TypeError(
            f"{env_fn!r} requires the arguments {required}; jaxvec.make passes the env's index to one "
            "required argument, and its own keyword arguments to the others"
        )
    by_name |= dict.fromkeys(required, index)
    # By its place, where it can be, as the callable may know the name by its signature alone.
    first = [by_name.pop(name) for name in required if name == next(iter(parameters))]
    return cast(EnvFn, partial(env_fn, *first, **{**by_name, **env_kwargs}))


def _is_for_us(parameter: inspect.Parameter, env_fn: Any) -> bool:
    """Says whether a parameter of a name that we fill is meant so, and not bound or a Gymnasium id."""
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return False
    if isinstance(env_fn, partial) and parameter.name in env_fn.keywords:
        return False
    annotation = inspect.formatannotation(parameter.annotation)
    return not isinstance(parameter.default, str) and not re.search(r"\bstr\b", annotation)


def _parameters(env_fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(env_fn).parameters
    except (TypeError, ValueError):  # builtins and the like have no signature
        return {}


def _portable(spec: EnvSpec) -> EnvSpec:
    """Replaces an entry point by name in `__main__`, which is another module in a worker."""
    if isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:"):
        return dataclasses.replace(spec, entry_point=load_env_creator(spec.entry_point))
    return spec


def _find_spec(env_id: str) -> EnvSpec:
    """Finds the `EnvSpec` of an id, as `gymnasium.make` would: `module:id`, and bare names, too."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    if name not in gymnasium.registry:
        namespace, bare, version = parse_env_id(name)
        if version is None:
            newest = find_highest_version(namespace, bare)
            if newest is not None:
                name = get_env_id(namespace, bare, newest)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.NamespaceNotFound as error:
        namespace = name.partition("/")[0]
        package = _PUBLISHERS.get(namespace, "the_package")
        raise gymnasium.error.NamespaceNotFound(
            f"{error} Ids that begin with {namespace}/ are registered by a package when it is imported. "
            f'Name the package: jaxvec.make("{package}:{name}", …)'
        ) from error


# ----------------------------------------------------------------------------------------------------------
# What built envs say of themselves: all that the parent needs to lay out a pool.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Description:
    """Of one slice.

    Attributes:
        spaces: those of all its envs.
        metadata, render_mode: those of its first env.
        info: of the first env's first reset, if that was asked for.
        mismatch: says which env of the slice has other spaces than the first, if one has.
    """

    spaces: EnvSpaces
    metadata: dict[str, Any]
    render_mode: str | None
    info: dict[str, Any] | None
    mismatch: str | None


def describe(envs: Sequence[Any], *, first: int, learn_info: bool, equal_spaces: bool) -> Description:
    """Describes the envs `first`, `first + 1`, …; resets the first one once if `learn_info`.

    Raises:
        EnvFailure: the reset raised.
    """
    with Failing(first, "reset"):
        info = _first_info(envs[0]) if learn_info else None
    spaces = _spaces(envs[0])
    mismatches = (
        compare(spaces, first, _spaces(env), env_id, equal=equal_spaces)
        for env_id, env in _numbered(envs, first)
    )
    return Description(
        spaces, dict(envs[0].metadata), envs[0].render_mode, info, next(filter(None, mismatches), None)
    )


def compare(a: EnvSpaces, a_id: int, b: EnvSpaces, b_id: int, *, equal: bool) -> str | None:
    """Says how the spaces of env `b_id` differ from those of env `a_id`; `None` if they don't.

    Unless they have to be `equal`, observation spaces may differ in all but structure, shapes and dtypes.
    """
    for name in ("observation", "action", "reward"):
        expected, actual = getattr(a, name), getattr(b, name)
        if expected is actual:  # an attribute of their class; to compare large boxes takes long
            continue
        if name == "observation" and not equal and is_space_dtype_shape_equiv(expected, actual):
            continue
        if expected != actual:
            return (
                f"env {b_id} has {name} space {actual}, but env {a_id} has {expected}; all envs of a pool "
                "need the same spaces"
            )
    return None


def _numbered(envs: Sequence[Env | BatchedEnv], first: int) -> Iterator[tuple[int, Env | BatchedEnv]]:
    for env in envs:
        yield first, env
        first += env.num_envs if isinstance(env, VectorEnv) else 1


def _first_info(env: Env | BatchedEnv) -> dict[str, Any]:
    info = env.reset()[1]
    return one_of(info, 0, env.num_envs) if isinstance(env, VectorEnv) else dict(info)


def _spaces(env: Env | BatchedEnv) -> EnvSpaces:
    if isinstance(env, VectorEnv):
        return EnvSpaces(env.single_observation_space, env.single_action_space, None)
    try:
        reward = env.get_wrapper_attr("reward_space")  # MO-Gymnasium's convention
    except AttributeError:
        reward = None
    return EnvSpaces(env.observation_space, env.action_space, reward)


# ----------------------------------------------------------------------------------------------------------
# What kind of slice the envs of a pool make up, wherever they are stepped.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SliceConfig:
    """The same for all slices of a pool.

    Attributes:
        size: how many envs a batched env has; `None` for envs one by one.
        spare_envs: how many more envs each worker builds, to be reset in advance.
        strict: whether observations have to be members of their space.
        see_through: whether steps may pass Gymnasium's own wrappers by.
        equal_spaces: whether observation spaces have to be equal, and not only alike.
        keeps_states: whether states of envs are saved.
        state_functions: the user's, by which states of envs are taken and put back; `None` for our own way.
    """

    size: int | None
    spare_envs: int
    strict: bool
    see_through: bool
    equal_spaces: bool
    keeps_states: bool = False
    state_functions: StateFunctions | None = None

    def slice_of(
        self, envs: list[Any], env_fns: Sequence[EnvFn], spares: Spares | None = None
    ) -> Callable[..., Slice]:
        """Returns what makes the slice of these envs, once its place in a pool is known."""
        if self.size is not None:
            return partial(BatchSlice, envs, size=self.size)
        return partial(
            EnvSlice,
            envs,
            env_fns,
            spares=spares,
            strict=self.strict,
            see_through=self.see_through,
            keeps_states=self.keeps_states,
            state_functions=self.state_functions,
        )
