"""Usable cores and free memory, with the limits of cgroups, whose files the tests write."""

import os

import numpy as np
import pytest
from gymnasium import spaces

import jaxvec
from jaxvec._settings import candidates
from jaxvec._util import free_memory, usable_cores
from jaxvec._workers import process
from jaxvec.testing import CountingEnv


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Yields `machine(cgroup, mounts, files, cores)`, which returns the usable cores of such a machine.

    Args of it: the text of /proc/self/cgroup; pairs `(root, fields)` of mounted hierarchies, with the
    filesystem type and its options; files of these hierarchies, by path below `tmp_path`.
    """

    def machine(cgroup, mounts, files, cores=16, read=usable_cores):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        proc = tmp_path / "proc"
        proc.mkdir()
        lines = ["22 1 8:1 / / rw,relatime - ext4 /dev/root rw"]
        for number, (root, folder, kind, options) in enumerate(mounts, 30):
            at = tmp_path / folder
            lines.append(f"{number} 22 0:{number} {root} {at} rw shared:9 - {kind} {kind} {options}")
        (proc / "mountinfo").write_text("\n".join(lines) + "\n")
        (proc / "cgroup").write_text(cgroup)
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read(str(proc))

    return machine


V2 = [("/", "fs", "cgroup2", "rw")]


@pytest.mark.parametrize(
    ("quota", "cores", "expected"),
    [
        ("max 100000", 16, 16),
        ("300000 100000", 16, 3),
        ("250000 100000", 16, 3),  # rounded up, so that the quota can be used
        ("5000 100000", 16, 1),
        ("800000 100000", 2, 2),  # more than the affinity
    ],
)
def test_cpu_max_of_cgroup_v2_limits_usable_cores(machine, quota, cores, expected):
    assert machine("0::/job\n", V2, {"fs/job/cpu.max": quota + "\n"}, cores) == expected


def test_lowest_quota_of_parent_cgroups_counts(machine):
    files = {
        "fs/a/cpu.max": "200000 100000",
        "fs/a/b/cpu.max": "max 100000",
        "fs/a/b/c/cpu.max": "600000 100000",
    }
    assert machine("0::/a/b/c\n", V2, files) == 2


def test_quota_at_mount_point_of_container_counts(machine):
    assert machine("0::/\n", V2, {"fs/cpu.max": "400000 100000"}) == 4  # with a cgroup namespace


@pytest.mark.parametrize(("quota", "expected"), [("-1", 16), ("150000", 2), ("50000", 1)])
def test_cfs_quota_of_cgroup_v1_limits_usable_cores(machine, quota, expected):
    mounts = [("/", "cpu", "cgroup", "rw,cpu,cpuacct"), ("/", "memory", "cgroup", "rw,memory")]
    cgroup = "5:memory:/other\n4:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/\n"
    files = {
        "cpu/job/cpu.cfs_quota_us": quota,
        "cpu/job/cpu.cfs_period_us": "100000",
        "memory/job/cpu.cfs_quota_us": "100000",  # not the hierarchy of the CPU
        "memory/job/cpu.cfs_period_us": "100000",
    }
    assert machine(cgroup, mounts, files) == expected


@pytest.mark.parametrize("inside", ["", "/inner"])
def test_mounted_part_of_cgroup_v1_is_found(machine, inside):
    """Docker mounts only the container's group, and /proc/self/cgroup has the path on the host."""
    mounts = [("/docker/1f", "cpu", "cgroup", "rw,cpu")]
    files = {f"cpu{inside}/cpu.cfs_quota_us": "700000", f"cpu{inside}/cpu.cfs_period_us": "100000"}
    assert machine(f"4:cpu:/docker/1f{inside}\n", mounts, files) == 7


@pytest.mark.parametrize("cgroup", ["", "0::/gone\n", "0::/../sibling\n"])
def test_unknown_cgroups_limit_nothing(machine, cgroup):
    assert machine(cgroup, V2, {}) == 16


def test_unreadable_quota_limits_nothing(machine):
    assert machine("0::/job\n", V2, {"fs/job/cpu.max": "\n"}) == 16


def test_without_procfs_affinity_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert usable_cores(str(tmp_path / "none")) == 3


