"""The env classes of gxm and Jaxnasium, and the evaluation for rejax, against Gymnasium's own envs."""

from __future__ import annotations

import copy
import sys
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import jaxvec
from jaxvec.compat import bridges, gymnax
from jaxvec.testing import CountingEnv, NestedEnv

KEY = jax.random.key(7)
NUM_ENVS = 3


@pytest.fixture(params=["gxm", "jaxnasium"])
def library(request):
    return pytest.importorskip(request.param)


@pytest.fixture
def make(library):
    """Makes envs of the library, with functions `reset` and `step` that return equal tuples for both."""
    made = []

    def make(env, **kwargs):
        made.append(bridges.make(env, library.__name__, num_workers=1, **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.env.close()


def reset(env, keys):
    if hasattr(env, "init"):
        state, timestep = jax.vmap(env.init)(keys)
        return timestep.next_obs, state
    return jax.vmap(env.reset)(keys)


def step(env, state, action):
    keys = jax.random.split(KEY, len(jax.tree.leaves(action)[0]))
    first, second = jax.vmap(env.step)(keys, state, action)
    if hasattr(env, "init"):
        state, timestep = first, second
        return timestep.next_obs, state, timestep.reward, timestep.terminated, timestep.truncated, timestep
    return first[0], second, *first[1:]


def seeds_of(keys):
    return [int(jax.random.bits(key, (1,), np.uint32)[0] >> 1) for key in keys]


def sync(env_id="CartPole-v1", num_envs=NUM_ENVS, **kwargs):
    env_fns = [partial(gymnasium.make, env_id, **kwargs)] * num_envs
    return gymnasium.vector.SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)


def test_steps_are_those_of_gymnasium(make, library):
    env = make("CartPole-v1", max_episode_steps=12)
    theirs = sync(max_episode_steps=12)
    keys = jax.random.split(KEY, NUM_ENVS)
    expected, _ = theirs.reset(seed=seeds_of(keys))
    obs, state = jax.jit(partial(reset, env))(keys)
    np.testing.assert_array_equal(obs, expected)
    stepped = jax.jit(partial(step, env))
    cut = 0
    for i in range(40):
        action = np.array([i % 2, 1, i // 2 % 2])
        obs, state, *ours, last = stepped(state, action)
        expected, *their, info = theirs.step(action)
        np.testing.assert_array_equal(obs, expected)
        for one, other in zip(ours, their, strict=True):
            np.testing.assert_array_equal(one, other)
        final = last.true_next_obs if library.__name__ == "gxm" else last["_TERMINAL_OBSERVATION"]
        # gxm keeps the last observation of truncated episodes only.
        ended = their[2] if library.__name__ == "gxm" else their[1] | their[2]
        for row in range(NUM_ENVS):
            np.testing.assert_array_equal(final[row], info["final_obs"][row] if ended[row] else expected[row])
        cut += their[2].sum()
    assert cut


def test_scan_of_equal_actions_takes_every_step(make):
    env = make(CountingEnv)

    @jax.jit
    def rollout(keys, action):
        _, state = reset(env, keys)
        return jax.lax.scan(lambda state, _: step(env, state, action)[1::-1], state, length=20)[1]

    obs = rollout(jax.random.split(KEY, 2), jnp.array([4, 5]))
    assert obs[:, :, 1].tolist() == [[i, i] for i in range(1, 21)]
    assert env.env.pools[2].stats().total.steps == 40


def test_nested_spaces(make, library):
    env = make(NestedEnv)
    sample = jax.tree.map(jnp.asarray, env.env.pools[1].single_action_space.sample())
    keys = jax.random.split(KEY, 2)
    _, state = reset(env, keys)
    obs, *_ = step(env, state, jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), sample))
    jax.tree.map(lambda got, sent: np.testing.assert_array_equal(got[1], sent), obs["last"], sample)


NESTED = spaces.Dict(
    {"a": spaces.Discrete(3), "b": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0, 1, (3,))))}
)


class WithActions(CountingEnv):
    def __init__(self, action_space):
        super().__init__()
        self.action_space = action_space


def test_spaces_are_the_librarys(make, library):
    env = make("Pendulum-v1")
    found = library.spaces if library.__name__ == "gxm" else library
    assert isinstance(env.action_space, found.Box)
    assert (np.ravel(env.action_space.low), env.action_space.shape) == ([-2.0], (1,))
    assert isinstance(make("CartPole-v1").action_space, found.Discrete)

    env = make(partial(WithActions, NESTED))
    drawn = env.action_space.sample(KEY) if library.__name__ == "gxm" else env.sample_action(KEY)
    assert [leaf.shape for leaf in jax.tree.leaves(drawn)] == [(), (2,), (3,)]
    with pytest.raises(jaxvec.UnsupportedSpaceError, match="only Discrete spaces that start at 0"):
        _ = make(partial(WithActions, spaces.Discrete(3, start=1))).action_space


