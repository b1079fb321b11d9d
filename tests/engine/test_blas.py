"""The number of threads reaches numpy's linear algebra."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from threadpoolctl import ThreadpoolController

from headway.engine.backends import limit_blas
from headway.engine.machine import usable_cores
from tests.serve.conftest import write_tiny_checkpoint

SCRIPT = """
import sys
from threadpoolctl import ThreadpoolController
from headway import LLM
blas, *_ = ThreadpoolController().select(user_api="blas").lib_controllers
blas.set_num_threads(4)
for threads in (1, 3, None):
    with LLM(sys.argv[1], backend="reference", threads=threads, kv_cache_gib=0.01):
        print(threads, blas.num_threads)
"""


BLAS = ThreadpoolController().select(user_api="blas").lib_controllers


@pytest.mark.skipif(not BLAS, reason="this numpy's library cannot be told")
def test_threads_are_those_of_numpy_too(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    shown = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    lines = shown.stdout.splitlines()
    assert lines[:2] == ["1 1", "3 3"], shown.stderr
    assert lines[2] == f"None {min(3, usable_cores())}", "never raised without being asked"


def test_a_library_that_cannot_be_told_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        ThreadpoolController, "select", lambda self, user_api: ThreadpoolController._from_controllers([])
    )
    with caplog.at_level(logging.WARNING):
        limit_blas(None, 2)
        assert caplog.text == ""
        limit_blas(2, 2)
    assert "--threads does not reach numpy's linear algebra here; set OMP_NUM_THREADS=2" in caplog.text
