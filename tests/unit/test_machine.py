"""OLLAMA-17916: threads are counted by what the container lets run, not by the machine's cores."""

import os
from pathlib import Path

import pytest

from batchkit.machine import usable_cpus


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(affinity: int, files: dict[str, str]) -> Path:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


V2, V1 = "0::/\n", "4:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n"


@pytest.mark.parametrize(
    ("affinity", "files", "usable"),
    [
        (2, {}, 2),
        (64, {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (2, {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "800000 100000\n"}, 2),
        (64, {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        (64, {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        (64, {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        (64, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        (
            64,
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            64,
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            64,
        ),
    ],
)
def test_ollama_17916_usable_cpus(machine, affinity: int, files: dict[str, str], usable: int) -> None:
    assert usable_cpus(root=machine(affinity, files)) == usable
