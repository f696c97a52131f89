"""CleanRL's own programs for EnvPool's `xla`, over jaxvec: from a checkout that `JAXVEC_CLEANRL` names.

They run as they are, but for two names that JAX and Flax have removed since. `envpool` is a module that
imports jaxvec's face; of `torch`, from which they take nothing but TensorBoard's writer, there is a stand-in,
which writes scalars to a file.
"""

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("JAXVEC_CLEANRL")
NEEDED = ["gym", "tyro", "flax", "optax", "ale_py", "cv2"]
MISSING = [name for name in NEEDED if find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="JAXVEC_CLEANRL names no checkout of CleanRL"),
    pytest.mark.skipif(bool(MISSING), reason=f"CleanRL's programs need {MISSING}, which are not installed"),
]

PARAMETERS = "    critic_params: flax.core.FrozenDict\n"
PATCHES = {
    # JAX 0.6 has no jax.tree_map any more.
    "jax.tree_map(": "jax.tree.map(",
    # Flax's TrainState looks for a name among the parameters, which are a dataclass there.
    PARAMETERS: f"{PARAMETERS}    __contains__ = lambda self, name: False\n",
}

STAND_INS = {
    "envpool.py": "from jaxvec.compat.envpool import *\n",
    "torch/__init__.py": "class device: 'tyro asks for it'\n",
    "torch/utils/__init__.py": "",
    "torch/utils/tensorboard.py": """
import json
from pathlib import Path

class SummaryWriter:
    def __init__(self, folder):
        Path(folder).mkdir(parents=True)
        self.file = (Path(folder) / "scalars").open("w")

    def add_text(self, tag, text):
        pass

    def add_scalar(self, tag, value, step):
        print(json.dumps([tag, float(value), int(step)]), file=self.file)

    def close(self):
        self.file.close()
""",
}


@pytest.fixture
def run(tmp_path):
    """Yields `run(name, **arguments)` of a program, which returns its output and its scalars."""
    for name, text in STAND_INS.items():
        path = tmp_path / "stand_ins" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(name, **arguments):
        text = (Path(CHECKOUT) / "cleanrl" / name).read_text()
        for old, new in PATCHES.items():
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
        path = [str(tmp_path / "stand_ins"), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [
                sys.executable,
                str(tmp_path / name),
                *(f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (scalars,) = (tmp_path / "runs").glob("*/scalars")
        return done.stdout, [json.loads(line) for line in scalars.read_text().splitlines()]

    return run


@pytest.mark.parametrize("name", ["ppo_atari_envpool_xla_jax.py", "ppo_atari_envpool_xla_jax_scan.py"])
def test_a_program_trains(run, name):
    output, scalars = run(
        name, total_timesteps=96, num_envs=4, num_steps=8, num_minibatches=2, update_epochs=1
    )
    assert re.findall(r"global_step=(\d+), avg_episodic_return=", output) == ["32", "64", "96"]
    assert len(re.findall(r"^SPS: \d+$", output, re.MULTILINE)) == 3
    assert all(math.isfinite(value) for _, value, _ in scalars)
    logged = {tag: [step for other, _, step in scalars if other == tag] for tag, _, _ in scalars}
    assert logged["losses/loss"] == logged["charts/avg_episodic_return"] == [32, 64, 96]
