"""The state of one env and of its wrappers as a value: taken, put back, and proved."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import cloudpickle
import gymnasium

from jaxvec._errors import EnvStateError
from jaxvec._slices._differences import difference
from jaxvec._slices._envs import Env
from jaxvec._slices._snapshots import (
    NOTHING,
    CannotCopy,
    Fields,
    Node,
    Putter,
    Taker,
    compare_fields,
    put_layer,
    take_layer,
    watch_ale,
)

__all__ = ["EnvState", "prove", "put", "take", "watch"]

StateFunctions: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]

_ADVICE = (
    "Give the env methods get_state() and set_state(state) that take and put what is not in such attributes, "
    "pass state_functions=(get_state, set_state), or wrap the env in jaxvec.adapters.replay.ReplayEnv"
)
_GENERATOR = ("_np_random", "_np_random_seed")  # what a `gymnasium.Env` has beside a user's own state


class EnvState:
    """What `take` returns. It never changes, and pickles if what the env holds does.

    Attributes:
        kinds: the names of the classes of the wrappers, outmost first, and of the env.
        layers: the attributes of each.
        own: what the user's function, or the env's own method, has returned, taken the same way.
    """

    __slots__ = ("kinds", "layers", "own")

    def __init__(self, kinds: tuple[str, ...], layers: list[Fields], own: Any) -> None:
        self.kinds = kinds
        self.layers = layers
        self.own = own


def watch(env: Env) -> None:
    """Has an env note what its state can't be told from: the actions that sticky ones of ALE may repeat.

    Call it when the env was made, before its first reset; others are left as they are.
    """
    watch_ale(_layers(env)[-1])


def take(env: Env, functions: StateFunctions | None = None) -> EnvState:
    """Takes the state of an env and its wrappers.

    It is what their attributes hold, and what those hold, random numbers among it. Where that is memory of
    MuJoCo or ALE, it is taken by their own ways; where an env has `get_state` and `set_state`, these are
    asked for the rest.

    Args:
        env: the env, with its wrappers.
        functions: the user's `(get_state, set_state)`; then they say all of the env within the wrappers, but
            for its `np_random`.

    Raises:
        EnvStateError: something is no value; names the attribute, and says what to do.
    """
    layers = _layers(env)
    base = layers[-1]
    methods = _own_methods(type(base)) if functions is None else None
    taker = Taker(layers)
    taken: list[Fields] = []
    own: Any = None
    layer: Any = base
    try:
        for layer in layers:
            if layer is not base:
                taken.append(take_layer(taker, layer))
            elif functions is not None:
                held = {name: vars(base)[name] for name in _GENERATOR if name in vars(base)}
                taken.append(({}, {name: taker.value(value) for name, value in held.items()}, -1))
                own = taker.value(functions[0](env))
            elif methods is None:
                taken.append(take_layer(taker, base))
            else:
                if isinstance(base, gymnasium.Wrapper):
                    taken.append(NOTHING)  # it says what it keeps, of the env inside, too
                else:
                    taker.lenient = True
                    taken.append(take_layer(taker, base))
                    taker.lenient = False
                own = taker.value(methods[0](base))
    except CannotCopy as error:
        path = f"{type(layer).__name__}." + "".join(
            name if name.startswith("[") or not number else f".{name}"
            for number, name in enumerate(error.path)
        )
        raise EnvStateError(
            f"the state of {type(base).__name__} can't be taken: of {path}, {error.what}. "
            + (error.advice or _ADVICE)
        ) from error
    return EnvState(tuple(map(_kind, layers)), taken, own)


def put(env: Env, state: EnvState, functions: StateFunctions | None = None) -> Env:
    """Has an env go on from a state, as often as you like, and returns it.

    The env and its wrappers stay the objects that they are, so windows, the memory that
    `set_observation_buffer` gave, and whatever refers to them stay theirs.

    Args:
        env: the env of which the state was taken, or another that the same function made.
        state: of `take`.
        functions: as for `take`.

    Raises:
        EnvStateError: the state is that of an env of another class, or with other wrappers.
    """
    layers = _layers(env)
    if tuple(map(_kind, layers)) != state.kinds:
        raise EnvStateError(
            f"a state of {' of '.join(state.kinds)} can't be put into {' of '.join(map(_kind, layers))}; "
            "restore states into envs that the same function made"
        )
    base = layers[-1]
    putter = Putter(layers)
    try:
        # First what others do, so that what the attributes say is the last word.
        if functions is not None:
            functions[1](env, putter.value(state.own, None))
        elif (methods := _own_methods(type(base))) is not None:
            methods[1](base, putter.value(state.own, None))
        for layer, fields in zip(layers, state.layers, strict=True):
            put_layer(putter, layer, fields)
    except CannotCopy as error:
        raise EnvStateError(
            f"a state of {type(base).__name__} can't be put back: {error.what}. {error.advice or _ADVICE}"
        ) from error
    return env


def prove(
    env: Env, functions: StateFunctions | None = None, *, fresh: bool = False, num_steps: int = 40
) -> None:
    """Raises unless an env goes on from a state as it did before, however far it went in between.

    It takes a state, steps the env with random actions, and resets it with other seeds and steps it. Then it
    puts the state back, and a copy that was pickled if that is possible, steps the env with the same actions,
    and compares all results bit for bit. The env is left in the state that it was in.

    Args:
        env: the env, with its wrappers.
        functions: as for `take`.
        fresh: it was never reset, or its episode is over, so it is reset first.
        num_steps: to compare, with the resets that they need.

    Raises:
        EnvStateError: a state can't be taken, or results differ; says which, and which attribute did.
    """
    before = take(env, functions)
    actions = copy.deepcopy(env.action_space)
    actions.seed(0)
    chosen = [actions.sample() for _ in range(num_steps)]
    try:
        if fresh:
            _reset(env, 0)
        began = take(env, functions)
        first, at_first = _play(env, functions, chosen)
        for seed in (1, 2):  # elsewhere, where an env has another map or other bodies
            _reset(env, seed)
            _play(env, functions, chosen[: num_steps // 2])
        put(env, began, functions)
        _compare_states(env, take(env, functions), began)
        _compare(env, first, at_first, *_play(env, functions, chosen), "")
        if (copied := _pickled(began)) is not None:
            put(env, copied, functions)
            _compare(env, first, at_first, *_play(env, functions, chosen), "that was pickled ")
    finally:
        put(env, before, functions)


def _reset(env: Env, seed: int) -> None:
    try:
        env.reset(seed=seed)
    except Exception:  # it takes no seed
        env.reset()


def _play(env: Env, functions: StateFunctions | None, actions: list[Any]) -> tuple[list[Any], list[EnvState]]:
    """Returns what steps, and the resets between them, return, as values; and the states after the first."""
    results: list[Any] = []
    states: list[EnvState] = []
    ended = False
    for action in actions:
        if ended:
            result: Any = env.reset()
            ended = False
        else:
            try:
                result = env.step(copy.deepcopy(action))
                ended = bool(result[2] or result[3])
            except Exception as error:  # it does not like each action of its space; it has to say so again
                result, ended = (type(error).__name__, str(error)), True
        results.append(Taker([], lenient=True).value(result))
        if len(states) < 3:
            states.append(take(env, functions))
    return results, states


_NAMES = {2: ("obs", "info"), 5: ("obs", "reward", "terminated", "truncated", "info")}


def _compare(
    env: Env,
    first: list[Any],
    at_first: list[EnvState],
    again: list[Any],
    at_again: list[EnvState],
    which: str,
) -> None:
    for number, (one, other) in enumerate(zip(first, again, strict=True)):
        for field, mine, its in _fields_of(one, other):
            where = difference(mine, its)
            if where is None:
                continue
            states = zip(at_first[: number + 1], at_again, strict=False)
            attribute = next(filter(None, (_attribute(*pair) for pair in states)), None)
            named = f"; the attribute {attribute} did, too" if attribute else ""
            raise EnvStateError(
                f"{type(env.unwrapped).__name__} does not go on from its state {which}as it did before: "
                f"after {number + 1} of the same actions, {field}{where} differs{named}. Some of its state "
                f"is not in its attributes; {_SOMETHING}. {_ADVICE}"
            )


_SOMETHING = (
    "it may be a global variable or generator (random, np.random), memory of a library in C, or a clock"
)


def _fields_of(one: Any, other: Any) -> Any:
    ones, others = (getattr(result, "items", result) for result in (one, other))
    names = _NAMES.get(len(ones), ("",) * len(ones))
    for name, mine, its in zip(names, ones, others, strict=True):
        if name == "info":
            mine, its = (_without_times(info) for info in (mine, its))
        yield name, mine, its


def _without_times(info: Any) -> Any:
    """Leaves out the time on the clock that Gymnasium's `RecordEpisodeStatistics` writes."""
    pairs = getattr(info, "pairs", ())
    return {
        key: {k: v for k, v in item.pairs if k != "t"}
        if key == "episode" and hasattr(item, "pairs")
        else item
        for key, item in pairs
        if not isinstance(key, Node)
    }


