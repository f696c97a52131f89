"""The README's examples run and print what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_print_what_the_readme_says(source):
    said = re.findall(r"^print\(.*# (.*)$", source, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert said
    assert (done.stdout.splitlines(), done.stderr) == (said, "")


def test_every_test_file_that_the_readme_names_exists():
    named = set(re.findall(r"`(test_\w+\.py|conftest\.py)`", README.read_text()))
    assert named
    assert all((Path(__file__).parent / name).is_file() for name in named)
