"""ML-Agents' simulations as Gymnasium envs, over a fake that speaks `mlagents_envs`' types.

The types are `mlagents_envs`' own where it is installed. It asks for old releases of NumPy and Python, so
elsewhere they are the few names here, which have the same attributes.
"""

from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec.adapters.mlagents import INFO, MlAgentsEnv

try:
    from mlagents_envs.base_env import (
        ActionSpec,
        BaseEnv,
        BehaviorSpec,
        DecisionSteps,
        DimensionProperty,
        ObservationSpec,
        ObservationType,
        TerminalSteps,
    )

    def observe(shape):
        kinds = (DimensionProperty.NONE,) * len(shape)
        return ObservationSpec(shape, kinds, ObservationType.DEFAULT, "sensor")

except ImportError:
    BaseEnv = object

    class ActionSpec(SimpleNamespace):
        def __init__(self, continuous_size, discrete_branches):
            super().__init__(continuous_size=continuous_size, discrete_branches=discrete_branches)

        def empty_action(self, n_agents):
            sizes = self.continuous_size, len(self.discrete_branches)
            continuous, discrete = np.zeros((n_agents, sizes[0]), "f4"), np.zeros((n_agents, sizes[1]), "i4")
            action = SimpleNamespace(continuous=continuous, discrete=discrete)
            action.add_continuous = partial(setattr, action, "continuous")
            action.add_discrete = partial(setattr, action, "discrete")
            return action

    def BehaviorSpec(observation_specs, action_spec):  # noqa: N802
        return SimpleNamespace(observation_specs=observation_specs, action_spec=action_spec)

    def DecisionSteps(*values):  # noqa: N802
        names = ("obs", "reward", "agent_id", "action_mask", "group_id", "group_reward")
        return SimpleNamespace(**dict(zip(names, values, strict=True)))

    def TerminalSteps(*values):  # noqa: N802
        names = ("obs", "reward", "interrupted", "agent_id", "group_id", "group_reward")
        return SimpleNamespace(**dict(zip(names, values, strict=True)))

    def observe(shape):
        return SimpleNamespace(shape=shape)


def _steps(cls, third, ids, *, reward, mask=None):
    """Returns steps whose observations are an agent's id, twice or in a grid."""
    ids = np.array(ids, np.int32)
    obs = [np.repeat(ids[:, None], 2, 1).astype("f4"), np.ones((len(ids), 2, 2), "f4") * ids[:, None, None]]
    group = np.zeros(len(ids), np.int32), np.full(len(ids), 0.5, np.float32)
    rewards = np.full(len(ids), reward, np.float32)
    if cls is DecisionSteps:
        return DecisionSteps(obs, rewards, ids, third, *group)
    return TerminalSteps(obs, rewards, np.array(third, np.bool_), ids, *group)


class FakeSimulation(BaseEnv):
    """Plays a script: who of "cars" ends (and by interruption), and who decides, in each step."""

    SCRIPT = (
        ([], [], [5, 3]),
        ([], [], [3]),  # 5 does not decide
        ([3], [False], [7, 5]),  # 7 comes into the place of 3
        ([5, 7], [True, False], []),
    )

    def __init__(self, discrete=(2, 3), script=SCRIPT):
        self._specs = {}
        self.discrete, self.script = discrete, script
        self.log = []
        self.parameters = {}

    @property
    def behavior_specs(self):
        return self._specs

    def reset(self):
        specs = [observe((2,)), observe((2, 2))]
        self._specs = {
            "cars": BehaviorSpec(specs, ActionSpec(1, self.discrete)),
            "drones": BehaviorSpec(specs, ActionSpec(2, ())),
        }
        self.now = 0
        self.log.append(("reset", dict(self.parameters)))

    def step(self):
        self.now += 1
        self.log.append("step")

    def get_steps(self, behavior_name):
        ended, interrupted, decide = self.script[self.now % len(self.script)]
        if behavior_name == "drones":
            ended, interrupted, decide = [], [], [1]
        mask = None
        if self.discrete and behavior_name == "cars":
            mask = [np.zeros((len(decide), size), np.bool_) for size in self.discrete]
            mask[0][:, 1] = True  # not available
        return (
            _steps(DecisionSteps, mask, decide, reward=1),
            _steps(TerminalSteps, interrupted, ended, reward=10),
        )

    def set_actions(self, behavior_name, action):
        self.log.append((behavior_name, action.continuous.tolist(), action.discrete.tolist()))

    def set_action_for_agent(self, behavior_name, agent_id, action):
        raise NotImplementedError

    def close(self):
        self.log.append("close")


def _action(cars=(0.0, 0.0, 0.0)):
    discrete = np.array([[0, 0], [1, 2], [0, 1]])
    cars = {"continuous": np.array(cars, "f4")[:, None], "discrete": discrete}
    return {"cars": cars, "drones": np.full((3, 2), 0.25, "f4")}


@pytest.fixture
def env():
    return MlAgentsEnv(FakeSimulation(), 3)


def test_spaces_have_places_for_agents(env):
    cars, drones = env.observation_space["cars"], env.observation_space["drones"]
    assert [space.shape for space in cars["obs"]] == [(3, 2), (3, 2, 2)]
    assert cars["decides"] == spaces.MultiBinary(3)
    assert [space.shape for space in cars["action_mask"]] == [(3, 2), (3, 3)]
    assert "action_mask" not in drones.spaces
    assert env.action_space["cars"]["discrete"].nvec.tolist() == [[2, 3]] * 3
    assert (env.action_space["drones"].shape, env.reward_space.shape) == ((3, 2), (6,))
    obs, info = env.reset()
    assert env.observation_space.contains(obs)
    assert sorted(info) == sorted(INFO)


