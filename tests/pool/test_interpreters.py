"""Workers in other interpreters: envs are the same as there, and errors name the interpreter."""

import functools
import glob
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from support.probe import _util, foreign_env

import jaxvec
from jaxvec.testing import CountingEnv

STEPS, NUM_ENVS = 300, 3

ORACLE = """
import importlib, json, sys
import numpy as np

library, name, steps, num_envs, is_box = json.loads(sys.argv[1])
make = importlib.import_module(library).make

def reset(env, seed=None):
    try:
        result = env.reset() if seed is None else env.reset(seed=seed)
    except TypeError:  # gym 0.21
        env.seed(seed)
        result = env.reset()
    return result[0] if isinstance(result, tuple) else result

rows = []
for index in range(num_envs):
    env = make(name)
    rows.append([[reset(env, index).tolist(), 0.0, False, False]])
    for step in range(steps):
        action = np.array([np.sin(step + index)], np.float32) if is_box else (step // 3 + index) % 2
        obs, reward, *ends, info = env.step(action)
        if len(ends) == 1:
            truncated = bool(info.get("TimeLimit.truncated", False))
            ends = [ends[0] and not truncated, truncated]
        if any(ends):
            obs = reset(env)
        rows[-1].append([obs.tolist(), float(reward), *map(bool, ends)])
print(json.dumps(rows))
"""


