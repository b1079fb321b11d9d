"""What this machine gives a process: cores and memory, container limits included, and a clock."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

from headway.core.clock import WallClock

CGROUP = Path("/sys/fs/cgroup")


def wall_clock() -> WallClock:
    """The clock of every engine. It counts from the machine's start, so all processes of a machine agree on it."""
    return WallClock(time.perf_counter_ns)


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores this process may use: CPU affinity, cut by the cgroup's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words(cgroup / "cpu.max")  # v2: "max 100000" or "150000 100000"
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def free_memory(cgroup: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be taken without swapping: what the system calls available, cut by the cgroup's limit."""
    free = _available(meminfo)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _words(cgroup / limit_file), _words(cgroup / used_file)
        if limit and used and limit[0].isdigit():
            free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if platform.system() == "Darwin":  # macOS reclaims file cache on demand: half of the memory is a safe claim
        return int(subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, check=True).stdout) // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # no such cgroup file: no limit
        return []


def isa() -> list[str]:
    """Instruction sets that matter to the kernels, as this CPU reports them."""
    wanted = (
        "avx2",
        "fma",
        "avx_vnni",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "amx_int8",
        "amx_bf16",
        "asimd",
        "i8mm",
    )
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.machine()]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [name for name in wanted if name in flags] or [platform.machine()]
