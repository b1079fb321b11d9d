"""One of a server's models: its engine, its text side, its metrics, and what it is doing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from headway.core.bound import QueueBound
from headway.engine.ipc import Ready
from headway.engine.options import EngineOptions
from headway.serve.admission import Backlog
from headway.serve.errors import ApiError
from headway.serve.link import EngineLink
from headway.serve.metrics import Metrics, Series, gauges
from headway.serve.text import PromptReader, Text

QUIET_SECONDS = 1.0


class Phase(Enum):
    """Of a model; of several, those that are worst stand last."""

    READY = "ready"
    DRAINING = "draining"
    LOADING = "loading"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that a server is to serve.

    Attributes:
        model: the name clients use.
        also: other names that it answers to; lists and answers have `model`.
        engine_command: starts the engine process.
        engine_options: one line of JSON for it.
        queue: the bound on what waits.
        load_text: makes the text side; called in a thread.
        chats: whether the model has a chat template.
    """

    model: str
    also: Sequence[str] = ()
    engine_command: Sequence[str] = (sys.executable, "-m", "headway.engine.process")
    engine_options: bytes = b"{}"
    queue: QueueBound = EngineOptions().queue
    load_text: Callable[[], Text]
    chats: bool = True


class HostedModel:
    """A model as the server holds it; a `ModelHost` to the dialects.

    Attributes:
        name: what clients call it.
        also: what they may call it too.
        chats: whether it has a chat template.
        link: its engine.
        ready: what the engine said when it was loaded; None before.
        phase: what it is doing; set by `load` and `lifecycle`.
    """

    def __init__(self, served: Served) -> None:
        self.name = served.model
        self.also = served.also
        self.chats = served.chats
        self._load_text = served.load_text
        self._metrics = Metrics(served.model)
        backlog = Backlog(served.queue)
        self.link = EngineLink(served.engine_command, served.engine_options, backlog, self._metrics.fold)
        self._reader: PromptReader | None = None
        self.ready: Ready | None = None
        self.phase = Phase.LOADING

    async def load(self) -> None:
        """Return when the model accepts requests, or its engine has failed; the engine was started."""
        text = asyncio.create_task(asyncio.to_thread(self._load_text))
        await self.link.settled()
        ready = self.link.ready
        if ready is not None and not self.link.failed:
            self._reader = PromptReader(await text, ready.max_model_len, ready.default_params, ready.caution)
            self.ready = ready

    async def complete(self) -> None:
        """Get ready for long texts too, when nobody has asked for anything for a while."""
        quiet = False
        while not quiet:
            await asyncio.sleep(QUIET_SECONDS)
            quiet = not self.link.active and time.monotonic() - self.link.turned > QUIET_SECONDS
        if self._reader is not None:
            await asyncio.to_thread(self._reader.text.load)

    @property
    def reader(self) -> PromptReader:
        """
        Raises:
            ApiError: 503, requests are not accepted now.
        """
        if self.phase is Phase.LOADING:
            raise ApiError(503, "the model is still being loaded", code="loading", retry_after=5)
        if self.phase is Phase.DRAINING:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=10)
        if self.phase is Phase.DEAD or self._reader is None:
            raise ApiError(503, "the engine has stopped", code="engine_dead", retry_after=10)
        return self._reader

    @property
    def adapters(self) -> Mapping[str, str]:
        """Path of each LoRA adapter that requests may name, by name."""
        return self.link.adapters

    @property
    def current_phase(self) -> Phase:
        """`phase`, or that the engine has just died."""
        return Phase.DEAD if self.link.dead else self.phase

    def series(self) -> list[Series]:
        """What /metrics says of it."""
        link = self.link
        now = {
            "up": float(self.phase in (Phase.READY, Phase.DRAINING)),
            "seconds_since_step": link.idle_seconds(),
            "queue_requests": float(len(link.backlog)),
            "queue_prompt_tokens": float(link.backlog.tokens),
            "http_active": float(link.active),
            "step_times_are_estimates": float(self.ready is not None and self.ready.step_times == "estimate"),
        }
        return [*self._metrics.series(link.status), *gauges(self.name, now)]
