"""Batched envs, of Gymnasium's `VectorEnv`: in this process, and several of them in workers."""

import re
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support import probe

import jaxvec
from jaxvec.ports import compare_pools
from jaxvec.testing import CountingEnv, NestedEnv


def counting(mode, lengths=(2, 3, 4)):
    return SyncVectorEnv([partial(CountingEnv, length) for length in lengths], autoreset_mode=mode)


def equal_steps(steps, envs, actions):
    """Compares `steps` of a program with those of a batched env, and yields the latter's infos."""
    for number, action in enumerate(actions):
        *expected, info = envs.step(action)
        step = jax.tree.map(lambda leaf, number=number: leaf[number], steps)
        got = step.obs, step.reward, step.terminated, step.truncated
        jax.tree.map(np.testing.assert_array_equal, got, tuple(expected))
        yield step, info


def rollout(envs, actions, seed=0):
    handle, first = jaxvec.reset(envs, seed=seed)
    _, steps = jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, actions)
    return first, steps


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_batched_env_is_stepped_like_its_envs_one_by_one(make, mode):
    actions = jnp.arange(30).reshape(10, 3)
    expected = rollout(
        make([partial(CountingEnv, length) for length in (2, 3, 4)], autoreset_mode=mode), actions
    )
    batched = rollout(make(counting(mode)), actions)
    jax.tree.map(np.testing.assert_array_equal, batched, expected)


class OfSuperSuit(gymnasium.vector.VectorEnv):
    """As SuperSuit's: it has the spaces of one env under other names."""

    num_envs = 2
    observation_space = action_space = spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, int), {}

    def step(self, actions):
        return actions, np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {}


class OfStableBaselines3:
    """A vector env of a class of its own."""

    num_envs, observation_space, action_space = 2, *[spaces.Discrete(5)] * 2
    reset, step = OfSuperSuit.reset, OfSuperSuit.step


@pytest.mark.parametrize("kind", [OfSuperSuit, OfStableBaselines3])
def test_vector_envs_of_other_libraries_name_the_adapter(backend, kind):
    text = f"{kind.__name__} is a vector env without single_observation_space, .*PettingZooEnv"
    for env, options in (
        (kind(), {}),
        (kind(), {"num_envs": 2}),
        (kind, {"num_envs": 2}),
        (lambda: kind(), {"num_envs": 2, "envs_per_instance": 2}),
    ):
        with pytest.raises((TypeError, jaxvec.EnvError), match=text):
            jaxvec.make(env, backend=backend, **options)


def test_several_in_workers(make):
    fn = partial(counting, AutoresetMode.SAME_STEP)
    actions = jnp.arange(120).reshape(10, 12)
    expected = rollout(make([partial(CountingEnv, length) for length in (2, 3, 4) * 4]), actions)
    for num_workers in (1, 2):
        batched = rollout(make(fn, 12, envs_per_instance=3, num_workers=num_workers), actions)
        jax.tree.map(np.testing.assert_array_equal, batched, expected)


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_all_batched_envs_are_received_in_the_order_sent(make, dispatch):
    fn = partial(counting, AutoresetMode.SAME_STEP, (None, None, None))
    envs = make(fn, 6, envs_per_instance=3, num_workers=2, recv_order="sent", dispatch=dispatch)
    envs.reset(seed=0)
    env_id = np.array([4, 0, 3, 2, 5, 1])
    envs.send(env_id, env_id)
    timestep = envs.recv()
    assert timestep.info["env_id"].tolist() == env_id.tolist()
    assert timestep.obs[:, 3].tolist() == env_id.tolist()


def test_nested_spaces(make):
    fns = [partial(NestedEnv, 4)] * 3
    ours = make(SyncVectorEnv(fns, autoreset_mode="SameStep"))
    single = make(fns)
    ours.action_space.seed(0)
    single.reset(seed=1), ours.reset(seed=1)
    for _ in range(9):
        action = ours.action_space.sample()
        jax.tree.map(np.testing.assert_array_equal, ours.step(action), single.step(action))


