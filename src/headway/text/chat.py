"""A conversation to token ids: only the template writes control tokens, whatever the messages say.

A message that talks about "<|im_end|>" must not end its turn. So before a template sees the messages, each name of a
control token in them is replaced by one character that nobody uses; what the template wrote itself is then the only
control token in the text:

    messages --name -> character--> template --> text --character -> name, as plain text--> ids

Messages without such names, almost all, take the direct way: the template's text, encoded as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from headway.core.errors import BadInput
from headway.text.template import ChatTemplate, checked_messages
from headway.text.tokenizer import Tokenizer

_PRIVATE = range(0xF0000, 0xFFFFE)  # characters that Unicode gives no meaning and leaves alone
_MOST_DEPTH = 64


def encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of a conversation.

    Args:
        messages, options: as `ChatTemplate.render` takes them.

    Raises:
        HeadwayError: as `ChatTemplate.render` and `Tokenizer.encode`.
    """
    texts: list[str] = []
    messages = checked_messages(messages)
    _walk([messages, options], texts.append)
    named = tokenizer.special_named(texts)
    if not named:
        return tokenizer.encode(template.render(messages, **options), add_special=False)
    used = set().union(*texts)
    free = islice((chr(code) for code in _PRIVATE if chr(code) not in used), len(named))
    names = dict(zip(free, named, strict=True))

    def hide(text: str) -> str:
        for character, name in names.items():  # longest name first
            text = text.replace(name, character)
        return text

    hidden, given = _walk([messages, options], hide)
    return tokenizer.encode_around(template.render(hidden, **given), names)


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
