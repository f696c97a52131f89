"""Statistics of the latest episodes, and episodes of an evaluation, inside compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxvec._results import TimeStep
from jaxvec.callbacks._functions import step
from jaxvec.callbacks._handle import Handle


class Episodes(NamedTuple):
    """Statistics of the latest episodes; a pytree that a compiled loop carries.

    Episodes that a fault has cut (`info["fault"]`) do not count.

    Attributes:
        last: Dict of the latest values, float32 `[window]`, unordered. The key `_name` has the mask of
            `name`: 1 where an episode has ended that has the value, else 0.
        total: Number of episodes that have ended, int32 `[]`.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 8) as envs:
            handle, timestep = jaxvec.reset(envs, seed=0)
            episodes = jaxvec.logging.Episodes.create()
            for _ in range(100):
                handle, timestep = jaxvec.step(handle, jnp.zeros(8, int))
                episodes = episodes.add(timestep)
            print(sorted(episodes.means()))  # ['episode_length', 'episode_return', 'episodes']
        ```
    """

    last: dict[str, jax.Array]
    total: jax.Array

    @classmethod
    def create(cls, infos: Sequence[str] = (), *, window: int = 100) -> Self:
        """Returns statistics without episodes.

        Args:
            infos: Keys of scalar infos that `make(info=...)` declares, to average over the episode ends that
                have them.
            window: Number of episodes to average over.
        """
        names = ("episode_return", "episode_length", *infos)
        return cls({key: jnp.zeros(window) for name in names for key in (name, f"_{name}")}, jnp.int32(0))

    def add(self, timestep: TimeStep) -> Self:
        """Adds the episodes that ended.

        Args:
            timestep: Result of a step; or of several steps, with leaves `[num_steps, num_envs]`. Not that of
                a reset with a mask, which repeats the latest results of the other envs.

        Raises:
            ValueError: An info is not declared, or is not one number per env; or see `TimeStep.last_info`.
        """
        done = timestep.terminated | timestep.truncated
        for mark in ("idle", "fault"):
            done = done & ~jnp.asarray(timestep.info.get(mark, False))
        ends: dict[str, Any] = {**timestep.info, **timestep.last_info}
        window = next(iter(self.last.values())).size
        rank = jnp.cumsum(done.reshape(-1))  # from 1, among the episodes that ended
        newest = done.reshape(-1) & (rank > rank[-1] - window)
        slot = jnp.where(newest, (self.total + rank - 1) % window, window)  # `window`: dropped
        columns: dict[str, Any] = {}
        for name in self._names:
            if name not in ends or jnp.shape(ends[name]) != done.shape:
                shape = jnp.shape(ends[name]) if name in ends else "no such key; declare it in make"
                raise ValueError(f"info {name!r}: expected one number per env, {done.shape}, got {shape}")
            columns |= {name: ends[name], f"_{name}": ends.get(f"_{name}", done)}
        # One scatter for all statistics takes less time than one for each.
        before = jnp.stack(list(self.last.values()), axis=1)
        ended = [columns[key].reshape(-1).astype(jnp.float32) for key in self.last]
        after = before.at[slot].set(jnp.stack(ended, axis=1), mode="drop")
        last = dict(zip(self.last, after.T, strict=True))
        return type(self)(last, self.total + rank[-1].astype(jnp.int32))

    def means(self) -> dict[str, jax.Array]:
        """Returns the mean of each statistic, NaN without values, and the number of `episodes` so far."""
        last = self.last
        means = {name: last[name].mean(where=last[f"_{name}"] > 0) for name in self._names}
        return {"episodes": self.total, **means}

    @property
    def _names(self) -> list[str]:
        return [name for name in self.last if f"_{name}" in self.last]


def play_episodes(
    act: Callable[[Any, TimeStep], tuple[Any, Any]],
    memory: Any,
    handle: Handle,
    timestep: TimeStep,
    *,
    max_steps: int = 10_000,
) -> jax.Array:
    """Plays an episode in each env, such as for an evaluation. Works inside `jit`.

    Args:
        act: Function of the memory and the latest `TimeStep`. It returns the next memory and the actions.
        memory: Pytree of arrays for `act`, such as the state of a recurrent network; or None.
        handle: Handle of envs that were made with `autoreset_mode="EPISODIC"`.
        timestep: Result of `reset`, with the first observations.
        max_steps: Number of steps after which running episodes are cut.

    Returns:
        Returns of the episodes, `[num_envs]` float32; NaN for one that a fault has cut. If the envs have
        several rewards, they are their means.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 8, autoreset_mode="EPISODIC") as envs:
            act = lambda memory, timestep: (memory, jnp.zeros(8, int))
            score = jax.jit(lambda *reset: jaxvec.logging.play_episodes(act, None, *reset))
            print(float(score(*jaxvec.reset(envs, seed=0)).mean()))  # 9.375
        ```
    """

    def unfinished(carry: Any) -> jax.Array:
        _, _, timestep, number = carry
        return ~timestep.done.all() & (number < max_steps)

    def body(carry: Any) -> Any:
        memory, handle, timestep, number = carry
        memory, action = act(memory, timestep)
        return memory, *step(handle, action), number + 1

    _, _, timestep, _ = jax.lax.while_loop(unfinished, body, (memory, handle, timestep, 0))
    returns = timestep.info["episode_return"]
    cut = jnp.asarray(timestep.info.get("fault", False))
    return jnp.where(cut, jnp.nan, returns.reshape(len(returns), -1).mean(1))
