"""Functions that run cells in a notebook's kernel."""

import pytest
from support.disasters import PATIENCE


@pytest.fixture
def kernel():
    """Yields the manager and the client of a notebook's kernel."""
    manager_module = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    manager, client = manager_module.start_new_kernel(startup_timeout=PATIENCE)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()
    client.context.term()
    pytest.importorskip("jupyter_core.utils").ensure_event_loop().close()  # jupyter_core's, for this thread


def run_cell(client, code, **options):
    """Runs a cell, and returns its output and the name, text and traceback of each error."""
    return finish_cell(client, client.execute(code, **options))


def finish_cell(client, cell):
    """Waits for the end of a cell; see `run_cell`."""
    printed, errors = "", []
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") != cell:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            printed += content["text"]
        elif kind == "error":
            errors.append((content["ename"], content["evalue"], "\n".join(content["traceback"])))
        elif kind == "status" and content["execution_state"] == "idle":
            return printed, errors
