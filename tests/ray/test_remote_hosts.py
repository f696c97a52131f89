"""Hosts that are processes `jaxvec worker`: their arguments, logs and ends, and TLS. Needs no Ray."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
import trustme
from support.disasters import PATIENCE, wait_until
from support.elsewhere import Parented, compare, parents
from support.probe import host as remote_host

import jaxvec
from jaxvec.testing import CountingEnv

KEY = b"a key that the hosts have, too"


class PrintingEnv(CountingEnv):
    def step(self, action):
        print("hello")
        return super().step(action)


def test_output_of_envs_is_in_the_log_of_their_host(make_remote, hosts):
    envs = make_remote(PrintingEnv, 2, workers=jaxvec.Workers(output="log"))
    envs.reset(seed=0)
    envs.step([0, 0])
    envs.close()
    logs = [each.communicate(timeout=PATIENCE)[1] for each in hosts.processes]
    found = [[f"worker {worker} (env {worker}): hello" in log for worker in range(2)] for log in logs]
    assert sorted(found) == [[False, True], [True, False]]


def test_a_host_logs_what_it_does(make_remote, hosts):
    make_remote(CountingEnv, 5).close()
    logs = [each.communicate(timeout=PATIENCE)[1] for each in hosts.processes]
    steps = r"(?s)connecting to 127.*connected to 127.*; waiting .*serving envs (.*?)\n.*the pool has closed"
    assert sorted(re.search(steps, log)[1] for log in logs) == ["0 to 1", "2 to 4"]


def test_by_default_each_core_of_the_hosts_has_a_worker(make, hosts):
    for _ in range(2):
        hosts.start()
    envs = make(CountingEnv, 100, backend=hosts.remote, start_timeout=PATIENCE)
    assert envs.num_workers == 2 * len(os.sched_getaffinity(0))


def test_a_host_does_not_import_jax(tmp_path, hosts):
    (tmp_path / "jax.py").write_text("raise ImportError('a host imports jax')")
    script = "import sys; from jaxvec.cli import _worker; print('jax' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert said.stdout == "False\n"


# --- Bad input ------------------------------------------------------------------------------------


def test_too_few_hosts_time_out(hosts):
    hosts.start()
    hosts.remote._listener.wait(1, PATIENCE)
    with pytest.raises(TimeoutError, match=r"1 of 2 worker hosts have dialled in to 127.*--key-file FILE"):
        jaxvec.make(CountingEnv, 4, backend=hosts.remote, timeouts=jaxvec.Timeouts(start=0.2))


def test_a_pool_that_no_host_dials_in_to_times_out(hosts):
    said = (
        r"envs 0 to 3 did not start within 0.2 s \(Timeouts.start\): no worker host has dialled in to 127"
        r".*; start: jaxvec worker --connect 127.*--key-file FILE"
    )
    with pytest.raises(jaxvec.EnvTimeoutError, match=said):
        jaxvec.make(CountingEnv, 4, num_workers=2, backend=hosts.remote, timeouts=jaxvec.Timeouts(start=0.2))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_the_advice_has_an_address_for_other_machines(listen):
    if listen == "[::]:0" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with jaxvec.Remote(listen=listen, key=KEY) as remote:
        with pytest.raises(TimeoutError) as caught:
            jaxvec.make(CountingEnv, 2, backend=remote, timeouts=jaxvec.Timeouts(start=0.1))
        name, port = re.search(r"--connect \[?(.*?)\]?:(\d+) --key-file FILE", str(caught.value)).groups()
        assert name not in ("0.0.0.0", "::")
        assert port == remote.address.rpartition(":")[2]
        socket.create_connection((name, int(port))).close()


def test_a_host_with_another_key_is_refused(hosts, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"another key of the same sort")
    host = hosts.start(key_file=other)
    assert host.wait(PATIENCE) == 1
    assert "the process at the other end has another key" in host.stderr.read()
    assert hosts.remote._listener.wait(1, 0) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--key-file", "/no/such/file"], "No such file"),
        (["--connect", "here"], "HOST:PORT"),
    ],
)
def test_wrong_arguments_of_a_host_are_told(hosts, more, said):
    host = hosts.start(*more)
    assert host.wait(PATIENCE) == 2
    assert said in host.stderr.read()


def test_a_pool_that_is_not_there_is_told(hosts):
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # and does not listen
        host = hosts.start("--connect", f"127.0.0.1:{refusing.getsockname()[1]}", "--wait", "0")
        assert host.wait(PATIENCE) == 1
    assert "no pool can be reached at 127.0.0.1" in host.stderr.read()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ],
    ids=str,
)
def test_a_host_waits_for_the_machine_of_the_pool(monkeypatch, error):
    failures = iter([error, error, ConnectionError("the process at the other end does not know the key")])

    def connect(address, timeout):
        raise next(failures)

    serve = partial(remote_host.serve_pool, ("learner", 7777), KEY, node="here")
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(remote_host, "_DIAL_INTERVAL", 0)
    with pytest.raises(ConnectionError, match="does not know the key"):
        serve(wait=PATIENCE)
    failures = iter([error])
    with pytest.raises(ConnectionError, match=f"no pool can be reached at learner:7777: .*{error.args[1]}"):
        serve(wait=0)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"listen": "here"}, ValueError, "HOST:PORT"),
        ({"key": b"short"}, ValueError, "key must have at least 16 bytes, not 5"),
        ({"key": "a string that is long enough"}, TypeError, "key must be bytes"),
        ({"hosts": 0}, ValueError, "hosts must be an integer of at least 1"),
        ({"ssl_context": "cert.pem"}, TypeError, "ssl_context must be an ssl.SSLContext or None"),
    ],
)
def test_bad_options_are_refused(options, kind, said):
    with pytest.raises(kind, match=said):
        jaxvec.Remote(**{"listen": "127.0.0.1:0", "key": KEY, **options})


def test_a_listener_ends_with_its_last_user():
    before = threading.active_count()
    address = jaxvec.Remote(listen="127.0.0.1:0", key=KEY).address.rpartition(":")
    wait_until(lambda: threading.active_count() <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address[0], int(address[2])))


# --- TLS ------------------------------------------------------------------------------------------


class ImageEnv(CountingEnv):
    """Observes more than the buffers of sockets hold."""

    def __init__(self):
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(0, 255, (1000, 1000), np.uint8)

    def _observe(self, action):
        return np.full((1000, 1000), (self.steps + action) % 256, np.uint8)


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def tls_hosts(start_hosts, tmp_path, authority):
    """Returns hosts that check the certificate of the pool's machine."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return start_hosts(ssl_context=context)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["hosts", "tls_hosts"])
