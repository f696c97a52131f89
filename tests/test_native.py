"""The C++ under ThreadSanitizer, with threads in place of processes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "native"
SOURCES = HERE.parent.parent / "jaxvec" / "_native"


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.skipif(not (SOURCES / "handoff.cc").is_file(), reason="needs the source tree")
@pytest.mark.parametrize(
    ("stress", "parts"), [("handoff_stress", ["handoff"]), ("pool_stress", ["handoff", "pool"])]
)
def test_there_is_no_data_race(tmp_path, stress, parts):
    program = tmp_path / stress
    sources = [HERE / f"{stress}.cc", *(SOURCES / f"{part}.cc" for part in parts)]
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", "-fsanitize=thread"]
    subprocess.run(["g++", *flags, "-o", program, *sources], check=True, timeout=100)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
