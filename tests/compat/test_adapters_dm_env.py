"""dm_env's environments through jaxvec.adapters.dm_env, dm_control's own among them."""

from importlib.util import find_spec
from unittest import mock

import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from support.scripts import run_python

import jaxvec
from jaxvec.testing import check_env

dm_env = pytest.importorskip("dm_env", reason="dm_env is not installed: the extra dm-env has it")
from dm_env import specs  # noqa: E402

from jaxvec.adapters.dm_env import INFO, DmEnv  # noqa: E402

OBSERVATION = {  # keys are not in sorted order
    "nested": {
        "list": [specs.Array((2,), np.float64), specs.BoundedArray((), np.uint8, 3, 7)],
        "tuple": (specs.DiscreteArray(4, np.int8), specs.Array((3,), np.int16)),
    },
    "bounds": specs.BoundedArray((2, 2), np.float32, [-np.inf, 0], [1, np.inf]),
    "flag": specs.Array((), bool),
    "ends": specs.BoundedArray((1,), np.int32, -(2**31), 2**31 - 1),
}
SPACES = spaces.Dict(
    {
        "nested": spaces.Dict(
            {
                "list": spaces.Tuple(
                    [spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.Box(3, 7, (), np.uint8)]
                ),
                "tuple": spaces.Tuple(
                    [spaces.Discrete(4, dtype=np.int8), spaces.Box(-(2**15), 2**15 - 1, (3,), np.int16)]
                ),
            }
        ),
        "bounds": spaces.Box(
            np.array([[-np.inf, 0]] * 2, np.float32), np.array([[1, np.inf]] * 2, np.float32), (2, 2)
        ),
        "flag": spaces.Box(0, 1, (), np.bool_),
        "ends": spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32),
    }
)
ACTION = {"move": specs.DiscreteArray(5), "arm": [specs.BoundedArray((2,), np.float64, -1, 1)]}


class Walk(dm_env.Environment):
    """Ends after `length` steps with the discount given; its observation is drawn anew each step."""

    def __init__(self, seed=None, *, length=4, discount=0.0, observation=OBSERVATION, reward=None):
        self.speed = 1
        self.seed = seed
        self._random = np.random.default_rng(seed)
        self._length, self._discount = length, discount
        self._observation, self._reward = observation, reward
        self._step = length  # over

    def observation_spec(self):
        return self._observation

    def action_spec(self):
        return ACTION

    def reward_spec(self):
        return super().reward_spec() if self._reward is None else self._reward

    def _observe(self):
        draw = self._random.integers
        return {
            "nested": {
                "list": [draw(9, size=2) / 7, np.uint8(draw(3, 8))],
                "tuple": (draw(4, dtype=np.int8), np.full(3, -7, "i2")),
            },
            "bounds": draw([[-99, 0]] * 2, [[2, 99]] * 2).astype(np.float32),
            "flag": bool(draw(2)),
            "ends": draw(-(2**31), 2**31, 1).astype(np.int32),
        }

    def reset(self):
        self._step = 0
        return dm_env.restart(self._observe())

    def step(self, action):
        if self._step == self._length:
            return self.reset()
        for name, spec in ACTION.items():
            assert isinstance(action[name], list) == isinstance(spec, list)
        ACTION["move"].validate(action["move"])
        ACTION["arm"][0].validate(action["arm"][0])
        self._step += 1
        reward = self._step + float(action["move"]) + action["arm"][0].sum()
        if self._reward is not None:
            reward = np.array([reward, -reward], np.float32)
        if self._step == self._length:
            return dm_env.TimeStep(dm_env.StepType.LAST, reward, self._discount, self._observe())
        return dm_env.transition(reward, self._observe(), 0.5)

    def double_speed(self):
        return 2 * self.speed


def actions(num_steps, num_envs):
    rng = np.random.default_rng(3)
    return {
        "move": rng.integers(5, size=(num_steps, num_envs)).astype(np.int32),
        "arm": (rng.uniform(-1, 1, (num_steps, num_envs, 2)).astype(np.float32),),
    }


