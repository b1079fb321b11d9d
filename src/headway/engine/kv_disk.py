"""The prefix cache's second tier, on disk: what memory has no room for any more comes back when a prompt goes on there.

    save   before a step: blocks that were evicted are copied, and written by a thread
    load   before a step: a piece of what a waiting request's prompt finds here is read, checked and cached
    close  everything memory still holds is written, so that the next start is warm

The first tier is the cache itself, which on a CPU is host memory. All reading is between two steps, in pieces short
enough for those who stream; a block that cannot be read is computed, like one that was never here.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from headway.cache.tier import Tier, TierKey
from headway.core.errors import BadInput
from headway.core.events import BlocksLoaded, BlocksSaved, EventLog
from headway.core.request import Request
from headway.engine.ipc import SAVE_SECONDS
from headway.engine.kv_files import BlockFiles, Damaged
from headway.engine.messages import Submit
from headway.engine.options import EngineOptions
from headway.model.load import OpenModel
from headway.ops.protocol import Backend, CacheLayout
from headway.roofline.hardware import GIB
from headway.scheduling.scheduler import Scheduler

PENDING = 128 << 20  # bytes of blocks that wait to be written; more are dropped
PIECE = 16 << 20  # bytes that are read before they are written to the cache
BESIDE, ALONE = 0.01, 0.1  # seconds of loading between two steps: beside running requests, without any

LAYOUT = 1  # of what the backends give as a block

logger = logging.getLogger(__name__)

Job = tuple[str, TierKey, int, np.ndarray | None]  # "write", "use" or "remove"; which, when it was used, its bytes


def open_disk(
    model: OpenModel, options: EngineOptions, backend: Backend, layout: CacheLayout, names: bytes = b""
) -> tuple[BlockFiles, Tier]:
    """The blocks on disk that are this model's, as this backend computes them; those of others take room until it is
    needed. names: secret of the blocks' names, if that is not the folder's.

    Raises:
        BadInput: the folder cannot be used.
    """
    how = options.weights, options.group, backend.name, backend.build, backend.kv_format
    named = blake2b(names, digest_size=16).hexdigest() if names else ""
    identity = repr((LAYOUT, model.identity(), *how, layout.block_size, layout.groups, *([named] if named else [])))
    sizes = [backend.block_bytes(group, layout.block_size) for group in layout.groups]
    folder = Path(options.kv_disk or "").expanduser()
    files = BlockFiles(folder, identity, sizes)
    tier = Tier(int(options.disk_gib * GIB))
    try:
        files.fill(tier)
    except OSError as error:
        files.close()
        raise BadInput("--kv-disk", f"{folder}: {error.strerror or error}") from None
    return files, tier


class DiskTier:
    """The tier of one engine. Used by the thread that turns the loop.

    Args:
        files: where blocks are. Closed with this.
        tier: what is there, as the scheduler knows it.
        scheduler: whose cache it is.
        backend: which holds that.
        clock: the engine's, ps. log: receives what is saved.
    """

    def __init__(
        self,
        files: BlockFiles,
        tier: Tier,
        scheduler: Scheduler,
        backend: Backend,
        clock: Callable[[], int],
        log: EventLog,
    ) -> None:
        self._files, self._tier, self._scheduler, self._backend = files, tier, scheduler, backend
        self._now, self._log = clock, log
        self._pending: dict[TierKey, np.ndarray] = {}  # to be written
        self._waiting = 0  # bytes of these
        self._failed: deque[tuple[TierKey, OSError]] = deque()
        self._on = True
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # of what is pending
        self._writer = threading.Thread(target=self._write, name="kv-disk", daemon=True)
        self._writer.start()

    def order(self, message: Submit) -> Submit:
        return message

    def added(self, message: Submit, request: Request) -> None:
        """Nothing is known here of a request before it waits."""

    def turn(self) -> None:
        """Between two steps: go on loading."""
        until = time.perf_counter() + (BESIDE if self._scheduler.running else ALONE)
        while (waiting := self._scheduler.loading.next()) is not None:
            self._load(*waiting)
            if time.perf_counter() >= until:
                break

    def save(self) -> None:
        """Copy what was evicted since the last time. Before anything is written to the cache."""
        cache = self._scheduler.cache
        evicted, cache.evicted = cache.evicted, []
        failed = self._count_failures()
        kept = dropped = size = 0
        for group, block, name in evicted:
            key = TierKey(name, group)
            taken = self._keep(key, block, time.time_ns())
            kept += taken > 0
            size += taken
            dropped += taken < 0
        if kept or dropped or failed:
            self._log.append(BlocksSaved(now=self._now(), blocks=kept, bytes=size, dropped=dropped, failed=failed))

    def _keep(self, key: TierKey, block: int, at: int) -> int:
        """Have a block on disk, last used `at` -> bytes that this takes, 0 if it is there, -1 if it cannot be."""
        if key in self._tier:
            self._tier.touch(key)
            self._jobs.put(("use", key, at, None))
            return 0
        size = self._files.size(key)
        gone = self._tier.put(key, size) if self._on and self._waiting + size <= PENDING else None
        if gone is None:
            return -1
        for one in gone:
            self._jobs.put(("remove", one, 0, None))
        data = np.empty(self._files.sizes[key.group], np.uint8)
        self._backend.read_block(key.group, block, data)
        with self._lock:
            self._pending[key] = data
            self._waiting += size
        self._jobs.put(("write", key, at, data))
        return size

    def _load(self, id: str, wanted: list[tuple[int, int, bytes]]) -> None:
        """A piece of what a request waits for: all that could be read is cached then, whatever comes of the rest."""
        begin, read = time.perf_counter(), 0
        room = [pool.available for pool in self._scheduler.cache.pools]
        here: list[tuple[int, int, np.ndarray]] = []
        stopped = failed = False
        for group, index, name in wanted:
            if read >= PIECE:
                break
            data = self._read(TierKey(name, group)) if room[group] > 0 else None
            failed = data is None and room[group] > 0
            if data is None:
                stopped = True
                break
            here.append((group, index, data))
            room[group] -= 1
            read += data.nbytes
        seconds = time.perf_counter() - begin
        self._tier.measured(read, seconds)
        blocks = self._scheduler.loading.load(
            BlocksLoaded(
                now=self._now(),
                id=id,
                blocks=tuple([(group, index) for group, index, _ in here]),
                bytes=read,
                seconds=seconds,
                last=stopped or len(here) == len(wanted),
                failed=failed,
            )
        )
        self.save()
        for (group, _, data), block in zip(here, blocks, strict=True):
            self._backend.write_block(group, block, data)

    def _read(self, key: TierKey) -> np.ndarray | None:
        """A block; None if it is not there, or not what it was."""
        with self._lock:
            data = self._pending.get(key)
        if data is None:
            try:
                data = self._files.read(key)
            except (OSError, Damaged) as error:
                logger.warning("A cached block is computed anew: %s", error)
                self._tier.drop(key)
                self._jobs.put(("remove", key, 0, None))
                return None
        if key in self._tier:
            self._tier.touch(key)
            self._jobs.put(("use", key, time.time_ns(), None))
        return data

    def _count_failures(self) -> int:
        """Blocks that were not written after all. A full disk keeps what it has room for; one that fails is left alone
        from then on."""
        failed = 0
        while self._failed:
            key, error = self._failed.popleft()
            self._tier.drop(key)
            failed += 1
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                limit = min(self._tier.limit, self._tier.bytes)
                if limit < self._tier.limit:
                    logger.warning("%s: the disk is full; the cache there stays below %d MiB", self._files, limit >> 20)
                self._tier.limit = limit
            elif self._on:
                self._on = False
                logger.warning("%s: evicted blocks are not kept any more: %s", self._files, error.strerror or error)
        return failed

    def _write(self) -> None:
        """The thread that writes."""
        while (job := self._jobs.get()) is not None:
            what, key, at, data = job
            if what == "remove":
                self._files.remove(key)
                continue
            if data is not None:
                try:
                    self._files.write(key, data)
                except OSError as error:
                    self._failed.append((key, error))
                with self._lock:
                    self._waiting -= self._files.size(key)
                    if self._pending.get(key) is data:
                        del self._pending[key]
            self._files.used(key, at)

    def close(self) -> None:
        """Write what memory holds, the most recently used first, for as long as `SAVE_SECONDS`. Idempotent."""
        if not self._writer.is_alive():
            return
        self.save()
        self._save_all(time.perf_counter() + SAVE_SECONDS)
        self._jobs.put(None)
        self._writer.join()
        self._files.close()

    def _save_all(self, until: float) -> None:
        at, taken = time.time_ns(), 0
        for group, pool in enumerate(self._scheduler.cache.pools):
            owned = [block for block, refs in enumerate(pool.refs) if refs]
            for place, block in enumerate([*owned, *reversed(pool.cached)]):
                name = pool.names[block]
                if name is None:
                    continue
                key = TierKey(name, group)
                taken += self._files.size(key)
                while self._waiting + self._files.size(key) > PENDING and time.perf_counter() < until:
                    time.sleep(0.001)
                if taken > self._tier.limit or time.perf_counter() >= until or not self._on:
                    return
                self._keep(key, block, at - 1000 * place)
                self._count_failures()
