"""Requests from a file: JSON lines or an array, ShareGPT conversations, CSV, or plain lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.bench.dialects import Messages, Prompt
from headway.bench.workload import WorkItem
from headway.core.errors import BadInput

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ACCEPTED = 'a request has "prompt" (a text), "messages" (OpenAI\'s) or "conversations" (ShareGPT\'s)'


class _Turn(msgspec.Struct):
    """Of a conversation, under ShareGPT's names or OpenAI's."""

    speaker: str | None = msgspec.field(name="from", default=None)
    value: str | None = None
    role: str | None = None
    content: str | None = None


class _Row(msgspec.Struct):
    prompt: str | None = None
    messages: Messages | None = None
    conversations: list[_Turn] | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None


def read_dataset(path: Path, count: int, output_tokens: int) -> list[WorkItem]:
    """The first `count` requests of a file; fewer, if it has fewer.

    A .csv file has a column `prompt`, a .txt file a prompt a line; anything else is JSON, an array or lines. Prompts
    and messages are sent as they are, of a ShareGPT conversation all turns up to the last human one. `max_tokens` (or
    `output_tokens`) of a row goes before the argument.

    Raises:
        BadInput: no such file, or a row that is not a request; says which, and what is accepted.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput("--dataset", f"cannot read {path}: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        hint = "it is compressed: unpack it first" if data[:2] == b"\x1f\x8b" else "it is not UTF-8"
        raise BadInput("--dataset", f"cannot read {path}: {hint}") from None
    items: list[WorkItem] = []
    for where, row in _rows(path, text):
        if len(items) == count:
            break
        items.append(_item(row, f"{path} {where}", output_tokens))
    if not items:
        raise BadInput("--dataset", f"{path} holds no request")
    return items


def _rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """(where in the file, the row's fields)."""
    lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == ".txt":
        yield from ((where, {"prompt": line.removesuffix("\r")}) for where, line in lines)
    elif path.suffix == ".csv":
        for number, row in enumerate(csv.DictReader(io.StringIO(text, newline="")), 1):
            numbers = {name: row[name] for name in ("max_tokens", "output_tokens") if row.get(name)}
            yield f"row {number}", ({"prompt": row["prompt"]} if row.get("prompt") else row) | numbers
    elif text.lstrip()[:1] == "[" and lines[0][1].strip() != "[]":
        yield from ((f"row {number}", row) for number, row in enumerate(_decoded(text, f"{path} line 1"), 1))
    else:
        yield from ((where, _decoded(line, f"{path} {where}")) for where, line in lines)


def _decoded(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadInput("--dataset", f"{where} is not JSON: {error}") from None


def _item(fields: Any, where: str, output_tokens: int) -> WorkItem:
    try:
        row = msgspec.convert(fields, _Row, strict=False)
    except msgspec.ValidationError as error:
        raise BadInput("--dataset", f"{where} is not a request: {error}; {ACCEPTED}") from None
    given = [value for value in (row.prompt, row.messages, row.conversations) if value is not None]
    if len(given) != 1 or not given[0]:
        found = ", ".join(list(fields)[:8]) or "nothing"
        raise BadInput("--dataset", f"{where} holds {found}; {ACCEPTED}, and one of them")
    limit = row.max_tokens or row.output_tokens or output_tokens
    if limit < 1:
        raise BadInput("--dataset", f"{where}: max_tokens {limit} is not an integer >= 1")
    prompt: Prompt = _messages(row.conversations, where) if row.conversations else given[0]  # type: ignore[assignment]
    return WorkItem(prompt, limit)


def _messages(turns: list[_Turn], where: str) -> Messages:
    """All turns up to the last one of the user, for the model to answer."""
    messages = []
    for turn in turns:
        role = ROLES.get(turn.speaker or turn.role or "")
        content = turn.content if turn.value is None else turn.value
        if role is None or content is None:
            accepted = ", ".join(ROLES)
            raise BadInput("--dataset", f"{where}: a turn needs a speaker ({accepted}) and a text")
        messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise BadInput("--dataset", f"{where}: no turn of the conversation is the user's")
    return messages
