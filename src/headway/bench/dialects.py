"""The three streaming APIs: how a request is written and what each event means.

A dialect turns one event's JSON into chunks on a `RequestRecord`. It knows nothing of sockets or clocks.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from headway.core.errors import BadInput
from headway.metrics.records import Chunk, Failure, FailureKind, Kind, RequestRecord

Messages = list[dict[str, Any]]
Prompt = str | Messages  # a text, or a conversation as the chat APIs take it
WITH_USAGE = {"stream_options": {"include_usage": True}}


class _CachedDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _OpenAIEvent(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class ClientDialect(Protocol):
    """One streaming API."""

    name: str
    path: str

    def body(self, prompt: Prompt, model: str, max_tokens: int) -> dict[str, Any]:
        """The JSON body of a streaming request.

        Raises:
            BadInput: this API cannot send such a prompt.
        """
        ...

    def interpret(self, data: bytes, at: int, event: int, record: RequestRecord) -> Failure | None:
        """Append what an event holds to `record`; a failure if the event is one or is not understood."""
        ...


def messages_of(prompt: Prompt) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def text_of(prompt: Prompt) -> str:
    """The text of a prompt, messages one a line; parts that are no text are left out."""
    if isinstance(prompt, str):
        return prompt
    texts = []
    for message in prompt:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts)


def _body(model: str, max_tokens: int, **prompt: Any) -> dict[str, Any]:
    return {"model": model, **prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}


class _OpenAI:
    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_OpenAIEvent)

    def interpret(self, data: bytes, at: int, event: int, record: RequestRecord) -> Failure | None:
        if data.startswith(b"[DONE]"):
            record.chunks.append(Chunk(at, Kind.DONE, event))
            return None
        try:
            message = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Failure(FailureKind.MALFORMED, f"an event is not this API's JSON ({error}): {shown(data)}")
        if message.error:
            return Failure(FailureKind.ERROR_EVENT, f"the stream reported an error: {shown(data)}")
        record.server_id = record.server_id or message.id
        if message.choices:
            tokens = self._new_tokens(message.usage, record)
            for kind, text in self._parts(message.choices[0]):
                record.chunks.append(Chunk(at, kind, event, tokens))
                tokens = 0
                if record.text is not None:
                    record.text.append(text)
            record.finish_reason = message.choices[0].finish_reason or record.finish_reason
        if message.usage is not None:
            self._take_usage(message.usage, record)
            if not message.choices:
                record.chunks.append(Chunk(at, Kind.USAGE, event))
        return None

    @staticmethod
    def _new_tokens(usage: _Usage | None, record: RequestRecord) -> int:
        """Tokens of this event, where usage comes with every one."""
        if usage is None or usage.completion_tokens is None:
            return 0
        return max(0, usage.completion_tokens - (record.output_tokens or 0))

    @staticmethod
    def _parts(choice: _Choice) -> list[tuple[Kind, str]]:
        """What a choice carries; a tool call's text is left out, because its tokens are not only its arguments."""
        delta = choice.delta or _Delta(content=choice.text)
        carried = (
            (Kind.REASONING, delta.reasoning_content or delta.reasoning),
            (Kind.CONTENT, delta.content or delta.refusal),
            (Kind.TOOL, "" if delta.tool_calls else None),
        )
        parts = [(kind, text) for kind, text in carried if text or (kind is Kind.TOOL and text is not None)]
        return parts or [(Kind.FINISH if choice.finish_reason else Kind.ROLE, "")]

    @staticmethod
    def _take_usage(usage: _Usage, record: RequestRecord) -> None:
        if usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens is not None:
            record.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens


class OpenAIChat(_OpenAI):
    name = "chat"
    path = "/chat/completions"

    def body(self, prompt: Prompt, model: str, max_tokens: int) -> dict[str, Any]:
        return _body(model, max_tokens, messages=messages_of(prompt)) | WITH_USAGE


class OpenAICompletions(_OpenAI):
    name = "completions"
    path = "/completions"

    def body(self, prompt: Prompt, model: str, max_tokens: int) -> dict[str, Any]:
        if not isinstance(prompt, str):
            raise BadInput("--dataset", "has messages, which the completions API does not take; use --api chat")
        return _body(model, max_tokens, prompt=prompt) | WITH_USAGE