def play(name, python, **options):
    """Steps envs in one program; returns the rows of `ORACLE`, as arrays."""
    workers = jaxvec.Workers(python=python, **options)
    with jaxvec.make(name, NUM_ENVS, num_workers=2, workers=workers) as envs:
        is_box = isinstance(envs.single_action_space, spaces.Box)

        @jax.jit
        def rollout(handle):
            def body(handle, step):
                index = jnp.arange(NUM_ENVS)
                action = jnp.sin(step + index)[:, None] if is_box else (step // 3 + index) % 2
                return jaxvec.step(handle, action)

            return jax.lax.scan(body, handle, jnp.arange(STEPS))[1]

        handle, first = jaxvec.reset(envs, seed=0)
        rest = rollout(handle)
        return [np.concatenate([a[None], b]).swapaxes(0, 1) for a, b in zip(first[:4], rest[:4], strict=True)]


def oracle(python, library, name, is_box):
    arguments = json.dumps([library, name, STEPS, NUM_ENVS, is_box])
    run = subprocess.run([python, "-c", ORACLE, arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    return [np.array([[row[part] for row in one] for one in rows]) for part in range(4)]


def assert_equal_rows(found, expected):
    for one, other in zip(found, expected, strict=True):
        if one.dtype == np.float32:
            # Actions are computed by XLA here, and by NumPy there.
            np.testing.assert_allclose(one, other.astype(np.float32), rtol=2e-4, atol=2e-4)
        else:
            np.testing.assert_array_equal(one, other)
    assert found[2].any() or found[3].any(), "no episode ended"


# ----------------------------------------------------------------------------------------------------------
# Interpreters, made without a package index: of links to the packages of this one
# ----------------------------------------------------------------------------------------------------------


@functools.cache
def linked(folder, packages, gymnasium_version):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    (site,) = glob.glob(f"{folder}/lib/python*/site-packages")
    for package in packages:
        module = Path(sys.modules[package].__file__).parent
        names = [module.name, f"{package}.libs"]
        if package == "numpy":
            names += [path.name for path in module.parent.glob("numpy-*.dist-info")]
        for name in names:
            if (module.parent / name).exists():
                (Path(site) / name).symlink_to(module.parent / name)
    if "gymnasium" in packages:
        facts = Path(site) / f"gymnasium-{gymnasium_version}.dist-info" / "METADATA"
        facts.parent.mkdir()
        facts.write_text(f"Metadata-Version: 2.1\nName: gymnasium\nVersion: {gymnasium_version}\n")
    return f"{folder}/bin/python"


@pytest.fixture(scope="session")
def of_links(tmp_path_factory):
    base = tmp_path_factory.mktemp("linked")
    return lambda name, *packages, version="1.2.0": linked(str(base / name), packages, version)


@pytest.fixture(params=["this one", "without Gymnasium", "an old Gymnasium"])
def other(request, of_links):
    """An interpreter that has what jaxvec needs, lacks it, or has another Gymnasium for its envs alone."""
    if request.param == "this one":
        return sys.executable
    if request.param == "without Gymnasium":
        return of_links("bare", "numpy")
    return of_links("old", "numpy", "gymnasium", version="0.29.1")


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_steps_equal_those_of_the_env_itself(other, start_method):
    expected = oracle(sys.executable, "gymnasium", "CartPole-v1", False)
    found = play("CartPole-v1", other, start_method=start_method)
    assert_equal_rows(found, expected)


MODULE = """
import numpy as np
import gymnasium
from gymnasium import spaces

class Place(spaces.Box):  # a class that only this module has
    pass

class Walk(gymnasium.Env):
    def __init__(self, start=0):
        self.observation_space = Place(-100, 100, (2,), np.float32)
        self.action_space = spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Tuple([spaces.MultiBinary(2)])})
        self.start = start

    def reset(self, *, seed=None, options=None):
        self.place = self.start + (options or {}).get("by", 0)
        return np.full(2, self.place, np.float32), {"place": self.place}

    def step(self, action):
        self.place += int(action["b"]) + int(action["a"][0].sum())
        return np.full(2, self.place, np.float32), 1.0, False, False, {"place": self.place}
"""


@pytest.fixture
def walk(tmp_path, monkeypatch):
    (tmp_path / "walk_of_tests.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "walk_of_tests:Walk"


def test_an_entry_point_of_the_programs_folder(other, walk):
    workers = jaxvec.Workers(python=other)
    with jaxvec.make(
        walk, 2, num_workers=1, workers=workers, start=5, env_configs=[{}, {"start": 7}], info=["place"]
    ) as envs:
        assert type(envs.single_observation_space) is spaces.Box
        assert envs.single_action_space == spaces.Dict(
            {"b": spaces.Discrete(3), "a": spaces.Tuple([spaces.MultiBinary(2)])}
        )
        assert envs.reset(seed=0, options={"by": 1}).obs[:, 0].tolist() == [6, 8]
        timestep = envs.step({"b": np.array([2, 0]), "a": (np.array([[1, 1], [0, 1]]),)})
        assert timestep.info["place"].tolist() == [10, 9]
        assert envs.get_attr("place") == (10, 9)
        envs.set_attr("place", [1, 2])
        assert envs.get_attr("place") == (1, 2)
        envs.set_attr("added", np.arange(3))
        assert envs.get_attr("added")[1].tolist() == [0, 1, 2]
        assert envs.get_attr("observation_space")[0] == envs.single_observation_space
        with pytest.raises(jaxvec.EnvAttributeError, match="no env attribute 'plaice'"):
            envs.get_attr("plaice")


def test_a_spec_and_a_function(other):
    spec = gymnasium.spec("CartPole-v1")
    for env in (spec, CountingEnv, lambda: CountingEnv(3)):
        with jaxvec.make(env, 2, num_workers=1, workers=jaxvec.Workers(python=other)) as envs:
            assert envs.reset(seed=0).obs.shape == (2, 4)
    with jaxvec.make(spec, 1, workers=jaxvec.Workers(python=other)) as envs:
        assert envs.map(lambda env: env.unwrapped.spec.id) == ("CartPole-v1",)


def test_states_are_exact(other):
    with jaxvec.make("Pendulum-v1", 2, num_workers=1, workers=jaxvec.Workers(python=other), states=4) as envs:
        envs.reset(seed=0)
        state = envs.save()
        action = np.ones((2, 1), np.float32)
        steps = [envs.step(action).obs for _ in range(210)]  # with a reset by its own random numbers
        envs.restore(state)
        assert all(np.array_equal(envs.step(action).obs, obs) for obs in steps)


# ----------------------------------------------------------------------------------------------------------
# Errors
# ----------------------------------------------------------------------------------------------------------


def test_an_interpreter_that_cannot_run_workers_is_named(of_links, tmp_path):
    make = functools.partial(jaxvec.make, "CartPole-v1", 2)
    with pytest.raises(ValueError, match=r"python='/no/such/python'\): there is no executable"):
        jaxvec.Workers(python="/no/such/python")
    with pytest.raises(ValueError, match=r"python='.*false'\) is no interpreter that can run workers"):
        make(workers=jaxvec.Workers(python="false"))
    with pytest.raises(ValueError, match=r"/empty/bin/python'\) has no numpy; install it: .*python -m pip"):
        make(workers=jaxvec.Workers(python=of_links("empty")))
    with pytest.raises(ValueError, match=r"has gymnasium 0\.25\.0, but workers need 0\.26 or newer"):
        make(workers=jaxvec.Workers(python=of_links("older", "numpy", "gymnasium", version="0.25.0")))
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\necho \'{"Python": "3.8.1", "numpy": "1.21.0"}\'\n')
    old.chmod(0o755)
    with pytest.raises(ValueError, match=r"has Python 3\.8\.1, but workers need 3\.10 or newer"):
        make(workers=jaxvec.Workers(python=old))
    old.write_text('#!/bin/sh\necho \'{"Python": "3.11.2", "numpy": "1.26.4"}\'\n')
    with pytest.raises(ValueError, match=r"states .*need NumPy 2 .* has an older one"):
        make(workers=jaxvec.Workers(python=old), states=2)


def test_an_env_that_the_interpreter_lacks(other):
    make = functools.partial(jaxvec.make, num_envs=2, num_workers=1, workers=jaxvec.Workers(python=other))
    with pytest.raises(jaxvec.EnvError, match=r"no env 'Nothing-v0' in the interpreter .*python.*package:id"):
        make("Nothing-v0")
    with pytest.raises(
        jaxvec.EnvError, match=r"No module named 'no_such' \(in the interpreter .*pip install no_"
    ):
        make("no_such.module:Env")
    with pytest.raises(TypeError, match="Did you mean 'num_workers'"):
        make("CartPole-v1", num_worker=2)


def test_code_of_another_python_is_refused(monkeypatch):
    pickled = _util.dumps(lambda: CountingEnv(3))
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    with pytest.raises(
        TypeError, match=r'is code of Python 3\.\d+, but this process has 3\.99.*"module:attr'
    ):
        pickle.loads(pickled)


# ----------------------------------------------------------------------------------------------------------
# Spaces and envs of other libraries
# ----------------------------------------------------------------------------------------------------------

SPACES = [
    spaces.Box(-1, np.inf, (2, 3), np.float64),
    spaces.Box(0, 255, (4,), np.uint8),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([[2, 3]], dtype=np.int32),
    spaces.MultiDiscrete([2, 3], start=[1, -1]),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 2]),
    spaces.Dict(
        {"z": spaces.Discrete(2), "a": spaces.Tuple([spaces.Box(0, 1, ()), spaces.Text(4, charset="ab")])}
    ),
    spaces.Sequence(spaces.Discrete(2), stack=True),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    spaces.Graph(spaces.Box(0, 1, (2,)), None),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_is_the_same_after_its_description(space):
    copy = foreign_env.convert_space(space)
    assert copy == space
    assert copy.dtype == space.dtype
    if isinstance(space, spaces.Dict):
        assert list(copy) == list(space)


def test_an_unknown_space_is_named():
    class Odd(spaces.Space):
        pass

    with pytest.raises(TypeError, match=r"Odd is no space of Gymnasium or gym"):
        foreign_env.convert_space(object.__new__(type("Odd", (), {})))


class OldEnv:
    """An env of gym 0.21."""

    metadata = {"render.modes": ["rgb_array"]}
    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
    unwrapped = property(lambda self: self)

    def seed(self, seed):
        self.seeded = seed

    def reset(self):
        return np.zeros(1, np.float32)

    def step(self, action):
        return np.ones(1, np.float32), 1.0, action > 0, {"TimeLimit.truncated": True} if action > 1 else {}

    def render(self, mode="human"):
        return mode

    def close(self):
        self.closed = True


def test_resets_and_steps_of_gym_0_21_are_converted():
    env = foreign_env.ForeignEnv(OldEnv())
    obs, info = env.reset(seed=3)
    assert (obs.tolist(), info, env.seeded) == ([0.0], {}, 3)
    assert [env.step(action)[2:4] for action in (0, 1, 2)] == [(False, False), (True, False), (False, True)]
    assert env.render() == "rgb_array"
    env.close()
    assert env.closed
    with pytest.raises(TypeError, match="options"):
        env.reset(options={"a": 1})


# ----------------------------------------------------------------------------------------------------------
# Real packages that can't be installed beside JAX
# ----------------------------------------------------------------------------------------------------------

KINDS = {
    "gymnasium 0.29": ("gymnasium", ["gymnasium==0.29.1", "numpy<2"]),
    "gym 0.26": ("gym", ["gym==0.26.2", "numpy<2"]),
    # Its metadata and its setup.py are refused by newer tools.
    "gym 0.21": ("gym", ["numpy<2", "--no-build-isolation", "gym==0.21.0"]),
}
BUILDERS = ["pip==23.3.2", "setuptools==65.5.0", "wheel==0.38.4"]


@functools.cache
def installed(folder, *packages):
    python = f"{folder}/bin/python"
    steps = [[sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", "-q", *BUILDERS]]
    for command in (*steps, [python, "-m", "pip", "install", "-q", *packages]):
        run = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if run.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            return None, (run.stderr.strip().splitlines() or ["it failed"])[-1]
    return python, ""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_of_an_older_library(kind, tmp_path_factory):
    library, packages = KINDS[kind]
    python, problem = installed(str(tmp_path_factory.mktemp("installed") / "venv"), *packages)
    if python is None:
        pytest.skip(f"{kind} can't be installed here: {problem}")
    for name, is_box in (("CartPole-v1", False), ("Pendulum-v1", True)):
        assert_equal_rows(play(name, python), oracle(python, library, name, is_box))
