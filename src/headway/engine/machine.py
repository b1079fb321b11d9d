"""What this machine gives a process: cores and memory, container limits included, and a clock."""

from __future__ import annotations

import math
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.clock import WallClock

if TYPE_CHECKING:
    import asyncio

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def wall_clock() -> WallClock:
    """The clock of every engine. It counts from the machine's start, so all processes of a machine agree on it."""
    return WallClock(time.perf_counter_ns)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed (`pip install 'headway[uvloop]'`): half the processor time per streamed chunk."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.new_event_loop
    return uvloop.new_event_loop


def usable_cores(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int:
    """Cores this process may use: CPU affinity, cut by the quotas of its cgroups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(cgroup, "cpu", own):
        v1 = [word for name in ("quota", "period") for word in _words(group / f"cpu.cfs_{name}_us")]  # "-1" = none
        quota = _words(group / "cpu.max") or v1  # v2: "max 100000" or "150000 100000"
        if len(quota) == 2 and quota[0].isdigit():
            cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def free_memory(cgroup: Path = CGROUP, meminfo: Path = Path("/proc/meminfo"), own: Path = OWN_GROUPS) -> int:
    """Bytes that can be taken without swapping: what the system calls available, cut by the limits of this process's
    cgroups, where file cache that nobody uses is free, and by its `ulimit -v`."""
    free = int(min(_available(meminfo), _address_space()))
    for group in _groups(cgroup, "memory", own):
        limit, used = (
            _words(group / v2) or _words(group / v1)
            for v2, v1 in (("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes"))
        )
        if limit and used and limit[0].isdigit():
            stat = _words(group / "memory.stat")  # name, value, name, value ...
            known = dict(zip(stat[::2], stat[1::2], strict=False))
            cache = known.get("total_inactive_file") or known.get("inactive_file") or "0"  # v1's, its subgroups too; v2
            free = min(free, max(0, int(limit[0]) - int(used[0]) + int(cache)))
    return free


def _groups(cgroup: Path, controller: str, own: Path) -> list[Path]:
    """Folders of the cgroups this process is in: one tree for all (v2), or one per controller (v1). A limit anywhere
    between its own group and the root binds it."""
    found = {cgroup, cgroup / controller}  # in a container the own group is often mounted as the root
    for line in _text(own).splitlines():  # "0::/path" (v2), "4:cpu,cpuacct:/path" (v1)
        controllers, path = line.split(":", 2)[1:]
        if not controllers or controller in controllers.split(","):
            folder = (cgroup / controller if controllers else cgroup) / path.lstrip("/")
            found |= {folder, *(parent for parent in folder.parents if cgroup in parent.parents)}
    return list(found)


def _address_space() -> float:
    """Bytes left under `ulimit -v`; infinite without one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    taken = _words(Path("/proc/self/statm"))
    if limit == resource.RLIM_INFINITY or not taken:
        return math.inf
    return max(0, limit - int(taken[0]) * resource.getpagesize())


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if platform.system() == "Darwin":  # macOS reclaims file cache on demand: half of the memory is a safe claim
        return int(subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, check=True).stdout) // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such cgroup file: no limit
        return ""


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
