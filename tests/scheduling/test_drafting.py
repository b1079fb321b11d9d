"""How many drafts a step verifies: the likeliest first, as long as tokens come faster."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.events import EventLog, StepDone
from headway.core.folds import Totals
from headway.core.step import Seconds, StepResult
from headway.roofline.fixed import FixedCosts
from headway.roofline.speculation import Draft, expected_tokens, speedup
from headway.scheduling.drafting import LEAST_GAIN, Drafting
from headway.scheduling.scheduler import Scheduler
from tests.scheduling.context_bench import Ask, limits_of

MEMORY_BOUND = FixedCosts(step=1.0, token=0.02)
COMPUTE_BOUND = FixedCosts(step=0.01, token=1.0)


def lengths(
    model: FixedCosts | None,
    drafts: list[tuple[int, float]],
    rows: int = 0,
    drafter: FixedCosts | None = None,
    **options: object,
) -> list[int]:
    control = Drafting((None,), drafter)
    control.begin_step(1, model)
    control.begin_with(tuple((bits, 0, 1.0) for bits in range(8)))  # it has seen steps without drafts
    given = {"context": 100.0, "most": 64, "prompts": False, **options}
    return control.lengths(drafts, rows or len(drafts), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("odds", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("token", [0.02, 0.1, 0.3, 0.6])
def test_one_rows_length_is_the_best_by_the_formula(odds: float, token: float) -> None:
    gains = [expected_tokens(k, odds) * (1 + token) / (1 + (k + 1) * token) for k in range(8)]
    (k,) = lengths(FixedCosts(step=1.0, token=token), [(7, odds)])
    assert gains[k] == pytest.approx(max(gains)) if max(gains) > LEAST_GAIN else k == 0


def test_drafts_that_shorten_waits_most_come_first_and_no_more_than_fit() -> None:
    assert lengths(MEMORY_BOUND, [(7, 0.99), (7, 0.5), (3, 0.99)], most=10) == [4, 3, 3]
    assert lengths(MEMORY_BOUND, [(7, 0.99), (7, 0.5), (3, 0.99)], most=2) == [1, 0, 1]
    assert lengths(COMPUTE_BOUND, [(7, 0.99)] * 4) == [0] * 4
    assert lengths(None, [(7, 0.9), (7, 0.4)]) == [6, 0]


def test_a_batch_turns_it_off_where_arithmetic_binds() -> None:
    costs = FixedCosts(step=1.0, token=0.1)
    per_row = [sum(lengths(costs, [(7, 0.7)] * rows)) / rows for rows in (1, 4, 16, 32)]
    assert per_row[0] > 1 and per_row[-1] < 0.5 and per_row == sorted(per_row, reverse=True)


@given(
    drafts=st.lists(st.tuples(st.integers(1, 7), st.floats(0.05, 0.99)), min_size=1, max_size=8),
    others=st.integers(0, 24),
    token=st.floats(0.01, 0.5),
)
def test_waits_for_a_token_and_tokens_per_second_gain_and_nothing_would_gain_more(
    drafts: list[tuple[int, float]], others: int, token: float
) -> None:
    rows = len(drafts) + others

    def wait(counts: Sequence[int]) -> float:
        """Mean over rows of seconds per token."""
        tokens = [expected_tokens(count, odds) for count, (_, odds) in zip(counts, drafts, strict=True)]
        return (1.0 + token * (rows + sum(counts))) * (others + sum(1.0 / each for each in tokens)) / rows

    chosen = lengths(FixedCosts(step=1.0, token=token), drafts, rows=rows)
    alone = wait([0] * len(drafts))
    if sum(chosen):
        assert wait(chosen) < alone / LEAST_GAIN * (1 + 1e-9)
        tokens = others + sum(expected_tokens(count, odds) for count, (_, odds) in zip(chosen, drafts, strict=True))
        seconds = (1.0 + token * (rows + sum(chosen))) / (1.0 + token * rows)
        assert tokens / rows / seconds > LEAST_GAIN * (1 - 1e-9)
    for row, (most, _) in enumerate(drafts):
        for count in {max(0, chosen[row] - 1), min(most, chosen[row] + 1)} if sum(chosen) else ():
            other = [*chosen[:row], count, *chosen[row + 1 :]]
            assert wait(other) >= wait(chosen) * (1 - 1e-9)


def test_beside_prompts_a_draft_must_be_worth_its_own_time() -> None:
    class Roofline(FixedCosts, frozen=True):
        def predict(self, shape) -> float:  # type: ignore[no-untyped-def]
            return max(1.0, 0.05 * shape.tokens)

    assert lengths(Roofline(), [(7, 0.9)]) == [7]  # free while memory binds
    assert lengths(Roofline(), [(7, 0.9)], prompts=True)[0] >= 5  # 50 ms each, for a token that takes a second
    assert sum(lengths(Roofline(), [(7, 0.9)] * 32, prompts=True)) == 0


@pytest.mark.parametrize("odds", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3, 1.0])
def test_the_time_of_a_draft_model_counts(odds: float, cost: float) -> None:
    target, drafter = FixedCosts(step=1.0, token=0.02), FixedCosts(step=cost)
    verify = [(1 + (k + 1) * 0.02) / 1.02 for k in range(8)]
    gains = [speedup(Draft(odds, cost / 1.02), k, verify[k]) for k in range(8)]
    (k,) = lengths(target, [(7, odds)], drafter=drafter)
    assert gains[k] == pytest.approx(max(gains)) if max(gains) > LEAST_GAIN else k == 0


def test_rows_share_the_passes_of_a_draft_model() -> None:
    """A pass costs the same for one row as for eight: each of them drafts as far as it would alone."""
    alone = lengths(FixedCosts(step=1.0), [(7, 0.9)], drafter=FixedCosts(step=0.4))
    assert 1 < alone[0] < 7
    assert lengths(FixedCosts(step=1.0), [(7, 0.9)] * 8, drafter=FixedCosts(step=0.4)) == alone * 8
    assert lengths(FixedCosts(step=1.0), [(7, 0.9)] * 8, drafter=FixedCosts(row=0.4)) == [0] * 8


@pytest.mark.parametrize(("cost", "pays"), [(0.05, True), (1.0, False)])
def test_a_draft_model_keeps_up_with_rows_only_where_it_pays(cost: float, pays: bool) -> None:
    control = Drafting((None,), FixedCosts(step=cost))
    control.begin_step(1, MEMORY_BOUND)
    assert control.pays(4, 100.0, 64) is pays
    control.begin_step(2, COMPUTE_BOUND)
    assert not control.pays(4, 100.0, 64)


def test_a_draft_model_that_is_never_right_is_left_and_tried_again_in_a_while() -> None:
    control = Drafting((None,), FixedCosts(step=0.1))
    control.begin_with(((1, 0, 1.0),))
    for step in range(1, 60):
        control.begin_step(step, MEMORY_BOUND)
        control.lengths([(7, 0.02)], 1, 100.0, 64, prompts=False)
    assert not control.pays(1, 100.0, 64)
    later = next(step for step in range(1000) if control.begin_step(step, MEMORY_BOUND) or control.pays(1, 100.0, 64))
    assert 20 < later < 600


def run(model: FixedCosts, took: FixedCosts, accept: int) -> tuple[Totals, list[StepDone], Scheduler]:
    """One request whose drafts are right for `accept` tokens, on a machine whose steps take what `took` says."""
    totals, done = Totals(), list[StepDone]()
    log = EventLog(totals, lambda event: done.append(event) if isinstance(event, StepDone) else None)
    scheduler = Scheduler(limits_of(), key=b"k", model=model, log=log)
    scheduler.add(Ask("a", 5, most=150).request(0))
    for now in itertools.count():
        plan = scheduler.plan(now)
        if not plan.work:
            scheduler.commit(StepResult(plan.step), now)
            return totals, done, scheduler
        (work,) = plan.work
        emitted = (*work.draft[:accept], 3)
        shape = scheduler.state.flights[0].shape
        assert shape is not None
        result = StepResult(plan.step, {"a": emitted}, drafts={"a": (3,) * 7}, odds={"a": accept / 7})
        result.seconds = Seconds(forward=took.predict(shape))
        scheduler.commit(result, now)
    raise AssertionError


def test_what_steps_took_corrects_the_model() -> None:
    totals, done, scheduler = run(MEMORY_BOUND, FixedCosts(step=0.1, token=1.0), 5)
    assert done[1].drafted == 0 < done[2].drafted, "one step without, and the model promises a gain"
    assert sum(one.drafted > 0 for one in done) < 20, "which does not come"
    assert any(drafts and ratio > 1 for _, drafts, ratio in scheduler.drafting.ratios)
    assert totals.undrafted_seconds < totals.drafted_seconds


def test_the_gain_is_told() -> None:
    totals, done, _ = run(MEMORY_BOUND, MEMORY_BOUND, 7)
    assert totals.proposed_tokens >= totals.drafted_tokens >= totals.accepted_tokens > 100
    assert totals.drafted_steps == sum(one.drafted > 0 for one in done)
    assert 6 < totals.undrafted_seconds / totals.drafted_seconds < 8


def test_what_was_learned_goes_on_in_another_log() -> None:
    *_, scheduler = run(MEMORY_BOUND, FixedCosts(step=1.0, token=0.2), 5)
    other = Scheduler(limits_of(), key=b"k", model=MEMORY_BOUND)
    other.begin_at(scheduler.header())
    assert other.drafting.ratios == scheduler.drafting.ratios != ()
