"""How Ollama writes answers: one JSON object a line, the last with counts and durations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.core.request import Finish
from headway.serve.answer import Answer
from headway.serve.choice import Block, Choice, Gain
from headway.serve.encode import Template, hole, json_bytes, timestamp
from headway.serve.errors import ApiError, clean
from headway.serve.logprobs import ShownToken, entries
from headway.serve.text import Text
from headway.text.parts import CallArguments, CallBegun, Said, Thought

PS_PER_NS = 1000


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": clean(str(error))}


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
        self._held: list[ShownToken] = []  # of tokens whose text is still held back
        line = self._line(hole(0), hole(1))
        if alternatives is not None:
            line["logprobs"] = hole(2)
        self._template = Template(json_bytes(line) + b"\n", 2 if alternatives is None else 3)
        self._finish = ""
        self._calls: list[Block] = []  # the one in progress

    def _line(self, created: str, text: str, done: bool = False, **more: Any) -> dict[str, Any]:
        """`more`: what else the message (or the response) holds."""
        message = {"message": {"role": "assistant", "content": text, **more}}
        content = message if self._chat else {"response": text, **more}
        return {"model": self._answer.model, "created_at": created, **content, "done": done}

    def chunk(self, choice: Choice, gain: Gain) -> bytes:
        self._held += gain.logprobs
        data = b""
        for part in gain.parts:
            if isinstance(part, CallArguments):
                self._calls[-1].texts.append(part.text)
                continue
            data += self._called()
            match part:
                case Said(text):
                    data += self._said(text)
                case Thought(text):
                    data += json_bytes(self._line(timestamp(), "", thinking=text)) + b"\n"
                case CallBegun(name, id):
                    self._calls.append(Block("call", name=name, id=id))
        if gain.finish is not None:
            self._finish = _reason(gain.finish)
            data += self._called()
            if self._held:
                data += self._said("")
        return data

    def _said(self, text: str) -> bytes:
        values = [json_bytes(timestamp()), json_bytes(text)]
        if self._alternatives is not None:
            values.append(json_bytes(entries(self._tokens, self._held, self._alternatives)))
        self._held = []
        return self._template.fill(*values)

    def _called(self) -> bytes:
        """The call that has just become complete, if there is one: Ollama's clients take calls whole."""
        calls, self._calls = self._calls, []
        return json_bytes(self._line(timestamp(), "", tool_calls=_calls(calls))) + b"\n" if calls else b""

    def end(self) -> bytes:
        return json_bytes(self._last("")) + b"\n"

    def failed(self, error: ApiError) -> bytes:
        return json_bytes(error_body(error)) + b"\n"

    def whole(self) -> list[bytes]:
        (choice,) = self._answer.choices
        self._finish = _reason(choice.finish) if choice.finish else ""
        calls, reasoning = _calls(choice.called), choice.reasoning
        more = ({"thinking": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
        body = self._last(choice.text, **more)
        if self._alternatives is not None:
            body["logprobs"] = entries(self._tokens, choice.logprobs, self._alternatives)
        return [json_bytes(body)]

    def _last(self, text: str, **more: Any) -> dict[str, Any]:
        """The final object. What Ollama calls loading is here the wait for a place in the cache."""
        answer = self._answer
        admitted = answer.arrival if answer.admitted is None else answer.admitted
        first, last = answer.first or admitted, answer.last or admitted
        return {
            **self._line(timestamp(), text, done=True, **more),
            "done_reason": self._finish,
            "total_duration": (last - answer.arrival) // PS_PER_NS,
            "load_duration": (admitted - answer.arrival) // PS_PER_NS,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": (first - admitted) // PS_PER_NS,
            "eval_count": answer.completion_tokens,
            "eval_duration": (last - first) // PS_PER_NS,
        }


def _reason(finish: Finish) -> str:
    """Calls of tools are no reason of their own here."""
    return "stop" if finish.reason == "tool_calls" else finish.reason


def _calls(calls: Sequence[Block]) -> list[dict[str, Any]]:
    return [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
