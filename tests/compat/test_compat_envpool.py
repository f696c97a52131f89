"""EnvPool's face: against the real EnvPool where it is installed, and by what toy envs count."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import chain

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support.disasters import closing_all

import jaxvec
from jaxvec import testing
from jaxvec.compat import envpool

ENV_TYPES = ["gymnasium", "gym", "dm"]

# What Gymnasium says of the real EnvPool's spaces.
from_the_real_one = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


@pytest.fixture
def real():
    """The real EnvPool."""
    return pytest.importorskip("envpool", reason="the real EnvPool is not installed")


@pytest.fixture(scope="module")
def _needs_ale():
    pytest.importorskip("ale_py", reason='Atari needs the extra: pip install "jaxvec[atari]"')
    pytest.importorskip("cv2", reason='Atari needs the extra: pip install "jaxvec[atari]"')


@pytest.fixture
def make():
    """Yields `make` of serial pools, closed after the test."""

    def make(task_id, env_type="gymnasium", **kwargs):
        return envpool.make(task_id, env_type, **{"backend": "serial", **kwargs})

    with closing_all(make) as make_and_remember:
        yield make_and_remember


def counting(episode_length=None, **kwargs):
    return lambda: testing.CountingEnv(episode_length, **kwargs)


class NoOffsets(testing.NestedEnv):
    """Has spaces of kinds that old Gym knows."""

    def __init__(self):
        super().__init__()
        self.action_space = gymnasium.spaces.Dict(
            {**self.action_space, "keys": gymnasium.spaces.MultiDiscrete([3, 4])}
        )
        self.observation_space = gymnasium.spaces.Box(0, 1)


def flatten(value, path=""):
    """Yields path and array of each leaf: of tuples, dicts, and namedtuples by the names of their fields."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from flatten(child, f"{path}/{key}")
    elif isinstance(value, tuple):
        for index, child in enumerate(value):
            yield from flatten(child, f"{path}/{index}")
    else:
        yield path, np.asarray(value)


def require_alike(ours, theirs):
    """Asserts that ours is the real one's, but for the observations' values: the envs' numbers differ."""
    ours, theirs = dict(flatten(ours)), dict(flatten(theirs))
    theirs = {path: leaf for path, leaf in theirs.items() if "players" not in path}
    assert set(theirs) <= set(ours)
    first = next(iter(ours))
    for path, leaf in theirs.items():
        assert (ours[path].dtype, ours[path].shape) == (leaf.dtype, leaf.shape), path
        if path not in (first, "/observation/obs"):
            np.testing.assert_array_equal(ours[path], leaf, path)


# --- against the real EnvPool ------------------------------------------------------------------------------


@from_the_real_one
@pytest.mark.parametrize("env_type", ["gymnasium", "dm"])
def test_results_are_those_of_the_real_one(real, env_type):
    kwargs = {"num_envs": 3, "seed": 1, "max_episode_steps": 6}
    theirs = real.make("CartPole-v1", env_type, **kwargs)
    ours = envpool.make("CartPole-v1", env_type, **kwargs)
    some = np.array([2, 0])
    with ours:
        assert (len(ours), ours.is_async) == (len(theirs), theirs.is_async)
        np.testing.assert_array_equal(ours.all_env_ids, theirs.all_env_ids)
        require_alike(ours.reset(), theirs.reset())
        for _ in range(9):
            require_alike(ours.step(np.zeros(3, int)), theirs.step(np.zeros(3, int)))
        require_alike(ours.step(np.zeros(2, int), some), theirs.step(np.zeros(2, int), some))
        require_alike(ours.reset(np.array([1])), theirs.reset(np.array([1])))
        action = {"action": np.zeros(2, int), "env_id": some}
        for pool in (ours, theirs):
            pool.send(action)
        require_alike(ours.recv(), theirs.recv())
        for pool in (ours, theirs):
            pool.send(np.zeros(1, int), np.array([1]))
            pool.send(np.zeros(2, int), some)
        result = dict(flatten(ours.recv()))
        ids = next(leaf for path, leaf in result.items() if path.endswith("env_id"))
        np.testing.assert_array_equal(ids, [1, 2, 0])


