"""The server's side: its event log folded per request, its metrics before and after."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headway.bench.server import SPLIT, fold_events, metrics_between, parse_metrics, read_log, server_report
from headway.core.errors import BadInput
from headway.core.events import Admitted, AnyEvent, Finished, FirstToken, Header, Preempted, Queued, StepDone
from headway.core.step import Capabilities, StepShape
from headway.engine.event_file import EventWriter
from tests.bench.streams import record

MS = 1_000_000_000  # ps
SHAPE = StepShape(1, 1, 1, (1,), (1,))


def step(start: int, end: int, counts: dict[int, int], emitted: dict[int, int]) -> StepDone:
    rows = tuple(counts)
    return StepDone(
        now=end * MS, planned=start * MS, step=start, idle=0, rows=rows, counts=tuple(counts.values()),
        emitted=tuple(emitted.get(row, 0) for row in rows), shape=SHAPE,
    )  # fmt: skip


# Request a: arrives at 0, waits 10 ms, 20 ms of prefill in two chunks, decodes in own steps, beside a chunk of b, is
# preempted for 30 ms, and ends.
LOG: list[AnyEvent] = [
    Queued(now=0, id="x-0", number=0, prompt_tokens=64, max_len=99),
    Admitted(now=10 * MS, id="x-0", cached=32, preemptions=0, waited=10 * MS),
    step(10, 20, {0: 16}, {}),
    FirstToken(now=30 * MS, id="x-0", waited=30 * MS),
    step(20, 30, {0: 16}, {0: 1}),
    Queued(now=31 * MS, id="y-0", number=1, prompt_tokens=64, max_len=99),
    step(30, 35, {0: 1}, {0: 1}),
    Admitted(now=35 * MS, id="y-0", cached=0, preemptions=0, waited=4 * MS),
    step(35, 50, {0: 1, 1: 64}, {0: 1}),
    Preempted(now=50 * MS, id="x-0", wasted=67),
    step(50, 80, {1: 1}, {1: 1}),
    Admitted(now=80 * MS, id="x-0", cached=64, preemptions=1, waited=80 * MS),
    Finished(now=90 * MS, id="x-0", reason="length", prompt_tokens=64, cached=32, generated=4, lived=90 * MS),
    step(80, 90, {0: 3, 1: 1}, {0: 1, 1: 1}),
]


def test_a_request_is_split_into_its_parts() -> None:
    side = fold_events(LOG)["x-0"]
    assert (side.queue_ms, side.prefill_ms, side.decode_ms) == (10, 20, 60)
    assert (side.alone_ms, side.beside_prompts_ms, side.stalled_ms) == (5, 15 + 10, 30)
    assert side.requeued_ms == 30
    assert side.engine_ms == 90
    assert (side.cached, side.preemptions) == (32, 1)


def test_tokens_that_are_still_cached_after_a_preemption_are_not_recomputed() -> None:
    """67 computed tokens were taken away, 64 of them were found again."""
    assert fold_events(LOG)["x-0"].recomputed == 67 - 64


def test_an_unfinished_request_has_the_parts_it_has() -> None:
    side = fold_events(LOG)["y-0"]
    assert side.queue_ms == 4 and side.decode_ms is None and side.stalled_ms is None


def test_several_steps_in_one_event_count_from_the_first_token_to_the_end() -> None:
    log: list[AnyEvent] = [
        Queued(now=0, id="x-0", number=0, prompt_tokens=1, max_len=9),
        Admitted(now=0, id="x-0", cached=0, preemptions=0, waited=0),
        FirstToken(now=10 * MS, id="x-0", waited=10 * MS),
        Finished(now=30 * MS, id="x-0", reason="length", prompt_tokens=1, cached=0, generated=3, lived=30 * MS),
        step(0, 40, {0: 1}, {0: 3}),
    ]
    side = fold_events(log)["x-0"]
    assert (side.decode_ms, side.stalled_ms) == (20, 0)


def test_records_are_matched_by_the_answers_id() -> None:
    ours, other, cold = record(index=0), record(index=1), record(index=2)
    ours.server_id, other.server_id, cold.server_id, cold.warmup = "x", "chatcmpl-of-another-run", "y", True
    found = server_report([ours, other, cold], fold_events(LOG))
    assert found["matched"] == 1
    assert found["queue_ms"]["mean"] == 10
    assert found["outside_ms"]["mean"] == pytest.approx(200 - 10 - 20)
    assert (found["cached"], found["recomputed"]) == (32, 3)
    split = found["requests"]["0"]
    assert sum(split[part] for part in (*SPLIT, "unaccounted_ms")) == pytest.approx(ours.e2e_done_ms)


def test_a_log_is_read_also_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    limits = Capabilities(
        block_size=16, blocks=(8,), windows=(None,), max_rows=4, max_tokens_per_step=64, max_model_len=99
    )
    with EventWriter(path, Header(limits=limits, policy="chunked")) as writer:
        for event in LOG:
            writer(event)
    whole, fault = read_log(path)
    assert whole == fold_events(LOG) and fault is None
    with path.open("ab") as file:
        file.write(b'{"event":"step","no')
    part, fault = read_log(path)
    assert part == whole and fault is not None and "cut off" in fault


@pytest.mark.parametrize("text", ["", "{}\n", "hello\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(BadInput) as error:
        read_log(tmp_path / "x")
    assert error.value.field == "--event-log"
    with pytest.raises(BadInput):
        read_log(tmp_path / "none")


METRICS = """# HELP headway:steps_total Engine steps.
# TYPE headway:steps_total counter
headway:steps_total{model_name="m"} 10
vllm:steps_total{model_name="m"} 10
headway:requests_finished_total{model_name="m",finished_reason="stop"} 2
headway:requests_finished_total{model_name="m",finished_reason="length"} 3
headway:request_queue_seconds_bucket{model_name="m",le="0.1"} 4
headway:request_queue_seconds_sum{model_name="m"} 1.5
headway:request_queue_seconds_count{model_name="m"} 3
"""


def test_metrics_are_parsed_and_subtracted() -> None:
    before = parse_metrics(METRICS)
    assert before == {
        "steps_total": 10,
        "requests_finished_total": 5,
        "request_queue_seconds_sum": 1.5,
        "request_queue_seconds_count": 3,
    }
    changes = {"} 10": "} 25", "} 1.5": "} 2.5", '_count{model_name="m"} 3': '_count{model_name="m"} 5'}
    later = METRICS
    for old, new in changes.items():
        later = later.replace(old, new)
    after = parse_metrics(later)
    found = metrics_between(before, after)
    assert found["steps_total"] == 15
    assert found["mean_request_queue_seconds"] == pytest.approx(0.5)
    assert found["mean_request_decode_seconds"] is None


def test_other_servers_have_no_such_metrics() -> None:
    assert parse_metrics('process_cpu_seconds_total 3\nvllm:x{a="b"} 1\n') == {}


def test_what_is_outside_is_before_or_after_the_engine() -> None:
    ours = record(index=0)
    ours.server_id, ours.intended = "x", 5_000_000  # ns: 5 ms; the log's request arrives at 0
    early = server_report([ours], fold_events(LOG))["requests"]["0"]
    assert early["before_ms"] is None, "another clock: it arrived before it was sent"
    later = [msgspec.structs.replace(event, now=event.now + 12 * MS) for event in LOG]
    split = server_report([ours], fold_events(later))["requests"]["0"]
    assert split["before_ms"] == pytest.approx(7)
    assert split["before_ms"] < split["unaccounted_ms"]
