"""Sessions of nox that check the repository; `.ci/run` runs them in a clean checkout.

All sessions but `newest`, `lint` and `docs` test a wheel outside the checkout. The wheel is built once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nox

ROOT = Path(__file__).resolve().parent
DEFAULT_PYTHON = sys.executable
OLDEST_JAX = "0.7.2"
MACOS = {"PYTHONPATH": str(ROOT / "tests" / "support" / "macos")}  # makes Linux look like macOS to jaxvec
# With these, JAX refuses what it otherwise converts or lets pass.
STRICT = {
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_ENABLE_CHECKS": "1",
    "JAX_DEBUG_NANS": "1",
    "JAX_DEBUG_INFS": "1",
}
OPTIMIZED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # tests/conftest.py turns some off by default

nox.options.default_venv_backend = "uv"
nox.options.stop_on_first_error = True
nox.options.sessions = [
    "lint",
    "docs",
    "native",
    "bare",
    "macos",
    "newest",
    "oldest",
    "next",
    "extras",
    "compile",
]

# Without bytecode, as in many container images, each of a thousand interpreters would compile JAX anew: 3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def find_python(version: str) -> str | None:
    """Returns a Python of a version such as "3.13", if it is installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for python in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))):
        # pyenv's shim also exists for interpreters that are not selected, and then fails.
        if python and subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            return str(python)
    return None


NEWER_PYTHON = find_python("3.13")  # for the newest jax


