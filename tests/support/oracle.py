"""Rollouts of a pool and of Gymnasium's `SyncVectorEnv`, in comparable form."""

from functools import partial

import jax
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from support.probe import LastObsTimeStep

import jaxvec

STATISTICS = {"env_id", "episode_return", "episode_length"}
SEED = 11


def canonical(tree):
    """Returns the tree with JAX's dtypes."""
    return jax.tree.map(
        lambda x: np.asarray(x).astype(jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)), tree
    )


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def sample_actions(env_fns, num_steps):
    """Returns `[num_steps, num_envs, ...]` actions with JAX's dtypes, and as the envs receive them."""
    space = batch_space(env_fns[0]().action_space, len(env_fns))
    space.seed(SEED)
    raw = stack([space.sample() for _ in range(num_steps)])
    actions = canonical(raw)
    return actions, jax.tree.map(lambda action, as_sampled: action.astype(as_sampled.dtype), actions, raw)


def oracle_steps(env_fns, mode, actions, num_steps, keys=()):
    """Yields the expected results of the reset, each step and each masked reset, without casts.

    Only Gymnasium's own results are used; the episode statistics are added up here.
    """
    oracle = SyncVectorEnv(env_fns, autoreset_mode=mode)
    n = oracle.num_envs
    returns, lengths, over = np.zeros(n), np.zeros(n, np.int32), np.zeros(n, bool)

    def expected(obs, reward, terminated, truncated, infos):
        info = {
            "env_id": np.arange(n, dtype=np.int32),
            "episode_return": returns.copy(),
            "episode_length": lengths.copy(),
        }
        if mode is AutoresetMode.SAME_STEP:
            info |= {"final_obs": final_obs(oracle, infos), "_final_obs": over.copy()}
            assert np.array_equal(infos.get("_final_obs", np.zeros(n, bool)), over)
            if keys:
                info["final_info"] = declared(infos.get("final_info", {}), keys, n)
        kind = jaxvec.TimeStep if mode is AutoresetMode.SAME_STEP else LastObsTimeStep
        return kind(obs, reward, terminated, truncated, info | declared(infos, keys, n))

    obs, infos = oracle.reset(seed=SEED)
    yield expected(obs, np.zeros(n), over, over, infos), np.ones(n, bool)
    for t in range(num_steps):
        running = ~over if mode is AutoresetMode.NEXT_STEP else np.ones(n, bool)
        returns, lengths = np.where(over, 0, returns), np.where(over, 0, lengths)
        action = jax.tree.map(lambda leaf, t=t: leaf[t], actions)
        obs, reward, terminated, truncated, infos = oracle.step(action)
        over = terminated | truncated
        returns, lengths = np.where(running, returns + reward, 0), lengths + running
        yield expected(obs, reward, terminated, truncated, infos), np.ones(n, bool)
        if mode is AutoresetMode.DISABLED and over.any():
            mask = over.copy()
            obs, infos = oracle.reset(options={"reset_mask": mask.copy()})
            over = np.zeros(n, bool)
            returns, lengths = np.where(mask, 0, returns), np.where(mask, 0, lengths)
            none = terminated & False
            yield expected(obs, np.where(mask, 0, reward), none, none, infos), mask
    oracle.close()


def final_obs(oracle, infos):
    """Batches Gymnasium's object array of final observations, with zeros for missing ones."""
    space, n = oracle.single_observation_space, oracle.num_envs
    zeros = create_empty_array(space, n, np.zeros)
    found = infos.get("final_obs", [None] * n)
    rows = [
        zero if row is None else row
        for zero, row in zip(iterate(oracle.observation_space, zeros), found, strict=True)
    ]
    return concatenate(space, rows, create_empty_array(space, n, np.zeros))


