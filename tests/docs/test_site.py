"""The built site: its navigation is short, its search finds pages by task words, and it has texts for models.

The search is that of the theme: the same index, and lunr with the theme's weights.
"""

import html
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import jaxvec

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
import site_pages  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (ROOT / "mkdocs.yml").is_file() or not all(map(importlib.util.find_spec, ("mkdocs", "lunr"))),
    reason="mkdocs or the site's sources are not there: pip install -e . --group docs",
)

FOUND = {  # page: the words for which it is among the first three results
    "api/logging/": "logging, tensorboard, wandb",
    "api/make/": "make",
    "api/modules/": "normalize",
    "cheat_sheet/": "cheat sheet",
    "contract/": "autoreset, final_obs, vmap",
    "features/": "comparison",
    "how-to/env_libraries/": "atari, dm_control, mujoco, multi-agent",
    "how-to/env_states/": "checkpoint, planning, preemption, resume, save model",
    "how-to/faults/": "debug, restart, timeout",
    "how-to/gpu/": "colab, gpu, seeds, tpu",
    "how-to/padded_and_batched/": "minigrid, text",
    "how-to/ray/": "ray",
    "how-to/speed/": "asynchronous, spare_envs, trace",
    "how-to/workers/": "old gym",
    "how-to/your_env/": "action mask, curriculum, images, info, pure_callback, render, video",
    "install/": "doctor, install, versions, windows",
    "porting/stable_baselines3/": "stable-baselines3",
    "programs/": "ppo",
    "troubleshooting/": "memory, slow, stale handle",
}


def navigation():
    """Returns the title in the navigation and the file of each of its pages."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nhooks:")[0]
    return [
        (name.strip('"'), page) for name, page in re.findall(r"^ +- (.+): (\S+\.md)$", text, re.MULTILINE)
    ]


def pages():
    """Returns the text of each page of the site, by its path."""
    files = (ROOT / "docs").rglob("*.md")
    written = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in files}
    generated = {path: text for path, text in site_pages.pages().items() if path.endswith(".md")}
    return written | generated


def test_every_page_is_in_the_navigation_once():
    assert sorted(page for _, page in navigation()) == sorted(pages())


def test_a_page_has_one_name():
    titles = {page: text.partition("\n")[0].lstrip("# ").replace("`", "") for page, text in pages().items()}
    titles["index.md"] = "Home"
    assert dict(map(reversed, navigation())) == titles


class Search:
    """The theme's search: results are pages, by the best of their sections."""

    def __init__(self, index):
        from lunr import get_default_builder
        from lunr.token import Token

        builder = get_default_builder()
        builder.pipeline.reset()
        builder.search_pipeline.reset()
        self.separator = re.compile(index["config"]["separator"])
        builder.tokenizer = lambda text, metadata=None: [
            Token(word, dict(metadata or {}, index=number))
            for number, word in enumerate(self.words(str(text or "")))
        ]
        builder.ref("location")
        for field, settings in index["config"]["fields"].items():
            builder.field(field, boost=settings["boost"])
        for entry in index["docs"]:
            text = html.unescape(re.sub(r"<[^>]+>", " ", entry["text"]))
            title = html.unescape(re.sub(r"<[^>]+>", "", entry["title"]))
            builder.add(
                {"location": entry["location"], "title": title, "text": text, "tags": ""},
                {"boost": entry.get("boost", 1)},
            )
        self.index = builder.build()

    def words(self, text):
        return [word for word in self.separator.split(text.lower()) if word]

    def pages(self, query):
        terms = self.words(query)
        scores = {}
        for result in self.index.search(" ".join(f"{term}*" for term in terms)):
            found = result["match_data"].metadata
            matched = sum(any(word.startswith(term) for word in found) for term in terms) / len(terms)
            whole = "#" not in result["ref"]
            page = result["ref"].partition("#")[0]
            scores[page] = max(scores.get(page, 0), result["score"] * (1 + (whole + matched) ** 2))
        return sorted(scores, key=scores.get, reverse=True)


@pytest.fixture(scope="module")
def search(site):
    return Search(json.loads((site / "search/search_index.json").read_text()))


CODE = {  # code: the pages of which one is among the first three results
    "last_obs": ("api/functions/", "contract/"),
    "last_info": ("api/functions/", "contract/"),
    "--evaluate": ("programs/",),
    "nnx": ("thinking/",),
    "make(info=": ("how-to/your_env/",),
}


@pytest.mark.parametrize(("code", "pages"), CODE.items())
def test_a_search_finds_code(search, code, pages):
    assert {*pages} & {*search.pages(code)[:3]}


@pytest.mark.parametrize(
    ("words", "page"), [(words, page) for page, tasks in FOUND.items() for words in tasks.split(", ")]
)
def test_a_search_finds_the_page_of_a_task(search, words, page):
    assert page in search.pages(words)[:3]


def test_llms_txt_lists_the_pages_and_llms_full_has_their_text(site):
    listed = re.findall(r"^- \[(.+?)\]\((.+?)\)", (site / "llms.txt").read_text(), re.MULTILINE)
    assert [name for name, _ in listed] == [name for name, _ in navigation()]
    assert all((site / url / "index.html").is_file() for _, url in listed)
    text = (site / "llms-full.txt").read_text()
    for page in ("tutorial", "how-to/faults"):
        assert (ROOT / f"docs/{page}.md").read_text().strip() in text
    assert "\nmake and its options\n" in text


def test_the_options_of_make_are_folded_by_topic(site):
    page = (site / "api/make/index.html").read_text()
    summaries = re.findall(r"<summary><b>(.+?)</b>: (.+?)</summary>", page)
    assert [title for title, _ in summaries][:3] == ["Envs", "Episodes", "Workers"]
    options = {name for _, names in summaries for name in re.findall(r"<code>\**(\w+)</code>", names)}
    assert options == {*inspect.signature(jaxvec.make).parameters}


@pytest.mark.parametrize("path", sorted(site_pages.NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_page_of_a_notebook_shows_its_outputs(site, path):
    outputs = [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", ())]
    page = (site / "notebooks" / path.stem / "index.html").read_text()
    texts = [output["text"][0].strip() for output in outputs if output["output_type"] == "stream"]
    assert [text for text in texts if text not in html.unescape(page)] == []
    pictures = len(outputs) - len(texts)
    assert pictures == page.count('alt="Output of the cell"')


@pytest.mark.filterwarnings("ignore")  # of weasyprint
def test_the_cheat_sheet_is_printed_on_one_sheet(site):
    try:
        import weasyprint
    except (ImportError, OSError):
        pytest.skip("weasyprint or Pango is not installed: pip install weasyprint")
    printed = weasyprint.HTML(str(site / "cheat_sheet/index.html")).render()
    assert [(round(page.width), round(page.height)) for page in printed.pages] == [(794, 1123)]  # A4
