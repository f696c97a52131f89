"""Steps a slice of a pool's envs, in turn, into rows of the segment.

This is the one stepping code path: a worker process runs it on its slice, the serial backend on the
whole pool. A slot is its env's index in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from jaxvec import _rows
from jaxvec._envs import Env, EnvFailure
from jaxvec._rows import InvalidValue
from jaxvec._seeds import NONE
from jaxvec._segment import Arrays
from jaxvec._spaces import DictNode
from jaxvec._spec import PoolSpec


class EnvSlice:
    """The envs `first`, `first + 1`, … of a pool. Inside, an env goes by its index in the slice."""

    def __init__(
        self,
        envs: list[Env],
        *,
        first: int,
        worker: int,
        spec: PoolSpec,
        arrays: Arrays,
        autoreset_mode: AutoresetMode,
    ) -> None:
        self._envs = envs
        self.first = first
        self._autoreset_mode = autoreset_mode
        self._spec = spec
        count = len(envs)
        data = [leaf.path for leaf in (*spec.action_leaves, *spec.timestep_leaves)]
        rows = {path: arrays[path][first : first + count] for path in data}
        self._seeds = arrays["seed",][first : first + count]
        self._running = memoryview(arrays["running",][worker])
        self._read_actions = _rows.reader(spec.action, rows)
        self._write_obs = _rows.writer(spec.obs, rows)
        self._gather_obs = _rows.gatherer(spec.obs, rows)
        self._reward = _rows.scalars(rows[spec.reward.path])
        self._terminated = _rows.scalars(rows[spec.terminated.path])
        self._truncated = _rows.scalars(rows[spec.truncated.path])
        self._return = _rows.scalars(rows["info", "episode_return"])
        self._length = _rows.scalars(rows["info", "episode_length"])
        self._declared = _DeclaredInfo(spec.declared, rows)
        self._declares = bool(spec.declared.keys)
        self._vector_reward = spec.reward.shape != ()
        self._final = _FinalStep(spec, rows)

        # Returns add up in float64 here, whatever the segment stores.
        self._zero: Any = np.zeros(spec.reward.shape) if self._vector_reward else 0.0
        self._returns: list[Any] = [self._zero] * count
        self._lengths = [0] * count
        # Whose last step ended an episode: the next clears the row's flags and final rows, or is the
        # reset, under next-step autoreset.
        self._marked = [False] * count
        self._options: dict[str, Any] | None = None  # of resets from outside
        self.infos: list[dict[str, Any]] = [{} for _ in range(count)]  # raw, of each env's last call
        rows["info", "env_id"][:] = range(first, first + count)

    def reset(self, slots: NDArray[Any]) -> None:
        """Resets the envs of `slots` with the seeds in the segment and the options set last.

        Raises:
            EnvFailure: an env raised or returned wrong data; later slots were not reset.
        """
        for index in (slots - self.first).tolist():
            seed = int(self._seeds[index])
            self._running[0] = self.first + index + 1
            try:
                self._write_obs(
                    index, self._begin_episode(index, None if seed == NONE else seed, self._options)
                )
            except BaseException as error:
                raise EnvFailure(self.first + index, "reset") from error
        self._running[0] = 0

    def step(self, slots: NDArray[Any]) -> None:
        """Steps the envs of `slots` with the actions in the segment.

        This is the hot loop: what it adds to `env.step` is what jaxvec costs. So attributes are read
        once, the rare is behind one test, and scalars go through memoryviews, NumPy's quicker half.

        Raises:
            EnvFailure: an env raised or returned wrong data; later slots were not stepped.
        """
        envs, running, after_first = self._envs, self._running, self.first + 1
        rewards, episode_returns, episode_lengths = self._reward, self._return, self._length
        returns, lengths, marked, infos = self._returns, self._lengths, self._marked, self.infos
        write_obs, vector_reward, declares = self._write_obs, self._vector_reward, self._declares
        gather_obs, gathered = self._gather_obs, list[Any]()
        next_step = self._autoreset_mode is AutoresetMode.NEXT_STEP
        rows = slots - self.first
        indices: list[int] = rows.tolist()
        index, action = -1, None
        try:
            for index, action in zip(indices, self._read_actions(rows), strict=True):
                running[0] = after_first + index
                if next_step and marked[index]:
                    obs = self._begin_episode(index, None, None)
                    if gather_obs is None:
                        write_obs(index, obs)
                    else:
                        gathered.append(obs)
                    continue
                result: Any = envs[index].step(action)
                try:
                    obs, reward, terminated, truncated, info = result
                except (TypeError, ValueError) as error:
                    raise InvalidValue(
                        f"step must return (obs, reward, terminated, truncated, info), got {_outline(result)}"
                    ) from error
                if info.__class__ is not dict:
                    _require_dict("step", info)
                if vector_reward or not isinstance(reward, float):
                    reward = self._conform_reward(reward)
                rewards[index] = reward
                returns[index] = episode_returns[index] = returns[index] + reward
                lengths[index] = episode_lengths[index] = lengths[index] + 1
                if terminated or truncated or marked[index]:
                    obs, info = self._end_step(index, obs, bool(terminated), bool(truncated), info)
                if gather_obs is None:
                    write_obs(index, obs)
                else:
                    gathered.append(obs)
                if declares:
                    self._declared.write(index, info)
                if info or infos[index]:
                    infos[index] = info
            if gather_obs is not None and not gather_obs(indices, gathered):
                actions = self._read_actions(rows)
                for index, action, obs in zip(indices, actions, gathered, strict=True):  # noqa: B007
                    write_obs(index, obs)
        except EnvFailure:
            raise  # of the reset that follows an episode's last step
        except BaseException as error:
            raise EnvFailure(self.first + index, "step", action) from error
        running[0] = 0

    def set_options(self, options: dict[str, Any] | None) -> None:
        """Sets the options that every `reset` from now on passes to its envs."""
        self._options = options

    def call(self, slots: Iterable[int], name: str, args: Sequence[Any], kwargs: Any) -> list[Any]:
        """Returns attribute `name` of the envs of `slots`, called if it can be, with `args` of each."""
        results: list[Any] = []
        for slot, mine in zip(slots, args, strict=True):
            try:
                attribute = self._envs[slot - self.first].get_wrapper_attr(name)
                results.append(attribute(*mine, **kwargs) if callable(attribute) else attribute)
            except BaseException as error:
                raise EnvFailure(slot, name) from error
        return results

    def set_attr(self, slots: Iterable[int], name: str, values: Sequence[Any]) -> None:
        """Sets attribute `name` of the envs of `slots` to one of `values` each."""
        for slot, value in zip(slots, values, strict=True):
            try:
                self._envs[slot - self.first].set_wrapper_attr(name, value)
            except BaseException as error:
                raise EnvFailure(slot, f"set_attr({name!r})") from error

    def _end_step(
        self, index: int, obs: Any, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Does what is left of a step that ends an episode, or whose row is marked.

        Returns:
            Observation and info for the row: after same-step autoreset, those of the new episode.
        """
        over = terminated or truncated
        self._terminated[index] = terminated
        self._truncated[index] = truncated
        self._marked[index] = over
        if over and self._autoreset_mode is AutoresetMode.SAME_STEP:
            # Write before the reset: an env may reuse its observation's and its info's memory.
            final_info = dict(info)
            self._final.write(index, obs, final_info)
            try:
                obs, info = self._restart(index, None, None)
            except BaseException as error:
                raise EnvFailure(self.first + index, "reset") from error
            return obs, {**info, "final_info": final_info}
        self._final.clear(index)
        return obs, info

    def _begin_episode(self, index: int, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Resets an env in a call of its own: the row holds no reward and a new episode.

        Returns:
            The observation, which is still to be written.
        """
        obs, info = self._restart(index, seed, options)
        self._marked[index] = False
        self._reward[index] = self._zero
        self._terminated[index] = False
        self._truncated[index] = False
        self._return[index] = self._zero
        self._length[index] = 0
        self._final.clear(index)
        self._declared.write(index, info)
        self.infos[index] = info
        return obs

    def _restart(
        self, index: int, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        result: Any = self._envs[index].reset(seed=seed, options=options)
        self._returns[index] = self._zero
        self._lengths[index] = 0
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidValue(f"reset must return (obs, info), got {_outline(result)}")
        obs, info = result
        return obs, _require_dict("reset", info)

    def _conform_reward(self, reward: Any) -> Any:
        """Returns the reward in float64 and the spec's shape."""
        shape = self._spec.reward.shape
        value = np.asarray(reward)
        if shape == () and value.size == 1:
            value = value.reshape(())  # Gymnasium takes shape (1,) for a scalar too
        if value.shape != shape:
            raise InvalidValue(
                f"reward: expected shape {shape}, got {value.shape}; an env with vector rewards says so in "
                "a reward_space attribute"
            )
        if value.dtype.kind not in "biuf":
            raise InvalidValue(f"reward: expected a number, got {type(reward).__name__}")
        return float(value) if shape == () else value.astype(np.float64)


class _DeclaredInfo:
    """Writes the declared keys of a raw info, each with its mask; a missing key reads as zero."""

    def __init__(self, node: DictNode, arrays: Arrays) -> None:
        pairs = zip(node.keys[::2], node.children[::2], node.children[1::2], strict=True)
        self._fields = [
            (key, _rows.writer(child, arrays), _rows.zeroer(child, arrays), _rows.column(mask, arrays))
            for key, child, mask in pairs
        ]

    def write(self, index: int, info: dict[str, Any]) -> None:
        for key, write, clear, mask in self._fields:
            present = key in info
            if present:
                write(index, info[key])
            elif mask[index]:
                clear(index)
            mask[index] = present


class _FinalStep:
    """The last observation and info of an episode, under same-step autoreset; zero elsewhere."""

    def __init__(self, spec: PoolSpec, arrays: Arrays) -> None:
        self._obs = self._info = None
        if spec.has_final_obs:
            node = spec.info.child("final_obs")
            mask = _rows.column(spec.info.child("_final_obs"), arrays)
            self._obs = (_rows.writer(node, arrays), _rows.zeroer(node, arrays), mask)
        if spec.has_final_info:
            self._info = _DeclaredInfo(spec.info.child("final_info"), arrays)
        self._written: set[int] = set()  # whose final rows are not zero

    def write(self, index: int, obs: Any, info: dict[str, Any]) -> None:
        self._written.add(index)
        if self._obs is not None:
            write, _, mask = self._obs
            write(index, obs)
            mask[index] = True
        if self._info is not None:
            self._info.write(index, info)

    def clear(self, index: int) -> None:
        if index not in self._written:
            return
        self._written.remove(index)
        if self._obs is not None:
            _, clear, mask = self._obs
            clear(index)
            mask[index] = False
        if self._info is not None:
            self._info.write(index, {})


def _require_dict(operation: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise InvalidValue(f"{operation} must return info as a dict, got {type(info).__name__}")
    return info


def _outline(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
