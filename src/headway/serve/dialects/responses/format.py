"""How the Responses API writes answers: a response of items, or the numbered events that build it.

response.created response.in_progress
(output_item.added content_part.added *.delta* *.done content_part.done output_item.done)*
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.serve.answer import Answer
from headway.serve.choice import Block, Choice, Gain
from headway.serve.encode import json_bytes
from headway.serve.errors import ApiError, clean
from headway.serve.logprobs import ShownToken, entries
from headway.serve.text import Text
from headway.text.parts import CallArguments, CallBegun

Fields = dict[str, Any]
PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}
DELTA = {
    "text": "response.output_text", "reasoning": "response.reasoning_text", "call": "response.function_call_arguments",
}  # fmt: skip


class ResponseFormat:
    """
    Args:
        alternatives: how many per token; None = no logprobs.
        echoed: fields of the request that the response has too.
        keep: what to do with the finished content.
    """

    stream_type = b"text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        text: Text,
        alternatives: int | None,
        echoed: Fields,
        keep: Callable[[str, Sequence[Block]], None],
        answer: Answer,
    ) -> None:
        self._text = text
        self._alternatives = alternatives
        self._echoed = echoed
        self._keep = keep
        self._answer = answer
        self._number = -1
        self._built = Choice(0, answer.prompts[0])  # of a stream
        self._open = False
        self._held: list[Fields] = []  # log-probabilities of text that follows
        self._told: dict[int, list[Fields]] = {}  # those of each block

    # Streams

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        body = {"type": kind, "sequence_number": self._number, **fields}
        return b"event: " + kind.encode() + b"\ndata: " + json_bytes(body) + b"\n\n"

    def chunk(self, choice: Choice, gain: Gain) -> bytes:
        data = b""
        if self._number < 0:
            for kind in ("response.created", "response.in_progress"):
                data += self._event(kind, response=self._response("in_progress", [], None))
        self._held += self._entries(gain.logprobs)
        for part in gain.parts:
            blocks = len(self._built.blocks)
            if not isinstance(part, CallBegun | CallArguments) and not part.text:
                continue
            self._built.add(Gain((part,)))
            if len(self._built.blocks) > blocks:
                data += self._close(blocks - 1) + self._begin(blocks)
            if not isinstance(part, CallBegun):
                data += self._more(len(self._built.blocks) - 1, part.text)
        if gain.finish is not None:
            self._built.finish = gain.finish
            data += self._close(len(self._built.blocks) - 1)
        return data

    def _begin(self, index: int) -> bytes:
        self._open = True
        block = self._built.blocks[index]
        empty = Block(block.kind, name=block.name, id=block.id)
        data = self._event(
            "response.output_item.added", output_index=index, item=self._item(empty, index, "in_progress")
        )
        if block.kind != "call":
            part = self._part(empty, [])
            data += self._event("response.content_part.added", **self._place(block, index), part=part)
        return data

    def _more(self, index: int, text: str) -> bytes:
        block = self._built.blocks[index]
        logprobs = {"logprobs": self._take_held(index)} if block.kind == "text" else {}
        return self._event(f"{DELTA[block.kind]}.delta", **self._place(block, index), delta=text, **logprobs)

    def _take_held(self, index: int) -> list[Fields]:
        held, self._held = self._held, []
        self._told.setdefault(index, []).extend(held)
        return held

    def _close(self, index: int) -> bytes:
        if not self._open:
            return b""
        self._open = False
        block = self._built.blocks[index]
        place = self._place(block, index)
        told = self._told.get(index, [])
        done: Fields = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
        if block.kind == "text":
            done["logprobs"] = told
        data = self._event(f"{DELTA[block.kind]}.done", **place, **done)
        if block.kind != "call":
            data += self._event("response.content_part.done", **place, part=self._part(block, told))
        cut = self._built.finish is not None and self._built.finish.reason == "length"
        item = self._item(block, index, "incomplete" if cut else "completed", told)
        return data + self._event("response.output_item.done", output_index=index, item=item)

    def _place(self, block: Block, index: int) -> Fields:
        place = {"item_id": self._item_id(block, index), "output_index": index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def end(self) -> bytes:
        response = self._finished(self._built, self._told)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed", [], None)
        response["error"] = {"code": error.code or "server_error", "message": clean(str(error))}
        return self._event("response.failed", response=response)

    # Whole answers

    def whole(self) -> list[bytes]:
        (choice,) = self._answer.choices
        said = next((index for index, block in enumerate(choice.blocks) if block.kind == "text"), 0)
        return [json_bytes(self._finished(choice, {said: self._entries(choice.logprobs)}))]

    def _finished(self, choice: Choice, told: Mapping[int, list[Fields]]) -> Fields:
        self._keep(self._answer.id, choice.blocks)
        cut = choice.finish is not None and choice.finish.reason == "length"
        status = "incomplete" if cut else "completed"
        items = [self._item(block, index, status, told.get(index, ())) for index, block in enumerate(choice.blocks)]
        answer = self._answer
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            **answer.bill,
        }
        return self._response(status, items, usage)

    def _response(self, status: str, output: list[Fields], usage: Fields | None) -> Fields:
        return {
            "id": self._answer.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._answer.model,
            "output": output,
            "usage": usage,
            **self._echoed,
        }

    def _item_id(self, block: Block, index: int) -> str:
        return f"{PREFIX[block.kind]}_{self._answer.id.partition('_')[2]}{index:02}"

    def _item(self, block: Block, index: int, status: str, logprobs: Sequence[Any] = ()) -> Fields:
        about = {"id": self._item_id(block, index), "status": status}
        if block.kind == "call":
            arguments = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **about, **arguments}
        content = [self._part(block, logprobs)] if block.texts else []
        if block.kind == "reasoning":
            return {"type": "reasoning", **about, "summary": [], "content": content}
        return {"type": "message", **about, "role": "assistant", "content": content}

    def _part(self, block: Block, logprobs: Sequence[Any]) -> Fields:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _entries(self, tokens: Sequence[ShownToken]) -> list[Fields]:
        return [] if self._alternatives is None else entries(self._text, tokens, self._alternatives)
