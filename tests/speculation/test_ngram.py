"""Prompt lookup: the longest earlier match, followed as the row goes on; bounded in time and memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.core.request import SamplingParams
from headway.core.step import RowInit, StepPlan
from headway.speculation import ngram
from headway.speculation.ngram import NgramProposer, SuffixIndex
from headway.speculation.proposer import Proposal


def propose(proposer: NgramProposer, tokens: list[int], most: int = 4) -> Proposal | None:
    return proposer.propose([("a", tokens)], most).get("a")


def fresh() -> NgramProposer:
    proposer = NgramProposer()
    proposer.step(StepPlan(0, (RowInit("a", (1,), 1, SamplingParams(seed=0)),)))
    return proposer


def test_what_followed_the_longest_earlier_match_is_proposed() -> None:
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 7, 1, 2, 3]
    found = propose(fresh(), tokens)
    assert found is not None and found.tokens == (50, 9, 2, 3)


def test_of_equal_matches_the_latest() -> None:
    found = propose(fresh(), [2, 3, 50, 9, 2, 3, 60, 7, 2, 3])
    assert found is not None and found.tokens[0] == 60


def test_a_repetition_goes_on_beyond_the_end() -> None:
    found = propose(fresh(), [7, 8, 9, 7, 8, 9, 7, 8], 7)
    assert found is not None and found.tokens == (9, 7, 8, 9, 7, 8, 9)


def test_nothing_is_proposed_without_a_match() -> None:
    for tokens in ([], [1], [1, 2], [1, 2, 3, 4], [5, 5]):
        assert propose(fresh(), tokens) is None


def test_odds_rise_where_copies_go_on_and_fall_where_they_do_not() -> None:
    copying, failing = fresh(), fresh()
    text = list(range(100, 160))
    odds = []
    for count in range(2, 40):
        found = propose(copying, text + text[:count])
        assert found is not None and found.tokens[0] == text[count]
        odds.append(found.odds)
    assert odds[0] < 0.5 < 0.9 < odds[-1]
    tokens = [1, 2]
    for number in range(30):  # the pair is always followed by something else
        tokens += [1000 + number, 1, 2]
        found = propose(failing, tokens)
    assert found is not None and found.odds < 0.1


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_the_index_finds_what_a_search_finds(tokens: list[int], chunk: int) -> None:
    index = SuffixIndex()
    while index.end < len(tokens):
        index.extend(tokens, min(len(tokens), index.end + chunk))
    place, length = index.find(tokens)

    def common(end: int) -> int:
        count = 0
        while count < min(end, ngram.COMPARED) and tokens[end - 1 - count] == tokens[-1 - count]:
            count += 1
        return count

    ends = [end for end in range(2, len(tokens)) if common(end) >= 2]
    latest = sorted(ends)[-ngram.LOOKED_AT :]
    best = max((common(end) for end in latest), default=0)
    assert length == best
    assert not best or place == max(end for end in latest if common(end) == best)


def test_an_index_forgets_the_older_half() -> None:
    index = SuffixIndex()
    tokens = [number % 1000 for number in range(2 * ngram.REMEMBERED + 100)]
    for end in range(0, len(tokens), 5000):
        index.extend(tokens, end)
        assert len(index._earlier) <= ngram.REMEMBERED + 5000
    index.extend(tokens, len(tokens))
    place, length = index.find(tokens)
    assert length == ngram.COMPARED and tokens[place - 1] == tokens[-1] and place < len(tokens)


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    proposer, tokens = fresh(), [number % 50_000 for number in range(3 * ngram.INDEXED)]
    tokens += tokens[:10]
    found = [propose(proposer, [*tokens, *tokens[10 : 10 + step]]) for step in range(4)]
    assert found[-1] is not None and found[-1].tokens[0] == tokens[13]


def test_dropped_rows_are_forgotten() -> None:
    proposer = fresh()
    proposer.step(StepPlan(0, gone=("a",)))
    proposer.step(StepPlan(0, gone=("a",)))
    proposer.step(StepPlan(0, (RowInit("a", (1,), 1, SamplingParams(seed=0)),)))
    proposer.reset()
    assert not proposer._rows
