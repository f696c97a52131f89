"""The options of a pool, checked."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from gymnasium.vector import AutoresetMode

from jaxvec._errors import JaxvecError
from jaxvec._spec import Autoreset, parse_autoreset, undeclared

# ----------------------------------------------------------------------------------------------------------
# Which failures end a pool, and which are gone on from: the policy, and what is left of it.
# ----------------------------------------------------------------------------------------------------------

RETRIES = ("reset", "rebuild", "restore")

_logger = logging.getLogger("jaxvec")


@dataclass(frozen=True)
class Restart:
    """How a pool goes on after a fault, for `make(on_fault=...)`; `"restart"` stands for `Restart()`.

    Attributes:
        retry: what happens to an env that raised or returned wrong data: `"reset"` resets it,
            `"rebuild"` closes it and builds another. A worker that died or hangs is replaced, and
            all its envs are built anew. With `"restore"` all that are built anew go on, after the result of
            the fault, from the state in which `jaxvec.save` saved them last, and are reset only if there
            is none. It needs `make(states=n)` and autoreset; each save then sends states to this process.
        max_restarts: how many faults each worker and its envs may have in the pool's
            lifetime; `None` for any number. The next one is raised.
        rate: how many of these, and within how many seconds: `(3, 60.0)` are three in any minute; `None`
            for any rate.
        keep_options: whether an env that is built anew is told what the one before it was: its first reset
            gets the options of the last `reset` of that env, and attributes that `set_attr` has set are
            set again before. What `call` and `map` have changed is lost, as only the env's code knows what
            that is; the log then says so.

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

    retry: str = "reset"
    max_restarts: int | None = 10
    rate: tuple[int, float] | None = (1, 60.0)
    keep_options: bool = True

    def __post_init__(self) -> None:
        if self.retry not in RETRIES:
            raise ValueError(f"retry must be one of {', '.join(RETRIES)}, not {self.retry!r}")
        if self.max_restarts is not None and not self.max_restarts >= 0:
            raise ValueError(f"max_restarts must be at least 0, or None, not {self.max_restarts!r}")
        if self.rate is not None:
            object.__setattr__(self, "rate", _check_rate(self.rate))


def _check_rate(rate: tuple[int, float]) -> tuple[int, float]:
    try:
        count, seconds = rate
        if isinstance(count, int) and count >= 1 and seconds > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            return count, seconds
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"rate must be (n, seconds), at most n restarts, 1 or more, within that time, or None, not {rate!r}"
    )


def parse_restart(on_fault: str | Restart) -> Restart | None:
    """Returns the policy, `None` for `"raise"`; raises `ValueError` for anything else."""
    if isinstance(on_fault, Restart):
        return on_fault
    if on_fault not in ("raise", "restart"):
        raise ValueError(f'on_fault must be "raise", "restart" or a jaxvec.Restart, not {on_fault!r}')
    return Restart() if on_fault == "restart" else None


class Budget:
    """Counts the faults of each worker, or of whoever else is restarted.

    Attributes:
        restarts: `[num_workers]` faults that the pool recovered from.
    """

    def __init__(self, policy: Restart | None, num_workers: int, *, who: str = "worker") -> None:
        self.policy = policy
        self._who = who
        self.restarts = [0] * num_workers
        most = policy.rate[0] if policy and policy.rate else 0
        self._latest = [deque[float](maxlen=most) for _ in range(num_workers)]  # when; the latest last

    @property
    def rebuilds(self) -> bool:
        """Whether an env that raised is built anew."""
        return self.policy is not None and self.policy.retry != "reset"

    def spend(self, worker: int, error: JaxvecError, lost: str = "") -> None:
        """Counts and logs a fault that the pool recovers from, and what is lost by it; or raises `error`."""
        if self.policy is None:
            raise error
        now = time.monotonic()
        count, most = self.restarts[worker], self.policy.max_restarts
        latest, rate = self._latest[worker], self.policy.rate
        why = ""
        if most is not None and count >= most:
            why = f"it was restarted {count} times, and max_restarts is {most}"
        elif rate is not None and len(latest) == rate[0] and now - latest[0] < rate[1]:
            why = f"restarts in the last {now - latest[0]:.1f} s: {len(latest)}, and rate is {rate}"
        if why:
            error.args = (f"{error}\n{self._who.capitalize()} {worker} was not restarted: {why}.",)
            raise error
        self.restarts[worker] = count + 1
        latest.append(now)
        _logger.warning("%s %d recovers from fault %d%s: %s", self._who, worker, count + 1, lost, error)


