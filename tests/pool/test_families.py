"""Families of envs as others publish them: stepped in jit, they give what SyncVectorEnv gives."""

from __future__ import annotations

from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from support.env_states import assert_goes_on
from support.oracle import assert_same, oracle_steps, rollout, sample_actions
from support.probe import StatefulEnv

import jaxvec
from jaxvec.adapters.replay import ReplayEnv

# Warnings of other libraries are not ours to mend; as an error, one of them crashes the import of Box2D.
pytestmark = pytest.mark.filterwarnings("ignore")


def needs(module, extra):
    return pytest.importorskip(module, reason=f"{module} is not installed: the extra {extra} has it")


def assert_as_in_gymnasium(make, env, *, num_envs=3, num_steps=100, ends=0):
    """Compares a jitted scan over a pool of `env`, an id or a function, with a loop over Gymnasium's."""
    env_fns = [partial(gymnasium.make, env) if isinstance(env, str) else env] * num_envs
    actions, raw = sample_actions(env_fns, num_steps)
    for see_through in (True, False):
        expected = oracle_steps(env_fns, AutoresetMode.SAME_STEP, raw, num_steps)
        envs = make(env, num_envs, num_workers=2, wrapper_bypass=see_through)
        assert assert_same(rollout(envs, actions), expected) >= ends
    return envs


@pytest.mark.parametrize(
    ("name", "ends"), [("HalfCheetah-v5", 0), ("Hopper-v5", 6), ("Humanoid-v5", 3), ("Ant-v5", 0)]
)
def test_mujoco(make, name, ends):
    needs("mujoco", "mujoco")
    assert_as_in_gymnasium(make, name, ends=ends)


@pytest.mark.parametrize(
    ("name", "num_steps", "ends"),
    [("LunarLander-v3", 150, 3), ("BipedalWalker-v3", 100, 1), ("CarRacing-v3", 20, 0)],
)
def test_box2d(make, name, num_steps, ends):
    needs("Box2D", "box2d")
    assert_as_in_gymnasium(make, name, num_steps=num_steps, ends=ends)


@pytest.mark.parametrize("name", ["ALE/Pong-v5", "ALE/Breakout-v5"])
def test_atari(make, name):
    gymnasium.register_envs(needs("ale_py", "atari"))
    envs = assert_as_in_gymnasium(make, name, num_steps=40)
    assert envs.single_observation_space.shape == (210, 160, 3)


def test_atari_preprocessed(make):
    """As agents see it: four gray frames of 84 by 84, and lives."""
    gymnasium.register_envs(needs("ale_py", "atari"))
    needs("cv2", "atari")

    def preprocessed():
        import ale_py

        gymnasium.register_envs(ale_py)
        env = gymnasium.make("ALE/Breakout-v5", frameskip=1)
        return FrameStackObservation(AtariPreprocessing(env, noop_max=5), 4)

    assert_as_in_gymnasium(make, preprocessed, num_steps=60)
    envs = make(preprocessed, 2, info=["lives"])
    handle, first = jaxvec.reset(envs, seed=0)
    assert first.info["lives"].tolist() == [5, 5]
    steps = jax.jit(lambda handle, actions: jax.lax.scan(jaxvec.step, handle, actions)[1])
    timestep = steps(handle, np.ones((60, 2), np.int32))
    assert timestep.obs.shape == (60, 2, 4, 84, 84)
    assert timestep.info["lives"].min() < 5


def test_minigrid(make):
    needs("minigrid", "minigrid")
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"obs\['mission'\]: .*{'mission': n}"):
        make("MiniGrid-Empty-5x5-v0", 2)

    def wrapped():
        from minigrid.wrappers import ImgObsWrapper

        return ImgObsWrapper(gymnasium.make("MiniGrid-Empty-Random-5x5-v0", max_steps=30))

    envs = assert_as_in_gymnasium(make, wrapped, ends=9)
    assert envs.single_observation_space.shape == (7, 7, 3)


