"""How long a newcomer waits: predicted from measured speed, bounded, and what it may share or must not trust."""

from __future__ import annotations

import pytest

from headway.core.bound import QueueBound
from headway.core.clock import to_ps, to_seconds
from headway.core.errors import Rejected
from headway.core.events import Admitted
from headway.core.request import Finish, Request, SamplingParams
from headway.core.step import StepResult
from headway.scheduling.scheduler import Scheduler
from tests.scheduling.context_bench import Ask, Bench, limits_of
from tests.scheduling.test_fairness import Machine


@pytest.mark.parametrize(
    ("prompt", "most", "rows"),
    [(400, 2, 16), (20, 200, 4), (100, 40, 8)],
    ids=["prompts are long", "answers are long", "both"],
)
def test_the_wait_is_predicted_within_a_factor_of_two(prompt: int, most: int, rows: int) -> None:
    machine = Machine(rows=rows)
    machine.play([machine.ask(f"r{number}", prompt, most) for number in range(200)], until=40)
    predicted, now = machine.scheduler.predicted_wait(), to_seconds(machine.clock.now())
    assert predicted > 2, "there is something to predict"
    machine.play([machine.ask("newcomer", prompt, most, at=now)])
    (begun,) = [event for event in machine.events if isinstance(event, Admitted) and event.id == "newcomer"]
    assert 0.5 < predicted / to_seconds(begun.waited) < 2


def test_before_anything_was_measured_the_model_predicts_and_without_a_queue_nothing_waits() -> None:
    machine = Machine()
    assert machine.scheduler.predicted_wait() == 0
    machine.scheduler.add(machine.ask("a", 5000))
    assert 9 < machine.scheduler.predicted_wait() < 12, "5,000 tokens at 2 ms, and the steps"


def test_who_would_wait_too_long_is_refused_and_says_when_to_come_back() -> None:
    machine = Machine()
    machine.scheduler._max_wait = 5.0
    machine.scheduler.add(machine.ask("a", 5000))
    with pytest.raises(Rejected, match=r"it would wait 1\d s, and may wait 5; try again in 1\d s") as refused:
        machine.scheduler.add(machine.ask("b", 10))
    assert refused.value.status == 503 and 9 < (refused.value.retry_after or 0) < 12


def test_who_would_have_its_first_token_too_late_is_refused_at_once_and_says_when_to_come_back() -> None:
    machine = Machine()
    machine.scheduler._max_ttft = 5.0
    machine.scheduler.add(machine.ask("a", 2000))
    machine.scheduler.add(machine.ask("short", 10))
    with pytest.raises(
        Rejected, match=r"first token would take [67]\.\d s, and may take 5; try again in [12] s"
    ) as refused:
        machine.scheduler.add(machine.ask("b", 1000))
    assert refused.value.status == 503
    later = refused.value.retry_after or 0
    machine.play([], until=later + 0.1)
    machine.scheduler.add(machine.ask("b", 1000, at=to_seconds(machine.clock.now())))
    assert "b" in machine.scheduler.state.rows, "it came back when it was told to"


def test_a_prompt_that_takes_too_long_alone_is_not_told_to_come_back_unless_it_is_cached() -> None:
    machine = Machine()
    machine.scheduler._max_ttft = 5.0
    with pytest.raises(Rejected, match=r"prompt: the 4000 tokens of it that are not cached take 8\.\d s") as refused:
        machine.scheduler.add(machine.ask("long", 4000))
    assert (refused.value.status, refused.value.retry_after) == (400, None)
    machine.scheduler._max_ttft = None
    machine.play([machine.ask("long", 4000, 1)])
    machine.scheduler._max_ttft = 5.0
    machine.scheduler.add(machine.ask("long", 4000, at=to_seconds(machine.clock.now())))


def test_who_has_waited_too_long_ends_but_not_who_was_admitted() -> None:
    scheduler = Scheduler(limits_of(max_rows=1), key=b"k", max_wait=3.0)
    for id in "ab":
        scheduler.add(Request(id, [1, 2], SamplingParams(seed=0), max_len=50))
    plan = scheduler.plan(0)
    assert [work.id for work in plan.work] == ["a"]
    scheduler.commit(StepResult(plan.step, {"a": (1,)}), to_ps(2.9))
    assert scheduler.next_deadline == to_ps(3.0)
    scheduler.plan(to_ps(3.0))
    (end,) = scheduler.take_emissions()
    assert (end.request.id, end.finish) == ("b", Finish("abort", "waited 3 s in the queue"))
    assert scheduler.next_deadline is None and "a" in scheduler.state.rows


def test_choices_share_the_names_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(limits_of(max_model_len=400, blocks=(400,)))
    named = 0
    name = bench.scheduler.cache.hasher.name

    def count(parent: bytes, payload: bytes) -> bytes:
        nonlocal named
        named += 1
        return name(parent, payload)

    monkeypatch.setattr(bench.scheduler.cache.hasher, "name", count)
    bench.add(Ask("a", 80, 2, n=16))
    assert named == 20, "each full block of the prompt once"
    while not bench.scheduler.idle:  # without the laws, which name every block anew
        bench.scheduler.commit(bench.executor.run(bench.scheduler.plan(0)), 0)
    assert named <= 20 + 16, "and each choice what it generates"


def test_waiting_prompt_tokens_count_every_choice() -> None:
    scheduler = Scheduler(limits_of(), key=b"k", bound=QueueBound(tokens=40))
    scheduler.add(Request("a", [1] * 10, SamplingParams(seed=0, n=3), max_len=20))
    assert scheduler.state.waiting_tokens == 30
    with pytest.raises(Rejected, match="30 prompt tokens wait already, of at most 40"):
        scheduler.add(Request("b", [1] * 10, SamplingParams(seed=0, n=2), max_len=20))
    scheduler.add(Request("b", [1] * 10, SamplingParams(seed=0), max_len=20))


def test_a_choice_is_forked_from_its_own_parent_not_from_whoever_has_its_id_now() -> None:
    bench = Bench(limits_of(max_rows=1))
    bench.add(Ask("a", 6, 1, n=2, like="first"))
    while "a" not in bench.finishes:
        bench.step()
    bench.scheduler.add(Ask("a", 9, 3, like="second", priority=-1).request(bench.now))
    bench.finishes.clear()
    bench.play([])
    alone = Bench()
    alone.play([Ask("a", 6, 1, n=2, like="first")])
    assert bench.outputs["a#1"] == alone.outputs["a#1"]


def test_nobody_waits_for_a_prefix_that_comes_slower_than_computing_it() -> None:
    """With prompt logprobs a row computes few tokens a step."""
    bench = Bench(limits_of(max_prompt_logits=2))
    slow = Ask("a", 16, 1, options={"prompt_logprobs": 0})
    assert bench.play([slow, Ask("b", 16, 1, like="a")], steps=1) == ["a[0:2] b[0:14]"]
