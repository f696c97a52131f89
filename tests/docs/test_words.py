"""The pages and notebooks for users are written in the field's words, not in ours.

Design and glossary are for developers, who need our words. Elsewhere code may say what it likes, in blocks
and in `spans`, as may what a link points to: these are names. `PRIVATE` says what to write instead.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOR_DEVELOPERS = {"design.md", "glossary.md"}
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]


def _read(page: Path) -> str:
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


TEXTS = {str(page.relative_to(ROOT)): _read(page) for page in PAGES if page.name not in FOR_DEVELOPERS}

PRIVATE = {  # a pattern of words, in any case: what to write instead
    r"hand-?offs?|hands? over|handed over": "dispatch; synchronisation with the workers",
    r"rows?": "per-env results, batch entries; of a timeline: tracks",
    r"verbs?": "functions, methods",
    r"faces?": "compatibility API",
    r"first-ready": "asynchronous mode",
    r"lanes?": "vmapped instances",
    r"gone on from": "recovered",
    r"lock[ -]step": "synchronous mode",
    r"in (?:its |their )?turn": "sequentially; one after the other",
    r"ticket": "request number, sequence number",
    r"rooms?|houses?": "package, architecture; of a cluster: resources",
    r"way of data|way of the data": "data flow",
    r"freight|waybills?": "payload buffer, wire format",
    r"takes? off|lands?|landed|(?:in )?flight|settled?|settles": "is submitted, received, pending",
}

_CODE = re.compile(r"^( *)(```|~~~).*?^\1\2`*$|<!--.*?-->|`[^`]+`|(?<=\]\()[^)]*", re.MULTILINE | re.DOTALL)


def private_words(text: str) -> list[str]:
    """Returns what `text` says in our words, each with its line and what to write instead."""
    prose = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)  # lines stay where they are
    found = (
        (prose.count("\n", 0, word.start()) + 1, word[0], instead)
        for private, instead in PRIVATE.items()
        for word in re.finditer(rf"\b(?:{private})\b", prose, re.IGNORECASE)
    )
    return [
        f"line {line}: {' '.join(word.split())!r}, write: {instead}" for line, word, instead in sorted(found)
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_for_users_has_no_private_words(name):
    assert private_words(TEXTS[name]) == []


def test_private_words_are_found_in_prose_and_not_in_code():
    assert private_words("A\nHand-off by [lanes](rows.md).\n") == [
        "line 2: 'Hand-off', write: dispatch; synchronisation with the workers",
        "line 2: 'lanes', write: vmapped instances",
    ]
    assert private_words("`hand-off` [x](face.md) <!-- row -->\n```text\nrow\n```\narrows, interface") == []
