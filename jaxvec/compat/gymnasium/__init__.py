"""Gymnasium's vector envs over a pool: drop-in classes, and an entry point for `gymnasium.register`.

They keep Gymnasium's dtypes, and take envs of every space: values without fixed shape travel pickled.
"""

from jaxvec.compat.gymnasium._async import AsyncVectorEnv
from jaxvec.compat.gymnasium._entry_point import vector_entry_point
from jaxvec.compat.gymnasium._sync import SyncVectorEnv

__all__ = ["AsyncVectorEnv", "SyncVectorEnv", "vector_entry_point"]
