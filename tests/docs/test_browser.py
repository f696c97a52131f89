"""The built site in Chromium or Chrome: a phone and a laptop show it whole, and its search box finds code."""

import html
import re
import shutil
from urllib.parse import urlsplit

import pytest
from test_site import CODE

PHONE, LAPTOP = 390, 1280  # pixels
ADDRESS = "https://site.test/"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Returns the texts of what is cut off: code, tables outside of a box that scrolls, and the page itself.
CUT_OFF = """() => {
    const wide = (element) => element.scrollWidth > element.clientWidth
    const code = [...document.querySelectorAll(".md-typeset pre > code")].filter(wide)
    const tables = [...document.querySelectorAll(".md-typeset table")]
        .filter((table) => table.getBoundingClientRect().right > innerWidth)
        .filter((table) => getComputedStyle(table.closest(".md-typeset__scrollwrap")).overflowX != "auto")
    const page = [document.documentElement].filter(wide)
    return [...code, ...tables, ...page].map((element) => element.innerText)
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no browser: pip install playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: {' or '.join(BROWSERS)} is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def window(browser, site):
    def answer(route):
        path = site / urlsplit(route.request.url).path[1:]
        route.fulfill(path=path / "index.html" if path.is_dir() else path)

    context = browser.new_context(base_url=ADDRESS, permissions=["clipboard-read", "clipboard-write"])
    with context, context.new_page() as page:
        context.route("**", answer)
        yield page


@pytest.mark.parametrize(("width", "broken_words"), {PHONE: 5, LAPTOP: 0}.items())
def test_a_window_shows_code_and_tables_whole(site, window, width, broken_words):
    """Lines of code wrap at spaces and behind brackets. In a phone, a few words are too long for that."""
    window.set_viewport_size({"width": width, "height": 844})
    cut_off, broken = [], []
    for path in sorted(site.rglob("index.html")):
        window.goto(path.relative_to(site).as_posix().removesuffix("index.html"))
        cut_off += window.evaluate(CUT_OFF)
        window.add_style_tag(content=".md-typeset pre > code { overflow-wrap: normal !important }")
        broken += window.evaluate(CUT_OFF)
    assert cut_off == []
    assert len(broken) <= broken_words, broken


def test_code_is_copied_as_it_was_written(site, window):
    window.set_viewport_size({"width": PHONE, "height": 844})
    window.goto("tutorial/")
    blocks = re.findall(r"<pre>(.*?)</pre>", (site / "tutorial/index.html").read_text(), re.DOTALL)
    for block, shown in zip(blocks, window.locator(".highlight").all(), strict=True):
        shown.locator("button").click()
        written = html.unescape(re.sub(r"<[^>]+>", "", block)).rstrip()
        assert window.evaluate("navigator.clipboard.readText()") == written


@pytest.mark.parametrize(("code", "pages"), CODE.items())
def test_the_search_box_finds_code(window, code, pages):
    window.goto("")
    window.get_by_role("textbox", name="Search").press_sequentially(code)  # the theme searches at each key
    results = window.locator(".md-search-result__item")
    results.first.wait_for()
    found = [result.locator("a").first.get_attribute("href") for result in results.all()[:3]]
    assert {ADDRESS + page for page in pages} & {*found}, found