@pytest.mark.parametrize("name", ["gxm", "jaxnasium", "evorl"])
def test_without_the_library_the_error_says_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(bridges, "_CLASSES", {name: bridges._CLASSES[name].__wrapped__})
    with pytest.raises(ImportError, match=f'compat.bridges needs {name}: pip install "{name}(-jax)?>='):
        bridges.make("CartPole-v1", name)
    with pytest.raises(ValueError, match="library must be one of"):
        bridges.make("CartPole-v1", "brax")


def test_gxms_reset_starts_new_episodes(make, library):
    if library.__name__ != "gxm":
        pytest.skip("only gxm resets a state")
    env = make(CountingEnv)
    keys = jax.random.split(KEY, 2)
    state, _ = jax.vmap(env.init)(keys)
    state, first = jax.vmap(env.reset)(keys, state)
    assert first.next_obs[:, 0].tolist() == [2, 2]
    assert (first.reward.tolist(), first.action.tolist(), first.done.tolist()) == (
        [0, 0],
        [0, 0],
        [False] * 2,
    )
    state, timestep = jax.vmap(env.step)(keys, state, jnp.array([4, 5]))
    assert timestep.next_obs[:, 3].tolist() == timestep.action.tolist() == [4, 5]


# --- EvoRL -------------------------------------------------------------------------------------------------


