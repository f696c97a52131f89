"""The options of a pool, as validated records.

`PoolConfig` has all options of `jaxvec.make` that do not need JAX. `Restart`, `Workers`, `States` and
`Timeouts` group some of them.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from jaxvec._leaves import MaxSizes
from jaxvec._settings import Config, check_choice, check_count, config
from jaxvec._spec import Autoreset, declarations, parse_autoreset
from jaxvec._util import can_bind

# --- Recovery from faults --------------------------------------------------------------------------------

Retry: TypeAlias = Literal["reset", "rebuild"]


@dataclass(frozen=True)
class Restart:
    """The reaction of a pool to faults, for `make(on_fault=...)`; `"restart"` is short for `Restart()`.

    A rebuilt env inherits the options of the last `reset` of its predecessor, for its first reset, and the
    attributes set by `set_attr`. Changes by `call` and `map` are lost.

    Attributes:
        retry: Recovery of an env that raised or returned wrong data: `"reset"` resets it, `"rebuild"` closes
            it and builds a new one. A worker that died or hangs is always replaced, and all its envs are
            rebuilt.
        max_restarts: Maximum number of faults of each worker and its envs over the pool's lifetime; `None`
            for no limit. The next fault is raised.
        rate: Maximum faults in a number of seconds: `(3, 60.0)` is three per minute; `None` for no limit.

    Example:
        ```python
        class Fragile(jaxvec.testing.CountingEnv):
            def step(self, action):
                assert action != 13, "the simulator crashed"
                return super().step(action)

        policy = jaxvec.Restart(retry="rebuild", max_restarts=100, rate=None)
        with jaxvec.make(Fragile, 2, on_fault=policy) as envs:
            envs.reset(seed=0)
            print(envs.step([1, 13]).info["fault"])  # [False  True]
        ```
    """

    retry: Retry = "reset"
    max_restarts: int | None = 10
    rate: tuple[int, float] | None = (1, 60.0)

    def __post_init__(self) -> None:
        check_choice("retry", self.retry, get_args(Retry))
        if self.max_restarts is not None and not self.max_restarts >= 0:
            raise ValueError(f"max_restarts must be at least 0, or None, not {self.max_restarts!r}")
        match self.rate:
            case None:
                pass
            case (int(count), float() | int() as seconds) if count >= 1 and seconds > 0:
                pass
            case _:
                raise ValueError(
                    "rate must be (n, seconds), for at most n restarts (1 or more) in that time, or None, "
                    f"not {self.rate!r}"
                )


def parse_restart(on_fault: OnFault | Restart) -> Restart | None:
    """Returns the policy of `on_fault`, or `None` for `"raise"`."""
    if isinstance(on_fault, Restart):
        return on_fault
    if on_fault not in get_args(OnFault):
        raise ValueError(f'on_fault must be "raise", "restart" or a jaxvec.Restart, not {on_fault!r}')
    return Restart() if on_fault == "restart" else None


# --- Worker processes, saved states, time limits ---------------------------------------------------------

StartMethod: TypeAlias = Literal["auto", "forkserver", "spawn"]
OutputMode: TypeAlias = Literal["inherit", "log", "file"]


def _variables(env: Mapping[str, str | None] | None) -> dict[str, str | None]:
    variables = dict(env or {})
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, (str, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Workers(env=...): {name!r} is {value!r}; names must be strings, and values strings or None"
            )
        if not name or "=" in name or "\0" in name + (value or ""):
            raise ValueError(
                f"Workers(env=...): {name!r}={value!r} is not a valid environment variable: a name must not "
                "be empty or contain '=', and neither name nor value may contain a NUL"
            )
    return variables


@dataclass(frozen=True, kw_only=True)
class Recycle:
    """Limits for `Workers(recycle=...)`. A fresh process replaces a worker that exceeds one of them.

    This happens between two steps. The running episodes of the worker's envs are cut: their next results are
    truncated, with `info["fault"]`, as after a fault. The data of other workers' envs do not change.

    Attributes:
        memory: Resident memory in bytes of the worker and its child processes. A worker looks ten times a
            second, between steps.
        steps: Number of steps of the worker's envs together.
        descriptors: Number of open file descriptors of the worker.

    Example:
        ```python
        recycle = jaxvec.Recycle(memory=2_000_000_000, steps=1_000_000)
        with jaxvec.make("CartPole-v1", 4, workers=jaxvec.Workers(recycle=recycle)) as envs:
            print(envs.reset(seed=0).obs.shape)  # (4, 4)
        ```
    """

    memory: int | None = None
    steps: int | None = None
    descriptors: int | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "steps", "descriptors"):
            if getattr(self, name) is not None:
                count = check_count(f"Recycle({name}=...)", getattr(self, name), 1)
                object.__setattr__(self, name, count)
        if (self.memory, self.steps, self.descriptors) == (None,) * 3:
            raise ValueError("Recycle() has no limit; pass memory, steps or descriptors")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Options of the worker processes, for `make(workers=...)`.

    Attributes:
        start_method: `"forkserver"` forks workers from a helper process that has imported NumPy and
            Gymnasium, but neither JAX nor your code. `"spawn"` starts a new Python interpreter per worker,
            which takes longer. `"auto"` uses the first one that works here. Forks have the umask, resource
            limits, nice value, signal mask, `chroot`, cgroup and namespaces that your program had at its
            first pool; if it changes them later, a worker may be in the old container: use `"spawn"`.
        env: Environment variables of the workers; the value `None` unsets a variable. By default, numerical
            libraries use one thread, accelerators are hidden, and MPI variables (`OMPI_*`, `PMI_*`, `PMIX_*`)
            are removed, because workers are not ranks of the MPI job.
        init: Function that each worker, also a replacement, runs before it builds its envs, for example to
            register envs or set global options. A parameter `worker_id` gets its index. `Timeouts(start=...)`
            includes it.
        preload: Modules that the helper process imports before it forks, such as `("ale_py",)`. Use it for
            modules that are slow to import and that every env needs. Without a helper process, it has no
            effect, and `make` logs a warning.
        pin: Whether to bind each worker, with the threads of its envs, to its own core. Needs Linux.
        python: Path of another Python interpreter that runs the workers, for envs that can't be installed
            beside JAX, such as `".venv-old/bin/python"`. It needs NumPy and the packages of the envs. Ids,
            and functions in the form `"module:attribute"`, are looked up there.
        recycle: Limits of memory, steps or descriptors for a worker; beyond, a fresh process replaces it.
            Needs Linux.
        output: Destination of the lines that workers print, to stdout and stderr, from Python or C:
            `"inherit"` for the streams of your program, `"log"` for the logger `"jaxvec"` of Python's
            `logging` (stdout at level `INFO`, stderr and warnings at `WARNING`), with the worker, the env and
            the number of repetitions, or `"file"` for a file per worker below `jaxvec-output/`.

    Example:
        ```python
        workers = jaxvec.Workers(env={"OMP_NUM_THREADS": "2"}, pin=True)
        with jaxvec.make("CartPole-v1", 4, num_workers=2, workers=workers) as envs:
            print(envs.reset(seed=0).obs.shape)  # (4, 4)
        ```
    """

    start_method: StartMethod = "auto"
    env: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    init: Callable[..., Any] | None = None
    preload: Iterable[str] = ()
    pin: bool = False
    python: str | os.PathLike[str] | None = None
    recycle: Recycle | None = None
    output: OutputMode = "inherit"

    def __post_init__(self) -> None:
        modules = (self.preload,) if isinstance(self.preload, str) else tuple(self.preload)
        for module in modules:
            if not isinstance(module, str) or not module:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"Workers(preload=...) must be names of modules, as strings, not {module!r}")
        object.__setattr__(self, "preload", modules)  # not an iterator, which could be read only once
        object.__setattr__(self, "env", _variables(self.env))
        check_choice("Workers(start_method=...)", self.start_method, get_args(StartMethod))
        check_choice("Workers(output=...)", self.output, get_args(OutputMode))
        if self.init is not None and not callable(self.init):
            raise TypeError(f"Workers(init=...) must be a function, or None, not {self.init!r}")
        if self.python is not None:
            if not (path := shutil.which(os.path.expanduser(self.python))):
                raise ValueError(f"Workers(python={self.python!r}): there is no executable of this name")
            # A virtual environment is known by the link that its executable is, so links are kept.
            object.__setattr__(self, "python", os.path.abspath(path))
        if self.preload and self.start_method == "spawn":
            raise ValueError('Workers(preload=...) needs the fork server; start_method="spawn" has none')
        if not isinstance(self.recycle, Recycle | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Workers(recycle=...) must be a jaxvec.Recycle, or None, not {self.recycle!r}")
        if self.recycle is not None and sys.platform != "linux":
            raise ValueError("Workers(recycle=...) needs Linux, to read the memory of processes in /proc")
        if self.pin and not can_bind():
            raise ValueError(
                "Workers(pin=True) can't bind processes to cores here: that needs Linux, and a sandbox that "
                "permits sched_setaffinity; leave it out"
            )


@dataclass(frozen=True)
class States:
    """Options of saved env states, for `make(states=...)`; a number `n` is short for `States(max=n)`.

    Attributes:
        max: Number of states that the pool keeps for `jaxvec.save`, `restore` and `simulate`. New states
            replace the oldest ones. Cannot be combined with `spare_envs` or batched envs.
        functions: `(get_state, set_state)`, for envs with a state that jaxvec cannot save itself.
            `get_state(env)` returns the whole state of an env and its wrappers. `set_state(env, state)`
            restores it in an env that was made by the same function.
        trust: Classes that jaxvec does not copy by itself, to be copied by their own protocol
            (`__reduce__`), which has to be exact.

    Example:
        ```python
        def get_state(env):
            return dict(vars(env.unwrapped))

        def set_state(env, state):
            vars(env.unwrapped).update(state)

        states = jaxvec.States(max=10, functions=(get_state, set_state))
        with jaxvec.make(jaxvec.testing.CountingEnv, 2, states=states) as envs:
            envs.reset(seed=0)
            envs.restore(envs.save())
        ```
    """

    max: int = 0
    functions: tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None = None
    trust: Sequence[type] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "max", check_count("States(max=...)", self.max, 0))
        trust: Any = self.trust
        if not isinstance(trust, (tuple, list)) or not all(isinstance(kind, type) for kind in trust):
            raise TypeError(f"States(trust=...) must be a list of classes, not {trust!r}")
        functions: Any = self.functions
        if functions is None:
            return
        is_pair = isinstance(functions, (tuple, list)) and len(functions) == 2  # pyright: ignore[reportUnknownArgumentType]
        if not is_pair or not all(map(callable, functions)):
            raise TypeError(
                "States(functions=...) must be two functions, get_state(env) and set_state(env, state), not "
                f"{functions!r}"
            )