@pytest.mark.parametrize(
    ("domain", "task"), [("cartpole", "swingup"), ("cheetah", "run"), ("finger", "spin"), ("hopper", "hop")]
)
def test_dm_control(make, monkeypatch, domain, task):
    monkeypatch.setenv("MUJOCO_GL", "disabled")  # or it looks for a display
    needs("dm_control", "families")

    def load():
        from dm_control import suite

        return jaxvec.adapters.dm_env.DmEnv(suite.load(domain, task, task_kwargs={"time_limit": 0.5}))

    assert_as_in_gymnasium(make, load, ends=3)


@pytest.mark.parametrize("name", ["simple_spread_v3", "simple_tag_v3", "simple_speaker_listener_v4"])
@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
def test_pettingzoo_mpe(make, name, continuous):
    needs("mpe2", "families")
    from support.pettingzoo_by_hand import assert_jitted_steps_are_those_by_hand

    def env():
        import importlib

        module = importlib.import_module(f"mpe2.{name}")
        return module.parallel_env(max_cycles=10, continuous_actions=continuous)

    terminated, truncated, _ = assert_jitted_steps_are_those_by_hand(make, env, num_envs=3, num_steps=25)
    assert (terminated, truncated) == (0, 6)


def test_old_gym(make):
    """Envs with the API of Gym 0.21 (`reset() -> obs`, four results of `step`) and of 0.26, by shimmy."""
    needs("gym", "old-gym")
    needs("shimmy", "old-gym")

    def old():
        import gym
        import shimmy

        class Old(gym.Env):
            observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
            action_space = gym.spaces.Discrete(3)

            def seed(self, seed=None):
                self.rng = np.random.RandomState(seed)
                return [seed]

            def reset(self):
                self.place = self.rng.normal(size=2).astype(np.float32)
                self.steps = 0
                return self.place

            def step(self, action):
                self.steps += 1
                self.place = self.place + np.float32(action - 1)
                cut = self.steps == 9
                info = {"TimeLimit.truncated": True} if cut else {}
                return self.place, float(self.place.sum()), cut or bool(self.place[0] > 3), info

        return shimmy.GymV21CompatibilityV0(env=Old())

    def newer():
        import shimmy
        from gym.envs.classic_control import CartPoleEnv

        return shimmy.GymV26CompatibilityV0(env=CartPoleEnv())

    assert_as_in_gymnasium(make, old, ends=33)
    assert_as_in_gymnasium(make, newer, ends=9)


def family(name, module, extra):
    return pytest.param(name, module, extra, id=name.rpartition("/")[2])


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        family("Ant-v5", "mujoco", "mujoco"),
        family("Hopper-v5", "mujoco", "mujoco"),
        family("ALE/Breakout-v5", "ale_py", "atari"),
        family("MiniGrid-DoorKey-5x5-v0", "minigrid", "minigrid"),
        family("MiniGrid-Dynamic-Obstacles-5x5-v0", "minigrid", "minigrid"),
    ],
)
def test_states(name, module, extra):
    registered = needs(module, extra)
    if module == "ale_py":
        gymnasium.register_envs(registered)
    assert_goes_on(partial(gymnasium.make, name, max_episode_steps=25), num_steps=60, ends=2)


def test_states_of_mujoco_data_hold_its_model():
    mujoco = needs("mujoco", "mujoco")

    class Env(gymnasium.Env):
        """Reaches its model, which each step changes, only through its data."""

        observation_space = spaces.Box(0, np.inf, (), np.float64)
        action_space = spaces.Discrete(9)

        def __init__(self):
            self.data = mujoco.MjData(mujoco.MjModel.from_xml_string("<mujoco/>"))

        def reset(self, *, seed=None, options=None):
            mujoco.mj_resetData(self.data.model, self.data)
            self.data.model.opt.timestep = 0.0
            return np.array(self.data.time), {}

        def step(self, action):
            self.data.model.opt.timestep += action
            mujoco.mj_step(self.data.model, self.data)
            return np.array(self.data.time), 0.0, self.data.time > 99, False, {}

    assert_goes_on(Env, num_steps=60)