# ----------------------------------------------------------------------------------------------------------
# How a pool's workers become actors of a Ray cluster: the record that `make(backend=...)` takes.
# ----------------------------------------------------------------------------------------------------------

_STEP = 0.0001
DATA = ("auto", "tcp", "ray")
START_METHODS = ("auto", "forkserver", "spawn")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Ray:
    """Hosts a pool's workers on a Ray cluster, for `make(backend=...)`; `"ray"` stands for `Ray()`.

    Attributes:
        address: of the cluster, as `ray.init` takes it. `None` for the one that this process is
            connected to, or else that `ray.init()` finds or starts on this machine.
        workers_per_actor: how many worker processes each actor has on its node. What they do travels
            together, so few actors with many workers each spare the driver work, up to one a node.
        resources_per_worker: that its actor holds for each worker, such as
            `{"CPU": 2, "GPU": 0.5, "memory": 4e9}`; one CPU by default.
        placement_strategy: of the placement group that the actors are started in: `"PACK"`, `"SPREAD"`,
            `"STRICT_PACK"` or `"STRICT_SPREAD"`. `None` for no group: Ray places each by itself.
        runtime_env: what the actors' nodes have to provide, as Ray takes it: `pip`, `working_dir`, …
            Directories of this machine are shipped when the process connects to the cluster, so they are
            refused if it is connected by then.
        data: how actions and results travel: `"tcp"`, by a connection to each actor, at a free port of its
            node; `"ray"`, by Ray's calls, at several times the work; `"auto"`, by the first that is possible.

    Example:
        ```python
        cluster = jaxvec.Ray("auto", workers_per_actor=16, resources_per_worker={"CPU": 0.5})
        envs = jaxvec.make("CartPole-v1", 256, num_workers=64, backend=cluster)
        ```
    """

    address: str | None = None
    workers_per_actor: int = 1
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    data: str = "auto"

    def __post_init__(self) -> None:
        if self.placement_strategy not in (None, *STRATEGIES):
            raise ValueError(
                f"placement_strategy must be one of {', '.join(STRATEGIES)}, or None, not "
                f"{self.placement_strategy!r}"
            )
        if self.data not in DATA:
            raise ValueError(f"data must be one of {', '.join(DATA)}, not {self.data!r}")
        _check_count("workers_per_actor", self.workers_per_actor, 1)
        for name, amount in self._of_worker.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"resources_per_worker[{name!r}] must be a number of at least 0, not {amount!r}"
                )
        self.check(self.workers_per_actor)

    def check(self, num_workers: int) -> None:
        """Checks that Ray can count what an actor of so many workers holds; raises `ValueError`."""
        for name, amount in self.of_actor(num_workers).items():
            why = ""
            if 0 < amount < _STEP:
                why = f"Ray counts in steps of {_STEP}"
            elif name == "GPU" and amount > 1 and amount % 1:
                why = "Ray gives out parts of one GPU, or whole ones"
            if why:
                raise ValueError(
                    f"resources_per_worker[{name!r}] is {self._of_worker[name]!r}, so an actor of "
                    f"{num_workers} workers holds {amount}, but {why}"
                )

    def of_actor(self, num_workers: int | None = None) -> dict[str, float]:
        """Returns what an actor holds that has so many workers; as many as one can have, by default."""
        count = self.workers_per_actor if num_workers is None else num_workers
        return {name: round(amount * count, 8) for name, amount in self._of_worker.items()}

    @property
    def _of_worker(self) -> dict[str, float]:
        return {"CPU": 1, **(self.resources_per_worker or {})}


