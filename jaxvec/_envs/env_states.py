"""States of envs, by number: taken from an env and put back."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import gymnasium

from jaxvec import _stats
from jaxvec._envs.envs import Env
from jaxvec._errors import EnvStateError
from jaxvec._snapshots.ale import watch_ale
from jaxvec._snapshots.nodes import (
    NOTHING,
    CannotCopy,
    Fields,
    Node,
    Putter,
    Shared,
    Taker,
    compare_fields,
    layer_nodes,
    put_layer,
    take_layer,
)
from jaxvec._snapshots.snapshot import IncrementalSnapshot, difference, find
from jaxvec._spec import KeyPath
from jaxvec._util import dumps

# ----------------------------------------------------------------------------------------------------------
# The states that a slice keeps, by number: what decides what an env does next.
# ----------------------------------------------------------------------------------------------------------

_MAX_UNMEASURED = 1024  # states kept, at most, between two that are measured


class SlotState(NamedTuple):
    """Of a slot: all that decides what its env does next, but the row of the segment, which the parent keeps.

    Attributes:
        slot: whose env it was; a function that made it makes others that can go on from here.
        env: of env and wrappers, as `StatefulEnv.take` returned it.
        episode: how far it is, as `Episodes.take` returned it.
        seed: the last one that the env was given.
        new_seed, options: for its next reset.
        info: the raw info of its last reset or step.
        is_final: whether the row tells of an episode's last step.
        objects: what of the row are Python objects.
        obs: of the row, where the parent does not keep that; else `None`.
    """

    slot: int
    env: Any
    episode: tuple[int, Any, int]
    seed: int
    new_seed: int | None
    options: dict[str, Any] | None
    info: dict[str, Any]
    is_final: bool
    objects: dict[KeyPath, Any]
    obs: Any = None


@dataclass(frozen=True)
class Gone:
    """In place of an answer: nothing was done, since these states are not here; they went with a worker."""

    numbers: list[int]


class States:
    """Each has a number, which no other ever has."""

    def __init__(self, stats: memoryview) -> None:
        """Begins with none; `stats` is the worker's row, which tells of their bytes."""
        self._states: dict[int, SlotState] = {}
        self._in_order: deque[int] = deque()  # their numbers
        self._stats = stats
        self._size, self._until_measured, self._between = 0, 0, 1

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Returns those of some numbers that are not kept."""
        return [number for number in numbers if number not in self._states]

    def __getitem__(self, number: int) -> SlotState:
        return self._states[number]

    def keep(self, numbers: Sequence[int], states: Sequence[SlotState]) -> None:
        """Keeps states. Now and then one is measured, which costs more than to keep it."""
        self._states.update(zip(numbers, states, strict=True))
        self._in_order.extend(numbers)
        self._until_measured -= len(states)
        if self._until_measured < 0:
            self._size = _size_of(states[-1])
            self._until_measured = self._between = min(2 * self._between, _MAX_UNMEASURED)

    @contextmanager
    def keeping(self, oldest: int) -> Generator[None]:
        """Keeps states from this number on after the block, however it ends, and counts their bytes."""
        try:
            yield
        finally:
            numbers = self._in_order
            while numbers and numbers[0] < oldest:
                del self._states[numbers.popleft()]
            self._stats[_stats.STATE_BYTES] = len(self._states) * self._size


def pack(states: Iterable[SlotState]) -> list[bytes]:
    """Returns bytes that another process can read; raises `EnvStateError` for a state that can't leave."""
    packed: list[bytes] = []
    for state in states:
        try:
            packed.append(dumps(state))
        except Exception as error:
            raise EnvStateError(
                f"the state of env {state.slot} can't be pickled, so it can't leave its process: {error}; "
                "give States(functions=(get_state, set_state)) whose states can be pickled"
            ) from error
    return packed


def unpack(packed: bytes) -> SlotState:
    """Returns the state in these bytes.

    Raises:
        EnvStateError: they can't be unpickled here.
    """
    try:
        state: SlotState = pickle.loads(packed)
    except Exception as error:
        raise EnvStateError(
            f"the state can't be unpickled, so it can't enter this process: {type(error).__name__}: {error}; "
            "give States(functions=(get_state, set_state)) whose states can be unpickled"
        ) from error
    return state


def _size_of(state: SlotState) -> int:
    """Returns about how many bytes a state takes: as many as it has when it is pickled."""
    try:
        return len(dumps(state))
    except Exception:  # one that can't be pickled; it may be kept all the same
        return 0


