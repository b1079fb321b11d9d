"""Chat templates: messages to the text of a prompt, as the checkpoint's own Jinja template writes it.

    ChatTemplate (this process)  --variables-->  template_worker.py (its own process)
                                 <--text or why not--

A template is a program from a model file, so it runs where it can be ended: in a process with little memory and a
processor-time limit (see `template_worker`). A template that fails is an error that names the line; there is no
other template to fall back to, because a prompt in the wrong format gives a plausible, worse answer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput, ModelFileError, shown
from headway.text.guarded import Bounds, GuardedProcess, WorkerEnded

_WORKER = Path(__file__).with_name("template_worker.py")
_LIMITS = Bounds(cpu_seconds=1.0, wall_seconds=20.0, memory=1 << 29)
_MOST_CHARACTERS = 16 << 20
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """A checkpoint's chat template. May be used from several threads; renderings take turns.

    Its process is started at once, in the background, and ends with `close`, with this object, or with the program.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        """Use the Jinja template `source`; it is compiled by the first rendering.

        Args:
            tokens: named tokens it may write, such as bos_token (see `Tokenizer.template_tokens`).
        """
        self._source = source
        self._tokens = dict(tokens or {})
        self._lock = threading.Lock()
        self._process: GuardedProcess | None = self._start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Encode it with `add_special=False`: the template writes its own bos.

        Args:
            messages: dicts with "role" and "content": a string, or a list of text parts, which are joined by newlines.
                Other fields are handed to the template as they are; fields that are None are left out.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: JSON schemas of functions, as the template expects them.
            variables: more variables of this template, such as enable_thinking.

        Raises:
            BadInput: the messages are malformed, or the template refuses them.
            ModelFileError: the template is faulty, or needs more time, memory or output than it may have.
        """
        given = {
            **self._tokens,
            **_checked_variables(variables or {}),
            "messages": checked_messages(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            data = msgspec.msgpack.encode(given)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadInput("messages", f"hold something that is not plain JSON: {error}") from None
        with self._lock:
            outcome, text, line = self._ask(data)
        where = f"line {line} of the chat template" if line else "the chat template"
        if outcome == "refused":
            raise BadInput("messages", f"{where} refuses them: {text}")
        if outcome == "fault":
            raise ModelFileError(f"{where} is faulty: {text}")
        return text

    def close(self) -> None:
        """End the process. Rendering afterwards starts a new one."""
        with self._lock:
            self._drop()

    def _ask(self, data: bytes) -> tuple[str, str, int]:
        if self._process is None or self._process.ended:
            self._process = self._start()
        try:
            return msgspec.msgpack.decode(self._process.ask(data), type=tuple[str, str, int])
        except WorkerEnded as error:
            self._drop()
            return "fault", str(error), 0

    def _start(self) -> GuardedProcess:
        return GuardedProcess(_WORKER, _LIMITS, [str(_MOST_CHARACTERS)], [self._source.encode()])

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them.

    Raises:
        BadInput: names the message and the field.
    """
    if not messages:
        raise BadInput("messages", "give at least one message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadInput(where, 'each message is an object with "role" and "content"')
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise BadInput(f"{where}.role", f'{shown(role)} is not a role such as "user"')
    checked = {key: value for key, value in message.items() if value is not None}
    if content is None:
        if not message.get("tool_calls"):
            raise BadInput(f"{where}.content", "is missing; only a message with tool_calls may have none")
    elif not isinstance(content, str):
        checked["content"] = _joined_parts(content, f"{where}.content")
    return checked


def _joined_parts(parts: Any, where: str) -> str:
    if not isinstance(parts, Sequence) or isinstance(parts, (bytes, bytearray)):
        raise BadInput(where, "is neither a string nor a list of text parts")
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise BadInput(f"{where}[{index}].type", f'{shown(kind)} is not supported; only "text" parts are')
        if not isinstance(part.get("text"), str):
            raise BadInput(f"{where}[{index}].text", "is not a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _checked_variables(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in variables:
        if name in _RESERVED or not name.isidentifier():
            raise BadInput("variables", f"{shown(name)} cannot be set for a chat template")
    return variables