@jax.jit
def scan(handle, actions):
    return jax.lax.scan(jaxvec.step, handle, actions)[1]


def test_specs_become_spaces_of_the_same_structure_dtypes_and_bounds():
    env = DmEnv(Walk())
    assert env.observation_space == SPACES
    assert list(env.observation_space) == list(OBSERVATION)
    assert env.action_space == spaces.Dict(
        {
            "arm": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64)]),
            "move": spaces.Discrete(5, dtype=np.int32),
        }
    )
    assert env.action_space["move"].dtype == np.int32
    assert not hasattr(env, "reward_space")


def test_the_adapted_env_keeps_jaxvecs_contract():
    check_env(lambda: DmEnv(Walk), num_steps=20)


def test_strings_are_refused_with_advice(make):
    spec = {"deep": ({"name": specs.StringArray(())},)}
    with pytest.raises(
        jaxvec.EnvError, match=r"observation_spec\['deep'\]\[0\]\['name'\]: StringArray.*leave it out"
    ) as caught:
        make(lambda: DmEnv(Walk(observation=spec)), 2)
    assert isinstance(caught.value.__cause__, jaxvec.UnsupportedSpaceError)


def test_nested_rewards_and_discounts_are_refused():
    class Discounts(Walk):
        def discount_spec(self):
            return {"a": super().discount_spec()}

    with pytest.raises(jaxvec.UnsupportedSpaceError, match="reward_spec: expected one Array, got tuple"):
        DmEnv(Walk(reward=(specs.Array((), float),)))
    with pytest.raises(jaxvec.UnsupportedSpaceError, match="discount_spec: expected one Array, got dict"):
        DmEnv(Discounts())
    with pytest.raises(jaxvec.UnsupportedSpaceError, match="observation_spec: .* got int"):
        DmEnv(Walk(observation=3))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("discount", [0.0, 0.25])
def test_jitted_steps_are_those_by_hand(make, discount):
    def by_hand(seed, actions):
        env = Walk(seed, discount=discount)
        yield env.reset(), None
        for t in range(12):
            timestep = env.step(
                {"move": actions["move"][t], "arm": [actions["arm"][0][t].astype(np.float64)]}
            )
            yield timestep, env.reset() if timestep.last() else None

    envs = make(
        lambda: DmEnv(lambda seed=None: Walk(seed, discount=discount)),
        3,
        num_workers=2,
        info=INFO,
        check="strict",
    )
    assert envs.single_observation_space == SPACES
    handle, first = jaxvec.reset(envs, seed=5)
    got = scan(handle, actions(12, 3))
    for n in range(3):
        (start, _), *steps = by_hand(5 + n, jax.tree.map(lambda leaf, n=n: leaf[:, n], actions(12, 3)))
        assert_obs(first.obs, n, start.observation)
        assert (first.info["discount"][n], first.info["step_type"][n]) == (1, 0)
        for t, (timestep, restart) in enumerate(steps):
            at = t, n
            assert_obs(got.obs, at, (restart or timestep).observation)
            assert got.reward[at] == np.float32(timestep.reward)
            assert got.terminated[at] == (timestep.last() and discount == 0)
            assert got.truncated[at] == (timestep.last() and discount != 0)
            # At an episode's end info is of the reset, and its last step's is in final_info.
            info = {name: leaf[at] for name, leaf in got.info.items() if name in INFO}
            assert info == ({"discount": 1, "step_type": 0} if restart else {"discount": 0.5, "step_type": 1})
            assert got.info["_final_obs"][at] == (restart is not None)
            if restart:
                final = {name: got.info["final_info"][name][at] for name in INFO}
                assert final == {"discount": discount, "step_type": 2}
                assert_obs(got.info["final_obs"], at, timestep.observation)
    assert int((got.terminated | got.truncated).sum()) == 9


def assert_obs(got, at, expected):
    expected = {**expected, "nested": {**expected["nested"], "list": tuple(expected["nested"]["list"])}}
    jax.tree.map(
        lambda leaf, value: np.testing.assert_array_equal(leaf[at], np.asarray(value).astype(leaf.dtype)),
        got,
        expected,
    )


