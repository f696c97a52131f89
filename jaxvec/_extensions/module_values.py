"""Module values: a warning about values in modules of envs that only the program has changed.

Workers import these modules anew, and so the entries of Gymnasium's registry. So after `my_library.SPEED
= 3`, or with a patched method, an env in a worker differs from one in the program. When a pool starts, its
workers send what they have, and the program names what differs.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
import traceback
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import takewhile
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from jaxvec._envs.env_access import EnvAccess
from jaxvec._envs.envs import declared, layers_of
from jaxvec._extension import Extension
from jaxvec._memory.segment import Arrays

if TYPE_CHECKING:
    from jaxvec._pool.pool import Pool

# By module or entry of Gymnasium's registry, and by place, such as "Cart.gravity": the text of a simple value
# or the hash of a function.
ModuleValues: TypeAlias = dict[str, dict[str, "str | int"]]

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_REGISTRY = "gymnasium.registry['"  # starts the name of an entry, which ends after the id
_MAX_TEXT = 200  # characters of a value that is compared
_NO_CONSTANTS = (ast.Call, ast.Await, ast.Lambda, ast.NamedExpr, ast.comprehension)
_CONSTANTS = {"__builtins__": {}, "math": math, "np": np, "numpy": np}


class ValuesExtension(Extension):
    """The comparison of a pool's workers with the program, which it makes once, when the pool starts."""

    def on_pool(self, pool: Pool, arrays: Arrays) -> None:
        values: ModuleValues = {}
        for answer in pool.workers.request(EnvAccess.map, _read_each, limit="start"):
            # Not the error of a worker that was replaced meanwhile.
            for values_of_env in answer if isinstance(answer, list) else ():
                values |= values_of_env
        if (text := describe_changes(values)) is not None:
            stack = traceback.walk_stack(inspect.currentframe())
            own = takewhile(lambda entry: entry[0].f_globals["__name__"].startswith("jaxvec."), stack)
            warnings.warn(text, stacklevel=len([*own]) + 1)


def _read_each(first: int, stop: int) -> tuple[Any, ...]:
    return range(first, stop), [()] * (stop - first), read_values


def read_values(env: Any) -> ModuleValues:
    """Returns the values of the user's modules, and of those that define the env and its wrappers."""
    layers = layers_of(env)
    names = {base.__module__ for layer in layers for base in type(layer).__mro__} | _own_modules()
    names = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    if isinstance(spec := declared(layers[-1], "spec"), EnvSpec):
        names.add(f"{_REGISTRY}{spec.id}']")
    names -= {"__main__", "__mp_main__"}
    return {name: _read_values_of(name) for name in names if _find_owner(name) is not None}


def _find_owner(name: str) -> Any:
    """Returns a module of this process, or an entry of Gymnasium's registry; `None` without."""
    if name.startswith(_REGISTRY):
        return gymnasium.registry.get(name[len(_REGISTRY) : -2])
    return sys.modules.get(name)


@cache
def _own_modules() -> set[str]:
    """Returns the names of modules that no package manager has installed."""
    files = {name: declared(module, "__file__") or "-packages" for name, module in list(sys.modules.items())}
    return {name for name, file in files.items() if "-packages" not in file and not name.startswith("jaxvec")}


@cache  # for all envs of the worker
def _read_values_of(name: str) -> dict[str, str | int]:
    values = {place: value for place, value in _values(_find_owner(name)) if value is not None}
    if name in _own_modules() or name.startswith(_REGISTRY):
        return values
    # A library may fill its lists and dicts at any time.
    return {place: value for place, value in values.items() if str(value)[0] not in "[{"}


