"""Types of the public API, as pyright infers them from a user's program."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

# Each line with a wrong value has the comment "# error".
OPTIONS = """
import jaxvec

jaxvec.make("CartPole-v1", 2, recv_order="sent", backend="serial", autoreset_mode="EPISODIC", check="strict")
jaxvec.make("CartPole-v1", 2, recv_order="redy")  # error
jaxvec.make("CartPole-v1", 2, backend="serail")  # error
jaxvec.make("CartPole-v1", 2, autoreset_mode="SAME")  # error
jaxvec.make("CartPole-v1", 2, on_fault="ignore")  # error
jaxvec.make("CartPole-v1", 2, on_fault="restart")
jaxvec.make("CartPole-v1", 2, check="strikt")  # error
jaxvec.Restart(retry="rebild")  # error
jaxvec.Workers(start_method="fork")  # error
jaxvec.config.transport = "tcp"  # error
jaxvec.config.dispatch = "native"
jaxvec.testing.check_env(lambda: None, check="lax")  # error
"""

TIMESTEP = """
import jaxvec

def shapes(timestep: jaxvec.TimeStep) -> tuple[tuple[int, ...], ...]:
    return timestep.reward.shape, timestep.terminated.shape, (~timestep.truncated & timestep.done).shape

def text(timestep: jaxvec.TimeStep) -> None:
    timestep.reward.upper()  # error
    timestep.terminated.append(True)  # error
    timestep.truncated.shap  # error
    timestep.done.shap  # error
    timestep.discount.append(1)  # error
    timestep.obs["image"].anything
"""


@pytest.mark.slow(but=1)
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
@pytest.mark.parametrize("program", [OPTIONS, TIMESTEP], ids=["options", "timestep"])
def test_pyright_reports_wrong_values_of_options_and_fields(tmp_path, program):
    path = tmp_path / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {done.stderr[-300:]}")
    found = json.loads(done.stdout)["generalDiagnostics"]
    reported = {each["range"]["start"]["line"] for each in found if each["severity"] == "error"}
    lines = program.split("\n")
    assert reported == {number for number, line in enumerate(lines) if re.search("# error$", line)}, found
