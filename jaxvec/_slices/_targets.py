"""What the compiled loop steps for each env: what is inside Gymnasium's own wrappers, if that is the same.

A step or a reset through `TimeLimit`, `OrderEnforcing` and `PassiveEnvChecker` takes three more calls, which
do nothing, after an env's first steps, but count to the limit. That is done here and in the loop, and in the
wrapper's own attribute, so nobody can tell.
"""

from __future__ import annotations

from typing import Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

_KINDS = (TimeLimit, OrderEnforcing, PassiveEnvChecker)
_METHODS = {kind: (kind.step, kind.reset) for kind in _KINDS}


class Targets:
    """Of the envs of a slice, which go by their index there.

    Attributes:
        envs: whose `step` and `reset` are called.
        limits: the attributes of the `TimeLimit`s around each that are passed by but count, inmost first.
    """

    def __init__(self, envs: list[Any], *, see_through: bool) -> None:
        """Begins with the envs themselves: their first steps go through all that is around them."""
        self.envs = list(envs)
        self.limits: list[tuple[dict[str, Any], ...]] = [() for _ in envs]
        self._passed: list[tuple[Any, ...]] = [() for _ in envs]  # the wrappers
        self._see_through = see_through
        self._unseen = set(range(len(envs))) if see_through else set[int]()

    def put(self, index: int, env: Any) -> None:
        """Takes a new env, or one that somebody may have changed."""
        self.envs[index], self.limits[index], self._passed[index] = env, (), ()
        if self._see_through:
            self._unseen.add(index)

    def put_back(self, index: int, env: Any) -> None:
        """Takes an env whose attributes have values again that they had before; see `StatefulEnv.put`."""
        if not all(map(_is_done, self._passed[index])):
            self.put(index, env)

    def restart(self, index: int) -> None:
        """Has those that are passed by count anew: the env is about to be reset."""
        for limit in self.limits[index]:
            limit["_elapsed_steps"] = 0

    def look(self) -> None:
        """Looks through the wrappers of those that are new, as soon as these have nothing more to do."""
        for index in tuple(self._unseen):
            env: Any = self.envs[index]
            passed: list[Any] = []
            while _is_plain(env) and _is_done(env):
                passed.append(env)
                env = env.env
            if not _is_plain(env):
                limits = [vars(wrapper) for wrapper in reversed(passed) if isinstance(wrapper, TimeLimit)]
                self.envs[index], self.limits[index], self._passed[index] = env, tuple(limits), tuple(passed)
                self._unseen.remove(index)


def inside(env: Any) -> Any:
    """Returns the env within those of Gymnasium's wrappers that leave observations as they are."""
    while type(env) in _METHODS:
        env = env.env
    return env


def _is_plain(env: Any) -> bool:
    """Says whether steps and resets of an env are Gymnasium's own, of a wrapper that we know."""
    kind = type(env)
    if kind not in _METHODS or (kind.step, kind.reset) != _METHODS[kind]:
        return False
    return vars(env).keys().isdisjoint(("step", "reset"))


def _is_done(env: Any) -> bool:
    """Says whether such a wrapper does no more in a step or a reset than to count, if that."""
    if isinstance(env, OrderEnforcing):
        return env.has_reset
    if isinstance(env, PassiveEnvChecker):
        # Older ones look at the first step only.
        return env.checked_reset and env.checked_step and getattr(env, "checked_data_reuse", True)
    return isinstance(getattr(env, "_elapsed_steps", None), int)
