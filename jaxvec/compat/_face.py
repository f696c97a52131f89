"""What the faces of single envs have in common: their pools, and their end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from jaxvec._vector_env import VectorEnv
from jaxvec.callbacks._family import EnvFamily


class Face:
    """Owns the pools of an env. Closed by `close`, `with` or its end; a compiled function may keep it."""

    def __init__(self, family: EnvFamily) -> None:
        self._family = family

    @property
    def pools(self) -> Mapping[int, VectorEnv]:
        """The pools so far, by their number of envs: for `stats`, `infos`, `call` and the like."""
        return self._family.pools

    def raise_if_failed(self) -> None:
        """Raises the typed error behind a failure of a compiled program, if there was one."""
        self._family.raise_if_failed()

    def close(self) -> None:
        """Closes all pools. Twice is fine."""
        self._family.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes; where a program failed because of a pool, raises the pool's own, typed error."""
        self._family.__exit__(kind, error, trace)