@from_the_real_one
@pytest.mark.parametrize("env_type", ["gymnasium", "dm"])
def test_compiled_results_are_those_of_the_real_one(real, env_type):
    def rollout(pool):
        handle, recv, send, step = pool.xla()
        pool.reset()
        zeros = jnp.zeros(3, jnp.int32)

        def body(handle, _):
            return step(handle, zeros)

        handle, steps = jax.jit(lambda handle: jax.lax.scan(body, handle, None, 9))(handle)
        handle = jax.jit(send)(handle, zeros)
        return steps, recv(handle)[1]

    kwargs = {"num_envs": 3, "seed": 1, "max_episode_steps": 6}
    with envpool.make("CartPole-v1", env_type, **kwargs) as ours:
        for mine, other in zip(
            rollout(ours), rollout(real.make("CartPole-v1", env_type, **kwargs)), strict=True
        ):
            require_alike(mine, other)


@from_the_real_one
def test_spec_is_that_of_the_real_one(real):
    theirs = real.make_spec("CartPole-v1", num_envs=4, seed=3)
    ours = envpool.make_spec("CartPole-v1", num_envs=4, seed=3)
    known = {"base_path", "max_num_players", "env_seed"}
    expected = {key: value for key, value in theirs.config._asdict().items() if key not in known}
    assert ours.config._asdict() == expected
    assert ours.reward_threshold == theirs.reward_threshold == 475
    assert ours.action_space == theirs.action_space
    assert ours.observation_space.shape == theirs.observation_space.shape
    assert ours.action_spec() == theirs.action_spec()
    assert ours.observation_spec().obs.shape == theirs.observation_spec().obs.shape
    assert ours.observation_spec().env_id.dtype == theirs.observation_spec().env_id.dtype


ATARI_OPTIONS = [
    {},
    {"episodic_life": True, "reward_clip": True},
    {"gray_scale": False, "stack_num": 2, "img_width": 60},
    {"max_episode_steps": 20, "full_action_space": True},
    {"use_fire_reset": False, "frame_skip": 2},
]


@pytest.mark.usefixtures("_needs_ale")
@pytest.mark.parametrize("options", ATARI_OPTIONS)
def test_atari_is_bit_equal_to_the_real_one(real, make, options):
    """With one way to draw the number of no-ops; but for the frame in which a game ended."""
    kwargs = {"num_envs": 2, "seed": 1, "noop_max": 1, **options}
    theirs, ours = real.make("Breakout-v5", "gymnasium", **kwargs), make("Breakout-v5", **kwargs)
    assert ours.action_space == theirs.action_space
    assert ours.observation_space == theirs.observation_space
    assert ours.config == {key: theirs.config[key] for key in ours.config}
    rng = np.random.default_rng(0)
    results = [ours.reset(), theirs.reset()]
    lives, ended = set(), 0
    for _ in range(400):
        (obs, *mine), (their_obs, *other) = results
        over = mine[-1]["terminated"].astype(bool)
        np.testing.assert_array_equal(obs[~over], their_obs[~over])
        mine, other = dict(flatten(tuple(mine))), dict(flatten(tuple(other)))
        for path, leaf in other.items():
            if "players" not in path:
                assert mine[path].dtype == leaf.dtype, path
                np.testing.assert_array_equal(mine[path], leaf, path)
        action = rng.integers(ours.action_space.n, size=2)
        results = [ours.step(action), theirs.step(action)]
        lives |= set(results[0][-1]["lives"].tolist())
        ended += int((results[0][2] | results[0][3]).sum())
    assert ended
    assert len(lives) > 1 or "max_episode_steps" in options