def declared(infos, keys, n):
    """Selects keys and masks from Gymnasium's infos, with zeros if no env has the key."""
    picked = {}
    for key, space in keys.items() if keys else ():
        zeros = create_empty_array(space, n, np.zeros)
        value = infos.get(key, zeros)
        if isinstance(space, spaces.Dict):
            value = {name: value.get(name, zeros[name]) for name in space}
        picked |= {key: value, f"_{key}": infos.get(f"_{key}", np.zeros(n, bool))}
    return picked


def rollout(envs, actions):
    """Returns the results of one jitted scan: of the reset, each step and each masked reset.

    Fails unless `last_info` is the same in the program, of each step, as afterwards of all of them.
    """
    disabled = envs.autoreset_mode is AutoresetMode.DISABLED

    @jax.jit
    def run(handle, actions):
        def body(handle, action):
            handle, timestep = jaxvec.step(handle, action)
            over = timestep.terminated | timestep.truncated
            if not disabled:
                return handle, (timestep, timestep, timestep.last_info)
            handle, after = jax.lax.cond(
                over.any(),
                lambda handle: jaxvec.reset(handle, mask=over),
                lambda handle: (handle, timestep),
                handle,
            )
            return handle, (timestep, after, timestep.last_info)

        return jax.lax.scan(body, handle, actions)

    handle, first = jaxvec.reset(envs, seed=SEED)
    _, (stepped, after, last_infos) = jax.tree.map(np.asarray, run(handle, actions))
    jax.tree.map(np.testing.assert_array_equal, stepped.last_info, last_infos)
    got = [jax.tree.map(np.asarray, first)]
    for t in range(len(stepped.reward)):
        got.append(jax.tree.map(lambda leaf, t=t: leaf[t], stepped))
        if disabled and (stepped.terminated[t] | stepped.truncated[t]).any():
            got.append(jax.tree.map(lambda leaf, t=t: leaf[t], after))
    return got


def host_loop(envs, actions, num_steps):
    got = [envs.reset(seed=SEED)]
    for t in range(num_steps):
        got.append(envs.step(jax.tree.map(lambda leaf, t=t: leaf[t], actions)))
        over = got[-1].terminated | got[-1].truncated
        if envs.autoreset_mode is AutoresetMode.DISABLED and over.any():
            got.append(envs.reset(mask=over))
    return got


def assert_same(got, oracle):
    """Compares structure, dtype, shape and bits of every leaf, also of `last_info`.

    Returns how many episodes ended.
    """
    ended, before = 0, None
    for index, (actual, (expected, mask)) in enumerate(zip(got, oracle, strict=True)):
        expected = canonical(expected)
        if not mask.all():
            # After a masked reset, Gymnasium's infos have only these envs; other rows must not change.
            kept = {key: value for key, value in before.info.items() if key not in STATISTICS}
            fresh = {key: expected.info[key] for key in kept}
            expected.info.update(jax.tree.map(partial(merge, mask), fresh, kept))
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        trees = (actual, actual.last_info), (expected, last_info(expected))
        leaves, expected_leaves = map(jax.tree_util.tree_leaves_with_path, trees)
        for (path, leaf), (_, expected_leaf) in zip(leaves, expected_leaves, strict=True):
            where = f"result {index}{jax.tree_util.keystr(path)}"
            assert (leaf.dtype, leaf.shape) == (expected_leaf.dtype, expected_leaf.shape), where
            assert leaf.tobytes() == expected_leaf.tobytes(), f"{where}: got {leaf}, expected {expected_leaf}"
        ended += int((actual.terminated | actual.truncated).sum())
        before = actual
    return ended


def last_info(expected):
    """Returns the infos of the step itself, from the leaves that Gymnasium has given."""
    ended = expected.terminated | expected.truncated
    keys = expected.info.keys() - {*STATISTICS, "final_obs", "_final_obs", "final_info"}
    info = {key: expected.info[key] for key in keys}
    return jax.tree.map(partial(merge, ended), expected.info.get("final_info", info), info)


def merge(mask, fresh, kept):
    return np.where(mask.reshape(-1, *[1] * (fresh.ndim - 1)), fresh, kept)
