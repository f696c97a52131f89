"""A hook of mkdocs that generates the page "Error messages": the messages of all errors, by class.

`python docs/error_messages.py` prints the page. It is read from the source, so no message can be missing.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "jaxvec"
_HEAD = """# Error messages

Search this page for a message that you have seen. Words in braces stand for values. The section
[Errors](../troubleshooting.md#errors) explains the classes, and whether the pool stays usable after an error.
"""


def messages(source: str) -> Iterator[tuple[str, str]]:
    """Yields the class and the text of each error that the source of a module constructs."""
    tree = ast.parse(source)
    texts: dict[str, list[ast.expr]] = defaultdict(list)  # values of names, since some texts have a name
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts[node.targets[0].id].append(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            error = ast.unparse(node.func).replace("report.error", "EnvError").rpartition(".")[2]
            for text in _texts(node.args[0], texts) if re.fullmatch(r"[A-Z]\w*Error", error) else ():
                if re.sub(r"{[^}]*}", "", text).strip(" .:;"):  # others pass on the text of another error
                    yield error, " ".join(text.split())


def _texts(node: ast.expr, texts: dict[str, list[ast.expr]]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str() as text):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(p.value if isinstance(p, ast.Constant) else f"{{{_name(p.value)}}}" for p in parts)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_texts(body, texts), *_texts(orelse, texts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (first + then for first in _texts(left, texts) for then in _texts(right, texts))
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            yield from _texts(template, texts)
        case ast.Name(id=name) if name in texts:
            yield from (text for value in texts[name] for text in _texts(value, texts))
        case _:
            yield f"{{{_name(node)}}}"


def _name(node: ast.expr) -> str:
    """Names a value: `worker` for `self.worker`, `keys` for `sorted(keys)`, `envs` for `envs.tolist()`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name != "__name__":
            return name.strip("_")
        case ast.Call(func=ast.Name(id="list" | "sorted" | "str" | "type"), args=[value, *_]):
            return _name(value)
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[value]):
            return _name(value)
        case ast.Call(func=ast.Attribute(value=value, attr="tolist" | "argmax")) | ast.Attribute(value=value):
            return _name(value)
        case ast.Call(func=value) | ast.Subscript(value=value):
            return _name(value)
    return "…"


def page(sources: Path = SOURCES) -> str:
    """Returns the page: a table for each class."""
    tables: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(sources.rglob("*.py")):
        for error, text in messages(path.read_text()):
            tables[error].setdefault(text.replace("|", "\\|"), path.relative_to(sources).as_posix())
    lines = [_HEAD]
    for error, rows in sorted(tables.items()):
        lines += [f"## {error}\n\n| message | source |\n| --- | --- |"]
        lines += [f"| `` {text} `` | `{file}` |" for text, file in sorted(rows.items())] + [""]
    return "\n".join(lines)


def on_files(files: Any, config: Any) -> Any:
    """Adds the page to the site; mkdocs calls this function."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "developers/error_messages.md", content=page()))
    return files


if __name__ == "__main__":
    print(page())
