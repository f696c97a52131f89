"""Families of envs as others publish them: stepped in jit, they give what SyncVectorEnv gives."""

from functools import partial

import gymnasium
import jax
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


@pytest.mark.parametrize("name", ["LunarLander-v3", "BipedalWalker-v3"])
def test_states_of_box2d(name):
    needs("Box2D", "box2d")
    env = gymnasium.make(name)
    env.reset(seed=0)
    with pytest.raises(jaxvec.EnvStateError, match=r"\.world.* can't copy exactly.*ReplayEnv"):
        StatefulEnv(env).save()
    assert_goes_on(lambda: ReplayEnv(partial(gymnasium.make, name, max_episode_steps=30)), num_steps=90)
