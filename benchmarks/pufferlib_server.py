"""Server process that steps PufferLib envs for `peers.pufferlib`.

Each line of standard input is a number of steps. The server prints `done` after the steps.
"""

import functools
import sys

import gymnasium
import numpy as np
import pufferlib.emulation
import pufferlib.vector


def make(env_id):
    """Makes an env and wraps it for PufferLib."""
    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=functools.partial(gymnasium.make, env_id))


def main():
    """Steps the envs as requested until the end of standard input."""
    env_id, num_envs, num_workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    envs = pufferlib.vector.make(
        functools.partial(make, env_id),
        num_envs=num_envs,
        num_workers=num_workers,
        batch_size=num_envs,
        backend=pufferlib.vector.Multiprocessing,
    )
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (64, num_envs))
    for line in sys.stdin:
        for i in range(int(line)):
            envs.step(actions[i % 64])
        print("done", flush=True)
    envs.close()


if __name__ == "__main__":
    main()
