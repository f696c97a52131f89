"""From the `env` argument of `make` to constructors, and from built envs to a description.

The parent resolves `env` to one constructor per env (`resolve`). A worker builds its envs with them, and
describes the envs to the parent (`describe`).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import (
    EnvSpec,
    find_highest_version,
    get_env_id,
    load_env_creator,
    parse_env_id,
)
from gymnasium.spaces import Box, Space, Tuple
from gymnasium.vector import VectorEnv

from jaxvec._envs.copies import copied
from jaxvec._envs.env_rows import one_of
from jaxvec._envs.envs import (
    AttributeErrorContext,
    AttributeFailure,
    BatchedEnv,
    Env,
    EnvErrorContext,
    EnvFn,
    check_vector,
    declares,
    layers_of,
)
from jaxvec._leaves import union
from jaxvec._memory.large_buffers import map_again
from jaxvec._settings import check_count
from jaxvec._spec import EnvSpaces

# --- Constructors: from a Gymnasium id, an `EnvSpec`, a callable or a list of callables ------------------

# Packages with a name that differs from the namespace of their ids.
PUBLISHERS = {"ALE": "ale_py", "BabyAI": "minigrid"}
# Packages with a name that differs from that of their module.
PACKAGES = {"ale_py": "ale-py"}
# Required parameters of env classes that get the env's index. Functions may name theirs as they like.
INDEX_NAMES = ("env_id", "env_index", "index", "rank")


def listed(env: Any) -> Any:
    """Returns `env`, as a list if it is another iterable of callables, such as a generator."""
    if isinstance(env, Iterable) and not callable(env) and not isinstance(env, (str, Sequence)):
        return list(cast("Iterable[Any]", env))
    return env


def count(env: Any, num_envs: int | None, size: int | None) -> int:
    """Returns the number of envs of a pool, from arguments of `make`; `size` is `envs_per_instance`."""
    if _is_list(env):
        listed = len(env) * (size or 1)
        if num_envs is not None and num_envs != listed:
            raise ValueError(f"num_envs is {num_envs}, but the list has {len(env)} callables")
        num_envs = listed
    elif not isinstance(env, (str, EnvSpec)):
        _check_callable(env, 0)
    if num_envs is None:
        raise ValueError("num_envs is missing; it can be left out only with a list of callables")
    num_envs = check_count("num_envs", num_envs, 1)
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
        env: A Gymnasium id, an `EnvSpec`, a callable, or a list of callables. The env's index is passed to a
            single required positional parameter, which in a class is one of `INDEX_NAMES`, and to a parameter
            `env_id`, unless it is a string. The worker's index is passed to a parameter `worker_id`.
        slices: The slots `(first, stop)` of each worker.
        env_kwargs: Keyword arguments for `gymnasium.make`, or for the callables.
        configs: Further keyword arguments, one dict per constructor; `None` for none.
        size: The number of envs in a batch; `None` for single envs.
    """
    step = size or 1
    places = [
        (index, worker) for worker, (first, stop) in enumerate(slices) for index in range(first, stop, step)
    ]
    if configs is not None and len(configs) != len(places):
        raise ValueError(f"env_configs has {len(configs)} configs, but there are {len(places)} envs to make")
    # The caller may change the values later, and workers can be replaced at any time.
    env_kwargs, configs_of_envs = copied((env_kwargs, tuple(map(dict, configs or ()))))
    configs_of_envs = configs_of_envs or [{}] * len(places)
    if isinstance(env, (str, EnvSpec)):
        if size is not None:
            raise TypeError("envs_per_instance goes with a callable that makes a gymnasium.vector.VectorEnv")
        # Resolve the id here, because it may be registered in this process only.
        spec = load_from_main(find_spec(env) if isinstance(env, str) else env)
        return [
            partial(_construct, gymnasium.make, spec, **{**env_kwargs, **config})
            for config in configs_of_envs
        ]
    env_fns = list(cast("Sequence[Any]", env)) if _is_list(env) else [env] * len(places)
    return [
        _bind(env_fn, index, worker, {**env_kwargs, **config})
        for env_fn, (index, worker), config in zip(env_fns, places, configs_of_envs, strict=True)
    ]


