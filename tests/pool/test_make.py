"""`jaxvec.make`: every kind of env and argument, and what `VectorEnv` says of itself."""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support import disasters, probe

import jaxvec
from jaxvec import _config
from jaxvec._config import PoolConfig
from jaxvec._workers import spawn
from jaxvec.callbacks import _make
from jaxvec.testing import CountingEnv


def run_quietly(source):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


class SizedEnv(CountingEnv):
    def __init__(self, size=4, flavour=None):
        super().__init__()
        self.size, self.flavour = size, flavour
        self.observation_space = spaces.Box(-1, 1, (size,), np.float32)

    def _observe(self, action):
        return np.full(self.size, 0.5, np.float32)


def test_an_id_and_its_spec_and_kwargs(make, backend):
    for env in ("CartPole-v1", gymnasium.spec("CartPole-v1")):
        envs = make(env, 3, backend=backend, max_episode_steps=2, sutton_barto_reward=True)
        envs.reset(seed=0)
        assert envs.get_attr("_sutton_barto_reward") == (True,) * 3
        envs.step(np.zeros(3, int))
        assert envs.step(np.zeros(3, int)).truncated.all()


def test_an_id_with_its_module_and_one_without_version(make):
    assert make("gymnasium.envs.classic_control:CartPole-v1", 1).num_envs == 1
    assert make("CartPole", 1).num_envs == 1


def test_workers_look_for_jaxvec_where_it_is():
    *_, here = spawn._roots()
    assert Path(jaxvec.__file__) == Path(here) / "jaxvec" / "__init__.py"


def test_an_unknown_id_is_gymnasiums_own_error():
    with pytest.raises(gymnasium.error.NameNotFound, match="CartPool"):
        jaxvec.make("CartPool-v1", 2)


def test_an_env_registered_here_works_in_workers(make):
    class Local(CountingEnv):
        pass

    gymnasium.register("Local-v0", entry_point=Local, max_episode_steps=3)
    try:
        envs = make("Local-v0", 2)
        envs.reset()
        assert [envs.step(np.zeros(2, int)).truncated.all() for _ in range(3)] == [False, False, True]
    finally:
        del gymnasium.registry["Local-v0"]


def test_callables_lambdas_closures_and_kwargs(make, backend):
    flavour = "closure"
    assert make(SizedEnv, 2, backend=backend, flavour="kw").get_attr("flavour") == ("kw", "kw")
    assert make(lambda: SizedEnv(flavour=flavour), 2, backend=backend).get_attr("flavour") == ("closure",) * 2
    assert make(lambda index: SizedEnv(flavour=index), 3, backend=backend).get_attr("flavour") == (0, 1, 2)
    assert make([lambda i=i: SizedEnv(flavour=i) for i in (7, 8)], backend=backend).get_attr("flavour") == (
        7,
        8,
    )
    assert make([lambda i: SizedEnv(flavour=i)] * 2, 2, backend=backend).get_attr("flavour") == (0, 1)


