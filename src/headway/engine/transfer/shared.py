"""Blocks through shared memory, where both engines are on one host: a file in memory that the asking side makes.

It has a few slots of one block each. The giving side writes a block into a free slot and says which; the asking side
copies it, checks it, and says that the slot is free. The file has mode 0600 and an unguessable name, and loses that
name as soon as the other has opened it or the connection ends.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
SLOTS = 8
_NAME = re.compile(r"headway-[0-9a-f]{32}")


class SharedSlots:
    """Slots of `size` bytes in a file of shared memory.

    Attributes:
        name: of the file.
    """

    def __init__(self, file: int, size: int, name: str) -> None:
        self.name, self._size = name, size
        try:
            self._map = mmap.mmap(file, SLOTS * size)
        finally:
            os.close(file)

    @classmethod
    def make(cls, size: int) -> SharedSlots | None:
        """None where there is no such memory, or no room in it."""
        name = f"headway-{secrets.token_hex(16)}"
        try:
            file = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        try:
            os.posix_fallocate(file, 0, SLOTS * size)  # or a write would end the process where there is no room
            return cls(file, size, name)
        except OSError:
            os.unlink(FOLDER / name)
            return None

    @classmethod
    def open(cls, name: str, size: int) -> SharedSlots | None:
        """Those that another engine has made; None if it is not on this host, or they are not such."""
        if not _NAME.fullmatch(name):
            return None
        try:
            file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        stat = os.fstat(file)
        if stat.st_size != SLOTS * size or stat.st_uid != os.getuid():
            os.close(file)
            return None
        with suppress(OSError):
            os.unlink(FOLDER / name)
        return cls(file, size, name)

    def write(self, slot: int, data: memoryview) -> None:
        self._map[slot * self._size : slot * self._size + len(data)] = data

    def read(self, slot: int, count: int) -> bytes:
        """A copy: the other could write it again."""
        if not (0 <= slot < SLOTS and 0 <= count <= self._size):
            raise ValueError("there is no such slot")
        return self._map[slot * self._size : slot * self._size + count]

    def close(self) -> None:
        """Idempotent."""
        with suppress(OSError):
            os.unlink(FOLDER / self.name)
        self._map.close()
