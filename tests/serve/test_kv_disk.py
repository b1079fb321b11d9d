"""A server that is asked to stop and started again is warm."""

from __future__ import annotations

import sys
from pathlib import Path

from headway.core.events import BlocksAwaited, BlocksLoaded, BlocksSaved
from headway.engine.ipc import Status
from headway.serve.metrics import Metrics, render
from tests.serve.conftest import Server, parse_metrics, write_tiny_checkpoint
from tests.serve.test_answers import TEXT


def test_a_restarted_server_has_its_prefixes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_checkpoint(tmp_path / "model")
    options = ["--port", "0", "--kv-cache-gib", "0.01", "--kv-disk", str(tmp_path / "kv"), "--kv-disk-gib", "0.1"]
    body = {"prompt": "the quick brown fox " * 20, "max_tokens": 4, "temperature": 0}
    texts, cached, loaded = [], [], []
    for _ in range(2):
        server = Server(command=[sys.executable, "-m", "headway", "serve", str(tmp_path / "model"), *options])
        try:
            answer = server.post(TEXT, body).json()
            texts.append(answer["choices"][0]["text"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            metrics = server.metrics()
            loaded.append(metrics["headway:kv_disk_loaded_blocks_total"])
            assert 0 <= metrics["headway:kv_disk_bytes"] <= metrics["headway:kv_disk_limit_bytes"] == int(0.1 * 2**30)
            assert server.stop() == 0
        finally:
            server.kill()
    assert texts[0] == texts[1]
    assert cached[0] == loaded[0] == 0 and cached[1] == 32 * loaded[1] > 0
    assert any("cache on disk" in line for line in server.lines)


def test_metrics_of_the_disk() -> None:
    metrics = Metrics("m")
    metrics.fold(BlocksAwaited(now=0, id="a", blocks=((0, 0), (0, 1), (0, 2))))
    metrics.fold(BlocksLoaded(now=0, id="a", blocks=((0, 0), (0, 1)), bytes=20, seconds=0.5))
    metrics.fold(BlocksLoaded(now=0, id="a", blocks=(), seconds=0.25, last=True, failed=True))
    metrics.fold(BlocksSaved(now=0, blocks=3, bytes=30, dropped=2, failed=1))
    shown = parse_metrics(render(metrics.series(Status(disk_blocks=7, disk_bytes=70, disk_limit=100))))
    expected = {
        "blocks": 7, "bytes": 70, "limit_bytes": 100, "hits_total": 1, "loaded_blocks_total": 2,
        "loaded_bytes_total": 20, "load_seconds_total": 0.75, "load_failures_total": 1, "saved_blocks_total": 3,
        "saved_bytes_total": 30, 'lost_blocks_total{reason="dropped"}': 2, 'lost_blocks_total{reason="failed"}': 1,
    }  # fmt: skip
    assert {name: shown[f"headway:kv_disk_{name}"] for name in expected} == expected
    assert not any("kv_disk" in name for name in parse_metrics(render(metrics.series(Status()))))
