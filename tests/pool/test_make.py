"""`jaxvec.make`: every kind of env and argument, and what `VectorEnv` says of itself."""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from functools import partial
from pathlib import Path
from unittest import mock

import gymnasium
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from support.probe import Interpreter, PoolConfig
from support.scripts import run_python

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv


def run_quietly(source):
    done = run_python("-c", textwrap.dedent(source))
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


def test_workers_look_for_jaxvec_where_it_is(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    _, env = Interpreter().command({})
    *_, here = env["PYTHONPATH"].split(os.pathsep)
    assert Path(jaxvec.__file__) == Path(here) / "jaxvec" / "__init__.py"


def test_an_id_that_a_worker_does_not_know_names_the_module(make):
    gymnasium.register("Here-v0", entry_point=CountingEnv)
    try:
        with pytest.raises(jaxvec.EnvError, match=r'gymnasium.make\("MODULE:MyEnv-v0"\)'):
            name = "Her"  # an id that is composed in the worker; one that the function names is known there
            make(lambda: gymnasium.make(f"{name}e-v0"), 1, workers=jaxvec.Workers(start_method="spawn"))
    finally:
        del gymnasium.registry["Here-v0"]


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
            from jaxvec.compat.gymnasium import vector_entry_point
            spec = gymnasium.spec("Mine-v0")
            spec.vector_entry_point = vector_entry_point(spec)
            assert gymnasium.make_vec("Mine-v0", 1).call("answer") == (42,)
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
    done = run_python(str(script), cwd=tmp_path, env={**os.environ, "PYTHONPATH": root})
    assert (done.stdout, done.stderr) == ("main runs\n(42, 42) [3 4]\n", "")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_envs_of_the_script_in_a_multiprocessing_child(tmp_path, method):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing, jaxvec
            from concurrent.futures import ProcessPoolExecutor
            from jaxvec.testing import CountingEnv

            class Full(Exception):
                pass

            class Mine(CountingEnv):
                def step(self, action):
                    if action == 9:
                        raise Full(action)
                    return super().step(action)

            def run():
                with jaxvec.make(Mine, 2, states=4) as envs:
                    envs.reset(seed=0)
                    envs.restore(envs.unpack_states(envs.pack_states()))
                    obs = envs.step([3, 4]).obs
                    try:
                        envs.step([3, 9])
                    except jaxvec.EnvError as error:
                        return obs[:, 3].tolist(), type(error.__cause__) is Full

            if __name__ == "__main__":
                with ProcessPoolExecutor(1, multiprocessing.get_context({method!r})) as executor:
                    print(executor.submit(run).result())
            """
        )
    )
    done = run_python(str(script))
    assert (done.stdout, done.stderr) == ("([3, 4], True)\n", "")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_program_that_ignores_sigchld(method):
    """As daemons do, so that they need not reap their children."""
    run_quietly(
        f"""
        import signal, subprocess
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        import jaxvec
        from jaxvec.testing import CountingEnv

        class Env(CountingEnv):
            def code(self):
                return subprocess.call(["false"])

        for _ in range(2):
            with jaxvec.make(Env, 2, states=2, workers=jaxvec.Workers(start_method={method!r})) as envs:
                envs.reset(seed=0)
                envs.save()
                assert envs.call("code") == (1, 1)
        """
    )


def test_no_folder_for_temporary_files_is_needed():
    run_quietly(
        """
        import tempfile
        def refuse():
            raise FileNotFoundError("the file system is read-only")
        tempfile.gettempdir = refuse
        import jax, jaxvec
        from jaxvec.testing import CountingEnv

        with jaxvec.make(CountingEnv, 2, states=1) as envs:
            handle, _ = jaxvec.reset(envs, seed=0)
            jax.jit(jaxvec.step)(handle, jax.numpy.array([3, 4]))
        """
    )


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
    done = run_python("-c", textwrap.dedent(source), str(tmp_path))
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
    (("CartPole-v1",), {}, ValueError, "num_envs is missing"),
    (([CountingEnv], 2), {}, ValueError, "num_envs is 2, but the list has 1"),
    (([],), {}, ValueError, "num_envs must be"),
    ((3, 2), {}, TypeError, "got int for env 0"),
    ((CountingEnv(), 2), {}, TypeError, "pass a function that makes the env"),
    ((["CartPole-v1"] * 2,), {}, TypeError, r"write functools.partial\(gymnasium.make, 'CartPole-v1'\)"),
    ((lambda a, b: CountingEnv(), 2), {}, TypeError, r"requires the arguments \['a', 'b'\]"),
    ((CountingEnv, 2), {"backend": "thread"}, ValueError, 'backend must be "process", "serial"'),
    (
        (CountingEnv, 2),
        {"autoreset_mode": "SOMETIMES"},
        ValueError,
        "SAME_STEP, NEXT_STEP, DISABLED, EPISODIC",
    ),
    ((CountingEnv, 2), {"num_workers": 3}, ValueError, r"from 1 to num_envs \(2\), not 3"),
    ((CountingEnv, 2), {"num_workers": True}, ValueError, "num_workers must be an integer of at least 1"),
    ((CountingEnv, 2), {"workers": 2}, TypeError, "workers must be a jaxvec.Workers, not 2"),
    ((CountingEnv, 2), {"timeouts": 5}, TypeError, "timeouts must be a jaxvec.Timeouts, not 5"),
    ((CountingEnv, 2), {"info": "lives"}, TypeError, r"use \['lives'\]"),
    ((CountingEnv, 2), {"info": {"steps": int, 1: int}}, TypeError, "info: the key 1 is no str"),
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
    ((CountingEnv, 2), {"autoreset": True}, TypeError, "Pass autoreset_mode="),
    (("CartPole-v1", 2), {"auto_reset": True}, TypeError, "Pass autoreset_mode="),
    ((CountingEnv, 2), {"step_timeout": 3}, TypeError, "Pass timeouts=jaxvec.Timeouts"),
    ((CountingEnv, 2), {"start_method": "fork"}, TypeError, "Workers\\(start_method="),
    ((CountingEnv, 2), {"daemon": True}, TypeError, "Remove it: workers end with the program"),
]


@pytest.mark.parametrize(("args", "kwargs", "kind", "text"), BAD)
def test_bad_arguments_say_what_to_do(args, kwargs, kind, text):
    with pytest.raises(kind, match=text):
        jaxvec.make(*args, **kwargs)


class Holder(CountingEnv):
    """An env that keeps values, as a list of what they are in its process."""

    def __init__(self, *values, **others):
        super().__init__()
        self.values = [*values, *others.values()]

    def kinds(self, *more):
        return "jax" in sys.modules, [(type(each).__name__, each) for each in [*self.values, *more]]


def test_jax_arrays_in_constructors_are_numpys_in_workers(make):
    table, key, half = jnp.arange(6).reshape(2, 3), jax.random.key(7), jnp.ones(2, jnp.bfloat16)
    tree = {"a": [table, table], "scalar": jnp.float32(2.5)}

    def closure(default=table):
        return Holder(default, tree["a"][0], tree["a"][1], tree["scalar"], key, half)

    data = np.asarray(jax.random.key_data(key))
    values = [table, table, table, np.float32(2.5), data, half]
    for env, options, expected in (
        (closure, {}, values),
        (partial(Holder, table, other=key), {}, [table, data]),
        (Holder, {"table": table, "tree": [half]}, [table, [half]]),
        (Holder, {"env_configs": [{"table": table}, {"key": key}]}, [table]),
    ):
        envs = make(env, 2, num_workers=2, **options)
        imported, kinds = envs.call("kinds", table, indices=[0])[0]
        assert not imported
        for (kind, value), other in zip(kinds, [*expected, table], strict=True):
            kind, value, other = ("ndarray", value[0], other[0]) if kind == "list" else (kind, value, other)
            assert kind == "ndarray"
            np.testing.assert_array_equal(np.asarray(value), np.asarray(other))
            assert value.dtype == np.asarray(other).dtype
    assert envs.map(lambda env: env.values[0].tolist(), indices=[1]) == (data.tolist(),)
    envs.set_attr("values", [[table], [table]])
    assert envs.map(lambda env: type(env.values[0]).__name__) == ("ndarray",) * 2
    envs.reset(options={"table": table})
    assert not envs.map(lambda env: "jax" in sys.modules)[0]


@pytest.mark.parametrize(
    ("keyword", "note"),
    [("sizes", "did you mean max_sizes?"), ("reset_option", ""), ("nonsense", "to the env")],
)
def test_a_keyword_that_the_env_refuses_gets_a_note(backend, keyword, note):
    def env(length=3, **kwargs):
        return CountingEnv(length, **kwargs)

    with pytest.raises((jaxvec.EnvError, TypeError)) as caught:
        jaxvec.make(env, 1, backend=backend, **{keyword: 1})
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert note in text
    assert keyword in text


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


def test_raw_infos(make, backend):
    envs = make(CountingEnv, 3, backend=backend)
    envs.reset(seed=5, options={"level": 2})
    assert envs.infos() == tuple({"seed": 5 + i, "options": {"level": 2}} for i in range(3))
    envs.step(np.zeros(3, int))
    assert envs.infos() == ({"steps": 1},) * 3
    assert envs.infos([2, 0]) == ({"steps": 1},) * 2


@pytest.mark.parametrize("per_instance", [None, 2])
def test_infos_stay_as_they_were_when_an_env_reuses_its_own(make, backend, per_instance):
    class Reusing(CountingEnv):
        def __init__(self):
            super().__init__()
            self.info = {"steps": [0]}

        def step(self, action):
            self.info["steps"][0] += 1
            return *super().step(action)[:4], self.info

    env_fn = Reusing if per_instance is None else lambda: SyncVectorEnv([Reusing] * 2)
    envs = make(env_fn, 2, backend=backend, envs_per_instance=per_instance)
    envs.reset(seed=0)
    found = []
    for _ in range(3):
        envs.step([0, 0])
        found.append(envs.infos())
    assert [[list(info["steps"]) for info in infos] for infos in found] == [[[n]] * 2 for n in (1, 2, 3)]


def test_counts_may_be_numbers_of_numpy(make):
    one, two, four = np.int64(1), np.int32(2), np.uint8(4)
    envs = make(CountingEnv, four, num_workers=two, batch_size=two, recv_order="sent")
    assert (envs.num_envs, envs.num_workers, envs.batch_size) == (4, 2, 2)
    assert all(type(each) is int for each in (envs.num_envs, envs.num_workers, envs.batch_size))
    workers = jaxvec.Workers(recycle=jaxvec.Recycle(steps=four))
    envs = make(CountingEnv, two, states=four, num_workers=one, workers=workers)
    envs.reset(seed=0)
    assert len(envs.save().ids) == 2
    with pytest.raises(ValueError, match="num_envs must be an integer of at least 1, not np.int64"):
        make(CountingEnv, np.int64(0))


def test_seeds_reach_the_envs(make, backend):
    envs = make(CountingEnv, 3, backend=backend)

    def seeds():
        return [info["seed"] for info in envs.infos()]

    envs.reset(seed=10)
    assert seeds() == [10, 11, 12]
    envs.reset(seed=[5, None, 2**40])
    assert seeds() == [5, -1, 2**40]
    large = [2**191 - 1, None, 2**63]
    envs.reset(seed=large)
    assert seeds() == [2**191 - 1, -1, 2**63]
    jax.block_until_ready(jax.jit(lambda: jaxvec.reset(envs, seed=large))())
    assert seeds() == [2**191 - 1, -1, 2**63]
    envs.reset()
    assert seeds() == [-1, -1, -1]
    jaxvec.reset(envs, seed=2**40)
    assert seeds() == [2**40, 2**40 + 1, 2**40 + 2]
    jax.block_until_ready(jax.jit(lambda: jaxvec.reset(envs, seed=2**40))())
    assert seeds() == [2**40, 2**40 + 1, 2**40 + 2]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.block_until_ready(jax.jit(lambda s: jaxvec.reset(envs, seed=s))(7))
    assert seeds() == [7, 8, 9]
    jax.block_until_ready(jax.jit(lambda s: jaxvec.reset(envs, seed=s))(np.array([4, 1, 9])))
    assert seeds() == [4, 1, 9]
    jax.block_until_ready(jax.jit(lambda: jaxvec.reset(envs, seed=[9, 0, 2**31 - 1]))())
    assert seeds() == [9, 0, 2**31 - 1]

    of_keys = []
    for key in (jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(4)):
        jaxvec.reset(envs, seed=key)
        eager = seeds()
        jax.block_until_ready(jax.jit(lambda key: jaxvec.reset(envs, seed=key))(key))
        assert seeds() == eager
        assert all(0 <= seed < 2**31 for seed in eager)
        of_keys.append(eager)
    assert of_keys[0] == of_keys[1]
    assert len({*of_keys[0], *of_keys[2]}) == 6


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("implementation", "num_envs"),
    [("threefry2x32", 2), ("threefry2x32", 4), ("rbg", 2), ("rbg", 4), ("unsafe_rbg", 4)],
)
def test_old_style_keys_of_the_default_implementation(make, implementation, num_envs, jit):
    """Their data are two or four words, so they can look like seeds."""
    envs = make(CountingEnv, num_envs, info={"seed": int}, backend="serial")

    def seeds(seed):
        def reset(seed):
            return jaxvec.reset(envs, seed=seed)[1].info["seed"]

        return (jax.jit(reset) if jit else reset)(seed).tolist()

    with jax.default_prng_impl(implementation):
        key = jax.random.key(3)
        old_style = jax.random.PRNGKey(3)
        assert len(set(seeds(key))) == num_envs
        if old_style.shape == (num_envs,):
            with pytest.raises(TypeError, match=r"old-style key or . seeds; pass jax\.random\.key.*int32"):
                seeds(old_style)
        else:
            assert seeds(old_style) == seeds(key)
        for batch in (jax.random.split(key, num_envs), jax.random.split(old_style, num_envs)):
            with pytest.raises(TypeError, match=r"batch of keys.*pass one key"):
                seeds(batch)
        assert seeds(jnp.arange(num_envs)) == list(range(num_envs))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"seed": -1}, "seed -1 of env 0"),
        ({"seed": 2**191 - 1}, r"of env 1 is out of range .*seed % 2\*\*191"),
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
            "bfloat16": ml_dtypes.bfloat16(reward),
            "int4": ml_dtypes.int4(reward),
        }[self.kind]
        return obs, value, *rest


@pytest.mark.parametrize(
    "kind", ["float", "int", "zero-dimensional", "shape (1,)", "NumPy scalar", "bool", "bfloat16", "int4"]
)
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


@pytest.mark.parametrize(("dtype", "expected"), [(np.float16, np.float16), (np.int32, np.float32)])
def test_rewards_are_floats_of_their_space(make, backend, dtype, expected):
    class Env(CountingEnv):
        reward_space = spaces.Box(0, 9, (), dtype)

        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, reward / 2, *rest

    envs = make(Env, 1, backend=backend)
    envs.reset()
    timestep = envs.step([0])
    assert (timestep.reward.dtype, timestep.reward.tolist()) == (expected, [0.5])
    assert timestep.info["episode_return"].tolist() == [0.5]


class TeamEnv(gymnasium.Env):
    """Returns a list of rewards without a `reward_space`, like RWARE and Level-Based Foraging."""

    n_agents = 2
    observation_space = spaces.Tuple([spaces.Box(0, 9, (1,), np.float32)] * 2)
    action_space = spaces.Tuple([spaces.Discrete(5)] * 2)

    def __init__(self, scalar=False):
        self.scalar = scalar

    def reset(self, *, seed=None, options=None):
        return (np.zeros(1, np.float32),) * 2, {}

    def step(self, action):
        reward = [float(one) for one in action]
        return (np.ones(1, np.float32),) * 2, sum(reward) if self.scalar else reward, False, False, {}


def test_one_reward_per_agent_is_seen_by_make(make, backend):
    envs = make(TeamEnv, 3, backend=backend)
    assert envs.reward_space == spaces.Box(-np.inf, np.inf, (2,), np.float64)
    handle, timestep = jaxvec.reset(envs)
    assert timestep.reward.shape == (3, 2)
    actions = (np.array([1, 2, 3]), np.array([4, 0, 1]))
    handle, _ = jaxvec.step(handle, actions)
    _, timestep = jaxvec.step(handle, actions)
    assert timestep.reward.tolist() == [[1, 4], [2, 0], [3, 1]]
    assert timestep.info["episode_return"].tolist() == [[2, 8], [4, 0], [6, 2]]


def test_a_shared_reward_of_agents_is_declared(make):
    envs = make(TeamEnv, 2, scalar=True)
    envs.reset()
    with pytest.raises(
        jaxvec.EnvDataError,
        match=r"expected shape \(2,\), got \(\); declare .* reward_space, .* in a wrapper",
    ):
        envs.step((np.zeros(2, int), np.zeros(2, int)))

    class Shared(TeamEnv):
        reward_space = spaces.Box(-np.inf, np.inf, (), np.float64)

    envs = make(Shared, 2, scalar=True)
    envs.reset()
    assert envs.step((np.ones(2, int), np.ones(2, int))).reward.tolist() == [2, 2]


def test_public_names_are_there_and_load_jax_lazily():
    source = """
    import sys, jaxvec, jaxvec.testing
    jaxvec.TimeStep, jaxvec.EnvError, jaxvec.VectorEnv
    assert "jax" not in sys.modules
    for name in jaxvec.__all__:
        assert getattr(jaxvec, name) is not None
    assert "jax" in sys.modules
    modules = ["adapters", "backends", "compat", "datasets", "logging", "normalize", "ports"]
    modules += ["spaces", "testing"]
    assert dir(jaxvec) == sorted([*jaxvec.__all__, *modules])
    assert jaxvec.compat.__name__ == "jaxvec.compat"
    hint = "use jaxvec.make(env, num_envs)"
    for name, text in ("nonsense", "'nonsense'"), ("make_vec", hint), ("SyncVectorEnv", hint):
        try:
            getattr(jaxvec, name)
        except AttributeError as error:
            assert text in str(error)
        else:
            raise AssertionError(name)
    """
    run_quietly(source)


def test_pool_config_has_the_options_types_and_defaults_of_make():
    ours, theirs = (inspect.signature(each).parameters for each in (jaxvec.make, PoolConfig))
    others = ("env", "num_envs", "states", "device", "env_kwargs")
    expected = {name: option for name, option in ours.items() if name not in others}
    # The record is below the class `Backend`, which takes it.
    expected["backend"] = expected["backend"].replace(annotation="Any")
    assert [option for name, option in theirs.items() if name not in ("states", "settings")] == [
        *expected.values()
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
    with pytest.raises(ValueError, match="got 1 values for 2 envs"):
        envs.set_attr("index", [1], indices=[0, 1])


def test_frames_of_one_shape_are_one_array(make, backend):
    frames = make(Painter, 3, backend=backend).render()
    assert frames.shape == (3, 4, 2, 3)
    assert frames[:, 0, 0, 0].tolist() == [0, 1, 2]
    some = make(Painter, 3, backend=backend)
    np.testing.assert_array_equal(some.render(indices=[2, 0]), frames[[2, 0]])
    frames = make(Painter, 3, backend=backend, sizes=(4, 5, 6)).render()
    assert [frame.shape for frame in frames] == [(4, 2, 3), (5, 2, 3), (6, 2, 3)]


@pytest.mark.filterwarnings("ignore:.*render:UserWarning")  # Gymnasium's, for the serial backend
def test_render_without_render_mode_raises(make, backend):
    envs = make("CartPole-v1", 2, backend=backend)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match='envs with a render_mode; .*render_mode="rgb_array"'):
        envs.render()
    envs.step([0, 1])


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


class Scored(CountingEnv):
    """An env whose info has a `score` of its own at its reset, and others at its steps."""

    def __init__(self, *scores):
        super().__init__(len(scores) - 1)
        self.scores = scores

    def _info(self):
        score = self.scores[self._episode_steps]
        return {} if score is Ellipsis else {"score": score, "stats": {"score": score}}

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], self._info()

    def step(self, action):
        return *super().step(action)[:4], self._info()


class ScoredBatch(gymnasium.vector.VectorEnv):
    """Env 0 has always the first score, env 1 those of `Scored`."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    num_envs = 2
    single_observation_space = single_action_space = spaces.Discrete(5)

    def __init__(self, *scores, dtype=None):
        self.scores, self.dtype = scores, dtype

    def _result(self):
        pair = [self.scores[0], self.scores[self._steps]]
        return np.zeros(2, int), {"score": np.array(pair, self.dtype)}

    def reset(self, *, seed=None, options=None):
        self._steps = 0
        return self._result()

    def step(self, actions):
        self._steps += 1
        obs, info = self._result()
        return obs, np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), info


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        ((0, 1, 0.5), "{'score': float}"),
        ((3, np.float32(0.5)), "{'score': float}"),
        ((False, 0.5), "{'score': float}"),
        ((True, 2), "{'score': int}"),
        ((np.int64(0), np.inf), "{'score': float}"),
        ((np.zeros(2, int), np.array([1, 0.5])), "{'score': (float, (2,))}"),
    ],
    ids=str,
)
def test_a_fraction_for_a_learnt_integer_names_the_declaration(make, backend, scores, line):
    envs = make(lambda: Scored(*scores), 2, info=["score"], backend=backend)
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match=re.escape(f"that has all of its values: info={line}")):
        for _ in scores:
            envs.step(np.zeros(2, int))
    envs = make(lambda: Scored(*scores), 2, info=eval(line, {"float": float, "int": int}), backend=backend)
    envs.reset()
    for score in scores[1:]:
        timestep = envs.step(np.zeros(2, int))
        final = timestep.info["final_info"]["score"] if timestep.done.all() else timestep.info["score"]
        np.testing.assert_array_equal(final, [score] * 2)


