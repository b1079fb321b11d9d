"""What both file readers share: mapping a file, checked JSON, and one way to say what is wrong with it."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import stat
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headway.core.errors import ModelFileError, shown

MAX_JSON_BYTES = 16 << 20  # an index of 100 000 tensors has 10 MB

# What tells one file from another, beside its size and times.
SAMPLED_HEAD = 1 << 20  # bytes
SAMPLES, SAMPLE_BYTES = 256, 256

# What is found in a model file's place.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
HTML = (b"<!doctype html", b"<html")

MADV_POPULATE_READ = 22  # Linux 5.14


def open_file(path: Path) -> BinaryIO:
    """Open a file of a model.

    Raises:
        ModelFileError: it is missing, a link that leads nowhere, no regular file (a named pipe would be waited for), or
            something that was saved in its place.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise ModelFileError(f"{path}: is not a regular file")
        file = path.open("rb")
    except OSError as error:
        problem = (
            f"a link to {os.readlink(path)}, which leads nowhere" if path.is_symlink() else error.strerror or error
        )
        raise ModelFileError(f"{path}: cannot be read: {problem}") from None
    head = file.read(64)
    file.seek(0)
    if head.startswith(LFS_POINTER):
        raise ModelFileError(f"{path}: a Git LFS pointer, not the file itself; `git lfs pull` fetches it")
    if head.lstrip().lower().startswith(HTML):
        raise ModelFileError(f"{path}: an HTML page, not the file itself; the download met a login or an error")
    return file


# What downloads that are not finished are called: huggingface_hub, wget and curl wrappers, browsers, aria2.
_UNFINISHED = (".incomplete", ".part", ".partial", ".download", ".crdownload", ".aria2", ".tmp")


def interrupted(path: Path) -> str:
    """What to add to the complaint that a file is missing: whether its download was interrupted."""
    left = [path.name + ending for ending in _UNFINISHED if os.path.lexists(path.with_name(path.name + ending))]
    return f" (its download was interrupted: {left[0]} is there)" if left else ""


class MappedFile:
    """A whole file, mapped read-only: nothing is read until it is looked at. Indexed like bytes.

    Raises:
        ModelFileError: it is missing, empty, or no file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as file:
                self._stat = os.fstat(file.fileno())
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelFileError(f"{path}: the file is empty") from None
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None

    def __len__(self) -> int:
        return len(self.map)

    def __getitem__(self, part: slice) -> bytes:
        return self.map[part]

    @cached_property
    def identity(self) -> str:
        """Changes with the file's size, time of change, inode, or any of its sampled bytes: its header and tensor list,
        and 256 more pieces. A change that keeps all these is not noticed."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{len(self)} {self._stat.st_mtime_ns} {self._stat.st_dev} {self._stat.st_ino} ".encode())
        digest.update(self.map[:SAMPLED_HEAD])
        for piece in range(SAMPLES):
            at = len(self) * piece // SAMPLES
            digest.update(self.map[at : at + SAMPLE_BYTES])
        digest.update(self.map[-SAMPLE_BYTES:])
        return digest.hexdigest()


@dataclass(frozen=True)
class Span:
    """Bytes [start, start + size) of a mapped file: where a weight lies."""

    file: MappedFile
    start: int
    size: int

    def data(self) -> np.ndarray:
        """uint8 [size], a view."""
        return np.frombuffer(self.file.map, np.uint8, self.size, self.start)

    def fetch(self) -> None:
        """Have the bytes at hand, in one call instead of thousands of page faults: packing takes half as long.

        Raises:
            ModelFileError: the file cannot be read there any more.
        """
        if not sys.platform.startswith("linux"):
            return
        first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self.file.map.madvise(MADV_POPULATE_READ, first, self.start + self.size - first)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a Linux before 5.14 does not know it, and has page faults instead
                raise ModelFileError(f"{self.file.path}: cannot be read: {error.strerror}") from None

    def forget(self) -> None:
        """Give the memory back to the system, which can read it again: what a process looked at in a mapped file
        otherwise counts as its own. Pages shared with neighbours stay."""
        page = mmap.PAGESIZE
        first, end = -(-self.start // page) * page, (self.start + self.size) // page * page
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self.file.map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def file_identity(self) -> str:
        return self.file.identity

    def part(self, start: int, size: int) -> Span:
        """`size` of its bytes, from byte `start` of its own."""
        return Span(self.file, self.start + start, size)


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object, with duplicate keys refused at every level.

    Raises:
        ModelFileError: not JSON, not an object, too deeply nested, or a key given twice.
    """
    value = _parsed(text, where)
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} must be a JSON object, not {type(value).__name__}")
    return value


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON: {error}"
        raise ModelFileError(f"{where} {problem}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most `MAX_JSON_BYTES`.

    Raises:
        ModelFileError: see `parse_json_object`; also a missing or oversized file.
    """
    return parse_json_object(_json_text(path), f"{path}: the file")


def read_json_objects(path: Path, most: int) -> list[dict[str, Any]]:
    """The list of at most `most` objects in such a file. Errors as of `read_json`."""
    value = _parsed(_json_text(path), f"{path}: the file")
    if not isinstance(value, list) or len(value) > most or not all(isinstance(one, dict) for one in value):
        raise ModelFileError(f"{path}: the file must be a list of at most {most} JSON objects")
    return value


def _json_text(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(text) > MAX_JSON_BYTES:
        raise ModelFileError(f"{path}: larger than the {MAX_JSON_BYTES >> 20} MiB accepted for a JSON file")
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} is given twice")
            seen.add(key)
    return result
