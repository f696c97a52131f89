"""Splits the rollouts of a pool into episodes, for datasets such as Minari's."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxvec._arguments import expand_options, expand_seeds, read_seed
from jaxvec._leaves import build
from jaxvec._results import TimeStep
from jaxvec._vector_env import VectorEnv
from jaxvec.compat._base import merge_final_info

__all__ = ["Episode", "Recorder"]


class Episode(NamedTuple):
    """An episode of one env, as pytrees of NumPy arrays, in the fields of Minari's `EpisodeBuffer`.

    Leaves are `[length, ...]`. In `observations` and `infos`, which start with those of the reset, they are
    `[length + 1, ...]`. `infos` has the declared keys and their masks. `seed` and `options` are `None` if the
    env reset itself. An episode that a fault or a reset has cut is truncated after its last step.
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
        """Starts with a reset of all envs.

        Args:
            envs: The pool.
            timestep: Result of the reset.
            seed: Seed of the reset, to be recorded: an int, one per env, or `None`.
            options: Options of the reset, to be recorded: a dict, one per env, or `None`.

        Raises:
            ValueError: The pool has `batch_size`, or no `final_obs`.
        """
        self._spec = envs.spec
        num_envs = envs.num_envs
        self._same_step = self._spec.autoreset.same_step
        if self._spec.first_ready or (self._same_step and not self._spec.has_final_obs):
            raise ValueError("a Recorder needs a pool with final_obs and without batch_size")
        self._no_action = build(
            self._spec.action, lambda leaf: np.zeros((num_envs, *leaf.shape), leaf.stored)
        )
        # Rows of each env's running episode, in pieces. The first row is the reset.
        self._pieces: list[list[Any]] = [[] for _ in range(num_envs)]
        self._resets: list[Any] = [(None, None)] * num_envs  # seeds and options of running episodes
        self._last = np.zeros((4, num_envs), np.int_)  # `_progress` of the latest rows
        self._episodes: list[Episode] = []  # those that have ended since the last call of `take`
        self.add_reset(timestep, seed=seed, options=options)

    def add(self, action: Any, timestep: TimeStep) -> None:
        """Records steps of all envs. Waits until the program has computed them.

        Args:
            action: Pytree of the actions, with leaves `[num_envs, ...]` or `[num_steps, num_envs, ...]`.
            timestep: Results of these steps, with the same axes.

        Raises:
            ValueError: An env was reset or restored before one of the steps, and `add_reset` was not called.
        """
        steps = jax.device_get((action, timestep))
        actions, timesteps = _part(steps, None) if timestep.terminated.ndim == 1 else steps
        self._check_lengths(timesteps)
        self._split(actions, timesteps)

    def add_reset(
        self, timestep: TimeStep, mask: Any = None, *, seed: Any = None, options: Any = None
    ) -> None:
        """Records a reset or restore of all or some envs. Episodes that it ends are truncated.

        Args:
            timestep: Result of the reset, with leaves `[num_envs, ...]`.
            mask: The envs that were reset, `[num_envs]` bool; `None` for all.
            seed: Seed of the reset, to be recorded: an int, one per env, or `None`.
            options: Options of the reset, to be recorded: a dict, one per env, or `None`.
        """
        num_envs = len(self._pieces)
        timestep, mask = jax.device_get((timestep, np.ones(num_envs, np.bool_) if mask is None else mask))
        seeds = expand_seeds(seed, num_envs)
        options_of_envs = expand_options(options, np.arange(num_envs))
        resets = [(read_seed(seeds[i]), options_of_envs.get(i)) for i in range(num_envs)]
        rows = self._rows(self._no_action, timestep)
        for env_id in np.flatnonzero(mask).tolist():
            self._end(env_id, cut=True)
            self._pieces[env_id].append(_part(rows, [env_id]))
            self._resets[env_id] = resets[env_id]
        self._last = np.where(mask, _progress(timestep), self._last)

    def take(self, *, cut: bool = False) -> list[Episode]:
        """Returns the episodes that have ended since the last call.

        Args:
            cut: Whether to end the recording: running episodes are truncated, and returned, too.
        """
        if cut:
            for env_id in range(len(self._pieces)):
                self._end(env_id, cut=True)
        episodes = self._episodes
        self._episodes = []
        return episodes

    def _split(self, action: Any, timestep: TimeStep[Any]) -> None:
        """Adds steps `[num_steps, num_envs, ...]` to the running episodes."""
        steps = self._rows(action, merge_final_info(timestep)._replace(obs=timestep.last_obs))
        starts = self._rows(action, timestep)  # of the episodes after an end
        _, over, fault, idle = _progress(timestep)
        for env_id, pieces in enumerate(self._pieces):
            start = 0
            for end in np.flatnonzero(over[:, env_id] > idle[:, env_id]):
                # The row of a fault is no step of the env.
                cut = bool(fault[end, env_id])
                pieces.append(_part(steps, (slice(start, end + 1 - cut), env_id)))
                self._end(env_id, cut=cut)
                start = end + 1
                if self._same_step:
                    pieces.append(_part(starts, (slice(end, start), env_id)))
            pieces.append(_part(steps, (slice(start, len(idle) - idle[:, env_id].sum()), env_id)))

    def _check_lengths(self, timestep: TimeStep[Any]) -> None:
        """Raises if the lengths of episodes show that an env was reset or restored between the steps."""
        rows = np.concatenate([self._last[:, None], _progress(timestep)], axis=1)
        before, was_over, was_fault, _ = rows[:, :-1]
        length, _, fault, idle = rows[:, 1:]
        # The length in the row after an end; with manual resets, which are reported, -1 is wrong always.
        first = 1 if self._same_step else 0 if self._spec.autoreset.resets else -1
        expected = np.where(was_over, first, before + 1) - fault
        # After a fault, an env may also continue from a saved state.
        wrong = (length != np.where(idle, before, expected)) & (was_fault == 0)
        if wrong.any():
            step, env_id = np.argwhere(wrong)[0]
            raise ValueError(
                f"env {env_id} was reset or restored before step {step} of these: its episode now has length "
                f"{length[step, env_id]}; pass the result of every reset or restore to add_reset"
            )
        self._last = rows[:, -1]

    def _rows(self, action: Any, timestep: TimeStep[Any]) -> Any:
        infos = {name: timestep.info[name] for name in self._spec.declared.keys}
        return action, *timestep[1:4], timestep.obs, infos

    def _end(self, env_id: int, *, cut: bool) -> None:
        """Ends the running episode of an env, and keeps it if it has steps; truncated if it is `cut`."""
        pieces = self._pieces[env_id]
        seed, options = self._resets[env_id]
        self._resets[env_id] = (None, None)
        if sum(len(rewards) for _, rewards, *_ in pieces) > 1:
            *steps, obs, infos = jax.tree.map(lambda *parts: np.concatenate(parts), *pieces)
            episode = Episode._make([seed, options, obs, *_part(steps, slice(1, None)), infos])
            episode.truncations[-1] |= cut
            self._episodes.append(episode)
        pieces.clear()


def _progress(timestep: TimeStep[Any]) -> NDArray[np.int_]:
    """Returns `[4, ...]`: the lengths of episodes, and the marks of ends, of faults and of idle rows."""
    over = timestep.done
    marks = (timestep.info.get(name, np.zeros_like(over)) for name in ("fault", "idle"))
    return np.stack([timestep.info["episode_length"], over, *marks])


def _part(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)
