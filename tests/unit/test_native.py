"""The C++ under sanitizers, with threads in place of processes, of Python, and of CUDA's driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1] / "support/native"
SOURCES = HERE.parents[2] / "jaxvec" / "_native"

# Without ffi.cc, which needs jaxlib's headers, and what needs Python's: these only pass calls on.
PROGRAMS = {
    "dispatch_stress": ["dispatch"],
    "engine_stress": ["dispatch", "engine"],
    "call_stress": ["dispatch", "engine", "call", "cuda", "interrupts", "fake_cuda"],
}
SANITIZERS = {
    "thread": ["-O1", "-fsanitize=thread"],
    # Not optimized: that takes half as long, and leaves in every access that the source has.
    "address,undefined": [
        "-O0",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-D_GLIBCXX_ASSERTIONS",
    ],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

pytestmark = [
    pytest.mark.nightly,  # or `.ci/run native`, with every landing
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(not (SOURCES / "dispatch.cc").is_file(), reason="needs the source tree"),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds a program under a sanitizer; each source is compiled once for each."""
    folders: dict[str, Path] = {}

    def compiled(part: str, sanitizer: str) -> Path:
        if sanitizer not in folders:
            folders[sanitizer] = tmp_path_factory.mktemp("objects")
        made = folders[sanitizer] / f"{part}.o"
        if not made.exists():
            source = next(path for path in (HERE / f"{part}.cc", SOURCES / f"{part}.cc") if path.exists())
            flags = [
                "-std=c++17",
                "-g",
                "-Wall",
                "-Wextra",
                "-Werror",
                f"-I{SOURCES}",
                *SANITIZERS[sanitizer],
            ]
            subprocess.run(["g++", *flags, "-c", "-o", made, source], check=True, timeout=290)
        return made

    def build(program: str, sanitizer: str) -> Path:
        objects = [compiled(part, sanitizer) for part in [program, *PROGRAMS[program]]]
        made = objects[0].with_suffix("")
        # The program opens itself as CUDA's driver, so its functions have to be found by name.
        flags = [*SANITIZERS[sanitizer], "-rdynamic"]
        subprocess.run(["g++", *flags, "-o", made, *objects, "-ldl"], check=True, timeout=290)
        return made

    return build


def run(program: Path, **options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | OPTIONS | options
    return subprocess.run(
        [program], capture_output=True, text=True, timeout=290, check=False, env=environment
    )


@pytest.mark.parametrize(
    "sanitizer", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SANITIZERS]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_sanitizer_finds_nothing(build, program, sanitizer):
    made = build(program, sanitizer)
    done = run(made)
    # To look for leaks needs the right to trace oneself, which a debugger or a container may take away.
    untraceable = "LeakSanitizer has encountered a fatal error" in done.stderr
    if untraceable:
        done = run(made, ASAN_OPTIONS=OPTIONS["ASAN_OPTIONS"] + ":detect_leaks=0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done.stderr
    if untraceable:
        pytest.skip("nothing was found, but LeakSanitizer can't run here, so leaks were not looked for")
