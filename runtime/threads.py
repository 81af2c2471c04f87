"""The number of threads: the argument, `QC_NUM_THREADS`, else what affinity and the cgroup's CPU quota allow."""

from __future__ import annotations

import os
from pathlib import Path

from qcompiler.errors import ArgumentError

MAX_THREADS = 1024


def resolve_num_threads(requested: int | None) -> int:
    """The number of threads. ArgumentError for anything but 1…1024."""
    if requested is not None:
        return _checked(requested, "num_threads")
    return default_threads()


def default_threads() -> int:
    """`QC_NUM_THREADS`, else the processors that affinity and quota allow this process."""
    if text := os.environ.get("QC_NUM_THREADS"):
        return _checked(int(text) if text.isdigit() else text, "QC_NUM_THREADS")
    count = usable_cpus()
    quota = cgroup_cpus()
    return min(count if quota is None else max(1, min(count, int(quota))), MAX_THREADS)


def _checked(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_THREADS:
        raise ArgumentError(f"{name}={value!r} is not a number of threads between 1 and {MAX_THREADS}")
    return value


def usable_cpus() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_cpus(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU quota in processors (v2 `cpu.max`, v1 `cpu.cfs_quota_us`), the least along the path; None without one."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    least: float | None = None
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            base, read = mount, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = mount / "cpu", _quota_v1
        else:
            continue
        for directory in _upwards(base, path):
            quota = read(directory)
            if quota is not None:
                least = quota if least is None else min(least, quota)
    return least


def _upwards(base: Path, path: str) -> list[Path]:
    """The group's directory and those above it. Inside a container some may not exist; these are left out."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota_v2(directory: Path) -> float | None:
    try:
        quota, period = (directory / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(directory: Path) -> float | None:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
