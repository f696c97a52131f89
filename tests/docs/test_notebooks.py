"""The notebooks: committed with their outputs, they run as they are, without a warning.

nbclient runs them, and not nbmake, a pytest face to it: nbmake's last release is of 2024, before pytest 9 and
ipykernel 7, and it has no look at what a notebook prints.
"""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DAILY = ("00_quickstart",)  # CI runs the others under the oldest jax

pytestmark = [
    pytest.mark.jax_version,
    pytest.mark.skipif(not NOTEBOOKS, reason="the notebooks are not beside the tests"),
]
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    """Returns the cells: (type, source, all of it) of each."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [(cell["cell_type"], "".join(cell["source"]), cell) for cell in notebook["cells"]]


@each
def test_a_notebook_is_committed_with_its_outputs(path):
    """`python docs/site_pages.py` runs the notebooks, and writes their outputs into them."""
    cells = [(source, cell) for kind, source, cell in read(path) if kind == "code"]
    assert [cell["execution_count"] for _, cell in cells] == [*range(1, len(cells) + 1)]
    silent = [source for source, cell in cells if not cell["outputs"]]
    assert [source for source in silent if re.search(r"^print\(", source, re.MULTILINE)] == []
    assert not any(cell["metadata"] for _, cell in cells)
    assert set(json.loads(path.read_text())["metadata"]) == {"kernelspec", "language_info"}


@each
def test_the_first_code_cell_installs_a_wheel_or_the_source(path, monkeypatch, tmp_path):
    cells = read(path)
    assert "[![Open in Colab](" in cells[0][1]
    first = next(source for kind, source, _ in cells if kind == "code")
    cell, replaced = re.subn(r"%pip (install .*)", r"ran.append(f'\1')", first)
    assert replaced == 1
    ran, found = [], ["jaxvec"]
    names = {"ran": ran, "input": lambda asked: "https://host.test/jaxvec"}
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: found)
    monkeypatch.chdir(tmp_path)
    exec(cell, names)
    assert not ran
    found.clear()
    exec(cell, names)
    (wheel := tmp_path / "jaxvec-0.1-cp311-abi3-linux_x86_64.whl").touch()
    exec(cell, names)
    addresses = ("git+https://host.test/jaxvec", f"file://{wheel}")
    assert ran == [f'install -q "jaxvec[demo] @ {address}"' for address in addresses]


@each
def test_links_to_other_notebooks_lead_somewhere(path):
    links = re.findall(
        r"\]\(([^):]+)\)", "\n".join(source for kind, source, _ in read(path) if kind == "markdown")
    )
    assert all((path.parent / link).is_file() for link in links), links


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem in DAILY else pytest.mark.nightly, id=path.stem)
        for path in NOTEBOOKS
    ],
)
@pytest.mark.timeout(420)
def test_a_notebook_runs_without_a_warning(path, tmp_path):
    for module in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f'{module} is not installed: pip install "jaxvec[test]"')
    (tmp_path / path.name).write_text(path.read_text())
    # A process of its own, so that neither Jupyter's event loop nor its sockets stay here.
    command = [sys.executable, "-m", "jupyter", "execute", path.name, "--timeout=300", "--output=executed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    executed = [cell for kind, _, cell in read(tmp_path / "executed.ipynb") if kind == "code"]
    assert all(cell["execution_count"] for cell in executed if cell["source"])
    outputs = [output for cell in executed for output in cell["outputs"]]
    assert outputs
    complaints = ["".join(output["text"]) for output in outputs if output.get("name") == "stderr"]
    # Of an env that fails for show, JAX logs the error where programs don't go by the FFI.
    assert not [text for text in complaints if not text.startswith("jax.io_callback failed")]
