"""Answers of `headway plan` as documents: `document` of the whole, `parts` of what one kind of answer says.

The files `render*.py` register them, one function per kind, for the terminal and the page alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch

from headway.plan.answers import Answer
from headway.report.document import Bars, Document, Listing, Part, Text
from headway.report.units import seconds
from headway.roofline.timing import Range

MEANING = {
    "bound": "BOUND: nothing can be faster. Served requests take longer (headway plan estimate)",
}  # of an answer's kind, in plain words
CACHE = {0.5: "4-bit", 1.0: "8-bit", 2.0: "16-bit", 4.0: "32-bit"}  # by bytes per number


@singledispatch
def document(answer: object) -> Document:
    """The whole answer."""
    raise TypeError(type(answer))


@document.register
def _(a: Answer) -> Document:
    """Title, what it says, its notes and its assumptions."""
    gpus = f"{a.gpus} x " if a.gpus else ""
    what = (
        f"weights {a.precision}, {CACHE.get(a.kv_bytes_per_number, 'no')} cache, arithmetic {a.math}; "
        f"{a.mode} mode, {a.kind.upper()}"
    )
    notes = [Text(f"note: {note}", "warn") for note in a.notes]
    meaning = [MEANING[a.kind]] if a.kind in MEANING else []
    parts_of = [Text(what, "kind"), *parts(a), *notes, *assumed([*meaning, *a.assumptions])]
    return Document(f"{a.model} on {gpus}{a.hardware}", parts_of)


def assumed(lines: list[str]) -> list[Part]:
    return [Listing("assumed", lines, "note")]


@singledispatch
def parts(answer: Answer) -> list[Part]:
    """What one kind of answer says."""
    raise TypeError(type(answer))


def waterfall(terms: Mapping[str, float], total: float) -> Bars:
    """Seconds per term, largest first; terms that are 0 here are left out."""
    shown = sorted(((value, name) for name, value in terms.items() if value), reverse=True)
    return Bars([(name.replace("_", " "), seconds(value), value / total) for value, name in shown])


def spread(found: Range | None) -> str:
    return f", p10-p90 {seconds(found.p10)} to {seconds(found.p90)}" if found else ""