def test_states_with_an_old_mujoco_name_the_needed_version(monkeypatch):
    mujoco = needs("mujoco", "mujoco")
    monkeypatch.delattr(mujoco, "mj_copyData")
    with jaxvec.make("Hopper-v5", 1, states=2, backend="serial") as envs:
        envs.reset(seed=0)
        with pytest.raises(
            jaxvec.EnvStateError, match=r"MuJoCo \d.*, and states need 3\.5 or newer.*ReplayEnv"
        ):
            envs.save()


@pytest.mark.parametrize("probability", [0.0, 0.8])
def test_states_of_preprocessed_atari(probability):
    """Also of the action that ALE repeats with some probability, which its own state has not."""
    gymnasium.register_envs(needs("ale_py", "atari"))
    needs("cv2", "atari")

    def preprocessed():
        env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=probability)
        return FrameStackObservation(AtariPreprocessing(env, noop_max=5), 2)

    assert_goes_on(preprocessed, num_steps=48, ends=0)


@pytest.mark.parametrize(("domain", "task"), [("cartpole", "swingup"), ("finger", "spin")])
def test_states_of_dm_control(monkeypatch, domain, task):
    """The finger's target is a part of its model, and is another one in each episode."""
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    needs("dm_control", "families")

    def load():
        from dm_control import suite

        return jaxvec.adapters.dm_env.DmEnv(suite.load(domain, task, task_kwargs={"time_limit": 0.5}))

    assert_goes_on(load, num_steps=60, ends=1)


def test_states_of_pettingzoo():
    mpe = needs("mpe2", "families")
    assert mpe

    def env():
        from mpe2 import simple_tag_v3

        return jaxvec.adapters.pettingzoo.PettingZooEnv(simple_tag_v3.parallel_env(max_cycles=10))

    assert_goes_on(env, num_steps=60, ends=3)


def openspiel(game, **config):
    """Returns an OpenSpiel game whose actions are all legal, and whose episodes are all seeded."""
    import shimmy

    class Legal(gymnasium.Wrapper):
        rng = np.random.default_rng()

        def reset(self, *, seed=None, options=None):
            if seed is not None:
                self.rng = np.random.default_rng(seed)
            obs, self.infos = self.env.reset(seed=int(self.rng.integers(2**31)), options=options)
            return obs, self.infos

        def step(self, action):
            legal = {
                agent: np.flatnonzero(self.infos.get(agent, {}).get("action_mask", [])) for agent in action
            }
            action = {
                agent: legal[agent][one % len(legal[agent])] if len(legal[agent]) else one
                for agent, one in action.items()
            }
            *result, self.infos = self.env.step(action)
            return *result, self.infos

    env = shimmy.OpenSpielCompatibilityV0(game_name=game, config=config or None)
    return Legal(jaxvec.adapters.pettingzoo.PettingZooEnv(env))


@pytest.mark.parametrize(
    "game", ["tic_tac_toe", "matrix_rps", "goofspiel", "kuhn_poker", "leduc_poker", "backgammon", "hanabi"]
)
def test_states_of_openspiel(game):
    """Games of turns and of simultaneous moves, and with moves of chance."""
    for module in ("pyspiel", "shimmy", "pettingzoo"):
        needs(module, "families")
    assert_goes_on(partial(openspiel, game), num_steps=300, ends=0 if game == "backgammon" else 1)


