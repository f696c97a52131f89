"""CleanRL's own programs for EnvPool's `xla`, over jaxvec, as they are.

Before them runs `shims.py` of docs/porting/envpool.md. `envpool` is a module that imports jaxvec's face; of
`torch`, from which they take nothing but TensorBoard's writer, there is a stand-in, which writes scalars to a
file.
"""

import json
import math
import os
import re

import pytest
from checkouts import CLEANRL
from support.scripts import run_python

pytestmark = pytest.mark.skipif(bool(CLEANRL.missing), reason=CLEANRL.missing)

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
    for name, text in {**STAND_INS, "shims.py": CLEANRL.shims}.items():
        path = tmp_path / "stand_ins" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(name, **arguments):
        program = CLEANRL.folder / "cleanrl" / name
        start = f"import runpy, shims; runpy.run_path({str(program)!r}, run_name='__main__')"
        path = [str(tmp_path / "stand_ins"), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = run_python(
            *("-c", start),
            *(f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"},
            timeout=280,
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
