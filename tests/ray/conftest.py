"""Hosts on a Ray cluster, hosts that dial in, and pools over both."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import pytest
from support import state_game
from support.disasters import PATIENCE, wait_until
from support.probe import fork
from support.scripts import leftovers

import jaxvec

MARKS = [
    pytest.mark.timeout(300),
    # Ray starts its processes by fork and exec, of which JAX warns, and leaves sockets to the collector.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
KEY = b"a key that the hosts have, too"

cloudpickle.register_pickle_by_value(state_game)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in MARKS:
                item.add_marker(mark, append=False)  # those of a test itself come first


@pytest.fixture(scope="module")
def cluster(kept_by_others):
    pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: the extra ray has it")
    unix = control_sockets()
    before = Counter(leftovers())  # after the fork server's have gone
    with running_cluster() as cluster:
        yield cluster
    wait_until(lambda: control_sockets() == unix)  # ours are; what else there is, gRPC keeps
    more = Counter(leftovers()) - before
    kept_by_others.update({kind: more[kind] for kind in ("anon_inode", "socket")})


def control_sockets():
    fork.end_all()  # which has one, too
    return len(psutil.Process().net_connections("unix"))


@contextmanager
def running_cluster():
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=4, object_store_memory=100 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def make_on_ray(make, cluster):
    """Yields `make` for pools on the cluster, of two workers at two hosts."""
    # A task has an interpreter of Ray's, which takes a minute to start where everything is busy.
    return partial(make, backend=jaxvec.Ray(hosts=2), num_workers=2, start_timeout=200, step_timeout=200)


class Hosts:
    """A listener, and processes `jaxvec worker` that dial in to it."""

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
def start_hosts(tmp_path):
    """Yields `Hosts`, and ends all that it made."""
    made = []

    def start_hosts(**options):
        made.append(Hosts(tmp_path / "key", **options))
        return made[-1]

    yield start_hosts
    for hosts in made:
        hosts.close()


@pytest.fixture
def hosts(start_hosts):
    return start_hosts()


@pytest.fixture
def make_remote(make, hosts):
    """Yields `make` for pools of two workers at two hosts that dial in."""
    for _ in range(2):
        hosts.start()
    return partial(make, backend=hosts.remote, num_workers=2, start_timeout=PATIENCE, step_timeout=PATIENCE)


@pytest.fixture(params=["Ray", "worker"])
def make_at_hosts(request):
    return request.getfixturevalue({"Ray": "make_on_ray", "worker": "make_remote"}[request.param])


@pytest.fixture
def spare_host(request):
    """Lets a host dial in that may replace another one; Ray starts one by itself."""
    if request.node.callspec.params["make_at_hosts"] == "worker":
        request.getfixturevalue("hosts").start()
