"""Paragraphs where output is no terminal."""

from __future__ import annotations

import textwrap

PROSE = 100  # columns, unless COLUMNS says another number


def folded(text: str, width: int = PROSE, indent: int = 4) -> str:
    """A paragraph in lines of at most so many characters, broken between words; all but the first are indented."""
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
