"""How Ollama writes answers: one JSON object a line, the last with counts and durations."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from headway.core.step import TokenLogprobs
from headway.engine.messages import Delta
from headway.serve.answer import Answer, Choice
from headway.serve.encode import Template, hole, json_bytes
from headway.serve.errors import ApiError, clean
from headway.serve.logprobs import entries
from headway.serve.text import Text

PS_PER_NS = 1000


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": clean(str(error))}


def timestamp(at: float | None = None) -> str:
    """RFC 3339 of Unix seconds `at`; None = now."""
    time = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return time.isoformat().replace("+00:00", "Z")


class LineFormat:
    """Both routes' answers, which differ in where the text stands.

    Args:
        chat: the text is a message's, not a response.
        alternatives: how many per token; None = no logprobs.
    """

    stream_type = b"application/x-ndjson"
    keep_alive = b" "  # may precede any JSON

    def __init__(self, chat: bool, text: Text, alternatives: int | None, answer: Answer) -> None:
        self._chat = chat
        self._tokens = text
        self._alternatives = alternatives
        self._answer = answer
        self._held: list[TokenLogprobs] = []  # of tokens whose text is still held back
        line = self._line(hole(0), hole(1))
        if alternatives is not None:
            line["logprobs"] = hole(2)
        self._template = Template(json_bytes(line) + b"\n", 2 if alternatives is None else 3)
        self._finish = ""

    def _line(self, created: str, text: str, done: bool = False) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"response": text}
        return {"model": self._answer.model, "created_at": created, **content, "done": done}

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        self._held += delta.logprobs
        if delta.finish is not None:
            self._finish = delta.finish.reason
        if not delta.text and not (delta.finish is not None and self._held):
            return b""
        values = [json_bytes(timestamp()), json_bytes(delta.text)]
        if self._alternatives is not None:
            values.append(json_bytes(entries(self._tokens, self._held, self._alternatives)))
        self._held = []
        return self._template.fill(*values)

    def end(self) -> bytes:
        return json_bytes(self._last("")) + b"\n"

    def failed(self, error: ApiError) -> bytes:
        return json_bytes(error_body(error)) + b"\n"

    def whole(self) -> list[bytes]:
        (choice,) = self._answer.choices
        self._finish = choice.finish.reason if choice.finish else ""
        body = self._last("".join(choice.texts))
        if self._alternatives is not None:
            body["logprobs"] = entries(self._tokens, choice.logprobs, self._alternatives)
        return [json_bytes(body)]

    def _last(self, text: str) -> dict[str, Any]:
        """The final object. What Ollama calls loading is here the wait for a place in the cache."""
        answer = self._answer
        admitted = answer.arrival if answer.admitted is None else answer.admitted
        first, last = answer.first or admitted, answer.last or admitted
        return {
            **self._line(timestamp(), text, done=True),
            "done_reason": self._finish,
            "total_duration": (last - answer.arrival) // PS_PER_NS,
            "load_duration": (admitted - answer.arrival) // PS_PER_NS,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": (first - admitted) // PS_PER_NS,
            "eval_count": answer.completion_tokens,
            "eval_duration": (last - first) // PS_PER_NS,
        }