# --- results -----------------------------------------------------------------------------------------------


def test_rows_are_those_of_gymnasium_with_next_step_autoreset():
    num_envs, seed = 3, 5
    envs = SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1") for _ in range(num_envs)],
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    with envpool.make("CartPole-v1", num_envs=num_envs, seed=seed) as env:
        np.testing.assert_array_equal(env.reset()[0], envs.reset(seed=seed)[0])
        for _ in range(60):
            action = envs.action_space.sample()
            for ours, theirs in zip(env.step(action)[:4], envs.step(action)[:4], strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_old_gym_returns_four_values(make):
    env = make(counting(3, truncate=True), "gym", num_envs=2)
    assert env.reset().tolist() == [[1, 0, 0, -1]] * 2
    for _ in range(2):
        env.step(np.zeros(2, int))
    obs, reward, done, info = env.step(np.array([7, 8]))
    assert obs.tolist() == [[1, 3, 3, 7], [1, 3, 3, 8]]
    assert reward.tolist() == [3, 3]
    assert done.tolist() == [True, True]
    assert {key: value.tolist() for key, value in info.items()} == {
        "env_id": [0, 1],
        "elapsed_step": [3, 3],
        "reward": [3, 3],
        "terminated": [0, 0],
        "TimeLimit.truncated": [True, True],
    }
    _, reward, done, info = env.step(np.zeros(2, int))
    assert (reward.tolist(), done.tolist(), info["elapsed_step"].tolist()) == ([0, 0], [False] * 2, [0, 0])
    env.async_reset()
    assert env.recv(reset=True)[1]["elapsed_step"].tolist() == [0, 0]
    assert make(counting(), "gym", gym_reset_return_info=True).reset()[1]["env_id"] == [0]


def test_dm_returns_time_steps(make):
    env = make(counting(2), "dm", num_envs=1, info={"steps": int})
    steps = [env.reset(), *(env.step(np.zeros(1, int)) for _ in range(3))]
    assert [step.step_type.item() for step in steps] == [0, 1, 2, 0]
    assert [step.discount.item() for step in steps] == [1, 1, 0, 1]
    assert [step.reward.item() for step in steps] == [0, 1, 2, 0]
    assert steps[1].observation._fields == ("env_id", "steps", "obs")
    assert [step.observation.steps.item() for step in steps] == [0, 1, 2, 0]
    assert all(step._fields == ("step_type", "reward", "discount", "observation") for step in steps)


def test_dm_specs_are_of_nested_spaces(make):
    specs = pytest.importorskip("dm_env", reason="dm_env is not installed").specs
    env = make(testing.NestedEnv, "dm")
    action = env.action_spec()
    assert action["turn"] == specs.BoundedArray((), np.int32, -2, 2, "turn")
    assert action["arm"][1] == specs.BoundedArray((4,), np.int8, 0, 1, "arm_1")
    assert action["keys"].maximum.tolist() == [3, 2]
    obs = env.observation_spec().obs
    assert obs.image == specs.BoundedArray((4, 4, 3), np.uint8, 0, 255, "image")
    assert obs.clock[0] == specs.DiscreteArray(1000, np.int32, "clock_0")
    timestep = env.reset()
    action = env.vector_env.action_space.sample()
    assert env.step(action).observation.obs.last.turn == action["turn"]
    assert timestep.observation.obs.clock[0].shape == (1,)


def test_declared_info_passes_through(make):
    env = make(counting(), num_envs=2, info={"steps": int})
    _, info = env.reset()
    assert (info["steps"].tolist(), info["_steps"].tolist()) == ([0, 0], [False, False])
    info = env.step(np.zeros(2, int))[-1]
    assert (info["steps"].tolist(), info["_steps"].tolist()) == ([1, 1], [True, True])


def test_info_stays_as_it_is_when_rewards_and_flags_are_changed(make):
    env = make(counting(), num_envs=2)
    env.reset()
    _, reward, terminated, truncated, info = env.step(np.zeros(2, int))
    reward *= 10
    terminated[:] = truncated[:] = True
    assert (info["reward"].tolist(), info["terminated"].tolist()) == ([1, 1], [0, 0])
    assert info["TimeLimit.truncated"].tolist() == [False, False]


def test_what_cleanrl_sets_can_be_set(make):
    env = make(counting(), "gym", num_envs=2)
    env.num_envs = 2
    env.single_action_space = env.action_space
    env.single_observation_space = env.observation_space
    env.is_vector_env = True
    assert env.single_observation_space.shape == (4,)


def test_old_gym_gets_old_spaces(make):
    env = make(counting(), "gym")
    spaces = pytest.importorskip("gym", reason="the old gym is not installed").spaces
    assert isinstance(env.action_space, spaces.Discrete)
    assert env.action_space.n == 1000
    assert isinstance(env.spec.gymnasium_action_space, gymnasium.spaces.Discrete)
    nested = make(NoOffsets, "gym").action_space
    assert isinstance(nested, spaces.Dict)
    assert isinstance(nested["keys"], spaces.MultiDiscrete)
    assert isinstance(nested["arm"][1], spaces.MultiBinary)
    assert nested["turn"] == spaces.Discrete(5, start=-2)
    with pytest.raises(TypeError, match="gym has no space like MultiDiscrete"):
        make(testing.NestedEnv, "gym")


def test_without_old_gym_spaces_are_gymnasiums(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "gym", None)
    assert isinstance(make(counting(), "gym").action_space, gymnasium.spaces.Discrete)


def test_gymnasium_face_takes_gymnasiums_vector_wrappers(make):
    env = make(counting(3), num_envs=2)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
    wrapped.reset(seed=3)
    for _ in range(3):
        *_, info = wrapped.step(np.zeros(2, int))
    assert info["episode"]["r"].tolist() == [6, 6]
    assert info["episode"]["l"].tolist() == [3, 3]


# --- the verbs ---------------------------------------------------------------------------------------------


def test_each_env_is_seeded_once(make):
    seen = {"seed": int}
    env = make(counting(), num_envs=3, seed=10, info=seen)
    assert env.reset(np.array([1]))[1]["seed"].tolist() == [11]
    assert env.reset()[1]["seed"].tolist() == [10, -1, 12]
    assert env.reset()[1]["seed"].tolist() == [-1] * 3
    assert env.reset(seed=[4, 5, 6])[1]["seed"].tolist() == [4, 5, 6]
    mask = np.array([True, False, True])
    assert env.reset(seed=20, options={"reset_mask": mask})[1]["seed"].tolist() == [20, 22]
    assert make(counting(), num_envs=2, seed=[7, 3], info=seen).reset()[1]["seed"].tolist() == [7, 3]
    env = make(counting(), num_envs=2, seed=10, info=seen)
    for seeds in ([10, 11], [-1, -1]):
        env.async_reset()
        assert env.recv(reset=True)[1]["seed"].tolist() == seeds
    assert make(counting(), info=seen).reset()[1]["seed"].tolist() == [42]


def test_some_envs_are_stepped(make):
    env = make(counting(), num_envs=4)
    env.reset()
    obs, *_, info = env.step(np.array([5, 6]), np.array([3, 1]))
    assert (info["env_id"].tolist(), obs[:, 3].tolist()) == ([3, 1], [5, 6])
    env.send(np.array([8]), 2)
    obs, *_, info = env.recv()
    assert (info["env_id"].tolist(), obs.tolist()) == ([2], [[1, 1, 1, 8]])
    env.async_reset()
    assert env.recv(reset=True)[1]["env_id"].tolist() == [0, 1, 2, 3]
    assert env.step(np.arange(4))[0][:, 0].tolist() == [2] * 4


@pytest.mark.parametrize("verb", ["reset", "async_reset"])
def test_first_ready_batches(verb):
    with envpool.make(counting(), num_envs=6, batch_size=2, num_threads=3, recv_order="sent") as env:
        assert env.is_async
        assert env.vector_env.num_workers == 3
        if verb == "reset":
            first = env.reset()[1]["env_id"]
        else:
            env.async_reset()
            first = env.recv(reset=True)[1]["env_id"]
        seen = [first.tolist()]
        env_id = first
        for number in range(9):
            obs, *_, info = env.step(np.full(2, number), env_id)
            env_id = info["env_id"]
            seen.append(env_id.tolist())
        assert all(sorted(chain(*seen[i : i + 3])) == [*range(6)] for i in range(8))
        assert obs[:, 3].tolist() == [6, 6]  # two batches are under way


def test_frames(make):
    env = make("CartPole-v1", num_envs=3, render_mode="rgb_array")
    pytest.importorskip("pygame", reason="CartPole's frames need pygame")
    env.reset()
    assert env.render().shape == (1, 400, 600, 3)
    assert env.render(np.array([2, 0])).shape == (2, 400, 600, 3)
    silent = make("CartPole-v1")
    silent.reset()
    with pytest.raises(RuntimeError, match="render_mode"), pytest.warns(match="render"):
        silent.render()


# --- in compiled programs ----------------------------------------------------------------------------------


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("backend", ["process", "serial"])
@pytest.mark.parametrize("env_type", ENV_TYPES)
def test_a_handle_from_before_the_reset_steps(env_type, backend):
    with envpool.make(counting(4), env_type, num_envs=3, backend=backend) as env:
        handle, _, _, step = env.xla()
        env.reset()
        env.step(np.zeros(3, int))  # on the host

        @jax.jit
        def rollout(handle):
            return jax.lax.scan(lambda handle, _: step(handle, jnp.ones(3, int)), handle, None, 10)

        handle, _ = rollout(handle)
        env.step(np.zeros(3, int))
        _, result = step(handle, jnp.full(3, 9))
        obs = next(leaf for path, leaf in flatten(result) if path in ("/0", "/observation/obs"))
        # Of 13 steps one in five is a reset, which takes no step.
        assert obs.tolist() == [[3, 11, 3, 9]] * 3


def test_lanes_step_envs_of_their_own():
    with envpool.make(counting(), num_envs=6) as env:
        handle, _, _, step = env.xla()
        env.reset()
        lanes = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), handle)
        lanes, (obs, *_, info) = jax.jit(jax.vmap(step))(lanes, jnp.arange(6).reshape(2, 3))
        assert info["env_id"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert obs[..., 3].tolist() == [[0, 1, 2], [3, 4, 5]]
        _, (obs, *_) = step(jax.tree.map(lambda leaf: leaf[1], lanes), jnp.zeros(3, int))
        assert obs[:, 1].tolist() == [2] * 3


def test_a_handle_steps_once():
    with envpool.make(counting(), num_envs=2) as env:
        handle, _, send, step = env.xla()
        env.reset()
        step(handle, jnp.zeros(2, int))
        with pytest.raises(jaxvec.StaleHandleError):
            step(handle, jnp.zeros(2, int))
        with pytest.raises(jaxvec.StaleHandleError):
            send(handle, jnp.zeros(2, int))
        fresh = env.xla()[0]
        assert step(fresh, jnp.zeros(2, int))[1][0][:, 1].tolist() == [2, 2]


@pytest.mark.jax_version
def test_handle_can_be_copied_donated_stacked_and_saved(tmp_path):
    with envpool.make(counting(), num_envs=2) as env:
        handle, recv, send, step = env.xla()
        env.reset()
        assert isinstance(handle, jax.Array)
        assert (handle.shape, handle.dtype) == ((2, 3), np.uint32)
        taken = []

        def check(handle, *results):
            taken.append(1)
            assert isinstance(handle, jax.Array)
            assert [result[0][:, 1].tolist() for result in results] == [[len(taken)] * 2 for _ in results]
            return handle

        action = jnp.zeros(2, int)
        handle = check(*step(jnp.array(handle), action))
        handle = check(*jax.jit(step, donate_argnums=0)(handle, action))
        handle = check(*step(jnp.stack([jnp.zeros_like(handle), handle])[1], action))
        np.save(tmp_path / "handle.npy", handle)
        handle = check(*step(np.load(tmp_path / "handle.npy"), action))
        handle = check(*recv(send(np.asarray(handle), action)))
        handle, _ = step(np.asarray(handle), action[:1], 0)
        for wrong in (handle[0], handle.astype(int), None, jaxvec.reset(env.vector_env)[0]):
            with pytest.raises(TypeError, match=r"step takes the handle .* uint32 of shape \(2, 3\), got"):
                step(wrong, action)


def test_a_program_steps_some_envs():
    with envpool.make(counting(), num_envs=4) as env:
        handle, recv, send, step = env.xla()
        env.reset()

        @jax.jit
        def program(handle, env_id):
            handle, first = step(handle, jnp.array([5, 6]), env_id)
            handle, second = step(handle, {"action": jnp.array([7]), "env_id": env_id[1:]})
            handle = send(handle, jnp.arange(4), jnp.array([3, 2, 1, 0]))
            handle, third = recv(handle)
            return handle, first, second, third

        handle, first, second, third = program(handle, jnp.array([3, 1]))
        assert first[0].tolist() == [[1, 1, 1, 5], [1, 1, 1, 6]]
        assert first[-1]["env_id"].tolist() == [3, 1]
        assert second[0].tolist() == [[1, 2, 2, 7]]
        assert third[0][:, 1].tolist() == [1, 3, 1, 2]
        assert third[0][:, 3].tolist() == [3, 2, 1, 0]
        with pytest.raises(jaxvec.EnvIdError, match="env_id 4 is out of range"):
            step(handle, jnp.zeros(2, int), jnp.array([4, 0]))
        with pytest.raises(jaxvec.EnvIdError, match="integers"):
            step(handle, jnp.zeros(2, int), jnp.zeros(2))


# --- tasks and errors --------------------------------------------------------------------------------------


def test_tasks():
    known = envpool.list_all_envs()
    assert "CartPole-v1" in known
    assert ("Breakout-v5" in known) == (find_spec("ale_py") is not None)
    spec = envpool.make_spec(gymnasium.spec("CartPole-v1"), num_envs=7, batch_size=3, max_episode_steps=9)
    assert (spec.config.num_envs, spec.config.batch_size, spec.config.max_episode_steps) == (7, 3, 9)
    assert envpool.make_spec(counting()).reward_threshold is None
    assert "num_envs=2" in repr(envpool.make_gymnasium(counting(), num_envs=2, backend="serial"))
    assert len(envpool.make_dm(counting(), num_envs=2, backend="serial")) == 2


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda env: env.step(np.zeros(3)), jaxvec.ActionError, "action: expected int32"),
        (lambda env: env.step(np.zeros(2, int)), jaxvec.ActionError, r"of shape \(3,\)"),
        (lambda env: env.step(np.zeros(2, int), np.array([0])), jaxvec.ActionError, r"of shape \(1,\)"),
        (
            lambda env: env.step(np.zeros(1, int), np.array([3])),
            jaxvec.EnvIdError,
            r"env_id: 3 is out of range for 3 envs \(0 to 2\)",
        ),
        (
            lambda env: env.step(np.zeros(2, int), np.array([1, 1])),
            jaxvec.EnvIdError,
            "env_id: env 1 is named twice",
        ),
        (lambda env: env.step(np.zeros(1, int), np.array([0.5])), jaxvec.EnvIdError, "an integer or a list"),
        (lambda env: env.reset(np.array([5])), jaxvec.EnvIdError, "env_id: 5 is out of range"),
        (lambda env: env.reset(np.array([0]), options={"reset_mask": np.ones(3, bool)}), ValueError, "both"),
        (lambda env: env.reset(options={"level": 3}), ValueError, "level"),
        (lambda env: env.reset(options={"reset_mask": [0, 1, 2]}), ValueError, "mask must be bool"),
        (lambda env: env.recv(), jaxvec.PendingEnvError, "0 are pending"),
        (lambda env: env.render(9), jaxvec.EnvIdError, "env_id: 9 is out of range"),
    ],
)
def test_bad_calls(make, call, error, match):
    env = make(counting(), num_envs=3)
    env.reset()
    with pytest.raises(error, match=match):
        call(env)
    assert env.step(np.zeros(3, int))[0][:, 1].tolist() == [1] * 3  # nothing was stepped


