"""The classes and functions of a script in the `__main__` of its workers, as under Gymnasium's vector env."""

from pathlib import Path

import pytest
from support.scripts import run_python

HEAD = """
from __future__ import annotations
import collections, dataclasses, enum, multiprocessing, pickle, sys, typing
import gymnasium, numpy as np
import jaxvec

class Base(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}
"""

SCRIPT = """
SCALE = 1
Point = collections.namedtuple("Point", "x y")

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Config:
    size: int
    colour: Colour = Colour.RED
    parent: Config | None = None
    def scaled(self):
        return self.size * SCALE

class Pair(typing.NamedTuple):
    first: int
    second: Config

def square(x):
    return x * x

def put(queue):
    queue.put(Config(7))

class Env(Base):
    def typed(self, pair: Pair, array: np.ndarray, other: typing.Any) -> Config: ...
    def pickled(self):
        value = Config(3, parent=Config(4)), Pair(1, Config(2)), Point(1, 2), Colour.RED, square, Env, Config
        return pickle.loads(pickle.dumps(value)) == value
    def hints(self):
        return [sorted(typing.get_type_hints(each)) for each in (Env.typed, Config)]
    def pool(self, method):
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(square, [2, 3]), pool.map(Config, [1])[0].size
    def process(self):
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=put, args=(queue,))
        process.start()
        found = queue.get()
        process.join()
        return found == Config(7)
    def main(self):
        main = sys.modules["__main__"]
        spec = main.__spec__ and main.__spec__.name
        return main.__name__, main.__file__, main.__package__, spec, __name__, __file__, main.SCALE
    def config(self):
        return Config(5)

if __name__ == "__main__":
    if sys.argv[1] == "gymnasium":
        envs = gymnasium.vector.AsyncVectorEnv([Env], context="fork", daemon=False)
    else:
        envs = jaxvec.make(Env, 1, workers=jaxvec.Workers(start_method=sys.argv[1]))
    for name, *args in ["pickled"], ["hints"], ["pool", "fork"], ["pool", "spawn"], ["process"], ["main"]:
        print(name, envs.call(name, *args)[0])
    config = envs.call("config")[0]
    SCALE = 10
    print(config.scaled(), type(config) is Config)
    envs.close()
"""


def run(*command):
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("as_module", [False, True])
def test_main_of_workers_is_that_of_gymnasiums_workers(tmp_path, monkeypatch, as_module):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "script.py").write_text(HEAD + SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    program = ["-m", "package.script"] if as_module else [str(package / "script.py")]
    expected = run(*program, "gymnasium")
    assert expected.endswith("50 True\n"), expected
    for start_method in "forkserver", "spawn":
        assert run(*program, start_method) == expected


def test_worker_init_and_envs_share_the_globals_of_a_script():
    then = """
DEVICE = None
def init():
    global DEVICE
    DEVICE = "opened"
class Env(Base):
    def device(self):
        return DEVICE, sys.modules["__main__"].DEVICE
envs = jaxvec.make(Env, 1, workers=jaxvec.Workers(init=init))
print(envs.call("device")[0])
envs.close()
"""
    assert run("-c", HEAD + then) == "('opened', 'opened')\n"


def test_a_class_in_a_worker_is_not_changed_by_later_values():
    then = """
class Config:
    count = 0
    def add(self):
        global COUNT
        COUNT = Config.count = Config.count + 1
        return COUNT
class Env(Base):
    config = Config()
    def add(self):
        return self.config.add(), COUNT
envs = jaxvec.make(Env, 1)
print(envs.call("add")[0])
envs.set_attr("config", Config())
print(envs.call("add")[0], Config.count)
envs.close()
"""
    assert run("-c", HEAD + then) == "(1, 1)\n(2, 2) 0\n"


@pytest.mark.parametrize(
    "code",
    [
        'pickle.loads(b"\\x80\\x04c__main__\\nRemote\\n.")',
        "typing.get_type_hints(Env.typed)",
        "sys.modules['__main__'].Remote",
    ],
)
def test_an_error_names_the_remedy_for_what_only_the_script_has(code):
    then = f"""
import psutil
class Remote: pass
Remote.process = psutil.Process
class Env(Base):
    def typed(self, process: psutil.Process): ...
    def use(self):
        return {code}
envs = jaxvec.make(Env, 1)
try:
    envs.call("use")
except jaxvec.EnvError as error:
    print(error)
envs.close()
"""
    assert "move it to a module of its own" in run("-c", HEAD + then)


def test_multiprocessing_runs_no_script_without_a_main_guard(tmp_path):
    then = """
import math
class Env(Base):
    def root(self):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.map(math.sqrt, [4.0]), __file__
print(jaxvec.make(Env, 1).call("root")[0])
"""
    script = tmp_path / "script.py"
    script.write_text(HEAD + then)
    assert run(script) == f"([2.0], '{script}')\n"


def test_make_refuses_to_run_while_multiprocessing_imports_a_script(tmp_path):
    then = """
class Env(Base): pass
def nothing(): pass
try:
    jaxvec.make(Env, 1).close()
except RuntimeError as error:
    print(error, flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=nothing)
    process.start()
    process.join()
"""
    script = tmp_path / "script.py"
    script.write_text(HEAD + then)
    assert 'make the pool under `if __name__ == "__main__":`' in run(script)