# ----------------------------------------------------------------------------------------------------------
# The other parts of a pool's options: worker processes, saved states, time limits.
# ----------------------------------------------------------------------------------------------------------


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


def _modules(preload: Iterable[str]) -> tuple[str, ...]:
    modules = (preload,) if isinstance(preload, str) else tuple(preload)
    for module in modules:
        if not isinstance(module, str) or not module:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Workers(preload=...) must be names of modules, as texts, not {module!r}")
    return modules


def _variables(env: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Returns changes to environment variables; raises on what no system takes."""
    variables = dict(env or {})
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, (str, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Workers(env=...): {name!r} is {value!r}; names are texts, values texts or None")
        if not name or "=" in name or "\0" in name + (value or ""):
            raise ValueError(
                f"Workers(env=...): {name!r} can't be an environment variable with the value {value!r}"
            )
    return variables


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Options of the worker processes, for `make(workers=...)`.

    Attributes:
        num: number of worker processes; by default as many as there are usable cores, or as a Ray cluster
            has free CPUs for. `make(num_workers=n)` is short for `Workers(num=n)`.
        start_method: `"forkserver"` forks workers from a helper process that has imported NumPy and
            Gymnasium, but neither JAX nor your code; `"spawn"` starts each as a Python interpreter of its
            own, which takes longer; `"auto"` is the first where it works.
        env: environment variables of the workers; `None` as a value unsets one. By default workers
            run numerical libraries on one thread, keep off the accelerator, and lack the variables by which
            MPI knows its processes (`OMPI_*`, `PMI_*`, `PMIX_*`).
        init: a function that each worker runs before it builds its envs, as do workers that replace
            others. It prepares the process: registers envs, sets global options, opens what the envs
            share. It gets the index of its worker if it has a parameter `worker_id`. `Timeouts(start=...)`
            includes it.
        preload: modules that the helper process imports before it forks, such as `("ale_py",)`: those that
            are slow to import and that every env needs.
        pin: bind each worker to a core of its own, one after the other, of those that this process
            may use; needs Linux. Threads that an env starts are then on that core, too.
        max_running: maximum number of workers that run envs at the same time; the others wait for their turn.
            For simulators that need a process each and more of a core or of memory than there is for all at
            once. The time that a worker waits counts for `Timeouts(step=..., reset=...)`. Needs Linux.

    Example:
        ```python
        workers = jaxvec.Workers(num=2, env={"OMP_NUM_THREADS": "2"}, pin=True)
        with jaxvec.make("CartPole-v1", 4, workers=workers) as envs:
            print(envs.reset(seed=0).obs.shape)  # (4, 4)
        ```
    """

    num: int | None = None
    start_method: str = "auto"
    env: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    init: Callable[..., Any] | None = None
    preload: Iterable[str] = ()
    pin: bool = False
    max_running: int | None = None

    def __post_init__(self) -> None:
        # Kept as read, since an iterator can be read only once.
        object.__setattr__(self, "preload", _modules(self.preload))
        object.__setattr__(self, "env", _variables(self.env))
        if self.num is not None:
            _check_count("Workers(num=...)", self.num, 1)
        if self.start_method not in START_METHODS:
            raise ValueError(
                f"Workers(start_method=...) must be one of {', '.join(START_METHODS)}, not "
                f"{self.start_method!r}"
            )
        if self.init is not None and not callable(self.init):
            raise TypeError(f"Workers(init=...) must be a function, or None, not {self.init!r}")
        if self.preload and self.start_method == "spawn":
            raise ValueError('Workers(preload=...) needs the fork server; start_method="spawn" has none')
        if self.max_running is not None:
            _check_count("Workers(max_running=...)", self.max_running, 1)
            if sys.platform != "linux":
                raise ValueError(
                    "Workers(max_running=...) needs Linux, which can lock parts of shared memory"
                )
        if self.pin and not hasattr(os, "sched_setaffinity"):
            raise ValueError("Workers(pin=True) needs a system that binds processes to cores, as Linux does")


@dataclass(frozen=True)
class States:
    """Options of saved env states, for `make(states=...)`; a number `n` is short for `States(max=n)`.

    Attributes:
        max: number of states that the pool keeps for `jaxvec.save`, `restore` and `simulate`; a newer one
            takes the place of the oldest. Not with `spare_envs` or batched envs.
        functions: `(get_state, set_state)` for envs whose state jaxvec can't take by itself:
            `get_state(env)` returns all of the state of an env and its wrappers, `set_state(env, state)` has
            an env that was made by the same function continue from it.

    Example:
        ```python
        def get_state(env):
            return dict(vars(env.unwrapped))

        def set_state(env, state):
            vars(env.unwrapped).update(state)

        states = jaxvec.States(max=10, functions=(get_state, set_state))
        with jaxvec.make(jaxvec.testing.CountingEnv, 2, states=states) as envs:
            envs.reset(seed=0)
            saved = envs.save()
            envs.step([1, 1])
            envs.restore(saved)
        ```
    """

    max: int = 0
    functions: tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None = None

    def __post_init__(self) -> None:
        _check_count("States(max=...)", self.max, 0)
        functions: Any = self.functions
        if functions is None:
            return
        if (
            not isinstance(functions, (tuple, list))
            or len(functions) != 2
            or not all(map(callable, functions))
        ):  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(
                "States(functions=...) must be two functions, get_state(env) and set_state(env, state), not "
                f"{functions!r}"
            )


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds, for `make(timeouts=...)`; `None` waits without limit.

    Attributes:
        start: for workers to build their envs; also for each worker that replaces another later. Timeouts
            need processes; the serial backend has none.
        reset: for a reset.
        step: for a step.

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
            if seconds is not None and not seconds > 0:
                raise ValueError(f"Timeouts({name}=...) must be above 0 seconds, or None, not {seconds!r}")


# ----------------------------------------------------------------------------------------------------------
# `jaxvec.config`: settings of the process, for tests and bug reports.
# ----------------------------------------------------------------------------------------------------------

TRANSPORTS = ("auto", "ffi", "io_callback")
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "transport": TRANSPORTS,
    "dispatch": ("auto", "native", "portable"),
    "wrapper_bypass": (True, False),
}


