"""What this process may use of the machine that it runs on: its processors, under the container's limits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_groups", "read_text", "usable_cpus"]


def usable_cpus(*, root: Path = Path("/")) -> int:
    """As many threads as can really run at a time: the least of processors, affinity and the container's quota.

    The library never changes torch's number of threads, which is the host program's; torch counts the machine's cores
    and knows no quota, and threads beyond it only wait for each other.

    Args:
        root: of the file system, for tests.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    for folder, is_unified in control_groups("cpu", root=root):
        if is_unified:
            quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")
        else:
            quota = read_text(folder / "cpu.cfs_quota_us").strip()
            period = read_text(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are none
            yield math.ceil(int(quota) / int(period))


def control_groups(controller: str, *, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The folder of each control group that this process is in, and of each group above; True for version 2."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Within a container the path may be the one outside; then only the top of the tree exists.
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, controllers == ""
            if folder == top:
                break


def read_text(path: Path) -> str:
    """A file's text, or none."""
    try:
        return path.read_text()
    except OSError:
        return ""
