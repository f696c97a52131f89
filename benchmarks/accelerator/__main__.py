"""Tests and measures jaxvec on a GPU, and writes the results to a JSON file.

Each step is a separate process with a time limit, so a hang or crash affects only one step. The file is
rewritten after each step.

Run it in a checkout after `pip install -e ".[test]"`. If the wheel is installed, run it in a folder with
`benchmarks`, `tests` and `pyproject.toml` of the checkout.

The step `cores` needs no GPU (`--platform cpu --only cores`), but many cores, and takes three minutes. It
shows where the time of a CartPole step goes: bare loops; those that meet in a spin barrier, which bound every
synchronous step; pools with half as many workers as cores up to one per core, pinned or not, and with the
candidates of `JAXVEC_CANDIDATES`. For each pool it has the time in envs, the waits of program and workers for
a core, and when the phases of a step end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

GRACE = 5  # seconds between SIGINT and SIGKILL for a step that exceeds its limit
TAIL = 1500  # characters that are kept of the output of a step
CUDA_TESTS = ("tests/accelerator/test_cuda.py", "tests/accelerator/test_cuda_programs.py")
GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE,CONDITIONAL,COLLECTIVES"
    " --xla_gpu_graph_min_graph_size=1"
)
ASYNCHRONOUS = {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"}


@dataclass(frozen=True)
class Step:
    """A process that writes its results to a file.

    Attributes:
        name: Name of the step.
        seconds: Maximum duration.
        command: Arguments of the Python interpreter. `{file}` is replaced by the path of the results, which
            are JSON or JUnit XML.
        env: Environment variables to add to those of this process.
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def run(self, folder: Path, limit: float) -> dict[str, Any]:
        """Runs the process for at most `limit` seconds and returns its exit status, output and results."""
        file = folder / self.name
        command = [sys.executable, *(part.format(file=file) for part in self.command)]
        start = time.perf_counter()
        with open(folder / f"{self.name}.log", "w+b") as log:
            # A new session, so that the whole process group, including workers, can be killed.
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.env,
                start_new_session=True,
            )
            code: int | str
            try:
                code = child.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"took more than {limit:.0f} s"
                child.send_signal(signal.SIGINT)  # pytest writes its report on SIGINT
                try:
                    child.wait(GRACE)
                except subprocess.TimeoutExpired:
                    code += f", and did not exit within {GRACE} s after SIGINT"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            log.seek(0)
            tail = log.read()[-TAIL:].decode(errors="replace")
        seconds = round(time.perf_counter() - start, 2)
        return {"exit": code, "seconds": seconds, "tail": tail, "result": read(file)}


def read(file: Path) -> Any:
    """Returns the results of a step: parsed JSON, a summary of JUnit XML, or None without a file."""
    try:
        text = file.read_text()
        return summarize(text) if text.startswith("<") else json.loads(text)
    except FileNotFoundError:
        return None
    except (ValueError, ElementTree.ParseError) as error:  # the process was killed while it wrote
        return {"unreadable": repr(error)}


def summarize(xml: str) -> dict[str, Any]:
    """Returns the number of tests per outcome, and the messages of failed tests, from JUnit XML."""
    counts = dict.fromkeys(("passed", "failure", "error", "skipped"), 0)
    failed: dict[str, str] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        outcome = next((child for child in case if child.tag in counts), None)
        counts["passed" if outcome is None else outcome.tag] += 1
        if outcome is not None and outcome.tag != "skipped":
            failed[f"{case.get('classname')}::{case.get('name')}"] = outcome.get("message", "")[:600]
    return counts | {"failed": failed}