@dataclass(frozen=True)
class Settings:
    """What `jaxvec.config` said when a pool was made."""

    transport: str = "auto"
    dispatch: str = "auto"
    wrapper_bypass: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value not in _SETTINGS[name]:
                allowed = ", ".join(map(str, _SETTINGS[name]))
                raise ValueError(f"jaxvec.config.{name} must be one of {allowed}, not {value!r}")


# Of the thread or asyncio task, as JAX's own: two threads that make pools don't see each other's.
_overrides: ContextVar[Mapping[str, Any]] = ContextVar("jaxvec.config.override", default={})  # noqa: B039


class Config:
    """Settings for tests and bug reports; `jaxvec.config` holds those of this process.

    A pool reads them when it is made. Their first values are those of the environment variables
    `JAXVEC_TRANSPORT`, `JAXVEC_DISPATCH` and `JAXVEC_WRAPPER_BYPASS` (`true` or `false`).

    Attributes:
        transport: path of compiled programs to the pool: `"ffi"`, on the CPU and on NVIDIA's GPUs,
            without Python; `"io_callback"`, on every platform; or `"auto"` for the first that works
            where the program runs. `VectorEnv.transport` says which one a pool uses.
        dispatch: synchronisation between this process and the workers: `"native"` by futexes,
            `"portable"` over sockets, or `"auto"` for the first that works here.
        wrapper_bypass: step the env inside Gymnasium's `TimeLimit`, `OrderEnforcing` and
            `PassiveEnvChecker` as soon as a step through them gives the same, and count the limit's steps.
            Data, errors and the wrappers' attributes are as without; `False` calls every wrapper.

    Example:
        ```python
        with jaxvec.config.override(transport="io_callback"):
            envs = jaxvec.make("CartPole-v1", 2)
        print(envs.transport)  # io_callback
        envs.close()
        ```
    """

    transport: str
    dispatch: str
    wrapper_bypass: bool

    def __init__(self, settings: Settings) -> None:
        vars(self)["_settings"] = settings

    def current(self) -> Settings:
        """Returns the settings of a pool that this thread makes now."""
        return replace(vars(self)["_settings"], **_overrides.get())

    def __getattr__(self, name: str) -> Any:
        if name not in _SETTINGS:
            raise AttributeError(f"jaxvec.config has no setting {name!r}, only {', '.join(_SETTINGS)}")
        return getattr(self.current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTINGS:
            raise AttributeError(f"jaxvec.config has no setting {name!r}, only {', '.join(_SETTINGS)}")
        vars(self)["_settings"] = replace(vars(self)["_settings"], **{name: value})

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *_SETTINGS]

    def __repr__(self) -> str:
        return repr(self.current()).replace("Settings", "jaxvec.config", 1)

    @contextmanager
    def override(self, **settings: Any) -> Generator[None]:
        """Changes settings of this thread within a `with` block; other threads and tasks don't see it."""
        for name in settings:
            getattr(self, name)  # raises for a setting that doesn't exist
        Settings(**settings)  # raises for a value that isn't allowed
        token = _overrides.set({**_overrides.get(), **settings})
        try:
            yield
        finally:
            _overrides.reset(token)


