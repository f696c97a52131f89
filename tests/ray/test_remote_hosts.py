"""Pools over `jaxvec.Remote` and real `jaxvec worker` processes: the local pool is their oracle."""

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

import cloudpickle
import gymnasium
import jax
import numpy as np
import psutil
import pytest
import trustme
from support import disasters, probe, recycling, state_game
from support.disasters import DEATHS, FAILURES, PATIENCE, SleepingEnv, failing, wait_until, within
from support.elsewhere import assert_equal, play_in_order
from support.probe import host as remote_host

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(state_game)
cloudpickle.register_pickle_by_value(recycling)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_ENVS = 5  # so that 2 hosts hold groups of different size
KEY = b"a key that the hosts have, too"


class Hosts:
    """A listener, and host processes that dial in to it."""

    def __init__(self, key_file, **options):
        self.key_file = key_file
        key_file.write_bytes(KEY + b"\n")
        self.remote = jaxvec.Remote(listen="127.0.0.1:0", hosts=2, key=KEY, **options)
        self.processes = []

    def start(self, *more, key_file=None):
        command = [sys.executable, "-m", "jaxvec", "worker", "--connect", self.remote.address]
        command += ["--key-file", str(key_file or self.key_file), *more]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def close(self):
        self.remote.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=PATIENCE)


@pytest.fixture
def hosts(tmp_path):
    hosts = Hosts(tmp_path / "key")
    yield hosts
    hosts.close()


@pytest.fixture
def make_remote(make, hosts):
    """Yields `make` for pools of two workers at two hosts."""
    for _ in range(2):
        hosts.start()
    return partial(make, backend=hosts.remote, num_workers=2, start_timeout=PATIENCE, step_timeout=PATIENCE)


def host_of(envs, worker):
    """Returns the process id of the host of a worker."""
    link = probe.links(envs)[worker]
    return int(link.node.rpartition("process ")[2].rstrip(")"))


# --- The local pool is the oracle -----------------------------------------------------------------

NESTED = [partial(NestedEnv, length) for length in (3, 7, 5, 1, 4)]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("dispatch", "transport", "num_workers"), [("native", "ffi", 5), ("portable", "io_callback", 2)]
)
def test_compiled_loop_gets_the_data_of_local_workers(make, make_remote, dispatch, transport, num_workers):
    def run(envs):
        space = envs.action_space
        space.seed(3)
        samples = [space.sample() for _ in range(40)]
        handle, first = jaxvec.reset(envs, seed=7)
        actions = jax.tree.map(lambda *each: np.stack(each), *samples)
        return first, jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, actions)[1]

    options = {"num_workers": num_workers, "dispatch": dispatch, "transport": transport}
    remote, local = (run(each(NESTED, **options)) for each in (make_remote, make))
    assert_equal(remote, local)
    assert remote[1].info["_final_obs"].any()  # autoresets were among them


def test_asynchronous_batches_in_order_are_those_of_local_workers(make, make_remote):
    options = {"batch_size": 2, "recv_order": "sent"}
    remote, local = (
        play_in_order(each("CartPole-v1", 4, **options))
        for each in (make_remote, partial(make, num_workers=2))
    )
    assert_equal(remote, local)


def test_states_go_to_hosts_and_come_back(make_remote):
    envs = make_remote(state_game.walk, NUM_ENVS, states=state_game.CAPACITY, info={"luck": np.float32})
    models = [state_game.Model(state_game.walk(), "SAME_STEP", env_id) for env_id in range(NUM_ENVS)]
    game = state_game.Game(state_game.HostFace(envs), models, np.random.default_rng(0))
    game.play(80)
    assert game.count > 90


def test_batched_envs_are_stepped_as_by_local_workers(make, make_remote):
    def run(envs):
        handle, first = jaxvec.reset(envs, seed=7)
        actions = np.tile(np.arange(4) % 2, (30, 1))
        return first, jax.jit(partial(jax.lax.scan, jaxvec.step))(handle, actions)[1]

    batched = partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="sync")
    options = {"envs_per_instance": 2, "num_envs": 4}
    remote, local = (run(each(batched, **options)) for each in (make_remote, partial(make, num_workers=2)))
    assert_equal(remote, local)


def test_envs_can_be_called_and_set(make_remote):
    envs = make_remote(CountingEnv, 4)
    envs.reset(seed=1)
    envs.step(np.zeros(4, int))
    envs.set_attr("steps", [5, 6, 7, 8])
    assert [*envs.get_attr("steps")] == [5, 6, 7, 8]
    assert envs.map(lambda env, more: env.steps + more, 1, indices=[-1, 0]) == (9, 6)
    assert envs.stats().total.steps == 4
    with pytest.raises(jaxvec.EnvAttributeError, match=r"'nothing' \(env 2, .*on .*process \d+"):
        envs.get_attr("nothing", indices=2)


# --- Faults ---------------------------------------------------------------------------------------


