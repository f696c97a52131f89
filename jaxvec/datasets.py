"""Splits the rollouts of a pool into episodes, for datasets such as Minari's."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxvec._arguments import NO_SEED, expand_options, expand_seeds
from jaxvec._spec import Autoreset, TimeStep, build
from jaxvec._vector_env import VectorEnv
from jaxvec.compat._base import merge_final_info, pop_final_obs

__all__ = ["Episode", "Recorder"]


class Episode(NamedTuple):
    """An episode of one env, as pytrees of NumPy arrays, in the fields of Minari's `EpisodeBuffer`.

    Leaves are `[length, ...]`. In `observations` and `infos`, which start with those of the reset, they are
    `[length + 1, ...]`. `infos` has the declared keys and their masks. `seed` and `options` are `None` if the
    env reset itself.
    """

    seed: int | None
    options: dict[str, Any] | None
    observations: Any
    actions: Any
    rewards: NDArray[Any]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    infos: dict[str, Any]


class Recorder:
    """Keeps the steps of a pool's envs, and splits them into episodes.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            handle, first = jaxvec.reset(envs, seed=0)
            recorder = jaxvec.datasets.Recorder(envs, first, seed=0)
            actions = jnp.ones((50, 2), int)
            handle, timesteps = jax.lax.scan(jaxvec.step, handle, actions)
            recorder.add(actions, timesteps)
        episode = recorder.take()[0]
        print(episode.seed, len(episode.observations) - len(episode.rewards))  # 0 1
        ```
    """

    def __init__(self, envs: VectorEnv, timestep: TimeStep, *, seed: Any = None, options: Any = None) -> None:
        """Starts with a reset of all envs. After another reset of all envs, make a new recorder.

        Args:
            envs: The pool.
            timestep: Result of the reset.
            seed: Seed of the reset, to be recorded: an int, one per env, or `None`.
            options: Options of the reset, to be recorded: a dict, one per env, or `None`.

        Raises:
            ValueError: The pool has `batch_size`, no `final_obs`, or `autoreset_mode="DISABLED"`.
        """
        self._spec, num_envs = envs.spec, envs.num_envs
        self._same_step = self._spec.autoreset is Autoreset.SAME_STEP
        ends = self._spec.has_final_obs if self._same_step else self._spec.autoreset is not Autoreset.DISABLED
        if self._spec.first_ready or not ends:
            raise ValueError("a Recorder needs a pool with autoreset, with final_obs and without batch_size")
        seeds = expand_seeds(seed, num_envs)
        each = expand_options(options, np.arange(num_envs), num_envs) or [None] * num_envs
        given = [None if seeds is None or seeds[i] == NO_SEED else int(seeds[i]) for i in range(num_envs)]
        self._resets: list[Any] = [*zip(given, each, strict=True)]  # seeds and options of running episodes
        no_action = build(self._spec.action, lambda leaf: np.zeros((num_envs, *leaf.shape), leaf.stored))
        rows = self._rows(no_action, jax.device_get(timestep))
        # Rows of each env's running episode, in pieces. The first row is the reset.
        self._pieces = [[_part(rows, [env_id])] for env_id in range(num_envs)]
        self._chunks: list[tuple[Any, TimeStep[Any]]] = []  # steps that `take` has not split yet

    def add(self, action: Any, timestep: TimeStep) -> None:
        """Records steps of all envs. Waits until the program has computed them.

        Args:
            action: Pytree of the actions, with leaves `[num_envs, ...]` or `[num_steps, num_envs, ...]`.
            timestep: Results of these steps, with the same axes.
        """
        steps = jax.device_get((action, timestep))
        self._chunks.append(_part(steps, None) if timestep.terminated.ndim == 1 else steps)

    def take(self, *, cut: bool = False) -> list[Episode]:
        """Returns the episodes that have ended since the last call.

        Args:
            cut: Whether to end the recording: running episodes are truncated, and returned, too.
        """
        episodes: list[Episode] = []
        for action, timestep in self._chunks:
            final, last_obs = merge_final_info(timestep, np), pop_final_obs(timestep, np)[1]
            steps = self._rows(action, final if last_obs is None else final._replace(obs=last_obs))
            starts = self._rows(action, timestep)  # of the episodes after an end
            done = timestep.terminated | timestep.truncated
            idle = timestep.info.get("idle", np.zeros_like(done))  # steps after an end, with `EPISODIC`
            for env_id, pieces in enumerate(self._pieces):
                start = 0
                for stop in 1 + np.flatnonzero(done[:, env_id] & ~idle[:, env_id]):
                    pieces.append(_part(steps, (slice(start, stop), env_id)))
                    episodes.append(self._end(env_id))
                    if self._same_step:
                        pieces.append(_part(starts, (slice(stop - 1, stop), env_id)))
                    start = stop
                pieces.append(_part(steps, (slice(start, len(idle) - idle[:, env_id].sum()), env_id)))
        self._chunks = []
        for env_id, pieces in enumerate(self._pieces):
            if cut and sum(len(rewards) for _, rewards, *_ in pieces) > 1:
                episodes.append(self._end(env_id))
                episodes[-1].truncations[-1] = True
        return episodes

    def _rows(self, action: Any, timestep: TimeStep[Any]) -> Any:
        infos = {name: timestep.info[name] for name in self._spec.declared.keys}
        return action, *timestep[1:4], timestep.obs, infos

    def _end(self, env_id: int) -> Episode:
        *steps, obs, infos = jax.tree.map(lambda *parts: np.concatenate(parts), *self._pieces[env_id])
        reset, self._resets[env_id] = self._resets[env_id], (None, None)
        self._pieces[env_id].clear()
        return Episode._make([*reset, obs, *_part(steps, slice(1, None)), infos])


def _part(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)