def _from_environ() -> Config:
    given: dict[str, Any] = {}
    for name, allowed in _SETTINGS.items():
        variable = f"JAXVEC_{name.upper()}"
        text = os.environ.get(variable)
        if not text:
            continue
        values = {str(value).lower(): value for value in allowed}
        if text.lower() not in values:
            raise ValueError(f"{variable} must be one of {', '.join(values)}, not {text!r}")
        given[name] = values[text.lower()]
    return Config(Settings(**given))


config: Config = _from_environ()


# ----------------------------------------------------------------------------------------------------------
# `PoolConfig`: all options of a pool in one record; the APIs make it, with or without JAX.
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolConfig:
    """The options of `jaxvec.make`, which documents them, without JAX's own.

    Mistakes that show whatever the env and the machine are raise `ValueError` or `TypeError` here. The record
    travels whole to where its options are used, workers included.

    Attributes:
        workers: options of the workers; `num_workers` is in `workers.num`, too.
        states: options of the saved states, as a record.
        settings: `jaxvec.config` as it was when the pool was made.
    """

    num_workers: int | None = None
    workers: Workers = Workers()
    batch_size: int | None = None
    recv_order: str = "ready"
    backend: str | Ray = "process"
    autoreset_mode: AutoresetMode | str | None = None
    final_obs: bool = True
    info: Mapping[str, Any] | Iterable[str] | None = None
    env_configs: Sequence[Mapping[str, Any]] | None = None
    envs_per_instance: int | None = None
    on_fault: str | Restart = "raise"
    check: str = "structure"
    spare_envs: int = 0
    states: States = States()
    timeouts: Timeouts = Timeouts()
    settings: Settings = field(default_factory=lambda: config.current())

    def __post_init__(self) -> None:
        for name, part in (("workers", Workers), ("timeouts", Timeouts)):
            if not isinstance(getattr(self, name), part):
                raise TypeError(f"{name} must be a jaxvec.{part.__name__}, not {getattr(self, name)!r}")
        # Kept as read, since an iterator can be read only once.
        declared, learnt = undeclared(self.info)
        object.__setattr__(self, "info", declared | dict.fromkeys(learnt))
        object.__setattr__(self, "workers", self._merge_workers())
        if not isinstance(self.states, States):  # pyright: ignore[reportUnnecessaryIsInstance]
            _check_count("states", self.states, 0)
            object.__setattr__(self, "states", States(self.states))
        if self.recv_order not in ("ready", "sent"):
            raise ValueError(f'recv_order must be "ready" or "sent", not {self.recv_order!r}')
        if self.check not in ("structure", "strict"):
            raise ValueError(f'check must be "structure" or "strict", not {self.check!r}')
        if not isinstance(self.backend, Ray) and self.backend not in ("process", "serial", "ray"):
            raise ValueError(
                f'backend must be "process", "serial", "ray" or a jaxvec.Ray, not {self.backend!r}'
            )
        if self.envs_per_instance is not None:
            _check_count("envs_per_instance", self.envs_per_instance, 1)
        _check_count("spare_envs", self.spare_envs, 0)
        autoreset, restart = self.autoreset, self.restart
        if self.spare_envs and autoreset is not None and not autoreset.resets:
            raise ValueError("spare_envs needs autoreset: without it, no env is reset in advance")
        if self.states.max and self.spare_envs:
            raise ValueError(
                "states don't go with spare_envs: which of these plays an env's next episode depends on when "
                "the other envs' episodes end, so no state of one env can say it; leave out spare_envs"
            )
        if restart is not None and restart.retry == "restore":
            self._check_restores(autoreset)
        if self.workers.max_running is not None and (isinstance(self.backend, Ray) or self.backend == "ray"):
            raise ValueError(
                "Workers(max_running=...) needs workers on this machine; on a cluster, reserve more CPUs for "
                "each"
            )
        if self.envs_per_instance is not None:
            _refuse(
                "does not go with a batched env",
                {
                    "on_fault": restart,
                    "check": self.strict,
                    "spare_envs": self.spare_envs,
                    "states": self.states.max or self.states.functions,
                },
            )
        if self.backend == "serial":
            if self.workers.num not in (None, 1):
                raise ValueError(f'backend="serial" has one worker, this process, not {self.workers.num}')
            _refuse(
                'needs worker processes; backend="serial" has none',
                {
                    **{
                        f"Workers({name}=...)": getattr(self.workers, name)
                        for name in ("env", "init", "preload", "pin", "max_running")
                    },
                    "spare_envs": self.spare_envs,
                },
            )

    @property
    def autoreset(self) -> Autoreset | None:
        """Mode of the autoreset; `None` for batched envs, which have their own."""
        if self.autoreset_mode is None:
            return None if self.envs_per_instance is not None else Autoreset.SAME_STEP
        known = parse_autoreset(self.autoreset_mode)
        if self.envs_per_instance is not None:
            raise ValueError("autoreset_mode: a batched env resets its envs itself; leave it out")
        return known

    @property
    def restart(self) -> Restart | None:
        """Policy after a fault; `None` if the pool ends with it."""
        return parse_restart(self.on_fault)

    @property
    def strict(self) -> bool:
        """True if observations have to be members of their space."""
        return self.check == "strict"

    def for_workers(self) -> PoolConfig:
        """Returns the record without the user's objects, which workers are sent apart or don't need."""
        return replace(
            self,
            workers=replace(self.workers, init=None),
            states=States(self.states.max),
            backend="process",
            info=None,
            env_configs=None,
            on_fault="raise",
        )

    def _merge_workers(self) -> Workers:
        """Returns `workers` with `num_workers` in it."""
        if self.num_workers is None:
            return self.workers
        _check_count("num_workers", self.num_workers, 1)
        if self.workers.num not in (None, self.num_workers):
            raise ValueError(
                f"num_workers={self.num_workers} and Workers(num={self.workers.num}) differ; pass one of them"
            )
        return replace(self.workers, num=self.num_workers)

    def _check_restores(self, autoreset: Autoreset | None) -> None:
        if not self.states.max:
            raise ValueError(
                'Restart(retry="restore") needs saved states: make(states=n) says how many are kept'
            )
        if autoreset is not None and not autoreset.resets:
            raise ValueError(
                'Restart(retry="restore") needs autoreset: without it, the program itself resets an env '
                "after a fault, or restores it"
            )


def _refuse(why: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value:
            raise ValueError(f"{name} {why}")
