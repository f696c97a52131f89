"""The examples of the README and of docs/ run, and print what the pages say.

The blocks of a page are one program, run from top to bottom: a reader who types along has the same names.
`print(...)  # text` says what is printed, with … for what differs from run to run. The comment of a long line
is below it. Two comments, which readers don't see, go before a block: `<!-- needs: ale-py -->` makes it part
of another program of the page, that of all blocks with the same needs, and `<!-- not run: why -->` leaves it
out.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.probe import _errors

import jaxvec

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}

_BLOCK = re.compile(r"^(?:<!-- (needs|not run): (.+?) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAID = re.compile(r"^ *print\(.*\)(?:  |\n *)# (.*)$", re.MULTILINE)


def _programs() -> Iterator[Any]:
    for name, text in TEXTS.items():
        programs: dict[str, list[str]] = {}
        for mark, argument, source in _BLOCK.findall(text):
            if mark != "not run":
                programs.setdefault(argument, []).append(source)
        for needs, sources in programs.items():
            yield pytest.param(needs, "".join(sources), id=f"{name} {needs}".strip())


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


PROGRAMS = [*_programs()]
FIRST_READ = ("README.md", "docs/tutorial.md", "docs/contract.md")  # run daily, and under every jax


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            each.values[1],
            id=each.id,
            marks=pytest.mark.jax_version if each.id in FIRST_READ else pytest.mark.nightly,
        )
        for each in PROGRAMS
        if not each.values[0]
    ],
)
def test_a_pages_examples_run_and_print_what_it_says(source, tmp_path):
    done = run(source, tmp_path)
    assert done.stderr == ""
    check(done.stdout.splitlines(), source)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("needs", "source"), [each for each in PROGRAMS if each.values[0]])
def test_examples_that_need_more_run_and_print_what_the_page_says(needs, source, tmp_path):
    if missing := [name for name in needs.split(", ") if not installed(name)]:
        pytest.skip(f"{' and '.join(missing)}: not installed")
    check(run(source, tmp_path).stdout.splitlines(), source, others=True)


def run(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder; it is a file there, so that a traceback shows the line."""
    (folder / "example.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder,
        # Not the cluster that another test breaks meanwhile; and what SDL complains about if it is missing:
        # a folder and a sound card.
        env=os.environ | {"RAY_ADDRESS": "local", "XDG_RUNTIME_DIR": str(folder), "SDL_AUDIODRIVER": "dummy"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def check(printed: list[str], source: str, *, others: bool = False) -> None:
    """Fails unless these lines are what the source says, one by one; with `others`, more may be printed."""
    patterns = [".*".join(map(re.escape, text.split("…"))) for text in _SAID.findall(source)]
    if others:
        printed = [line for line in printed if any(re.fullmatch(pattern, line) for pattern in patterns)]
    assert len(printed) == len(patterns), f"printed {printed}, where the page says {patterns}"
    for line, pattern in zip(printed, patterns, strict=True):
        assert re.fullmatch(pattern, line), f"printed {line!r}, where the page says {pattern!r}"


@pytest.mark.parametrize("name", TEXTS)
def test_every_python_block_is_looked_at(name):
    fences = re.findall(r"^ *(```+|~~~+) *(py\w*)", TEXTS[name], re.MULTILINE)
    assert len(fences) == len(_BLOCK.findall(TEXTS[name]))


# Infos that a program may read from `info`, where they are those of the next episode if one has ended.
ADDED = {"env_id", "episode_return", "episode_length", "fault", "reset_options", "_reset_options"}
FOR_THE_NEXT_ACTION = {"action_mask", "alive", "goal", "lives", "turn"}
OTHER_APIS = {"elapsed_step"}


def _codes() -> Iterator[tuple[str, str]]:
    for name, text in TEXTS.items():
        yield name, "".join(source for *_, source in _BLOCK.findall(text))
    for path in sorted((ROOT / "jaxvec/examples").glob("*.py")):
        yield path.name, path.read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        yield path.name, "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize(("name", "code"), [pytest.param(*code, id=code[0]) for code in _codes()])
def test_infos_of_a_step_are_read_from_last_info(name, code):
    """An info that is read at the end of an episode must be that of `last_info`; other keys are listed."""
    lines = [line for line in code.splitlines() if "last_info" not in line]  # or it shows the difference
    read = re.findall(r"""\binfo(?:\[|\.get\()["'](\w+)["'](?!\] =)""", "\n".join(lines))
    assert {*read} - ADDED - FOR_THE_NEXT_ACTION - OTHER_APIS == set()


@pytest.mark.parametrize("name", TEXTS)
def test_every_test_file_that_a_page_names_exists(name):
    named = re.findall(r"`((?:test_\w+|conftest)\.py)`", TEXTS[name])
    assert [file for file in named if not any((ROOT / "tests").rglob(file))] == []


def test_the_reference_has_every_public_name():
    listed = {
        name
        for text in TEXTS.values()
        for name in re.findall(r"^(?::::|##) `?jaxvec\.(\w+)", text, re.MULTILINE)
    }
    assert {*jaxvec.__all__} - {*_errors.__all__} - listed == set()
    assert "_errors" in listed


@pytest.mark.parametrize("chart", ["speed.svg", "speed_gpu.svg"])
def test_the_charts_of_speeds_show_the_figures_of_the_benchmarks(chart):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the extra demo has it")
    benchmarks = pytest.importorskip(
        "benchmarks.speed_chart", reason="the benchmarks are not beside the tests"
    )
    _, speeds = benchmarks.CHARTS[chart]
    rates = speeds()
    drawn = re.findall(r"<text [^>]*>([\d,]+)</text>", (ROOT / "docs/images" / chart).read_text())
    assert sorted(drawn) == sorted(f"{rate:,}" for rate in rates.values())
    assert min(rates.values()) > 0


def test_the_page_of_benchmarks_shows_the_figures_of_the_run_on_a_gpu():
    results = ROOT / "benchmarks/results/h200.json"
    if not results.exists():
        pytest.skip("the benchmarks are not beside the tests")
    page = (ROOT / "benchmarks/README.md").read_text()
    rates = re.findall(r": (\d+)", results.read_text())
    assert len(rates) > 30
    assert [rate for rate in rates if f"{int(rate):,}" not in page] == []


def test_the_gallery_shows_the_families_that_are_tested():
    families = pytest.importorskip("benchmarks.families", reason="the benchmarks are not beside the tests")
    results = json.loads(families.RESULTS.read_text())
    assert [family.name for family in families.FAMILIES] == [*results["families"]]
    assert len(families.FAMILIES) >= 25
    assert families.PAGE.read_text().endswith(f"\n\n{families.gallery(results)}")
    pictures = {
        families.slug(each) for each in families.FAMILIES if results["families"][each.name]["picture"]
    }
    files = [*(ROOT / "docs/images/envs").iterdir()]
    assert {path.stem for path in files} == pictures
    assert sum(path.stat().st_size for path in files) < 300_000