def test_an_env_that_raises_breaks_the_pool_and_its_host_is_named(make_remote):
    envs = make_remote(failing("step", FAILURES["picklable"][0]), 4)
    envs.reset()
    with pytest.raises(jaxvec.EnvError, match=r"env 2 .*bad luck.*on .*process \d+") as caught:
        envs.step(np.full(4, 7))
    assert (caught.value.env_id, caught.value.worker) == (2, 1)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_dead_worker_is_replaced_by_its_host(make, make_remote):
    def run(envs):
        rows = [envs.reset(seed=3)]
        rows += [envs.step(np.full(4, action)) for action in (0, 0, 7, 0, 7, 0, 0)]
        return rows, envs.stats().total.restarts

    options = {"on_fault": jaxvec.Restart("reset", None, rate=None)}
    env = failing("step", DEATHS["SIGKILL"][0])
    remote, local = (run(each(env, 4, **options)) for each in (make_remote, partial(make, num_workers=2)))
    assert_equal(remote, local)
    assert remote[1] == 2


def kill_a_host_during(envs, program, victim):
    """Runs `program` in a thread, and kills a host when it is under way."""
    completed = probe.array(envs, "completed")
    outcome = disasters.Background(program)
    before = completed.copy()
    wait_until(lambda: (completed > before + 20).all())
    os.kill(victim, signal.SIGKILL)
    return outcome


def test_a_host_killed_during_a_compiled_loop_breaks_the_pool(make_remote, no_jax_log):
    envs = make_remote(CountingEnv, 4)
    handle, _ = jaxvec.reset(envs)
    loop = partial(jax.lax.fori_loop, 0, 10**9, lambda _, h: jaxvec.step(h, np.zeros(4, int))[0])
    program = lambda: jax.block_until_ready(jax.jit(loop)(handle))  # noqa: E731
    outcome = kill_a_host_during(envs, program, host_of(envs, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="WorkerDiedError"):
        outcome.result()
    with pytest.raises(jaxvec.WorkerDiedError, match=r"on .*process \d+\) was lost: its connection ended"):
        envs.raise_if_failed()
    within(envs.close)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("when", ["waits", "dials in later"])
def test_a_host_killed_during_a_compiled_loop_is_replaced(make_remote, hosts, when):
    envs = make_remote(CountingEnv, 4, on_fault="restart")
    if when == "waits":
        hosts.start()
        wait_until(lambda: hosts.remote._listener.wait(1, 0))
    handle, _ = jaxvec.reset(envs)
    victim = host_of(envs, 1)

    def go_on(carry):
        handle, faults, after = carry
        handle, timestep = jaxvec.step(handle, np.zeros(4, int))
        faults = faults + timestep.info["fault"]
        return handle, faults, after + faults.any()

    loop = partial(jax.lax.while_loop, lambda carry: carry[2] < 20, go_on)
    program = lambda: jax.block_until_ready(jax.jit(loop)((handle, np.zeros(4, int), 0)))  # noqa: E731
    outcome = kill_a_host_during(envs, program, victim)
    if when != "waits":
        hosts.start()
    _, faults, _ = outcome.result()
    assert faults.tolist() == [0, 0, 1, 1]
    assert envs.stats().total.restarts == 1
    assert host_of(envs, 1) != victim


@pytest.mark.slow
def test_a_host_that_is_stopped_is_replaced(make_remote, hosts):
    envs = make_remote(CountingEnv, 4, step_timeout=3, on_fault="restart")
    envs.reset()
    victim = host_of(envs, 0)
    hosts.start()
    wait_until(lambda: hosts.remote._listener.wait(1, 0))
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED)
    assert envs.step(np.zeros(4, int)).info["fault"].tolist() == [True, True, False, False]
    assert host_of(envs, 0) != victim


@pytest.mark.slow
def test_a_slow_env_is_replaced_beside_the_others_of_its_host(make_remote):
    envs = make_remote(SleepingEnv, 4, num_workers=4, step_timeout=5, on_fault=jaxvec.Restart(rate=None))
    envs.reset(seed=0)
    before = host_of(envs, 0)
    rows = envs.step(np.full(4, 7))
    assert rows.info["fault"].tolist() == [False, True, False, False]
    assert host_of(envs, 0) == before


# --- Hosts and their ends -------------------------------------------------------------------------


class Pid(CountingEnv):
    def pid(self):
        return os.getpid()


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
    make_remote(CountingEnv, NUM_ENVS).close()
    logs = [each.communicate(timeout=PATIENCE)[1] for each in hosts.processes]
    steps = r"(?s)connecting to 127.*connected to 127.*; waiting .*serving envs (.*?)\n.*the pool has closed"
    assert sorted(re.search(steps, log)[1] for log in logs) == ["0 to 1", "2 to 4"]