def test_states_of_openspiel_in_other_workers_and_files(make, tmp_path):
    for module in ("pyspiel", "shimmy", "pettingzoo"):
        needs(module, "families")
    env_fn = partial(openspiel, "leduc_poker", players=3)
    envs, other = (make(env_fn, 4, num_workers=2, states=8) for _ in range(2))
    handle, _ = jaxvec.reset(envs, seed=0)
    actions = sample_actions([env_fn] * 4, 205)[0]
    scan = jax.jit(lambda handle, actions: jax.lax.scan(jaxvec.step, handle, actions))
    handle, _ = scan(handle, jax.tree.map(lambda leaf: leaf[:5], actions))
    handle, state = jaxvec.save(handle)
    rest = jax.tree.map(lambda leaf: leaf[5:], actions)
    handle, expected = scan(handle, rest)
    assert expected.terminated.sum() > 40

    def reverse(tree):
        return jax.tree.map(lambda leaf: leaf[:, ::-1], tree)

    def assert_repeated(handle, state, expected, actions):
        _, got = scan(jaxvec.restore(handle, state)[0], actions)
        jax.tree.map(np.testing.assert_array_equal, got[:4], expected[:4])

    assert_repeated(handle, state, expected, rest)
    envs.save_states(tmp_path / "states", state)
    assert_repeated(jaxvec.reset(other, seed=9)[0], other.load_states(tmp_path / "states"), expected, rest)
    handle, _ = jaxvec.reset(envs, seed=1)
    assert_repeated(handle, state[::-1], reverse(expected), reverse(rest))


@pytest.mark.parametrize("name", ["LunarLander-v3", "BipedalWalker-v3"])
def test_states_of_box2d(name):
    needs("Box2D", "box2d")
    env = gymnasium.make(name)
    env.reset(seed=0)
    with pytest.raises(jaxvec.EnvStateError, match=r"\.world.* can't copy exactly.*ReplayEnv"):
        StatefulEnv(env).save()
    assert_goes_on(lambda: ReplayEnv(partial(gymnasium.make, name, max_episode_steps=30)), num_steps=90)


@pytest.mark.parametrize(
    ("module", "name", "size"),
    [
        ("mo_gymnasium", "deep-sea-treasure-v0", 2),
        ("mo_gymnasium", "minecart-v0", 3),
        ("rware", "rware-tiny-2ag-v2", 2),
        ("lbforaging", "Foraging-8x8-2p-1f-v3", 2),
    ],
)
def test_vector_rewards_and_their_statistics(make, module, name, size):
    """SyncVectorEnv takes no vector rewards, so plain envs are the oracle."""
    pytest.importorskip(module, reason=f"{module} is not installed: pip install {module}")
    name, num_envs, num_steps = f"{module}:{name}", 3, 60
    actions, raw = sample_actions([partial(gymnasium.make, name)] * num_envs, num_steps)
    envs = make(name, num_envs, num_workers=2)
    assert envs.reward_space.shape == (size,)
    handle, _ = jaxvec.reset(envs, seed=5)

    @jax.jit
    def run(handle, actions):
        def body(carry, action):
            handle, stats = carry
            handle, timestep = jaxvec.step(handle, action)
            stats = stats.update(timestep.reward)
            return (handle, stats), (timestep, stats.scale(timestep.reward))

        stats = jaxvec.normalize.RunningMeanStd.create(jnp.zeros(size), count=0)
        return jax.lax.scan(body, (handle, stats), actions)

    (_, stats), (got, scaled) = run(handle, actions)
    rewards = np.zeros((num_steps, num_envs, size))
    for n in range(num_envs):
        env = gymnasium.make(name)
        env.reset(seed=5 + n)
        total = 0
        for t in range(num_steps):
            action = jax.tree.map(lambda leaf, t=t, n=n: leaf[t, n], raw)
            _, reward, terminated, truncated, _ = env.step(action)
            rewards[t, n] = reward
            total = total + rewards[t, n]
            np.testing.assert_array_equal(got.reward[t, n], np.float32(reward))
            np.testing.assert_allclose(got.info["episode_return"][t, n], total, rtol=1e-6)
            assert (got.terminated[t, n], got.truncated[t, n]) == (terminated, truncated)
            if terminated or truncated:
                env.reset()
                total = 0
    np.testing.assert_allclose(stats.mean, rewards.mean((0, 1)), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(stats.var, rewards.var((0, 1)), rtol=1e-3, atol=1e-6)
    last = np.clip(rewards[-1] / np.sqrt(rewards.var((0, 1)) + 1e-8), -10, 10)
    np.testing.assert_allclose(scaled[-1], last, rtol=1e-3, atol=1e-5)