def test_classes_of_main_need_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import helper_beside_the_script, jax, jaxvec
            print("main runs")
            class Mine(helper_beside_the_script.Base):
                def answer(self):
                    return helper_beside_the_script.ANSWER
            import gymnasium
            gymnasium.register("Mine-v0", entry_point="__main__:Mine", order_enforce=False)
            assert jaxvec.make("Mine-v0", 1).call("answer") == (42,)
            envs = jaxvec.make(Mine, 2)
            handle, _ = jaxvec.reset(envs, seed=0)
            handle, timestep = jax.jit(jaxvec.step)(handle, jax.numpy.array([3, 4]))
            print(envs.call("answer"), timestep.obs[:, 3])
            """
        )
    )
    (tmp_path / "helper_beside_the_script.py").write_text(
        "from jaxvec.testing import CountingEnv as Base\nANSWER = 42\n"
    )
    root = os.path.dirname(os.path.dirname(jaxvec.__file__))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
    assert (done.stdout, done.stderr) == ("main runs\n(42, 42) [3 4]\n", "")


def test_workers_use_the_gymnasium_that_their_parent_uses(tmp_path):
    (tmp_path / "gymnasium").symlink_to(os.path.dirname(gymnasium.__file__))  # a checkout of it, say
    source = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import gymnasium, jaxvec
    from jaxvec.testing import CountingEnv

    class Env(CountingEnv):
        def where(self):
            return sys.modules["gymnasium"].__file__

    with jaxvec.make(Env, 1) as envs:
        assert envs.call("where") == (gymnasium.__file__,)
        print(gymnasium.__file__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'gymnasium' / '__init__.py'}\n", "")


def test_workers_are_as_many_as_asked_and_split_evenly(make):
    class Env(CountingEnv):
        def pid(self):
            return os.getpid()

    envs = make(Env, 5, num_workers=3)
    pids = envs.call("pid")
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [1, 2, 2]
    assert envs.num_workers == 3
    assert len(set(make(Env, 2).call("pid")) - {os.getpid()}) == min(2, len(os.sched_getaffinity(0)))
    assert make(Env, 2, backend="serial").call("pid") == (os.getpid(),) * 2


def test_worker_env_and_its_defaults(make):
    class Env(CountingEnv):
        def environ(self):
            names = ("OMP_NUM_THREADS", "JAX_PLATFORMS", "XLA_FLAGS", "MINE", "HOME", "PYTHONPATH")
            return [os.environ.get(name) for name in names]

    (seen,) = make(Env, 1).call("environ")
    assert seen == ["1", "cpu", None, None, os.environ.get("HOME"), os.environ.get("PYTHONPATH")]
    (seen,) = make(
        Env, 1, workers=jaxvec.Workers(env={"OMP_NUM_THREADS": "4", "MINE": "yes", "HOME": None})
    ).call("environ")
    assert seen[:5] == ["4", "cpu", None, "yes", None]


BAD = [
    (("CartPole-v1", 0), {}, ValueError, "num_envs must be an integer of at least 1, not 0"),
    (("CartPole-v1", 2.0), {}, ValueError, "num_envs must be an integer"),
    (("CartPole-v1",), {}, ValueError, "num_envs is missing"),
    (([CountingEnv], 2), {}, ValueError, "num_envs is 2, but the list has 1"),
    (([],), {}, ValueError, "num_envs must be"),
    ((3, 2), {}, TypeError, "got int for env 0"),
    ((CountingEnv(), 2), {}, TypeError, "pass a function that makes the env"),
    ((lambda a, b: CountingEnv(), 2), {}, TypeError, r"requires the arguments \['a', 'b'\]"),
    ((CountingEnv, 2), {"backend": "thread"}, ValueError, 'backend must be "process", "serial", "ray"'),
    (
        (CountingEnv, 2),
        {"autoreset_mode": "SOMETIMES"},
        ValueError,
        "SAME_STEP, NEXT_STEP, DISABLED, EPISODIC",
    ),
    ((CountingEnv, 2), {"num_workers": 3}, ValueError, r"from 1 to num_envs \(2\), not 3"),
    ((CountingEnv, 2), {"num_workers": 0}, ValueError, "num_workers must be an integer of at least 1, not 0"),
    ((CountingEnv, 2), {"workers": 2}, TypeError, "workers must be a jaxvec.Workers, not 2"),
    ((CountingEnv, 2), {"workers": jaxvec.Workers(num=3), "num_workers": 2}, ValueError, "differ; pass one"),
    ((CountingEnv, 2), {"timeouts": 5}, TypeError, "timeouts must be a jaxvec.Timeouts, not 5"),
    ((CountingEnv, 2), {"info": "lives"}, TypeError, r"use \['lives'\]"),
    ((CountingEnv, 2), {"info": ["lives"]}, TypeError, "first reset returned no 'lives', only"),
    ((CountingEnv, 2), {"info": {"env_id": int}}, ValueError, "'env_id' is reserved"),
    ((CountingEnv, 2), {"info": {"x": "what?"}}, TypeError, "can't read a shape and dtype"),
    ((CountingEnv, 2), {"info": {"x": str}}, TypeError, "can't be an array inside jax.jit"),
    ((lambda: 3, 2), {}, jaxvec.EnvError, "expected a gymnasium.Env, got int"),
    (
        (CountingEnv, 2),
        {"backend": "serial", "workers": jaxvec.Workers(env={"A": "b"})},
        ValueError,
        r"Workers\(env=...\) needs worker processes",
    ),
    ((CountingEnv, 2), {"backend": "serial", "num_workers": 2}, ValueError, "has one worker"),
    ((CountingEnv, 2), {"nonsense": 1}, jaxvec.EnvError, "unexpected keyword argument 'nonsense'"),
]


@pytest.mark.parametrize(("args", "kwargs", "kind", "text"), BAD)
def test_bad_arguments_say_what_to_do(args, kwargs, kind, text):
    with pytest.raises(kind, match=text):
        jaxvec.make(*args, **kwargs)


def test_an_env_that_cannot_be_pickled_is_refused():
    lock = __import__("threading").Lock()
    with pytest.raises(TypeError, match=r"constructor of env 0 can't be pickled.*serial"):
        jaxvec.make(lambda: (lock, CountingEnv())[1], 2)


def test_it_says_of_itself_what_gymnasium_would(make):
    envs = make("Pendulum-v1", 3, autoreset_mode="NEXT_STEP", render_mode="rgb_array")
    oracle = gymnasium.make_vec("Pendulum-v1", 3, vectorization_mode="sync", render_mode="rgb_array")
    for name in (
        "num_envs",
        "single_observation_space",
        "observation_space",
        "single_action_space",
        "action_space",
        "metadata",
        "render_mode",
    ):
        assert getattr(envs, name) == getattr(oracle, name), name
    assert envs.autoreset_mode is AutoresetMode.NEXT_STEP
    assert repr(envs) == "VectorEnv(num_envs=3, num_workers=2, autoreset_mode=NEXT_STEP, open)"
    oracle.close()


def test_attributes_calls_and_raw_infos(make, backend):
    envs = make(lambda index: SizedEnv(flavour=index), 3, backend=backend)
    envs.reset(seed=5, options={"level": 2})
    assert envs.infos() == tuple({"seed": 5 + i, "options": {"level": 2}} for i in range(3))
    envs.set_attr("flavour", ["a", "b", "c"])
    assert envs.get_attr("flavour") == ("a", "b", "c")
    envs.set_attr("flavour", "d")
    assert envs.get_attr("flavour") == ("d", "d", "d")
    assert envs.call("_observe", 1)[2].shape == (4,)
    with pytest.raises(ValueError, match="got 2 values for 3 envs"):
        envs.set_attr("flavour", ["a", "b"])
    envs.step(np.zeros(3, int))
    assert envs.infos() == ({"steps": 1},) * 3
    assert envs.infos([2, 0]) == ({"steps": 1},) * 2
    with pytest.raises(jaxvec.EnvIdError):
        envs.infos([3])


def test_it_cannot_be_pickled(make):
    with pytest.raises(TypeError, match="can't be pickled"):
        __import__("pickle").dumps(make(CountingEnv, 1))


def test_seeds_reach_the_envs(make, backend):
    envs = make(CountingEnv, 3, backend=backend)

    def seeds():
        return [info["seed"] for info in envs.infos()]

    envs.reset(seed=10)
    assert seeds() == [10, 11, 12]
    envs.reset(seed=[5, None, 2**40])
    assert seeds() == [5, -1, 2**40]
    envs.reset()
    assert seeds() == [-1, -1, -1]
    jaxvec.reset(envs, seed=2**40)
    assert seeds() == [2**40, 2**40 + 1, 2**40 + 2]
    jax.block_until_ready(jax.jit(lambda: jaxvec.reset(envs, seed=2**40))())
    assert seeds() == [2**40, 2**40 + 1, 2**40 + 2]
    jax.block_until_ready(jax.jit(lambda s: jaxvec.reset(envs, seed=s))(7))
    assert seeds() == [7, 8, 9]
    jax.block_until_ready(jax.jit(lambda s: jaxvec.reset(envs, seed=s))(np.array([4, 1, 9])))
    assert seeds() == [4, 1, 9]

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        jaxvec.reset(envs, seed=key)
        eager = seeds()
        jax.block_until_ready(jax.jit(lambda key: jaxvec.reset(envs, seed=key))(key))
        assert seeds() == eager
        assert len(set(eager)) == 3
        assert all(0 <= seed < 2**31 for seed in eager)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"seed": -1}, "seed -1 of env 0"),
        ({"seed": [1, 2]}, "2 seeds for 3 envs"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"mask": np.ones(2, bool)}, r"mask must be bool of shape \(3,\)"),
        ({"mask": np.ones(3, int)}, "mask must be bool"),
    ],
)
def test_bad_seeds_and_masks_reset_nothing(make, kwargs, text):
    envs = make(CountingEnv, 3)
    for reset in (
        envs.reset,
        lambda **kw: jaxvec.reset(envs, **kw),
        jax.jit(lambda: jaxvec.reset(envs, **kwargs)),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            reset(**kwargs) if not isinstance(reset, jax.stages.Wrapped) else reset()
    assert envs.get_attr("resets") == (0, 0, 0)


@pytest.mark.parametrize("seed", [-1, -5])
def test_a_negative_traced_seed_is_refused_when_the_program_runs(make, seed):
    envs = make(CountingEnv, 3)
    with pytest.raises(RuntimeError, match=f"ValueError: seed {seed} of env 0 is out of range"):
        jax.block_until_ready(jax.jit(lambda seed: jaxvec.reset(envs, seed=seed))(seed))
    assert envs.get_attr("resets") == (0, 0, 0)


def test_a_partial_reset_changes_only_its_rows(make, backend):
    envs = make(CountingEnv, 3, backend=backend)
    with pytest.raises(jaxvec.ResetNeededError, match=r"envs \[0, 1, 2\] have not been reset"):
        envs.step(np.zeros(3, int))
    envs.reset(seed=0)
    stepped = envs.step(np.array([5, 6, 7]))
    partial = envs.reset(seed=4, mask=np.array([False, True, False]), options={"a": 1})
    assert partial.obs.tolist() == [[1, 1, 1, 5], [2, 1, 0, -1], [1, 1, 1, 7]]
    assert partial.reward.tolist() == [1, 0, 1]
    assert envs.infos()[1] == {"seed": 5, "options": {"a": 1}}
    assert stepped.obs[1].tolist() == [1, 1, 1, 6]  # earlier results are not overwritten
    assert envs.reset(mask=np.zeros(3, bool)).obs.tolist() == partial.obs.tolist()
    envs.reset(mask=np.ones(3, bool))
    assert [info["options"] for info in envs.infos()] == [None] * 3


def test_options_in_a_program(make):
    envs = make(CountingEnv, 2)
    handle, _ = jax.jit(lambda: jaxvec.reset(envs, seed=0, options={"level": "hard"}))()
    jax.block_until_ready(handle)
    assert [info["options"] for info in envs.infos()] == [{"level": "hard"}] * 2


class RewardEnv(CountingEnv):
    def __init__(self, kind):
        super().__init__(episode_length=3)
        if kind == "vector":
            self.reward_space = spaces.Box(-1, 1, (2,), np.float32)
        self.kind = kind

    def step(self, action):
        obs, reward, *rest = super().step(action)
        value = {
            "float": reward,
            "int": int(reward),
            "zero-dimensional": np.array(reward),
            "shape (1,)": np.array([reward], np.float32),
            "vector": np.array([reward, -reward]),
            "NumPy scalar": np.float32(reward),
            "bool": bool(reward),
        }[self.kind]
        return obs, value, *rest


@pytest.mark.parametrize("kind", ["float", "int", "zero-dimensional", "shape (1,)", "NumPy scalar", "bool"])
def test_scalar_rewards_of_every_type(make, backend, kind):
    envs = make(RewardEnv, 2, kind=kind, backend=backend)
    envs.reset()
    envs.step(np.zeros(2, int))
    timestep = envs.step(np.zeros(2, int))
    assert timestep.reward.dtype == np.float32
    assert timestep.reward.tolist() == [1 if kind == "bool" else 2] * 2
    assert timestep.info["episode_return"].tolist() == [2 if kind == "bool" else 3] * 2


def test_vector_rewards(make, backend):
    envs = make(RewardEnv, 2, kind="vector", backend=backend)
    handle, timestep = jaxvec.reset(envs)
    for _ in range(3):
        handle, timestep = jaxvec.step(handle, np.zeros(2, int))
    assert timestep.reward.tolist() == [[3, -3]] * 2
    assert timestep.info["episode_return"].tolist() == [[6, -6]] * 2
    assert timestep.info["episode_length"].tolist() == [3, 3]
    assert timestep.terminated.all()
    assert envs.reward_space.shape == (2,)


def test_x64_keeps_the_spaces_own_dtypes(tmp_path):
    source = """
    import jax, jaxvec, numpy as np
    jax.config.update("jax_enable_x64", True)
    from jaxvec.testing import NestedEnv
    envs = jaxvec.make(NestedEnv, 2)
    handle, timestep = jaxvec.reset(envs, seed=0)
    action = envs.action_space.sample()
    handle, timestep = jax.jit(jaxvec.step)(handle, action)
    assert timestep.reward.dtype == timestep.obs["clock"][1].dtype == np.float64
    assert timestep.obs["clock"][0].dtype == np.int64
    np.testing.assert_array_equal(timestep.obs["last"]["arm"][0], action["arm"][0])
    jax.config.update("jax_enable_x64", False)
    try:
        jaxvec.step(handle, action)
    except TypeError as error:
        assert "jax_enable_x64" in str(error), error
    else:
        raise AssertionError
    """
    run_quietly(source)


def test_integers_beyond_32_bits_are_an_error_and_not_another_number(make, backend):
    class Wide(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Box(-(2**60), 2**60, (2,), np.int64)

        def _observe(self, action):
            return np.array([1, 2**40 if action == 7 else 2])

    envs = make(Wide, 2, backend=backend)
    assert envs.reset().obs.tolist() == [[1, 2]] * 2
    with pytest.raises(jaxvec.EnvDataError, match="obs: .*1099511627776.* doesn't fit into int32"):
        envs.step(np.full(2, 7))


def test_public_names_are_there_and_load_jax_lazily():
    source = """
    import sys, jaxvec, jaxvec.testing
    jaxvec.TimeStep, jaxvec.EnvError, jaxvec.VectorEnv
    assert "jax" not in sys.modules
    for name in jaxvec.__all__:
        assert getattr(jaxvec, name) is not None
    assert "jax" in sys.modules
    assert set(jaxvec.__all__) <= set(dir(jaxvec))
    try:
        jaxvec.nonsense
    except AttributeError as error:
        assert "nonsense" in str(error)
    """
    run_quietly(source)


def test_pool_config_has_the_options_types_and_defaults_of_make():
    ours, theirs = (inspect.signature(each).parameters for each in (jaxvec.make, PoolConfig))
    others = ("env", "num_envs", "states", "device", "env_kwargs")
    assert [option for name, option in theirs.items() if name not in ("states", "settings")] == [
        option for name, option in ours.items() if name not in others
    ]
    assert PoolConfig().states == PoolConfig(states=ours["states"].default).states
    assert len(ours) - 1 <= 22


def test_options_may_be_iterators(make):
    for env, num_envs in ((CountingEnv, 2), (SyncVectorEnv([CountingEnv] * 2), None)):
        envs = make(env, num_envs, info=iter(["seed"]), backend="serial")
        assert envs.reset(seed=3).info["seed"].tolist() == [3, 4]


# --- Calls of some envs, calls in the background, and frames ------------------------------------


class Painter(CountingEnv):
    """Renders a frame of its own size."""

    def __init__(self, index, sizes=(4, 4, 4)):
        super().__init__()
        self.index = index
        self.size = sizes[index]

    def render(self):
        return np.full((self.size, 2, 3), self.index, np.uint8)


def test_some_envs_are_called(make, backend):
    envs = make(Painter, 3, backend=backend)
    assert envs.get_attr("index", indices=[2, 0]) == (2, 0)
    envs.set_attr("index", [7, 8], indices=[1, 0])
    assert envs.get_attr("index") == (8, 7, 2)
    envs.set_attr("size", 5, indices=[2])
    assert envs.call("get_wrapper_attr", "size") == (4, 4, 5)
    for wrong in ([0, 0], [3], [0.5]):
        with pytest.raises(jaxvec.EnvIdError):
            envs.call("index", indices=wrong)
    with pytest.raises(ValueError, match="got 1 values for 2 envs"):
        envs.set_attr("index", [1], indices=[0, 1])


def test_frames_of_one_shape_are_one_array(make, backend):
    frames = make(Painter, 3, backend=backend).render()
    assert frames.shape == (3, 4, 2, 3)
    assert frames[:, 0, 0, 0].tolist() == [0, 1, 2]
    frames = make(Painter, 3, backend=backend, sizes=(4, 5, 6)).render()
    assert [frame.shape for frame in frames] == [(4, 2, 3), (5, 2, 3), (6, 2, 3)]


@pytest.mark.filterwarnings("ignore:.*render:UserWarning")  # Gymnasium's, for the serial backend
def test_render_without_render_mode_raises(make, backend):
    envs = make("CartPole-v1", 2, backend=backend)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match='envs with a render_mode; .*render_mode="rgb_array"'):
        envs.render()
    envs.step([0, 1])


def test_a_call_goes_on_in_the_background(make, tmp_path):
    class Gated(CountingEnv):
        def wait(self, word):
            while not gate.exists():
                threading.Event().wait(0.001)
            return f"{word} {self.steps}"

    gate = tmp_path / "gate"
    envs = make(Gated, 2)
    envs.reset()
    answer = envs.call_async("wait", "after")
    with pytest.raises(TimeoutError):
        answer.result(timeout=0.01)
    gate.touch()
    assert envs.step([0, 0]).obs[:, 1].tolist() == [1, 1]  # waits for the call
    assert answer.result(timeout=200) == ("after 0", "after 0")
    with pytest.raises(jaxvec.EnvError, match="nothing_such"):
        envs.call_async("nothing_such").result(timeout=200)


def test_a_pool_is_closed_during_a_call_in_the_background(make):
    class Hanging(CountingEnv):
        def hang(self):
            threading.Event().wait()

    envs = make(Hanging, 2)
    answer = envs.call_async("hang")
    envs.close()
    with pytest.raises(jaxvec.PoolClosedError):
        answer.result(timeout=200)


class Simulator:
    def __init__(self):
        self.level, self.inner = 3, []

    def add(self, number):
        self.inner.append(number)
        return sum(self.inner)


class Simulated(CountingEnv):
    def __init__(self):
        super().__init__()
        self.simulator = Simulator()


def test_a_dotted_name_goes_on_from_an_attribute(make, backend):
    envs = make(lambda: gymnasium.wrappers.TimeLimit(Simulated(), 9), 2, backend=backend)
    assert envs.call("simulator.add", 4) == (4, 4)
    assert envs.call("simulator.inner.copy") == ([4], [4])
    assert envs.get_attr("simulator.level") == (3, 3)
    envs.set_attr("simulator.level", [5, 6])
    assert envs.get_attr("simulator.level", indices=-1) == (6,)
    handle, _ = jaxvec.reset(envs)
    _, now = jaxvec.call(handle, "simulator.add", jnp.array([1, 2]), result_shape_dtypes=int)
    assert now.tolist() == [5, 6]
    with pytest.raises(jaxvec.EnvAttributeError, match="'Simulator' object has no attribute 'lost'"):
        envs.call("simulator.lost")
    with pytest.raises(jaxvec.EnvAttributeError, match="lost"):
        envs.set_attr("lost.level", 3)
    envs.reset()


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_are_named_after_their_envs(make, method):
    class Env(CountingEnv):
        def name(self):
            return Path("/proc/self/comm").read_text()

    envs = make(Env, 3, num_workers=2, workers=jaxvec.Workers(start_method=method))
    assert envs.call("name") == ("jaxvec 0\n", "jaxvec 1-2\n", "jaxvec 1-2\n")
    assert make(Env, 1, backend="serial").call("name") == (Path("/proc/self/comm").read_text(),)


class Nested(CountingEnv):
    """Says nested dicts in its info, but not always."""

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, self._info(0)

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self._info(int(action)) if action else {}

    def _info(self, value):
        return {"stats": {"hits": value, "where": {"at": np.full(2, value, np.float32)}}, "text": {"a": "b"}}


def test_a_nested_info_is_learnt_from_env_0_or_declared(make, backend):
    declared = {"stats": {"hits": int, "where": spaces.Dict({"at": spaces.Box(-9, 9, (2,))})}}
    for info in (["stats"], declared):
        envs = make(lambda: Nested(2), 2, backend=backend, info=info)

        @jax.jit
        def program():
            handle, first = jaxvec.reset(envs)
            _, timestep = jaxvec.step(handle, jnp.array([7, 0]))
            return first, timestep, jaxvec.step(_, jnp.array([0, 5]))[1]

        first, second, third = jax.tree.map(np.asarray, program())
        for timestep, mask, hits in (
            (first, [1, 1], [0, 0]),
            (second, [1, 0], [7, 0]),
            (third, [1, 1], [0, 0]),
        ):
            assert timestep.info["_stats"].tolist() == [bool(each) for each in mask]
            assert timestep.info["stats"]["hits"].tolist() == hits
            assert timestep.info["stats"]["where"]["at"].tolist() == [[each] * 2 for each in hits]
            assert timestep.info["stats"]["where"]["at"].dtype == np.float32
        final = third.info["final_info"]
        assert final["_stats"].tolist() == [False, True]
        assert final["stats"]["hits"].tolist() == [0, 5]
        envs.close()


def test_a_nested_info_that_can_not_be_arrays_names_the_place(make):
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"info\['text'\]\['a'\]: <U1 can't be an array"):
        make(Nested, 1, info=["text"], backend="serial")
    with pytest.raises(jaxvec.UnsupportedSpaceError, match=r"info\['text'\]: a dict needs strings as keys"):
        make(Nested, 1, info={"text": {}}, backend="serial")


# --- Configs of each env's own, and episodes without autoreset -----------------------------------


def test_each_env_has_its_config_and_knows_its_worker(make):
    class Configured(CountingEnv):
        def __init__(self, index, worker_id, *, length, level=0):
            super().__init__(length)
            self.place = (index, worker_id)
            self.level = level

    envs = make(
        Configured, 4, num_workers=2, length=3, env_configs=[{}, {"level": 1}, {"level": 2}, {"length": 4}]
    )
    assert envs.get_attr("place") == ((0, 0), (1, 0), (2, 1), (3, 1))
    assert envs.get_attr("level") == (0, 1, 2, 0)
    gravities = make("CartPole-v1", env_configs=[{"sutton_barto_reward": True}, {}], num_envs=2)
    assert gravities.get_attr("_sutton_barto_reward") == (True, False)
    with pytest.raises(ValueError, match="env_configs has 1 configs, but there are 2 envs"):
        make("CartPole-v1", 2, env_configs=[{}])


def test_constructor_parameters_get_the_env_or_worker_index(make, backend):
    class Placed(CountingEnv):
        def __init__(self, place):
            super().__init__()
            self.place = place

    def optional(env_id=None, worker_id=None):
        return Placed((env_id, worker_id))

    def number(index, worker_id=-1, *, env_id: int):
        return Placed((index, worker_id, env_id))

    def required_last(worker_id, env_id):
        return Placed((env_id, worker_id))

    def required_first(env_id, worker_id):
        return Placed((env_id, worker_id))

    @functools.wraps(required_first)
    def wrapper(*args, **kwargs):
        return required_first(*args, **kwargs)

    def positional(first, /, env_id: int | None = None):
        return Placed((first, env_id))

    def of_an_id(env_id="CartPole-v1", worker_id=None):
        return Placed((env_id, worker_id))

    def annotated(env_id: str | None = None):
        return Placed(env_id)

    def others(**env_id):
        return Placed(env_id)

    at = [0, 1, 1] if backend == "process" else [0, 0, 0]
    start = partial(make, num_envs=3, backend=backend, num_workers=max(at) + 1)
    for function, expected in (
        (optional, [(i, at[i]) for i in range(3)]),
        ([optional, partial(optional, env_id=7), partial(optional, 5)], [(0, 0), (7, at[1]), (5, at[2])]),
        (partial(optional, worker_id="mine"), [(i, "mine") for i in range(3)]),
        (number, [(i, at[i], i) for i in range(3)]),
        (required_last, [(i, at[i]) for i in range(3)]),
        (required_first, [(i, at[i]) for i in range(3)]),
        (wrapper, [(i, at[i]) for i in range(3)]),
        (positional, [(i, i) for i in range(3)]),
        (of_an_id, [("CartPole-v1", at[i]) for i in range(3)]),
        (annotated, [None] * 3),
        (others, [{}] * 3),
    ):
        assert start(function).get_attr("place") == tuple(expected), function
    assert start(optional, env_id="mine").get_attr("place") == tuple(("mine", at[i]) for i in range(3))
    with pytest.raises(TypeError, match=r"requires the arguments \['level', 'env_id'\]"):
        start(lambda level, env_id: Placed((level, env_id)))


def test_in_episodes_finished_envs_idle_until_all_are_done(make, backend):
    envs = make(
        [partial(CountingEnv, length) for length in (1, 2, 3)], autoreset_mode="EPISODIC", backend=backend
    )
    assert envs.autoreset_mode is AutoresetMode.DISABLED
    with pytest.raises(jaxvec.ResetNeededError):
        envs.step([0, 0, 0])

    @jax.jit
    def episode():
        handle, timestep = jaxvec.reset(envs)

        def step(carry):
            handle, timestep, total = carry
            handle, timestep = jaxvec.step(handle, jnp.array([5, 6, 7]))
            return handle, timestep, total + timestep.reward

        def going_on(carry):
            return ~(carry[1].terminated | carry[1].truncated).all()

        return jax.lax.while_loop(going_on, step, (handle, timestep, jnp.zeros(3)))

    for _ in range(2):  # a reset begins another
        handle, timestep, total = episode()
        assert total.tolist() == [1, 1 + 2, 1 + 2 + 3]
        assert timestep.obs[:, 2:].tolist() == [[1, 5], [2, 6], [3, 7]]
        assert timestep.info["idle"].tolist() == [True, True, False]
        assert timestep.info["episode_return"].tolist() == total.tolist()
        assert timestep.info["episode_length"].tolist() == [1, 2, 3]
    assert envs.stats().total.steps == 2 * (1 + 2 + 3)
    _, timestep = jaxvec.reset(handle, mask=np.array([True, False, False]))
    assert timestep.terminated.tolist() == [False, True, True]
    timestep = envs.step([1, 1, 1])
    assert timestep.info["idle"].tolist() == [False, True, True]
    assert timestep.reward.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "env", ["CartPole-v1", gymnasium.spec("CartPole-v1"), CountingEnv, [CountingEnv] * 2]
)
def test_a_misspelt_option_is_named_with_what_was_meant(env):
    for name, meant in {"num_worker": "num_workers", "seeds": "seed", "step_timout": "step_timeout"}.items():
        with pytest.raises(TypeError, match=f"unexpected option '{name}' .*Did you mean '{meant}'"):
            jaxvec.make(env, 2, **{name: 1})


@pytest.mark.parametrize("env", ["CartPole-v1", CountingEnv])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("asynchronous", 'backend="serial"'),
        ("vectorization_mode", 'backend="serial"'),
        ("wrappers", r"lambda: Wrapper\(gymnasium.make"),
        ("observation_space", "make reads the spaces from the envs"),
        ("shared_memory", "always in shared memory"),
        ("context", "start_method=..."),
        ("num_threads", "as num_workers"),
        ("env_kwargs", "env_configs"),
        ("seed", r"reset\(seed=\.\.\.\)"),
    ],
)
def test_an_argument_of_other_libraries_names_what_takes_its_place(env, name, instead):
    with pytest.raises(TypeError, match=f"unexpected option '{name}' .*{instead}"):
        jaxvec.make(env, 2, **{name: 1})


@pytest.mark.parametrize("name", _make._MOVED)
def test_an_option_that_has_moved_names_its_new_place(name):
    for env in (CountingEnv, lambda **kwargs: CountingEnv(**kwargs)):
        with pytest.raises(TypeError, match=f"unexpected option '{name}' .*(jaxvec|EPISODIC|device)"):
            jaxvec.make(env, 2, **{name: 1})


def test_a_misspelt_option_is_not_passed_on_as_any_keyword(make):
    class Base(CountingEnv):
        def __init__(self, num_worker=0):
            super().__init__()
            self.given = num_worker

    class Env(Base):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)

    with pytest.raises(TypeError, match="Did you mean 'num_workers'"):
        jaxvec.make(lambda **kwargs: CountingEnv(**kwargs), 2, num_worker=1)
    assert make(Env, 1, num_worker=3).get_attr("given") == (3,)
    assert make(lambda **kwargs: Base(**kwargs), 1, env_configs=[{"num_worker": 3}]).get_attr("given") == (3,)


def test_config_is_read_from_the_environment_and_by_each_make(make, monkeypatch):
    monkeypatch.setenv("JAXVEC_TRANSPORT", "IO_callback")
    monkeypatch.setenv("JAXVEC_WRAPPER_BYPASS", "false")
    settings = _config._from_environ()
    assert settings.current() == _config.Settings("io_callback", "auto", wrapper_bypass=False)
    monkeypatch.setenv("JAXVEC_DISPATCH", "pigeon")
    with pytest.raises(
        ValueError, match="JAXVEC_DISPATCH must be one of auto, native, portable, not 'pigeon'"
    ):
        _config._from_environ()
    with jaxvec.config.override(transport="io_callback"):
        envs = make(CountingEnv, 1)
    assert envs.transport == "io_callback" != jaxvec.make(CountingEnv, 1, backend="serial").transport
    with pytest.raises(ValueError, match=r"config.transport must be one of auto, ffi, io_callback, not 'x'"):
        jaxvec.config.transport = "x"
    with pytest.raises(
        AttributeError, match="no setting 'handoff', only transport, dispatch, wrapper_bypass"
    ):
        jaxvec.config.handoff = "auto"


@pytest.mark.parametrize(
    ("make_record", "error", "said"),
    [
        (lambda: jaxvec.Timeouts(step=0), ValueError, r"Timeouts\(step=...\) must be above 0"),
        (lambda: jaxvec.Timeouts(start=1e300), ValueError, r"Timeouts\(start=...\) .*at most 2,000,000 s"),
        (lambda: jaxvec.Timeouts(reset=float("nan")), ValueError, r"Timeouts\(reset=...\) .*not nan"),
        (lambda: jaxvec.Timeouts(step="3"), TypeError, r"Timeouts\(step=...\) must be a number .*'3'"),
        (lambda: jaxvec.Timeouts(step=True), TypeError, r"Timeouts\(step=...\) must be a number .*True"),
        (
            lambda: jaxvec.Workers(num=True),
            ValueError,
            r"Workers\(num=...\) must be an integer of at least 1",
        ),
        (
            lambda: jaxvec.Workers(pin=3, start_method="fork"),
            ValueError,
            r"Workers\(start_method=...\) must be",
        ),
        (lambda: jaxvec.States(-1), ValueError, r"States\(max=...\) must be an integer of at least 0"),
        (lambda: jaxvec.States(1, 3), TypeError, r"States\(functions=...\) must be two functions"),
    ],
)
def test_records_check_themselves(make_record, error, said):
    with pytest.raises(error, match=said):
        make_record()


def test_infinite_timeouts_are_none_and_long_ones_work(make, backend):
    assert jaxvec.Timeouts(*[float("inf")] * 3) == jaxvec.Timeouts(None, None, None)
    for seconds in (float("inf"), 2_000_000, np.float32(60)):
        envs = make(CountingEnv, 1, backend=backend, timeouts=jaxvec.Timeouts(*[seconds] * 3))
        envs.reset(options={})
        assert envs.step([3]).obs.tolist() == [[1, 1, 1, 3]]
        assert envs.call("get_wrapper_attr", "steps") == (1,)


def test_an_env_may_have_such_an_argument(make):
    class Env(CountingEnv):
        def __init__(self, seed, **kwargs):
            super().__init__()
            self.given = (seed, kwargs)

    assert make(Env, 1, seed=3, wrappers=4).get_attr("given") == ((3, {"wrappers": 4}),)


def test_callables_may_come_from_a_generator(make, backend):
    envs = make((partial(CountingEnv, length) for length in (2, 3)), backend=backend)
    envs.reset()
    envs.step([0, 0])
    assert envs.step([0, 0]).terminated.tolist() == [True, False]
    assert make(map(partial, [CountingEnv] * 3), 3, backend=backend).num_envs == 3
    with pytest.raises(ValueError, match="num_envs is 3, but the list has 2 callables"):
        make((CountingEnv for _ in range(2)), 3)
    with pytest.raises(TypeError, match="unexpected option 'num_worker'.*Did you mean 'num_workers'"):
        make((CountingEnv for _ in range(2)), num_worker=1)


class OldEnv(CountingEnv):
    def reset(self):
        return super().reset()[0]


class OldStep(CountingEnv):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class Outer(gymnasium.Wrapper):
    """Passes on what it gets."""


class NoOptions(gymnasium.Wrapper):
    def reset(self, *, seed=None):
        return self.env.reset(seed=seed)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (OldEnv, "OldEnv"),
        (lambda: Outer(OldEnv()), "OldEnv"),
        (lambda: NoOptions(CountingEnv()), "NoOptions"),
    ],
)
def test_a_reset_that_takes_no_seed_or_options_names_the_way_out(make, backend, env, named):
    envs = make(env, 2, backend=backend)
    with pytest.raises(
        jaxvec.EnvError, match=rf"(?s){named}.reset has to take.*seed=None, options=None.*shimmy"
    ) as caught:
        envs.reset(seed=0)
    assert caught.value.operation == "reset"


def test_a_type_error_of_another_kind_says_nothing_of_it(make):
    class Env(CountingEnv):
        def reset(self, *, seed=None, options=None):
            return 1 + "1"

    with pytest.raises(jaxvec.EnvError) as caught:
        make(Env, 1).reset()
    assert "shimmy" not in str(caught.value)


def test_a_step_of_four_values_names_the_way_out(make, backend):
    envs = make(OldStep, 1, backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match="got a tuple of 4.*shimmy.GymV21"):
        envs.step([0])


def test_an_envs_own_argument_may_look_like_an_option(make):
    class Env(CountingEnv):
        def __init__(self, num_worker):
            super().__init__()
            self.mine = num_worker

    assert make(Env, 1, num_worker=3).get_attr("mine") == (3,)


def test_an_id_whose_package_is_not_imported_says_which_to_name():
    with pytest.raises(
        gymnasium.error.NamespaceNotFound, match=r'jaxvec.make\("the_package:Nowhere/Env-v0", …\)'
    ):
        jaxvec.make("Nowhere/Env-v0", 1)
    if "ale_py" not in sys.modules:
        with pytest.raises(
            gymnasium.error.NamespaceNotFound, match=r'jaxvec.make\("ale_py:ALE/Pong-v5", …\)'
        ):
            jaxvec.make("ALE/Pong-v5", 1)


def test_a_module_that_workers_can_not_import_is_explained(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("""
from support import disasters
import jaxvec
from jaxvec.testing import CountingEnv

