"""`PoolConfig`: what users say of a pool, checked; faces make it, with or without JAX."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from jaxvec import _restart
from jaxvec._ray import Ray
from jaxvec._restart import Restart
from jaxvec._spec import Autoreset, parse_autoreset_mode, undeclared

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
        return _restart.parse(self.on_fault)

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
