"""`make` and its like."""

from __future__ import annotations

from typing import Any

from jaxvec._vector_env import VectorEnv
from jaxvec.compat.envpool import _old_gym, _tasks
from jaxvec.compat.envpool._faces import DMEnvPool, GymEnvPool, GymnasiumEnvPool
from jaxvec.compat.envpool._spec import EnvSpec, make_config
from jaxvec.compat.envpool._tasks import Task, TaskId

_FACES = {"gymnasium": GymnasiumEnvPool, "gym": GymEnvPool, "dm": DMEnvPool}
_DEFAULTS: dict[str, Any] = {
    "num_envs": 1,
    "batch_size": 0,
    "num_threads": 0,
    "seed": 42,
    "gym_reset_return_info": None,
    "thread_affinity_offset": -1,
}


def make(task_id: TaskId, env_type: str = "gymnasium", **kwargs: Any) -> Any:
    """Starts a pool of any Python env behind EnvPool's interface.

    Args:
        task_id: a Gymnasium id, an `EnvSpec`, a callable as for `jaxvec.make`, or one of EnvPool's Atari
            tasks, such as `Breakout-v5`, for which there is the extra `atari`. With `episodic_life` a lost
            life ends the episode, and the next one goes on with the same game.
        env_type: `"gymnasium"`; `"gym"`, old Gym's `reset` and `step` of four values, and its spaces where
            it is installed; or `"dm"`, dm_env's `TimeStep`.
        **kwargs: EnvPool's, which are below; others of `jaxvec.make`, such as `info`; and the task's own: for
            an Atari task EnvPool's options, for others `gymnasium.make`'s, such as `max_episode_steps`, or
            the callable's.

    Keyword Args:
        num_envs (int): how many envs; 1 by default.
        batch_size (int): how many of them `recv` returns, the first that are ready; 0, the default, for all.
        num_threads (int): how many worker processes; 0, the default, for as many as there are usable cores.
        seed (int): that of env 0 (env *i* gets `seed + i`), or one for each env, for each env's first reset;
            42 by default.
        gym_reset_return_info (bool): with `env_type="gym"`, whether `reset` returns `(obs, info)`; by default
            the observations alone.
        thread_affinity_offset (int): is ignored: workers run where the system lets them.

    Returns:
        A `GymnasiumEnvPool`, `GymEnvPool` or `DMEnvPool`. An env resets itself in the step after the one
        that ended its episode. `info` has `env_id`, `elapsed_step`, `reward`, `terminated`,
        `TimeLimit.truncated`, what is declared with `info=`, and for Atari tasks `lives` and `ram`.

    Raises:
        ValueError, TypeError: a bad argument.
        gymnasium.error.Error: there is no such task.
        JaxvecError: as `jaxvec.make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2) as envs:
            obs, info = envs.reset()
            obs, reward, terminated, truncated, info = envs.step(np.array([0, 1]))
            print(obs.shape, info["elapsed_step"])  # (2, 4) [1 1]
        ```
    """
    if env_type not in _FACES:
        raise ValueError(f'env_type must be "gymnasium", "gym" or "dm", not {env_type!r}')
    config, pool_options, task = _sort(task_id, kwargs)
    envs = task.start(config["num_envs"], **pool_options)
    try:
        spec = _spec(config, task, envs, env_type)
        return _FACES[env_type](envs, spec, seed=config["seed"], reset_options=task.reset_options)
    except BaseException:
        envs.close()
        raise


def make_gymnasium(task_id: TaskId, **kwargs: Any) -> GymnasiumEnvPool:
    """Starts a pool whose results are Gymnasium's; see `make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make_gymnasium("CartPole-v1", num_envs=2) as envs:
            obs, info = envs.reset()
            print(obs.shape)  # (2, 4)
        ```
    """
    return make(task_id, "gymnasium", **kwargs)


def make_gym(task_id: TaskId, **kwargs: Any) -> GymEnvPool:
    """Starts a pool whose results are old Gym's; see `make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make_gym("CartPole-v1", num_envs=2) as envs:
            obs = envs.reset()
            obs, reward, done, info = envs.step(np.array([0, 1]))
            print(done)  # [False False]
        ```
    """
    return make(task_id, "gym", **kwargs)


def make_dm(task_id: TaskId, **kwargs: Any) -> DMEnvPool:
    """Starts a pool whose results are dm_env's; see `make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        with envpool.make_dm("CartPole-v1", num_envs=2) as envs:
            timestep = envs.reset()
            print(timestep.observation.obs.shape, timestep.discount)  # (2, 4) [1. 1.]
        ```
    """
    return make(task_id, "dm", **kwargs)


def make_spec(task_id: TaskId, **kwargs: Any) -> EnvSpec:
    """Returns the `spec` of a pool; to learn the spaces, one env is built in a worker and closed again.

    Args and errors are those of `make`.

    Example:
        ```python
        from jaxvec.compat import envpool

        spec = envpool.make_spec("CartPole-v1", num_envs=2)
        print(spec.observation_space.shape, spec.config.max_episode_steps)  # (4,) 500
        ```
    """
    config, pool_options, task = _sort(task_id, kwargs)
    pool_options |= {"num_workers": 1, "batch_size": 1}
    with task.start(1, **pool_options) as envs:
        return _spec(config, task, envs, "gymnasium")


def _sort(task_id: TaskId, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Task]:
    """Sorts keywords into EnvPool's own with its defaults, those of `jaxvec.make`, and the task's."""
    if "autoreset_mode" in kwargs:
        raise TypeError("autoreset_mode can't be set here: EnvPool's is NEXT_STEP; jaxvec.make takes others")
    config = {key: kwargs.get(key, default) for key, default in _DEFAULTS.items()}
    others = {key: value for key, value in kwargs.items() if key not in _DEFAULTS}
    task, pool_options = _tasks.resolve(task_id, others)
    pool_options["autoreset_mode"] = "NEXT_STEP"
    num_envs, num_threads = config["num_envs"], config["num_threads"]
    pool_options["batch_size"] = config["batch_size"] or None
    if num_threads:
        pool_options.setdefault("num_workers", min(num_threads, num_envs))
    config["batch_size"] = config["batch_size"] or num_envs
    return config, pool_options, task


def _spec(config: dict[str, Any], task: Task, envs: VectorEnv, env_type: str) -> EnvSpec:
    returns_info = config["gym_reset_return_info"]
    if returns_info is None:
        config = {**config, "gym_reset_return_info": env_type != "gym"}
    translate = _old_gym.convert if env_type == "gym" else lambda space: space
    return EnvSpec(
        config=make_config({**config, **task.options(envs)}),
        observation_space=translate(envs.single_observation_space),
        action_space=translate(envs.single_action_space),
        gymnasium_observation_space=envs.single_observation_space,
        gymnasium_action_space=envs.single_action_space,
        data=envs.spec,
    )
