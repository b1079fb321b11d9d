"""Events: folded into totals, written to a file, read back; and what a broken file says."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headway.core.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    EventLog,
    ExecutorReset,
    Finished,
    FirstToken,
    Header,
    Idle,
    PoolStart,
    Preempted,
    Queued,
    Refused,
    StepDone,
    StepPlanned,
)
from headway.core.folds import Totals
from headway.core.step import Capabilities, Seconds, StepShape
from headway.engine.event_file import (
    MOST_LINE_BYTES,
    EventFileError,
    EventWriter,
    ServerEventWriter,
    read_events,
    read_header,
)

LIMITS = Capabilities(block_size=4, blocks=(9,), windows=(None,), max_rows=2, max_tokens_per_step=8, max_model_len=20)
SHAPE = StepShape(5, 2, 1, (9,), (12,), (4,), (4,))
EVENTS: list[AnyEvent] = [
    Queued(now=1, id="a", number=0, prompt_tokens=6, max_len=9, names=(b"\x00\xff" * 8,)),
    Queued(now=2, id="b", number=1, prompt_tokens=5, max_len=9, priority=1, deadline=99, choice=1, parent="a"),
    Refused(now=2, id="c", reason="queue_full"),
    Admitted(now=3, id="a", cached=4, preemptions=0, waited=2),
    StepPlanned(now=3, step=0, digest=b"d" * 16, blocked="rows"),
    FirstToken(now=5, id="a", waited=4),
    StepDone(
        now=5, step=0, planned=3, idle=1, rows=(0,), counts=(2,), emitted=(1,), shape=SHAPE, seconds=Seconds(0.5, 1.5)
    ),
    Preempted(now=6, id="a", wasted=7),
    Admitted(now=7, id="a", cached=4, preemptions=1, waited=6),
    StepDone(
        now=9, step=1, steps=3, planned=7, idle=2, rows=(0,), counts=(9,), emitted=(4,), accepted=1, drafted=2,
        proposed=(2,), shape=SHAPE, predicted=0.25, seconds=Seconds(forward=2.0), times=(7, 8, 9),
    ),
    Cancelled(now=9, id="b"),
    Finished(now=9, id="b", reason="abort", prompt_tokens=5, cached=0, generated=0, lived=7),
    Finished(now=9, id="a", reason="length", prompt_tokens=6, cached=4, generated=5, lived=8, names=(b"n" * 16,)),
    Idle(now=10, blocked="blocks"),
    ExecutorReset(now=11),
]  # fmt: skip


def fold(events: list[AnyEvent]) -> Totals:
    totals = Totals()
    log = EventLog(totals)
    for event in events:
        log.append(event)
    return totals


def test_totals_fold_a_whole_run() -> None:
    totals = fold(EVENTS)
    assert (totals.queued, totals.cancelled, dict(totals.refused)) == (2, 1, {"queue_full": 1})
    assert dict(totals.finished) == {"abort": 1, "length": 1}
    assert (totals.waiting, totals.running, totals.live) == (0, 0, 0)
    assert (totals.prompt_tokens, totals.cached_tokens, totals.wasted_tokens) == (11, 4, 7), "cached counts once"
    assert (totals.computed_tokens, totals.emitted_tokens) == (11, 5)
    assert (totals.drafted_tokens, totals.accepted_tokens) == (2, 1)
    assert (totals.steps, totals.busy, totals.idle, totals.first_tokens) == (4, 4.0, 3, 1)
    assert (totals.predicted_steps, totals.predicted_seconds, totals.prediction_error) == (3, 0.25, 1.75)
    assert totals.executor_resets == 1


@pytest.mark.parametrize(
    ("upto", "waiting", "running"), [(0, 0, 0), (2, 2, 0), (4, 1, 1), (8, 2, 0), (9, 1, 1), (12, 0, 1), (13, 0, 0)]
)
def test_totals_know_who_waits_and_runs_at_any_moment(upto: int, waiting: int, running: int) -> None:
    totals = fold(EVENTS[:upto])
    assert (totals.waiting, totals.running) == (waiting, running)


def test_a_later_subscriber_hears_what_follows() -> None:
    log, heard = EventLog(), []  # type: ignore[var-annotated]
    log.append(EVENTS[0])
    log.subscribe(heard.append)
    log.append(EVENTS[1])
    assert heard == [EVENTS[1]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.events"
    header = Header(
        limits=LIMITS,
        policy="chunked",
        budget={"tokens": 7},
        step=3,
        cache=(PoolStart(blank=(1,), cached=((0, b"\xff" * 16, 5),)),),
        config={"model": "m"},
    )
    with EventWriter(path, header) as writer:
        for event in EVENTS:
            writer(event)
    return path


def test_a_file_holds_the_header_and_every_event(path: Path) -> None:
    header = read_header(path)
    assert (header.limits, header.policy, header.budget, header.config) == (
        LIMITS,
        "chunked",
        {"tokens": 7},
        {"model": "m"},
    )
    assert list(read_events(path)) == EVENTS


def test_a_file_is_one_json_object_per_line(path: Path) -> None:
    kinds = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert kinds[:2] == ["header", "queued"] and len(kinds) == 1 + len(EVENTS)


def test_a_step_is_on_disk_as_soon_as_it_is_done(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    writer = EventWriter(path, Header(limits=LIMITS, policy="chunked"))
    for event in EVENTS[:7]:
        writer(event)
    assert list(read_events(path)) == EVENTS[:7]
    writer.close()


def test_a_cut_off_file_gives_what_it_has_and_then_says_where_it_ends(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    events = read_events(path)
    assert [next(events) for _ in EVENTS[:-1]] == EVENTS[:-1]
    with pytest.raises(EventFileError, match=f"line {1 + len(EVENTS)}: cut off"):
        next(events)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not an event file"),
        (b"\x00\x01\x02", "not an event file"),
        (b"[1, 2]\n", "not an event file"),
        (b'{"event":"header"}\n', "not an event file"),
        (b'{"format":"other","version":1}\n', "its format is 'other'"),
        (b'{"format":"headway-events","version":99}\n', "version 99 of the format; this program reads 4"),
        (b'{"format":"headway-events","version":4,"event":"header"}\n', "line 1: .*missing required field"),
    ],
)
def test_a_foreign_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "run.events"
    path.write_bytes(content)
    with pytest.raises(EventFileError, match=sentence):
        list(read_events(path))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"event":"unheard of","now":1}\n', "line 2: .*unheard of"),
        (b'{"event":"idle","now":"noon","blocked":""}\n', "line 2: Expected `int`"),
        (b"no json\n", "line 2: JSON is malformed"),
        (b" " * (MOST_LINE_BYTES + 1), f"line 2: longer than {MOST_LINE_BYTES} bytes"),
    ],
    ids=["kind", "type", "syntax", "length"],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, sentence: str) -> None:
    path = tmp_path / "run.events"
    EventWriter(path, Header(limits=LIMITS, policy="chunked")).close()
    with open(path, "ab") as file:
        file.write(line)
    with pytest.raises(EventFileError, match=sentence):
        list(read_events(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_before_anything_is_served() -> None:
    with pytest.raises(EventFileError, match="/dev/full: the event log cannot be written: No space left on device"):
        EventWriter(Path("/dev/full"), Header(limits=LIMITS, policy="chunked"))


def test_a_log_with_a_long_header_keeps_the_one_before_it(tmp_path: Path) -> None:
    """A header lists what is cached, and may be longer than the limit: until a step follows it, nothing is full."""
    path, first = tmp_path / "log", Header(limits=LIMITS, policy="chunked")
    writer = ServerEventWriter(path, first, max_bytes=400)
    for event in EVENTS:
        writer(event)
    for _ in range(3):  # as a server does whenever no request is live
        writer.rotate(lambda header: msgspec.structs.replace(header, config={"long": "x" * 2000}))
    writer.close()
    assert any(isinstance(event, Finished) for event in read_events(tmp_path / "log.1"))
    assert list(read_events(path)) == []