def test_agents_come_and_go_and_who_decides_is_asked(env):
    log = env.adapted.log
    obs, info = env.reset()
    cars = obs["cars"]
    assert cars["obs"][0].tolist() == [[5, 5], [3, 3], [0, 0]]
    assert (cars["decides"].tolist(), info["agent_id"][:3].tolist()) == ([1, 1, 0], [5, 3, -1])
    assert [mask.tolist()[0] for mask in cars["action_mask"]] == [[1, 0], [1, 1, 1]]
    assert cars["action_mask"][0].tolist()[2] == [1, 1]

    del log[:]
    obs, reward, terminated, truncated, info = env.step(_action((0.5, -0.5, 1)))
    assert log == [
        ("cars", [[0.5], [-0.5]], [[0, 0], [1, 2]]),
        ("drones", [[0.25, 0.25]], [[]]),
        "step",
    ]
    assert (terminated, truncated) == (False, False)
    assert (reward.tolist(), reward.dtype) == ([0, 1, 0, 1, 0, 0], np.float32)
    assert (obs["cars"]["decides"].tolist(), info["agent_id"][:3].tolist()) == ([0, 1, 0], [5, 3, -1])
    assert obs["cars"]["obs"][1][0].tolist() == [[5, 5], [5, 5]]  # what it said last

    del log[:]
    obs, reward, _, _, info = env.step(_action((0.5, -0.5, 1)))
    assert log[0] == ("cars", [[-0.5]], [[1, 2]])
    assert obs["cars"]["obs"][0].tolist() == [[5, 5], [7, 7], [0, 0]]
    assert reward.tolist() == [1, 11, 0, 1, 0, 0]  # the last of 3 and the first of 7
    assert info["agent_id"][:3].tolist() == [5, 7, -1]
    assert (info["terminated"][:3].tolist(), info["interrupted"][:3].tolist()) == (
        [False, True, False],
        [False] * 3,
    )
    assert info["group_reward"][:3].tolist() == [0.5, 1, 0]

    del log[:]
    obs, reward, _, _, info = env.step(_action((0.5, -0.5, 1)))
    assert log[0] == ("cars", [[-0.5], [0.5]], [[1, 2], [0, 0]])  # in the order in which it asked
    assert info["interrupted"][:3].tolist() == [True, False, False]
    assert info["terminated"][:3].tolist() == [False, True, False]
    assert (info["agent_id"][:3].tolist(), obs["cars"]["decides"].tolist()) == ([-1] * 3, [0] * 3)
    assert obs["cars"]["obs"][0].tolist()[:2] == [[5, 5], [7, 7]]  # the last that they saw

    del log[:]
    obs, *_ = env.step(_action())
    assert log[0] == ("drones", [[0.25, 0.25]], [[]])  # no car decides
    assert obs["cars"]["obs"][0].tolist() == [[5, 5], [3, 3], [0, 0]]


def test_options_of_a_reset_are_parameters():
    simulation = FakeSimulation()
    env = MlAgentsEnv(simulation, 3, set_parameter=simulation.parameters.__setitem__)
    env.reset(seed=1, options={"gravity": 9})
    assert simulation.log[-1] == ("reset", {"gravity": 9.0})
    with pytest.raises(ValueError, match=r"no set_parameter for the options \['gravity'\]"):
        MlAgentsEnv(FakeSimulation(), 3).reset(options={"gravity": 9})


def test_errors_name_behaviour_and_what_to_do(env):
    with pytest.raises(ValueError, match="max_agents must be at least 1, not 0"):
        MlAgentsEnv(FakeSimulation(), 0)
    with pytest.raises(
        ValueError, match=r"behaviour 'cars' has more agents than max_agents=1: 3 joined \[5\]"
    ):
        MlAgentsEnv(FakeSimulation(), 1).reset()
    env.reset()
    env.adapted.behavior_specs["boats"] = env.adapted.behavior_specs["cars"]
    with pytest.raises(ValueError, match=r"behaviours \['boats'\] appeared after the first reset"):
        env.step(_action())


def test_a_pool_steps_it_in_jit():
    import jax

    def make():
        return gymnasium.wrappers.TimeLimit(MlAgentsEnv(FakeSimulation(), 3), 3)

    with jaxvec.make(make, 2, num_workers=1, info=INFO, autoreset_mode="NEXT_STEP") as envs:
        handle, timestep = jaxvec.reset(envs, seed=0)
        actions = jax.tree.map(lambda leaf: np.stack([leaf] * 2), _action())
        rows = []
        for _ in range(4):
            handle, timestep = jax.jit(jaxvec.step)(handle, actions)
            rows.append(timestep)
    assert [row.reward[1, :3].tolist() for row in rows] == [[0, 1, 0], [1, 11, 0], [10, 10, 0], [0, 0, 0]]
    assert [row.info["agent_id"][0, :3].tolist() for row in rows] == [
        [5, 3, -1],
        [5, 7, -1],
        [-1, -1, -1],
        [5, 3, -1],
    ]
    assert [row.truncated.tolist() for row in rows] == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