def describe_changes(values_of_workers: ModuleValues) -> str | None:
    """Returns a warning about values that this program has changed since their import; `None` for none.

    A value counts if the module's source sets it once, to a constant expression that the worker still has.
    Others may differ by nature, such as counters, times, and what depends on the environment.
    """
    changes: list[str] = []
    for name, values in values_of_workers.items():
        if (owner := _find_owner(name)) is None:
            continue
        here = dict(_values(owner))
        differing = {place: value for place, value in values.items() if here.get(place, value) != value}
        constants = values if isinstance(owner, EnvSpec) or not differing else _constants(owner)
        for place, value in differing.items():
            if isinstance(value, int):
                if not _is_original(owner, place):
                    changes.append(f"{name}.{place} is another function")
            elif constants.get(place) == value:
                own = here[place] or "something else"
                changes.append(f"{name}.{place} is {own} here, but {value} in the workers")
    if not changes:
        return None
    more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
    return (
        "workers import the modules of envs anew, so they do not have what this program has changed in them: "
        f"{'; '.join(changes[:3])}{more}. Pass a function that changes it there, too: make(..., "
        "workers=jaxvec.Workers(init=function))"
    )


def _values(owner: Any) -> Iterator[tuple[str, str | int | None]]:
    """Yields the values of a module and its classes, by place; `None` for those that are not simple."""
    owners: list[tuple[str, Mapping[str, Any]]] = [("", vars(owner))]
    for name, value in vars(owner).items():
        if isinstance(value, type) and value.__module__ == declared(owner, "__name__"):
            owners.append((f"{name}.", vars(value)))
    for prefix, attributes in owners:
        for name, value in attributes.items():
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, FunctionType):
                yield prefix + name, _hash(value.__code__)
            elif not name.startswith("__") and name != "metadata":  # to which vector envs write
                yield prefix + name, _text(value)


def _text(value: Any) -> str | None:
    """Returns the text of a simple value; `None` for others, and for empty lists, which programs may fill."""
    text = repr(value) if _is_simple(value, depth=3) else ""
    return text if 0 < len(text) <= _MAX_TEXT and text not in ("[]", "{}") else None


def _is_simple(value: Any, depth: int) -> bool:
    if type(value) not in (list, tuple, dict):
        return type(value) in _SIMPLE
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return len(items) <= _MAX_TEXT and depth > 0 and all(_is_simple(item, depth - 1) for item in items)


def _is_original(module: Any, place: str) -> bool:
    """Returns True if a function is the one that the module's source defines there."""
    code = getattr(attrgetter(place)(module), "__code__", None)
    return code is not None and (code.co_qualname, code.co_filename) == (place, declared(module, "__file__"))


def _hash(code: CodeType) -> int:
    constants = [_hash(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return zlib.crc32(repr((code.co_names, constants)).encode(), zlib.crc32(code.co_code))


def _constants(module: ModuleType) -> dict[str, str]:
    """Returns the texts of values that the module's source sets to constant expressions, and nowhere else."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}
    constants: dict[str, Any] = {}
    stores: dict[str, int] = {}
    _read_constants(tree.body, "", constants, stores)
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                pass  # another attribute than the class's of the same name
            case (
                ast.Attribute(attr=name, ctx=ast.Store())
                | ast.Subscript(
                    value=ast.Name(id=name) | ast.Attribute(attr=name), ctx=ast.Store() | ast.Del()
                )
                | ast.Attribute(
                    value=ast.Name(id=name) | ast.Attribute(attr=name),
                    attr="append" | "extend" | "insert" | "pop" | "remove" | "setdefault" | "update",
                )
            ):
                changed.add(name)
            case _:
                pass
    return {
        place: repr(value)
        for place, value in constants.items()
        if stores[place] == 1 and place.rpartition(".")[2] not in changed
    }


def _read_constants(
    body: list[ast.stmt], prefix: str, constants: dict[str, Any], stores: dict[str, int]
) -> None:
    for statement in body:
        for node in ast.walk(statement) if not isinstance(statement, (ast.ClassDef, ast.FunctionDef)) else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stores[prefix + node.id] = stores.get(prefix + node.id, 0) + 1
        match statement:
            case ast.ClassDef():
                _read_constants(statement.body, f"{prefix}{statement.name}.", constants, stores)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                _read_constant(prefix + name, value, constants)
            case _:
                pass


def _read_constant(place: str, expression: ast.expr, constants: dict[str, Any]) -> None:
    if any(isinstance(node, _NO_CONSTANTS) for node in ast.walk(expression)):
        return
    with suppress(Exception):  # a name that is no constant
        code = compile(ast.Expression(expression), place, "eval")
        constants[place] = eval(code, dict(_CONSTANTS), constants)