def test_cartpole_as_gymnasium_batches_it(make):
    actions = np.random.default_rng(0).integers(0, 2, (60, 6))
    first, steps = rollout(make(CartPoleVectorEnv(num_envs=6)), actions, seed=7)
    alone = CartPoleVectorEnv(num_envs=6)
    np.testing.assert_array_equal(first.obs, alone.reset(seed=7)[0])
    assert len(list(equal_steps(steps, alone, actions))) == 60
    assert steps.terminated.any()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_atari_as_ale_batches_it(make, mode):
    ale = pytest.importorskip("ale_py.vector_env", reason="ale-py is not installed: the extra atari has it")

    def new():
        return ale.AtariVectorEnv(
            "breakout", num_envs=3, autoreset_mode=mode, max_num_frames_per_episode=120, img_height=40
        )

    alone, envs = new(), make(new(), info={"lives": int})
    actions = np.random.default_rng(0).integers(0, 4, (60, 3))
    first, steps = rollout(envs, actions, seed=5)
    np.testing.assert_array_equal(first.obs, alone.reset(seed=5)[0])
    for step, info in equal_steps(steps, alone, actions):
        np.testing.assert_array_equal(step.info["lives"], info["lives"])
        if mode is AutoresetMode.SAME_STEP and step.done.any():
            last = np.asarray(info["final_obs"])[step.done]
            np.testing.assert_array_equal(step.info["final_obs"][step.done], last)
    assert steps.truncated.any()


@pytest.mark.parametrize("polemass_length", [0.05, 0.06])
def test_a_batched_port_is_compared_at_equal_seeds(make, polemass_length):
    def batched():
        envs = CartPoleVectorEnv(1)
        envs.polemass_length = polemass_length
        return envs

    port = make(batched, num_envs=2, envs_per_instance=1)
    errors = compare_pools(port, make("CartPole-v1", 2, autoreset_mode="NEXT_STEP"), num_steps=40)
    assert errors["reward"].shape == (40, 2)
    assert {path for path, error in errors.items() if error.any()} == (
        {"obs"} if polemass_length > 0.05 else set()
    )
    with pytest.raises(ValueError, match=r"'obs': \(2, 4\).*original's .*'obs': \(2, 6\)"):
        compare_pools(port, make("Acrobot-v1", 2))


def test_ales_batched_atari_is_equal_to_gymnasiums(make):
    ale = pytest.importorskip("ale_py.vector_env", reason="ale-py is not installed: the extra atari has it")
    wrappers = gymnasium.wrappers

    def original():
        env = gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
        env = wrappers.AtariPreprocessing(env, noop_max=0)
        return wrappers.FrameStackObservation(env, 4, padding_type="zero")

    options = {"noop_max": 0, "use_fire_reset": False, "reward_clipping": False}
    envs = make(original, 2, autoreset_mode="NEXT_STEP")
    errors = compare_pools(make(ale.AtariVectorEnv("breakout", 2, **options)), envs, num_steps=300)
    assert not any(error.any() for error in errors.values())


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # the bounds of EnvPool's spaces
def test_an_env_of_envpools(make):
    envpool = pytest.importorskip("envpool", reason="envpool is not installed: the group compat has it")

    def new():
        return envpool.make("Acrobot-v1", env_type="gymnasium", num_envs=4, seed=3)

    alone, envs = new(), make(new())
    handle, first = jaxvec.reset(envs)
    np.testing.assert_array_equal(first.obs, alone.reset()[0])
    _, steps = jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, jnp.ones((30, 4), int))
    assert len(list(equal_steps(steps, alone, np.ones((30, 4), np.int32)))) == 30


def test_without_autoreset_some_of_its_envs_are_reset(make):
    envs = make(counting(AutoresetMode.DISABLED))
    assert envs.autoreset_mode is AutoresetMode.DISABLED
    envs.reset(seed=0, options=[None, {"level": 3}, {"level": 3}])
    envs.step([0, 0, 0])
    over = envs.step([0, 0, 0]).terminated
    assert over.tolist() == [True, False, False]
    with pytest.raises(jaxvec.ResetNeededError):
        envs.step([0, 0, 0])
    timestep = envs.reset(mask=over)
    assert timestep.obs[:, :3].tolist() == [[2, 2, 0], [1, 2, 2], [1, 2, 2]]
    assert timestep.info["episode_length"].tolist() == [0, 2, 2]
    assert not envs.infos(0)[0]["options"]  # those of the others stay theirs
    assert envs.step([0, 0, 0]).obs[:, 2].tolist() == [1, 3, 3]


