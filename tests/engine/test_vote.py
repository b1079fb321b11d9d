"""Majority votes: what an answer says, and when the rest cannot change the outcome."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.core.errors import BadInput
from headway.engine.vote import by_json_path, by_regex, decided


@pytest.mark.parametrize(
    ("pattern", "text", "said"),
    [
        (r"\d+", "3 and 4 make 7", "7"), (r"answer is (\w+)", "The answer is four, the answer is 4.", "4"),
        (r"x", "nothing", None), (r"(a)|b", "ab", None),
    ],
)  # fmt: skip
def test_the_last_match_counts(pattern: str, text: str, said: str | None) -> None:
    assert by_regex(pattern)(text) == said


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("$.a", "1"), ("$.b[1].c", "x"), ("$['d e']", '{"f": null, "g": [1.5]}'), ("$.b[7]", None), ("$.a.b", None),
        ("$.b.c", None), ("$.nothing", None),
    ],
)  # fmt: skip
def test_a_path_leads_into_json(path: str, said: str | None) -> None:
    assert by_json_path(path)('{"a": 1, "b": [0, {"c": "x"}], "d e": {"g": [1.5], "f": null}}') == said
    assert by_json_path(path)("no JSON") is None


def test_values_that_are_the_same_count_as_one() -> None:
    assert by_json_path("$")('{"a":1, "b":2}') == by_json_path("$")('{"b": 2,"a": 1}')


@pytest.mark.parametrize("make", [lambda: by_regex("("), lambda: by_regex(""), lambda: by_json_path("a.b")])
def test_what_extracts_nothing_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadInput):
        make()


@pytest.mark.parametrize(
    ("votes", "left", "over"),
    [
        ({}, 3, False), ({}, 0, True), ({"a": 3}, 2, True), ({"a": 2}, 2, False), ({"a": 3, "b": 1}, 1, True),
        ({"a": 2, "b": 1}, 1, False), ({"a": 1, "b": 1}, 0, True),
    ],
)  # fmt: skip
def test_it_is_over_when_the_rest_cannot_change_it(votes: dict[str, int], left: int, over: bool) -> None:
    assert decided(Counter(votes), left) is over
