"""The number of threads reaches numpy's linear algebra."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from headway.engine import build
from headway.engine.blas import Blas
from tests.serve.conftest import write_tiny_checkpoint

SCRIPT = """
import sys
from headway import LLM
from headway.engine.blas import Blas
blas = Blas()
if not blas.found:
    sys.exit("not found")
blas.use(4)
for threads in (1, 3, None):
    with LLM(sys.argv[1], backend="reference", threads=threads, kv_cache_gib=0.01):
        print(threads, blas.threads)
"""


@pytest.mark.skipif(not Blas().found, reason="this numpy's library cannot be told")
def test_threads_are_those_of_numpy_too(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    shown = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    lines = shown.stdout.splitlines()
    assert lines[:2] == ["1 1", "3 3"], shown.stderr
    assert lines[2] == f"None {min(3, build.usable_cores())}", "never raised without being asked"


def test_a_library_that_cannot_be_told_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headway.engine.blas._libraries", list)
    with caplog.at_level(logging.WARNING):
        build._limit_blas(None, 2)
        assert caplog.text == ""
        build._limit_blas(2, 2)
    assert "--threads does not reach numpy's linear algebra here; set OMP_NUM_THREADS=2" in caplog.text