def stage(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """Declares a session, as `nox.session` does, that prints how many seconds it took."""
    if function is None:
        return partial(stage, **options)

    @wraps(function)
    def timed(session: nox.Session, *args: Any, **kwargs: Any) -> None:
        start = time.monotonic()
        try:
            function(session, *args, **kwargs)
        finally:
            print(f"=== {session.name} took {time.monotonic() - start:.0f} s", flush=True)

    return nox.session(timed, **options)


# --- Steps that sessions share --------------------------------------------------------------------------


def wheel(session: nox.Session, system: str = "linux") -> Path:
    """Returns the wheel, which the first session that needs it builds from the source distribution."""
    folder = session.cache_dir / f"wheel-{system}-{os.getpid()}"
    if not folder.exists():
        command = ["uv", "build", "--quiet", "--python", DEFAULT_PYTHON, "--out-dir", str(folder)]
        session.run(*command, str(ROOT), external=True, env=MACOS if system == "macos" else None)
    return next(folder.glob("*.whl"))


def install_wheel(session: nox.Session, extras: str, *options: str, system: str = "linux") -> None:
    """Installs the wheel with extras, and enters a copy of the tests outside the checkout.

    Args:
        session: The session.
        extras: Extras of jaxvec, separated by commas.
        *options: More options of `uv pip install`.
        system: The system that the wheel is for, "linux" or "macos".
    """
    session.install(f"{wheel(session, system)}[{extras}]", *options)
    outside = session.cache_dir / f"outside-{os.getpid()}"
    if not outside.exists():
        for folder in ("tests", "docs", "notebooks"):
            shutil.copytree(ROOT / folder, outside / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("README.md", "mkdocs.yml", "pyproject.toml"):
            shutil.copy(ROOT / file, outside)
    session.chdir(outside)
    is_wheel = "assert pathlib.Path(sys.prefix) in pathlib.Path(jaxvec.__file__).parents, jaxvec.__file__"
    session.run("python", "-c", f"import jaxvec, pathlib, sys; {is_wheel}")
    if system == "linux":
        require_native(session)


def require_native(session: nox.Session) -> None:
    """Fails if there is a compiler, but jaxvec does not use the native library."""
    if shutil.which("c++") and sys.platform == "linux":
        doctor(
            session,
            r"native library +loaded",
            r"dispatch +native",
            r"transport +ffi on the CPU",
            r"start method +forkserver",
        )
    else:
        doctor(session)


def doctor(session: nox.Session, *required: str) -> None:
    """Runs `python -m jaxvec doctor`; each regular expression has to match the start of a line."""
    report = str(session.run("python", "-m", "jaxvec", "doctor", silent=True))
    print(report, flush=True)
    for line in required:
        if re.search(f"^{line}", report, re.MULTILINE) is None:
            session.error(f"`python -m jaxvec doctor` prints no line that matches {line!r}")


def pytest(session: nox.Session, *arguments: str, may_skip: str | None = None) -> None:
    """Runs tests; those that are marked `slow` are for `nightly`.

    Args:
        session: The session.
        *arguments: Arguments of pytest.
        may_skip: Regular expression that matches the allowed reasons to skip a test; other reasons fail the
            session. By default, all reasons are allowed.
    """
    report = session.cache_dir / f"{session.name.partition('(')[0]}.xml"
    session.run("python", "-m", "pytest", f"--junit-xml={report}", *arguments)
    if may_skip is None:
        return
    refused: Counter[str] = Counter()
    for skipped in ElementTree.parse(report).iter("skipped"):
        reason = f"{skipped.get('message')}: {skipped.text}"
        if skipped.get("type") != "pytest.xfail" and not re.search(may_skip, reason):
            refused[reason] += 1
    if refused:
        session.error("tests were skipped that must run here:\n" + "\n".join(refused))


def files(folder: str, *names: str) -> list[str]:
    return [f"tests/{folder}/test_{name}.py" for name in names]


def print_versions(session: nox.Session) -> None:
    names = ("jax", "gymnasium", "numpy")
    source = f"print('Python', sys.version.split()[0], *((name, version(name)) for name in {names}))"
    session.run("python", "-c", f"import sys; from importlib.metadata import version; {source}")


# --- Short sessions -------------------------------------------------------------------------------------


@stage
def lint(session: nox.Session) -> None:
    """Run pre-commit's hooks on all files."""
    session.install(str(wheel(session)), "--group", "dev")
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")


@stage
def docs(session: nox.Session) -> None:
    """Build the site, with warnings as errors, in the folder that the variable SITE names."""
    site = Path(os.environ.get("SITE") or session.cache_dir / "site")
    session.install(f"{wheel(session)}[test]", "playwright", "weasyprint", "--group", "docs")
    session.env["SITE"] = str(site)
    pytest(session, *files("docs", "site", "browser"), may_skip="no browser")  # which build the site
    # Pages load no script, style, font or picture from another host. Mermaid's diagrams would.
    load = r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>"""
    style = r"""(?:@import +|url\()["']?(?:https?:)?//[^)]*"""
    loads = [
        f"{page.relative_to(site)}: {found}"
        for page in sorted(site.rglob("*"))
        if page.suffix in {".html", ".css"}
        for found in re.findall(rf'{load}|{style}|<[^>]*class="mermaid"', page.read_text())
        if not re.search(r'rel="?(canonical|alternate)', found)
    ]
    if loads:
        session.error("these come from another host:\n" + "\n".join(loads))


@stage
def native(session: nox.Session) -> None:
    """Run the C++ code in threads under sanitizers of threads, memory and undefined behaviour."""
    session.install("pytest", "pytest-timeout", "pytest-xdist")
    arguments = ["--noconftest", "-n", "2", "--dist", "loadgroup", "-rs"]
    pytest(session, *arguments, *files("unit", "native"), may_skip="(?!)")


@stage
def bare(session: nox.Session) -> None:
    """Install without a compiler: jaxvec works, and reports which features are off."""
    session.install(str(ROOT), env={"CC": "/bin/false", "CXX": "/bin/false"})
    session.chdir(session.cache_dir)
    doctor(
        session,
        "dispatch +portable",
        "transport +io_callback$",
        "native library +off: .*was not built",
    )
    session.run("python", "-c", "import jaxvec; jaxvec.make('CartPole-v1', 2).reset(seed=0)")


@stage
@nox.parametrize(
    "python", [nox.param(find_python(version) or DEFAULT_PYTHON, id=version) for version in ("3.12", "3.13")]
)
def macos(session: nox.Session) -> None:
    """Test the wheel for macOS on Linux that looks like macOS to jaxvec; tests/support/macos says in what."""
    install_wheel(session, "test", system="macos")
    if not wheel(session, "macos").name.endswith("-py3-none-any.whl"):
        session.error("the wheel for macOS has a native library")
    session.run("python", "-m", "jaxvec", "doctor", env=MACOS)
    pytest(session, "-n", "2", *files("pool", "macos"), may_skip="(?!)")
    session.env.update(MACOS)
    pytest(session, "-n", "2", *files("pool", "steps"))  # which other sessions run on Linux
    print_versions(session)


# --- Tests ----------------------------------------------------------------------------------------------


@stage(venv_params=["--seed"])
def newest(session: nox.Session) -> None:
    """Test with the newest jax that the default Python can have, by the README's own command."""
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"^# install and run the tests.*\n(.+)$", readme, re.MULTILINE)
    if command is None:
        session.error("README.md has no test command")
    env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    session.run("bash", "-euo", "pipefail", "-c", command[1], external=True, env=env)
    print_versions(session)
    require_native(session)
    # These tests leave dispatch and transport to the machine, so they run with the other ones as well.
    portable = ("--transport", "io_callback", "--dispatch", "portable")
    pytest(session, *portable, *files("pool", "oracle", "steps", "step_errors", "stress"))
    # Not those of scripts and programs of their own, which choose their start method themselves.
    in_this_process = ("-k", "not script and not program")
    pytest(session, "--start-method", "spawn", *in_this_process, *files("faults", "faults", "close"))
    # The steps of the driver for a machine with a GPU, without the long ones.
    accelerator(session, "--short", "--only", "driver|calling|gpu|rates|learning|cores|interrupt")
    session.env.update(STRICT)
    pytest(session, "-n", "2", *files("unit", "normalize"), *files("pool", "padded_programs", "transforms"))


def accelerator(session: nox.Session, *arguments: str) -> None:
    out = str(session.cache_dir / "accelerator.json")
    session.run("python", "-m", "benchmarks.accelerator", "--platform", "cpu", *arguments, "--out", out)


@stage
def oldest(session: nox.Session) -> None:
    """Test with the oldest supported jax, which Colab has, and run all notebooks."""
    session.env.update(OPTIMIZED)
    constraints = session.cache_dir / "oldest.txt"
    constraints.write_text(f"jax=={OLDEST_JAX}\njaxlib=={OLDEST_JAX}\n")
    install_wheel(session, "test", "--constraints", str(constraints))
    nightly_files = ["tests/docs/test_notebooks.py", "tests/pool/test_distributed.py"]
    pytest(session, "-m", "jax_version", *(f"--ignore={file}" for file in nightly_files))
    pytest(session, "--nightly", *nightly_files)
    print_versions(session)


@stage(name="next", python=NEWER_PYTHON)
def next_jax(session: nox.Session) -> None:
    """Test with the newest jax, which needs a newer Python, and run all examples and pages."""
    if NEWER_PYTHON is None:
        session.skip("there is no Python 3.13")
    session.env.update(OPTIMIZED)
    install_wheel(session, "test")
    nightly_files = ["tests/docs/test_examples.py", "tests/docs/test_docs.py"]
    ignored = [*nightly_files, "tests/docs/test_notebooks.py"]
    pytest(session, "-m", "jax_version", *(f"--ignore={file}" for file in ignored))
    pytest(session, "--nightly", *nightly_files)
    print_versions(session)


@stage
def extras(session: nox.Session) -> None:
    """Test env libraries and compatibility APIs with the packages that other sessions lack."""
    install_wheel(session, "test,ray", "--group", "families", "--group", "compat")
    # Other sessions run these tests, which need no package besides.
    needs_no_extra = files("compat", "adapters_mlagents", "compat_gymnasium")
    needs_no_extra += ["tests/docs/test_docs.py::test_a_pages_examples_run_and_print_what_it_says"]
    # Rendering may lack a driver. torch and Ray Tune are for `nightly`. mo_gymnasium installs pygame over
    # pygame-ce. The other libraries require other versions of JAX libraries.
    may_skip = (
        r"rendered by EGL|stable-baselines3|Tune|pyarrow|mo_gymnasium|torchrl|minari|not beside the tests"
    )
    pytest(
        session,
        *("--dist", "loadfile"),  # one Ray cluster at a time
        *(f"--deselect={test}" for test in needs_no_extra),
        "tests/compat",
        "tests/ray",
        *files("pool", "families", "batched", "server_envs"),
        *files("docs", "docs", "docstrings", "examples_levels"),
        "tests/docs/test_examples.py::test_atari_continues_with_its_games",
        "tests/docs/test_ppo.py::test_mujoco_trains_with_scaled_rewards",
        may_skip=may_skip,
    )
    # The gallery's list of env families is among the benchmarks.
    shutil.copytree(ROOT / "benchmarks", "benchmarks", dirs_exist_ok=True)
    pytest(session, "--slow", *files("pool", "gallery"), may_skip="not installed")
    print_versions(session)


@stage(name="compile")
@nox.parametrize(
    ("python", "jax"),
    [
        nox.param(NEWER_PYTHON or DEFAULT_PYTHON, None, id="newest"),
        nox.param(DEFAULT_PYTHON, OLDEST_JAX, id="oldest"),
    ],
)
def compile_programs(session: nox.Session, jax: str | None) -> None:
    """Compile programs for an H200 and a TPU v5e, without these devices."""
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    constraints = session.cache_dir / "compile.txt"
    constraints.write_text("".join(f"{package}=={jax}\n" for package in packages) if jax else "")
    # Older CUDA plugins check for cuDNN, which only running a program needs.
    session.env.update(JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    install_wheel(session, "test", "--group", "compile", "--constraints", str(constraints))
    tests = files("accelerator", "compile")
    pytest(session, *tests, may_skip="this release of XLA does not say")
    print_versions(session)


# --- Sessions that run on request only ------------------------------------------------------------------


@stage
def nightly(session: nox.Session) -> None:
    """Run all tests in all ways to drive a pool and with both start methods, and faults for 10 minutes."""
    session.env.update(OPTIMIZED)
    groups = ("--group", "gallery", "--group", "compat")
    session.install("-e", ".[test,ray,sb3]", *groups, "ray[tune]", "sbx-rl")
    pytest(session, "--dist", "loadfile", "--nightly", "--ways", "all", "--hypothesis-profile", "nightly")
    spawned = ["tests/faults", *files("pool", "sharing", "stress", "model", "remote")]
    pytest(session, "--nightly", "--start-method", "spawn", *spawned)
    pytest(session, "--nightly", "--transport", "io_callback", "--dispatch", "portable")
    session.run("python", "-m", "benchmarks.soak", "--minutes", "10")
    accelerator(session, "--short")
    print_versions(session)


@stage
def repeat(session: nox.Session) -> None:
    """Run the tests that start processes ROUNDS times (20) beside eight busy loops, and count failures."""
    session.install("-e", ".[test]")
    folders = [f"tests/{name}" for name in ("compat", "faults", "pool", "states", "unit")]
    report = session.cache_dir / "repeat.xml"
    command = ("python", "-m", "pytest", f"--junit-xml={report}", *folders)
    failed: Counter[str] = Counter()
    with ExitStack() as stack:
        for _ in range(8):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        for _ in range(int(os.environ.get("ROUNDS", "20"))):
            report.unlink(missing_ok=True)
            session.run(*command, env={"PYTEST_ADDOPTS": "--slow"}, success_codes=[0, 1])
            for case in ElementTree.parse(report).iter("testcase"):
                if case.find("failure") is not None or case.find("error") is not None:
                    failed[f"{case.get('classname')}::{case.get('name')}"] += 1
    if failed:
        session.error("\n".join(f"{count} times: {name}" for name, count in failed.most_common()))


@stage
def coverage(session: nox.Session) -> None:
    """Report the lines that the tests run, in workers as well; no figure is required."""
    session.install("-e", ".", "--group", "dev")
    session.env["COVERAGE_FILE"] = str(session.cache_dir / "coverage" / "lines")
    Path(session.env["COVERAGE_FILE"]).parent.mkdir(exist_ok=True)
    session.run("python", "-m", "coverage", "run", "-m", "pytest", env={"PYTEST_ADDOPTS": "--slow"})
    session.run("python", "-m", "coverage", "combine", "--quiet")
    session.run("python", "-m", "coverage", "report", "--skip-covered", "--sort", "cover")


@stage
def release(session: nox.Session) -> None:
    """Build and check the source distribution, and a wheel from it, in the folder that DIST names."""
    folder = Path(os.environ.get("DIST") or session.cache_dir / "release")
    session.install("auditwheel", "build", "twine")
    session.run("python", "-m", "build", "--outdir", str(folder))
    session.run("twine", "check", "--strict", *map(str, folder.glob("jaxvec-*")))
    session.run("auditwheel", "show", *map(str, folder.glob("*.whl")))
