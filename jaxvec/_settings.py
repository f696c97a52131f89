"""`jaxvec.config`: the settings of the process, candidates for changes, and checks of choices and counts."""

from __future__ import annotations

import operator
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def check_count(name: str, value: Any, least: int, num_envs: int | None = None) -> int:
    """Returns an integer of at least `least`, which may be one of NumPy, as Python's.

    With `num_envs`, it must not be larger. Raises `ValueError`, also for a bool.
    """
    count = least - 1  # refused, as what is no integer
    if not isinstance(value, bool):
        with suppress(TypeError):
            count = operator.index(value)
    if count < least or (num_envs is not None and count > num_envs):
        bounds = f"of at least {least}" if num_envs is None else f"from {least} to num_envs ({num_envs})"
        raise ValueError(f"{name} must be an integer {bounds}, not {value!r}")
    return count


CANDIDATES = ("core", "spin", "line", "home")


def candidates() -> set[str]:
    """Returns the words of `JAXVEC_CANDIDATES`, which have commas between them.

    Each turns on a change for pools of many workers, until a machine with many cores has judged it:

    - `core`: From 8 usable cores on, a pool has by default one worker less than there are cores, so that
      the program has a core of its own.
    - `spin`: A thread that waits for a step polls twice as long as the latest steps took on average, up to
      2 ms, instead of 50 us.
    - `line`: Idle workers poll one cache line that all share in a step of all envs, instead of one each.
    - `home`: A worker is bound to its core while it sleeps, so that it wakes there, unless others want that.
    """
    words = {*os.environ.get("JAXVEC_CANDIDATES", "").split(",")} - {""}
    for word in words:
        check_choice("JAXVEC_CANDIDATES", word, CANDIDATES)
    return words


Transport: TypeAlias = Literal["auto", "ffi", "io_callback"]
Dispatch: TypeAlias = Literal["auto", "native", "portable"]
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "transport": get_args(Transport),
    "dispatch": get_args(Dispatch),
    "wrapper_bypass": (True, False),
}


@dataclass
class Config:
    """Settings for tests and bug reports. `jaxvec.config` holds those of this process.

    A pool reads them when it is made.

    Attributes:
        transport: Transport of compiled programs to the pool: `"ffi"` on the CPU and on NVIDIA GPUs, without
            Python; `"io_callback"` on every platform; `"auto"` for the first that works.
            `VectorEnv.transport` shows which one a pool uses.
        dispatch: Synchronisation between this process and the workers: `"native"` by futexes, `"portable"`
            over sockets, `"auto"` for the first that works here.
        wrapper_bypass: Whether to step the env inside Gymnasium's `TimeLimit`, `OrderEnforcing` and
            `PassiveEnvChecker` directly once this makes no difference. Data, errors and the wrappers'
            attributes are the same. `False` calls every wrapper.

    Example:
        ```python
        with jaxvec.config.override(transport="io_callback"):
            envs = jaxvec.make("CartPole-v1", 2)
        print(envs.transport)  # io_callback
        envs.close()
        ```
    """

    transport: Transport = "auto"
    dispatch: Dispatch = "auto"
    wrapper_bypass: bool = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTINGS:
            raise AttributeError(f"jaxvec.config has no setting {name!r}, only {', '.join(_SETTINGS)}")
        check_choice(f"jaxvec.config.{name}", value, _SETTINGS[name])
        super().__setattr__(name, value)

    @contextmanager
    def override(self, **settings: Any) -> Generator[None]:
        """Changes settings within a `with` block, for all threads."""
        before = {name: value for name, value in vars(self).items() if name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            vars(self).update(before)


config: Config = Config()