def test_a_fraction_in_a_nested_or_batched_info_names_the_declaration(make):
    envs = make(lambda: Scored(0, 0.5), 1, info=["stats"], backend="serial")
    envs.reset()
    with pytest.raises(jaxvec.EnvDataError, match=r"info=\{'stats': \{'score': float\}\}$"):
        envs.step(np.zeros(1, int))
    for dtype in (None, object):
        envs = make(
            lambda dtype=dtype: ScoredBatch(0, 0.5, dtype=dtype), 2, info=["score"], envs_per_instance=2
        )
        envs.reset()
        with pytest.raises(jaxvec.EnvDataError, match=r"info=\{'score': float\}$") as caught:
            envs.step(np.zeros(2, int))
        assert caught.value.env_id == 1


@pytest.mark.parametrize("scores", [(0, 3.0, np.float64(2**30)), (False, 1, 0.0), (5, True)], ids=str)
def test_exact_numbers_of_other_types_fit_a_learnt_info(make, backend, scores):
    envs = make(lambda: Scored(*scores, 0), 1, info=["score"], backend=backend)
    dtype = envs.reset().info["score"].dtype
    assert dtype == (bool if scores[0] is False else np.int32)
    for score in scores[1:]:
        assert envs.step(np.zeros(1, int)).info["score"].tolist() == [score]