def test_a_step_before_the_reset_is_an_error(make):
    with pytest.raises(jaxvec.ResetNeededError):
        make(counting()).step(np.zeros(1, int))


def test_partial_reset_of_an_asynchronous_pool_returns_as_recv(make):
    env = make(counting(), num_envs=4, batch_size=2)
    env.reset()
    env.recv()
    with pytest.raises(jaxvec.PendingEnvError, match="as recv does, but with the 1 of mask only 1"):
        env.reset(np.array([1]))
    obs, info = env.reset(np.array([3, 1]))
    assert sorted(info["env_id"].tolist()) == [1, 3]
    assert obs[:, 0].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        (("CartPole-v1", "torch"), {}, ValueError, "env_type"),
        (("NoSuchEnv-v0",), {}, gymnasium.error.Error, "NoSuchEnv"),
        (("CartPole-v1",), {"num_envs": 2, "batch_size": 3}, ValueError, "batch_size"),
        (("CartPole-v1",), {"autoreset_mode": "SAME_STEP"}, TypeError, "NEXT_STEP"),
        (("CartPole-v1",), {"seed": [1, 2]}, ValueError, "2 seeds for 1 envs"),
        (("CartPole-v1",), {"episodic_life": True}, jaxvec.EnvError, "episodic_life"),
    ],
)
def test_bad_arguments(args, kwargs, error, match):
    with pytest.raises(error, match=match):
        envpool.make(*args, **kwargs)