def test_vector_rewards(make):
    envs = make(lambda: DmEnv(Walk(reward=specs.Array((2,), np.float32))), 2)
    handle, _ = jaxvec.reset(envs)
    reward = scan(handle, actions(5, 2)).reward
    assert (reward.shape, reward.dtype) == ((5, 2, 2), np.float32)
    assert reward[..., 0].all()
    np.testing.assert_array_equal(reward[..., 1], -reward[..., 0])


def test_a_function_makes_the_env_anew_from_a_seed(make):
    closed = []

    class Closing(Walk):
        def close(self):
            closed.append(self.seed)

    env = DmEnv(lambda random=None: Closing(random))
    first = env.adapted
    assert first.seed is None
    env.reset()
    assert env.adapted is first
    env.reset(seed=7)
    assert (env.adapted.seed, closed) == (7, [None])
    env.close()
    assert closed == [None, 7]


def test_what_is_no_environment_is_refused():
    with pytest.raises(TypeError, match=r"must be a dm_env.Environment or a function .* not int"):
        DmEnv(3)
    with pytest.raises(TypeError, match=r"must make a dm_env.Environment, not NoneType"):
        DmEnv(lambda: None)


def test_a_pool_given_one_names_the_adapter(make):
    with pytest.raises(
        jaxvec.EnvError, match=r"got Walk. Wrap a dm_env.Environment in jaxvec.adapters.dm_env.DmEnv"
    ):
        make(Walk, 2)


def test_stepping_past_the_end_is_an_error():
    env = DmEnv(Walk(length=1))
    action = {"move": np.int32(0), "arm": (np.zeros(2),)}
    for _ in range(2):
        with pytest.raises(ResetNeeded):
            env.step(action)
        env.reset()
        assert env.step(action)[2:4] == (True, False)


def test_methods_and_attributes_of_the_env_inside(make):
    envs = make(lambda: DmEnv(Walk()), 2)
    envs.set_attr("speed", [3, 4])
    assert envs.call("double_speed") == (6, 8)
    with pytest.raises(jaxvec.EnvError, match="no env attribute 'nonsense'"):
        envs.get_attr("nonsense")


def test_only_envs_with_physics_are_rendered():
    with pytest.raises(ValueError, match="render_mode must be None or, for an env with a physics"):
        DmEnv(Walk(), render_mode="rgb_array")
    with pytest.raises(ValueError, match='pass render_mode="rgb_array" to DmEnv'):
        DmEnv(Walk()).render()


def python(source):
    done = run_python("-c", source)
    return done.stdout + done.stderr


# --- dm_control ------------------------------------------------------------------------------

needs_dm_control = pytest.mark.skipif(
    find_spec("dm_control") is None, reason="dm_control is not installed: the group families has it"
)


def load(random=None, domain="cartpole", task="swingup"):
    from dm_control import suite  # in the workers; here it would look for a display

    return suite.load(domain, task, task_kwargs={"time_limit": 0.1, "random": random})


@pytest.fixture
def suite(monkeypatch):
    """Lets this process load tasks, too, without a display."""
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    import absl.logging

    monkeypatch.setattr(absl.logging, "warning", lambda *args: None)


@needs_dm_control
@pytest.mark.parametrize("adapt", [lambda: DmEnv(load()), lambda: DmEnv(load)], ids=["RandomState", "anew"])
def test_dm_control_in_jit_is_dm_control_by_hand(make, suite, adapt):
    envs = make(adapt, 3, num_workers=2, info=INFO)
    space = envs.single_action_space
    assert space == spaces.Box(-1, 1, (1,), np.float64)
    action = np.random.default_rng(0).uniform(-1, 1, (25, 3, 1)).astype(np.float32)
    for seed in (11, 4):  # the second time over episodes that were cut short
        handle, first = jaxvec.reset(envs, seed=seed)
        got = scan(handle, action)
        for n in range(3):
            env = load(seed + n)
            assert_arrays(first.obs, n, env.reset().observation)
            for t in range(25):
                timestep = env.step(action[t, n].astype(np.float64))
                assert got.reward[t, n] == np.float32(timestep.reward)
                assert got.truncated[t, n] == timestep.last() == (t in (9, 19))
                assert not got.terminated[t, n]
                if timestep.last():
                    assert_arrays(got.info["final_obs"], (t, n), timestep.observation)
                    assert got.info["final_info"]["discount"][t, n] == timestep.discount == 1
                    timestep = env.reset()
                assert_arrays(got.obs, (t, n), timestep.observation)


