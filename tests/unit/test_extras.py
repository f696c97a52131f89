"""What to install is told by the packages' names: jaxvec itself need not be in any index."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from jaxvec import _util


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
    assert _util.install_command("demo") == 'pip install "flax>=0.10" "gymnasium[classic-control]>=1.2"'
    assert _util.install_command("notebooks") == _util.install_command("demo") + " nbclient"
    assert _util.install_command("bench") == 'pip install "envpool>=1.2"'


def test_an_older_package_is_named_with_both_versions(monkeypatch):
    requires = [
        'numpy>=1.0; extra == "fits"',
        'jaxvec[fits]; extra == "new"',
        "pytest[all]>=99.1,<100; extra == 'new'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", {"jaxvec": requires}.get)
    _util.check_versions("jaxvec.something", "fits")
    with pytest.raises(
        ImportError, match=r"jaxvec\.something needs pytest 99\.1 or newer, but \d.* pip install "
    ):
        _util.check_versions("jaxvec.something", "new")


def test_where_jaxvec_is_not_installed_the_command_is_for_its_folder(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert _util.install_command("ray").startswith('pip install ".[ray]" ')


def test_an_example_says_what_it_needs():
    script = "import sys, runpy; sys.modules['optax'] = None; runpy.run_module('jaxvec.examples.ppo')"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert said.returncode != 0
    assert "ImportError: jaxvec's examples need optax, of the extra [demo]: pip install " in said.stderr
    assert '"optax>=' in said.stderr


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("example", "package"), [("search", "mctx"), ("dqn", "flashbax")])
def test_an_example_says_what_it_alone_needs(example, package):
    script = f"import sys; sys.modules[{package!r}] = None; import jaxvec.examples.{example}"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert said.returncode != 0
    assert f"needs {package}: pip install " in said.stderr
    assert f'"{package}>=' in said.stderr
