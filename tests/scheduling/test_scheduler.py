"""The scheduler's door: what is refused, cancelled, stopped, failed, drafted; and that nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headway.core.bound import QueueBound
from headway.core.errors import BadInput, Reject, Rejected
from headway.core.events import Admitted, Cancelled, Finished, FirstToken, Idle, Preempted, Refused, StepDone
from headway.core.request import Finish, Request, SamplingParams
from headway.core.step import Capabilities, StepResult
from headway.scheduling.budget import Budget
from headway.scheduling.policies import POLICIES
from headway.scheduling.policies.policy import Policy
from headway.scheduling.scheduler import Scheduler
from tests.scheduling.context_bench import Ask, Bench, limits_of


def scheduler_of(**limits: Any) -> Scheduler:
    return Scheduler(limits_of(**limits), key=b"test")


def request(id: str = "a", prompt: int = 4, most: int = 6, stop: int | None = None, **params: Any) -> Request:
    stop_ids = frozenset() if stop is None else frozenset({stop})
    return Request(
        id, range(100, 100 + prompt), SamplingParams(seed=0, **params), stop_ids=stop_ids, max_len=prompt + most
    )


def emit(scheduler: Scheduler, *tokens: int, id: str = "a", **result: Any) -> Any:
    """Play one step in which row `id` emits these -> what its client hears."""
    plan = scheduler.plan(0)
    outputs = scheduler.commit(StepResult(plan.step, {id: tokens}, **result), 0)
    return next((output for output in outputs if output.request.id == id), None)


class TestRefusal:
    """What can never be served is refused at once, with a code, a status, and a sentence with the figures."""

    @pytest.mark.parametrize(
        ("asked", "reason", "sentence"),
        [
            (request(prompt=0), Reject.EMPTY_PROMPT, "prompt: it is empty"),
            (request(prompt=50, most=1), Reject.CONTEXT_LENGTH, "50 tokens leave no room .* context holds 50"),
            (request(prompt=5, most=0), Reject.CONTEXT_LENGTH, "5 tokens leave no room"),
            (request(prompt=45, most=6), Reject.CONTEXT_LENGTH, "45 prompt tokens and 6 .* exceed the context of 50"),
            (
                request(prompt=30, most=12),
                Reject.CACHE_TOO_SMALL,
                "42 tokens need 11 cache blocks of 4, and there are 10",
            ),
            (request("live"), Reject.DUPLICATE_ID, "'live' is the id of a request in progress"),
        ],
    )
    def test_at_once(self, asked: Request, reason: Reject, sentence: str) -> None:
        bench = Bench(limits_of(blocks=(10,), max_model_len=50))
        bench.scheduler.add(request("live"))
        with pytest.raises(Rejected, match=sentence) as refused:
            bench.scheduler.add(asked)
        assert (refused.value.reason, refused.value.status) == (reason, reason.status)
        assert bench.events[-1] == Refused(now=0, id=asked.id, reason=reason.code)
        assert bench.scheduler.waiting == 1

    def test_the_largest_request_that_fits_alone_is_served(self) -> None:
        bench = Bench(limits_of(blocks=(10,), max_model_len=50))
        bench.play([Ask("a", 30, 11), Ask("b", 30, 11)])
        assert bench.finishes == {"a": "length", "b": "length"}

    def test_a_window_group_counts_what_it_holds_at_once(self) -> None:
        scheduler = scheduler_of(blocks=(6,), windows=(5,))
        scheduler.add(request(prompt=100, most=90))

    def test_a_choice_id_in_use_refuses_all_choices(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request("a#2"))
        with pytest.raises(Rejected, match="'a#2'"):
            scheduler.add(request("a", n=3))
        assert scheduler.waiting == 1

    def test_an_id_may_come_again_after_its_request_ended(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(most=1))
        emit(scheduler, 1)
        scheduler.add(request(most=1))
        plan = scheduler.plan(0)
        assert plan.gone == ("a",) and plan.new[0].id == "a", "gone comes before new"

    def test_queue_bounds_count_every_choice_and_what_waits_for_blocks_only(self) -> None:
        scheduler = Scheduler(limits_of(), key=b"test", bound=QueueBound(requests=3))
        scheduler.add(request("a"))
        with pytest.raises(Rejected, match="1 requests wait already, of at most 3") as refused:
            scheduler.add(request("b", n=3))
        assert refused.value.status == 503
        scheduler.add(request("b", n=2))
        scheduler.plan(0)
        scheduler.add(request("c"))

    def test_a_prompt_beyond_the_token_bound_is_taken_only_if_nothing_waits(self) -> None:
        scheduler = Scheduler(limits_of(), key=b"test", bound=QueueBound(tokens=10))
        scheduler.add(request("a", 30))
        with pytest.raises(Rejected, match="30 prompt tokens wait already, of at most 10"):
            scheduler.add(request("b", 1))

    @pytest.mark.parametrize(
        ("figures", "field"),
        [
            ({"max_rows": 0}, "max_rows"),
            ({"max_tokens_per_step": 7}, "max_tokens_per_step"),
            ({"blocks": ()}, "blocks"),
            ({"blocks": (4, 4)}, "blocks"),
            ({"windows": (0,)}, "windows"),
        ],
    )
    def test_capabilities_that_contradict_themselves(self, figures: dict[str, Any], field: str) -> None:
        with pytest.raises(BadInput) as error:
            limits_of(**figures)
        assert error.value.field == field

    @pytest.mark.parametrize("figures", [{"tokens": 0}, {"milliseconds": 0.0}, {"least": 0}])
    def test_budgets_out_of_range(self, figures: dict[str, Any]) -> None:
        with pytest.raises(BadInput, match=next(iter(figures))):
            Budget(**figures)


class TestEnd:
    """Why a request ends."""

    def test_at_its_length(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(most=2))
        assert emit(scheduler, 1).finish is None
        assert emit(scheduler, 1).finish == Finish("length")

    def test_at_a_stop_id_which_is_emitted(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(stop=9))
        output = emit(scheduler, 9)
        assert (output.tokens, output.finish) == ((9,), Finish("stop", 9))

    def test_a_stop_id_as_last_token_is_a_stop(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(most=1, stop=9))
        assert emit(scheduler, 9).finish == Finish("stop", 9)

    def test_not_at_a_stop_id_before_min_tokens(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(stop=9, min_tokens=2))
        assert [emit(scheduler, 9).finish for _ in range(3)] == [None, None, Finish("stop", 9)]

    def test_when_the_engine_met_a_stop_string(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request())
        output = emit(scheduler, 1, finish={"a": Finish("stop", "END")})
        assert (output.tokens, output.finish) == ((1,), Finish("stop", "END"))

    def test_when_the_row_failed_and_only_that_row(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request("a"))
        scheduler.add(request("b"))
        plan = scheduler.plan(0)
        outputs = scheduler.commit(StepResult(plan.step, {"b": (1,)}, failed={"a": "NaN in logits"}), 0)
        assert [(o.request.id, o.tokens, o.finish) for o in outputs] == [
            ("a", (), Finish("error", "NaN in logits")),
            ("b", (1,), None),
        ]
        assert not scheduler.cache.pools[0].by_name.keys() - {scheduler.state.rows["b"].table.names[0]}

    @pytest.mark.parametrize(
        ("tokens", "sentence"),
        [
            ({}, "the executor returned no token for this row"),
            ({"a": (1, 2)}, "the executor returned 2 tokens for 0 drafts"),
        ],
    )
    def test_when_the_executor_says_nothing_or_too_much(self, tokens: dict[str, Any], sentence: str) -> None:
        scheduler = scheduler_of()
        scheduler.add(request())
        plan = scheduler.plan(0)
        (output,) = scheduler.commit(StepResult(plan.step, tokens), 0)
        assert (output.tokens, output.finish) == ((), Finish("error", sentence))

    @pytest.mark.parametrize("steps", [0, 1], ids=["waiting", "running"])
    def test_at_its_deadline(self, steps: int) -> None:
        scheduler = scheduler_of()
        late = request()
        late.deadline = 10
        scheduler.add(late)
        for _ in range(steps):
            emit(scheduler, 1)
        plan = scheduler.plan(10)
        assert not plan.work and plan.gone == ("a",) * steps
        (output,) = scheduler.take_emissions()
        assert output.finish == Finish("abort", "deadline exceeded")


class TestCancel:
    def test_a_waiting_request_ends_at_once(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request())
        scheduler.cancel("a", 1)
        (output,) = scheduler.take_emissions()
        assert output.finish == Finish("abort") and scheduler.idle

    def test_a_running_request_gives_its_blocks_back_before_the_next_plan(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request())
        emit(scheduler, 1)
        scheduler.cancel("a", 1)
        assert scheduler.cache.pools[0].available == 100
        assert scheduler.plan(1).gone == ("a",)

    def test_a_request_in_flight_keeps_its_blocks_until_the_commit(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request())
        plan = scheduler.plan(0)
        scheduler.cancel("a", 1)
        (output,) = scheduler.take_emissions()
        assert (output.tokens, output.finish) == ((), Finish("abort")), "its client need not wait for the step"
        assert scheduler.cache.pools[0].available == 99 and not scheduler.idle
        assert not scheduler.commit(StepResult(plan.step, {"a": (1,)}), 2)
        assert scheduler.cache.pools[0].available == 100

    def test_so_does_a_row_that_is_held_but_not_part_of_the_step(self) -> None:
        bench = Bench(limits_of(), policy=POLICIES["prefill-first"])
        bench.play([Ask("a", 4), Ask("b", 30, at=1)], steps=1)
        bench.add(Ask("b", 30))
        plan = bench.scheduler.plan(1)
        assert [work.id for work in plan.work] == ["b"]
        available = bench.scheduler.cache.pools[0].available
        bench.scheduler.cancel("a", 1)
        assert bench.scheduler.cache.pools[0].available == available
        bench.hear(bench.scheduler.commit(bench.executor.run(plan), 2))
        assert bench.finishes == {"a": "abort"}

    @pytest.mark.parametrize("id", ["a", "never seen"])
    def test_is_idempotent(self, id: str) -> None:
        bench = Bench()
        bench.play([Ask("a", 4, 1)])
        bench.scheduler.cancel(id, 9)
        bench.scheduler.cancel(id, 9)
        assert not any(isinstance(event, Cancelled) for event in bench.events)

    def test_choices_whose_parent_is_cancelled_go_on_alone(self) -> None:
        bench = Bench()
        bench.add(Ask("a", 6, 2, n=2))
        bench.scheduler.cancel("a", 0)
        bench.play([])
        assert bench.finishes == {"a": "abort", "a#1": "length"}


class TestDrafts:
    """Proposed tokens are verified in the next step; what is rejected does not count as computed."""

    def drafted(self, *draft: int, most: int = 6) -> Scheduler:
        scheduler = scheduler_of()
        scheduler.add(request(most=most))
        emit(scheduler, 50, drafts={"a": draft})
        return scheduler

    def test_a_decode_computes_its_token_and_its_drafts(self) -> None:
        (work,) = self.drafted(51, 52).plan(0).work
        assert (work.start, work.count, work.draft, work.logits, work.sample) == (4, 3, (51, 52), 3, True)

    @pytest.mark.parametrize(("emitted", "computed"), [((9,), 5), ((51, 9), 6), ((51, 52, 9), 7)])
    def test_computed_counts_accepted_drafts_only(self, emitted: tuple[int, ...], computed: int) -> None:
        scheduler = self.drafted(51, 52)
        assert emit(scheduler, *emitted).tokens == emitted
        made = scheduler.state.rows["a"].request
        assert (made.computed, made.tokens[4:], made.draft) == (computed, [50, *emitted], [])

    def test_a_stop_id_among_accepted_drafts_ends_the_request_there(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(stop=51))
        emit(scheduler, 50, drafts={"a": (51, 52)})
        output = emit(scheduler, 51, 52, 53)
        assert (output.tokens, output.finish) == ((51,), Finish("stop", 51))
        assert output.request.computed <= len(output.request.tokens)

    def test_no_more_drafts_than_can_still_be_emitted_before_the_last_token(self) -> None:
        (work,) = self.drafted(51, 52, 53, most=3).plan(0).work
        assert work.draft == (51,)

    def test_drafts_fill_what_the_step_has_left_after_every_row_has_its_token(self) -> None:
        scheduler = Scheduler(limits_of(), key=b"test", budget=Budget(tokens=4))
        for id in "ab":
            scheduler.add(request(id, prompt=1))
        plan = scheduler.plan(0)
        scheduler.commit(StepResult(plan.step, {"a": (1,), "b": (1,)}, drafts={"a": (2, 3, 4), "b": (2, 3, 4)}), 0)
        assert [(work.id, work.count) for work in scheduler.plan(0).work] == [("a", 2), ("b", 2)]

    @pytest.mark.parametrize(("blocks", "counts"), [(4, [1, 1]), (5, [5, 1]), (6, [6, 1]), (7, [6, 5]), (9, [6, 6])])
    def test_drafts_leave_every_running_row_the_block_it_may_need(self, blocks: int, counts: list[int]) -> None:
        scheduler = scheduler_of(blocks=(blocks,))
        for id in "ab":
            scheduler.add(request(id, prompt=3, most=12))
        plan = scheduler.plan(0)
        scheduler.commit(StepResult(plan.step, {"a": (1,), "b": (1,)}, drafts={"a": (2,) * 5, "b": (2,) * 5}), 0)
        assert [work.count for work in scheduler.plan(0).work] == counts


class TestPlanForTheExecutor:
    """A plan holds all that changed, and nothing else."""

    def test_a_row_is_told_in_full_once_and_then_only_new_blocks(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(prompt=7, stop=9))
        plan = scheduler.plan(0)
        (init,) = plan.new
        assert (init.tokens, init.prompt_len, init.blocks) == (tuple(range(100, 107)), 7, ((0, 1),))
        assert init.stop_ids == (9,) and plan.work[0].blocks == ()
        scheduler.commit(StepResult(0, {"a": (1,)}), 0)
        news = []
        for _ in range(3):
            plan = scheduler.plan(0)
            assert not plan.new
            news.append(plan.work[0].blocks)
            scheduler.commit(StepResult(plan.step, {"a": (1,)}), 0)
        assert news == [(), ((2,),), ()]

    def test_a_preempted_row_is_dropped_and_told_again(self) -> None:
        bench = Bench(limits_of(blocks=(6,)))
        bench.play([Ask("a", 8, 8), Ask("b", 7, 8)], steps=8)
        plan = bench.scheduler.plan(8)
        (init,) = plan.new
        assert init.id == "b" and len(init.tokens) == 12 and init.prompt_len == 7

    def test_logits_are_wanted_only_where_a_token_is_drawn(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(prompt=20))
        assert [(w.logits, w.sample) for w in scheduler.plan(0).work] == [(0, False)]
        scheduler.commit(StepResult(0), 0)
        assert [(w.logits, w.sample) for w in scheduler.plan(0).work] == [(1, True)]

    def test_prompt_logprobs_want_logits_everywhere_of_one_choice(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(prompt=18, prompt_logprobs=1, n=2))
        seen = []
        for _ in range(3):
            plan = scheduler.plan(0)
            seen += [(w.id, w.start, w.count, w.logits, w.prompt_logprobs) for w in plan.work]
            scheduler.commit(StepResult(plan.step, {w.id: (1,) for w in plan.work if w.sample}), 0)
        assert seen == [
            ("a", 0, 16, 16, True),
            ("a", 16, 2, 2, True),
            ("a", 18, 1, 1, False),
            ("a#1", 17, 1, 1, False),
        ]

    def test_prompt_logprobs_of_one_step_are_bounded_over_all_rows(self) -> None:
        bench = Bench(limits_of(max_prompt_logits=5))
        bench.scheduler.add(request("a", prompt=8, prompt_logprobs=1))
        bench.scheduler.add(request("b", prompt=6, prompt_logprobs=0))
        bench.scheduler.add(request("c", prompt=3))
        seen = []
        for step in range(3):
            plan = bench.scheduler.plan(step)
            seen.append([(w.id, w.count, w.logits) for w in plan.work])
            bench.scheduler.commit(bench.executor.run(plan), step)
        assert seen == [
            [("c", 3, 1), ("a", 5, 5)],
            [("c", 1, 1), ("a", 3, 3), ("b", 2, 2)],
            [("a", 1, 1), ("c", 1, 1), ("b", 4, 4)],
        ]

    def test_prompt_logprobs_are_reported_once_even_if_the_prompt_is_computed_twice(self) -> None:
        bench = Bench()
        bench.scheduler.add(request(prompt=30, prompt_logprobs=1))
        seen = []
        for step in range(4):
            if step == 1:
                bench.scheduler.state.preempt(bench.scheduler.state.running[0], 0)
            plan = bench.scheduler.plan(step)
            seen += [(w.start, w.count, w.prompt_logprobs) for w in plan.work]
            bench.scheduler.commit(bench.executor.run(plan), step)
        assert seen == [(0, 16, True), (0, 16, False), (16, 14, True), (30, 1, False)]

    def test_a_step_without_anything_to_do_is_empty_and_needs_no_commit(self) -> None:
        scheduler = scheduler_of()
        assert scheduler.plan(0).empty and scheduler.plan(1).empty and scheduler.idle

    def test_the_end_of_the_last_row_is_still_told(self) -> None:
        scheduler = scheduler_of()
        scheduler.add(request(most=1))
        emit(scheduler, 1)
        assert not scheduler.idle
        plan = scheduler.plan(0)
        assert plan.gone == ("a",) and not plan.empty
        assert scheduler.commit(StepResult(plan.step), 0) == [] and scheduler.idle

    def test_predicted_seconds_come_from_the_step_time_model(self) -> None:
        class PerToken:
            def predict(self, shape: Any) -> float:
                return shape.tokens * 0.5

        scheduler = Scheduler(limits_of(), key=b"test", model=PerToken())
        scheduler.add(request(prompt=5))
        assert scheduler.plan(0).predicted == 2.5
        assert scheduler_of().plan(0).predicted is None


def test_same_calls_give_the_same_plans() -> None:
    asks = [Ask("a", 8, 8, n=2), Ask("b", 7, 8), Ask("c", 30, at=3), Ask("d", 30, like="c", at=5)]
    assert Bench(limits_of(blocks=(12,))).play(asks) == Bench(limits_of(blocks=(12,))).play(asks)


def test_the_life_of_a_request_is_in_the_events() -> None:
    bench = Bench(limits_of(blocks=(6,)))
    bench.play([Ask("a", 8, 8), Ask("b", 7, 8)])
    life = [event for event in bench.events if getattr(event, "id", "") == "b"]
    assert [type(event).__name__ for event in life] == [
        "Queued", "Admitted", "FirstToken", "Preempted", "Admitted", "Finished",
    ]  # fmt: skip
    assert isinstance(life[2], FirstToken) and life[2].waited == 1
    assert isinstance(life[3], Preempted) and life[3].wasted == 11
    assert isinstance(life[4], Admitted) and (life[4].cached, life[4].preemptions) == (8, 1)
    assert isinstance(life[5], Finished) and (life[5].generated, life[5].cached, len(life[5].names)) == (8, 0, 3)


def test_a_step_event_says_who_computed_and_emitted_what() -> None:
    bench = Bench()
    bench.play([Ask("a", 4), Ask("b", 20)], steps=2)
    step = [event for event in bench.events if isinstance(event, StepDone)][1]
    assert (step.rows, step.counts, step.emitted, step.planned, step.now) == ((0, 1), (1, 8), (1, 1), 1, 2)
    assert step.shape is not None and (step.shape.tokens, step.shape.kv_tokens) == (9, (5 + 20,))


def test_an_empty_plan_with_a_queue_would_be_recorded() -> None:
    """Only a broken policy can cause it; then the log says so, instead of an engine that sits still."""
    bench = Bench(policy=Policy("lazy", lambda step: None))
    bench.add(Ask("a", 4))
    assert bench.step() == ""
    assert bench.events[-1] == Idle(now=0, blocked="policy")


def test_capabilities_travel_as_json() -> None:
    limits = limits_of(blocks=(4, 5), windows=(None, 9))
    assert msgspec.json.decode(msgspec.json.encode(limits), type=Capabilities) == limits
