"""How OpenAI writes answers: one object for a whole answer, byte templates for a streamed one, and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.serve.answer import Answer
from headway.serve.choice import Block, Choice, Gain, Prompt
from headway.serve.dialects.openai.completion_logprobs import CompletionLogprobs, joined
from headway.serve.encode import Template, event, hole, json_bytes
from headway.serve.errors import ApiError, clean
from headway.serve.logprobs import ShownToken, entries, finite, named_tokens
from headway.serve.text import Text
from headway.text.parts import CallArguments, CallBegun, Part, Said, Thought

DONE = b"data: [DONE]\n\n"
END = b"}\n\n"  # of an event; within one, line ends are escaped
NO_USAGE = b'"usage":null' + END
TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}

Fields = dict[str, Any]


def error_body(error: ApiError) -> Fields:
    return {
        "error": {
            "message": clean(str(error)),
            "type": TYPES.get(error.status, "server_error"),
            "param": None if error.param is None else clean(error.param, 200),
            "code": error.code,
        }
    }


class Events:
    """The stream of one choice: nothing while its text is held back, the finish reason last.

    Args:
        head: what comes before the first text.
        text: an event with holes for what is said and logprobs.
        finish: an event with a hole for the reason.
        encode: JSON of the logprobs of some tokens; None = "null" stands in `text` already.
        other: an event of a part that is not said.
    """

    def __init__(
        self,
        head: bytes,
        text: Template,
        finish: Template,
        encode: Callable[[list[ShownToken]], bytes] | None,
        other: Callable[[Part], bytes],
    ) -> None:
        self._head = head
        self._text = text
        self._finish = finish
        self._encode = encode
        self._other = other
        self._held: list[ShownToken] = []  # of tokens whose text is still held back

    def chunk(self, gain: Gain) -> bytes:
        data, self._head = self._head, b""
        self._held += gain.logprobs
        for part in gain.parts:
            data += self._said(part.text) if isinstance(part, Said) else self._other(part)
        if gain.finish is not None:
            if self._held:
                data += self._said("")
            data += self._finish.fill(json_bytes(gain.finish.reason))
        return data

    def _said(self, text: str) -> bytes:
        if self._encode is None:
            return self._text.fill(json_bytes(text))
        held, self._held = self._held, []
        return self._text.fill(json_bytes(text), self._encode(held))


class _Format:
    """What chat and completions share.

    Args:
        alternatives: how many per token; None = no logprobs.
        usage: a stream ends with its usage, and its other events have the field too; None = they have the usage so
            far.
        prompt_logprobs: alternatives per token of the prompt; None = no logprobs of those.
    """

    stream_type = b"text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, text: Text, alternatives: int | None, usage: bool | None, prompt_logprobs: int | None, answer: Answer
    ) -> None:
        self._tokens = text
        self._alternatives = alternatives
        self._usage = usage is not False
        self._continuous = usage is None
        self._prompt_count = prompt_logprobs
        self._answer = answer
        self._events: dict[int, Events] = {}

    def chunk(self, choice: Choice, gain: Gain) -> bytes:
        events = self._events.get(choice.index)
        if events is None:
            events = self._events[choice.index] = self._open(choice)
        data = events.chunk(gain)
        return data.replace(NO_USAGE, b'"usage":' + json_bytes(self._totals()) + END) if self._continuous else data

    def end(self) -> bytes:
        if not self._usage:
            return DONE
        return event({**self._body([], self.chunk_object), "usage": self._totals()}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error_body(error)) + DONE

    def whole(self) -> list[bytes]:
        body = {**self._body(hole(0), self.object), "usage": self._totals(), **self._more()}
        before, after = Template(json_bytes(body), 1).pieces
        pieces = [before, b"["]
        for index, choice in enumerate(self._answer.answered):
            pieces += [json_bytes({**self._choice(choice), "index": index}), b","]
        return [*pieces[:-1], b"]", after]

    def _more(self) -> Fields:
        """What else a whole answer has."""
        return {}

    def _open(self, choice: Choice) -> Events:
        raise NotImplementedError

    def _choice(self, choice: Choice) -> Fields:
        raise NotImplementedError

    def _body(self, choices: Any, object: str) -> Fields:
        answer = self._answer
        return {
            "id": answer.id,
            "object": object,
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _totals(self) -> Fields:
        answer = self._answer
        details = {"reasoning_tokens": answer.reasoning_tokens}
        return {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            **({"completion_tokens_details": details} if answer.query.parser else {}),
            **answer.bill,
        }

    def _of_prompt(self, prompt: Prompt) -> list[dict[str, Fields] | None]:
        """vLLM's `prompt_logprobs`: by token id; nothing predicts the first."""
        count = self._prompt_count or 0
        found: list[dict[str, Fields] | None] = [None]
        for position in prompt.logprobs:
            ranked = enumerate(position.top[:count], 1)
            entry = {str(id): self._ranked(id, logprob, rank) for rank, (id, logprob) in ranked}
            found.append({str(position.token): self._ranked(position.token, position.logprob, position.rank)} | entry)
        return found

    def _ranked(self, id: int, logprob: float, rank: int) -> Fields:
        name = self._tokens.token_bytes(id).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": name}

    def _event(self, choice: Choice, content: Fields, logprobs: Any, finish: Any) -> bytes:
        fields = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": finish}
        body = self._body([fields], self.chunk_object)
        return event({**body, "usage": None} if self._usage else body)

    def _templates(self, choice: Choice, text: Fields, end: Fields) -> tuple[Template, Template]:
        """Of an event with text, `hole(0)` in `text`, and of the last one."""
        logprobs = None if self._alternatives is None else hole(1)
        events = Template(self._event(choice, text, logprobs, None), 1 if logprobs is None else 2)
        return events, Template(self._event(choice, end, None, hole(0)), 1)


