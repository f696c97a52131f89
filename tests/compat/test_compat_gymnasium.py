"""Gymnasium's vector envs over a pool, against Gymnasium's own."""

import multiprocessing
import threading
from contextlib import closing, nullcontext
from decimal import Decimal
from fractions import Fraction
from functools import partial

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import given
from hypothesis import strategies as st
from support.disasters import GatedEnv, RaisingEnv, closing_all

import jaxvec
from jaxvec.compat.gymnasium import AsyncVectorEnv, SyncVectorEnv, batch, vector_entry_point
from jaxvec.testing import CountingEnv, NestedEnv

CLASSES = {
    "async": AsyncVectorEnv,
    "async, views": partial(AsyncVectorEnv, copy=False),
    "async, portable": jaxvec.config.override(dispatch="portable")(AsyncVectorEnv),
    "sync": SyncVectorEnv,
}


@pytest.fixture(params=CLASSES)
def face(request):
    """Makes vector envs that are closed in the end."""
    options = {} if request.param == "sync" else {"terminate": True}
    with closing_all(CLASSES[request.param], **options) as make:
        yield make


class Duck:
    """An object with the methods of an env that is no `gymnasium.Env`."""

    def __init__(self):
        self.env = CountingEnv()

    def __getattr__(self, name):
        return getattr(self.env, name)


@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
def test_an_object_that_is_no_gymnasium_env_is_refused(face):
    with closing(gymnasium.vector.SyncVectorEnv([Duck])) as theirs:
        assert theirs.reset()[0].shape == (1, *CountingEnv().observation_space.shape)
    with pytest.raises(TypeError, match=r"expected a gymnasium\.Env, got Duck"):
        face([Duck])