def steps(where: str, short: bool) -> list[Step]:
    """Returns all steps in order of importance.

    Args:
        where: JAX platform.
        short: Whether to run each step with the least work, to check that it runs.
    """

    def tests(name: str, seconds: float, *arguments: str, env: Mapping[str, str] | None = None) -> Step:
        # Tests run sequentially because there is one GPU. Their time limit is shorter than that of the step.
        command = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "60", "-m", "gpu")
        return Step(name, seconds, (*command, "--junitxml={file}", *arguments), env or {})

    def asks(module: str, question: str, seconds: float, name: str = "", **env: str) -> Step:
        command = ("-m", f"benchmarks.accelerator.{module}", question, "{file}", "--platform", where)
        return Step(name or question, seconds, (*command, *["--short"] * short), env)

    measure = ("--platform", where, "--json", "{file}")
    payloads = ["--payloads", "1 kB", "--rounds", "1"] if short else ["--rounds", "3"]
    images = ["--num-steps", "4", "--num-envs", "4", "--num-workers", "2"] if short else ["--num-steps", "16"]
    images += ["--transports", "ffi"]
    return [
        Step("driver", 40, ("-m", "benchmarks.accelerator.driver", "{file}")),
        asks("programs", "calling", 75),
        tests("tests_cuda", 130, *CUDA_TESTS),
        Step("gpu", 90, ("-m", "benchmarks.gpu", *measure, "--seconds", "0.25", *payloads)),
        asks("rates", "rates", 100),
        asks("programs", "interrupt", 45),
        asks("rates", "learning", 130),
        asks("cores", "cores", 200),
        Step("images", 95, ("-m", "benchmarks.images", *measure, "--rounds", "2", *images)),
        tests("graphs", 60, *CUDA_TESTS, "-k", "ffi and ImageEnv", env={"XLA_FLAGS": GRAPHS}),
        asks("programs", "calling", 60, "asynchronous", **ASYNCHRONOUS),
        asks("programs", "threads", 40),
        tests(
            "tests_more",
            120,
            "tests/pool/test_transports.py",
            "tests/pool/test_placement.py",
            "tests/pool/test_transforms.py",
        ),
    ]


def machine() -> dict[str, Any]:
    """Returns the versions of Python, the kernel and packages, the number of cores, and the GPU."""
    names = ("jax", "numpy", "gymnasium", "nvidia-c", "flax", "optax")
    info: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": {
            each.name: each.version for each in distributions() if (each.name or "").lower().startswith(names)
        },
    }
    query = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
    try:
        info["gpu"] = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        info["gpu"] = f"unknown: {error}"
    return info


def main() -> None:
    """Parses the command line, runs the steps and writes the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platform", default="cuda", help="JAX platform; cpu runs the steps without a GPU")
    parser.add_argument("--minutes", type=float, default=10, help="time limit for all steps together")
    parser.add_argument("--only", default="", help="regular expression that selects steps by name")
    parser.add_argument("--short", action="store_true", help="run each step with the least work")
    parser.add_argument(
        "--out", type=Path, default=Path("accelerator.json"), help="JSON file for the results"
    )
    options = parser.parse_args()

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    os.environ |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    deadline = time.monotonic() + options.minutes * 60
    results: dict[str, Any] = {"machine": machine(), "platform": options.platform, "steps": {}}
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(options.platform, options.short):
            if not re.search(options.only, step.name):
                continue
            limit = min(step.seconds, deadline - time.monotonic() - GRACE)
            if limit < GRACE:
                outcome: dict[str, Any] = {"exit": "skipped, no time left"}
            else:
                outcome = step.run(Path(folder), limit)
            results["steps"][step.name] = outcome
            new = options.out.with_suffix(".new")
            new.write_text(json.dumps(results, indent=1))
            new.replace(options.out)
            print(f"{step.name:14} exit {outcome['exit']}, {outcome.get('seconds', 0)} s", flush=True)
            if outcome["exit"] != 0:
                print(outcome.get("tail", ""), flush=True)
    print(f"wrote {options.out}")
    sys.exit(any(outcome["exit"] != 0 for outcome in results["steps"].values()))


if __name__ == "__main__":
    main()