class ChatFormat(_Format):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _more(self) -> Fields:
        (prompt,) = self._answer.prompts
        return {} if self._prompt_count is None else {"prompt_logprobs": self._of_prompt(prompt)}

    def _open(self, choice: Choice) -> Events:
        head = self._event(choice, {"delta": {"role": "assistant", "content": ""}}, None, None)
        templates = self._templates(choice, {"delta": {"content": hole(0)}}, {"delta": {}})
        encode = None if self._alternatives is None else lambda held: json_bytes(self._logprobs(held))
        return Events(head, *templates, encode, self._other(choice))

    def _other(self, choice: Choice) -> Callable[[Part], bytes]:
        """Writes the parts of a choice that are not said. Reasoning has two names: clients read either."""
        calls = -1

        def write(part: Part) -> bytes:
            nonlocal calls
            delta: Fields
            match part:
                case Thought(text) | Said(text):
                    delta = {"reasoning_content": text, "reasoning": text}
                case CallBegun(name, id):
                    calls += 1
                    function = {"name": name, "arguments": ""}
                    delta = {"tool_calls": [{"index": calls, "id": id, "type": "function", "function": function}]}
                case CallArguments(text):
                    delta = {"tool_calls": [{"index": calls, "function": {"arguments": text}}]}
            return self._event(choice, {"delta": delta}, None, None)

        return write

    def _choice(self, choice: Choice) -> Fields:
        calls, reasoning = choice.called, choice.reasoning
        message: Fields = {"role": "assistant", "content": choice.text, "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": [_call(call) for call in calls]}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish.reason if choice.finish else None,
        }

    def _logprobs(self, logprobs: Sequence[ShownToken]) -> Fields | None:
        if self._alternatives is None:
            return None
        return {"content": entries(self._tokens, logprobs, self._alternatives), "refusal": None}


def _call(call: Block) -> Fields:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


class CompletionFormat(_Format):
    def __init__(
        self, text: Text, alternatives: int | None, usage: bool | None, prompt_logprobs: int | None, answer: Answer
    ) -> None:
        super().__init__(text, alternatives, usage, prompt_logprobs, answer)
        self._echoes: dict[int, tuple[CompletionLogprobs, Fields | None]] = {}

    def _open(self, choice: Choice) -> Events:
        text, end = self._templates(choice, {"text": hole(0)}, {"text": ""})
        head = b""
        encode: Callable[[list[ShownToken]], bytes] | None = None
        if self._alternatives is not None:
            lists, echo = self._echo(choice)

            def encode(held: list[ShownToken]) -> bytes:
                return json_bytes(lists.piece(held) if held else None)

        if self._answer.query.echo:
            values = [json_bytes(choice.prompt.text)] + ([] if encode is None else [json_bytes(echo)])
            head = text.fill(*values)
        return Events(head, text, end, encode, other=lambda part: b"")  # a completion is text only

    def _echo(self, choice: Choice) -> tuple[CompletionLogprobs, Fields | None]:
        """Where the lists of a choice begin, and those of its prompt, made once for all its choices; None = no echo."""
        prompt = choice.prompt
        if id(prompt) not in self._echoes:
            lists = CompletionLogprobs(self._tokens, self._alternatives or 0, self._tokens.strip_after(()))
            fields = None
            if self._answer.query.echo:
                fields = joined(
                    [
                        lists.first(prompt.tokens[0], prompt.hidden),
                        lists.piece(named_tokens(self._tokens, prompt.logprobs)),
                    ]
                )
            self._echoes[id(prompt)] = lists, fields
        lists, fields = self._echoes[id(prompt)]
        return lists.fork(0), fields

    def _choice(self, choice: Choice) -> Fields:
        logprobs = None
        if self._alternatives is not None:
            lists, echo = self._echo(choice)
            logprobs = joined([*([echo] if echo else []), lists.piece(choice.logprobs)])
        return {
            "index": choice.index,
            "text": choice.prompt.text + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish.reason if choice.finish else None,
            **({} if self._prompt_count is None else {"prompt_logprobs": self._of_prompt(choice.prompt)}),
        }
