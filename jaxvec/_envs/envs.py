"""Envs as a slice uses them: their types, construction, attributes, results and forks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NoReturn, TypeAlias, cast

import gymnasium
import numpy as np

from jaxvec._memory.rows import InvalidValue, check_unmasked
from jaxvec._util import add_note

# --- Construction, attributes and failures ---------------------------------------------------------------

Env: TypeAlias = gymnasium.Env[Any, Any]
BatchedEnv: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]  # fills several neighbouring slots
EnvFn: TypeAlias = Callable[[], Any]

OLD_GYM = (
    "Wrap an env of old Gym in shimmy.GymV21CompatibilityV0(env=...) if its step returns four values, or in "
    "shimmy.GymV26CompatibilityV0(env=...)"
)
SPARE = "a spare env"  # one without a slot, for an extension


class EnvFailure(Exception):
    """A failure of an env. `__cause__` is the env's exception, or `InvalidValue` for wrong data."""

    def __init__(self, env_id: int, operation: str, action: Any = None) -> None:
        super().__init__(env_id, operation)
        self.env_id = env_id
        self.operation = operation  # such as "step" or "constructor"
        self.action = action  # of a failed step
        self.completed: list[int] = []  # the slots that completed the same request before the failure
        self.advice = ""  # for the end of the error's text


class AttributeFailure(EnvFailure):
    """A missing attribute of an env, or one that can't be set."""


class EnvErrorContext:
    """Context manager that turns an exception of its block into an `EnvFailure`, unless it is one already.

    For a batched env, `env_id` is that of its first env.
    """

    def __init__(self, env_id: int, operation: str, action: Any = None) -> None:
        self._arguments = env_id, operation, action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if forked:
            end_forks(*self._arguments[:2])
        if error is not None and not isinstance(error, EnvFailure):
            first, *others = self._arguments
            env_id = first + error.row if isinstance(error, InvalidValue) else first
            raise EnvFailure(env_id, *others) from error


class AttributeErrorContext(EnvErrorContext):
    """An `EnvErrorContext` for attributes, which turns `AttributeError` into `AttributeFailure`."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, AttributeError) and not forked:
            raise AttributeFailure(*self._arguments) from error
        super().__exit__(kind, error, trace)


def declared(env: Any, name: str) -> Any:
    """Returns an attribute that an env, without its wrappers, has itself or by its class; `None` for none.

    It does not call `__getattr__`, where an env may raise any exception, or answer every name with a stub. It
    does not read `__dict__` either: up to Python 3.12, that slows down all later steps of the env.
    """
    try:
        return object.__getattribute__(env, name)
    except Exception:  # also of a property
        return None


def declares(env: Any, name: str) -> bool:
    """Returns True for an attribute of `declared`, also for a property that raises."""
    return hasattr(type(env), name) or declared(env, name) is not None


def layers_of(env: Any) -> list[Any]:
    """Returns the wrappers, outermost first, and the env."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def find_attr(env: Env, name: str) -> Any:
    """Returns an attribute of an env or a wrapper. A dotted name continues from attribute to attribute."""
    first, *rest = name.split(".")
    return reduce(getattr, rest, env.get_wrapper_attr(first))


def put_attr(env: Env, name: str, value: Any) -> None:
    """Sets an attribute of an env or a wrapper; a dotted name as in `find_attr`."""
    owner, _, last = name.rpartition(".")
    if owner:
        setattr(find_attr(env, owner), last, value)
    else:
        env.set_wrapper_attr(name, value)


def build_env(
    env_fns: Sequence[EnvFn],
    first: int,
    size: int | None = None,
    *,
    use: str | None = None,
    others: Iterable[tuple[str | int, Any]] = (),
    report: Callable[[int], None] = lambda count: None,
) -> list[Any]:
    """Builds the envs from slot `first` on. If one fails, closes the others.

    With `size`, each constructor builds a batched env with as many envs.

    Args:
        use: Use of the new envs, for errors, if they get no slot.
        others: Use or first slot of each env that exists already. No new env may be one of them.
        report: Called with the number of envs that are built, after each.

    Raises:
        EnvFailure: A constructor raised, or did not return a new env.
    """
    envs: list[Any] = []
    known: dict[int, tuple[str, Any]] = {}
    for owner, env in others:
        _check_distinct(env, owner, known)
    for number, env_fn in enumerate(env_fns):
        env_id = first + number * (size or 1)
        advice = ""
        try:
            with EnvErrorContext(env_id, "constructor"):
                if known:
                    advice = (
                        f"This env is a further one in its process, for {use}. A simulator that allows one "
                        "instance per process works without spare_envs, and with save and restore in place "
                        "of simulate"
                        if use
                        else "Another env was built in this process before. If the simulator allows one "
                        "instance per process, give each env its own process: num_workers=num_envs"
                    )
                env = env_fn()
                advice = ""
                _check_kind(env, size)
                _check_distinct(env, use or env_id, known)
            envs.append(env)
            report(len(envs) * (size or 1))
        except BaseException as error:
            if isinstance(error, EnvFailure):
                error.advice = _advice(error.__cause__) or advice
            with suppress(EnvFailure):
                close_envs(envs, first, size)
            raise
    return envs


