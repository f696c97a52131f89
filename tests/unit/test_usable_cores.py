"""Usable cores: the CPU affinity, and the CPU quotas of cgroups, whose files the tests write."""

from __future__ import annotations

import os

import pytest

import jaxvec
from jaxvec._util import usable_cores
from jaxvec._workers import process
from jaxvec.testing import CountingEnv


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Yields `machine(cgroup, mounts, files, cores)`, which returns the usable cores of such a machine.

    Args of it: the text of /proc/self/cgroup; pairs `(root, fields)` of mounted hierarchies, with the
    filesystem type and its options; files of these hierarchies, by path below `tmp_path`.
    """

    def machine(cgroup, mounts, files, cores=16):
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
        return usable_cores(str(proc))

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
