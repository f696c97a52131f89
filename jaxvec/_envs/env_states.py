"""Saved states of envs: how one is saved, restored and verified, and the table of those that a worker keeps.

    env and its wrappers --StatefulEnv.save--> EnvState --+
    episode, seed, options, info of the slot -------------+--> SlotState --SavedStates.add--> table, by number

`StatefulEnv.restore` restores an `EnvState` into the same env, or into another of the same constructor.
`_snapshots/` copies the attributes. The parent keeps each state's row of the segment.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import pickle
import signal
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import gymnasium

from jaxvec import _stats
from jaxvec._envs.envs import Env
from jaxvec._errors import EnvStateError
from jaxvec._snapshots import nodes
from jaxvec._snapshots.ale import watch_ale
from jaxvec._snapshots.digests import Digest, DigestTaker
from jaxvec._snapshots.pickling import dumps
from jaxvec._snapshots.snapshot import IncrementalSnapshot, difference, find
from jaxvec._spec import KeyPath

# --- The states that a slice keeps, by number ------------------------------------------------------------

_MAX_UNMEASURED = 1024  # states between two measurements of their size


class SlotState(NamedTuple):
    """Everything that determines the future of a slot, except its row of the segment, which the parent keeps.

    It can be restored into any env that the same function built.
    """

    slot: int  # the slot that it was saved from
    env: EnvState  # of the env and its wrappers
    episode: tuple[int, Any, int]  # from `Episodes.save`
    resets: tuple[int, int | None, Any]  # from `SlotEnvs.save`
    info: dict[str, Any]  # the raw info of the last reset or step
    is_final: bool  # True if the row contains the last step of an episode
    objects: dict[KeyPath, Any]  # the leaves of the row that are Python objects


@dataclass(frozen=True)
class LostStates:
    """Reply to a request that was not carried out, because these states were lost with an earlier worker."""

    numbers: list[int]


class SavedStates:
    """The states of a slice by number. The parent assigns the numbers in increasing order, each once."""

    def __init__(self, stats: memoryview) -> None:
        self.by_number: dict[int, SlotState] = {}
        self._in_order: deque[int] = deque()  # the numbers
        self._stats = stats  # the worker's row of statistics
        self._size, self._until_measured, self._between = 0, 0, 1

    def missing(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if number not in self.by_number]

    def __getitem__(self, number: int) -> SlotState:
        return self.by_number[number]

    def add(self, numbers: Sequence[int], states: Sequence[SlotState]) -> None:
        self.by_number.update(zip(numbers, states, strict=True))
        self._in_order.extend(numbers)
        # Measuring a state costs more than keeping it, so it is done less and less often.
        self._until_measured -= len(states)
        if self._until_measured < 0:
            self._until_measured = self._between = min(2 * self._between, _MAX_UNMEASURED)
            try:
                self._size = len(dumps(states[-1]))
            except Exception:  # a state that can't be pickled can still be kept
                self._size = 0

    @contextmanager
    def evicting(self, oldest: int) -> Generator[None]:
        """After the block, even if it fails, removes states with numbers below `oldest`, and counts bytes."""
        try:
            yield
        finally:
            numbers = self._in_order
            while numbers and numbers[0] < oldest:
                del self.by_number[numbers.popleft()]
            self._stats[_stats.STATE_BYTES] = len(self.by_number) * self._size


def pack(states: Iterable[SlotState]) -> list[bytes]:
    """Pickles states for another process; raises `EnvStateError` if that fails."""
    packed: list[bytes] = []
    for state in states:
        try:
            packed.append(dumps(state))
        except Exception as error:
            raise EnvStateError(
                f"the state of env {state.slot} can't be pickled, so it can't leave its process: {error}; "
                "pass States(functions=(get_state, set_state)) with states that can be pickled"
            ) from error
    return packed


def unpack(packed: bytes) -> SlotState:
    """Unpickles a state; raises `EnvStateError` if that fails."""
    try:
        state: SlotState = pickle.loads(packed)
    except Exception as error:
        raise EnvStateError(
            f"the state can't be unpickled in this process: {type(error).__name__}: {error}; "
            "pass States(functions=(get_state, set_state)) with states that can be unpickled"
        ) from error
    return state


# --- The state of one env and its wrappers ---------------------------------------------------------------

StateFunctions: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]

_ADVICE = (
    "Give the env methods get_state() and set_state(state) that save and restore the rest of its state, pass "
    "States(functions=(get_state, set_state)), or wrap the env in jaxvec.adapters.replay.ReplayEnv"
)
_MAX_SHARED_NODES = 1000  # nodes that the states of an env share; some envs make new ones in each reset
_GENERATOR = ("_np_random", "_np_random_seed")  # attributes that `gymnasium.Env` adds to a user's own


@dataclass(slots=True, eq=False)
class EnvState:
    """The result of `StatefulEnv.save`, which does not change. It pickles if everything in the env does."""

    kinds: tuple[str, ...]  # the names of the classes of the wrappers, outermost first, and of the env
    layers: list[nodes.Fields]  # the attributes of each of them
    own: Any  # a snapshot of the result of `get_state`; `None` without such a method
    # Of the env that it was saved from, until a restore in another process has been compared with it.
    original: Digest | None = None


class StatefulEnv:
    """An env that can save its own state, with that of its wrappers, and restore it.

    Create it before the env's first reset: from then on it records the actions that ALE may repeat (sticky
    actions), which are in no attribute.
    """

    def __init__(
        self, env: Env, functions: StateFunctions | None = None, trust: tuple[type, ...] = ()
    ) -> None:
        """Starts to observe an env. The user's `functions` replace its attributes, except `np_random`.

        `trust` are classes to copy by their own protocol.
        """
        self.env = env
        self._functions = functions
        self._trust = trust
        self._shared: nodes.Shared = {}
        self._walked: set[int] = set()  # ids of containers with parts that are also reached from elsewhere
        self._find_layers()
        watch_ale(self._layers[-1])

    def save(self) -> EnvState:
        """Returns the state of the env and its wrappers.

        It contains their attributes and all objects that these refer to, random generators included. MuJoCo
        and ALE save their own memory. If the env has `get_state` and `set_state`, these save whatever can't
        be copied.

        Raises:
            EnvStateError: Something can't be copied. The message names the attribute and suggests what to do.
        """
        if self._incremental is not None and (changed := self._incremental.save()) is not None:
            return EnvState(self._kinds, changed, None)
        self._update_layers()
        if len(self._shared) > _MAX_SHARED_NODES:
            self._shared.clear()
        fields, own = nodes.save_again(self._walk, self._walked)
        if self._incremental is not None:
            self._incremental.note(fields)
        return EnvState(self._kinds, fields, own)

    def _walk(self, first: dict[int, Any]) -> tuple[list[nodes.Fields], Any]:
        """Saves the attributes of each layer, and the result of `get_state`."""
        base, functions, methods = self._layers[-1], self._functions, self._methods
        saver = nodes.Saver(
            find, self._nodes.copy(), self._shared, walked=self._walked, first=first, trust=self._trust
        )
        for layer in self._layers:  # any attribute may hold `vars` of a layer
            saver.owners[id(vars(layer))] = self._nodes[id(layer)]
        layers: list[nodes.Fields] = []
        own: Any = None
        layer: Any = base
        try:
            for layer in self._layers:
                if layer is not base:
                    layers.append(nodes.save_layer(saver, layer))
                elif functions is not None:
                    held = {name: vars(base)[name] for name in _GENERATOR if name in vars(base)}
                    layers.append(({}, {name: saver.value(value) for name, value in held.items()}, None))
                    own = saver.value(functions[0](self.env))
                elif methods is None:
                    layers.append(nodes.save_layer(saver, base))
                else:
                    if isinstance(base, gymnasium.Wrapper):
                        layers.append(nodes.NOTHING)  # its `get_state` covers the env inside, too
                    else:
                        saver.lenient = True
                        layers.append(nodes.save_layer(saver, base))
                        saver.lenient = False
                    own = saver.value(methods[0](base))
        except nodes.CannotCopy as error:
            path = f"{type(layer).__name__}." + "".join(
                name if name.startswith("[") or not number else f".{name}"
                for number, name in enumerate(error.path)
            )
            # The reason is "it is an open file", or a sentence with a subject of its own.
            reason = error.what[2:] if error.what.startswith("it is ") else f": {error.what}"
            raise EnvStateError(
                f"cannot save {type(base).__name__}: attribute {path}{reason}. {error.advice or _ADVICE}"
            ) from error
        return layers, own

    def digest(self, state: EnvState | None = None) -> Digest:
        """Returns the digest of the env, with which another process compares its own; restores `state` first.

        Raises:
            EnvStateError: The env refers to something that can't be compared in another process.
        """
        if state is not None:
            self._restore(state)
        return self._take_digest().result()

    def _take_digest(self) -> DigestTaker:
        """Walks through all that `save` saves, except the result of `get_state`."""
        self._update_layers()
        base = self._layers[-1]
        taker = DigestTaker(self._layers, self._trust)
        try:
            for layer in self._layers:
                if layer is not base or (self._functions is None and self._methods is None):
                    taker.layer(layer)
                elif self._functions is not None:
                    taker.layer(base, _GENERATOR)
                elif not isinstance(base, gymnasium.Wrapper):
                    taker.layer(base, lenient=True)
        except (nodes.CannotCopy, RecursionError) as error:
            where = ".".join(getattr(error, "path", ()))
            raise EnvStateError(
                f"cannot move a {type(base).__name__} to another process: attribute {where} can't be "
                f"compared there: {error}. {_ADVICE}"
            ) from error
        return taker

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the classes of the wrappers, outermost first, and of the env, as they are now."""
        self._update_layers()
        return self._kinds

    def restore(self, state: EnvState) -> bool:
        """Restores a state of this env, or of another that the same function built; it may be used again.

        Values are written into the existing objects, because windows, observation buffers and closures may
        refer to them. Returns whether env and wrappers have the same attributes as before, with other values.

        Raises:
            EnvStateError: The state is that of an env of another class, or with other wrappers. Or it comes
                from another process, and the env would differ from the original: it is then as before.
        """
        if state.original is None:
            return self._restore(state)
        before = self.save()
        try:
            self.compare(state)
        except BaseException:
            self._restore(before)
            raise
        state.original = None  # further restores are as those of its own process
        return False

    def compare(self, state: EnvState) -> None:
        """Restores a state from another process, and compares the env with the original.

        Raises:
            EnvStateError: The state can't be restored, or the env differs from the original.
        """
        self._restore(state)
        differs = None if state.original is None else self._take_digest().difference(state.original)
        if differs is not None:
            raise EnvStateError(
                f"cannot move a {type(self._layers[-1]).__name__} to another process: {differs} would not be "
                f"as in the original. {_ADVICE}"
            )

    def _restore(self, state: EnvState) -> bool:
        compiled = self._incremental if self._kinds == state.kinds else None
        if compiled is not None and compiled.restore(state.layers):
            return True
        kinds = self.kinds  # updates the layers
        layers = self._layers
        if kinds != state.kinds:
            raise EnvStateError(
                f"cannot restore a state of {' of '.join(state.kinds)} into {' of '.join(kinds)}; "
                "restore it into an env that the same function made"
            )
        base = layers[-1]
        restorer = nodes.Restorer(layers)
        try:
            # `set_state` first, so that the saved attributes overwrite its side effects.
            if self._functions is not None:
                self._functions[1](self.env, restorer.value(state.own, None))
            elif self._methods is not None:
                self._methods[1](base, restorer.value(state.own, None))
            for layer, fields in zip(layers, state.layers, strict=True):
                nodes.restore_layer(restorer, layer, fields)
        except nodes.CannotCopy as error:
            raise EnvStateError(
                f"cannot restore {type(base).__name__}: {error.what}. {error.advice or _ADVICE}"
            ) from error
        return False

    def verify(self, *, fresh: bool = False, num_steps: int = 40) -> None:
        """Verifies that the env continues from a restored state exactly as it did before.

        It saves a state, steps with random actions, saves another half-way, resets with other seeds and
        steps again. Then it restores each state, and a pickled copy of it if possible, repeats the actions,
        and compares all results bit for bit. At the end, the env has the same state as at the start. With
        `fresh`, it resets the env first, because it was never reset or its episode is over.

        Raises:
            EnvStateError: A state can't be saved or restored, or results differ. The message names the
                attribute that differs, too, if there is one.
        """
        env, before, name = self.env, self.save(), type(self.env.unwrapped).__name__
        space = copy.deepcopy(env.action_space)
        space.seed(0)
        actions = [space.sample() for _ in range(num_steps)]
        try:
            if fresh:
                _reset(env, 0)
            start = self.save()
            first = self._play(actions[: num_steps // 2])
            half_way = self.save()  # at the start of an episode, some envs have no state yet to lose
            played = [first, self._play(actions[num_steps // 2 :])]
            for seed in (1, 2):  # other seeds may produce another map or other bodies
                _reset(env, seed)
                self._play(actions[: num_steps // 2])
            points = (start, played), (half_way, played[1:])
            for state, parts in points:
                self.restore(state)
                # Ignores `own`: two results of `get_state` may differ in form until the next step.
                now, saved = (EnvState(one.kinds, one.layers, None) for one in (self.save(), state))
                if (attribute := _differing_attribute(now, saved)) is not None:
                    raise EnvStateError(
                        f"cannot restore {name}: {attribute} differs after the restore. {_ADVICE}"
                    )
                self._repeat(parts, name)
            for state, parts in points:
                if (copied := _pickled(state)) is not None:
                    self.restore(copied)
                    self._repeat(parts, f"{name} from a pickled state")
        finally:
            self.restore(before)

    def _find_layers(self) -> None:
        self._layers = _layers(self.env)
        self._pairs = tuple(itertools.pairwise(self._layers))
        self._classes = tuple(map(type, self._layers))
        self._kinds = tuple(map(_name_of, self._classes))
        self._methods = None if self._functions is not None else _own_methods(type(self._layers[-1]))
        # The incremental snapshot covers attributes only.
        attributes_only = self._functions is None and self._methods is None
        self._incremental = IncrementalSnapshot(self._layers) if attributes_only else None
        self._nodes: dict[int, Any] = dict(
            zip(map(id, self._layers), nodes.layer_nodes(len(self._layers)), strict=True)
        )

    def _update_layers(self) -> None:
        # User code may insert and remove wrappers, and change the class of an env.
        wraps = all(outer.env is inner for outer, inner in self._pairs)
        if not wraps or tuple(map(type, self._layers)) != self._classes:
            self._find_layers()

    def _play(self, actions: list[Any]) -> Recording:
        """Steps the env, and resets it at the end of each episode."""
        recording = Recording(self)
        for action in actions:
            try:
                result = recording.step(copy.deepcopy(action))
                ended = bool(result[2] or result[3])
            except (Exception, SystemExit):  # not every action of the space is valid; compare errors
                ended = True
            if ended:
                recording.reset()
        return recording

    def _repeat(self, parts: Sequence[Recording], name: str) -> None:
        """Repeats the calls of recordings, and raises `EnvStateError` if a result differs."""
        steps = 0
        for first in parts:
            again = first.replay()
            for number, results in enumerate(zip(first.results, again.results, strict=False)):
                steps += first.calls[number][0] == "step"
                where = _differing_result(*results)
                if where is None:
                    continue
                states = zip(first.states[: number + 1], again.states, strict=False)
                attribute = next(filter(None, itertools.starmap(_differing_attribute, states)), None)
                named = f"; attribute {attribute} differs, too" if attribute else ""
                raise EnvStateError(
                    f"Restoring {name} did not reproduce it: after {steps} identical actions, "
                    f"{where} differs{named}. Some of its state is not in its attributes, but perhaps in a "
                    "global variable or generator (random, np.random), in memory of a C library, or in a "
                    f"clock. {_ADVICE}"
                )


class Recording:
    """The calls of an env and their results, when it is stepped and reset through this object."""

    def __init__(self, stateful: StatefulEnv) -> None:
        self.stateful = stateful
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # method and arguments
        self.results: list[Any] = []  # a snapshot of each result
        self.states: list[EnvState] = []  # after the first few calls, to name an attribute that differs

    def step(self, action: Any) -> Any:
        return self._call("step", (action,), {})

    def reset(self, **kwargs: Any) -> Any:
        return self._call("reset", (), kwargs)

    def replay(self) -> Recording:
        """Makes the same calls once more, and returns a recording of them."""
        again = Recording(self.stateful)
        for call in self.calls:
            with suppress(Exception, SystemExit):
                again._call(*copy.deepcopy(call))
        return again

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(copy.deepcopy((method, args, kwargs)))
        try:
            result = getattr(self.stateful.env, method)(*args, **kwargs)
        except (Exception, SystemExit) as error:
            self.results.append(_value((type(error).__name__, str(error))))
            raise
        self.results.append(_value(result))
        if len(self.states) < 3:
            with suppress(EnvStateError):
                self.states.append(self.stateful.save())
        return result


def _value(result: Any) -> Any:
    walked: set[int] = set()

    def walk(first: dict[int, Any]) -> Any:
        return nodes.Saver(find, {}, {}, walked=walked, first=first, lenient=True).value(result)

    return nodes.save_again(walk, walked)


def _reset(env: Env, seed: int) -> None:
    try:
        env.reset(seed=seed)
    except Exception:  # the env takes no seed
        env.reset()


_NAMES = {2: ("obs", "info"), 5: ("obs", "reward", "terminated", "truncated", "info")}


def _differing_result(first: Any, again: Any) -> str | None:
    """Returns the first field in which two results of a call differ; `None` if they are equal."""
    one, other = (getattr(result, "items", result) for result in (first, again))
    names = _NAMES.get(len(one), ("",) * len(one))
    if len(one) != len(other):  # one of them is an error
        return "the result"
    for name, mine, its in zip(names, one, other, strict=True):
        if name == "info":
            mine, its = _without_times(mine), _without_times(its)
        where = difference(mine, its)
        if where is not None:
            return f"{name}{where}"
    return None


def _without_times(info: Any) -> Any:
    """Removes the wall-clock time that Gymnasium's `RecordEpisodeStatistics` adds to an info."""
    pairs = getattr(info, "pairs", ())
    return {
        key: {k: v for k, v in item.pairs if k != "t"}
        if key == "episode" and hasattr(item, "pairs")
        else item
        for key, item in pairs
        if not isinstance(key, nodes.Node)
    }


def _differing_attribute(one: EnvState, other: EnvState) -> str | None:
    """Returns the first attribute in which two states of an env differ; `None` if they are equal."""
    for kind, mine, its in zip(one.kinds, one.layers, other.layers, strict=True):
        for name, value, its_value in nodes.compare_fields(mine, its):
            where = difference(value, its_value)
            if where is not None:
                return f"{kind.rpartition('.')[2]}{name}{where}"
    where = difference(one.own, other.own)
    return None if where is None else f"get_state(){where}"


def _pickled(state: EnvState) -> EnvState | None:
    try:
        return pickle.loads(dumps(state))
    except Exception:  # an error only if the state has to leave this process
        return None


def _layers(env: Any) -> list[Any]:
    """Returns the wrappers, outermost first, and the env. A wrapper with `get_state` counts as the env."""
    layers = [env]
    while isinstance(env, gymnasium.Wrapper) and _own_methods(type(env)) is None:
        env = env.env
        layers.append(env)
    return layers


@cache
def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def _own_methods(kind: type) -> Any:
    """Returns `get_state` and `set_state` of a class; `None` without such a pair."""
    methods = getattr(kind, "get_state", None), getattr(kind, "set_state", None)
    return methods if _accepts(methods[0], 1) and _accepts(methods[1], 2) else None


def _accepts(method: Any, count: int) -> bool:
    try:
        inspect.signature(method).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True


# --- The verification in a forked child, which leaves the env and everything that it can reach untouched


class ForkedProcessEnded(EnvStateError):
    """The forked process that stepped an env ended by itself, so nothing is known about the state."""


def call_in_fork(function: Callable[[], Any], env: Any) -> Any:
    """Calls a function in a forked child of this process, a worker; returns its result or raises its error.

    Raises:
        ForkedProcessEnded: `env`, which the function steps, has ended the child.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads of libraries, since Python 3.12
        child = os.fork()
    if child == 0:  # in the worker's process group, so it does not outlive the worker
        with suppress(BaseException), open(writer, "wb") as file:
            file.write(_outcome_of(function))
        os._exit(0)
    try:
        os.close(writer)
        with open(reader, "rb") as file:
            result = file.read()
    except BaseException:  # such as a signal
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not result:
        code = os.waitstatus_to_exitcode(status)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise ForkedProcessEnded(
            f"cannot verify the state of {type(env.unwrapped).__name__}: the forked process that stepped the "
            f"env ended with {how}. {_ADVICE}"
        )
    error, value = pickle.loads(result)
    if error is not None:
        raise error
    return value


def _outcome_of(function: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((None, function()))
    except EnvStateError as error:
        return pickle.dumps((EnvStateError(*error.args), None))
    except BaseException as error:
        what = f"cannot verify the state: the env raised {type(error).__name__}: {error}"
        return pickle.dumps((EnvStateError(what), None))
