"""The text of the package and the benchmarks is plain technical English, and so are test names.

`problems` finds constructions that a reader has to decode: openings without a subject, *who* for things, and
private words. What it finds has to be rewritten for the reader, not for the test.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_TEST_NAME = 65  # characters

OPENINGS = ("Of", "Who", "Whose", "What", "By", "Is", "Has", "Lets", "Says", "Begins", "As", "For")
# The first word of an entry of Args, Attributes, Returns or Yields, which is a noun phrase.
ENTRY_OPENINGS = (
    *("of", "who", "whom", "whose", "what", "which", "that", "by", "as", "for", "is", "has", "to", "in"),
    *("with", "from", "because", "where", "when", "until", "into", "at", "on"),
)
WORDS = {  # a pattern, in any case: what to write instead
    r"who|whom|whose|whoever|nobody|somebody|anybody|everybody": "a noun, or it, that, which",
    r"lest": "so that ... not",
    r"tells?|told": "send, report, pass, configure",
    r"hears?|heard": "receive, read",
    r"says?|said": "specify, report, contain, name",
    r"begins?|began|begun": "start",
    r"(?:goes|go|gone|went|going) on(?: from)?": "continue, recover, resume",
    r"(?:put|puts|putting) back": "restore",
    r"(?:comes|come|came) twice": "duplicate",
    r"as (?:it|they) (?:is|are|was|were)(?! (?:not|in|now))": "unchanged",
    r"ours|theirs": "the owner's name",
    r"hand-?offs?|handed? over": "dispatch",
    r"lanes?": "vmapped instance",
    r"gone on": "recovered",
}

QUOTED: tuple[str, ...] = ()  # lines that may stay, as quoted text of other programs


def prose_of_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Yields the line, type ("docstring", "error" or "comment") and text of each piece of prose."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node.body[0], "lineno", 1), "docstring", text
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called.endswith(("Error", "error", "Exception", "Failure")):
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.lineno, "error", part.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string.lstrip("# ")


def prose_of_cpp(source: str) -> Iterator[tuple[int, str, str]]:
    """Yields the comments of C++ as `prose_of_python` does."""
    for number, line in enumerate(source.split("\n"), 1):
        _, slashes, comment = line.partition("//")
        if slashes:
            yield number, "comment", comment.strip()


_CODE = re.compile(r"```.*?```|`[^`\n]*(?:\n[^`\n]*)?`", re.DOTALL)
_ENTRY = re.compile(r"^ {4}[*\w, `]+: +(\w+)", re.MULTILINE)
_SECTIONS = re.compile(r"^(?:Args|Attributes|Returns|Yields):\n((?: {4}.*\n?|\n)*)", re.MULTILINE)


def problems(line: int, kind: str, text: str) -> list[str]:
    """Returns the rejected constructions of one piece of prose, with what to write instead."""
    if text in QUOTED:
        return []
    found: list[str] = []
    if kind == "docstring":
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in OPENINGS:
            found.append(f"line {line}: opens with {text.split()[0]!r}")
        found += [
            f"line {line}: entry opens with {opening!r}"
            for section in _SECTIONS.findall(text)
            for opening in _ENTRY.findall(section)
            if opening in ENTRY_OPENINGS
        ]
    prose = _CODE.sub("x", text)
    found += [
        f"line {line}: {word[0]!r} in {kind}, write: {instead}"
        for pattern, instead in WORDS.items()
        for word in re.finditer(rf"\b(?:{pattern})\b", prose, re.IGNORECASE)
    ]
    return found


def part_of(path: Path) -> str:
    """Returns the part of the package that a file counts for: its folder, or its name at the top."""
    names = path.relative_to(ROOT / "jaxvec").parts
    return names[0] if len(names) > 1 else "jaxvec"


def problems_of(path: Path) -> list[str]:
    """Returns the problems of one file, each with the file's name."""
    prose = prose_of_python if path.suffix == ".py" else prose_of_cpp
    return [
        f"{path.relative_to(ROOT)}: {problem}"
        for piece in prose(path.read_text())
        for problem in problems(*piece)
    ]


PARTS: dict[str, list[Path]] = {}
for _path in sorted((ROOT / "jaxvec").rglob("*")):
    if _path.suffix in (".py", ".cc", ".h"):
        PARTS.setdefault(part_of(_path), []).append(_path)
for _folder in ("benchmarks", "examples"):
    PARTS[_folder] = sorted((ROOT / _folder).rglob("*.py"))


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("part", PARTS)
def test_package_text_is_plain_english(part):
    found = [problem for path in PARTS[part] for problem in problems_of(path)]
    assert not found, "\n".join(found)


def test_test_names_are_short():
    names = {
        f"{path.name}: {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > MAX_TEST_NAME
    }
    assert not names, "\n".join(sorted(names))


def test_english_lint_finds_openings_entries_and_words():
    text = "Of the pool.\n\nArgs:\n    actions: of `step`.\n    seeds: Array `[n]`, which nobody reads."
    assert problems(3, "docstring", text) == [
        "line 3: opens with 'Of'",
        "line 3: entry opens with 'of'",
        "line 3: 'nobody' in docstring, write: a noun, or it, that, which",
    ]
    assert problems(1, "comment", "`who` is told") == [
        "line 1: 'told' in comment, write: send, report, pass, configure"
    ]
    source = 'raise ValueError(f"{name} is told twice")  # said'
    assert [kind for _, kind, text in prose_of_python(source) if problems(1, kind, text)] == [
        "error",
        "comment",
    ]
