"""Every public docstring but an error's has an Example, which runs and prints what it says.

The docstrings are read, not imported: so none is missed where another library is not installed. What an
example may take as imported is `NAMES`, as the pages of the reference say. All run in this process, which has
imported JAX.
"""

from __future__ import annotations

import ast
import logging
import re
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.probe import _errors, process
from test_docs import check, installed

import jaxvec
from jaxvec import backends

SOURCES = Path(jaxvec.__file__).parent
NAMES = {"gymnasium": gymnasium, "jax": jax, "jaxvec": jaxvec, "jnp": jnp, "np": np}

# These classes' methods have an example each; elsewhere that of the class shows them, or they are our own.
EACH_METHOD = {"jaxvec.VectorEnv", "jaxvec.normalize.RunningMeanStd"}
NO_EXAMPLE = {f"jaxvec.{name}": "its message says what to do" for name in _errors.__all__}
NO_EXAMPLE |= {
    f"jaxvec.backends.{name}": "tests/unit/test_backend.py has one"
    for name in backends.__all__
    if name != "Backend"
}
NOT_RUN = {
    "jaxvec.Rollout": "needs a cluster; tests/ray/test_rollouts.py makes rollouts",
    "jaxvec._backends.ray.rollouts.RolloutStats": "needs a cluster",
    "jaxvec.Rollouts": "needs a cluster; docs/how-to/ray.md has another, which runs",
    "jaxvec.adapters.mlagents.MlAgentsEnv": "needs a built Unity scene",
    "jaxvec.compat.stoix.register": "needs Stoix; tests/compat/test_compat_stoix.py has a stand-in",
}
# Their examples compile the same programs again as those of the functions that return them.
AGAIN = {"jaxvec.ports.Comparison", "jaxvec.ports.Distributions"}
NEEDS = {
    "jaxvec.adapters.dm_env": ["dm-control"],
    "jaxvec.adapters.pettingzoo": ["pettingzoo", "mpe2"],
    "jaxvec.adapters.replay": ["box2d"],
    "jaxvec.compat.brax": ["brax"],
    "jaxvec.compat.stable_baselines3": ["stable-baselines3"],
    "jaxvec.compat.stoix": ["stoa-env"],
    "jaxvec.ports.as_port": ["gymnax"],
}

_EXAMPLE = re.compile(r"^Example:\n    ```python\n(.*?)^    ```$", re.MULTILINE | re.DOTALL)


def _file(module: str) -> Path | None:
    path = SOURCES.joinpath(*module.split(".")[1:])
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError("a public module has no __all__")


def _docstrings(name: str, module: str, symbol: str) -> Iterator[tuple[str, str]]:
    """Yields the public name and docstring of what a module calls `symbol`, and of what belongs to it."""
    file = _file(module)
    assert file is not None, f"{name}: {module} is no module of jaxvec"
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.ImportFrom) and any(
            symbol == (alias.asname or alias.name) for alias in node.names
        ):
            if _file(f"{node.module}.{symbol}") is None:
                yield from _docstrings(name, str(node.module), symbol)
            else:
                yield from _module(f"{node.module}.{symbol}")
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == symbol:
            yield name, ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef) and name in EACH_METHOD:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                        yield f"{name}.{method.name}", ast.get_docstring(method) or ""
            return


def _module(module: str) -> Iterator[tuple[str, str]]:
    file = _file(module)
    assert file is not None
    for name in _exported(_parse(file)):
        yield from _docstrings(f"{module}.{name}", module, name)


def _public() -> Iterator[tuple[str, str]]:
    for module in ("adapters", "backends", "logging", "normalize", "ports", "testing"):
        yield from _module(f"jaxvec.{module}")
    yield from _module("jaxvec")
    for name in _errors.__all__:  # jaxvec exports all of them
        yield from _docstrings(f"jaxvec.{name}", "jaxvec._errors", name)
    for module, symbol in (
        ("_settings", "Config"),
        ("_backends.ray.rollouts", "RolloutStats"),
        ("_stats", "WorkerStats"),
    ):
        yield from _docstrings(f"jaxvec.{module}.{symbol}", f"jaxvec.{module}", symbol)
    for path in sorted((SOURCES / "compat").glob("[!_]*")):
        yield from _module(f"jaxvec.compat.{path.stem}")


DOCSTRINGS = dict(_public())
EXAMPLES = {
    name: textwrap.dedent(found[1])
    for name, text in DOCSTRINGS.items()
    if (found := _EXAMPLE.search(text)) is not None
}


def test_every_public_docstring_has_an_example():
    assert {"jaxvec.make", "jaxvec.ActionError", "jaxvec.compat.envpool.make"} <= {*DOCSTRINGS}
    assert {*DOCSTRINGS} - {*EXAMPLES} == {*NO_EXAMPLE}
    assert {*NOT_RUN} | AGAIN <= {*EXAMPLES}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in AGAIN)) for name in EXAMPLES]
)
def test_an_example_runs_and_prints_what_it_says(name, tmp_path, monkeypatch, capsys, no_jax_log):
    source = EXAMPLES[name]
    code = compile(source, f"<the example of {name}>", "exec")
    if name in NOT_RUN:
        return
    needs = [one for start, many in NEEDS.items() if name.startswith(start) for one in many]
    if missing := [one for one in needs if not installed(one)]:
        pytest.skip(f"{' and '.join(missing)}: not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "usable_cores", lambda: 1)  # a worker each is enough, and costs half of two
    monkeypatch.setattr(logging.getLogger("jaxvec"), "disabled", True)  # of faults that are recovered from
    others = ".compat." in name or ".adapters." in name  # libraries, which may warn and print
    others |= name in {
        f"jaxvec.logging.{name}" for name in ("Policy", "TrainingRun", "training")
    }  # they print the score
    with warnings.catch_warnings():
        if others:
            warnings.simplefilter("ignore")
        exec(code, NAMES | {"__name__": "__main__"})
    check(capsys.readouterr().out.splitlines(), source, others=others)
