"""The options of a pool, checked."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from jaxvec._errors import JaxvecError
from jaxvec._spec import Autoreset, parse_autoreset_mode, undeclared

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
        count = self.workers_per_actor
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"workers_per_actor must be an integer of at least 1, not {count!r}")
        for name, amount in self._of_worker.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"resources_per_worker[{name!r}] must be a number of at least 0, not {amount!r}"
                )
        self.check(count)

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
# `PoolConfig`: what users say of a pool, checked; faces make it, with or without JAX.
# ----------------------------------------------------------------------------------------------------------

TRANSPORTS = ("auto", "ffi", "io_callback")

_NAMES = {
    "start_method": ("auto", "forkserver", "spawn"),
    "transport": TRANSPORTS,
    "handoff": ("auto", "native", "portable"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolConfig:
    """The options of `jaxvec.make`, which tells what each means; all but those that are JAX's.

    What is wrong with them, whatever the env and the machine are, is said here: `ValueError` or `TypeError`.
    """

    num_workers: int | None = None
    batch_size: int | None = None
    recv_order: str = "ready"
    backend: str | Ray = "process"
    autoreset_mode: AutoresetMode | str | None = None
    episodic: bool = False
    final_obs: bool = True
    info: Mapping[str, Any] | Iterable[str] | None = None
    env_configs: Sequence[Mapping[str, Any]] | None = None
    envs_per_instance: int | None = None
    worker_env: Mapping[str, str | None] | None = None
    worker_init: Callable[..., Any] | None = None
    start_method: str = "auto"
    preload: Iterable[str] = ()
    pin_workers: bool = False
    max_running: int | None = None
    on_fault: str | Restart = "raise"
    check: str = "structure"
    see_through: bool = True
    spare_envs: int = 0
    states: int = 0
    state_functions: tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None = None
    start_timeout: float | None = 60
    reset_timeout: float | None = 60
    step_timeout: float | None = 60
    transport: str = "auto"
    handoff: str = "auto"

    def __post_init__(self) -> None:
        # Kept as read, since an iterator can be read only once.
        declared, learnt = undeclared(self.info)
        object.__setattr__(self, "info", declared | dict.fromkeys(learnt))
        object.__setattr__(self, "preload", _modules(self.preload))
        if self.recv_order not in ("ready", "sent"):
            raise ValueError(f'recv_order must be "ready" or "sent", not {self.recv_order!r}')
        if self.check not in ("structure", "strict"):
            raise ValueError(f'check must be "structure" or "strict", not {self.check!r}')
        if not isinstance(self.backend, Ray) and self.backend not in ("process", "serial", "ray"):
            raise ValueError(
                f'backend must be "process", "serial", "ray" or a jaxvec.Ray, not {self.backend!r}'
            )
        for name, known in _NAMES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.worker_init is not None and not callable(self.worker_init):
            raise TypeError(f"worker_init must be a function, or None, not {self.worker_init!r}")
        for name in ("start_timeout", "reset_timeout", "step_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} must be above 0 seconds, or None, not {seconds!r}")
        size = self.envs_per_instance
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"envs_per_instance must be an integer of at least 1, not {size!r}")
        autoreset, restart, count = self.autoreset, self.restart, self.spare_envs
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"spare_envs must be an integer of at least 0, not {count!r}")
        if count and autoreset is not None and not autoreset.resets:
            raise ValueError("spare_envs needs autoreset: without it, no env is reset in advance")
        _check_states(self.states, self.state_functions)
        if self.states and count:
            raise ValueError(
                "states don't go with spare_envs: which of these plays an env's next episode depends on when "
                "the other envs' episodes end, so no state of one env can say it; leave out spare_envs"
            )
        if restart is not None and restart.retry == "restore":
            _check_restores(self.states, autoreset)
        if self.preload and self.start_method == "spawn":
            raise ValueError('preload needs the fork server; start_method="spawn" has none')
        if self.max_running is not None:
            _check_max_running(self.max_running, self.backend)
        if self.pin_workers and not hasattr(os, "sched_setaffinity"):
            raise ValueError("pin_workers needs a system that binds processes to cores, as Linux does")
        if size is not None:
            _refuse(
                "does not go with a batched env",
                on_fault=restart,
                check=self.strict,
                spare_envs=count,
                episodic=self.episodic,
                states=self.states,
                state_functions=self.state_functions,
            )
        if self.backend == "serial":
            if self.num_workers not in (None, 1):
                raise ValueError(f'backend="serial" has one worker, this process, not {self.num_workers}')
            _refuse(
                'needs worker processes; backend="serial" has none',
                worker_env=self.worker_env,
                worker_init=self.worker_init is not None,
                preload=self.preload,
                pin_workers=self.pin_workers,
                max_running=self.max_running,
                spare_envs=count,
            )

    @property
    def autoreset(self) -> Autoreset | None:
        """What happens when an episode ends; `None` for batched envs, which say it themselves."""
        mode, batched = self.autoreset_mode, self.envs_per_instance is not None
        if mode is None and not batched:
            return Autoreset.EPISODIC if self.episodic else Autoreset.SAME_STEP
        if mode is None:
            return None
        known = parse_autoreset_mode(mode)
        if batched:
            raise ValueError("autoreset_mode: a batched env resets its envs itself; leave it out")
        if self.episodic and known is not AutoresetMode.DISABLED:
            raise ValueError(
                "episodic envs idle after their episode's end, so autoreset_mode can't be "
                f"{known.name}; leave it out"
            )
        return Autoreset.EPISODIC if self.episodic else Autoreset(known)

    @property
    def restart(self) -> Restart | None:
        """How the pool goes on after a fault; `None` if it does not."""
        return parse_restart(self.on_fault)

    @property
    def strict(self) -> bool:
        """Whether observations have to be members of their space."""
        return self.check == "strict"


def _check_max_running(max_running: int, backend: str | Ray) -> None:
    if isinstance(max_running, bool) or not isinstance(max_running, int) or max_running < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"max_running must be an integer of at least 1, or None, not {max_running!r}")
    if isinstance(backend, Ray) or backend == "ray":
        raise ValueError(
            "max_running needs workers on this machine; on a cluster, reserve more CPUs for each"
        )
    if sys.platform != "linux":
        raise ValueError("max_running needs Linux, which can lock parts of memory that processes share")


def _check_restores(states: int, autoreset: Autoreset | None) -> None:
    if not states:
        raise ValueError('Restart(retry="restore") needs saved states: make(states=n) says how many are kept')
    if autoreset is not None and not autoreset.resets:
        raise ValueError(
            'Restart(retry="restore") needs autoreset: without it, the program itself resets an env after a '
            "fault, or restores it"
        )


def _check_states(states: int, functions: Any) -> None:
    if isinstance(states, bool) or not isinstance(states, int) or states < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"states must be an integer of at least 0, not {states!r}")
    if functions is None:
        return
    if not isinstance(functions, (tuple, list)) or len(functions) != 2 or not all(map(callable, functions)):
        raise TypeError(
            "state_functions must be two functions, get_state(env) and set_state(env, state), not "
            f"{functions!r}"
        )


def _refuse(why: str, **values: Any) -> None:
    for name, value in values.items():
        if value:
            raise ValueError(f"{name} {why}")


def _modules(preload: Iterable[str]) -> tuple[str, ...]:
    modules = (preload,) if isinstance(preload, str) else tuple(preload)
    for module in modules:
        if not isinstance(module, str) or not module:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"preload: the name of a module is expected, as text, not {module!r}")
    return modules