def load_from_main(spec: EnvSpec) -> EnvSpec:
    """Loads an entry point `"__main__:name"`, because a worker's `__main__` is another module."""
    if isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:"):
        return dataclasses.replace(spec, entry_point=load_env_creator(spec.entry_point))
    return spec


def specs_named(env_fns: Iterable[EnvFn], pickled: bytes) -> list[EnvSpec]:
    """Returns the registered specs whose ids are in constructors, or in what was pickled with them.

    A script may have registered or changed them, and workers know them only as their packages register them.
    """
    functions = [env_fn.args[0] if isinstance(env_fn, partial) else env_fn for env_fn in env_fns]
    constants = {
        str(text).rpartition(":")[2]
        for function in functions
        for text in getattr(getattr(function, "__code__", None), "co_consts", ())
    }

    def is_named(name: str) -> bool:
        # A short string in a pickle follows its length, and an id may follow the name of a module.
        ends = bytes([len(name.encode()) % 256]), b":"
        return bool(name) and (name in constants or any(end + name.encode() in pickled for end in ends))

    return [
        load_from_main(spec)
        for env_id, spec in gymnasium.registry.items()
        if is_named(env_id) or is_named(env_id.rpartition("-v")[0])  # the version is optional
    ]


def put_specs(specs: Iterable[EnvSpec]) -> None:
    """Makes entries of this worker's registry those of the program."""
    for spec in specs:
        if spec.id not in gymnasium.registry and isinstance(spec.entry_point, str):
            with suppress(Exception):  # if its package registers it now, it does not do so later
                importlib.import_module(spec.entry_point.partition(":")[0])
        gymnasium.registry[spec.id] = spec


def of_worker(function: Callable[..., Any], worker: int) -> Callable[[], Any]:
    """Binds the worker's index if the function has a parameter `worker_id`."""
    parameter = _parameters(function).get("worker_id")
    if parameter is None or not _is_free(parameter, function):
        return function
    return partial(function, worker_id=worker)


def takes(env: Any, name: str, *, load: bool = True) -> bool | None:
    """Returns True if some constructor accepts a keyword, False if none does, `None` if that is unknown.

    With `load`, it imports the module of a Gymnasium id.
    """
    answers = [_takes(env_fn, name, load=load) for env_fn in (env if _is_list(env) else [env])]
    return True if True in answers else None if None in answers else False


def _takes(env: Any, name: str, *, load: bool) -> bool | None:
    if isinstance(env, (str, EnvSpec)):
        env = (find_spec(env) if isinstance(env, str) else env).entry_point
    if isinstance(env, str):
        if not load and env.partition(":")[0] not in sys.modules:
            return None
        env = load_env_creator(env)
    answer = False
    # A class with `**kwargs` usually passes them to one of its bases.
    for kind in env.__mro__ if isinstance(env, type) else (env,):
        if kind is not env and vars(kind).keys().isdisjoint(("__init__", "__new__")):
            continue
        try:
            parameters = inspect.signature(kind).parameters
        except (TypeError, ValueError):  # some builtins have no signature
            return None
        if name in parameters:
            return True
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
        answer = None
    return answer


def _is_list(env: Any) -> bool:
    return isinstance(env, Sequence) and not isinstance(env, str)


def _bind(env_fn: Any, index: int, worker: int, env_kwargs: dict[str, Any]) -> EnvFn:
    _check_callable(env_fn, index)
    parameters = _parameters(env_fn)
    by_name = {
        name: number
        for name, number in (("env_id", index), ("worker_id", worker))
        if name in parameters and _is_free(parameters[name], env_fn)
    }
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in env_kwargs
        and (name == "env_id" or name not in by_name)
    ]
    unfit = [name for name in required if not _takes_index(env_fn, parameters[name])]
    if unfit or len(required) > 1:
        raise TypeError(
            f"{env_fn!r} requires the arguments {required}; pass them as keyword arguments of make. jaxvec "
            "passes the env's index to one required argument only, which is not a string and which in a "
            f"class has one of the names {', '.join(INDEX_NAMES)}"
        )
    by_name |= dict.fromkeys(required, index)
    # Pass the first parameter by position: a wrapped callable may not accept the name in its signature.
    first = [by_name.pop(name) for name in required if name == next(iter(parameters))]
    return cast(EnvFn, partial(_construct, env_fn, *first, **{**by_name, **env_kwargs}))


