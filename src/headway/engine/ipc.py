"""The border between the API process and the engine process: msgpack messages over two `ipc://` sockets.

    API process                                                   engine process
    commands  PUSH --- Submit, Cancel, LoadAdapter, UnloadAdapter, Explain, Look, Stop ---> PULL   (between steps)
    reports   PULL <-- Ready, Failed, Turn, Adapters, Explained, Looked ------------------- PUSH   (after a step)

The sockets lie in a fresh folder only this user may enter. Every message is a tagged msgspec struct: nothing that
arrives can name code to run, and a message above `MAX_MESSAGE` bytes is never read.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import zmq

from headway.cache.explain import Explanation
from headway.core.errors import BadInput, EngineDead
from headway.core.events import AnyEvent
from headway.core.pooling import GENERATES, PoolingConfig
from headway.core.request import SamplingParams
from headway.engine.messages import Cancel, Delta, Explain, LoadAdapter, Look, Refusal, Submit, UnloadAdapter
from headway.engine.picture import Picture
from headway.shape.model import ModelShape

MAX_MESSAGE = 64 << 20  # bytes: a million-token prompt is 5 MiB
SAVE_SECONDS = 20.0  # that an engine takes at most, when it stops, to write its cache to disk
MAX_SOCKET_PATH = 100  # bytes: the kernel's limit on a socket's path is 104 (macOS) or 108 (Linux)


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing more and exit with code 0."""


class Status(msgspec.Struct, frozen=True, gc=False):
    """The engine after a turn: its KV cache in blocks, and its queue.

    Attributes:
        blocks: of the cache.
        used: owned by requests.
        cached: owned by nobody, but holding a prefix that can be reused.
        block_size: tokens per block.
        disk_blocks, disk_bytes, disk_limit: in the cache's second tier, and how many bytes may be; 0 without one.
        events_lost: events that the event log could not take, since the start.
        wait: seconds that a request arriving now would wait for its first blocks, as far as is known.
        blocked: why the first waiting request waits: "rows", "blocks", "budget", "prefix", "preempting", "policy"; ""
            if none does.
    """

    blocks: int = 0
    used: int = 0
    cached: int = 0
    block_size: int = 32
    disk_blocks: int = 0
    disk_bytes: int = 0
    disk_limit: int = 0
    events_lost: int = 0
    wait: float = 0.0
    blocked: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded.

    Attributes:
        model: name of the model, as the checkpoint or the command line gives it.
        max_model_len: most tokens of prompt and output together.
        vocab_size: a token id is below this.
        max_rows: most requests that run at once.
        step_times: what predicts a step's time: "estimate", "bound", "first steps", or "none".
        default_params: how requests are sampled that leave it open.
        shape: of the model, with the bytes that the backend holds; None = not known.
        notes: lines worth printing (the memory plan, what predicts step times).
        adapters: path of each LoRA adapter that requests may name.
        priorities: whether its policy has classes of requests, so that they may name theirs.
        caution: why its answers are not the model's, for the usage of each; "" = they are.
        pooling: what the model makes of whole texts.
        role: in its pool. kv_address: where others fetch blocks; "" = nowhere.
    """

    model: str
    max_model_len: int
    vocab_size: int
    max_rows: int
    step_times: str = "none"
    default_params: SamplingParams = SamplingParams()
    shape: ModelShape | None = None
    notes: tuple[str, ...] = ()
    status: Status = Status()
    adapters: dict[str, str] = {}
    priorities: bool = False
    caution: str = ""
    pooling: PoolingConfig = GENERATES
    role: str = "both"
    kv_address: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, or cannot go on. One sentence, and the exit code it asks for."""

    message: str
    exit_code: int


class Turn(msgspec.Struct, frozen=True, tag=True):
    """What one turn of the engine loop brought.

    Attributes:
        outputs: in order of emission.
        events: in order, without the names of blocks.
        status: after the turn.
    """

    outputs: tuple[Delta | Refusal, ...]
    events: tuple[AnyEvent, ...]
    status: Status


class Adapters(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `LoadAdapter` or `UnloadAdapter`.

    Attributes:
        id: of the command.
        loaded: path of each adapter that requests may name now.
        problem: why nothing has changed; "" = it is done.
    """

    id: str
    loaded: dict[str, str]
    problem: str = ""


class Explained(msgspec.Struct, frozen=True, tag=True):
    """The answer to an `Explain`. `problem`: why there is no explanation; "" = there is one."""

    id: str
    explanation: Explanation | None
    problem: str = ""


class Looked(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Look`."""

    id: str
    picture: Picture
    problem: str = ""


Answered = Adapters | Explained | Looked
Command = Submit | Cancel | LoadAdapter | UnloadAdapter | Explain | Look | Stop
Report = Ready | Failed | Turn | Adapters | Explained | Looked

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Report)


def make_folder() -> Path:
    """A fresh folder (mode 0700) for the sockets.

    Raises:
        BadInput: TMPDIR is too long for a socket's path.
    """
    folder = Path(tempfile.mkdtemp(prefix="headway-"))
    if len(os.fsencode(folder / "commands")) > MAX_SOCKET_PATH:
        folder.rmdir()
        raise BadInput("TMPDIR", f"{tempfile.gettempdir()!r} is too long for a socket path; use a shorter folder")
    return folder


class Channel:
    """One side's two sockets. A socket is used by one thread only: sending and receiving may be two threads.

    Args:
        folder: from `make_folder`.
        api: True on the API side, which binds; False on the engine side, which connects.
    """

    def __init__(self, folder: Path, api: bool) -> None:
        self._context = zmq.Context(io_threads=1)
        self._send = self._context.socket(zmq.PUSH)
        self._receive = self._context.socket(zmq.PULL)
        for socket in (self._send, self._receive):
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
            socket.setsockopt(zmq.LINGER, 1000 if socket is self._send else 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # bounded above: by the admission queue, and by one turn per step
            socket.setsockopt(zmq.RCVHWM, 0)
        if api:
            self._send.bind(f"ipc://{folder}/commands")
            self._receive.bind(f"ipc://{folder}/reports")
        else:
            self._receive.connect(f"ipc://{folder}/commands")
            self._send.connect(f"ipc://{folder}/reports")
        self._decoder = _reports if api else _commands

    @property
    def readable_fd(self) -> int:
        """A file descriptor that becomes readable when messages may have come; then `drain` until empty."""
        return int(self._receive.getsockopt(zmq.FD))

    def send(self, message: Command | Report) -> None:
        """Never blocks.

        Raises:
            EngineDead: nobody is connected at the other end.
        """
        try:
            self._send.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDead("the other process is not connected") from None

    def poll(self, seconds: float) -> bool:
        """Wait up to `seconds` for a message to come."""
        return bool(self._receive.poll(round(seconds * 1000)))

    def receive(self) -> Command | Report:
        """Block until a message comes."""
        return self._decoder.decode(self._receive.recv())

    def take(self) -> Command | Report | None:
        """The next message, if one has come."""
        try:
            return self._decoder.decode(self._receive.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def drain(self) -> list[Command | Report]:
        """All messages that have come, without waiting."""
        return list(iter(self.take, None))

    def close(self) -> None:
        """Close both sockets; what was sent gets a second to arrive."""
        self._send.close()
        self._receive.close()
        self._context.term()
