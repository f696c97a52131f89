"""The files and identifiers that the pages for developers name exist in the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import jaxvec

SOURCES = Path(jaxvec.__file__).parent
PAGES = Path(__file__).parents[2] / "docs"
OTHERS = {
    "pjrt_host_callback.cc",
    "client.dma_map",
    "UNIMPLEMENTED",
    "jvp",
    "hessian",
    "vjp",
    "jax.make_mesh",
}  # XLA, JAX

FILES = {
    str(path.relative_to(SOURCES)): path for path in SOURCES.rglob("*") if path.suffix in (".py", ".cc", ".h")
}
WORDS = {word for path in FILES.values() for word in re.findall(r"[A-Za-z_]\w*", path.read_text())}
WORDS |= {"jaxvec", "jax", "gymnasium"}


def missing(page: str) -> list[str]:
    """Returns the code spans of a page that look like a file or an identifier, and are none."""
    found: list[str] = []
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
        if span in OTHERS:
            continue
        if re.fullmatch(r"[\w./]+\.(py|cc|h)", span):
            in_package = any(f"/{file}".endswith(f"/{span}") for file in FILES)
            elsewhere = (PAGES.parent / span).exists() or [*(PAGES.parent / "tests").rglob(span)]
            if not in_package and not elsewhere:
                found.append(span)
        elif re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span) and not {*span.rstrip("()").split(".")} <= WORDS:
            found.append(span)
    return found


@pytest.mark.parametrize("page", ["developers/design", "contract"])
def test_a_page_names_what_exists(page):
    if not PAGES.exists() or not any(file.endswith(".cc") for file in FILES):
        pytest.skip("the pages or the C++ sources are not there")
    assert missing((PAGES / f"{page}.md").read_text()) == []


def test_what_does_not_exist_is_found():
    assert missing("`Pool`, `pool.py`, `Partition`, `_config.py` and `jax.jit`") == [
        "Partition",
        "_config.py",
    ]
