"""gymnax's face: one env's reset and step, and a pool of as many as vmap has lanes."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from support import probe
from support.disasters import PATIENCE, closing_all
from support.probe import _spaces, pool_of, registry

import jaxvec
from jaxvec.compat import gymnax as face
from jaxvec.testing import CountingEnv, NestedEnv

KEY = jax.random.key(7)
RESETS, STEPS, EPISODE_STEPS, ACTION = range(4)  # columns of CountingEnv's observation


@pytest.fixture(params=["ffi", "io_callback"])
def transport(request):
    """The transport of the pools of a test, also of those that a program makes when it is traced."""
    with jaxvec.config.override(transport=request.param):
        yield request.param


@pytest.fixture
def make():
    def make(env=CountingEnv, **kwargs):
        workers = {} if kwargs.get("backend") == "serial" else {"num_workers": 1}
        return face.make(env, **{**workers, **kwargs})[0]

    with closing_all(make) as make_and_remember:
        yield make_and_remember


def reset(env, keys):
    return jax.vmap(env.reset, in_axes=(0, None))(keys, env.default_params)


def step(env, state, action):
    keys = jax.random.split(KEY, len(action))
    return jax.vmap(env.step, in_axes=(0, 0, 0, None))(keys, state, action, env.default_params)


def rollout(env, key, lanes, length):
    """Resets `lanes` envs and steps them `length` times; returns the observations `[length, lanes, ...]`."""
    _, state = reset(env, jax.random.split(key, lanes))

    def body(state, _):
        obs, state, *_ = step(env, state, jnp.arange(lanes))
        return state, obs

    return jax.lax.scan(body, state, length=length)[1]


def hand_offs(env, lanes):
    """Returns how many calls of compiled programs the pool has served."""
    return probe.num_served(env.pools[lanes])


# --- one env ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_one_env_is_reset_and_stepped_without_a_batch_axis(make, jit):
    env = make(partial(CountingEnv, 2))
    wrap = jax.jit if jit else lambda function: function
    obs, state = wrap(env.reset)(KEY)
    assert obs.tolist() == [1, 0, 0, -1]
    obs, state, reward, done, info = wrap(env.step)(KEY, state, 5)
    assert (obs.tolist(), state.time, reward, done) == ([1, 1, 1, 5], 1, 1.0, False)
    assert (reward.dtype, reward.shape, done.dtype, done.shape) == (np.float32, (), np.bool_, ())
    obs, state, reward, done, info = wrap(env.step)(KEY, state, 6)  # the episode ends, and the next begins
    assert (obs.tolist(), state.time, reward, done) == ([2, 2, 0, -1], 0, 2.0, True)
    assert (info["discount"], info["episode_return"], info["episode_length"]) == (0.0, 3.0, 2)
    assert info["discount"].dtype == np.float32
    assert "final_observation" not in info
    assert list(env.pools) == [1]


def test_six_values_are_returned_as_gymnax_1_does(make):
    env = make(partial(CountingEnv, 2, truncate=True), num_returns=6)
    _, state = env.reset(KEY)
    obs, state, _, terminated, truncated, info = env.step(KEY, state, 5)
    assert info["final_observation"].tolist() == obs.tolist() == [1, 1, 1, 5]
    obs, state, _, terminated, truncated, info = env.step(KEY, state, 6)
    assert (bool(terminated), bool(truncated)) == (False, True)
    assert (bool(info["terminated"]), bool(info["truncated"])) == (False, True)
    assert (info["discount"], info["final_observation"].tolist()) == (1.0, [1, 2, 2, 6])
    assert obs.tolist() == [2, 2, 0, -1]


def test_lanes_give_the_same_data_as_gymnasium(make, transport):
    env = make("CartPole-v1", num_returns=6)
    keys = jax.random.split(KEY, 3)
    seeds = [int(jax.random.bits(key, (1,), np.uint32)[0] >> 1) for key in keys]
    theirs = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    expected, _ = theirs.reset(seed=seeds)
    obs, state = jax.jit(partial(reset, env))(keys)
    np.testing.assert_array_equal(obs, expected)
    stepped = jax.jit(partial(step, env))
    ends = 0
    for i in range(60):
        action = np.array([i // 5 % 2, 1, 0])
        obs, state, *flags, info = stepped(state, action)
        expected, *their_flags, their_info = theirs.step(action)
        np.testing.assert_array_equal(obs, expected)
        for ours, their in zip(flags, their_flags, strict=True):
            np.testing.assert_array_equal(ours, their)
        ended = flags[1] | flags[2]
        for row in np.flatnonzero(ended):
            np.testing.assert_array_equal(info["final_observation"][row], their_info["final_obs"][row])
        np.testing.assert_array_equal(info["final_observation"][~ended], obs[~ended])
        ends += ended.sum()
    assert ends > 10


@pytest.mark.parametrize("num_returns", [5, 6])
def test_at_an_end_declared_infos_are_those_of_the_step(make, num_returns):
    env = make(partial(CountingEnv, 2), info={"steps": int}, num_returns=num_returns)
    infos = []
    _, state = env.reset(KEY)
    for _ in range(4):
        _, state, *_, info = jax.jit(env.step)(KEY, state, 0)
        infos.append(info)
    assert [(int(info["steps"]), bool(info["_steps"])) for info in infos] == [(n, True) for n in (1, 2, 3, 4)]
    assert "final_info" not in info


def test_nested_spaces_are_pytrees(make):
    env = make(NestedEnv, num_returns=6)
    obs, state = reset(env, jax.random.split(KEY, 2))
    action = jax.tree.map(jnp.asarray, env.pools[2].action_space.sample())
    obs, state, *_, info = jax.jit(partial(jax.vmap(env.step), jax.random.split(KEY, 2)))(state, action)
    jax.tree.map(
        np.testing.assert_array_equal,
        obs["last"],
        jax.tree.map(lambda x, o: x.astype(o.dtype), action, obs["last"]),
    )
    jax.tree.map(np.testing.assert_array_equal, info["final_observation"], obs)


# --- vmap, and pools of its size --------------------------------------------------------------


@pytest.mark.slow(but=1)
def test_a_step_of_all_lanes_is_one_hand_off_however_nested(make, transport):
    env = make()
    obs = jax.jit(lambda key: rollout(env, key, 4, 10))(KEY)
    assert obs[..., STEPS].tolist() == [[i] * 4 for i in range(1, 11)]
    assert obs[..., ACTION].tolist() == [[0, 1, 2, 3]] * 10
    assert hand_offs(env, 4) == 11  # a reset and ten steps
    obs = jax.jit(jax.vmap(lambda key: rollout(env, key, 4, 10)))(jax.random.split(KEY, 3))
    assert obs[..., STEPS].tolist() == [[[i] * 4 for i in range(1, 11)]] * 3
    assert hand_offs(env, 12) == 11
    twice = jax.vmap(jax.vmap(lambda key: rollout(env, key, 4, 10)))
    assert jax.jit(twice)(jax.random.split(KEY, (2, 3))).shape == (2, 3, 10, 4, 4)
    assert hand_offs(env, 24) == 11
    assert sorted(env.pools) == [1, 4, 12, 24]


def test_first_reset_starts_a_pool_that_later_resets_reuse(make):
    env = make()
    compiled = jax.jit(lambda key: rollout(env, key, 4, 2)).lower(KEY).compile()
    jax.eval_shape(lambda key: rollout(env, key, 5, 2), KEY)
    assert list(env.pools) == [1]
    assert compiled(KEY)[0, :, RESETS].tolist() == [1] * 4
    (pool,) = (env.pools[lanes] for lanes in env.pools if lanes == 4)
    assert compiled(KEY)[0, :, RESETS].tolist() == [2] * 4
    assert env.pools[4] is pool
    assert pool.stats().total.steps == 16


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_resetting_as_many_lanes_again_makes_the_older_state_stale(make, no_jax_log, transport, jit):
    env = make()
    stepped = jax.jit(partial(step, env)) if jit else partial(step, env)
    _, old = reset(env, jax.random.split(KEY, 3))
    _, new = jax.jit(partial(reset, env))(jax.random.split(KEY, 3))
    with pytest.raises(Exception, match="stale handle") as failure:
        jax.block_until_ready(stepped(old, jnp.zeros(3, int)))
    assert isinstance(failure.value, jax.errors.JaxRuntimeError if jit else jaxvec.StaleHandleError)
    if jit:
        with pytest.raises(jaxvec.StaleHandleError):
            env.raise_if_failed()
    assert stepped(new, jnp.zeros(3, int))[0][:, STEPS].tolist() == [1] * 3


def test_a_pool_that_another_thread_starts_has_the_dtypes_of_the_first():
    with jax.enable_x64(True):
        env, _ = face.make(CountingEnv)
    first = pool_of(env.pools[1])
    with env, ThreadPoolExecutor(1) as threads:  # as XLA, in a thread without the setting
        second = threads.submit(registry.find, first.id, first.spec.fingerprint, 2).result(timeout=60)
        for pool in (first, second):
            assert [leaf.stored for leaf in pool.spec.action_leaves] == [np.int64]


def test_threads_that_reset_as_many_lanes_start_one_pool(make):
    env = make()
    lanes = jax.random.split(KEY, 3)
    both = threading.Barrier(2, timeout=200)
    failures = []

    def run():
        try:
            both.wait()
            jax.block_until_ready(jax.jit(lambda keys: reset(env, keys))(lanes))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert failures == []
    assert sorted(env.pools) == [1, 3]
    assert env.pools[3].get_attr("resets") == (2,) * 3


def test_pmap_over_one_device_resets_but_over_several_raises(make):
    env = make()
    obs = jax.pmap(lambda key: rollout(env, key, 3, 2))(KEY[None])
    assert obs[0, :, :, STEPS].tolist() == [[1] * 3, [2] * 3]
    with pytest.raises(jaxvec.EnvIdError, match="pass each device a handle"):
        jax.pmap(partial(reset, env))(jax.random.split(KEY, (2, 3)))


# --- when it fails, and when it ends ----------------------------------------------------------


def only_the_first(index):
    if index:
        raise OSError("one seat only")
    return CountingEnv()


def test_a_pool_that_can_not_be_started_is_an_error_that_says_why(make, no_jax_log, transport):
    env = make(only_the_first)
    with pytest.raises(jaxvec.EnvError, match="one seat only"):
        reset(env, jax.random.split(KEY, 2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="one seat only"):
        jax.block_until_ready(jax.jit(partial(reset, env))(jax.random.split(KEY, 2)))
    with pytest.raises(jaxvec.EnvError, match="one seat only"):
        env.raise_if_failed()
    assert env.reset(KEY)[0].tolist() == [1, 0, 0, -1]
    assert list(env.pools) == [1]


class OddEnv(CountingEnv):
    """Observes more if it is not the first that was made."""

    made = 0

    def __init__(self, index):
        super().__init__()
        OddEnv.made += 1
        if OddEnv.made > 1:
            self.observation_space = spaces.Box(-1, 2**31 - 1, (5,), np.int32)


def test_pools_whose_envs_have_other_spaces_are_refused(make):
    env = make(OddEnv, backend="serial")
    with pytest.raises(jaxvec.SpaceMismatchError, match="spaces or info of 2 envs differ"):
        reset(env, jax.random.split(KEY, 2))


class FallingEnv(CountingEnv):
    def step(self, action):
        raise OSError("fell over")


def test_in_a_with_block_a_programs_error_comes_typed(no_jax_log, transport):
    with pytest.raises(jaxvec.EnvError, match="fell over"):
        env, _ = face.make(FallingEnv)
        with env:
            jax.block_until_ready(jax.jit(lambda key: rollout(env, key, 2, 1))(KEY))
    assert all(pool.closed for pool in env.pools.values())


def test_closing_closes_all_pools_and_starts_no_more(make, no_jax_log):
    env = make()
    keys = jax.random.split(KEY, 2)
    program = jax.jit(partial(reset, env))
    program(keys)
    env.close()
    env.close()
    assert [pool.closed for pool in env.pools.values()] == [True, True]
    for lanes in (2, 3):
        with pytest.raises(jaxvec.PoolClosedError, match="closed"):
            reset(env, jax.random.split(KEY, lanes))
    with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
        jax.block_until_ready(program(keys))


def test_a_pool_that_starts_while_the_env_is_closed_is_closed_too(make):
    unclosed = []

    class ClosingEnv(CountingEnv):
        def __init__(self):
            super().__init__()
            unclosed.append(self)
            if len(unclosed) > 1:
                env.close()

        def close(self):
            unclosed.remove(self)

    env = make(ClosingEnv, backend="serial")
    with pytest.raises(jaxvec.PoolClosedError, match="closed"):
        reset(env, jax.random.split(KEY, 2))
    assert unclosed == []


def test_an_env_that_is_garbage_closes_its_pools():
    env, _ = face.make(CountingEnv)
    _, state = reset(env, jax.random.split(KEY, 2))
    closings = [pool_of(pool).finalizer for pool in env.pools.values()]
    other = face.make(CountingEnv)[0]
    del env
    gc.collect()
    assert [closing.closed for closing in closings] == [True, True]
    with other, pytest.raises(jaxvec.PoolClosedError, match="keep the VectorEnv alive"):
        step(other, state, jnp.zeros(2, int))


# --- gymnax's other names ---------------------------------------------------------------------


def test_env_is_a_static_jit_argument_and_params_are_gymnaxs(make):
    env = make("CartPole-v1", max_episode_steps=11)

    @partial(jax.jit, static_argnums=0)
    def program(env, key, params):
        return env.reset(key, params)[0]

    params = env.default_params
    assert program(env, KEY, params).shape == (4,)
    assert params.max_steps_in_episode == 11
    assert hash(params) == hash(env.default_params)
    assert jax.tree.leaves(params) == [11]
    assert (env.name, env.num_actions) == ("CartPole-v1", 2)
    with pytest.raises(ValueError, match=r"max_steps_in_episode is 11, not 5.*max_episode_steps"):
        env.reset(KEY, params.replace(max_steps_in_episode=5))
    with pytest.raises(TypeError, match="params must be those that make returned"):
        env.reset(KEY, {"gravity": 9})
    with pytest.raises(TypeError, match="step takes the state that reset or step returned, got tuple"):
        env.step(KEY, env.reset(KEY), 0)


def test_an_env_without_a_spec_has_no_time_limit(make):
    env = make(CountingEnv)
    assert (env.default_params, env.name) == (face.EnvParams(None), "CountingEnv")


@pytest.mark.parametrize("name", ["num_envs", "batch_size", "recv_order", "autoreset_mode"])
def test_arguments_that_vmap_or_the_face_decide_are_refused(name):
    with pytest.raises(TypeError, match=f"{name} can't be set here"):
        face.make("CartPole-v1", **{name: 1})


def test_other_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="one env, not a list"):
        face.make([CountingEnv])
    with pytest.raises(ValueError, match="num_returns must be 5 or 6, not 4"):
        face.make(CountingEnv, num_returns=4)


def test_a_pool_has_no_more_workers_than_envs(make):
    env = make(num_workers=2)
    reset(env, jax.random.split(KEY, 3))
    assert {lanes: pool.num_workers for lanes, pool in env.pools.items()} == {1: 1, 3: 2}


SPACES = spaces.Dict(
    {
        "move": spaces.Discrete(4),
        "arm": spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 2.0]), dtype=np.float64),
        "image": spaces.Box(0, 255, (2, 2), np.uint8),
        "keys": spaces.Tuple((spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(2))),
    }
)


def test_spaces_are_gymnaxs_own():
    theirs = pytest.importorskip("gymnax.environments.spaces", reason="gymnax is not installed")
    space = _spaces.to_gymnax_space(SPACES, "obs")
    parts = space.spaces
    assert isinstance(space, theirs.Dict)
    assert isinstance(parts["move"], theirs.Discrete)
    assert (parts["move"].n, parts["move"].shape, parts["move"].dtype) == (4, (), np.int32)
    assert isinstance(parts["arm"], theirs.Box)
    assert (parts["arm"].low.tolist(), parts["arm"].high.tolist()) == ([-1, 0], [1, 2])
    assert (parts["arm"].shape, parts["arm"].dtype) == ((2,), np.float32)
    assert (parts["image"].low, parts["image"].high, parts["image"].dtype) == (0, 255, np.uint8)
    assert isinstance(parts["keys"], theirs.Tuple)
    keys, binary = parts["keys"].spaces
    assert (keys.low, keys.high.tolist(), binary.high, binary.shape) == (0, [2, 3], 1, (2,))
    for name in ("move", "arm", "image"):
        sample = jax.jit(parts[name].sample)(KEY)
        assert (sample.shape, sample.dtype) == (parts[name].shape, parts[name].dtype)
        assert SPACES[name].contains(np.asarray(sample, SPACES[name].dtype))
        assert parts[name].contains(sample)
    assert not parts["move"].contains(4)
    assert not parts["arm"].contains(np.array([0.0, 3.0]))
    assert SPACES.contains(
        jax.tree.map(lambda x, like: np.asarray(x, like.dtype), dict(space.sample(KEY)), SPACES.sample())
    )


def test_without_gymnax_spaces_are_gymnasiums(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax.environments.spaces", None)
    env = make(NestedEnv)
    assert env.observation_space() == env.pools[1].single_observation_space
    assert env.action_space(env.default_params) == env.pools[1].single_action_space


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=1), spaces.Text(3)], ids=["start", "text"])
def test_spaces_that_gymnax_does_not_have_are_refused(space):
    pytest.importorskip("gymnax.environments.spaces", reason="gymnax is not installed")
    with pytest.raises(jaxvec.UnsupportedSpaceError, match="^action"):
        _spaces.to_gymnax_space(space, "action")


def test_gymnaxs_own_wrappers_take_it(make):
    wrappers = pytest.importorskip("gymnax.wrappers", reason="gymnax is not installed")
    env = make(partial(CountingEnv, 3), num_returns=6)
    logged = wrappers.LogWrapper(wrappers.FlattenObservationWrapper(env))
    _, state = jax.vmap(logged.reset)(jax.random.split(KEY, 2))
    for _ in range(3):
        _, state, *_, info = jax.vmap(logged.step)(jax.random.split(KEY, 2), state, jnp.zeros(2, int))
    assert info["returned_episode_returns"].tolist() == [6.0, 6.0]
    assert info["returned_episode"].tolist() == [True, True]
