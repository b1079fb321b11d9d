"""The size of a step, and how milliseconds become tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.step import BlockCopy, StepPlan, StepShape, Work, keys_read, pairs_computed
from headway.scheduling.budget import Budget, largest_chunk
from headway.scheduling.shape import ShapeBuilder, shape_of
from tests.scheduling.context_bench import Ask, Bench, limits_of

rows = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=5)


@given(start=st.integers(0, 40), count=st.integers(1, 40), window=st.none() | st.integers(1, 50))
def test_keys_and_pairs_are_what_counting_gives(start: int, count: int, window: int | None) -> None:
    seen = [range(max(0, p - window + 1) if window else 0, p + 1) for p in range(start, start + count)]
    assert keys_read(start, count, window) == len(set().union(*seen))
    assert pairs_computed(start, count, window) == sum(map(len, seen))


@given(work=rows, more=st.tuples(st.integers(0, 30), st.integers(1, 20)))
def test_a_shape_adds_up_row_by_row(work: list[tuple[int, int]], more: tuple[int, int]) -> None:
    windows = (None, 7)
    builder = ShapeBuilder(windows)
    for start, count in work:
        builder.add(start, count, 1)
    assert builder.build() == StepShape(
        tokens=sum(count for _, count in work),
        rows=len(work),
        logit_rows=len(work),
        kv_tokens=tuple(sum(keys_read(s, c, w) for s, c in work) for w in windows),
        pairs=tuple(sum(pairs_computed(s, c, w) for s, c in work) for w in windows),
        decode_kv_tokens=tuple(sum(keys_read(s, c, w) for s, c in work if c == 1) for w in windows),
        decode_pairs=tuple(sum(pairs_computed(s, c, w) for s, c in work if c == 1) for w in windows),
    )
    what_if = builder.with_row(*more, 1)
    builder.add(*more, 1)
    assert what_if == builder.build()


def test_the_shape_of_a_plan_counts_its_copies() -> None:
    plan = StepPlan(0, work=(Work("a", 0, 5), Work("b", 9, 1, logits=1, sample=True)), copies=(BlockCopy(0, 1, 2),))
    assert shape_of(plan, (None,)) == StepShape(6, 2, 1, (15,), (25,), (10,), (10,), 1)


class PerToken:
    """A millisecond per new token, and one per row."""

    def predict(self, shape: StepShape) -> float:
        return (shape.tokens + shape.rows) * 1e-3


@pytest.mark.parametrize(
    ("milliseconds", "most", "chunk"), [(10, 100, 9), (10, 9, 9), (10, 5, 5), (1.9, 100, 0), (2, 100, 1)]
)
def test_the_largest_chunk_within_the_time(milliseconds: float, most: int, chunk: int) -> None:
    assert largest_chunk(ShapeBuilder((None,)), 0, most, PerToken(), milliseconds) == chunk


@pytest.mark.parametrize(
    ("budget", "plans"),
    [
        (  # a decodes beside b's prompt: 2 ms for a, and the chunk gets the rest of 8
            Budget(milliseconds=8),
            ["a[0:4]*", "a[4:5]* b[0:5]", "a[5:6]* b[5:10]", "a[6:7]* b[10:12]*"],
        ),
        (  # decodes alone use up the time; prompts still move
            Budget(milliseconds=1, alone=9),
            ["a[0:4]*", "a[4:5]* b[0:1]", "a[5:6]* b[1:2]", "a[6:7]* b[2:3]"],
        ),
        (  # what prompts get at least is a share of the time, not a number of tokens
            Budget(milliseconds=4, least=1),
            ["a[0:4]*", "a[4:5]* b[0:3]", "a[5:6]* b[3:6]", "a[6:7]* b[6:9]"],
        ),
        (  # three times what the decode takes, although that is more than 4 ms: 2 for a, 4 for the chunk
            Budget(milliseconds=4, stretch=3),
            ["a[0:4]*", "a[4:5]* b[0:3]", "a[5:6]* b[3:6]", "a[6:7]* b[6:9]"],
        ),
        (  # tokens and time: the tighter one counts
            Budget(milliseconds=8, tokens=4),
            ["a[0:4]*", "a[4:5]* b[0:3]", "a[5:6]* b[3:6]", "a[6:7]* b[6:9]"],
        ),
    ],
)
def test_running_decodes_bound_the_time_of_a_step(budget: Budget, plans: list[str]) -> None:
    bench = Bench(limits_of(), budget=budget, model=PerToken())
    assert bench.play([Ask("a", 4, 9), Ask("b", 12, 9, at=1)], steps=4) == plans


def test_without_decodes_a_step_may_be_longer_but_not_for_ever() -> None:
    bench = Bench(limits_of(), budget=Budget(milliseconds=2, alone=5), model=PerToken())
    assert bench.play([Ask("a", 20, 1)], steps=1) == ["a[0:9]"]


def test_of_several_prompts_only_the_first_is_sure_to_move() -> None:
    bench = Bench(limits_of(), budget=Budget(milliseconds=1, alone=9), model=PerToken())
    plans = bench.play([Ask("a", 4, 9), Ask("b", 12, at=1), Ask("c", 12, at=1)], steps=2)
    assert plans[1] == "a[4:5]* b[0:1]"
