"""A hook of mkdocs that adds pages from other folders, and the texts for language models, to the site.

- "Benchmarks" is `benchmarks/README.md`; "Changelog" is `CHANGELOG.md` with the entries of `changelog.d/`.
- Each notebook of `notebooks/` is a page. `python docs/site_pages.py` runs the notebooks, and writes their
  outputs into them.
- `llms.txt` lists the pages with their first sentences, and `llms-full.txt` has the text of those for users.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
NOTEBOOKS = ROOT / "notebooks"
_MAX_OUTPUT = 60  # lines
_BOOSTS = {"developers": 0.5, "notebooks": 0.5, "porting": 0.25}  # of the search, by folder


def benchmarks_page() -> str:
    """Returns the page "Benchmarks", with links as they are on the site."""
    return (ROOT / "benchmarks/README.md").read_text().replace("](../docs/", "](../")


def changelog_page() -> str:
    """Returns the page "Changelog": the releases, below the changes since the last one."""
    head, mark, releases = (
        (ROOT / "CHANGELOG.md").read_text().partition("<!-- towncrier release notes start -->")
    )
    lines = [head.replace("Changes since the last release are in the folder `changelog.d/`.\n\n", "")]
    next_release: list[str] = []
    for kind, title in (
        ("added", "Added"),
        ("changed", "Changed"),
        ("fixed", "Fixed"),
        ("limits", "Known limits"),
    ):
        entries = [path.read_text().strip() for path in sorted((ROOT / "changelog.d").glob(f"*.{kind}.md"))]
        if entries:
            next_release += [f"### {title}", "", *(f"- {entry}" for entry in entries), ""]
    if next_release:
        lines += ["## The next release", "", *next_release]
    return "\n".join(lines) + mark + releases


def notebook_pages() -> dict[str, str | bytes]:
    """Returns the pages of the notebooks, and their pictures, by path on the site."""
    pages: dict[str, str | bytes] = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        parts: list[str] = []
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                source = re.sub(r"\]\((\d\d_\w+)\.ipynb", r"](\1.md", source)
                # The badge would be loaded from another host.
                parts.append(re.sub(r"!\[(Open in Colab)\]\(.+?\)", r"\1", source))
                continue
            parts.append(f"```python\n{source}\n```")
            for number, output in enumerate(cell["outputs"]):
                if output["output_type"] == "stream":
                    parts.append(f"```text\n{''.join(output['text'])}```")
                    continue
                name = f"{path.stem}_{cell['id']}_{number}.png"
                pages[f"notebooks/{name}"] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![Output of the cell]({name})")
        pages[f"notebooks/{path.stem}.md"] = "\n\n".join(parts) + "\n"
    return pages


def run_notebooks() -> None:
    """Runs the notebooks, and writes their outputs into them."""
    silent = os.environ | {"SDL_AUDIODRIVER": "dummy"}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "jupyter", "execute", str(path), "--timeout=600"]
            subprocess.run([*command, f"--output={folder}/executed"], cwd=folder, env=silent, check=True)
            executed = json.loads((Path(folder) / "executed.ipynb").read_text())["cells"]
        notebook = json.loads(path.read_text())
        for cell, found in zip(notebook["cells"], executed, strict=True):
            if cell["cell_type"] == "code":
                cell |= {"execution_count": found["execution_count"], "outputs": shown(found["outputs"])}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def shown(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what the page shows of a cell's outputs: the first lines of texts, and small pictures."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            picture = {"image/png": _smaller("".join(data["image/png"]))}
            kept.append({"data": picture, "metadata": {}, "output_type": "display_data"})
            continue
        if "text/html" in data:  # a film
            continue
        text = "".join(output.get("text") or data.get("text/plain") or output.get("traceback") or "")
        text = re.sub(r"\x1b\[[0-9;]*m", "", text.rpartition("\r")[2]).rstrip()
        lines = [f"{line}\n" for line in text.replace(str(ROOT), "jaxvec").splitlines()]
        if lines:
            lines = [*lines[:_MAX_OUTPUT], *(["…\n"] if len(lines) > _MAX_OUTPUT else [])]
            kept.append({"name": "stdout", "output_type": "stream", "text": lines})
    return kept


def _smaller(picture: str) -> str:
    """Returns a PNG with few colours."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(64).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def pages() -> dict[str, str | bytes]:
    """Returns all pages and pictures that this hook adds, by path on the site."""
    return {
        "developers/benchmarks.md": benchmarks_page(),
        "developers/results.svg": (ROOT / "benchmarks/results.svg").read_bytes(),
        "developers/changelog.md": changelog_page(),
        **notebook_pages(),
    }


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages; mkdocs calls this function."""
    from mkdocs.structure.files import File

    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Makes the search prefer pages for users, and overviews; mkdocs calls this function."""
    boost = _BOOSTS.get(page.file.src_uri.partition("/")[0], 1.0)
    page.meta.setdefault("search", {}).setdefault("boost", boost)
    return markdown


