"""EnvPool's interface over any Python env: `make`, then `reset`, `step`, `send`, `recv` and `xla`."""

from jaxvec.compat.envpool._env_pool import EnvPool
from jaxvec.compat.envpool._faces import DMEnvPool, GymEnvPool, GymnasiumEnvPool
from jaxvec.compat.envpool._make import make, make_dm, make_gym, make_gymnasium, make_spec
from jaxvec.compat.envpool._spec import EnvSpec
from jaxvec.compat.envpool._tasks import list_all_envs

__all__ = [
    "DMEnvPool",
    "EnvPool",
    "EnvSpec",
    "GymEnvPool",
    "GymnasiumEnvPool",
    "list_all_envs",
    "make",
    "make_dm",
    "make_gym",
    "make_gymnasium",
    "make_spec",
]