_MAX_TIMEOUT = 2_000_000  # seconds; the C int of `poll(2)` holds 24.8 days in milliseconds


LimitName = Literal["start", "reset", "step"]  # a field of `Timeouts`


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds, for `make(timeouts=...)`, up to 2,000,000.

    The serial backend has only that of a step, for envs that call JAX, in programs: each could wait for the
    other there. `None` and `float("inf")` mean no limit.

    Attributes:
        start: Limit for the start of a worker with its first env, and for each further env that it builds;
            also for a worker that replaces another.
        reset: Limit for the reset of each env. A worker resets and steps its envs one after another.
        step: Limit for the step of each env.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2, timeouts=jaxvec.Timeouts(start=300, step=5)) as envs:
            print(envs.reset(seed=0).obs.shape)  # (2, 4)
        ```
    """

    start: float | None = 60
    reset: float | None = 60
    step: float | None = 60

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            object.__setattr__(self, name, _check_seconds(f"Timeouts({name}=...)", seconds))


def _check_seconds(name: str, seconds: Any) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{name} must be a number of seconds, or None for no limit, not {seconds!r}")
    if seconds == math.inf:
        return None
    if not 0 < seconds <= _MAX_TIMEOUT:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(
            f"{name} must be above 0 and at most {_MAX_TIMEOUT:,} seconds, or None for no limit, not "
            f"{seconds!r}"
        )
    return seconds if isinstance(seconds, int | float) else float(seconds)


# --- The options of `make` -------------------------------------------------------------------------------

RecvOrder: TypeAlias = Literal["ready", "sent"]
OnFault: TypeAlias = Literal["raise", "restart"]
CheckMode: TypeAlias = Literal["cast", "structure", "strict"]
# Names and values, as `parse_autoreset` accepts both.
AutoresetName: TypeAlias = Literal[
    "SAME_STEP", "NEXT_STEP", "DISABLED", "EPISODIC", "SameStep", "NextStep", "Disabled", "Episodic"
]


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolConfig:
    """The options of `jaxvec.make`, which documents them, except those that need JAX.

    It rejects invalid options and combinations, as far as they do not depend on the env or the machine. The
    whole record is passed to the code that uses the options, including workers.

    Attributes:
        states: Options of saved states; a number is converted to `States`.
        settings: Copy of `jaxvec.config`.
    """

    num_workers: int | None = None
    workers: Workers = Workers()
    batch_size: int | None = None
    recv_order: RecvOrder = "ready"
    backend: Any = "process"  # a `Backend`, or the name of one
    autoreset_mode: AutoresetMode | AutoresetName | None = None
    final_obs: bool = True
    info: Mapping[str, Any] | Iterable[str] | None = None
    max_sizes: Mapping[str, Any] | None = None
    env_configs: Sequence[Mapping[str, Any]] | None = None
    envs_per_instance: int | None = None
    on_fault: OnFault | Restart = "raise"
    check: CheckMode = "structure"
    spare_envs: int = 0
    reset_options: spaces.Dict | None = None
    states: States = States()
    timeouts: Timeouts = Timeouts()
    settings: Config = field(default_factory=lambda: replace(config))

    def __post_init__(self) -> None:
        for name, part in (("workers", Workers), ("timeouts", Timeouts)):
            if not isinstance(getattr(self, name), part):
                raise TypeError(f"{name} must be a jaxvec.{part.__name__}, not {getattr(self, name)!r}")
        # `info` may be an iterator, which can be read only once, so its content is stored.
        object.__setattr__(self, "info", declarations(self.info))
        if self.max_sizes is not None:
            MaxSizes(self.max_sizes)  # raises if it is invalid
        for name in ("num_workers", "envs_per_instance"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_count(name, getattr(self, name), 1))
        if not isinstance(self.states, States):  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "states", States(check_count("states", self.states, 0)))
        check_choice("recv_order", self.recv_order, get_args(RecvOrder))
        check_choice("check", self.check, get_args(CheckMode))
        object.__setattr__(self, "spare_envs", check_count("spare_envs", self.spare_envs, 0))
        autoreset = self.autoreset
        restart = self.restart
        if self.spare_envs and autoreset is not None and not autoreset.resets:
            raise ValueError("spare_envs needs autoreset: without it, no env is reset in advance")
        if self.reset_options is not None:
            self._check_reset_options()
        if self.states.max and self.spare_envs:
            raise ValueError(
                "states and spare_envs cannot be combined: with spare envs, the next episode depends on the "
                "other envs, so it cannot be restored from one env's state. Remove one of them"
            )
        if self.envs_per_instance is not None:
            rejected = {
                "on_fault": restart,
                "check": self.strict,
                "spare_envs": self.spare_envs,
                "states": self.states.max or self.states.functions,
                "Workers(recycle=...)": self.workers.recycle,
                "autoreset_mode": self.autoreset_mode,
                "reset_options": self.reset_options is not None,
            }
            why = "does not go with a batched env, which resets its envs itself"
            reject(f"{why}; leave it out, or make the envs one by one", rejected)

    @property
    def autoreset(self) -> Autoreset | None:
        """Autoreset mode; `None` for batched envs, which have their own."""
        if self.autoreset_mode is None:
            return None if self.envs_per_instance is not None else Autoreset.SAME_STEP
        return parse_autoreset(self.autoreset_mode)

    @property
    def restart(self) -> Restart | None:
        """Policy for faults; `None` if a fault breaks the pool."""
        return parse_restart(self.on_fault)

    @property
    def strict(self) -> bool:
        return self.check == "strict"

    def for_workers(self) -> PoolConfig:
        """Returns the record without the user's objects, which workers get separately or do not need."""
        return replace(
            self,
            workers=replace(self.workers, init=None),
            # A name: another interpreter's Gymnasium may lack the enum.
            autoreset_mode=self.autoreset and self.autoreset.name,
            states=States(),
            backend="process",
            info=None,
            max_sizes=None,
            reset_options=None,
            env_configs=None,
            on_fault="raise",
        )

    def _check_reset_options(self) -> None:
        if not isinstance(self.reset_options, spaces.Dict):
            raise TypeError(
                "reset_options must be a gymnasium.spaces.Dict with a space for each key of the options, not "
                f"{self.reset_options!r}; pass options to reset"
            )
        if self.spare_envs:
            raise ValueError(
                "reset_options and spare_envs cannot be combined: a spare env is reset before the options of "
                "its episode are known. Remove one of them"
            )


def reject(why: str, values: Mapping[str, Any]) -> None:
    """Raises `ValueError` for the first option that is set, by name and value, and says `why`."""
    for name, value in values.items():
        if value:
            raise ValueError(f"{name} {why}")