# ----------------------------------------------------------------------------------------------------------
# The state of one env and of its wrappers as a value: taken, put back, and proved.
# ----------------------------------------------------------------------------------------------------------

__all__ = ["EnvState", "StateFunctions", "StatefulEnv"]

StateFunctions: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]

_ADVICE = (
    "Give the env methods get_state() and set_state(state) that take and put what is not in such attributes, "
    "pass States(functions=(get_state, set_state)), or wrap the env in jaxvec.adapters.replay.ReplayEnv"
)
_MAX_SHARED_NODES = 1000  # things that an env's states share; some envs make new ones in each reset
_GENERATOR = ("_np_random", "_np_random_seed")  # what a `gymnasium.Env` has beside a user's own state


class EnvState:
    """What `StatefulEnv.take` returns. It never changes, and pickles if what the env holds does.

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


class StatefulEnv:
    """An env with its wrappers, whose state can be taken and put back.

    Make it when the env was made, before its first reset: from then on the env notes what its state can't be
    told from, the actions that sticky ones of ALE may repeat.

    Attributes:
        env: the env.
    """

    def __init__(self, env: Env, functions: StateFunctions | None = None) -> None:
        """Takes an env.

        Args:
            env: with its wrappers.
            functions: the user's `(get_state, set_state)`; then they say all of the env within the wrappers,
                but for its `np_random`.
        """
        self.env = env
        self._functions = functions
        self._shared: Shared = {}
        self._look()
        watch_ale(self._layers[-1])

    def take(self) -> EnvState:
        """Returns the state of the env and its wrappers.

        It is what their attributes hold, and what those hold, random numbers among it. Where that is memory
        of MuJoCo or ALE, it is taken by their own ways; where an env has `get_state` and `set_state`, these
        are asked for the rest.

        Raises:
            EnvStateError: something is no value; names the attribute, and says what to do.
        """
        self._look_again()
        again = self._again
        if again is not None and (fields := again.take()) is not None:
            return EnvState(self._kinds, fields, None)
        if len(self._shared) > _MAX_SHARED_NODES:
            self._shared.clear()
        base, functions, methods = self._layers[-1], self._functions, self._methods
        taker = Taker(find, self._nodes.copy(), self._shared)
        taken: list[Fields] = []
        own: Any = None
        layer: Any = base
        try:
            for layer in self._layers:
                if layer is not base:
                    taken.append(take_layer(taker, layer))
                elif functions is not None:
                    held = {name: vars(base)[name] for name in _GENERATOR if name in vars(base)}
                    taken.append(({}, {name: taker.value(value) for name, value in held.items()}, -1))
                    own = taker.value(functions[0](self.env))
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
        if again is not None:
            again.note(taken)
        return EnvState(self._kinds, taken, own)

    def put(self, state: EnvState) -> bool:
        """Has the env go on from a state, as often as you like.

        The env and its wrappers stay the objects that they are, so windows, the memory that
        `set_observation_buffer` gave, and whatever refers to them stay theirs.

        Args:
            state: of this env, or of another that the same function made.

        Returns:
            Whether env and wrappers have the same attributes as before, with other values.

        Raises:
            EnvStateError: the state is that of an env of another class, or with other wrappers.
        """
        self._look_again()
        layers = self._layers
        if self._kinds != state.kinds:
            raise EnvStateError(
                f"a state of {' of '.join(state.kinds)} can't be put into {' of '.join(self._kinds)}; "
                "restore states into envs that the same function made"
            )
        if self._again is not None and self._again.put(state.layers):
            return True
        base = layers[-1]
        putter = Putter(layers)
        try:
            # First what others do, so that what the attributes say is the last word.
            if self._functions is not None:
                self._functions[1](self.env, putter.value(state.own, None))
            elif self._methods is not None:
                self._methods[1](base, putter.value(state.own, None))
            for layer, fields in zip(layers, state.layers, strict=True):
                put_layer(putter, layer, fields)
        except CannotCopy as error:
            raise EnvStateError(
                f"a state of {type(base).__name__} can't be put back: {error.what}. {error.advice or _ADVICE}"
            ) from error
        return False

    def prove(self, *, fresh: bool = False, num_steps: int = 40) -> None:
        """Raises unless the env goes on from a state as it did before, however far it went in between.

        It takes a state, steps the env with random actions, takes another half-way, and resets the env with
        other seeds and steps it. Then it puts each state back, and a copy that was pickled if that is
        possible, steps the env with the same actions, and compares all results bit for bit. The env is left
        in the state that it was in.

        Args:
            fresh: it was never reset, or its episode is over, so it is reset first.
            num_steps: to compare; resets that they need come on top.

        Raises:
            EnvStateError: a state can't be taken, or results differ; says which, and which attribute did.
        """
        env, before = self.env, self.take()
        actions = copy.deepcopy(env.action_space)
        actions.seed(0)
        chosen = [actions.sample() for _ in range(num_steps)]
        try:
            if fresh:
                _reset(env, 0)
            began = self.take()
            first = self._play(chosen[: num_steps // 2])
            later = self.take()  # what has just begun may have nothing to lose
            played = [first, self._play(chosen[num_steps // 2 :])]
            for seed in (1, 2):  # elsewhere, where an env has another map or other bodies
                _reset(env, seed)
                self._play(first.actions)
            points = (began, played), (later, played[1:])
            for state, parts in points:
                self.put(state)
                _compare_states(env, self.take(), state)
                self._repeat(parts, "")
            for state, parts in points:  # last: it may write classes of a script anew, whose objects they are
                if (copied := _pickled(state)) is not None:
                    self.put(copied)
                    self._repeat(parts, "that was pickled ")
        finally:
            self.put(before)

    def _look(self) -> None:
        """Looks which wrappers there are."""
        self._layers = _layers(self.env)
        self._pairs = tuple(itertools.pairwise(self._layers))
        self._kinds = tuple(map(_kind, self._layers))
        self._methods = None if self._functions is not None else _own_methods(type(self._layers[-1]))
        # Of those whose attributes say all.
        self._again = (
            IncrementalSnapshot(self._layers) if self._functions is None and self._methods is None else None
        )
        self._nodes: dict[int, Any] = dict(
            zip(map(id, self._layers), layer_nodes(len(self._layers)), strict=True)
        )

    def _look_again(self) -> None:
        for outer, inner in self._pairs:
            if outer.env is not inner:
                self._look()
                return

    def _play(self, actions: list[Any]) -> _Played:
        """Steps the env, and resets it where an episode ends."""
        results: list[list[Any]] = []
        states: list[EnvState] = []
        for action in actions:
            try:
                result: Any = self.env.step(copy.deepcopy(action))
                ended = bool(result[2] or result[3])
            except Exception as error:  # it does not like each action of its space; it says so again
                result, ended = (type(error).__name__, str(error)), True
            results.append([_value(result)])
            if ended:
                results[-1].append(_value(self.env.reset()))
            if len(states) < 3:
                states.append(self.take())
        return _Played(actions, results, states)

    def _repeat(self, parts: Sequence[_Played], which: str) -> None:
        """Plays again, and raises if anything differs."""
        done = 0
        for played in parts:
            _compare(self.env, played, self._play(played.actions), done, which)
            done += len(played.actions)


@dataclass(frozen=True)
class _Played:
    """What an env did.

    Attributes:
        actions: of its steps.
        results: of each action, as values: of the step, and of the reset if that ended an episode.
        states: after the first few.
    """

    actions: list[Any]
    results: list[list[Any]]
    states: list[EnvState]


def _value(result: Any) -> Any:
    return Taker(find, {}, {}, lenient=True).value(result)


def _reset(env: Env, seed: int) -> None:
    try:
        env.reset(seed=seed)
    except Exception:  # it takes no seed
        env.reset()


_NAMES = {2: ("obs", "info"), 5: ("obs", "reward", "terminated", "truncated", "info")}


def _compare(env: Env, first: _Played, again: _Played, done: int, which: str) -> None:
    for number, (ones, others) in enumerate(zip(first.results, again.results, strict=True), start=1):
        # `map` ends with the shorter one: that only one has a reset, too, is said by the steps before it.
        for field, mine, its in itertools.chain.from_iterable(map(_fields_of, ones, others)):
            where = difference(mine, its)
            if where is None:
                continue
            states = zip(first.states[:number], again.states, strict=False)
            attribute = next(filter(None, (_attribute(*pair) for pair in states)), None)
            named = f"; the attribute {attribute} did, too" if attribute else ""
            raise EnvStateError(
                f"{type(env.unwrapped).__name__} does not go on from its state {which}as it did before: "
                f"after {done + number} of the same actions, {field}{where} differs{named}. Some of its "
                f"state is not in its attributes; {_SOMETHING}. {_ADVICE}"
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
        return pickle.loads(dumps(state))
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