def _advice(cause: BaseException | None) -> str:
    """Returns what to do about the exception of a constructor; an empty text if that is unknown."""
    if isinstance(cause, gymnasium.error.UnregisteredEnv):
        return (
            "Ids of your own are known after the import of the module that registers them, and workers do "
            'not import your script. Name the module in the id, as in gymnasium.make("MODULE:MyEnv-v0"), or '
            "pass the class of the env, or the id itself, to jaxvec.make"
        )
    if isinstance(cause, ModuleNotFoundError) and cause.name is not None:
        name = cause.name.partition(".")[0]
        return (
            f"Workers found no module {name!r}. Install its package for the Python that runs them, such as: "
            f"pip install {name}"
        )
    return ""


def innermost(env: Any) -> Any:
    """Returns the env inside all wrappers."""
    while isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
        inner = declared(env, "env")
        if not _is_stepped(inner):
            break
        env = inner
    try:
        unwrapped = env.unwrapped
    except Exception:  # the env's own property
        return env
    return unwrapped if _is_stepped(unwrapped) else env


def _is_stepped(value: Any) -> bool:
    return all(callable(getattr(type(value), name, None)) for name in ("reset", "step"))


def _check_distinct(env: Any, owner: str | int, known: dict[int, tuple[str, Any]]) -> None:
    """Raises `ValueError` if an env shares an object with a known one; adds its objects to these.

    `owner` is the use of an env that has no slot, or else its first slot. `known` has the use and the object
    by its id.
    """
    for place, part in _parts(env):
        name = owner if isinstance(owner, str) else f"env {owner + place}"
        if id(part) in known:
            raise ValueError(
                f"the function that makes the envs returned the same env for {known[id(part)][0]} and "
                f"{name}; build a new env in each call, as in lambda: gymnasium.make(id), not lambda: env"
            )
        known[id(part)] = name, part


def _parts(env: Any) -> Iterator[tuple[int, Any]]:
    """Yields the objects that no other env may contain, each with its place in the env if that is batched."""
    inner = innermost(env)
    adapted = declared(inner, "adapted")  # the env inside an adapter
    yield 0, adapted if _is_stepped(adapted) else inner
    parts = declared(inner, "envs")  # as in `SyncVectorEnv`
    if isinstance(inner, gymnasium.vector.VectorEnv) and isinstance(parts, list | tuple):
        for place, part in enumerate(cast("list[Any]", parts)):
            if isinstance(part, gymnasium.Env):
                yield place, innermost(part)


def check_vector(env: Any) -> None:
    """Raises `TypeError` for a vector env that does not follow Gymnasium's interface, such as SuperSuit's."""
    is_vector = isinstance(env, gymnasium.vector.VectorEnv) or (
        declares(env, "num_envs") and not isinstance(env, type | gymnasium.Env)
    )
    if is_vector and not hasattr(env, "single_observation_space"):
        raise TypeError(
            f"{type(env).__name__} is a vector env without single_observation_space, which "
            "gymnasium.vector.VectorEnv has. Pass a function that makes one env: jaxvec.make(make_env, "
            "num_envs). For a vector env of SuperSuit, whose envs are the agents of a PettingZoo env, that "
            "is lambda: jaxvec.adapters.pettingzoo.PettingZooEnv(parallel_env())"
        )


def _check_kind(env: Any, size: int | None) -> None:
    check_vector(env)
    if size is not None:
        if not isinstance(env, gymnasium.vector.VectorEnv):
            raise TypeError(
                f"expected a gymnasium.vector.VectorEnv of {size} envs, got {type(env).__name__}; leave out "
                "envs_per_instance for single envs"
            )
        if env.num_envs != size:
            raise ValueError(f"envs_per_instance is {size}, but the VectorEnv has {env.num_envs} envs")
    elif isinstance(env, gymnasium.vector.VectorEnv):
        raise TypeError(
            f"expected a gymnasium.Env, got a VectorEnv of {env.num_envs} envs; pass "
            f"envs_per_instance={env.num_envs}"
        )
    elif not isinstance(env, gymnasium.Env):
        raise TypeError(
            f"expected a gymnasium.Env, got {type(env).__name__}. Wrap a dm_env.Environment in "
            "jaxvec.adapters.dm_env.DmEnv, a PettingZoo env in jaxvec.adapters.pettingzoo.PettingZooEnv. "
            + OLD_GYM
        )


