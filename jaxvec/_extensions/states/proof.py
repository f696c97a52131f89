"""The proof that an env continues exactly from its states, and the forked child in which it is made."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxvec import _stats
from jaxvec._errors import EnvStateError
from jaxvec._extensions.states.env_states import ADVICE, EnvSnapshot, StatefulEnv
from jaxvec._extensions.states.snapshots import nodes
from jaxvec._extensions.states.snapshots.pickling import unpickled
from jaxvec._extensions.states.snapshots.snapshot import difference, find

# --- The proof -------------------------------------------------------------------------------------------


def prove(
    stateful: StatefulEnv,
    *,
    fresh: bool = False,
    copied: EnvSnapshot | None = None,
    num_steps: int = 40,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Verifies that an env continues from a restored state exactly as it did before.

    It saves a state, steps with random actions, saves another half-way, resets with other seeds and steps
    again. Then it restores each state, repeats the actions, and compares all results bit for bit. At the end,
    the env has the same state as at the start. With `fresh`, it resets the env first, because it was never
    reset or its episode is over. With a state `copied`, it starts from that, and restores pickled copies of
    the states, as another process would. Restored sets have another order, as a copy of a set may have. It
    calls `progress` after each step and reset.

    Raises:
        EnvStateError: A state can't be saved or restored, or results differ. The message names the attribute
            that differs, too, if there is one.
    """
    env = stateful.env
    before = stateful.save()
    name = type(stateful.env.unwrapped).__name__
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    actions = [space.sample() for _ in range(num_steps)]

    def play(actions: Sequence[Any], num_states: int = 0) -> Recording:
        recording = Recording(stateful, progress, num_states)
        for action in actions:
            try:
                result = recording.step(copy.deepcopy(action))
                ended = bool(result[2] or result[3])
            except (Exception, SystemExit):  # not every action of the space is valid; compare errors
                ended = True
            if ended:
                recording.reset()
        return recording

    try:
        if fresh:
            _reset(env, 0)
        if copied is not None:
            stateful.restore(copied)
        start = stateful.save()
        first = play(actions[: num_steps // 2], _NUM_STATES)
        half_way = stateful.save()  # at the start of an episode, some envs have no state yet to lose
        played = [first, play(actions[num_steps // 2 :], _NUM_STATES)]
        for seed in (1, 2):  # other seeds may produce another map or other bodies
            _reset(env, seed)
            play(actions[: num_steps // 2])
        for state, parts in ((start, played), (half_way, played[1:])):
            if copied is not None:
                state = unpickled(state)
                stateful.restore(state, reorders=True)
                _repeat(state, parts, f"{name} from a pickled copy of its state")
                continue
            stateful.restore(state, reorders=True)
            # Ignores `own`: two results of `get_state` may differ in form until the next step.
            now, saved = (EnvSnapshot(one.kinds, one.layers, None) for one in (stateful.save(), state))
            if (attribute := _differing_attribute(now, saved)) is not None:
                raise EnvStateError(f"cannot restore {name}: {attribute} differs after the restore. {ADVICE}")
            del now
            _repeat(state, parts, name)
    finally:
        stateful.restore(before)


_NUM_STATES = 3  # states of a recording


class Recording:
    """The calls of an env and their results, when it is stepped and reset through this object."""

    def __init__(self, stateful: StatefulEnv, progress: Callable[[], None], num_states: int) -> None:
        self.stateful = stateful
        self.progress = progress
        self._num_states = num_states
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # method and arguments
        self.results: list[Any] = []  # a snapshot of each result
        self.states: list[EnvSnapshot] = []  # after the first calls, to name an attribute that differs

    def step(self, action: Any) -> Any:
        return self._call("step", (action,), {})

    def reset(self, **kwargs: Any) -> Any:
        return self._call("reset", (), kwargs)

    def replay(self, num_states: int = 0) -> Recording:
        """Makes the same calls once more, and returns a recording of them."""
        again = Recording(self.stateful, self.progress, num_states)
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
        finally:
            self.progress()
        self.results.append(_value(result))
        if len(self.states) < self._num_states:
            with suppress(EnvStateError):
                state = self.stateful.save()
                self.states.append(_without_equals(state, self.states[-1]) if self.states else state)
        return result


def _repeat(state: EnvSnapshot, parts: Sequence[Recording], name: str) -> None:
    """Repeats the calls of recordings from a restored state; raises `EnvStateError` if a result differs."""
    steps = 0
    for position, first in enumerate(parts):
        again = first.replay()
        for number, results in enumerate(zip(first.results, again.results, strict=False)):
            steps += first.calls[number][0] == "step"
            where = _differing_result(*results)
            if where is None:
                continue
            # Repeats them once more with states, as few envs need these, and they may be large.
            first.stateful.restore(state, reorders=True)
            *_, again = [part.replay(_NUM_STATES) for part in parts[: position + 1]]
            states = zip(first.states[: number + 1], again.states, strict=False)
            attribute = next(filter(None, itertools.starmap(_differing_attribute, states)), None)
            named = f"; attribute {attribute} differs, too" if attribute else ""
            raise EnvStateError(
                f"Restoring {name} did not reproduce it: after {steps} identical actions, "
                f"{where} differs{named}. Some of its state is not in its attributes, but perhaps in a "
                "global variable or generator (random, np.random), in memory of a C library, in a clock, or "
                f"in the order of a set, which no copy has: sort it. {ADVICE}"
            )


def _value(result: Any) -> Any:
    return nodes.save_again(
        lambda: nodes.Saver(find, {}, {}, walked=None, lenient=True, by_value=True).value(result)
    )


def _reset(env: Any, seed: int) -> None:
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
            mine = _without_times(mine)
            its = _without_times(its)
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


def _differing_attribute(one: EnvSnapshot, other: EnvSnapshot) -> str | None:
    """Returns the first attribute in which two states of an env differ; `None` if they are equal."""
    for kind, mine, its in zip(one.kinds, one.layers, other.layers, strict=True):
        for name, value, its_value in nodes.compare_fields(mine, its):
            where = difference(value, its_value)
            if where is not None:
                return f"{kind.rpartition('.')[2]}{name}{where}"
    where = difference(one.own, other.own)
    return None if where is None else f"get_state(){where}"


def _without_equals(state: EnvSnapshot, before: EnvSnapshot) -> EnvSnapshot:
    """Returns a state that shares unchanged attributes, which may be large, with an earlier one."""
    if state.kinds != before.kinds:
        return state
    layers: list[nodes.Fields] = []
    for (atoms, mine, names), (_, its, _) in zip(state.layers, before.layers, strict=True):
        shared = {
            name: its[name] if name in its and difference(node, its[name]) is None else node
            for name, node in mine.items()
        }
        layers.append((atoms, shared, names))
    return EnvSnapshot(state.kinds, layers, state.own)


# --- The forked child, which leaves the env and everything that it can reach untouched -------------------

_PATIENCE = 5.0  # seconds without progress and without work, that is: of waiting
_BUSY_PATIENCE = 300.0  # seconds of work without progress
_LOOK_INTERVAL = 0.25  # seconds
_PROGRESS = b"."  # no pickle starts with it


class ForkedProcessEnded(EnvStateError):
    """The forked process that stepped an env ended by itself, so nothing is known about the state."""


def call_in_fork(function: Callable[[Callable[[], None]], Any], env: Any, seconds: float) -> Any:
    """Calls a function in a forked child of this process, a worker; returns its result or raises its error.

    The function gets a function `progress`, and may wait for `seconds` between two calls of that.

    Raises:
        ForkedProcessEnded: `env`, which the function steps, has ended the child.
        EnvStateError: The function raised or hangs.
    """
    name = type(env.unwrapped).__name__
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads of libraries, since Python 3.12
        child = os.fork()
    if child == 0:  # in the worker's process group, so it does not outlive the worker
        with suppress(BaseException), open(writer, "wb") as file:

            def progress() -> None:
                file.write(_PROGRESS)
                file.flush()

            file.write(_outcome_of(lambda: function(progress)))
        os._exit(0)
    try:
        os.close(writer)
        with open(reader, "rb", buffering=0) as file:
            result = _read(file, child, seconds)
    except BaseException as error:  # also a signal
        os.kill(child, signal.SIGKILL)
        if isinstance(error, TimeoutError):
            raise EnvStateError(
                f"cannot verify the state of {name}: a forked copy of the worker, which steps a copy of the "
                f"env, made no progress for {seconds:.0f} s. {_threads()}"
            ) from None
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not result:
        code = os.waitstatus_to_exitcode(status)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise ForkedProcessEnded(
            f"cannot verify the state of {name}: the forked process that stepped the env ended with {how}. "
            f"{ADVICE}"
        )
    error, value = pickle.loads(result)
    if error is not None:
        raise error
    return value


def jax_has_threads() -> bool:
    """Returns True if JAX has computed in this process, so that it may hang in a fork."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return getattr(bridge, "backends_are_initialized", bool)()  # the name is private


def patience(stats: memoryview) -> float:
    """Returns the seconds for a step or reset in a child: ten times their mean time, and a few more."""
    steps = max(stats[_stats.STEPS], 1)
    resets = max(stats[_stats.RESETS], 1)
    return _PATIENCE + 10 * (stats[_stats.STEP_NS] / steps + stats[_stats.RESET_NS] / resets) / 1e9


def _read(file: io.FileIO, child: int, seconds: float) -> bytes:
    """Returns what a child writes, without its progress.

    Raises:
        TimeoutError: The child has waited for `seconds`, or worked for a long time, without progress.
    """
    parts: list[bytes] = []
    alive = active = time.monotonic()
    used = 0
    while True:
        if select.select([file], [], [], _LOOK_INTERVAL)[0]:
            if not (part := file.read(1 << 20)):
                return b"".join(parts).lstrip(_PROGRESS)
            parts.append(part)
            alive = active = time.monotonic()
        elif (now_used := _cpu_time(child)) != used:  # on a busy machine, it may get little
            used = now_used
            active = time.monotonic()
        if time.monotonic() > min(active + seconds, alive + max(seconds, _BUSY_PATIENCE)):
            raise TimeoutError


def _cpu_time(pid: int) -> int:
    """Returns the CPU time of a process in clock ticks; 0 if it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _threads() -> str:
    """Returns a sentence about the threads of this process, which a fork lacks."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    count = len(names)
    with suppress(OSError):  # also those of C libraries
        count = len(os.listdir("/proc/self/task")) - 1
    if not count:
        return (
            "Perhaps it waits for a lock, or for another process that answers only the original. Such an env "
            "can't be saved; leave out states"
        )
    named = f" ({', '.join(names)})" if names else ", of libraries in C"
    return (
        f"The worker has {count} more thread{'s' * (count > 1)}{named}, and a forked copy has none of them. "
        "Such an env can't be saved while it needs them. Start them within a step and join them there, or "
        "limit the library to one thread, as torch.set_num_threads(1) does"
    )


def _outcome_of(function: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((None, function()))
    except EnvStateError as error:
        return pickle.dumps((EnvStateError(*error.args), None))
    except BaseException as error:
        what = f"cannot verify the state: the env raised {type(error).__name__}: {error}"
        return pickle.dumps((EnvStateError(what), None))