@pytest.fixture
def make_evorl():
    pytest.importorskip("evorl")
    made = []

    def make(env, **kwargs):
        made.append(bridges.make(env, "evorl", num_workers=1, **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.env.close()


@pytest.mark.filterwarnings("ignore")  # of packages that EvoRL imports
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_evorls_rollouts_are_those_of_gymnasium(make_evorl, mode):
    env = make_evorl(
        "CartPole-v1", num_envs=NUM_ENVS, max_episode_steps=12, autoreset_mode=mode, final_obs=True
    )
    theirs = gymnasium.vector.SyncVectorEnv(
        [partial(gymnasium.make, "CartPole-v1", max_episode_steps=12)] * NUM_ENVS, autoreset_mode=mode
    )
    state = jax.jit(env.reset)(jax.random.PRNGKey(3))
    expected, _ = theirs.reset(seed=list(env.env.get_attr("np_random_seed")))
    np.testing.assert_array_equal(state.obs, expected)
    actions = np.random.default_rng(0).integers(2, size=(60, NUM_ENVS))
    actions[:, 0] = 1  # the first env's pole falls before the time limit

    def step(state, action):
        state = env.step(state, action)
        return state, (state.obs, state.reward, state.done, state.info)

    _, (obs, reward, done, info) = jax.jit(partial(jax.lax.scan, step))(state, actions)
    before, returns, lengths = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS), np.zeros(NUM_ENVS)
    for i, action in enumerate(actions):
        expected, rewards, terminated, truncated, last = theirs.step(action)
        waits = before.astype(bool) & (mode is AutoresetMode.NEXT_STEP)
        returns, lengths = np.where(before, 0, returns) + rewards, np.where(before, 0, lengths) + ~waits
        np.testing.assert_array_equal(obs[i], expected)
        np.testing.assert_array_equal(reward[i], rewards)
        np.testing.assert_array_equal(done[i], terminated | truncated)
        np.testing.assert_array_equal(info.termination[i], terminated)
        np.testing.assert_array_equal(info.truncation[i], truncated & ~terminated)
        np.testing.assert_array_equal(info.autoreset[i], before)
        np.testing.assert_array_equal(info.episode_return[i], returns)
        np.testing.assert_array_equal(info.steps[i], lengths)
        for row in range(NUM_ENVS):
            final = (
                last["final_obs"][row] if "final_obs" in last and last["_final_obs"][row] else expected[row]
            )
            np.testing.assert_array_equal(info.ori_obs[i][row], final)
        before = terminated | truncated
    assert info.truncation.any()
    assert info.termination.any()


@pytest.mark.filterwarnings("ignore")  # of packages that EvoRL imports
def test_evorls_ppo_trains_and_evaluates(make_evorl):
    optax = pytest.importorskip("optax")
    config = pytest.importorskip("omegaconf").OmegaConf.create(
        {
            "num_envs": 4,
            "rollout_length": 16,
            "minibatch_size": 32,
            "reuse_rollout_epochs": 1,
            "gae_lambda": 0.95,
            "gae_horizon": 16,
            "discount": 0.99,
            "eval_episodes": 6,
            "seed": 0,
            "loss_weights": {"actor_loss": 1.0, "critic_loss": 0.5, "actor_entropy": -0.01},
            "checkpoint": {"enable": False},
        }
    )
    from evorl.algorithms import ppo
    from evorl.evaluators import Evaluator

    train = make_evorl("CartPole-v1", num_envs=4, autoreset_mode="NEXT_STEP")
    test = make_evorl("CartPole-v1", num_envs=6, autoreset_mode="EPISODIC", max_episode_steps=60)
    agent = ppo.make_mlp_ppo_agent(train.action_space)
    evaluator = Evaluator(env=test, action_fn=agent.evaluate_actions, max_episode_steps=60)
    workflow = ppo.PPOWorkflow(train, agent, optax.adam(1e-3), evaluator, config)
    state = workflow.setup(jax.random.PRNGKey(0))
    for _ in range(2):
        metrics, state = jax.jit(workflow.step)(state)
        assert np.isfinite(metrics.loss)
    assert train.env.stats().total.steps > 100  # 128, less the resets
    evaluation, _ = jax.jit(workflow.evaluate)(state)
    lengths = test.env.stats().total.steps
    assert 6 * evaluation.episode_lengths == pytest.approx(lengths)
    assert evaluation.episode_returns == evaluation.episode_lengths


@pytest.mark.filterwarnings("ignore")  # of packages that EvoRL imports
def test_a_number_of_envs_is_evorls(make_evorl):
    with pytest.raises(ValueError, match="num_envs: pass the number of envs for EvoRL"):
        make_evorl("CartPole-v1")


# --- evaluate ----------------------------------------------------------------------------------------------


def towards(obs, key):
    return jnp.int32(obs[2] > 0)


def episodes(keys, policy):
    """Returns lengths and returns of one episode per seed, as Gymnasium plays it."""
    played = []
    for seed in seeds_of(keys):
        env = gymnasium.make("CartPole-v1", max_episode_steps=60)
        obs, _ = env.reset(seed=seed)
        length, total, over = 0, 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(int(policy(obs, None)))
            length, total, over = length + 1, total + reward, terminated or truncated
        played.append((length, total))
    return tuple(np.array(column) for column in zip(*played, strict=True))


def test_evaluate_plays_the_episodes_of_gymnasium():
    with gymnax.make("CartPole-v1", max_episode_steps=60)[0] as env:
        found = jax.jit(lambda key: gymnax.evaluate(towards, key, env, 5))(KEY)
    lengths, returns = episodes(jax.random.split(jax.random.split(KEY)[1], 5), towards)
    np.testing.assert_array_equal(found[0], lengths)
    np.testing.assert_array_equal(found[1], returns)
    assert len(set(lengths.tolist())) > 1


class FragileOnceEnv(CountingEnv):
    """Fails in the second step of its first episode."""

    def step(self, action):
        if self.resets == 1 and self.steps == 1:
            raise ValueError("lost")
        return super().step(action)


def test_evaluate_plays_again_after_a_fault():
    policy = jaxvec.Restart(rate=None)
    with gymnax.make(FragileOnceEnv, episode_length=3, on_fault=policy)[0] as env:
        lengths, returns = gymnax.evaluate(lambda obs, key: jnp.int32(0), KEY, env, 2)
    assert (lengths.tolist(), returns.tolist()) == ([3, 3], [6, 6])


def test_evaluate_under_vmap_is_evaluate_of_each_key():
    keys = jax.random.split(KEY, 3)
    with gymnax.make("CartPole-v1", max_episode_steps=60)[0] as env:
        program = jax.jit(lambda key: gymnax.evaluate(towards, key, env, 2))
        each = [program(key) for key in keys]
        lengths, returns = jax.jit(jax.vmap(program))(keys)
        assert sorted(env.pools) == [1, 2, 6]
    np.testing.assert_array_equal(lengths, [one for one, _ in each])
    np.testing.assert_array_equal(returns, [one for _, one in each])


def test_a_copy_of_an_environment_is_itself():
    env, params = gymnax.make(CountingEnv)
    with env:
        copied = copy.deepcopy({"env": env, "params": params})
        assert copied["env"] is env
        assert copied["params"] == params


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # in rejax, with newer jax
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_rejax_trains_and_evaluates(name):
    rejax = pytest.importorskip("rejax")
    options = {
        "ppo": {"num_steps": 16, "num_minibatches": 2, "num_epochs": 1},
        "dqn": {"buffer_size": 512, "fill_buffer": 64, "batch_size": 16},
    }[name]
    env, params = gymnax.make("CartPole-v1", num_workers=1)
    with env:
        trainer = rejax.get_algo(name).create(
            env=env, env_params=params, num_envs=4, total_timesteps=256, eval_freq=128, **options
        )
        trainer = trainer.replace(
            eval_callback=lambda algo, state, key: gymnax.evaluate(algo.make_act(state), key, env, 6)
        )
        _, (lengths, returns) = jax.jit(trainer.train)(KEY)
        assert lengths.shape == (3, 6)
        np.testing.assert_array_equal(lengths, returns)
        assert env.pools[4].stats().total.steps >= 256