def test_infos_seeds_options_and_calls(make):
    envs = make(counting(AutoresetMode.SAME_STEP), info={"steps": int})
    envs.reset(seed=4, options={"level": 3})
    assert [info["seed"] for info in envs.infos()] == [4, 5, 6]
    assert [info["options"]["level"] for info in envs.infos()] == [3, 3, 3]
    timestep = envs.step([0, 0, 0])
    assert timestep.info["steps"].tolist() == [1, 1, 1]
    assert timestep.info["_steps"].all()
    timestep = envs.step([0, 0, 0])
    assert timestep.info["final_info"]["steps"].tolist() == [2, 0, 0]
    assert timestep.info["_steps"].tolist() == [False, True, True]
    assert envs.get_attr("resets") == (2, 1, 1)


def test_infos_of_batched_envs_in_several_workers(make):
    fn = partial(counting, AutoresetMode.SAME_STEP)
    envs = make(fn, 12, envs_per_instance=3, num_workers=2)
    envs.reset(seed=5)
    assert [info["seed"] for info in envs.infos()] == [*range(5, 17)]
    assert [info["seed"] for info in envs.infos([10, 1])] == [15, 6]


def test_infos_that_do_not_belong_to_single_envs_stay_whole(make):
    info = {"steps": np.array([1, 2]), "names": ["a", "b"], "word": "ab", "limits": np.arange(3)}
    envs = make(partial(Wrong, info=info), 2, envs_per_instance=2)
    envs.reset()
    envs.step([0, 0])
    for row, mine in enumerate(envs.infos()):
        assert (mine["steps"], mine["names"], mine["word"]) == (row + 1, "ab"[row], "ab")
        assert mine["limits"].tolist() == [0, 1, 2]


def test_a_declared_info_as_an_array_of_objects(make):
    vectors = np.empty(2, object)
    vectors[:] = [np.array([1, 2]), np.array([3, 4])]
    fn = partial(Wrong, info={"vector": vectors, "_vector": np.ones(2, bool)})
    envs = make(fn, 2, envs_per_instance=2, info={"vector": np.zeros(2, np.float32)})
    envs.reset()
    timestep = envs.step([0, 0])
    assert timestep.info["vector"].tolist() == [[1, 2], [3, 4]]
    assert timestep.info["_vector"].all()


def test_a_worker_of_batched_envs_that_dies_between_steps_was_idle(make):
    envs = make(partial(counting, AutoresetMode.SAME_STEP), 6, envs_per_instance=3, num_workers=2)
    envs.reset()
    envs.step(np.zeros(6, int))
    envs.get_attr("resets")  # worker 1 has finished the step
    psutil.Process(probe.processes(envs)[1].pid).kill()
    with pytest.raises(jaxvec.WorkerDiedError, match=r"^worker 1 \(envs 3 to 5\) was killed .* while idle"):
        envs.step(np.zeros(6, int))


