"""PPO on MuJoCo envs: `ppo.py` with other defaults.

    python -m jaxvec.examples.ppo_mujoco
    python -m jaxvec.examples.ppo_mujoco --env Hopper-v5 --total-steps 1000000

Observations and rewards are scaled as by `VecNormalize` of Stable-Baselines3, with statistics in the training
state. The reported returns are sums of unscaled rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from jaxvec.adapters._packages import install_command
from jaxvec.examples import ppo
from jaxvec.logging import TrainingRun


@dataclass(frozen=True)
class Config(ppo.Config):
    """Trains PPO on a MuJoCo env of Gymnasium."""

    env: str = "HalfCheetah-v5"  # Gymnasium id of a MuJoCo env
    num_envs: int = 16  # number of envs
    num_steps: int = 128  # steps of each env in an update
    total_steps: int = 2_000_000  # env steps, rounded up to a multiple of num-envs x num-steps
    num_epochs: int = 10  # passes over the steps of an update
    num_minibatches: int = 32  # gradient steps per pass
    lr: float = 3e-4  # learning rate, falling linearly to 0
    entropy_weight: float = 0.0  # weight of the entropy bonus


def main(argv: Sequence[str] | None = None) -> TrainingRun:
    if find_spec("mujoco") is None:
        raise SystemExit(f"this example needs mujoco: {install_command('mujoco')}")
    return ppo.main(argv, Config, "ppo_mujoco")


if __name__ == "__main__":
    main()