class Env(CountingEnv):
    pass

try:
    jaxvec.make(Env, 1)
except jaxvec.EnvError as error:
    said = str(error)
""")
    said = runpy.run_path(str(path), run_name="another_name")["said"]
    assert "No module named 'another_name'" in said
    assert "pickled by reference to module 'another_name', which this worker can't import" in said


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_program_that_does_not_know_its_interpreter_says_so(monkeypatch, method):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(
        jaxvec.WorkerDiedError, match=r"worker 0 .*not be started: .* sys.executable is empty"
    ):
        jaxvec.make(CountingEnv, 1, workers=jaxvec.Workers(start_method=method))


def test_only_infos_that_say_something_are_asked_for(make, backend, monkeypatch):
    class Rare(CountingEnv):
        def reset(self, **kwargs):
            obs, _ = super().reset(**kwargs)
            return obs, {"begun": self.action} if self.action > 8 else {}

        def step(self, action):
            self.action = int(action)
            obs, reward, *_ = super().step(action)
            return obs, reward, bool(action > 6), False, {"said": int(action)} if action % 2 else {}

        action = 0

    num_workers = 2 if backend == "process" else 1
    envs = make(Rare, 5, num_workers=num_workers, backend=backend, autoreset_mode="SAME_STEP")
    envs.reset(seed=0)
    asked = []
    request = type(probe.workers(envs)).request

    def spy(self, name, arguments, **kwargs):
        asked.extend(arguments(0, 5))
        return request(self, name, arguments, **kwargs)

    monkeypatch.setattr(type(probe.workers(envs)), "request", spy)
    envs.step([0, 5, 8, 0, 3])  # env 2 ends an episode, and nothing is said of it
    assert envs.infos() == ({}, {"said": 5}, {"final_info": {}}, {}, {"said": 3})
    assert envs.infos([4, 2]) == ({"said": 3}, {"final_info": {}})
    assert envs.infos([0, 2]) == ({}, {"final_info": {}})
    assert asked == [[1, 4], [4]]
    assert envs.pool.env_calls.known_infos() is None
    envs.step([7, 9, 10, 8, 0])
    assert envs.infos() == (
        {"final_info": {"said": 7}},
        {"begun": 9, "final_info": {"said": 9}},
        {"begun": 10, "final_info": {}},
        {"final_info": {}},
        {},
    )
    assert asked[2:] == [[0, 1, 2]]
    envs.step([2, 8, 2, 8, 2])
    assert envs.pool.env_calls.known_infos() == [{}, {"final_info": {}}] * 2 + [{}]
    assert asked[3:] == []


def test_config_overrides_are_of_their_thread():
    before = repr(jaxvec.config)
    inside, ended = threading.Event(), threading.Event()

    def override_meanwhile():
        with jaxvec.config.override(transport="io_callback"):
            inside.set()
            assert ended.wait(disasters.PATIENCE)
            return jaxvec.config.transport

    with ThreadPoolExecutor(1) as threads:
        with jaxvec.config.override(dispatch="portable"):
            other = threads.submit(override_meanwhile)
            assert inside.wait(disasters.PATIENCE)
            assert jaxvec.config.transport == "auto"
        ended.set()
        assert other.result() == "io_callback"
        assert threads.submit(repr, jaxvec.config).result() == before
    assert repr(jaxvec.config) == before
