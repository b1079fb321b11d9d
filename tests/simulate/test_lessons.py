"""Lessons say what the texts say: figures of a run, not of a text."""

from __future__ import annotations

import pytest

from headway.core.errors import BadInput
from headway.simulate.lessons import LESSONS, lesson


def test_a_bound_on_milliseconds_spares_the_others_what_a_long_prompt_costs() -> None:
    found = lesson("long-prompt")
    whole, chunks, bounded = (row[1] for row in found.rows)
    assert float(whole) > 20 * float(chunks) > 40 * float(bounded)
    assert float(bounded) <= 30.1
    assert len(found.json()["rows"]) == 3 and found.seen


def test_paging_wastes_little_and_admits_several_times_as_many() -> None:
    rows = lesson("memory").rows
    contiguous, paged = rows
    assert float(contiguous[2]) > 0.6 and float(paged[2]) < 0.1
    assert float(paged[1]) > 2 * float(contiguous[1])


def test_unknown_lessons_are_refused() -> None:
    with pytest.raises(BadInput, match=", ".join(LESSONS)):
        lesson("x")