def test_without_ale_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(gymnasium.error.Error, match="Breakout") as caught:
        envpool.make("Breakout-v5")
    assert 'pip install "ale-py>=' in caught.value.__notes__[0]
    assert "Breakout-v5" not in envpool.list_all_envs()


# --- Atari -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_needs_ale")
def test_a_lost_life_ends_the_episode_but_not_the_game(make):
    env = make("Breakout-v5", "gym", num_envs=1, seed=0, episodic_life=True, reward_clip=True)
    env.reset()
    done = np.zeros(1, bool)
    steps = 0
    while not done:
        steps += 1
        assert steps < 200
        _, _, done, info = env.step(np.zeros(1, int))
    assert (info["lives"], info["terminated"], info["elapsed_step"]) == (4, 0, steps)
    _, _, done, info = env.step(np.zeros(1, int))
    assert (info["lives"], done, info["elapsed_step"]) == (4, False, steps)
    env.step(np.zeros(1, int))
    env.reset()
    info = env.step(np.zeros(1, int))[-1]
    assert (info["lives"], info["elapsed_step"]) == (5, 1)  # reset by hand it is a new game


@pytest.mark.usefixtures("_needs_ale")
def test_an_unknown_atari_option_is_an_error():
    with pytest.raises(TypeError, match=r"Breakout-v5 has no options \['stack'\]; use stack_num"):
        envpool.make("Breakout-v5", stack=3)
    with pytest.raises(ValueError, match="noop_max must be at least 1, not 0"):
        envpool.make("Breakout-v5", noop_max=0)
