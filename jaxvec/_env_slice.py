"""Steps a slice of a pool's envs, in turn, into rows of the segment.

This is the one stepping code path: a worker process runs it on its slice, the serial backend on the
whole pool. A slot's index is its env's index in the pool.
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

# Status of a slot, in the segment: what a timeout or a death is blamed on.
IDLE, RUNNING = range(2)


class EnvSlice:
    """The envs `first`, `first + 1`, … of a pool."""

    def __init__(
        self,
        envs: list[Env],
        *,
        first: int,
        spec: PoolSpec,
        arrays: Arrays,
        autoreset_mode: AutoresetMode,
    ) -> None:
        self._envs = envs
        self.first = first
        self._autoreset_mode = autoreset_mode
        self._spec = spec
        self._seeds = arrays["seed",]
        self._status = arrays["status",]
        self._read_actions = _rows.reader(spec.action, arrays)
        self._write_obs = _rows.writer(spec.obs, arrays)
        self._reward = arrays[spec.reward.path]
        self._terminated = arrays[spec.terminated.path]
        self._truncated = arrays[spec.truncated.path]
        self._return = arrays["info", "episode_return"]
        self._length = arrays["info", "episode_length"]
        self._declared = _DeclaredInfo(spec.declared, arrays)
        self._declares = bool(spec.declared.keys)
        self._vector_reward = spec.reward.shape != ()
        self._final = _FinalStep(spec, arrays)

        count = len(envs)
        # Returns add up in float64 here, whatever the segment stores.
        self._no_return: Any = np.zeros(spec.reward.shape) if spec.reward.shape else 0.0
        self._returns: list[Any] = [self._no_return] * count
        self._lengths = [0] * count
        self._over = [False] * count
        self._options: dict[str, Any] | None = None  # of resets from outside
        self.infos: list[dict[str, Any]] = [{} for _ in range(count)]  # raw, of each env's last call
        arrays["info", "env_id"][first : first + count] = range(first, first + count)

    def reset(self, slots: NDArray[Any]) -> None:
        """Resets the envs of `slots` with the seeds in the segment and the options set last.

        Raises:
            EnvFailure: an env raised or returned wrong data; later slots were not reset.
        """
        for slot in slots.tolist():
            seed = int(self._seeds[slot])
            self._status[slot] = RUNNING
            try:
                self._begin_episode(slot, None if seed == NONE else seed, self._options)
            except BaseException as error:
                raise EnvFailure(slot, "reset") from error
            self._status[slot] = IDLE

    def step(self, slots: NDArray[Any]) -> None:
        """Steps the envs of `slots` with the actions in the segment.

        Raises:
            EnvFailure: an env raised or returned wrong data; later slots were not stepped.
        """
        next_step = self._autoreset_mode is AutoresetMode.NEXT_STEP
        for slot, action in zip(slots.tolist(), self._read_actions(slots), strict=True):
            self._status[slot] = RUNNING
            try:
                if next_step and self._over[slot - self.first]:
                    self._begin_episode(slot, None, None)
                else:
                    self._step(slot, action)
            except EnvFailure:
                raise  # of the reset that follows an episode's last step
            except BaseException as error:
                raise EnvFailure(slot, "step", action) from error
            self._status[slot] = IDLE

    def set_options(self, options: dict[str, Any] | None) -> None:
        """Sets the options that every `reset` from now on passes to its envs."""
        self._options = options

    def call(self, slots: Iterable[int], name: str, args: Any, kwargs: Any) -> list[Any]:
        """Returns attribute `name` of the envs of `slots`, called with the arguments if it can be."""
        results: list[Any] = []
        for slot in slots:
            try:
                attribute = self._envs[slot - self.first].get_wrapper_attr(name)
                results.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
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

    def _step(self, slot: int, action: Any) -> None:
        index = slot - self.first
        env = self._envs[index]
        result: Any = env.step(action)
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError) as error:
            raise InvalidValue(
                f"step must return (obs, reward, terminated, truncated, info), got {_outline(result)}"
            ) from error
        if type(info) is not dict:
            _require_dict("step", info)
        if self._vector_reward or not isinstance(reward, float):
            reward = self._conform_reward(reward)
        self._reward[slot] = reward
        terminated, truncated = bool(terminated), bool(truncated)
        self._terminated[slot] = terminated
        self._truncated[slot] = truncated
        self._returns[index] = episode_return = self._returns[index] + reward
        self._lengths[index] = length = self._lengths[index] + 1
        self._return[slot] = episode_return
        self._length[slot] = length
        over = terminated or truncated
        if over and self._autoreset_mode is AutoresetMode.SAME_STEP:
            # Write before the reset: an env may reuse its observation's and its info's memory.
            final_info = dict(info)
            self._final.write(slot, obs, final_info)
            try:
                obs, info = self._restart(index, None, None)
            except BaseException as error:
                raise EnvFailure(slot, "reset") from error
            info = {**info, "final_info": final_info}
            over = False
        elif slot in self._final.written:
            self._final.clear(slot)
        self._over[index] = over
        self._write_obs(slot, obs)
        if self._declares:
            self._declared.write(slot, info)
        self.infos[index] = info

    def _begin_episode(self, slot: int, seed: int | None, options: dict[str, Any] | None) -> None:
        """Resets an env in a call of its own: the row holds no reward and a new episode."""
        index = slot - self.first
        obs, info = self._restart(index, seed, options)
        self._over[index] = False
        self._reward[slot] = 0
        self._terminated[slot] = False
        self._truncated[slot] = False
        self._return[slot] = 0
        self._length[slot] = 0
        if slot in self._final.written:
            self._final.clear(slot)
        self._write_obs(slot, obs)
        self._declared.write(slot, info)
        self.infos[index] = info

    def _restart(
        self, index: int, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        result: Any = self._envs[index].reset(seed=seed, options=options)
        self._returns[index] = self._no_return
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

    def write(self, slot: int, info: dict[str, Any]) -> None:
        for key, write, clear, mask in self._fields:
            present = key in info
            if present:
                write(slot, info[key])
            elif mask[slot]:
                clear(slot)
            mask[slot] = present


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
        self.written: set[int] = set()  # slots whose final rows are not zero

    def write(self, slot: int, obs: Any, info: dict[str, Any]) -> None:
        self.written.add(slot)
        if self._obs is not None:
            write, _, mask = self._obs
            write(slot, obs)
            mask[slot] = True
        if self._info is not None:
            self._info.write(slot, info)

    def clear(self, slot: int) -> None:
        self.written.remove(slot)
        if self._obs is not None:
            _, clear, mask = self._obs
            clear(slot)
            mask[slot] = False
        if self._info is not None:
            self._info.write(slot, {})


def _require_dict(operation: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise InvalidValue(f"{operation} must return info as a dict, got {type(info).__name__}")
    return info


def _outline(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