def assert_arrays(got, at, expected):
    assert set(got) == set(expected)
    for name, leaf in got.items():
        np.testing.assert_array_equal(leaf[at], expected[name].astype(np.float32))


@needs_dm_control
@pytest.mark.parametrize(("domain", "task"), [("reacher", "easy"), ("cheetah", "run"), ("walker", "walk")])
def test_a_seed_is_dm_controls_random(suite, domain, task):
    env = DmEnv(load(domain=domain, task=task))
    env.reset()
    env.step(np.zeros(env.action_space.shape))
    for seed in (5, 2**31 + 5):
        expected = load(seed, domain, task)
        for timestep in (expected.reset(), expected.reset()):
            obs, _ = env.reset(seed=seed) if timestep.first() and seed is not None else env.reset()
            seed = None
            for name, value in timestep.observation.items():
                np.testing.assert_array_equal(obs[name], value)


@needs_dm_control
def test_seeds_of_more_than_32_bits_differ(suite):
    env = DmEnv(load())
    starts = [env.reset(seed=seed)[0]["position"].tobytes() for seed in (5, 2**32 + 5, 2**33 + 5, 2**127, 5)]
    assert starts[0] == starts[-1]
    assert len(set(starts)) == 4


@needs_dm_control
def test_the_composers_random_state_is_seeded(suite):
    from dm_control import manipulation

    def load(seed):
        return manipulation.load("reach_site_features", seed=seed)

    expected = load(5).reset().observation
    obs, _ = DmEnv(load(6)).reset(seed=5)
    assert obs.keys() == expected.keys()
    for name in obs:
        np.testing.assert_array_equal(obs[name], expected[name])


@needs_dm_control
def test_dm_control_is_rendered(make):
    """By EGL, in the workers."""
    tried = python(
        "import os; os.environ['MUJOCO_GL'] = 'egl'; from dm_control import suite;"
        "suite.load('cartpole', 'swingup').physics.render(8, 8); print('rendered')"
    )
    if "rendered" not in tried:
        pytest.skip(f"nothing is rendered by EGL here: {tried.strip().splitlines()[-1]}")
    kwargs = {"height": 48, "width": 64, "camera_id": 0}
    envs = make(
        lambda: DmEnv(load(), render_mode="rgb_array", render_kwargs=kwargs),
        3,
        workers=jaxvec.Workers(env={"MUJOCO_GL": "egl"}),
    )
    assert envs.metadata["render_fps"] == 100
    envs.reset(seed=0)
    frames = envs.render()
    assert [(frame.shape, frame.dtype) for frame in frames] == [((48, 64, 3), np.uint8)] * 3
    assert frames[0].std() > 1
    assert frames.shape == (3, 48, 64, 3)


def test_make_refuses_one_env_behind_two_adapters():
    walk = Walk()
    with pytest.raises(jaxvec.EnvError, match="the same env for env 0 and env 1;"):
        jaxvec.make(lambda: DmEnv(walk), 2, backend="serial")


@pytest.mark.parametrize("answer", [None, KeyError])
def test_envs_may_refuse_or_answer_every_attribute(answer):
    class Env(Walk):
        def __getattr__(self, name):
            if answer is None:
                return mock.Mock()
            raise answer(name)

    env = DmEnv(Env(0))
    assert "render_fps" not in env.metadata
    assert env.observation_space.contains(env.reset()[0])
    with pytest.raises(TypeError, match="Env has no RandomState to seed"):
        env.reset(seed=0)
    assert DmEnv(Env).reset(seed=0)[1]["step_type"] == 0