def _compare_states(env: Env, now: EnvState, began: EnvState) -> None:
    # What functions return need not be the same before the next step.
    attribute = _attribute(EnvState(now.kinds, now.layers, None), EnvState(began.kinds, began.layers, None))
    if attribute is not None:
        raise EnvStateError(
            f"the state of {type(env.unwrapped).__name__} can't be put back: {attribute} is another then. "
            + _ADVICE
        )


def _attribute(one: EnvState, other: EnvState) -> str | None:
    """Returns the attribute in which two states of an env differ, if there is one."""
    for kind, mine, its in zip(one.kinds, one.layers, other.layers, strict=True):
        for name, value, its_value in compare_fields(mine, its):
            where = difference(value, its_value)
            if where is not None:
                return f"{kind.rpartition('.')[2]}{name}{where}"
    where = difference(one.own, other.own)
    return None if where is None else f"get_state(){where}"


def _pickled(state: EnvState) -> EnvState | None:
    try:
        return pickle.loads(cloudpickle.dumps(state))
    except Exception:  # it can't leave this process, which is an error only where it has to
        return None


def _layers(env: Any) -> list[Any]:
    """Returns the wrappers, outmost first, and the env; or the wrapper that says all of what is inside it."""
    layers = [env]
    while isinstance(env, gymnasium.Wrapper) and _own_methods(type(env)) is None:
        env = env.env
        layers.append(env)
    return layers


def _kind(layer: Any, known: dict[type, str] = {}) -> str:  # noqa: B006
    kind = type(layer)
    name = known.get(kind)
    if name is None:
        name = known[kind] = f"{kind.__module__}.{kind.__qualname__}"
    return name


def _own_methods(kind: type, known: dict[type, Any] = {}) -> Any:  # noqa: B006
    """Returns an env's own `get_state` and `set_state`, if it has such a pair."""
    if kind not in known:
        methods = getattr(kind, "get_state", None), getattr(kind, "set_state", None)
        known[kind] = methods if _takes(methods[0], 1) and _takes(methods[1], 2) else None
    return known[kind]


def _takes(method: Any, count: int) -> bool:
    try:
        inspect.signature(method).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True
