"""Stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed, and lets out everything that can no longer be part of one.

    The result does not depend on where the text is cut: it ends at the earliest end of any stop string; of those
    that end there the longest counts. Text is held back only while it is the beginning of some stop string.

    Each stop string is followed by the automaton of Knuth, Morris and Pratt (1977): a number says how much of it
    the text ends with, so a character costs amortised O(1) per stop string.

    Attributes:
        matched: the stop string that was met; None so far.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0, include: bool = False) -> None:
        """Watch for `stops` (none of them empty).

        Args:
            min_tokens: matches completed by an earlier token are ignored.
            include: the text ends with the match, not before it.
        """
        self._include = include
        self.matched: str | None = None
        self._stops = sorted(set(stops), key=len, reverse=True)  # the longest first wins among equal ends
        self._borders = [_borders(stop) for stop in self._stops]
        self._state = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self._ignore = max(0, min_tokens - 1)  # tokens whose matches do not count

    def push(self, text: str) -> str:
        """Text that may be shown. Call once per generated token, also if its text is empty, until `matched`."""
        if not self._stops:
            return text
        assert self.matched is None, "text after a stop string"
        armed = self._ignore == 0
        self._ignore -= not armed
        if not self._held and self._first.isdisjoint(text):
            return text
        known = len(self._held)
        buffer = self._held + text
        for end, character in enumerate(text, known + 1):
            stop = self._advance(character)
            if stop is not None and armed:
                self.matched = stop
                self._held = ""
                return buffer[: end if self._include else end - len(stop)]
        cut = len(buffer) - max(self._state)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """Call once, at the end: the text held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Follow one character; the longest stop string that it completes."""
        found = None
        for number, stop in enumerate(self._stops):
            state, borders = self._state[number], self._borders[number]
            while state and stop[state] != character:
                state = borders[state - 1]
            state += stop[state] == character
            if state == len(stop):
                found = found or stop
                state = borders[-1]
            self._state[number] = state
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + (stop[length] == character))
    return borders
