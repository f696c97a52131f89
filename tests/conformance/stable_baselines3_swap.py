"""A pytest plugin that swaps Stable-Baselines3's vector envs for ours, before its tests import them."""

import sys

import stable_baselines3.common.vec_env as theirs

from jaxvec import Workers
from jaxvec.compat import stable_baselines3 as ours


class SubprocVecEnv(ours.SubprocVecEnv):
    """Forks workers from a process that has imported torch, as the envs of these tests want."""

    def __init__(self, env_fns, start_method=None):
        preload = () if start_method == "spawn" else ("stable_baselines3",)
        super().__init__(env_fns, start_method, workers=Workers(preload=preload))


SWAPPED = {theirs.DummyVecEnv: ours.DummyVecEnv, theirs.SubprocVecEnv: SubprocVecEnv}

for module in [module for name, module in sys.modules.items() if name.startswith("stable_baselines3")]:
    for cls, own in SWAPPED.items():
        if vars(module).get(cls.__name__) is cls:
            setattr(module, cls.__name__, own)
