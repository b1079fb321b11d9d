"""Merges worked out of scores are kept: the same tokenizer as a fresh one, whatever became of the file meanwhile."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from headway.text import merge_cache
from headway.text.gguf_pieces import merge_pairs
from headway.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import TRICKY, gguf_source

WORDS = ["ab", "abc", "bc", "abab", "▁a", "▁ab", "▁abc", "aa", "aaa", "▁▁", "ba", "cab"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abc▁", *WORDS]


def tokenizer(folder: Path | None, tokens: list[str] = TOKENS, equal: bool = False) -> Tokenizer:
    """equal: all pieces have the same score."""
    header = {
        "model": "llama", "tokens": tokens, "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "scores": [-1.0 if equal else -float(id) for id in range(len(tokens))],
    }  # fmt: skip
    made = Tokenizer(gguf_source({f"tokenizer.ggml.{key}": value for key, value in header.items()}), cache=folder)
    made.load()
    return made


def ids(made: Tokenizer) -> list[list[int]]:
    return [made.encode(text) for text in [*TRICKY, "abab abcab  aaaa", "cababc", "aaabbbccc"]]


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_cache, "LEAST_PIECES", 0)


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows each time that merges are worked out."""
    times: list[int] = []

    def counted(vocab: dict[str, int], scores: list[float]) -> np.ndarray:
        times.append(len(vocab))
        return merge_pairs(vocab, scores)

    monkeypatch.setattr("headway.text.gguf_pieces.merge_pairs", counted)
    return times


def test_pairs_are_in_the_order_of_scores() -> None:
    pieces = ["a", "b", "ab", "aba", "ba"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    assert merge_pairs(vocab, [0.0, 0.0, -3.0, -1.0, -2.0]).tolist() == [[2, 0], [0, 4], [1, 0], [0, 1]]
    assert merge_pairs({"a": 0, "b": 1}, [0.0, 0.0]).tolist() == []


def test_kept_once_and_read_afterwards(tmp_path: Path, derived: list[int]) -> None:
    fresh, first, again = tokenizer(None), tokenizer(tmp_path / "new"), tokenizer(tmp_path / "new")
    assert len(derived) == 2 and ids(again) == ids(first) == ids(fresh)
    assert [file.suffix for file in (tmp_path / "new").iterdir()] == [".merges"]
    other, equal = tokenizer(tmp_path / "new", [*TOKENS, "bab"]), tokenizer(tmp_path / "new", equal=True)
    assert len(derived) == 4 and len(list((tmp_path / "new").iterdir())) == 3
    assert ids(other) == ids(tokenizer(None, [*TOKENS, "bab"])) and ids(equal) == ids(tokenizer(None, equal=True))


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "long", "another's"])
def test_a_damaged_file_is_made_anew(
    tmp_path: Path, derived: list[int], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    expected = ids(tokenizer(tmp_path))
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    bad = {"cut": good[:-8], "bit": good[:-1] + b"\x01", "empty": b"", "long": good + bytes(8)}
    if damage == "another's":
        tokenizer(tmp_path / "other", [*TOKENS, "bab"])
        (other,) = (tmp_path / "other").glob("*.merges")
        bad[damage] = other.read_bytes()
    path.write_bytes(bad[damage])
    before = len(derived)
    with caplog.at_level(logging.WARNING):
        assert ids(tokenizer(tmp_path)) == expected and len(derived) == before + 1
    assert [record.message for record in caplog.records] == [
        f"{path}: cannot be used and is made anew: it is damaged, or of something else"
    ]
    assert path.read_bytes() == good
    assert ids(tokenizer(tmp_path)) == expected and len(derived) == before + 1


def test_a_folder_that_cannot_be_written_is_let_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert ids(tokenizer(tmp_path / "file" / "folder")) == ids(tokenizer(None))
    (record,) = caplog.records
    assert "merges are not kept" in record.message


def test_only_so_many_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_cache, "MOST_FILES", 2)
    for more in ("ac", "bb", "cc"):
        tokenizer(tmp_path, [*TOKENS, more])
        for file in tmp_path.iterdir():
            os.utime(file, (file.stat().st_mtime - 60,) * 2)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(merge_cache, "MOST_BYTES", 10)
    tokenizer(tmp_path, TOKENS)
    assert len(list(tmp_path.iterdir())) == 2
