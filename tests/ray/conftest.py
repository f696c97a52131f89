"""A Ray cluster, which is simulated on this machine."""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.disasters import wait_until
from support.probe import fork
from support.scripts import leftovers

MARKS = [
    pytest.mark.timeout(300),
    # Ray starts its processes by fork and exec, of which JAX warns, and leaves sockets to the collector.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


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
