"""Threads that cannot be had, and workers that fail: a smaller team, an exception, and a team that goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headway.ops import native
from tests.serve.conftest import write_tiny_checkpoint

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


STARVED_STEP = """
import resource, sys
import numpy as np
from headway.model.load import load
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import CacheLayout
from tests.model.paging import step_batch

def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

backend = NativeBackend(threads=2)
model = load(sys.argv[1], backend)
layout = CacheLayout(model.shape.groups, (1000,), 16)
backend.allocate(layout)
program = backend.compile(model.forward)
small = step_batch(layout, [([1, 2, 3], 0, [[0]])])
before = program.run(small).rows.copy()
resource.setrlimit(resource.RLIMIT_AS, (used() + (2 << 20), resource.RLIM_INFINITY))
try:
    program.run(step_batch(layout, [([1] * 15000, 0, [list(range(1000))])], "last"))
except MemoryError:
    print("MemoryError")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(np.array_equal(program.run(small).rows, before))
"""


def test_a_step_that_finds_no_memory_costs_the_step_and_no_more(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    command = [sys.executable, "-c", STARVED_STEP, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stdout) == (0, "MemoryError\nTrue\n"), done.stderr
