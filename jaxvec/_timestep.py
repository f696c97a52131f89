"""What a reset or a step returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class TimeStep(NamedTuple):
    """The batched result of a reset or a step, in Gymnasium's order.

    Arrays are NumPy's from `VectorEnv`'s methods and JAX's from `jaxvec.reset` and `jaxvec.step`.
    dtypes are the spaces', as JAX canonicalises them (float64 becomes float32 unless x64 is on).

    Attributes:
        obs: pytree in the structure of the observation space, leaves `[num_envs, ...]`.
        reward: `[num_envs]` float, or `[num_envs, ...]` where the env has a `reward_space`.
        terminated: `[num_envs]` bool.
        truncated: `[num_envs]` bool.
        info: dict of fixed keys and shapes: `env_id` `[num_envs]` int32; `episode_return` (as
            reward) and `episode_length` `[num_envs]` int32 of the episode that just ended, else
            of the one that runs; under same-step autoreset `final_obs` (as obs, zero where no
            episode ended) and its mask `_final_obs`; and each declared key with its mask, under same-step
            autoreset once more in `final_info`, of the steps that ended an episode. `fault` `[num_envs]` bool
            with `on_fault="restart"`: which steps were cut short; `idle` `[num_envs]` bool with
            `episodic=True`: which were not taken.

    Example:
        ```python
        with jaxvec.make("CartPole-v1", 2) as envs:
            envs.reset(seed=0)
            obs, reward, terminated, truncated, info = envs.step([0, 1])
            print(obs.shape, reward, info["episode_length"])  # (2, 4) [1. 1.] [1 1]
        ```
    """

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: dict[str, Any]
