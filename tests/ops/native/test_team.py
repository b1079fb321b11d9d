"""Threads that cannot be had, and workers that fail: a smaller team, an exception, and a team that goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headway.ops import native

pytestmark = pytest.mark.skipif(not native.available() or sys.platform != "linux", reason="needs the native kernels")

FEWER_THREADS = """
import logging, resource
from headway.ops.native.backend import NativeBackend
logging.basicConfig()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
backend = NativeBackend(1000)
assert 1 < backend.threads < 1000, backend.threads
print(backend.probe_bandwidth(1 << 20, 1) > 0)
"""


def test_a_team_is_as_large_as_the_machine_allows() -> None:
    done = subprocess.run([sys.executable, "-c", FEWER_THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "True\n", done.stderr
    assert "of 1000 threads could be started" in done.stderr