class Wide(gymnasium.vector.VectorEnv):
    """Observes the number of its steps, which cost nothing."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    single_observation_space = gymnasium.spaces.Box(-1, 2**31 - 1, (), np.int32)
    single_action_space = gymnasium.spaces.Discrete(2)
    num_envs = 512

    def __init__(self):
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, 512)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, 512)
        self.steps = self.resets = 0

    def reset(self, **kwargs):
        self.resets += 1
        return np.full(512, -self.resets, np.int32), {}

    def step(self, actions):
        self.steps += 1
        return np.full(512, self.steps, np.int32), np.zeros(512), *np.zeros((2, 512), bool), {}


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_a_wide_one_never_sees_a_part_of_a_request(make, dispatch):
    envs = make(Wide, 512, envs_per_instance=512, num_workers=1, dispatch=dispatch)

    @jax.jit
    def turn(handle):
        handle, first = jaxvec.reset(handle)
        handle, timesteps = jax.lax.scan(jaxvec.step, handle, np.zeros((20, 512), int))
        return handle, (first.obs, timesteps.obs)

    handle, _ = jaxvec.reset(envs)
    for number in range(40):
        handle, (first, later) = turn(handle)
        assert (first == -2 - number).all()
        assert (later == 20 * number + np.arange(1, 21)[:, None]).all()


def test_vmap_over_parts_of_one_batched_env_is_one_hand_off(make):
    envs = make(counting(AutoresetMode.SAME_STEP, (9,) * 4))
    handle, _ = jaxvec.reset(envs)
    split = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), handle)
    _, timestep = jax.vmap(jaxvec.step)(split, jnp.arange(4).reshape(2, 2))
    assert timestep.obs[..., 3].tolist() == [[0, 1], [2, 3]]
    assert envs.stats().total.steps == 4


# --- Errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ffi", "io_callback"])
def test_some_of_the_envs_are_not_stepped(make, transport):
    """Not even those of a whole instance."""
    fn = partial(counting, AutoresetMode.SAME_STEP)
    envs = make(fn, 6, envs_per_instance=3, num_workers=2, transport=transport)
    handle, _ = jaxvec.reset(envs)
    with pytest.raises(jaxvec.EnvIdError, match=r"step of 3 of 6 envs: .* are batched .* all at once. Pass"):
        jaxvec.step(jax.tree.map(lambda token: token[:3], handle), jnp.zeros(3, int))
    assert jaxvec.step(handle, jnp.zeros(6, int))[1].info["episode_length"].tolist() == [1] * 6


@pytest.mark.parametrize("dispatch", ["native", "portable"])
def test_some_of_the_envs_are_neither_sent_nor_received(make, dispatch):
    fn = partial(counting, AutoresetMode.SAME_STEP)
    envs = make(fn, 6, envs_per_instance=3, num_workers=2, dispatch=dispatch)
    envs.reset(seed=0)
    for env_id in ([0], [0, 1, 2], [*range(5)]):
        with pytest.raises(jaxvec.EnvIdError, match=f"send of {len(env_id)} of 6 envs: .* all at once"):
            envs.send(np.zeros(len(env_id), int), env_id)
    envs.send(np.zeros(6, int), [5, 0, 4, 1, 3, 2])
    with pytest.raises(jaxvec.EnvIdError, match="recv of 3 of 6 envs: .* all at once"):
        envs.recv(at_least=3)
    assert envs.recv(at_least=6).info["episode_length"].tolist() == [1] * 6


def test_batched_envs_have_no_asynchronous_mode(make):
    with pytest.raises(
        ValueError, match="batch_size 2 is below num_envs .4., but batched envs step all at once"
    ):
        make(Wrong, 4, envs_per_instance=2, num_workers=2, batch_size=2)


def test_with_autoreset_a_mask_has_whole_instances(make):
    envs = make(partial(counting, AutoresetMode.SAME_STEP), 6, envs_per_instance=3, num_workers=1)
    envs.reset(seed=0)
    envs.step([0] * 6)
    timestep = envs.reset(mask=np.arange(6) >= 3)
    assert timestep.info["episode_length"].tolist() == [1, 1, 1, 0, 0, 0]
    with pytest.raises(
        jaxvec.EnvDataError, match="envs 3 to 5 .* is reset as a whole; reset all of them, not 2"
    ):
        envs.reset(mask=np.arange(6) >= 4)


class Wrong(gymnasium.vector.VectorEnv):
    """Returns what it is told to."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    num_envs = 2
    single_observation_space = spaces.Box(-1, 1, (3,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, **changes):
        self.result = {
            "obs": np.zeros((2, 3), np.float32),
            "reward": np.zeros(2),
            "terminated": np.zeros(2, bool),
            "truncated": np.zeros(2, bool),
            "info": {},
        } | changes

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 3), np.float32), {}

    def step(self, actions):
        return tuple(self.result.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs": np.zeros((2, 4), np.float32)}, r"env 0 .*obs: expected shape \(2, 3\), got \(2, 4\)"),
        ({"reward": np.zeros(3)}, r"reward: expected shape \(2,\), got \(3,\)"),
        ({"terminated": np.zeros(2)}, "terminated: expected bool, got float64"),
        ({"info": None}, "info must be a dict, got NoneType"),
        ({"terminated": np.ones(2, bool)}, "info has no 'final_obs'; make the pool with final_obs=False"),
        (
            {"terminated": np.ones(2, bool), "info": {"final_obs": np.array([np.zeros(3), None], object)}},
            r"env 1 .*final_obs'\]: .*got .* pass make\(final_obs=False\)",
        ),
    ],
)
@pytest.mark.parametrize("kwargs", [{"backend": "serial"}, {"backend": "process"}])
def test_wrong_data_are_named(make, kwargs, changes, message):
    envs = make(partial(Wrong, **changes), 2, envs_per_instance=2, **kwargs)
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match=message):
        envs.step([0, 0])


class Large(Wrong):
    """Has integers of 64 bits, which the pool stores in 32."""

    single_observation_space = spaces.Box(0, 2**62, (), np.int64)

    def __init__(self, **changes):
        super().__init__(**{"obs": np.zeros(2, np.int64)} | changes)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.int64), {}


