"""Cleanba's PPO plays and learns over jaxvec, with its own `make_env` or with ours.

Before it runs `shims.py` of docs/porting/gymnax.md. Its network is smaller than it would be.
"""

import math
import os
import subprocess
import sys

import pytest
from checkouts import CLEANBA

pytestmark = [
    pytest.mark.skipif(bool(CLEANBA.missing), reason=CLEANBA.missing),
    pytest.mark.timeout(400),
]

PROGRAM = """
import sys
import shims
from jaxvec.compat import cleanba, envpool

sys.modules["envpool"] = envpool
path, own = sys.argv[1], sys.argv.pop(2) == "own"
text = open(path).read()
if not own:  # as one would edit it
    before, _, after = text.partition("class ResidualBlock")
    text = before + "from jaxvec.compat.cleanba import make_env\\nclass ResidualBlock" + after
del sys.argv[0]
module = type(sys)("__main__")
module.__file__ = path
sys.modules["__main__"] = module
exec(compile(text, path, "exec"), vars(module))
"""
SETTINGS = {
    "local-num-envs": 2,
    "num-steps": 4,
    "total-timesteps": 24,
    "num-minibatches": 2,
    "update-epochs": 1,
    "num-actor-threads": 1,
    "log-frequency": 1,
}


@pytest.mark.parametrize("make_env", ["own", "ours"])
def test_ppo_trains(make_env, tmp_path):
    (tmp_path / "shims.py").write_text(CLEANBA.shims)
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    arguments = [f"--{name}={value}" for name, value in SETTINGS.items()]
    done = subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM, str(CLEANBA.folder / CLEANBA.file), make_env),
            *(*arguments, "--channels", "4", "--hiddens", "8"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    returns = [line for line in lines if "avg_episodic_return=" in line]
    assert [line.partition(",")[0] for line in returns[:3]] == [f"global_step={8 * i}" for i in (1, 2, 3)]
    assert math.isfinite(float(returns[0].split("avg_episodic_return=")[1].split(",")[0]))
    assert sum("learner_policy_version=" in line for line in lines) == 3
