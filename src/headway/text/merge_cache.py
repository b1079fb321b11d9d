"""Merges that were worked out from a vocabulary's scores, kept on disk: for 262144 pieces that takes seconds.

    FOLDER/<key>.merges    "HWMERGE1" | BLAKE2b-128 of the pairs, keyed by the key | the pairs: int32 [merges, 2], ids

The key is a hash of the pieces, their scores and the version of the rule. A file appears complete (written beside and
renamed) or not at all; one that is damaged or belongs to something else is left out of account and written anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

logger = logging.getLogger(__name__)

MAGIC = b"HWMERGE1"
RULE = 1  # to be raised when other merges are made of the same pieces and scores
LEAST_PIECES = 1 << 14  # fewer are worked out in no time
MOST_FILES, MOST_BYTES = 16, 64 << 20  # in the folder, and of one file; Gemma's has 4 MB
_DIGEST = 16  # bytes


def kept(
    folder: Path | None, pieces: Sequence[str], scores: Sequence[float], derive: Callable[[], np.ndarray]
) -> np.ndarray:
    """Pairs of ids, int32 [merges, 2]: from `folder` if they are there, else derived and put there; None = nowhere."""
    if folder is None or len(pieces) < LEAST_PIECES:
        return derive()
    key = hashlib.blake2b(msgspec.msgpack.encode((RULE, pieces, scores)), digest_size=_DIGEST).hexdigest()
    path = folder / f"{key}.merges"
    found = _read(path, key)
    if found is None:
        found = derive()
        _write(path, key, found)
    return found


def _digest(key: str, pairs: bytes) -> bytes:
    return hashlib.blake2b(pairs, digest_size=_DIGEST, key=key.encode()).digest()


def _read(path: Path, key: str) -> np.ndarray | None:
    """What `_write` wrote for the same key; None if it is not there, or not as it was."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError:  # not there, or not to be read: writing says so, if that fails too
        return None
    head, pairs = data[: len(MAGIC) + _DIGEST], data[len(MAGIC) + _DIGEST :]
    if head != MAGIC + _digest(key, pairs):
        logger.warning("%s: cannot be used and is made anew: it is damaged, or of something else", path)
        return None
    return np.frombuffer(pairs, "<i4").reshape(-1, 2)


def _write(path: Path, key: str, pairs: np.ndarray) -> None:
    """Keep pairs, the oldest others forgotten; a disk that refuses is left alone."""
    data = pairs.astype("<i4").tobytes()
    if len(MAGIC) + _DIGEST + len(data) > MOST_BYTES:
        return
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as file:
            partial = Path(file.name)
            file.write(MAGIC + _digest(key, data) + data)
        os.replace(partial, path)
        newest = sorted(path.parent.glob("*.merges"), key=lambda kept: kept.stat().st_mtime, reverse=True)
        for old in newest[MOST_FILES:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: merges are not kept: %s", path.parent, error.strerror or error)
        if partial is not None:
            partial.unlink(missing_ok=True)
