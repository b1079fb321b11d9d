"""The admission queue: by priority, then arrival; anyone can leave at any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cache.kv import KVCache
from headway.cache.table import BlockTable
from headway.core.request import Request, SamplingParams
from headway.scheduling.queue import AdmissionQueue
from headway.scheduling.row import Row
from tests.scheduling.context_bench import limits_of

CACHE = KVCache(limits_of(), key=b"")


def row(number: int, priority: int = 0, arrival: int = 0, prompt: int = 1) -> Row:
    request = Request(str(number), [1] * prompt, SamplingParams(seed=0), max_len=99, arrival=arrival, priority=priority)
    return Row(request, BlockTable(CACHE), number)


def test_first_is_the_lowest_priority_number_then_the_earliest_then_the_first_added() -> None:
    queue = AdmissionQueue()
    rows = [row(0, 1, 0), row(1, 0, 5), row(2, 0, 3), row(3, 0, 3), row(4, -1, 9)]
    for one in rows:
        queue.push(one)
    order = []
    while (first := queue.first()) is not None:
        order.append(first.number)
        queue.remove(first)
    assert order == [4, 2, 3, 1, 0]


def test_a_row_waits_once() -> None:
    queue, one = AdmissionQueue(), row(0)
    queue.push(one)
    with pytest.raises(AssertionError, match="already waiting"):
        queue.push(one)


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "again"]), st.integers(0, 9), st.integers(0, 2))))
def test_it_behaves_like_a_sorted_list(operations: list[tuple[str, int, int]]) -> None:
    queue, model = AdmissionQueue(), []  # type: ignore[var-annotated]
    left: list[Row] = []
    for number, (what, which, priority) in enumerate(operations):
        if what == "push":
            model.append(row(number, priority, prompt=which))
            queue.push(model[-1])
        elif what == "remove" and model:
            left.append(model.pop(which % len(model)))
            queue.remove(left[-1])
        elif what == "again" and left:  # a preempted row comes back to its old place
            model.append(left.pop())
            queue.push(model[-1])
        model.sort(key=lambda one: one.order)
        assert queue.first() is (model[0] if model else None)
        assert len(queue) == len(model) and list(queue) == model
        assert sorted(queue.unordered(), key=lambda one: one.order) == model
        if number % 3 == 0:
            by_work = sorted(model, key=lambda one: (one.order[0], one.request.prompt_len, *one.order[1:]))
            assert queue.by_work(lambda one: one.request.prompt_len) == by_work


def test_a_row_that_turns_out_shorter_goes_earlier() -> None:
    queue = AdmissionQueue()
    rows = [row(0, prompt=5), row(1, prompt=9)]
    for one in rows:
        queue.push(one)
    assert [one.number for one in queue.by_work(lambda one: one.request.prompt_len)] == [0, 1]
    queue.rerank(rows[1], 2)
    assert [one.number for one in queue.by_work(lambda one: one.request.prompt_len)] == [1, 0]
    assert queue.first() is rows[0]
