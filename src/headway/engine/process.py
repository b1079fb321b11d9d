"""The engine process: one thread that reads commands, turns the loop, and reports every turn.

    python -m headway.engine.process FOLDER      (started by the server; the options come as one line on stdin)

It ends on a `Stop`, when the engine fails (exit code not 0), or when its standard input ends: the server that
started it is gone.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headway.cache.explain import Explanation
from headway.cache.kv import KVCache
from headway.core.errors import HeadwayError
from headway.core.events import AnyEvent, Finished, Header, Queued
from headway.core.request import SamplingParams
from headway.engine.event_file import ServerEventWriter
from headway.engine.ipc import Adapters, Channel, Command, Explained, Failed, Looked, Ready, Status, Stop, Turn
from headway.engine.messages import Cancel, Delta, Explain, LoadAdapter, Look, Refusal, Submit, UnloadAdapter
from headway.engine.options import EngineOptions
from headway.engine.picture import Picture
from headway.scheduling.policies.priority import PRIORITY

STDIN = 0
MOST_COMMANDS, MOST_TOKENS = 256, 1 << 17  # read between two steps: prompts are hashed, which streams wait for
QUIET_SECONDS = 1.0  # without a request, after which a chore is done
BLOCKED_SECONDS = 0.01  # pause of a turn in which nothing could be done though requests wait


class Driven(Protocol):
    """What of `EngineLoop` is driven here."""

    @property
    def idle(self) -> bool: ...

    def submit(self, message: Submit) -> Refusal | None: ...

    def cancel(self, message: Cancel) -> None: ...

    def compiling(self, params: SamplingParams) -> Future[Any] | None: ...

    def turn(self) -> list[Delta]: ...

    def load_adapter(self, name: str, path: Path, replace: bool = False) -> None: ...

    def unload_adapter(self, name: str) -> None: ...

    def adapter_paths(self) -> dict[str, str]: ...

    def explain(self, message: Explain) -> Explanation: ...

    def look(self) -> Picture: ...


class EventTray:
    """A subscriber of the event log: keeps events until the next report, without the names of blocks."""

    def __init__(self) -> None:
        self._events: list[AnyEvent] = []

    def fold(self, event: AnyEvent) -> None:
        if isinstance(event, Queued | Finished) and event.names:
            event = msgspec.structs.replace(event, names=())
        self._events.append(event)

    def take(self) -> tuple[AnyEvent, ...]:
        events, self._events = tuple(self._events), []
        return events


@dataclass(frozen=True)
class Loaded:
    """An engine that is ready to be driven.

    Attributes:
        ready: the first report to the server.
        loop: to be driven.
        tray: subscribed to the loop's event log.
        status: the cache now.
        close: gives back what the engine holds, and completes its event log.
        rotate: called when no request is live; begins a new event log if the old one is full.
        hang_seconds: a turn that takes longer ends the process.
        settling: goes on, a little at a time, until the first command comes.
        chores: done once each, when nobody has asked for a while: who asks meanwhile waits for its end.
    """

    ready: Ready
    loop: Driven
    tray: EventTray
    status: Callable[[], Status]
    close: Callable[[], None]
    rotate: Callable[[], None] = lambda: None
    hang_seconds: float = 600.0
    settling: Iterator[int] = iter(())  # noqa: RUF009 - it is empty
    chores: Sequence[Callable[[], None]] = ()


class EngineHost:
    """Drives a loaded engine from the commands of a channel."""

    def __init__(self, channel: Channel, loaded: Loaded) -> None:
        self._channel = channel
        self._loop = loaded.loop
        self._tray = loaded.tray
        self._status = loaded.status
        self._rotate = loaded.rotate
        self._settling = loaded.settling
        self._chores = list(loaded.chores)
        self._compiling: dict[str, tuple[Submit, Future[Any]]] = {}  # requests that wait for their grammars
        self.turns = 0
        self.waits = False  # for a command, or does what nobody waits for

    def run(self) -> None:
        """Until a `Stop` comes."""
        pause = False
        self.waits = True
        while not self._channel.poll(0) and next(self._settling, None) is not None:
            pass
        while True:
            self.turns += 1
            refused: list[Refusal] = []
            for command in self._commands(pause):
                if isinstance(command, Stop):
                    return
                self._obey(command, refused)
            self._submit_compiled(refused)
            outputs: list[Delta | Refusal] = [*refused, *self._loop.turn()]
            events = self._tray.take()
            pause = not outputs and not events
            if not pause:
                self._channel.send(Turn(tuple(outputs), events, self._status()))

    def _commands(self, pause: bool) -> Iterator[Command]:
        """What has come, up to what may be read between two steps. With nothing to compute, wait for something."""
        message = None
        if self._loop.idle and self._compiling:
            self._channel.poll(BLOCKED_SECONDS)
        elif self._loop.idle:
            self._rotate()
            self.waits = True
            while self._chores and not self._channel.poll(QUIET_SECONDS):
                self._chores.pop(0)()
            message = self._channel.receive()
            self.waits = False
        elif pause:
            self._channel.poll(BLOCKED_SECONDS)
        message = message or self._channel.take()
        count = tokens = 0
        while message is not None:
            yield message  # type: ignore[misc]
            count += 1
            tokens += len(message.tokens) * message.params.n if isinstance(message, Submit) else 0
            more = count < MOST_COMMANDS and tokens < MOST_TOKENS
            message = self._channel.take() if more else None

    def _submit(self, command: Submit, refused: list[Refusal]) -> None:
        answer = self._loop.submit(command)
        if answer is not None:
            refused.append(answer)

    def _submit_compiled(self, refused: list[Refusal]) -> None:
        for id, (command, future) in list(self._compiling.items()):
            if future.done():
                del self._compiling[id]
                self._submit(command, refused)

    def _obey(self, command: Command, refused: list[Refusal]) -> None:
        if isinstance(command, Submit):
            try:
                future = self._loop.compiling(command.params)
            except HeadwayError:  # it is refused below
                future = None
            if future is not None:
                self._compiling[command.id] = command, future
            else:
                self._submit(command, refused)
        elif isinstance(command, Cancel):
            if self._compiling.pop(command.id, None) is None:
                self._loop.cancel(command)
        elif isinstance(command, LoadAdapter | UnloadAdapter):
            problem = ""
            try:
                if isinstance(command, LoadAdapter):
                    self._loop.load_adapter(command.name, Path(command.path), command.replace)
                else:
                    self._loop.unload_adapter(command.name)
            except HeadwayError as error:
                problem = str(error)
            except Exception as error:  # whatever a file does to its reader is told to who named it: the engine goes on
                traceback.print_exc()
                problem = f"lora: {type(error).__name__}: {error}"
            self._channel.send(Adapters(command.id, self._loop.adapter_paths(), problem))
        elif isinstance(command, Look):
            self._channel.send(Looked(command.id, self._loop.look()))
        elif isinstance(command, Explain):
            try:
                self._channel.send(Explained(command.id, self._loop.explain(command)))
            except HeadwayError as error:
                self._channel.send(Explained(command.id, None, str(error)))


def serve(folder: Path, start: Callable[[bytes], Loaded]) -> int:
    """The life of an engine process -> its exit code.

    Args:
        folder: of the sockets.
        start: loads the engine from the line of options.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    line = _read_line()
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    channel = Channel(folder, api=False)
    try:
        loaded = start(line)
        try:
            channel.send(loaded.ready)
            host = EngineHost(channel, loaded)
            threading.Thread(target=_end_if_hung, args=(host, loaded.hang_seconds), daemon=True).start()
            host.run()
        finally:
            faulthandler.cancel_dump_traceback_later()
            loaded.close()
        return 0
    except HeadwayError as error:
        channel.send(Failed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        channel.send(Failed(f"the engine loop broke: {type(error).__name__}: {error}", 1))
        raise
    finally:
        channel.close()


def _read_line() -> bytes:
    """The first line of stdin, read without a buffer that the watching thread would hold at exit."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(STDIN, 1 << 16)
        if not piece:
            break
        line += piece
    return line


def _end_with_parent(folder: Path) -> None:
    """The server holds the other end of stdin: its end means that the server is gone, however it went."""
    while os.read(STDIN, 1 << 16):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # it cannot any more
    os._exit(1)


def _end_if_hung(host: EngineHost, seconds: float) -> None:
    """Keeps putting off a timer that writes where all threads are to stderr and ends the process (code 1). It is the
    system's, and goes off even where a turn that hangs lets no Python run."""
    turns = -1
    while True:
        if host.turns != turns or host.waits:
            faulthandler.dump_traceback_later(seconds, exit=True)
            turns = host.turns
        time.sleep(seconds / 4)


def cache_status(cache: KVCache) -> Status:
    """The blocks of all KV groups together."""
    pools, tier = cache.pools, cache.tier
    return Status(
        blocks=sum(pool.size for pool in pools),
        used=sum(pool.size - pool.available for pool in pools),
        cached=sum(len(pool.cached) for pool in pools),
        block_size=cache.block_size,
        disk_blocks=0 if tier is None else tier.blocks,
        disk_bytes=0 if tier is None else tier.bytes,
        disk_limit=0 if tier is None else tier.limit,
    )


def start_engine(line: bytes) -> Loaded:
    """Load the model of an `EngineOptions`, given as JSON."""
    from headway.engine.build import build_engine
    from headway.engine.warmup import settle

    tray = EventTray()
    options = msgspec.json.decode(line, type=EngineOptions)
    writers: list[ServerEventWriter] = []

    def make_writer(path: Path, header: Header) -> ServerEventWriter:
        writers.append(ServerEventWriter(path, header, (options.event_log_mib or math.inf) * 2**20))
        return writers[-1]

    engine = build_engine(options, subscribers=(tray.fold,), make_writer=make_writer, serves=True)
    settling = settle(engine.loop.executor, engine.pacing)
    next(settling)
    gc.collect()
    gc.freeze()  # or a collection walks through all of the tokenizer in the middle of a step: a tenth of a second
    scheduler = engine.loop.scheduler
    limits = scheduler.limits

    def status() -> Status:
        lost = sum(writer.lost for writer in writers)
        return msgspec.structs.replace(
            cache_status(scheduler.cache),
            wait=scheduler.predicted_wait(),
            blocked=scheduler.blocked,
            events_lost=lost,
        )

    def rotate() -> None:
        for writer in writers:
            writer.rotate(lambda first: scheduler.header(first.profile, first.config))

    ready = Ready(
        model=engine.info.name,
        max_model_len=limits.max_model_len,
        vocab_size=engine.tokenizer.vocab_size,
        max_rows=limits.max_rows,
        default_params=engine.default_params,
        step_times=engine.step_times,
        shape=engine.shape,
        notes=tuple(f"{label}: {amount}" for label, amount in engine.lines()),
        status=status(),
        adapters=engine.loop.adapter_paths(),
        priorities=options.policy == PRIORITY.name,
        caution=engine.caution,
        pooling=engine.info.pooling,
        role=options.role,
        kv_address=engine.kv_address,
    )
    chores = () if engine.loop.grammars is None else (engine.loop.grammars.warm,)
    return Loaded(ready, engine.loop, tray, status, engine.close, rotate, options.hang_seconds, settling, chores)


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), start_engine))
