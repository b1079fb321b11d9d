"""Why a prompt could not reuse what was computed for another: where they part, what that costs, and what to do.

first    system: You are helpful. It is 10:41:03. | user: hello | ...
second   system: You are helpful. It is 10:42:17. | user: hello | ...
                                         ^ all that comes after is computed again, though most of it is equal
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

AROUND = 60  # characters of text shown before and after the difference
ANCHOR = 8  # equal tokens in a row that tell that two prompts run alike again
MOST_APART = 4096  # tokens after the difference among which that is looked for

_DATE = r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d(:\d\d)?|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b1[5-9]\d{8}\b"
_NAME = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{12,}\b|\b[a-z]+[-_][0-9a-zA-Z]{8,}\b"
_KINDS = (
    ("a date or a time", re.compile(_DATE)),
    ("an identifier", re.compile(_NAME)),
    ("a number", re.compile(r"\d+")),
)


class PromptDifference(msgspec.Struct, frozen=True):
    """How two prompts compare.

    Attributes:
        first, second: tokens of each.
        common: tokens that are equal from the start.
        reused: those of them that fill blocks, and so are taken from the cache.
        lost: tokens of the second that stand in the first too, but behind the difference: computed again because of it.
        where: the part of the second that holds the difference, "" if there is none.
        before: text just before it.
        had, has: what the first and the second have from there on.
        advice: what to do about it, in words.
    """

    first: int
    second: int
    common: int
    reused: int
    lost: int
    where: str
    before: str
    had: str
    has: str
    advice: str


def difference(
    first: Sequence[int], second: Sequence[int], decode: Callable[[Sequence[int]], str], block_size: int,
    messages: Sequence[Mapping[str, Any]] = (),
) -> PromptDifference:  # fmt: skip
    """Compare two prompts.

    Args:
        decode: ids to text, control tokens by name.
        block_size: tokens of a cache block: only whole blocks are shared.
        messages: what the second was rendered from, with plain texts; () = it is a plain prompt.
    """
    shorter = min(len(first), len(second))
    common = _equal(first, second)
    reused = min(common, len(second) - 1) // block_size * block_size
    before = decode(second[:common])
    had, has = (decode(one[common : common + AROUND]) for one in (first, second))
    parted = common < shorter
    where = place(decode(second), len(before), messages) if parted else ""
    lost = again(first[common:], second[common:]) if parted else 0
    return PromptDifference(
        len(first), len(second), common, reused, lost, where, before[-AROUND:], had[:AROUND], has[:AROUND],
        advice(where, before[-AROUND:], had, has, lost) if parted else _continues(len(first), len(second)),
    )  # fmt: skip


def again(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens of `second`, which begins otherwise than `first`, run along with it again: from the next few that
    are the same, or up to the end of both."""
    return max(_equal(reversed(first), reversed(second)), _from_the_next(first, second))


def _from_the_next(first: Sequence[int], second: Sequence[int]) -> int:
    places: dict[tuple[int, ...], int] = {}
    for index in range(min(len(second), MOST_APART) - ANCHOR + 1):
        places.setdefault(tuple(second[index : index + ANCHOR]), index)
    for index in range(min(len(first), MOST_APART) - ANCHOR + 1):
        start = places.get(tuple(first[index : index + ANCHOR]))
        if start is not None:
            return _equal(first[index:], second[start:])
    return 0


def _equal(first: Iterable[int], second: Iterable[int]) -> int:
    """Tokens that are equal from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def place(text: str, at: int, messages: Sequence[Mapping[str, Any]]) -> str:
    """Which message's text holds character `at` of the rendered `text`."""
    if not messages:
        return f"prompt, character {at}"
    cursor = 0
    for index, message in enumerate(messages):
        content = str(message.get("content") or "").strip()
        start = text.find(content, cursor)
        if start < 0:
            continue  # the template changes it
        if at < start:
            return f"what the chat template writes before messages[{index}] ({message.get('role')})"
        if at < start + len(content):
            return f"messages[{index}].content ({message.get('role')}), character {at - start}"
        cursor = start + len(content)
    return "what the chat template writes after the last message"


def advice(where: str, before: str, had: str, has: str, lost: int) -> str:
    """What to do, from what the differing texts and a little text before them look like."""
    tail = re.search(r"\S*\Z", before)
    head = tail[0] if tail else ""
    words = [(head + text).split(maxsplit=1)[:1] for text in (had, has)]
    near = [before[-12:] + text[:24] for text in (had, has)]
    kind = next((name for name, form in _KINDS if all(map(form.search, (" ".join(word) for word in words)))), "")
    kind = kind or next((name for name, form in _KINDS[:2] if all(map(form.search, near))), "")
    cost = f"{lost} tokens that are the same in both are computed again" if lost else "little behind it is the same"
    if kind:
        return f"{kind} in {where}: {cost}; put what changes behind what stays, best into the last message"
    if "chat template" in where:
        return f"the conversation is built otherwise ({where}): {cost}; keep tools, options and the order of turns"
    if "messages[0]" in where or "(system)" in where:
        return f"the text of {where} is another one: {cost}; requests with one system prompt share it"
    return f"the texts part in {where}: {cost}" + (
        "; only add at the end, and drop old turns many at a time" if lost else ""
    )


def _continues(first: int, second: int) -> str:
    if second > first:
        return "the second prompt goes on where the first ends: all of its full blocks are reused"
    return "the second prompt is the beginning of the first" if second < first else "the prompts are equal"
