"""A conversation to token ids: only the template writes control tokens, whatever the messages say.

A message that talks about "<|im_end|>" must not end its turn. So before a template sees the messages, each name of a
control token in them is replaced by one character that nobody uses; what the template wrote itself is then the only
control token in the text:

    messages --name -> character--> template --> text --character -> name, as plain text--> ids

Messages without such names, almost all, take the direct way: the template's text, encoded as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any

from headway.core.errors import BadInput
from headway.text.template import ChatTemplate, checked_messages
from headway.text.tokenizer import Tokenizer

_PRIVATE = range(0xF0000, 0xFFFFE)  # characters that Unicode gives no meaning and leaves alone
_MOST_DEPTH = 64


class Ending(Enum):
    """How a conversation ends, as the model reads it."""

    NATURAL = "continued if the last message is the assistant's, else opened"
    OPENED = "with the opening of the assistant's turn"
    CONTINUED = "within the last message, which is the assistant's: the answer goes on from its last character"
    CLOSED = "with the end of the last message"


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    ending: Ending = Ending.NATURAL,
    **options: Any,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        messages, options: as `ChatTemplate.render` takes them.

    Raises:
        HeadwayError: as `ChatTemplate.render` and `Tokenizer.encode`; also a last message that cannot be continued.
    """
    texts: list[str] = []
    messages = checked_messages(messages)
    _walk([messages, options], texts.append)
    named = tokenizer.special_named(texts)
    last = messages[-1] if messages else {}
    ours = last.get("role") == "assistant" and isinstance(last.get("content"), str)
    if ending is Ending.CONTINUED and not ours:
        raise BadInput("messages", "the last one is no text of the assistant's; there is nothing to continue")
    mark = _free(texts, 1)[0] if ending is Ending.CONTINUED or (ending is Ending.NATURAL and ours) else ""

    def render(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        if not mark:
            return template.render(messages, add_generation_prompt=ending is not Ending.CLOSED, **options)
        # Templates strip what a message ends with, and close it: the mark is the last that they let stand.
        marked = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
        text, found, _ = template.render(marked, add_generation_prompt=False, **options).rpartition(mark)
        if not found:
            raise BadInput("messages", "the chat template leaves the last one out; it cannot be continued")
        return text

    if not named:
        return tokenizer.encode(render(messages, options), add_special=False)
    names = dict(zip(_free([*texts, mark], len(named)), named, strict=True))

    def hide(text: str) -> str:
        for character, name in names.items():  # longest name first
            text = text.replace(name, character)
        return text

    hidden, given = _walk([messages, options], hide)
    return tokenizer.encode_around(render(hidden, given), names)


def _free(texts: Sequence[str], count: int) -> list[str]:
    """Characters that no text uses."""
    used = set().union(*texts)
    return list(islice((chr(code) for code in _PRIVATE if chr(code) not in used), count))


def _walk(value: Any, change: Any, depth: int = 0) -> Any:
    """A copy of plain JSON in which every string is `change(string)`."""
    if depth > _MOST_DEPTH:
        raise BadInput("messages", f"nest deeper than {_MOST_DEPTH}")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_walk(key, change): _walk(item, change, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_walk(item, change, depth + 1) for item in value]
    return value