def test_make_warns_of_types_that_it_learnt_from_integers(make, caplog):
    with caplog.at_level("WARNING", "jaxvec"):
        make(lambda: Scored(np.float32(0), 0), 1, info=["score"])
        make(lambda: Scored(0, 0), 1, info={"score": int})
        assert not caplog.records
        make(lambda: Scored([0, False], 0), 1, info=["score", "stats"])
    assert "integers or bools at ['score'], ['stats']['score']" in caplog.text


@pytest.mark.parametrize(
    "declaration",
    [int, (float, (2,)), {"a": int}, spaces.Text(5), spaces.Sequence(spaces.Text(5)), spaces.Discrete(3)],
    ids=str,
)
def test_none_is_a_missing_info(make, backend, declaration):
    sizes = {"score": 4} if isinstance(declaration, spaces.Sequence) else None
    for last in (None, ...):
        options = {"info": {"score": declaration}, "max_sizes": sizes, "backend": backend}
        envs = make(lambda last=last: Scored(None, None, last), 2, **options)
        timesteps = [envs.reset(), *(envs.step(np.zeros(2, int)) for _ in range(2))]
        for timestep in timesteps:
            assert not timestep.info["_score"].any()
            assert not timestep.info["final_info"]["_score"].any()
            assert all(not leaf.any() for leaf in jax.tree.leaves(timestep.info["score"]))