def _check_callable(env_fn: Any, index: int) -> None:
    check_vector(env_fn)
    if not callable(env_fn):
        advice = "; pass a function that makes the env" if isinstance(env_fn, gymnasium.Env) else ""
        if isinstance(env_fn, (str, EnvSpec)):  # in a list
            env_id = env_fn if isinstance(env_fn, str) else env_fn.id
            advice = f"; in a list, write functools.partial(gymnasium.make, {env_id!r})"
        raise TypeError(
            f"env must be a Gymnasium id, an EnvSpec, a callable or a list of callables; got "
            f"{type(env_fn).__name__} for env {index}{advice}"
        )


def _construct(env_fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a constructor with copies of the arguments, which other envs get, too."""
    args, kwargs = copied((args, kwargs), map_again=map_again)
    return env_fn(*args, **kwargs)


def _is_free(parameter: inspect.Parameter, env_fn: Any) -> bool:
    """Returns True if `make` may fill a parameter: it is not bound already, and not a string."""
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return False
    if isinstance(env_fn, partial) and parameter.name in env_fn.keywords:
        return False
    return not _is_text(parameter)


def _takes_index(env_fn: Any, parameter: inspect.Parameter) -> bool:
    """Returns True if `make` may pass the env's index to a required parameter."""
    while isinstance(env_fn, partial):
        env_fn = env_fn.func
    if isinstance(env_fn, type) and parameter.name not in INDEX_NAMES:
        return False  # such as a price or a size, for which an index would be a wrong number
    return not _is_text(parameter)


def _is_text(parameter: inspect.Parameter) -> bool:
    annotation = inspect.formatannotation(parameter.annotation)
    return isinstance(parameter.default, str) or re.search(r"\bstr\b", annotation) is not None


def _parameters(env_fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(env_fn).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return {}


def _import(module: str, env_id: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # of another package that the module needs
        raise ModuleNotFoundError(
            f"{env_id}: there is no module {module!r}; start in the folder of {error.name}.py, set "
            f"PYTHONPATH, or install a package, as in pip install {PACKAGES.get(module, module)}",
            name=error.name,
        ) from None


def find_spec(env_id: str) -> EnvSpec:
    """Returns the `EnvSpec` of an id. As in `gymnasium.make`, `module:` and the version are optional."""
    module, _, name = env_id.rpartition(":")
    if module:
        _import(module, env_id)
    if name not in gymnasium.registry:
        namespace, bare, version = parse_env_id(name)
        if version is None:
            newest = find_highest_version(namespace, bare)
            if newest is not None:
                name = get_env_id(namespace, bare, newest)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.NameNotFound as error:
        advice = (
            f"The module {module} registers no such id; if it has the class of the env, pass the class."
            if module
            else f"Import the class and pass it: jaxvec.make({name.rpartition('.')[2]}, …)."
            if "." in name
            else "An id of your own is known after the import of the module that registers it. Name the "
            f'module in the id, jaxvec.make("MODULE:{name}", …), or pass the class: jaxvec.make(MyEnv, …).'
        )
        raise gymnasium.error.NameNotFound(f"{error} {advice}") from None
    except gymnasium.error.NamespaceNotFound as error:
        namespace = name.partition("/")[0]
        package = PUBLISHERS.get(namespace, "the_package")
        raise gymnasium.error.NamespaceNotFound(
            f"{error} A package registers its ids, such as those with {namespace}/, when it is imported. "
            f'Name the package in the id: jaxvec.make("{package}:{name}", …)'
        ) from None


# --- Description of built envs, from which the parent makes the layout of the pool -----------------------


@dataclass(frozen=True)
class Description:
    """The description of a slice's envs: their spaces, and other attributes of the first one."""

    spaces: EnvSpaces
    metadata: dict[str, Any]
    render_mode: str | None
    info: dict[str, Any] | None  # of its first reset; `None` if it was not reset
    mismatch: str | None  # the text of an error if an env has other spaces; else `None`
    has_jax: bool  # the process has imported JAX


def describe(envs: Sequence[Any], *, first: int, learn_info: bool, equal_spaces: bool) -> Description:
    """Describes envs. Resets the first one if `learn_info`. Raises `EnvFailure` if an env's code raises."""
    info = None
    if learn_info:
        with EnvErrorContext(first, "reset"):
            info = envs[0].reset()[1]
            info = one_of(info, 0, envs[0].num_envs) if isinstance(envs[0], VectorEnv) else dict(info)
    with EnvErrorContext(first, "constructor"):
        spaces = _spaces(envs[0], first)
        mismatch = None
        env_id = first
        for env in envs:
            merged = merge(spaces, _spaces(env, env_id), env_id, equal=equal_spaces)
            if isinstance(merged, str):
                mismatch = mismatch or merged
            else:
                spaces = merged
            env_id += env.num_envs if isinstance(env, VectorEnv) else 1
        with EnvErrorContext(first, "metadata"):
            metadata = dict(envs[0].metadata)
        return Description(
            spaces,
            metadata,
            _read(envs[0], first, "render_mode"),
            info,
            mismatch,
            has_jax="jax" in sys.modules,
        )


def merge(spaces: EnvSpaces, others: EnvSpaces, env_id: int, *, equal: bool) -> EnvSpaces | str:
    """Returns `spaces` with bounds that include those of another env, or a message if the spaces differ.

    With `equal`, observations have to have the same bounds, too. Actions always have to.
    """
    merged: dict[str, Any] = {}
    for name in ("observation", "action", "reward"):
        expected = getattr(spaces, name)
        actual = getattr(others, name)
        exact = equal or name == "action"
        # Often both are one class attribute; comparing large boxes is slow.
        are_equal = expected is actual or expected == actual
        merged[name] = expected if are_equal else None if exact else union(expected, actual)
        if merged[name] is None and not are_equal:
            return (
                f"env {env_id} has {name} space {actual}, but the envs before it have {expected}; all envs "
                f"of a pool need {name} spaces of the same {'bounds, ' if exact else ''}shapes and dtypes"
            )
    return EnvSpaces(**merged)


def _spaces(env: Env | BatchedEnv, env_id: int) -> EnvSpaces:
    if isinstance(env, VectorEnv):
        obs, action = (_read_space(env, env_id, f"single_{name}_space") for name in ("observation", "action"))
        return EnvSpaces(obs, action, None)
    obs, action = (_read_space(env, env_id, f"{name}_space") for name in ("observation", "action"))
    reward = _optional(env, env_id, "reward_space")  # MO-Gymnasium's convention
    reward = reward if isinstance(reward, Space) else None
    if reward is None and isinstance(obs, Tuple) and isinstance(action, Tuple):
        # RWARE and Level-Based Foraging have `n_agents`, and return a list with a reward for each.
        agents = _optional(env, env_id, "n_agents")
        if len(obs) == len(action) == agents:
            reward = Box(-np.inf, np.inf, (len(obs),), np.float64)
    return EnvSpaces(obs, action, reward)


def _optional(env: Env, env_id: int, name: str) -> Any:
    """Returns an attribute that an env or a wrapper declares, or None."""
    try:
        with AttributeErrorContext(env_id, name):
            return next((getattr(layer, name) for layer in layers_of(env) if declares(layer, name)), None)
    except AttributeFailure:
        return None


def _read_space(env: Env | BatchedEnv, env_id: int, name: str) -> Any:
    space = _read(env, env_id, name)
    with EnvErrorContext(env_id, name):
        if not isinstance(space, Space):
            raise TypeError(f"set {name} to a space of gymnasium.spaces in the constructor, not to {space!r}")
    return space


def _read(env: Env | BatchedEnv, env_id: int, name: str) -> Any:
    with EnvErrorContext(env_id, name):
        return getattr(env, name)
