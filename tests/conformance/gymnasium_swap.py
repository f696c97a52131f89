"""A pytest plugin that swaps Gymnasium's vector envs for ours, before its tests import them."""

import gymnasium.vector

from jaxvec.compat.gymnasium import AsyncVectorEnv, SyncVectorEnv

gymnasium.vector.AsyncVectorEnv = AsyncVectorEnv
gymnasium.vector.SyncVectorEnv = SyncVectorEnv