def test_large_rows_are_those_of_local_workers(make, request, tmp_path, authority, kind):
    hosts = request.getfixturevalue(kind)
    more = ["--tls-ca", str(tmp_path / "ca.pem")] if kind == "tls_hosts" else []
    processes = [hosts.start(*more) for _ in range(2)]
    actions = np.random.default_rng(0).integers(0, 10, (20, 5))

    def run(envs):
        with envs:
            return [envs.reset(seed=3), *map(envs.step, actions)]

    compare(make, partial(make, backend=hosts.remote), run, ImageEnv, 5)
    assert [process.wait(PATIENCE) for process in processes] == [0, 0]


@pytest.mark.slow
def test_a_lost_host_with_tls_is_replaced(make, tls_hosts, tmp_path):
    for _ in range(3):
        tls_hosts.start("--tls-ca", str(tmp_path / "ca.pem"))
    envs = make(Parented, 4, num_workers=2, backend=tls_hosts.remote, on_fault="restart")
    envs.reset(seed=0)
    os.kill(parents(envs)[0], signal.SIGKILL)
    assert envs.step([0] * 4).info["fault"].tolist() == [True, True, False, False]
    assert envs.step([0] * 4).info["fault"].tolist() == [False] * 4


def test_a_certificate_of_another_authority_is_refused(tls_hosts, tmp_path):
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    host = tls_hosts.start("--tls-ca", str(tmp_path / "other.pem"))
    assert host.wait(PATIENCE) == 1
    assert "certificate verify failed" in host.stderr.read()


@pytest.mark.slow
def test_a_host_without_tls_is_refused(tls_hosts):
    host = tls_hosts.start()
    assert host.wait(PATIENCE) == 1
    assert "whether both use TLS" in host.stderr.read()
    assert tls_hosts.remote._listener.wait(1, 0) == []


def test_a_host_with_tls_is_refused_by_a_pool_without(hosts, tls_hosts, tmp_path):
    host = hosts.start("--tls-ca", str(tmp_path / "ca.pem"))
    assert host.wait(PATIENCE) == 1
    assert "SSL" in host.stderr.read()
