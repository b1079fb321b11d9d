"""Answers of `headway chat` that go round in a circle, as small models' do, greedy or not: they end in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

TIMES = 4
LEAST = 400  # characters, all repetitions together: a drawn line is shorter
LONGEST = 600  # characters of what is said again and again
EVERY = 40  # characters between two looks


class Circling(Exception):
    """An answer says the same over and over; `str()` is for the user."""


def not_circling(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of a text as they come.

    Raises:
        Circling: its end is one passage, with a letter or a digit in it, `TIMES` times or more.
    """
    text, looked = "", 0
    for piece in pieces:
        yield piece
        text = (text + piece)[-TIMES * LONGEST :]
        looked += len(piece)
        if looked >= EVERY:
            looked = 0
            if period(text):
                raise Circling(
                    "(stopped: the answer repeats itself; ask again in other words, or with a higher --temperature)"
                )


def period(text: str) -> int:
    """Length of the shortest passage that the text ends with `TIMES` times, and over at least `LEAST` characters;
    0 if it ends with none."""
    for length in range(1, min(LONGEST, len(text) // TIMES) + 1):
        span = max(LEAST, TIMES * length)
        if len(text) >= span and text[-span:-length] == text[length - span :]:
            return length if any(map(str.isalnum, text[-length:])) else 0
    return 0
