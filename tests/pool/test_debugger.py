"""A debugger that attaches to new processes, as VS Code's does by default, and breakpoints in envs."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.disasters import PATIENCE
from support.probe import lifeline

import jaxvec

SCRIPT = """
import sys
import gymnasium, numpy as np
import jaxvec

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}  # the breakpoint

def make(start_method):
    return jaxvec.make(Env, 2, num_workers=2, workers=jaxvec.Workers(start_method=start_method))

try:
    make("forkserver")
except RuntimeError as error:
    print(error)
envs = make(sys.argv[1])
envs.reset()
print(*envs.step(np.zeros(2, np.int64)).reward)
envs.close()
"""
LINE = 1 + next(number for number, line in enumerate(SCRIPT.splitlines()) if "the breakpoint" in line)


class Client(threading.Thread):
    """A client of the Debug Adapter Protocol with one breakpoint, which continues when the program stops.

    The adapter asks it for another connection for each process that the program starts.
    """

    def __init__(self, port, script, clients, attach=None):
        super().__init__(daemon=True)
        self.port, self.script, self.clients, self.stops = port, script, clients, []
        self.attach = attach or {"subProcess": True, "justMyCode": False}
        self.socket, self.sent = socket.create_connection(("127.0.0.1", port), PATIENCE), 0
        clients.append(self)
        self.start()

    def request(self, command, **arguments):
        self.sent += 1
        message = {"seq": self.sent, "type": "request", "command": command, "arguments": arguments}
        content = json.dumps(message).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n" % len(content) + content)

    def messages(self):
        with self.socket, self.socket.makefile("rb") as file:
            while header := file.readline():
                file.readline()
                message = json.loads(file.read(int(header.split(b":")[1])))
                yield message
                if message.get("event") == "terminated":
                    return

    def run(self):
        self.request("initialize", adapterID="jaxvec", pathFormat="path")
        self.request("attach", **self.attach)
        for message in self.messages():
            body = message.get("body", {})
            if message.get("event") == "initialized":
                self.request("setBreakpoints", source={"path": self.script}, breakpoints=[{"line": LINE}])
                self.request("configurationDone")
            elif message.get("event") == "debugpyAttach":
                Client(self.port, self.script, self.clients, body)
            elif message.get("event") == "stopped":
                self.stops.append(body["reason"])
                self.request("continue", threadId=body["threadId"])


def debug(script, method, port, output):
    options = ["-Xfrozen_modules=off", "-m", "debugpy", "--listen", f"127.0.0.1:{port}"]
    return subprocess.Popen(
        [sys.executable, *options, "--wait-for-client", script, method],
        stdout=output,  # not a pipe, whose end the adapter could keep open
        stderr=output,
        env={**os.environ, "PYTHONPATH": str(Path(jaxvec.__file__).parents[1])},
    )


@pytest.mark.parametrize("method", ["auto", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_breakpoint_of_a_debugger_stops_in_an_env(tmp_path, method):
    pytest.importorskip("debugpy", reason="debugpy is not installed")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # The client listens before debugpy does, so that it knows a port which is free.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    clients = []
    output = tmp_path / "output"
    with output.open("wb") as file:
        program = debug(str(script), method, port, file)
    try:
        while program.poll() is None:
            try:
                Client(port, str(script), clients)
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        program.wait(timeout=PATIENCE)
    finally:
        program.kill()
        program.wait()
        for client in clients:
            client.join(PATIENCE)
    assert "is not possible here: a debugger attaches to new processes" in output.read_text()
    assert "\n1.0 1.0\n" in f"\n{output.read_text()}"
    main, *workers = clients
    assert (main.stops, [worker.stops for worker in workers]) == ([], [["breakpoint"]] * 2)


def test_a_worker_starts_if_a_debugger_has_changed_sys_path(tmp_path):
    (tmp_path / "given.py").write_text("import sys\ndef main(*args): print(sys.path[0], *args)")
    file = lifeline.__file__
    code = f"""
import runpy, sys
sys.path[:] = [{os.path.dirname(file)!r}, *(entry for entry in sys.path if entry != {str(tmp_path)!r})]
runpy.run_path({file!r}, run_name="__main__")
"""
    reads, writes = os.pipe()
    with open(reads), open(writes, "w"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(reads), "given", "7"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            pass_fds=[reads],
            capture_output=True,
            text=True,
            process_group=0,
            timeout=PATIENCE,
            check=False,
        )
    assert (done.stdout.split()[0], done.stdout.split()[-1]) == (str(tmp_path), "7"), done.stderr