class _AnthropicUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _AnthropicMessage(msgspec.Struct):
    id: str | None = None
    usage: _AnthropicUsage | None = None


class _AnthropicDelta(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _AnthropicEvent(msgspec.Struct):
    type: str
    message: _AnthropicMessage | None = None
    delta: _AnthropicDelta | None = None
    usage: _AnthropicUsage | None = None


class AnthropicMessages:
    name = "anthropic"
    path = "/messages"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_AnthropicEvent)

    def body(self, prompt: Prompt, model: str, max_tokens: int) -> dict[str, Any]:
        messages = messages_of(prompt)
        system = "\n".join(text_of([message]) for message in messages if message.get("role") == "system")
        others = [message for message in messages if message.get("role") != "system"]
        return _body(model, max_tokens, messages=others) | ({"system": system} if system else {})

    def interpret(self, data: bytes, at: int, event: int, record: RequestRecord) -> Failure | None:
        try:
            message = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Failure(FailureKind.MALFORMED, f"an event is not this API's JSON ({error}): {shown(data)}")
        if message.type == "error":
            return Failure(FailureKind.ERROR_EVENT, f"the stream reported an error: {shown(data)}")
        if message.type == "message_start" and message.message is not None:
            record.server_id = message.message.id
            self._take_usage(message.message.usage, record)
            record.chunks.append(Chunk(at, Kind.ROLE, event))
        elif message.type == "content_block_delta" and message.delta is not None:
            self._take_delta(message.delta, at, event, record)
        elif message.type == "message_delta":
            self._take_usage(message.usage, record)
            if message.delta is not None:
                record.finish_reason = message.delta.stop_reason or record.finish_reason
            record.chunks.append(Chunk(at, Kind.USAGE, event))
        elif message.type == "message_stop":
            record.chunks.append(Chunk(at, Kind.DONE, event))
        return None

    @staticmethod
    def _take_delta(delta: _AnthropicDelta, at: int, event: int, record: RequestRecord) -> None:
        parts = (
            (Kind.REASONING, delta.thinking),
            (Kind.CONTENT, delta.text),
            (Kind.TOOL, delta.partial_json),
        )
        for kind, text in parts:
            if text:
                record.chunks.append(Chunk(at, kind, event))
                if record.text is not None:
                    record.text.append(text)

    @staticmethod
    def _take_usage(usage: _AnthropicUsage | None, record: RequestRecord) -> None:
        if usage is None:
            return
        if usage.input_tokens is not None:
            # Anthropic's input_tokens leaves out what was read from or written to the cache.
            record.cached_tokens = usage.cache_read_input_tokens or 0
            record.prompt_tokens = usage.input_tokens + record.cached_tokens + (usage.cache_creation_input_tokens or 0)
        if usage.output_tokens is not None:
            record.output_tokens = usage.output_tokens


DIALECTS: dict[str, type[OpenAIChat] | type[OpenAICompletions] | type[AnthropicMessages]] = {
    dialect.name: dialect for dialect in (OpenAIChat, OpenAICompletions, AnthropicMessages)
}


def dialect_named(name: str) -> ClientDialect:
    if name not in DIALECTS:
        raise BadInput("--api", f"{name!r} is not one of {', '.join(DIALECTS)}")
    return DIALECTS[name]()


def shown(data: bytes, limit: int = 200) -> str:
    """The start of some bytes as one printable line."""
    text = data[:limit].decode(errors="replace")
    return "".join(char if char.isprintable() else " " for char in text) + ("..." if len(data) > limit else "")


def error_message(body: bytes) -> str:
    """What the body of an error says: its message, if it is JSON of a shape that APIs use, else its start."""
    try:
        error = msgspec.json.decode(body)
        while isinstance(error, dict):
            error = next((error[name] for name in ("error", "message", "detail") if error.get(name)), None)
    except msgspec.DecodeError:
        error = None
    return shown(error.encode() if isinstance(error, str) else body).strip()
