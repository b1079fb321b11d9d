"""Weights that were quantised at load, kept on disk in the form the kernels read, so that the next start is quick.

    FOLDER/<16 bytes of hash>/<tensor's hash>.packed      one file per matrix, one folder per model file and setting
    a file:  "HWPACK1\\n" | header length u32 | header JSON | its BLAKE2b-128 | the packed bytes

The key is a hash of: which file the weight comes from (size, time of change, inode, sampled contents), where it lies
in it, its format and shape, how it is quantised, and what today's packing makes of a small matrix: so a file made by
other kernels is never taken. A file appears complete (written beside and renamed) or not at all; one that was damaged
since is packed anew, and said so. The bytes are read into memory of their own, not mapped: huge pages make decoding 2
to 7 % faster, and a file that shrinks under a mapping would end the process.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.ops.weight import Weight

logger = logging.getLogger(__name__)

MAGIC = b"HWPACK1\n"
MOST_BYTES = 32 << 30  # of all folders together; the longest unused go first
FREE_SHARE = 0.5  # and never more of the disk's free space than this
MOST_HEADER = 4096


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """key: everything the bytes depend on. unit: of the matrix. checksum: of its bytes, as the engine makes it."""

    key: str
    unit: float
    bytes: int
    checksum: int


class PackCache:
    """Packed matrices of one engine's models on disk.

    Args:
        folder: made if it is not there.
        engine: the native engine that packs and reads.
        setting: of this engine, the same for all weights; models loaded with another have a folder of their own.

    Attributes:
        read, written: bytes of matrices so far.
    """

    def __init__(self, folder: Path, engine: Any, setting: str) -> None:
        self._folder = folder
        self._engine = engine
        self._setting = setting
        self._on = True
        self._sizes: dict[Path, int] = {}  # bytes of each model's folder, once known
        self._packing: dict[tuple[str, int], int] = {}
        self.read, self.written = 0, 0

    def find(self, weight: Weight, target: str, group: int) -> Any | None:
        """The weight's packed matrix, if a sound file of it is there."""
        path, key = self._place(weight, target, group)
        try:
            with path.open("rb") as file:
                header, offset = _read_header(file, key)
                shape = (1, *weight.shape)[-3:]
                matrix = self._engine.read(file.fileno(), offset, target, group, *shape, header.unit, header.checksum)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s: cannot be used and is made anew: %s", path, error)
            return None
        if matrix is None:
            logger.warning("%s: cannot be used and is made anew: its bytes are damaged", path)
            return None
        with suppress(OSError):  # a folder that cannot be written can still be read
            os.utime(path.parent)  # used now
        self.read += header.bytes
        return matrix

    def keep(self, weight: Weight, target: str, group: int, matrix: Any) -> None:
        """Write a packed matrix; a disk that refuses it is left alone from then on."""
        if not self._on:
            return
        path, key = self._place(weight, target, group)
        header = msgspec.json.encode(_Header(key, matrix.unit, matrix.nbytes, self._engine.checksum(matrix)))
        head = MAGIC + len(header).to_bytes(4, "little") + header + hashlib.blake2b(header, digest_size=16).digest()
        partial = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(path.parent, matrix.nbytes)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as file:
                partial = file.name
                file.write(head)
                file.write(matrix.data)
            os.replace(partial, path)
            self.written += matrix.nbytes
        except OSError as error:
            self._on = False
            logger.warning("%s: packed weights are not kept: %s", self._folder, error.strerror or error)
            if partial is not None:
                Path(partial).unlink(missing_ok=True)

    def _place(self, weight: Weight, target: str, group: int) -> tuple[Path, str]:
        """(file, key) of a weight."""
        files = dict.fromkeys(origin.file_identity() for origin in weight.origins)
        model = _hash(*files, self._setting)
        how = (target, group, self._fingerprint(target, group))
        starts = [origin.start for origin in weight.origins]
        key = _hash(model, starts, weight.name, weight.format, weight.shape, how)
        return self._folder / model / f"{key}.packed", key

    def _fingerprint(self, target: str, group: int) -> int:
        """Of what becomes of a small matrix: changes with the layout and with the way of rounding."""
        if (target, group) not in self._packing:
            x = np.sin(np.arange(40 * 336, dtype=np.float32))
            x[:336] = 0  # groups of zeros, too
            matrix = self._engine.pack([x.view(np.uint8)], "f32", 40, 336, target, group)
            self._packing[target, group] = self._engine.checksum(matrix)
        return self._packing[target, group]

    def _make_room(self, folder: Path, wanted: int) -> None:
        """Remove the model folders that were longest not used until all fits, the one in use excepted.

        Raises:
            OSError: it does not fit even so.
        """
        if not self._sizes:
            self._sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in self._folder.iterdir()}
        older = sorted(self._sizes.keys() - {folder}, key=lambda path: path.stat().st_mtime)
        while not self._fits(folder, wanted):
            if not older:
                raise OSError(
                    f"{wanted >> 20} MiB more would be over {MOST_BYTES >> 30} GiB, or half of the disk's free space"
                )
            shutil.rmtree(older[0])
            del self._sizes[older.pop(0)]
        self._sizes[folder] = self._sizes.get(folder, 0) + wanted

    def _fits(self, folder: Path, wanted: int) -> bool:
        return (
            sum(self._sizes.values()) + wanted <= MOST_BYTES and wanted <= shutil.disk_usage(folder).free * FREE_SHARE
        )


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _read_header(file: Any, key: str) -> tuple[_Header, int]:
    """(header, where the bytes start).

    Raises:
        ValueError: the file is not what it should be.
    """
    start = file.read(len(MAGIC) + 4)
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if len(start) < len(MAGIC) + 4 or not start.startswith(MAGIC) or length > MOST_HEADER:
        raise ValueError("it does not start as such a file does")
    text, digest = file.read(length), file.read(16)
    if hashlib.blake2b(text, digest_size=16).digest() != digest:
        raise ValueError("its header is damaged")
    header = msgspec.json.decode(text, type=_Header)  # ValidationError is a ValueError
    if header.key != key or not (0 < header.unit < math.inf):
        raise ValueError("it belongs to another weight")
    return header, file.tell()
