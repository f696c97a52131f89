"""What to install is told by the packages' names: jaxvec itself need not be in any index."""

import importlib.metadata
import json
import re

import pytest
from gymnasium.error import NameNotFound
from support.scripts import run_python

import jaxvec
from jaxvec.adapters import _packages


def test_the_command_names_the_packages_of_an_extra(monkeypatch):
    requires = [
        "jax>=0.7.2",
        'flax>=0.10; extra == "demo"',
        'jaxvec[demo]; extra == "notebooks"',
        "gymnasium[classic-control]>=1.2; extra == 'demo'",
        'nbclient; extra == "notebooks"',
        "envpool>=1.2; sys_platform == 'linux' and extra == 'bench'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", {"jaxvec": requires}.get)
    assert _packages.install_command("demo") == 'pip install "flax>=0.10" "gymnasium[classic-control]>=1.2"'
    assert _packages.install_command("notebooks") == _packages.install_command("demo") + " nbclient"
    assert _packages.install_command("bench") == 'pip install "envpool>=1.2"'


def test_where_jaxvec_is_not_installed_the_command_is_for_its_folder(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert _packages.install_command("ray").startswith('pip install ".[ray]" ')


def test_without_an_extra_of_a_name_the_command_is_for_a_package():
    assert _packages.install_command("no-such-package") == "pip install no-such-package"


RUN = (
    "from jaxvec.logging import Options, training; "
    "training(Options, ['--logger', '{}'], program='mine').__enter__()"
)
MISSING = {
    "tensorboardX": (RUN.format("tensorboard"), "tensorboardX"),
    "wandb": (RUN.format("wandb"), "wandb"),
    "dm_env": (
        "from jaxvec.compat import envpool; envpool.make_dm('CartPole-v1').observation_spec()",
        "dm-env",
    ),
    "dm_env, of the adapter": ("import jaxvec.adapters.dm_env", "dm-env"),
    "pettingzoo": ("import jaxvec.adapters.pettingzoo", "pettingzoo"),
    "brax": ("import jaxvec.compat.brax", "brax"),
    "ale_py": ("import jaxvec; jaxvec.make('ale_py:ALE/Pong-v5', 2)", "ale-py"),
    "minigrid": ("import jaxvec; jaxvec.make('minigrid:MiniGrid-Empty-5x5-v0', 2)", "minigrid"),
}


HIDE = """
import contextlib, io, json, sys

hidden, calls = json.loads(sys.argv[1])

class Hidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
for call in calls:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            exec(call)
        except SystemExit:
            said = stderr.getvalue()
        except Exception as error:
            said = str(error)
    print(said.splitlines()[-1])
"""


def test_a_missing_optional_package_is_one_line_with_the_command(tmp_path):
    hidden = [package.partition(",")[0] for package in MISSING]
    calls, names = zip(*MISSING.values(), strict=True)
    printed = run_python("-c", HIDE, json.dumps([hidden, calls]), cwd=tmp_path)
    lines = printed.stdout.splitlines()
    assert len(lines) == len(names), printed.stderr
    for line, name in zip(lines, names, strict=True):
        assert re.search(rf'pip install (.* )?"?{name}\b', line)  # with its version, if an extra has one


def test_a_missing_package_of_an_env_names_the_command():
    def build():
        import no_such_simulator.core  # pyright: ignore[reportMissingImports]

        return no_such_simulator

    with pytest.raises(jaxvec.EnvError, match=r"no module 'no_such_simulator'\. .*pip install no_such"):
        jaxvec.make(build, 1, num_workers=1)


def test_an_unknown_id_names_the_module_or_the_class():
    with pytest.raises(NameNotFound, match=r'"MODULE:MyEnv-v0", …\), or pass the class: jaxvec'):
        jaxvec.make("MyEnv-v0", 2)
    with pytest.raises(NameNotFound, match=r"The module json registers no such id; .*pass the class"):
        jaxvec.make("json:MyEnv-v0", 2)
    with pytest.raises(ModuleNotFoundError, match=r"there is no module 'no_module'; .*pip install no_module"):
        jaxvec.make("no_module:MyEnv-v0", 2)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("example", "package"), [("search", "mctx"), ("dqn", "flashbax")])
def test_an_example_says_what_it_alone_needs(example, package):
    script = f"import sys; sys.modules[{package!r}] = None; import jaxvec.examples.{example}"
    said = run_python("-c", script)
    assert said.returncode != 0
    assert f"needs {package}: pip install " in said.stderr
    assert f'"{package}>=' in said.stderr