class InfoEnv(CountingEnv):
    """Returns infos of many kinds, in some steps, for some envs."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {"steps": self.steps, "name": "a" * self.steps, "pair": np.arange(2) * self.steps}
        if action % 2:
            info |= {"odd": {"action": int(action), "half": action / 2}, "flag": True}
        return obs, reward, terminated, truncated, info


KINDS = {
    "float64 observations and actions as given": partial(gymnasium.make, "Pendulum-v1"),
    "a tuple of numbers": partial(gymnasium.make, "Blackjack-v1"),
    "nested spaces": partial(NestedEnv, 5),
    "infos": partial(InfoEnv, 4),
    "float64": partial(gymnasium.make, "MountainCarContinuous-v0"),
}


@pytest.mark.slow(but=15)
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_data_as_gymnasium(face, kind, mode):
    env_fns = [KINDS[kind]] * 3
    ours, theirs = (
        face(env_fns, autoreset_mode=mode),
        gymnasium.vector.SyncVectorEnv(env_fns, autoreset_mode=mode),
    )
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    theirs.action_space.seed(0)
    assert data_equivalence(ours.reset(seed=3), theirs.reset(seed=3))
    for _ in range(12):
        action = theirs.action_space.sample()
        mine, other = ours.step(action), theirs.step(action)
        last, expected = mine[4].pop("final_obs", []), other[4].pop("final_obs", [])
        assert jax.tree.all(jax.tree.map(np.array_equal, list(last), list(expected)))
        assert data_equivalence(mine, other)
        over = other[2] | other[3]
        if mode is AutoresetMode.DISABLED and over.any():
            again = [envs.reset(seed=[1, 2, 3], options={"reset_mask": over}) for envs in (ours, theirs)]
            assert data_equivalence(*again)
    theirs.close()


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64 + 1, [2**127, None, 7], None], ids=str)
def test_seeds_of_any_size_are_as_gymnasiums(face, seed):
    """Also those that Gymnasium draws for envs without one, which repeat an episode."""
    env_fns = [partial(NestedEnv, 5)] * 3
    ours, theirs = face(env_fns), gymnasium.vector.SyncVectorEnv(env_fns)
    if seed is None:
        theirs.reset()
        seed = list(theirs.np_random_seed)
        assert max(seed) >= 2**63
    for envs in (ours, theirs):
        envs.reset(seed=3)
    assert data_equivalence(ours.reset(seed=seed), theirs.reset(seed=seed))
    assert ours.np_random_seed == theirs.np_random_seed
    theirs.close()


@pytest.mark.parametrize("vector_env", [SyncVectorEnv, gymnasium.vector.SyncVectorEnv])
def test_without_autoreset_an_env_that_ended_is_not_stepped(vector_env):
    envs = vector_env(
        [partial(CountingEnv, length) for length in (1, 3)], autoreset_mode=AutoresetMode.DISABLED
    )
    for _ in range(2):
        envs.reset(seed=0)
        assert envs.step([1, 1])[2].tolist() == [True, False]
        with pytest.raises(AssertionError):
            envs.step([1, 1])
    envs.reset(options={"reset_mask": np.array([True, False])})
    assert envs.step([1, 1])[2].tolist() == [True, False]
    envs.close()


def test_actions_reach_envs_as_gymnasium_hands_them_on(face):
    class Keeping(gymnasium.Env):
        observation_space = spaces.Box(-10, 10, (), np.float64)
        action_space = spaces.Box(-1, 1, (), np.float32)

        def reset(self, *, seed=None, options=None):
            return np.float64(0), {}

        def step(self, action):
            return np.float64(action), 0.0, False, False, {}

    envs = face([Keeping] * 2)
    envs.reset()
    assert envs.step(np.array([0.1, 0.2]))[0].tolist() == [0.1, 0.2]  # float64, not rounded to the space's
    assert envs.step(np.array([0.1, 0.2], np.float32))[0].tolist() == [np.float32(0.1), np.float32(0.2)]


class Words(gymnasium.Env):
    """Speaks text, in observation and action."""

    observation_space = spaces.Dict({"said": spaces.Text(20), "count": spaces.Discrete(100)})
    action_space = spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        self._count = 0
        return {"said": "hello", "count": 0}, {}

    def step(self, action):
        self._count += 1
        return {"said": action, "count": self._count}, 0.0, self._count == 3, False, {}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_values_without_fixed_shape(face, mode):
    envs = face([Words] * 3, autoreset_mode=mode)
    obs, _ = envs.reset()
    assert obs["said"] == ("hello",) * 3
    for count in (1, 2, 3):
        words = tuple(f"{i} {count}" for i in range(3))
        obs, _, terminated, _, info = envs.step(words)
        last = count == 3 and mode is AutoresetMode.SAME_STEP
        assert obs["said"] == (("hello",) * 3 if last else words)
        assert obs["count"].tolist() == [0 if last else count] * 3
    assert terminated.all()
    if mode is AutoresetMode.SAME_STEP:
        assert [final["said"] for final in info["final_obs"]] == list(words)


def test_the_jax_face_refuses_what_it_can_not_hold(face):
    with pytest.raises(TypeError, match="action: its space has no fixed shape"):
        jaxvec.reset(face([Words] * 2).pool)
    with pytest.raises(TypeError, match="action: the pool stores int64, but jax_enable_x64 is off"):
        jaxvec.reset(face([CountingEnv] * 2).pool)


def test_under_x64_a_program_steps_gymnasiums_vector_env(face):
    with jax.enable_x64(True):
        envs = face([partial(CountingEnv, 3)] * 2)
        handle, _ = jaxvec.reset(envs.pool, seed=0)
        _, timestep = jax.jit(jaxvec.step)(handle, np.array([4, 5]))
        assert timestep.reward.dtype == np.float64
        assert timestep.obs[:, 3].tolist() == [4, 5]


# --- What Gymnasium's class gets wrong ---------------------------------------------------------


class Slow(GatedEnv):
    """Has a method that waits for the same file."""

    def slow(self):
        while not self._gate.exists():
            threading.Event().wait(0.001)
        return self.steps


@pytest.fixture
def gated(tmp_path):
    envs = AsyncVectorEnv([partial(Slow, tmp_path / "gate")] * 2)
    envs.reset()
    yield envs, tmp_path / "gate"
    envs.close(terminate=True)


def test_after_a_timeout_no_row_is_stale(gated):
    envs, gate = gated
    envs.step_async([7, 1])
    with pytest.raises(multiprocessing.TimeoutError, match="`step_wait` has timed out after 0.01 second"):
        envs.step_wait(timeout=0.01)
    with pytest.raises(AlreadyPendingCallError, match="while waiting for a pending call to `step`"):
        envs.step_async([2, 2])
    gate.touch()
    assert envs.step_wait(timeout=200)[0][:, 3].tolist() == [7, 1]
    assert envs.step([2, 3])[0][:, 3].tolist() == [2, 3]


def test_a_call_is_waited_for_in_parts(gated):
    envs, gate = gated
    envs.call_async("slow")
    with pytest.raises(multiprocessing.TimeoutError, match="`call_wait` has timed out"):
        envs.call_wait(timeout=0.01)
    with pytest.raises(AlreadyPendingCallError, match="pending call to `call`"):
        envs.step_async([1, 1])
    gate.touch()
    assert envs.call_wait(timeout=200) == (0, 0)
    with pytest.raises(NoAsyncCallError, match="`call_wait` without any prior call"):
        envs.call_wait()


def test_a_final_info_survives_an_env_that_reuses_its_memory(face):
    class Reusing(CountingEnv):
        def __init__(self):
            super().__init__(2)
            self._memory = np.zeros(2, int)
            self._info = {"last": self._memory, "nested": {"last": self._memory}}

        def reset(self, **kwargs):
            self._memory[:] = -1
            return super().reset(**kwargs)[0], self._info

        def step(self, action):
            self._memory[:] = action
            return *super().step(action)[:4], self._info

    envs = face([Reusing] * 2, autoreset_mode="SameStep")
    envs.reset()
    envs.step([0, 0])
    info = envs.step([5, 6])[4]
    for final in (info["final_info"], info["final_info"]["nested"]):
        assert final["last"].tolist() == [[5, 5], [6, 6]]
    assert info["last"].tolist() == [[-1, -1]] * 2


def test_final_observations_survive_later_steps(face):
    # `copy=False` concerns the returned observations only.
    envs = face([partial(CountingEnv, 1)] * 2, autoreset_mode="SameStep")
    envs.reset()
    finals = [obs for actions in ([5, 6], [7, 8]) for obs in envs.step(actions)[4]["final_obs"]]
    assert [final[3] for final in finals] == [5, 6, 7, 8]
    assert all(final.flags.writeable for final in finals)


@pytest.mark.parametrize("reward", [Fraction(1, 4), Decimal("0.25"), 2**70])
def test_a_reward_is_any_object_with_float(face, reward):
    class Exact(CountingEnv):
        def step(self, action):
            obs, _, *others = super().step(action)
            return obs, reward, *others

    envs = face([Exact] * 2)
    envs.reset()
    assert envs.step([0, 0])[1].tolist() == [float(reward)] * 2


def test_a_number_keeps_its_fraction_whoever_comes_first():
    batched = batch([{"x": 1, "big": 2}, {"x": 0.5, "big": 2**70}, {}])
    assert batched["x"].tolist() == [1.0, 0.5, 0.0]
    assert batched["big"].tolist() == [2, 2**70, None]
    assert batch([{"a": np.zeros(2)}, {"a": np.zeros(3)}])["a"].dtype == object


_NUMBERS = st.sampled_from([st.integers(-9, 9), st.booleans(), st.floats(-1, 1), st.text(max_size=3)])


@given(st.data())
def test_infos_of_equal_types_are_batched_as_gymnasium_does(data):
    kinds = {key: data.draw(_NUMBERS) for key in "abc"}
    info = st.fixed_dictionaries({}, optional=kinds | {"d": st.fixed_dictionaries({}, optional=kinds)})
    infos = data.draw(st.lists(info, min_size=1, max_size=4))
    theirs = gymnasium.vector.VectorEnv()
    theirs.num_envs = len(infos)
    expected = {}
    for env_id, one in enumerate(infos):
        expected = theirs._add_info(expected, one, env_id)
    assert data_equivalence(batch(infos), expected)


# --- Errors ------------------------------------------------------------------------------------


def test_an_unknown_option_is_named(face):
    with pytest.raises(TypeError, match=r"unknown options \['num_worker'\]; .* those of jaxvec.make"):
        face([CountingEnv] * 2, num_worker=1)


@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_an_envs_own_exception_is_raised(face, error):
    class Failing(CountingEnv):
        def step(self, action):
            raise error("my own")

    envs = face([Failing] * 2)
    envs.reset()
    with (
        pytest.warns(UserWarning, match=r"Worker-[01]|my own|Raising")
        if isinstance(envs, AsyncVectorEnv)
        else nullcontext()
    ):
        with pytest.raises(error, match="my own") as raised:
            envs.step([0, 0])
    assert isinstance(raised.value.__cause__, jaxvec.EnvError)


def test_a_timeout_error_of_an_envs_own_ends_the_call():
    class Late(CountingEnv):
        def late(self):
            raise TimeoutError("my own")

    with closing(AsyncVectorEnv([Late] * 2)) as envs:
        envs.reset()
        with (
            pytest.warns(UserWarning, match=r"Worker-[01]|my own|Raising"),
            pytest.raises(TimeoutError, match="my own"),
        ):
            envs.call("late")
        assert envs.step([1, 2])[0][:, 3].tolist() == [1, 2]


def test_what_is_no_observation_is_never_overwritten(face):
    envs = face([partial(CountingEnv, 2)] * 2)
    envs.reset()
    _, reward, terminated, _, _ = envs.step([0, 0])
    envs.step([0, 0])
    assert (reward.tolist(), terminated.tolist()) == ([1, 1], [False, False])


def test_a_fault_is_gone_on_from_if_asked(face):
    envs = face([RaisingEnv] * 2, on_fault="restart", autoreset_mode="SameStep")
    envs.reset()
    _, reward, _, truncated, info = envs.step([7, 1])
    assert (reward.tolist(), truncated.tolist()) == ([0, 1], [True, False])
    assert info["fault"].tolist() == info["_fault"].tolist() == [True, False]
    _, _, _, _, info = envs.step([1, 1])
    assert "fault" not in info


def test_episodes_without_autoreset_say_who_idles(face):
    envs = face([partial(CountingEnv, length) for length in (1, 3)], autoreset_mode="EPISODIC")
    assert envs.autoreset_mode is envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    _, info = envs.reset(seed=0)
    said, rewards = [(info["idle"].tolist(), info["_idle"].tolist())], []
    for _ in range(3):
        _, reward, terminated, _, info = envs.step(np.array([1, 1]))
        said.append((info["idle"].tolist(), info["_idle"].tolist()))
        rewards.append(reward.tolist())
    assert said == [([idle, False], [True, True]) for idle in (False, False, True, True)]
    assert rewards == [[1, 1], [0, 2], [0, 3]]
    assert terminated.all()
    _, info = envs.reset(options={"reset_mask": np.array([True, False])})
    assert not info["idle"][0]


def test_a_closed_vector_env_says_so(face):
    envs = face([CountingEnv])
    envs.close()
    for use in (
        envs.reset,
        lambda: envs.step([0]),
        lambda: envs.call("steps"),
        lambda: envs.set_attr("a", 1),
    ):
        with pytest.raises(ClosedEnvironmentError, match="after a call to `close"):
            use()


def test_a_custom_worker_is_refused():
    with pytest.raises(ValueError, match="must accept 8 arguments"):
        AsyncVectorEnv([CountingEnv], worker=lambda index: None)
    with pytest.raises(ValueError, match="does not have; change what the env does in a wrapper"):
        AsyncVectorEnv([CountingEnv], worker=lambda *args: None)


@pytest.mark.parametrize("vectorization_mode", [None, "vector_entry_point"])
def test_make_vec_makes_a_pool_of_an_existing_id(monkeypatch, vectorization_mode):
    spec = gymnasium.spec("CartPole-v1")
    monkeypatch.setattr(spec, "vector_entry_point", vector_entry_point(spec, num_workers=1))
    limit = {"max_episode_steps": 3} if vectorization_mode else {}
    envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode, **limit)
    assert type(envs) is AsyncVectorEnv
    assert envs.pool.num_workers == 1
    assert envs.spec.id == "CartPole-v1"
    single = gymnasium.make("CartPole-v1", **limit)
    assert [str(env) for env in envs.call("__str__")] == [str(single)] * 2
    assert envs.call("spec")[0].max_episode_steps == (3 if limit else 500)
    np.testing.assert_array_equal(envs.reset(seed=3)[0][0], single.reset(seed=3)[0])
    envs.close()


def test_make_vec_makes_pools_of_all_ids_where_the_class_is_swapped(monkeypatch):
    monkeypatch.setattr(gymnasium.vector, "AsyncVectorEnv", AsyncVectorEnv)
    options = {"num_workers": 1, "autoreset_mode": "SAME_STEP"}
    envs = gymnasium.make_vec("Pendulum-v1", 2, "async", vector_kwargs=options)
    assert type(envs) is AsyncVectorEnv
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    envs.close()


@pytest.mark.parametrize("cls", [AsyncVectorEnv, SyncVectorEnv])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, "SAME_STEP", "SameStep"])
def test_an_autoreset_mode_has_three_names(cls, mode):
    envs = cls([CountingEnv], autoreset_mode=mode)
    assert envs.autoreset_mode is envs.pool.autoreset_mode is AutoresetMode.SAME_STEP
    envs.close()
    with pytest.raises(
        ValueError, match="autoreset_mode must be one of SAME_STEP, NEXT_STEP, DISABLED, EPISODIC, not 'Same'"
    ):
        cls([CountingEnv], autoreset_mode="Same")


def test_make_vec_by_entry_point():
    gymnasium.register(
        "jaxvec-test/Counting-v0",
        entry_point=CountingEnv,
        vector_entry_point=vector_entry_point(CountingEnv, num_workers=1),
        max_episode_steps=2,
    )
    try:
        envs = gymnasium.make_vec("jaxvec-test/Counting-v0", 3, "vector_entry_point", truncate=True)
        assert isinstance(envs, AsyncVectorEnv)
        assert envs.spec.kwargs["num_envs"] == 3
        envs.reset()
        envs.step([0, 0, 0])
        assert envs.step([0, 0, 0])[3].all()
        envs.close()
    finally:
        del gymnasium.registry["jaxvec-test/Counting-v0"]


def test_spaces_are_gymnasiums_if_bounds_differ(face):
    def bounded(limit):
        env = CountingEnv()
        env.observation_space = spaces.Box(-1, limit, (4,), np.int32)
        return env

    env_fns = [partial(bounded, limit) for limit in (5, 9, 3)]
    with pytest.raises(RuntimeError, match="observation spaces are not equivalent"):
        face(env_fns)
    original = gymnasium.vector.SyncVectorEnv(env_fns, observation_mode="different")
    envs = face(env_fns, observation_mode="different")
    assert envs.single_observation_space == original.single_observation_space
    assert envs.observation_space == original.observation_space


@pytest.mark.parametrize("vector_env", [AsyncVectorEnv, SyncVectorEnv])
def test_a_masked_reset_leaves_its_mask_to_vector_wrappers(vector_env):
    env_fns = [partial(CountingEnv, episode_length=steps) for steps in (2, 3)]
    envs = RecordEpisodeStatistics(vector_env(env_fns, autoreset_mode=AutoresetMode.DISABLED))
    envs.reset(seed=0)
    envs.step(np.zeros(2, int))
    _, _, terminated, _, _ = envs.step(np.zeros(2, int))
    envs.reset(options={"reset_mask": terminated})
    *_, infos = envs.step(np.zeros(2, int))
    assert infos["episode"]["l"].tolist() == [0, 3]  # 1 over classes that remove the mask
    envs.close()
