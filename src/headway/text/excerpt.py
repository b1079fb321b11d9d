"""A tokenizer for one text, of a vocabulary of hundreds of thousands: for that, and its merges, takes seconds to build.

Byte-pair merging never joins anything but neighbours, so what a text's tokens are depends on those pieces alone that
occur in it, and on the order of the merges that make them. Cut down to those, a header gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from headway.text.gguf_header import Header


class Cutter(Protocol):
    """What a kind of vocabulary says about its pieces.

    Attributes:
        pieces: how texts are looked for in, by id.
        always: ids that may be in the tokens of any text.
        lead: what stands before any part of a text between control tokens.
    """

    pieces: Sequence[str]
    always: Collection[int]
    lead: str

    def written(self, text: str) -> str | None:
        """A text as its pieces write it; None = that depends on more than the text."""
        ...

    def keys(self, ids: Mapping[int, int]) -> dict[str, Any]:
        """What a header of these tokens says otherwise; ids: their numbers in it, by id."""
        ...


class Excerpts:
    """Cuts headers for single texts out of one header."""

    def __init__(self, header: Header, cutter: Cutter) -> None:
        self._header = header
        self._cutter = cutter
        self._ids = {piece: id for id, piece in enumerate(cutter.pieces)}
        self._lengths = sorted(set(map(len, cutter.pieces)))

    def of(self, text: str) -> tuple[Header, list[int]] | None:
        """A header that gives `text`, and what is left of it without control tokens, the tokens that this one gives
        it, and their ids here by those there; None = it takes the whole header."""
        written = self._cutter.written(text)
        if written is None:
            return None
        parts = {written[at : at + length] for at in range(len(written)) for length in self._lengths}
        if self._cutter.lead:
            parts |= {self._cutter.lead + part for part in ("", *parts)}
        found = {self._ids[part] for part in parts & self._ids.keys()}
        found |= {id for id, token, _ in self._header.marked if token in text}
        ids = sorted(found.union(self._cutter.always))
        return self._header.cut(ids, self._cutter.keys({id: number for number, id in enumerate(ids)})), ids
