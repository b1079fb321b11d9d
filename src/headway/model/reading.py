"""What both file readers share: mapping a file, checked JSON, and one way to say what is wrong with it."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from headway.core.errors import ModelFileError

MAX_JSON_BYTES = 16 << 20  # an index of 100 000 tensors has 10 MB


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file read-only; nothing is read yet.

    Raises:
        ModelFileError: it is missing, empty, or no file.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelFileError(f"{path}: the file is empty") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None


def forget_pages(mapping: mmap.mmap, start: int, size: int) -> None:
    """Give the memory of [start, start + size) back to the system, which can read it again: what a process looked at in
    a mapped file otherwise counts as its own. Pages shared with neighbours stay."""
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, first, end - first)


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object, with duplicate keys refused at every level.

    Raises:
        ModelFileError: not JSON, not an object, too deeply nested, or a key given twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON: {error}"
        raise ModelFileError(f"{where} {problem}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} must be a JSON object, not {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most `MAX_JSON_BYTES`.

    Raises:
        ModelFileError: see `parse_json_object`; also a missing or oversized file.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(text) > MAX_JSON_BYTES:
        raise ModelFileError(f"{path}: larger than the {MAX_JSON_BYTES >> 20} MiB accepted for a JSON file")
    return parse_json_object(text, f"{path}: the file")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} is given twice")
            seen.add(key)
    return result
