"""Where the bytes go, and what the machine gives."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import BadInput
from headway.core.step import blocks_held
from headway.engine.build import build_engine
from headway.engine.machine import free_memory, usable_cores
from headway.engine.options import EngineOptions
from headway.model.load import load
from headway.model.source import DEFAULT_MODEL
from headway.ops import native
from headway.ops.reference import ReferenceBackend
from headway.roofline.hardware import GIB
from headway.roofline.memory import MOST_BLOCKS, MemoryPlan, cut_pools
from headway.shape.model import KVGroup, block_bytes

GROUP = KVGroup("full", (0, 1), heads=2, key_width=64, value_width=64, dtype_bytes=4.0)
BLOCK = 2 * 2 * 128 * 4 * 32  # layers x heads x (key + value) x float32 x slots
RESERVE = GIB / 4


def plan(free: float = 8 * GIB, **changes: Any) -> MemoryPlan:
    known = {"groups": (GROUP,), "block_size": 32, "max_rows": 4, "max_len": 1024, "step_tokens": 512} | changes
    known.setdefault("block_bytes", [block_bytes(group, 32) for group in known["groups"]])
    return cut_pools(MemoryPlan(free, GIB, GIB, RESERVE), **known)


def test_the_default_cache_serves_the_largest_batch_at_full_context() -> None:
    assert plan().blocks == (4 * 33,)
    assert plan().cache == 4 * 33 * BLOCK


def test_the_default_cache_takes_at_most_a_quarter_of_what_is_left() -> None:
    small = plan(max_rows=10**6)
    assert small.cache == (8 * GIB - 2 * GIB - RESERVE) // 4 // BLOCK * BLOCK


def test_the_wanted_cache_is_the_cache() -> None:
    assert plan(kv_cache_gib=0.5).blocks == (GIB // 2 // BLOCK,)


@pytest.mark.parametrize("gib", [6.0, 0.00001])
def test_a_cache_that_cannot_be_is_refused(gib: float) -> None:
    with pytest.raises(BadInput, match="--kv-cache-gib"):
        plan(kv_cache_gib=gib)


def test_the_terms_add_up_to_what_is_free() -> None:
    made = plan(kv_cache_gib=1.0)
    shown = {label: float(amount.split()[0]) for label, amount in made.lines()}
    assert shown.pop("usable memory") == pytest.approx(sum(shown.values()), abs=0.03)


WINDOW = msgspec.structs.replace(GROUP, kind="window", window=256)


def test_a_windows_pool_holds_the_windows_of_all_rows_and_no_more() -> None:
    made = plan(groups=(GROUP, WINDOW), max_len=8192)
    held = -(-(255 + 512) // 32) + 1  # of a row: its window and the step's new tokens, not aligned
    assert made.blocks == (4 * 257, 4 * (held + 1))
    assert (made.longest, made.tokens) == (8192, 4 * 257 * 32)
    assert made.cache == sum(made.blocks) * BLOCK


def test_windows_that_take_no_more_than_they_need_leave_the_rest_to_the_context() -> None:
    """Rows that share the new tokens of a step do not each hold all of them beside their window."""
    wanted = {"groups": (GROUP, WINDOW), "max_rows": 32, "max_len": 8192, "kv_cache_gib": 0.1}
    equal, least = plan(**wanted), plan(**wanted, least_windows=True)
    needed = 31 * (-(-255 // 32) + 2) + -(-(255 + 512) // 32) + 1  # 31 rows decode, one computes a prompt
    assert equal.blocks[0] == equal.blocks[1] and needed <= least.blocks[1] < equal.blocks[1]
    assert least.blocks[0] > equal.blocks[0] and least.longest == equal.longest == 8192


@given(gib=st.floats(0.01, 4), rows=st.integers(1, 64), length=st.integers(1, 100_000), window=st.integers(1, 9000))
def test_pools_fill_the_wanted_cache_but_never_exceed_it(gib: float, rows: int, length: int, window: int) -> None:
    groups = (GROUP, msgspec.structs.replace(WINDOW, window=window))
    made = plan(groups=groups, kv_cache_gib=gib, max_rows=rows, max_len=length)
    assert gib * GIB - 2 * BLOCK < made.cache <= gib * GIB
    assert made.blocks[1] <= made.blocks[0] and 0 < made.longest <= length
    for blocks, group in zip(made.blocks, groups, strict=True):
        assert blocks_held(made.longest, group.window, 32, 512) <= blocks


def test_a_context_that_a_file_claims_buys_no_more_than_so_many_blocks() -> None:
    made = plan(max_rows=64, max_len=2**32 - 1, block_bytes=[512.0])
    assert made.blocks == (MOST_BLOCKS,) and made.longest == 32 * MOST_BLOCKS


def test_models_of_windows_alone_serve_any_length() -> None:
    made = plan(groups=(WINDOW,), max_len=1 << 20)
    assert made.longest == 1 << 20


@pytest.mark.parametrize(("quota", "most"), [("max 100000", 10**6), ("100000 100000", 1), ("50000 100000", 1)])
def test_cores_respect_the_container(tmp_path: Path, quota: str, most: int) -> None:
    """Reported t2-034."""
    (tmp_path / "cpu.max").write_text(quota)
    assert 1 <= usable_cores(tmp_path) <= most


def test_memory_respects_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    8000000 kB\n")
    assert free_memory(tmp_path, meminfo) == 8_000_000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_memory(tmp_path, meminfo) == 600_000


def test_file_cache_that_nobody_uses_is_free(tmp_path: Path) -> None:
    for name, value in {"max": "1000000", "current": "900000", "stat": "anon 100000\ninactive_file 700000"}.items():
        (tmp_path / f"memory.{name}").write_text(value)
    assert free_memory(tmp_path) == 800_000


@pytest.mark.parametrize("limited", ["slice", "slice/job", "memory/slice", "memory/slice/job"])
def test_a_limit_on_any_group_around_the_process_binds_it(tmp_path: Path, limited: str) -> None:
    v1 = limited.startswith("memory/")
    own = tmp_path / "own"
    own.write_text("4:memory:/slice/job\n3:cpu,cpuacct:/other\n" if v1 else "0::/slice/job\n")
    folder = tmp_path / "cgroup" / limited
    folder.mkdir(parents=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text("5000000")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text("1000000")
    assert free_memory(tmp_path / "cgroup", own=own) == 4_000_000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to know its address space")
def test_memory_respects_ulimit() -> None:
    code = "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 30, 1 << 30));"
    code += "from headway.engine.machine import free_memory; print(free_memory())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 0 < int(shown.stdout) < 1 << 30


def test_what_does_not_fit_says_where_the_memory_went() -> None:
    with pytest.raises(BadInput, match=r"at most 0.75 GiB are left for it of 3.00 GiB free, after weights of 1.00,"):
        plan(3 * GIB, kv_cache_gib=1.0)


def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    backend = ReferenceBackend()
    with pytest.raises(BadInput, match=r"model: the weights of SmolLM2.* take 0.09 GiB; 0.05 are free"):
        load(DEFAULT_MODEL, backend, room=0.05 * GIB)
    assert backend.weight_bytes == 0


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_closed_engine_gives_back_its_threads() -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    build_engine(EngineOptions(threads=3, max_rows=2, max_model_len=64)).close()  # the tokenizer's stay for all
    gc.collect()
    before = threads()
    engine = build_engine(EngineOptions(threads=3, max_rows=2, max_model_len=64))
    assert threads() >= before + 2
    engine.close()
    engine.close()  # idempotent
    gc.collect()
    assert threads() <= before
