"""Lists what the package defines, so that a restructuring can show that nothing was lost.

    python .ci/ledger.py > before.json
    ...
    python .ci/ledger.py --compare before.json

A definition is a function, method, class body or constant. It is identified by a hash of its syntax tree
without docstrings and imports, and without the module in front of a name (`_seeds.check` is `check`). So a
definition which only moved to another file keeps its hash. `--wheel PATH` also lists the files of a wheel,
and `--tests` the ids of all collected tests.
"""

import argparse
import ast
import hashlib
import inspect
import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class _Normalize(ast.NodeTransformer):
    """Removes docstrings, imports and module prefixes."""

    def __init__(self, modules: set[str]) -> None:
        self._modules = modules

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self._modules:
            return ast.Name(node.attr, node.ctx)
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            del body[0]
        return node


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _imported_modules(tree: ast.Module) -> set[str]:
    """Returns the names under which a file imports modules of the package."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxvec"):
            for alias in node.names:
                path = ROOT / (node.module or "").replace(".", "/") / alias.name
                if path.with_suffix(".py").exists() or path.is_dir():
                    names.add(alias.asname or alias.name)
    return names


def definitions() -> list[tuple[str, str]]:
    """Returns hash and place of each definition of the package; a class is its bases and attributes."""
    found: list[tuple[str, str]] = []

    def add(node: ast.AST, place: str) -> None:
        found.append((hashlib.sha1(ast.dump(node).encode()).hexdigest()[:16], place))

    def walk(nodes: list[ast.stmt], place: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                add(node, f"{place}{node.name}")
            elif isinstance(node, ast.ClassDef):
                walk(node.body, f"{place}{node.name}.")
                node.body = [
                    each for each in node.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)
                ]
                add(node, f"{place}{node.name}")
            elif isinstance(node, ast.If | ast.Try):
                if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                    add(node, f"{place}{type(node).__name__}")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                add(
                    node,
                    place + ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target),
                )

    for path in sorted((ROOT / "jaxvec").rglob("*.py")):
        tree = ast.parse(path.read_text())
        tree = ast.fix_missing_locations(_Normalize(_imported_modules(tree)).visit(tree))
        walk(tree.body, f"{path.relative_to(ROOT)}:")
    return found


def signatures() -> dict[str, str]:
    """Returns the signature of each public function, class and method."""
    import jaxvec

    public: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if inspect.isclass(value):
            public[name] = "class"
            for key in dir(value):
                if not key.startswith("_") or key == "__init__":
                    member = inspect.getattr_static(value, key)
                    public[f"{name}.{key}"] = _signature(member)
        elif callable(value):
            public[name] = _signature(value)

    for name in jaxvec.__all__:
        add(name, getattr(jaxvec, name))
    return public


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return type(value).__name__


def tests() -> list[str]:
    """Returns the ids of all tests, in every way that a pool can be driven."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-n",
        "0",
        "--ways",
        "1/1",
        "--nightly",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    return [line for line in listed.splitlines() if "::" in line]


def main() -> None:
    """Prints the ledger, or what differs from an earlier one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--compare", type=Path, help="an earlier ledger")
    parser.add_argument("--tests", action="store_true", help="also collect the tests")
    parser.add_argument("--wheel", type=Path, help="also list the files of this wheel")
    args = parser.parse_args()
    ledger: dict[str, Any] = {"definitions": definitions(), "signatures": signatures()}
    if args.tests:
        ledger["tests"] = tests()
    if args.wheel:
        ledger["wheel"] = sorted(zipfile.ZipFile(args.wheel).namelist())
    if not args.compare:
        json.dump(ledger, sys.stdout, indent=1)
        return
    before = json.loads(args.compare.read_text())
    for mark, first, second in (("-", before, ledger), ("+", ledger, before)):
        left = Counter(digest for digest, _ in second["definitions"])
        for digest, place in first["definitions"]:
            if left[digest]:
                left[digest] -= 1
            else:
                print(mark, place)
        for key in {"tests", "wheel"} & before.keys() & ledger.keys():
            for line in sorted(set(first[key]) - set(second[key])):
                print(mark, key, line)
        for name, signature in first["signatures"].items():
            if second["signatures"].get(name) != signature:
                print(mark, "public", name, signature)


if __name__ == "__main__":
    main()
