"""Where two prompts part, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headway.text.difference import PromptDifference, difference

BLOCK = 16
STORY = "Once there was a very long instruction that every request carries with it. " * 8


def encode(messages: Sequence[dict[str, Any]]) -> list[int]:
    return list("".join(f"<{m['role']}>{m['content']}</>" for m in messages).encode())


def compare(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> PromptDifference:
    return difference(encode(first), encode(second), lambda ids: bytes(ids).decode(errors="replace"), BLOCK, second)


def turns(system: str, *users: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, *({"role": "user", "content": text} for text in users)]


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("It is 2026-11-30 10:41:03.", "It is 2026-11-30 10:42:17.", "a date or a time"),
        ("Now: 1796051958.", "Now: 1796051999.", "a date or a time"),
        ("Request 7f3a9c0e1b2d4455 here.", "Request 7f3a9c0e1b2d9911 here.", "an identifier"),
        ("Session 0b2f1c9e-53aa-4a are", "Session 0b2f1c9e-53ab-4a are", "an identifier"),
        ("You have 17 tries.", "You have 16 tries.", "a number"),
    ],
)
def test_what_changes_is_named_with_its_place_and_price(one: str, other: str, kind: str) -> None:
    found = compare(turns(one + STORY, "hello"), turns(other + STORY, "hello", "and more"))
    assert found.advice.startswith(f"{kind} in messages[0].content (system)")
    rest = len(STORY) + len("</><user>hello</>")
    assert rest <= found.lost <= rest + 16
    assert f"{found.lost} tokens that are the same in both are computed again" in found.advice
    assert found.reused == found.common // BLOCK * BLOCK and found.common < 40
    assert one.startswith(found.before.removeprefix("<system>"))


def test_a_conversation_that_goes_on_reuses_all_of_it() -> None:
    first = turns(STORY, "hello")
    found = compare(first, [*first, {"role": "assistant", "content": "hi"}])
    assert (found.where, found.lost, found.common) == ("", 0, len(encode(first)))
    assert "goes on where the first ends" in found.advice
    assert "are equal" in compare(first, first).advice


def test_dropped_turns_and_other_system_prompts() -> None:
    users = [f"question number {word} " + STORY for word in ("one", "two", "three")]
    found = compare(turns("Be kind.", *users), turns("Be kind.", *users[1:]))
    assert "messages[1].content (user)" in found.where and found.lost > 2 * len(STORY)
    assert "drop old turns many at a time" in found.advice
    found = compare(turns("Be kind." + STORY, "x"), turns("Act rude." + STORY, "x"))
    assert "one system prompt" in found.advice and found.lost > len(STORY)


def test_the_templates_own_text_is_named_as_such() -> None:
    first = [{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}]
    second = [{"role": "system", "content": "S"}, {"role": "tool", "content": "hello"}]
    assert "what the chat template writes before messages[1] (tool)" in compare(first, second).where


def test_a_plain_prompt() -> None:
    found = difference(list(b"same a"), list(b"same b"), lambda ids: bytes(ids).decode(), 2)
    assert (found.common, found.reused, found.where) == (5, 4, "prompt, character 5")


def test_a_long_text_without_blanks_costs_its_length() -> None:
    """Not its square: a server's other answers wait for it."""
    looked: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        looked.append(len(ids))
        return bytes(ids).decode()

    found = difference([61] * 200_000 + list(b"zeta"), [61] * 200_000 + list(b"alpha"), decode, BLOCK)
    assert found.common == 200_000 and len(looked) == 4 and "part in prompt" in found.advice