_texts: dict[str, tuple[str, str, str, str]] = {}  # by path: title, address, first sentence, text


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Keeps the text of each page; mkdocs calls this function."""
    markdown = page.markdown
    if "\n::: " in markdown:  # a reference, whose text is in the docstrings
        markdown = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"</(p|li|h\d|pre)>", "\n", content)))
        markdown = re.sub(r"\n\s*\n\s*\n+", "\n\n", markdown.replace("¶", ""))
    first = re.search(r"^(?![#|<`!\s])(?:.+\n)+", page.markdown, re.MULTILINE)
    sentence = " ".join((first[0] if first else "").split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z*`\[])", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence))[0]
    _texts[page.file.src_uri] = page.title, page.file.url, sentence, markdown
    content = _CALL.sub(r"\g<0><wbr>", _LINE.sub(_indent, content))
    return _TOPIC.sub(_fold, content)


# narrow.css wraps lines of code that do not fit: right of their start, and behind the bracket of a call.
_CALL = re.compile(r'</span><span class="p">\([(\[{]*</span>')
_LINE = re.compile(r'<span id="[^"]*line-\d+-\d+">(?=(?:<span[^>]*>)?( *))')  # by pymdownx.highlight


def _indent(line: re.Match[str]) -> str:
    """Replaces the id of a line of code by its class and indentation."""
    return f'<span class="line" style="--indent: {len(line[1])}ch">'


# A section of arguments with its own title, as `Args: Workers`. The titles of others end with a colon.
_TOPIC = re.compile(
    r'<p><span class="doc-section-title">([^<:]+)</span></p>\s*(<ul>.*?\n    </ul>)', re.DOTALL
)


def _fold(topic: re.Match[str]) -> str:
    """Folds the arguments of a topic below a line with their names."""
    title, arguments = topic.groups()
    names = ", ".join(re.findall(r"<b>(<code>[^<]*</code>)</b>", arguments))
    return f"<details><summary><b>{title}</b>: {names}</summary>{arguments}</details>"


def _paths(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the paths of a section of the navigation, and of the sections in it."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from _paths(value)


def on_post_build(config: Any) -> None:
    """Writes `llms.txt` and `llms-full.txt`; mkdocs calls this function."""
    site = Path(config.site_dir)
    base = config.site_url or ""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    ordered: list[str] = []
    for section in config.nav:
        for head, entries in section.items():
            lines += [f"## {head}", ""]
            for path in _paths(entries):
                title, url, sentence, _ = _texts[path]
                lines.append(f"- [{title}]({base}{url}): {sentence.removeprefix('After this page ')}")
                ordered.append(path)
            lines.append("")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    main = [path for path in ordered if path.partition("/")[0] not in _BOOSTS]
    (site / "llms-full.txt").write_text("\n\n".join(_texts[path][3].strip() for path in main) + "\n")


if __name__ == "__main__":
    run_notebooks()