def build_spares(
    spares: list[Env],
    count: int,
    env_fns: Sequence[EnvFn],
    first: int,
    envs: Sequence[Env],
    report: Callable[[int], None],
) -> None:
    """Appends `count` envs to `spares`, built by the functions of the envs `first`, `first + 1`, …, in turn.

    Calls `report` after each with the number of all envs, with `envs`.
    """
    for i in range(count):
        which = i % len(env_fns)
        others = [*enumerate(envs, first), *((SPARE, env) for env in spares)]
        spares += build_env([env_fns[which]], first + which, use=SPARE, others=others)
        report(len(envs) + len(spares))


def close_envs(
    envs: Sequence[Any],
    first: int,
    size: int | None = None,
    report: Callable[[range], None] = lambda env_ids: None,
) -> None:
    """Closes all envs, then raises `EnvFailure` for the first failure of `close`.

    Spare envs may follow those that `build_env` returned. Calls `report` with the slots of each closed env.
    """
    failure: EnvFailure | None = None
    for number, env in enumerate(envs):
        env_id = first + number * (size or 1)
        try:
            with EnvErrorContext(env_id, "close"):
                env.close()
        except EnvFailure as error:
            failure = failure or error
        report(range(env_id, env_id + (size or 1)))
    if failure is not None:
        raise failure


# --- Checks of results -----------------------------------------------------------------------------------


def split_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    """Returns observation and info of a reset; raises `InvalidValue` if the result is no such pair."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise InvalidValue(f"reset must return (obs, info), got {_outline(result)}")
    check_dict("reset", result[1])
    return cast("tuple[Any, dict[str, Any]]", result)


def explain_reset(error: TypeError, env: Any) -> None:
    """Adds a note to an error of `reset` if a wrapper or the env does not accept Gymnasium's arguments."""
    for layer in layers_of(env):
        try:
            inspect.signature(layer.reset).bind(seed=None, options=None)
        except (TypeError, ValueError):
            add_note(
                error,
                f"{type(layer).__name__}.reset must accept the arguments of Gymnasium's envs: "
                f"reset(self, *, seed=None, options=None). {OLD_GYM}",
            )
            return


def wrong_step(result: Any) -> InvalidValue:
    """Returns the error of a step that returned no tuple of five."""
    return InvalidValue(
        f"step must return (obs, reward, terminated, truncated, info), got {_outline(result)}"
        + (f". {OLD_GYM}" if isinstance(result, tuple) and len(result) == 4 else "")
    )


def check_dict(operation: str, info: Any) -> None:
    if not isinstance(info, dict):
        raise InvalidValue(
            f"{operation} must return info as a dict, got {type(info).__name__}; return {{}} for none"
        )


def conform_reward(reward: Any, shape: tuple[int, ...]) -> Any:
    """Returns a reward as a float, or as a float64 array `shape` if that is not `()`."""
    check_unmasked("reward", reward)
    value = np.asarray(reward)
    if shape == () and value.size == 1:
        value = value.reshape(())  # Gymnasium accepts shape (1,) for a scalar, too
    if value.shape != shape:
        raise InvalidValue(
            f"reward: expected shape {shape}, got {value.shape}; declare the shape of the env's "
            "rewards in an attribute reward_space, a Box"
            + (", also in a wrapper that adds them: n_agents means a reward per agent" if shape else "")
        )
    if value.dtype.kind in "OV" and shape == ():
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)  # Gymnasium accepts any object with `__float__`, also of dtype bfloat16
    if value.dtype.kind not in "biuf":
        raise InvalidValue(f"reward: expected a number, got {type(reward).__name__}; return a float")
    return float(value) if shape == () else value.astype(np.float64)


def _outline(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


# --- Forks of a worker -----------------------------------------------------------------------------------
# If an env forks and the child returns from the env's code, the child is ended: it would write into the
# segment and answer requests, too. `EnvErrorContext` does so after all code but single steps and resets.

forked: list[int] = []  # not empty in a fork of a worker; the compiled loop reads it, too


def watch_forks() -> None:
    """Makes forks of this process fill `forked`."""
    os.register_at_fork(after_in_child=lambda: forked.append(os.getpid()))


def end_forks(env_id: object, operation: str) -> NoReturn:
    """Ends this process, which is a fork of a worker, with a message on stderr."""
    text = (
        f"jaxvec.EnvError: env {env_id} has forked in {operation}, and the new process {os.getpid()} "
        f"returned from {operation}, so jaxvec ended it. End it within {operation} with os._exit, or "
        "start it with subprocess or multiprocessing.\n"
    )
    os.write(2, text.encode())
    os._exit(1)
