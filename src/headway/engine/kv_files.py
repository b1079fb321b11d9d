"""Cache blocks as files, so that prefixes outlive both memory and the process.

    FOLDER/key                                  secret of the block names, 32 bytes, mode 0600
    FOLDER/<16 bytes of hash>/<name>-<group>.kv one file per block, a folder per model, build, cache layout, engine
    a file:  "HWKVBLK1" | its BLAKE2b-128 under the key | name | group u32 | the block as the backend gives it

A file appears complete (written beside and renamed) or not at all; nothing waits for the disk, so a power cut may leave
one torn: what does not fit its checksum is removed, never served. The time of a file's last change is that of its last
use. A folder has one engine at a time: a second one of the model takes the next. Names are keyed hashes over namespace,
adapter and all tokens up to the block's end, so whoever has another namespace finds nothing. The content is as private
as the prompts: folders have mode 0700.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

from headway.cache.tier import Tier, TierKey
from headway.core.errors import BadInput

MAGIC = b"HWKVBLK1"
KEY_BYTES = 32
MOST_ENGINES = 256  # of one model over a folder at a time
_HEAD = struct.Struct("<8s16s16sI")  # MAGIC, checksum, name, group
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"([0-9a-f]{32})-([0-9]{1,6})\.kv")
_PARTIAL = ".partial-"


class Damaged(Exception):
    """A file is not what was written."""


class BlockFiles:
    """The files of one engine's blocks.

    Args:
        folder: made if it is not there.
        identity: of all that the content of a block depends on besides its name.
        sizes: bytes of a block, per KV group.

    Attributes:
        key: secret of the names. sizes: as given.

    Raises:
        BadInput: the folder cannot be used.
    """

    def __init__(self, folder: Path, identity: str, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._root, self._lock = folder, -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.key = _key(folder / "key")
            for place in range(MOST_ENGINES):
                name = blake2b(f"{identity}, {place}".encode(), key=self.key, digest_size=16).hexdigest()
                self._folder = folder / name
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._lock = _locked(self._folder)
                if self._lock >= 0:
                    return
        except OSError as error:
            raise BadInput("--kv-disk", f"{folder}: {error.strerror or error}") from None
        raise BadInput("--kv-disk", f"{folder} is in use by {MOST_ENGINES} engines of this model; give others another")

    def __str__(self) -> str:
        return str(self._folder)

    def close(self) -> None:
        """Let others use the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def fill(self, tier: Tier) -> None:
        """Tell the tier what is there: folders of other models first, which go before any block, then blocks by last
        use. What does not fit is removed, and so is what a crash left behind."""
        for other in sorted(self._root.iterdir()):
            if _FOLDER.fullmatch(other.name) and other != self._folder and other.is_dir():
                lock = _locked(other)
                if lock < 0:  # in use, and bounded by who uses it
                    continue
                os.close(lock)
                size = sum(file.stat().st_size for file in other.iterdir() if _FILE.fullmatch(file.name))
                self._put(tier, TierKey(bytes.fromhex(other.name), -1), size)
        found = []
        for entry in os.scandir(self._folder):
            named = _FILE.fullmatch(entry.name)
            if named and int(named[2]) < len(self.sizes):
                key, stat = TierKey(bytes.fromhex(named[1]), int(named[2])), entry.stat()
                if stat.st_size == self.size(key) and entry.is_file():
                    found.append((stat.st_mtime_ns, key))
                    continue
            if named or entry.name.startswith(_PARTIAL):
                with suppress(OSError):
                    _unlink(Path(entry.path))
        for _, key in sorted(found):
            self._put(tier, key, self.size(key))

    def _put(self, tier: Tier, key: TierKey, size: int) -> None:
        gone = tier.put(key, size)
        for one in [key] if gone is None else gone:
            self.remove(one)

    def size(self, key: TierKey) -> int:
        """Bytes of a block's file."""
        return _HEAD.size + self.sizes[key.group]

    def _path(self, key: TierKey) -> Path:
        return self._folder / f"{key.name.hex()}-{key.group}.kv"

    def _checksum(self, key: TierKey, data: np.ndarray) -> bytes:
        digest = blake2b(key.name + key.group.to_bytes(4, "little"), key=self.key, digest_size=16)
        digest.update(data.data)
        return digest.digest()

    def read(self, key: TierKey) -> np.ndarray:
        """A block's bytes, uint8.

        Raises:
            OSError: it cannot be read.
            Damaged: it is not what was written.
        """
        data = np.empty(self.sizes[key.group], np.uint8)
        with self._path(key).open("rb", buffering=0) as file:
            head = file.read(_HEAD.size)
            whole = len(head) == _HEAD.size and file.readinto(data.data) == len(data) and not file.read(1)
        if not whole or head != _HEAD.pack(MAGIC, self._checksum(key, data), key.name, key.group):
            raise Damaged(f"{self._path(key)} is damaged")
        return data

    def write(self, key: TierKey, data: np.ndarray) -> None:
        """
        Raises:
            OSError: it was not written; nothing is left of it.
        """
        partial = ""
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=_PARTIAL, delete=False, buffering=0) as file:
                partial = file.name
                for part in (_HEAD.pack(MAGIC, self._checksum(key, data), key.name, key.group), data.data):
                    rest = memoryview(part)
                    while len(rest):
                        rest = rest[file.write(rest) :]
            os.replace(partial, self._path(key))
        except OSError:
            if partial:
                Path(partial).unlink(missing_ok=True)
            raise

    def used(self, key: TierKey, at: int) -> None:
        """A block was last used `at` ns since the epoch."""
        with suppress(OSError):
            os.utime(self._path(key), ns=(at, at))

    def remove(self, key: TierKey) -> None:
        """A block, or another model's folder unless an engine uses it. Idempotent."""
        with suppress(OSError):
            if key.group >= 0:
                _unlink(self._path(key))
                return
            other = self._root / key.name.hex()
            lock = _locked(other)
            if lock < 0:
                return
            try:
                for file in list(other.iterdir()):
                    if _FILE.fullmatch(file.name) or file.name.startswith(_PARTIAL) or file.name == "lock":
                        file.unlink()
                other.rmdir()
            finally:
                os.close(lock)


def _unlink(path: Path) -> None:
    """Remove a file, or an empty folder in its place. What somebody put into a folder stays.

    Raises:
        OSError: it is still there, or was not.
    """
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def _locked(folder: Path) -> int:
    """A file descriptor that keeps others off a folder until it is closed; below 0: an engine has it.

    Raises:
        OSError: there is no such folder.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return -1
    return lock


def _key(path: Path) -> bytes:
    """The key in a file that nobody else can read; made if it is not there.

    Raises:
        OSError: it cannot be made or read.
        BadInput: it is not such a file.
    """
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_PARTIAL) as file:  # which has mode 0600
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            with suppress(FileExistsError):  # another engine was quicker
                os.link(file.name, path)
    key = path.read_bytes() if path.stat().st_size == KEY_BYTES else b""
    if len(key) != KEY_BYTES or path.stat().st_mode & 0o077:
        problem = f"is not {KEY_BYTES} bytes of a key that only its owner can read (mode 0600); remove it to begin anew"
        raise BadInput("--kv-disk", f"{path} {problem}")
    return key
