"""Packed weights on disk: the same bits as packing, taken only for the very same weight, and never when damaged."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from headway.model.load import load
from headway.ops import native
from headway.ops.native import packed
from headway.ops.native.backend import NativeBackend
from tests.model.checkpoints import make, prompt
from tests.model.paging import Bench

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))

IDS = prompt(20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make(folder)
    return folder


def run(
    model: Path, cache: Path | None, weights: str = "int4", group: int | None = None
) -> tuple[np.ndarray, int, int]:
    """-> (logits, bytes read from the cache, bytes written to it)."""
    backend = NativeBackend(threads=2, weights=weights, group=group, pack_cache=cache)
    logits = Bench(load(model, backend), backend).step({"a": IDS})
    return logits, *(backend.pack_cache_bytes if cache else (0, 0))


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*"))


def test_the_second_start_reads_what_the_first_packed_and_computes_the_same_bits(model: Path, tmp_path: Path) -> None:
    plain, _, _ = run(model, None)
    first, read, written = run(model, tmp_path)
    assert read == 0 and written > 0
    second, again, _ = run(model, tmp_path)
    assert again == written
    np.testing.assert_array_equal(first, plain)
    np.testing.assert_array_equal(second, plain)
    assert all(path.suffix == ".packed" for path in files(tmp_path))


def test_another_setting_or_a_changed_file_is_another_key(tmp_path: Path) -> None:
    make(tmp_path / "model")
    cache, weights = tmp_path / "cache", tmp_path / "model" / "model.safetensors"
    run(tmp_path / "model", cache)
    for changed in ({"weights": "int8"}, {"group": 64}):
        assert run(tmp_path / "model", cache, **changed)[1] == 0  # type: ignore[arg-type]
    data = bytearray(weights.read_bytes())
    stat = weights.stat()
    data[-4:] = np.float32(0.5).tobytes()  # same size, same time
    with weights.open("r+b") as file:  # and same inode
        file.write(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run(tmp_path / "model", cache)[1] == 0
    os.utime(weights)
    assert run(tmp_path / "model", cache)[1] == 0


DAMAGE = {
    "cut short": lambda data: data[:-100],
    "empty": lambda data: b"",
    "one bit of the weights": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "one bit of the header": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "a header length beyond the end": lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:],
    "another kind of file": lambda data: b"GGUF" + data[4:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_said_to_be_so_and_made_anew(
    model: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    want, _, _ = run(model, tmp_path)
    victim = files(tmp_path)[0]
    whole = victim.read_bytes()
    victim.write_bytes(DAMAGE[damage](whole))
    with caplog.at_level(logging.WARNING):
        got, _, _ = run(model, tmp_path)
    assert victim.name in caplog.text and "made anew" in caplog.text
    np.testing.assert_array_equal(got, want)
    assert victim.read_bytes() == whole


def test_a_file_of_another_weight_is_not_taken(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want, _, _ = run(model, tmp_path)
    first, second, *_ = files(tmp_path)
    first.write_bytes(second.read_bytes())
    np.testing.assert_array_equal(run(model, tmp_path)[0], want)
    assert "belongs to another weight" in caplog.text


def test_a_folder_that_cannot_be_written_is_said_once(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    run(model, tmp_path / "file" / "cache")
    assert caplog.text.count("are not kept") == 1


def test_a_folder_that_can_only_be_read_is_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _, written = run(model, tmp_path)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.utime", read_only)
    monkeypatch.setattr("pathlib.Path.mkdir", read_only)
    got, read, _ = run(model, tmp_path)
    assert read == written
    np.testing.assert_array_equal(got, want)


def test_models_not_used_for_longest_make_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = run(model, tmp_path, "int4")[2] * 11 // 10
    (old,) = tmp_path.iterdir()
    os.utime(old, (1, 1))
    run(model, tmp_path, "int4", 64)
    monkeypatch.setattr(packed, "MOST_BYTES", 2 * size)
    run(model, tmp_path, "int4", 128)
    assert not old.exists() and len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(packed, "MOST_BYTES", 1000)
    run(model, tmp_path, "int4", 16)
    assert "more would be over" in caplog.text


def test_weights_kept_as_stored_are_not_written(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, "stored")
    assert not files(tmp_path)