@pytest.mark.parametrize(("quota", "num_workers"), [("150000 100000", 2), ("900000 100000", 3)])
def test_default_of_num_workers_follows_quota(machine, monkeypatch, quota, num_workers):
    cores = machine("0::/\n", V2, {"fs/cpu.max": quota})
    monkeypatch.undo()  # the workers inherit the true affinity
    monkeypatch.setattr(process, "usable_cores", lambda: cores)
    with jaxvec.make(CountingEnv, 3) as envs:
        assert len(envs.stats().workers) == num_workers


@pytest.mark.parametrize(("words", "cores", "workers"), [("", 8, 8), ("core", 7, 7), ("core", 8, 7)])
def test_candidate_core_leaves_one_to_the_program(monkeypatch, words, cores, workers):
    monkeypatch.setenv("JAXVEC_CANDIDATES", words)
    monkeypatch.setattr(process, "usable_cores", lambda: cores)
    assert process.LocalProcesses().num_workers(64, None) == workers


def test_unknown_candidate_is_refused(monkeypatch):
    monkeypatch.setenv("JAXVEC_CANDIDATES", "core,cores")
    with pytest.raises(ValueError, match="JAXVEC_CANDIDATES must be one of core.*, not 'cores'"):
        candidates()


# --- Free memory -----------------------------------------------------------------------------------------

MEMINFO = "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nHugePages_Total: 0\nSwapFree: {swap} kB\n"
STAT = "anon 3\nactive_file 1000\ninactive_file 24\nshmem 9\n"


@pytest.mark.parametrize("swap", [0, 1000])
def test_free_memory_is_that_of_the_machine_and_its_swap(machine, swap):
    files = {"meminfo": MEMINFO.format(swap=swap), "fs/job/memory.max": "max", "fs/job/memory.current": "5"}
    assert machine("0::/job\n", V2, files, read=free_memory) == (8000 + swap) * 1024


def test_free_memory_is_that_of_the_smallest_cgroup(machine):
    files = {
        "meminfo": MEMINFO.format(swap=0),
        "fs/a/memory.max": "100000",
        "fs/a/memory.current": "70000",
        "fs/a/memory.stat": STAT,
        "fs/a/b/memory.max": "90000",
        "fs/a/b/memory.current": "50000",
    }
    assert machine("0::/a/b\n", V2, files, read=free_memory) == 100_000 - 70_000 + 1024


def test_free_memory_of_cgroup_v1(machine):
    mounts = [("/", "cpu", "cgroup", "rw,cpu"), ("/", "memory", "cgroup", "rw,memory")]
    files = {
        "meminfo": MEMINFO.format(swap=0),
        "memory/job/memory.limit_in_bytes": "100000",
        "memory/job/memory.usage_in_bytes": "70000",
        "memory/job/memory.stat": "active_file 1\ntotal_active_file 500\ntotal_inactive_file 12\n",
    }
    assert machine("4:memory:/job\n2:cpu:/\n", mounts, files, read=free_memory) == 30_512


def test_free_memory_may_be_unknown(tmp_path):
    assert free_memory(str(tmp_path / "self")) is None
    assert free_memory() > 0


def test_a_pool_larger_than_the_free_memory_is_refused():
    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict(small=spaces.Discrete(2), huge=spaces.MultiBinary(2**42))

    text = r"needs 17592\.2 GB of memory for 2 envs, but [\d.]+ GB are free\. .*obs\['huge'\], int8\[2, "
    with pytest.raises(MemoryError, match=text):
        jaxvec.make(Env, 2)
    with pytest.raises(MemoryError, match=r"needs 8796\.1 GB"):
        jaxvec.make(Env, 2, final_obs=False)
    with pytest.raises(MemoryError):  # by the mapping, or by NumPy if the kernel grants it
        jaxvec.make(Env, 2, backend="serial")


def test_the_memory_of_saved_states_may_be_larger(make):
    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.MultiBinary(2**20)

        def _observe(self, action):
            return np.zeros(2**20, np.int8)

    envs = make(Env, 1, states=2**20, final_obs=False)  # 1 TB
    envs.reset()
    assert not envs.restore(envs.save()).obs.any()