def test_a_changed_space_of_the_pool_is_not_that_of_the_envs(make):
    class DyingEnv(NestedEnv):
        def step(self, action):
            if self._steps == 2:
                os._exit(1)
            return super().step(action)

    def change(envs):
        envs.single_observation_space.spaces["half"].dtype = np.dtype(np.float64)
        envs.single_action_space.spaces["turn"] = spaces.Discrete(2)
        envs.reset(seed=0)
        action = envs.action_space.sample()
        return [envs.step(action) for _ in range(3)]

    change(make(NestedEnv, 1, backend="serial", check="strict"))
    # The new worker's envs are compared with the old ones.
    assert change(make(DyingEnv, 1, on_fault="restart"))[-1].info["fault"].all()


# --- Envs that answer, or refuse, questions that they were not made for ------------------------------------


class Strange(CountingEnv):
    """An env that notes each name that it is asked for and does not have."""

    asked: list = []  # of the process
    answer = None

    def __getattr__(self, name):
        type(self).asked.append(name)
        if self.answer is None:
            return mock.MagicMock()
        raise self.answer(name)


STRANGE_OPTIONS = {
    "process": {},
    "serial": {"backend": "serial"},
    "states": {"states": 3},
    "spare": {"spare_envs": 1},
    "strict": {"check": "strict"},
    "restart": {"on_fault": "restart"},
    "recycled": {"workers": jaxvec.Workers(recycle=jaxvec.Recycle(steps=3))},
}


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("answer", [None, KeyError, RuntimeError])
@pytest.mark.parametrize("options", STRANGE_OPTIONS.values(), ids=STRANGE_OPTIONS)
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: gymnasium.Wrapper(TimeLimit(env, 7))])
def test_envs_are_not_asked_for_undeclared_attributes(make, tmp_path, monkeypatch, answer, options, wrap):
    monkeypatch.chdir(tmp_path)

    class Env(Strange):
        pass

    def play(env):
        envs = make(lambda: wrap(env(3)), 2, num_workers=1, **options)
        timesteps = [envs.reset(seed=0)]
        for _ in range(2):
            state = envs.save() if "states" in options else None
            timesteps += [envs.step(np.array([1, 2])) for _ in range(4)]
            if state is not None:
                timesteps.append(envs.restore(state))
        if env is Env:
            assert envs.map(lambda env: env.unwrapped.asked, indices=[0]) == ([],)
        envs.close()
        return timesteps

    Env.answer, Env.asked = answer, []
    jax.tree.map(np.testing.assert_array_equal, play(Env), play(CountingEnv))