BIG = np.array([3, 2**32 + 5])
ENDS = {"truncated": np.ones(2, bool), "info": {"final_obs": np.zeros(2, int)}}


@pytest.mark.parametrize(
    ("changes", "leaf"),
    [
        ({"obs": BIG}, "obs"),
        ({"info": {"score": BIG}}, "info['score']"),
        ({"info": {"score": BIG.tolist()}}, "info['score']"),
        ({**ENDS, "info": {"final_obs": BIG}}, "info['final_obs']"),
        ({**ENDS, "info": {**ENDS["info"], "final_info": {"score": BIG}}}, "info['final_info']['score']"),
    ],
    ids=["obs", "info", "list", "final_obs", "final_info"],
)
def test_integers_of_a_batched_env_never_wrap(make, changes, leaf):
    envs = make(partial(Large, **changes), 4, envs_per_instance=2, num_workers=2, info={"score": int})
    envs.reset()
    message = rf"^env [13] .*{re.escape(leaf)}: 4294967301 doesn't fit into int32.*jax_enable_x64"
    with pytest.raises(jaxvec.EnvDataError, match=message):
        envs.step([0] * 4)


def test_narrower_integers_of_a_batched_env_never_wrap(make):
    class Bytes(Large):
        single_observation_space = spaces.Box(0, 255, (), np.uint8)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.uint8), {}

    envs = make(
        partial(Bytes, obs=np.array([255, 1000], np.uint16)), 2, envs_per_instance=2, backend="serial"
    )
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match="env 1 .*obs: 1000 doesn't fit into uint8"):
        envs.step([0, 0])


def test_large_floats_of_a_batched_env_are_infinite(make):
    ends = {"obs": np.full((2, 3), 1e39), "info": {"score": np.array([1e39, 1.0])}}
    result = {"reward": np.array([1e39, -1.7e308]), "truncated": np.zeros(2, bool)} | ends
    envs = make(partial(Wrong, **result), 2, envs_per_instance=2, backend="serial", info={"score": float})
    envs.reset()
    for _ in range(2):
        timestep = envs.step([0, 0])
        assert np.isposinf(timestep.obs).all()
        assert timestep.reward.tolist() == timestep.info["episode_return"].tolist() == [np.inf, -np.inf]
        assert timestep.info["score"].tolist() == [np.inf, 1]


def test_an_exception_names_the_first_of_the_batch(make):
    class Raising(Wrong):
        def step(self, actions):
            raise KeyError("mine")

    envs = make(Raising, 4, envs_per_instance=2, num_workers=2)
    envs.reset()
    with pytest.raises(jaxvec.EnvError, match="raised KeyError in step"):
        envs.step([0, 0, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: (Wrong(), 3), "num_envs is 3, but the VectorEnv has 2 envs"),
        (lambda: (Wrong, 2), "pass envs_per_instance=2"),
        (lambda: (Wrong, 4, {"envs_per_instance": 4}), "is 4, but the VectorEnv has 2 envs"),
        (lambda: (Wrong, 3, {"envs_per_instance": 2}), "must be a multiple of envs_per_instance, 2"),
        (lambda: (CountingEnv, 2, {"envs_per_instance": 2}), "leave out envs_per_instance"),
        (lambda: ("CartPole-v1", 2, {"envs_per_instance": 2}), "goes with a callable that makes"),
        (lambda: (Wrong, 2, {"envs_per_instance": 0}), "envs_per_instance must be an integer of at least 1"),
        (lambda: (Wrong(), None, {"autoreset_mode": "NEXT_STEP"}), "resets its envs itself"),
        (lambda: (Wrong(), None, {"on_fault": "restart"}), "on_fault does not go with a batched env"),
        (lambda: (Wrong(), None, {"spare_envs": 1}), "spare_envs does not go with a batched env"),
        (lambda: (Wrong(), None, {"num_workers": 2}), "has one worker, this process, not 2"),
    ],
)
def test_what_can_not_be_is_refused(arguments, message):
    env, num_envs, *more = arguments()
    with pytest.raises((TypeError, ValueError, jaxvec.EnvError), match=message):
        jaxvec.make(env, num_envs, **dict(*more))


def test_a_batched_env_must_say_how_it_resets(make):
    class Silent(Wrong):
        metadata = {}

    with pytest.raises(ValueError, match=r"metadata\['autoreset_mode'\] of the VectorEnv is None; set it"):
        make(Silent())
