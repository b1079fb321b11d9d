"""The two response shapes, chat and completion: one object for a whole answer, byte templates for a streamed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.step import TokenLogprobs
from headway.engine.messages import Delta
from headway.serve.logprobs import CompletionLogprobs, chat_entries, joined
from headway.serve.sse import Template, event, json_bytes
from headway.serve.text import Text

HOLE, HOLE2 = Template.hole(0), Template.hole(1)


@dataclass
class Usage:
    """Tokens of one HTTP request, over all its prompts and choices; a prompt counts once."""

    prompt: int = 0
    completion: int = 0
    cached: dict[str, int] = field(default_factory=dict)  # by engine request

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass
class Echo:
    """The prompt in front of a completion.

    Attributes:
        text: the prompt's.
        tokens: its ids.
        hidden: the first id is a start token that is not part of `text`.
        logprobs: one entry per id from the second on, as they come; shared by the n choices.
    """

    text: str
    tokens: tuple[int, ...]
    hidden: bool
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class Header:
    """What every object and chunk of one HTTP request says about itself."""

    id: str
    model: str
    created: int
    object: str

    def body(self, choices: Sequence[Any], object: str | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object or self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }


class ChatChoice:
    """One choice of a chat answer, folded from its deltas.

    Args:
        index: among all choices of the answer.
        alternatives: how many alternatives per token; None = no logprobs.
    """

    def __init__(self, header: Header, text: Text, index: int, alternatives: int | None, usage_field: bool) -> None:
        self._header = header
        self._text = text
        self._alternatives = alternatives
        self._usage_field = usage_field
        self._template: Template | None = None
        self._held: list[TokenLogprobs] = []  # logprobs of tokens whose text is still held back
        self.index = index
        self.content: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Take a delta into the whole answer."""
        self.content.append(delta.text)
        self.logprobs += delta.logprobs
        if delta.finish is not None:
            self.finish = delta.finish.reason

    def body(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self.content), "refusal": None}
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(self.logprobs),
            "finish_reason": self.finish,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._alternatives is None:
            return None
        return {"content": chat_entries(self._text, logprobs, self._alternatives), "refusal": None}

    def chunk(self, delta: Delta) -> bytes:
        """The events a delta is worth: nothing while its text is held back; role first, finish reason last."""
        if self._template is None:
            self._template = Template(self._event({"content": HOLE}, HOLE2, None), 2)
            return self._event_bytes({"role": "assistant", "content": ""}, None, None) + self.chunk(delta)
        self._held += delta.logprobs
        data = b""
        if delta.text or (delta.finish is not None and self._held):
            data = self._template.fill(json_bytes(delta.text), self._held_logprobs())
        if delta.finish is not None:
            data += self._event_bytes({}, None, delta.finish.reason)
        return data

    def _held_logprobs(self) -> bytes:
        if self._alternatives is None:
            return b"null"
        held, self._held = self._held, []
        return json_bytes(self._logprobs(held))

    def _event(self, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        body = self._header.body([choice], "chat.completion.chunk")
        return {**body, "usage": None} if self._usage_field else body

    def _event_bytes(self, delta: dict[str, Any], logprobs: Any, finish: str | None) -> bytes:
        return event(self._event(delta, logprobs, finish))


class CompletionChoice:
    """One choice of a text completion, folded from its deltas; with `echo`, the prompt comes first."""

    def __init__(
        self, header: Header, text: Text, index: int, alternatives: int | None, usage_field: bool, echo: Echo | None
    ) -> None:
        self._header = header
        self._alternatives = alternatives
        self._usage_field = usage_field
        self._echo = echo
        self._template: Template | None = None
        self._lists = CompletionLogprobs(text, alternatives or 0)
        self._held: list[dict[str, Any]] = []
        self.index = index
        self.content: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Take a delta into the whole answer."""
        if not self.content:
            self.content.append(self._echo.text if self._echo else "")
            self.logprobs += self._prompt_logprobs()
        self.content.append(delta.text)
        if delta.logprobs:
            self.logprobs.append(self._lists.piece(delta.logprobs))
        if delta.finish is not None:
            self.finish = delta.finish.reason

    def body(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": "".join(self.content),
            "logprobs": None if self._alternatives is None else joined(self.logprobs),
            "finish_reason": self.finish,
        }

    def _prompt_logprobs(self) -> list[dict[str, Any]]:
        if self._echo is None or self._alternatives is None:
            return []
        return [self._lists.first(self._echo.tokens[0], self._echo.hidden), self._lists.piece(self._echo.logprobs)]

    def chunk(self, delta: Delta) -> bytes:
        """The events a delta is worth: nothing while its text is held back; the echo first, finish reason last."""
        data = b""
        if self._template is None:
            self._template = Template(self._event(HOLE, HOLE2, None), 2)
            if self._echo is not None:
                self._held = self._prompt_logprobs()
                data = self._template.fill(json_bytes(self._echo.text), self._held_logprobs())
        if delta.logprobs:
            self._held.append(self._lists.piece(delta.logprobs))
        if delta.text or (delta.finish is not None and self._held):
            data += self._template.fill(json_bytes(delta.text), self._held_logprobs())
        if delta.finish is not None:
            data += event(self._event("", None, delta.finish.reason))
        return data

    def _held_logprobs(self) -> bytes:
        if self._alternatives is None or not self._held:
            return b"null"
        held, self._held = self._held, []
        return json_bytes(joined(held))

    def _event(self, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        body = self._header.body([choice])
        return {**body, "usage": None} if self._usage_field else body


Choice = ChatChoice | CompletionChoice


def usage_event(header: Header, usage: Usage) -> bytes:
    """The last event of a stream that was asked for its usage: no choices, the totals."""
    kind = "chat.completion.chunk" if header.object == "chat.completion" else header.object
    return event({**header.body([], kind), "usage": usage.body()})