def test_a_reward_space_is_found_wherever_it_is_declared(make, backend):
    class OfObject(CountingEnv):
        def __init__(self):
            super().__init__()
            self.reward_space = spaces.Box(-9, 9, (2,), np.float64)

        def step(self, action):
            obs, reward, *others = super().step(action)
            return obs, np.array([reward, action], float), *others

    class OfClass(OfObject):
        def __init__(self):
            CountingEnv.__init__(self)

        reward_space = property(lambda self: spaces.Box(-9, 9, (2,), np.float64))

    class OfWrapper(gymnasium.Wrapper):
        __slots__ = ("reward_space",)

        def __init__(self, env):
            super().__init__(env)
            self.reward_space = spaces.Box(-9, 9, (3,), np.float64)

        def step(self, action):
            obs, reward, *others = super().step(action)
            return obs, np.append(reward, 5.0), *others

    for env, rewards in (
        (OfObject, [1, 2]),
        (OfClass, [1, 2]),
        (lambda: TimeLimit(OfClass(), 9), [1, 2]),
        (lambda: TimeLimit(OfWrapper(gymnasium.Wrapper(OfObject())), 9), [1, 2, 5]),
    ):
        envs = make(env, 1, backend=backend)
        envs.reset()
        assert envs.step(np.array([2])).reward.tolist() == [rewards]
