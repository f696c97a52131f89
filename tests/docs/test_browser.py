"""The site's pages fit into a browser window: nothing is cut off, on a desktop or on a phone.

Headless Chromium loads each page in a frame of some width, and sends what it measured to the test's server.
"""

from __future__ import annotations

import functools
import http.server
import json
import queue
import shutil
import subprocess
import threading

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
COLUMNS = 88  # of code, which fit at 1280 px

MEASURE = """<!doctype html><body><script>
const measure = path => new Promise(resolve => {
  const frame = document.createElement("iframe")
  frame.src = path
  frame.onload = () => {
    const page = frame.contentDocument
    const still = page.createElement("style")
    still.textContent = "* {transition: none !important}"
    page.head.append(still)
    const found = [1280, 390].map(width => {
      frame.style = `width: ${width}px; height: 900px; border: 0`
      const cut = [...page.querySelectorAll("pre > code")].filter(code => code.scrollWidth > code.clientWidth)
      const columns = cut.map(code => Math.max(...code.textContent.split("\\n").map(line => line.length)))
      return {path, width, over: page.documentElement.scrollWidth - width, cut: columns}
    })
    frame.remove()
    resolve(found)
  }
  document.body.append(frame)
})
const run = async () => {
  const found = []
  for (const path of PATHS) found.push(...await measure(path))
  await fetch("/found", {method: "POST", body: JSON.stringify(found)})
}
run().catch(error => fetch("/found", {method: "POST", body: JSON.stringify(String(error))}))
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site, the page that measures it, and takes its result."""

    def __init__(self, paths, found, *args, **kwargs):
        self.paths, self.found = paths, found
        super().__init__(*args, **kwargs)

    def do_GET(self):
        if self.path.startswith("/search/"):  # the index is large, and not needed
            self.send_error(404)
            return
        if self.path != "/measure":
            super().do_GET()
            return
        page = MEASURE.replace("PATHS", json.dumps(self.paths)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self):
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def measured(site, tmp_path_factory):
    """Returns the width of each page beyond the window, and the columns of the code that does not fit."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    paths = sorted(f"/{path.relative_to(site)}" for path in site.rglob("index.html"))
    found = queue.Queue()
    handler = functools.partial(Handler, paths, found, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        profile = tmp_path_factory.mktemp("profile")
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        address = f"http://127.0.0.1:{server.server_port}/measure"
        browser = subprocess.Popen(
            [*command, "--remote-debugging-port=0", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            result = found.get(timeout=280)
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
            thread.join()
    assert isinstance(result, list), result
    return result


def test_no_page_is_wider_than_the_window(measured):
    assert {(each["path"], each["width"], each["over"]) for each in measured if each["over"] > 0} == set()


def test_code_of_88_columns_fits_on_a_desktop(measured):
    pages = [each for each in measured if each["width"] == 1280]
    assert [(each["path"], each["cut"]) for each in pages if min(each["cut"], default=99) <= COLUMNS] == []
