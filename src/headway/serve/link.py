"""The API process's end of the engine: starts it, sends commands, hands each output to the request that waits."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence

import msgspec

from headway.core.errors import BadInput, EngineDead, HeadwayError
from headway.core.events import Admitted, AnyEvent
from headway.core.receipts import Receipt
from headway.engine.ipc import (
    SAVE_SECONDS,
    Adapters,
    Answered,
    Channel,
    Explained,
    Failed,
    Looked,
    Ready,
    Status,
    Stop,
    Turn,
    make_folder,
)
from headway.engine.messages import Cancel, Delta, Explain, LoadAdapter, Look, Refusal, Submit, UnloadAdapter
from headway.serve.admission import Backlog

STOP_SECONDS = 5.0  # the engine gets this long to exit by itself


class Inbox:
    """The outputs of one HTTP request, which may be several engine requests.

    Attributes:
        submits: what is asked of the engine.
        pending: how many choices of each are not finished yet.
        admitted: when the engine gave the first of them cache blocks, ps; None = not yet.
        client_gone: the client has left; nothing more will be read.
        error: why nothing more will come (the engine has ended, the server stops); None while something may.
        sink: is given what comes while `take` waits, unless a choice ends with it; False = `take` shall have it. It
            saves waking a task per request and step. What it raises, `take` raises.
    """

    def __init__(self, submits: Sequence[Submit]) -> None:
        self.submits = submits
        self.pending = {submit.id: submit.params.n for submit in submits}
        self.admitted: int | None = None
        self.client_gone = False
        self.error: HeadwayError | None = None
        self.sink: Callable[[list[Delta | Refusal]], bool] | None = None
        self._ends = False  # a choice, with what was not taken yet
        self._outputs: list[Delta | Refusal] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Delta | Refusal) -> bool:
        """Add an output -> whether it is the last one of its request; `wake` once after the last one of a turn."""
        self._outputs.append(output)
        if isinstance(output, Delta) and output.finish is None:
            return False
        self._ends = True
        left = self.pending.pop(output.id, 0) - 1
        if isinstance(output, Delta) and left > 0:
            self.pending[output.id] = left
            return False
        return True

    def wake(self) -> None:
        """Let `take` return, with whatever is there, unless the sink takes it."""
        if self._waiter is None or self._waiter.done():
            return
        try:
            if not self._sunk():
                self._waiter.set_result(None)
        except Exception as error:  # of this request alone: whoever reads for all does not see it
            self._waiter.set_exception(error)

    def _sunk(self) -> bool:
        if self.sink is None or not self._outputs or self._ends or self.client_gone or self.error is not None:
            return False
        if not self.sink(self._outputs):
            return False
        self._outputs = []
        return True

    @property
    def waiting(self) -> bool:
        """Something came that was not taken yet."""
        return bool(self._outputs)

    async def take(self) -> list[Delta | Refusal]:
        """All outputs since the last call; [] if it was woken without one, or the client has left.

        Raises:
            HeadwayError: `error`, when everything that came before has been taken.
        """
        if not self._outputs and not self.client_gone and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.client_gone:
            return []
        if not self._outputs and self.error is not None:
            raise self.error
        outputs, self._outputs, self._ends = self._outputs, [], False
        return outputs


class EngineLink:
    """The engine process, seen from the API process. All methods run on the event loop.

    Args:
        command: starts the engine; the folder of the sockets is appended.
        options: one line of JSON for the engine's standard input. The pipe stays open: its end tells the engine that
            the API process is gone.
        backlog: bounds what waits.
        on_event: a fold over the engine's events, and over the receipts of what has ended.

    Attributes:
        ready: what the engine said when the model was loaded; None before.
        failed: why it could not start or go on; None while it can.
        dead: the process has ended.
        adapters: path of each LoRA adapter that requests may name.
        status: the cache after the last turn.
        watchers: told of every turn, before those who wait for its outputs; empty unless somebody looks.
        turned: `time.monotonic()` of the last turn.
    """

    def __init__(
        self, command: Sequence[str], options: bytes, backlog: Backlog, on_event: Callable[[AnyEvent | Receipt], None]
    ) -> None:
        self._command = list(command)
        self._options = options
        self._on_event = on_event
        self._inboxes: dict[str, Inbox] = {}  # by request
        self._open: set[Inbox] = set()
        self._asked: dict[str, asyncio.Future[Answered]] = {}  # and not answered yet
        self.adapters: dict[str, str] = {}
        self._settled = asyncio.Event()
        self._ended = asyncio.Event()
        self.backlog = backlog
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        self.dead = False
        self.status = Status()
        self.watchers: set[Callable[[Turn], None]] = set()
        self.turned = time.monotonic()

    async def start(self) -> None:
        """Start the process; `settled` tells when it has loaded the model, or failed to."""
        self._folder = make_folder()
        self._channel = Channel(self._folder, api=True)
        asyncio.get_running_loop().add_reader(self._channel.readable_fd, self._read)
        self._process = await asyncio.create_subprocess_exec(
            *self._command, str(self._folder), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._options + b"\n")
        self._watcher = asyncio.create_task(self._watch())

    async def settled(self) -> None:
        """Return when the engine is ready, has failed, or is dead."""
        await self._settled.wait()

    async def ended(self) -> None:
        """Return when the engine has failed or is dead."""
        await self._ended.wait()

    async def _watch(self) -> None:
        code = await self._process.wait()
        self._read()
        if self.failed is None:
            self.failed = Failed(f"the engine process ended with code {code}", exit_code=1)
        self.dead = True
        self._settled.set()
        self._ended.set()
        self.end_all(EngineDead("the engine has ended"))

    def end_all(self, error: HeadwayError) -> None:
        """End every waiting request with `error`."""
        for inbox in self._open:
            inbox.error = error
            inbox.wake()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)

    @property
    def active(self) -> int:
        """Inboxes that are open: requests between admission and last byte."""
        return len(self._open)

    def idle_seconds(self) -> float:
        """Seconds since the last turn, if the engine has work; 0 if it has none."""
        return time.monotonic() - self.turned if self._inboxes else 0.0

    def open(self, inbox: Inbox) -> None:
        """Send an inbox's requests to the engine; `close` it in the end.

        Raises:
            EngineDead: there is no engine.
            BadInput, ApiError: the queue has no room; nothing was sent.
        """
        if self.dead:
            raise EngineDead("the engine has ended")
        now = time.monotonic()
        self.backlog.check(inbox.submits, self.status.wait)
        if not self._inboxes:
            self.turned = now
        self._open.add(inbox)
        for submit in inbox.submits:
            self._channel.send(submit)
            self._inboxes[submit.id] = inbox
            self.backlog.add(submit)

    async def ask(self, command: LoadAdapter | UnloadAdapter | Explain | Look) -> Answered:
        """Have the engine load or forget a LoRA adapter, look into its cache, or say what it holds.

        Raises:
            EngineDead: there is no engine.
            BadInput: it refuses; nothing has changed.
        """
        if self.dead:
            raise EngineDead("the engine has ended")
        self._asked[command.id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(command)
            report = await self._asked[command.id]
        finally:
            del self._asked[command.id]
        if report.problem:
            field, _, why = report.problem.partition(": ")
            raise BadInput(field, why)
        return report

    def tenant_of(self, id: str) -> str | None:
        """Whose a request is that waits for outputs; None = nobody does."""
        inbox = self._inboxes.get(id)
        return None if inbox is None else inbox.submits[0].tenant

    def close(self, inbox: Inbox) -> None:
        """Stop listening; what is unfinished is cancelled. Idempotent."""
        self._open.discard(inbox)
        for id in list(inbox.pending):
            if self._inboxes.pop(id, None) is not None:
                self.backlog.gone(id)
                if not self.dead:
                    self._channel.send(Cancel(id))
        inbox.pending.clear()

    def _read(self) -> None:
        woken: dict[Inbox, None] = {}
        try:
            reports = self._channel.drain()
        except msgspec.DecodeError as error:  # never from our own engine; what it said is lost, so it cannot go on
            self.failed = Failed(f"the engine sent what is no report: {error}", exit_code=1)
            self.kill()
            return
        for report in reports:
            if isinstance(report, Turn):
                self._turn(report, woken)
            elif isinstance(report, Ready):
                self.ready = report
                self.status = report.status
                self.adapters = report.adapters
                self._settled.set()
            elif isinstance(report, Failed):
                self.failed = report
            elif isinstance(report, Adapters | Explained | Looked):
                self._answered(report)
        for inbox in woken:
            inbox.wake()

    def _answered(self, report: Answered) -> None:
        if isinstance(report, Adapters):
            self.adapters = report.loaded
        asked = self._asked.get(report.id)
        if asked is not None and not asked.done():
            asked.set_result(report)

    def _turn(self, turn: Turn, woken: dict[Inbox, None]) -> None:
        self.turned = time.monotonic()
        self.status = turn.status
        for watch in self.watchers:
            watch(turn)
        for event in turn.events:
            self.backlog.fold(event)
            self._on_event(event)
            inbox = self._inboxes.get(event.id) if isinstance(event, Admitted) else None
            if inbox is not None:
                inbox.admitted = inbox.admitted or event.now
        for output in turn.outputs:
            if isinstance(output, Delta) and output.receipt is not None:
                self._on_event(output.receipt)
            inbox = self._inboxes.get(output.id)
            if inbox is None:  # cancelled meanwhile
                continue
            woken[inbox] = None
            if inbox.put(output):
                del self._inboxes[output.id]
                self.backlog.gone(output.id)

    def kill(self) -> None:
        """End the process now."""
        if not self.dead:
            self._process.kill()

    async def stop(self) -> int:
        """End the process, politely first -> its exit code. Removes the sockets."""
        if not self.dead:
            try:
                self._channel.send(Stop())
                async with asyncio.timeout(STOP_SECONDS + (SAVE_SECONDS if self.status.disk_limit else 0)):
                    await self._process.wait()
            except (TimeoutError, EngineDead):
                self._process.kill()
        await self._watcher
        asyncio.get_running_loop().remove_reader(self._channel.readable_fd)
        self._channel.close()
        self.remove_folder()
        return self._process.returncode or 0

    def remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