def test_hosts_and_their_workers_end_with_the_pool(make_remote, hosts):
    envs = make_remote(Pid, 4)
    pids = envs.call("pid")
    envs.close()
    assert [process.wait(PATIENCE) for process in hosts.processes] == [0, 0]
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_host_that_loses_its_pool_fails_and_can_be_restarted(hosts):
    script = (
        "import sys, time, jaxvec\n"
        "remote = jaxvec.Remote(listen='127.0.0.1:0', key=sys.argv[1].encode())\n"
        "print(remote.address, flush=True)\n"
        "envs = jaxvec.make('CartPole-v1', 2, num_workers=2, backend=remote)\n"
        "print('made', flush=True)\n"
        "time.sleep(1000)\n"
    )
    pool = subprocess.Popen(
        [sys.executable, "-c", script, KEY.decode()], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        address = pool.stdout.readline().strip()
        command = [sys.executable, "-m", "jaxvec", "worker", "--connect", address]
        host = subprocess.Popen([*command, "--key-file", str(hosts.key_file)], stderr=subprocess.PIPE)
        hosts.processes.append(host)
        assert pool.stdout.readline() == "made\n"
        workers = psutil.Process(host.pid).children(recursive=True)
        assert workers
    finally:
        pool.kill()
        pool.communicate(timeout=PATIENCE)
    assert host.wait(PATIENCE) == 1
    assert b": the connection to " + address.encode() + b" was lost: " in host.stderr.read()
    wait_until(lambda: not any(worker.is_running() for worker in workers))


def test_by_default_each_core_of_the_hosts_has_a_worker(make, hosts, monkeypatch):
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


def test_fewer_workers_than_hosts_are_refused(hosts):
    with pytest.raises(ValueError, match="hosts is 2, but the pool has only 1 workers"):
        jaxvec.make(CountingEnv, 4, num_workers=1, backend=hosts.remote)


def test_a_listener_ends_with_its_last_user():
    before = threading.active_count()
    address = jaxvec.Remote(listen="127.0.0.1:0", key=KEY).address.rpartition(":")
    wait_until(lambda: threading.active_count() <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address[0], int(address[2])))


# --- Recycling ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dispatch", "transport"), [("native", "ffi"), ("portable", "io_callback")])
def test_recycling_at_hosts_changes_no_bit(make, make_remote, dispatch, transport):
    options = {"dispatch": dispatch, "transport": transport}
    recycle, chosen = {"workers": jaxvec.Workers(recycle=recycling.OFTEN)}, recycling.actions(high=2)
    local, remote = (
        each(state_game.walk, recycling.NUM_ENVS, **options, **more)
        for each, more in ((make, {}), (make_remote, recycle))
    )
    recycling.assert_equal(recycling.scan(remote, chosen), recycling.scan(local, chosen))
    assert min(recycling.recycled(remote)) >= 1


@pytest.mark.slow
def test_recycling_at_hosts_without_exact_states(make_remote):
    env_fn = partial(recycling.Opened, episode_length=7)
    workers = jaxvec.Workers(recycle=recycling.OFTEN)
    envs = make_remote(env_fn, recycling.NUM_ENVS, workers=workers, info={"pid": np.int32})
    chosen = recycling.actions(high=2)
    _, rows = recycling.scan(envs, chosen)
    assert min(recycling.recycled(envs)) >= 2
    faults, pids = rows.info["fault"], np.unique(rows.info["pid"])
    recycling.check_rows(rows, chosen, faults)
    assert (faults.sum(0) >= 2).all()
    envs.close()
    wait_until(lambda: not any(map(psutil.pid_exists, pids[pids > 0].tolist())))


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
def tls_hosts(tmp_path, authority):
    """Yields hosts that check the certificate of the pool's machine."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    hosts = Hosts(tmp_path / "key", ssl_context=context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    yield hosts
    hosts.close()


@pytest.mark.slow
def test_data_over_tls_are_those_of_local_workers(make, tls_hosts, tmp_path):
    processes = [tls_hosts.start("--tls-ca", str(tmp_path / "ca.pem")) for _ in range(2)]
    local = make(ImageEnv, NUM_ENVS, num_workers=2)
    remote = make(ImageEnv, NUM_ENVS, num_workers=2, backend=tls_hosts.remote)
    actions = np.random.default_rng(0).integers(0, 10, (20, NUM_ENVS))

    def run(envs):
        return [envs.reset(seed=3), *map(envs.step, actions)]

    assert_equal(run(remote), run(local))
    remote.close()
    assert [process.wait(PATIENCE) for process in processes] == [0, 0]


@pytest.mark.slow
def test_a_lost_host_with_tls_is_replaced(make, tls_hosts, tmp_path):
    for _ in range(3):
        tls_hosts.start("--tls-ca", str(tmp_path / "ca.pem"))
    envs = make(CountingEnv, 4, num_workers=2, backend=tls_hosts.remote, on_fault="restart")
    envs.reset(seed=0)
    os.kill(host_of(envs, 0), signal.SIGKILL)
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
