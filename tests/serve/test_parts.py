"""The small parts of the server, each by itself."""

from __future__ import annotations

import json

import pytest

from headway.core.bound import QueueBound
from headway.core.clock import PS_PER_SECOND
from headway.core.errors import BadInput
from headway.core.events import Admitted, Finished, FirstToken, Preempted, Queued, StepDone
from headway.core.request import SamplingParams
from headway.core.step import Seconds, StepShape, TokenLogprobs
from headway.engine.ipc import Status
from headway.engine.messages import Submit
from headway.serve.admission import MAX_RETRY_AFTER, Backlog
from headway.serve.dialects.openai.completion_logprobs import CompletionLogprobs, joined
from headway.serve.encode import Template, event, hole
from headway.serve.errors import ApiError
from headway.serve.logprobs import ShownToken, entries, named_tokens
from headway.serve.metrics import Histogram, HttpDone, Metrics, ServerMetrics, gauges, render
from tests.serve.conftest import parse_metrics
from tests.serve.scripted import ByteTokenizer

S = PS_PER_SECOND
SHAPE = StepShape(tokens=1, rows=1, logit_rows=1, kv_tokens=(1,), pairs=(1,))


def submit(id: str, tokens: int, n: int = 1) -> Submit:
    return Submit(id=id, tokens=(1,) * tokens, params=SamplingParams(n=n))


def admitted(id: str) -> Admitted:
    return Admitted(now=0, id=id, cached=0, preemptions=0, waited=0)


@pytest.mark.parametrize(("wait", "told"), [(0.0, 1), (0.2, 1), (41.3, 42), (1e9, MAX_RETRY_AFTER)])
def test_a_full_queue_says_when_to_come_back_as_the_engine_predicts(wait: float, told: int) -> None:
    backlog = Backlog(QueueBound(requests=1, tokens=10**9))
    backlog.add(submit("a", 1))
    with pytest.raises(ApiError) as caught:
        backlog.check([submit("b", 1)], wait)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "queue_full", told)
    backlog.fold(admitted("a"))
    backlog.check([submit("b", 1)], wait)


def test_a_backlog_forgets_what_was_cancelled_and_counts_choices() -> None:
    backlog = Backlog(QueueBound(requests=8, tokens=100))
    backlog.add(submit("a", 10, n=5))
    assert (len(backlog), backlog.tokens) == (5, 50)
    backlog.fold(admitted("a#3"))  # a choice without its first one: counted with the request
    assert len(backlog) == 5
    for _ in range(2):
        backlog.gone("a")
    assert (len(backlog), backlog.tokens) == (0, 0)
    with pytest.raises(BadInput, match="n: 9 generations"):
        backlog.check([submit("b", 1, n=9)], 0.0)


def test_metrics_are_a_fold() -> None:
    metrics = Metrics('a "model"')
    for happened in (
        Queued(now=0, id="a", number=0, prompt_tokens=10, max_len=20),
        Queued(now=0, id="a#1", number=1, prompt_tokens=10, max_len=20, choice=1, parent="a"),
        Admitted(now=S, id="a", cached=4, preemptions=0, waited=S),
        FirstToken(now=2 * S, id="a", waited=2 * S),
        StepDone(now=2 * S, step=0, planned=S, idle=0, rows=(0,), counts=(10,), emitted=(1,), shape=SHAPE,
                 predicted=0.5, seconds=Seconds(forward=1.0)),
        Admitted(now=2 * S, id="a#1", cached=10, preemptions=0, waited=2 * S),
        FirstToken(now=3 * S, id="a#1", waited=3 * S),
        StepDone(now=3 * S, step=1, planned=2 * S, idle=0, rows=(0, 1), counts=(1, 1), emitted=(3, 1), shape=SHAPE,
                 accepted=2, drafted=4, proposed=(6, 1), undrafted=0.5,
                 seconds=Seconds(prepare=0.25, sample=0.5, host=0.25)),
        Preempted(now=3 * S, id="a#1", wasted=11),
        Finished(now=4 * S, id="a", reason="stop", prompt_tokens=10, cached=4, generated=5, lived=4 * S),
        StepDone(now=4 * S, step=2, planned=3 * S, idle=0, rows=(0,), counts=(1,), emitted=(1,), shape=SHAPE),
    ):  # fmt: skip
        metrics.fold(happened)
    http = ServerMetrics('a "model"')
    for _ in range(2):
        http.fold(HttpDone("/health", 200))
    shown = render([*metrics.series(Status(10, 5, 2, 16)), *http.series(), *gauges('a "model"', {"up": 1.0})])
    now = parse_metrics(shown.replace('a \\"model\\"', "m"))
    expected = {
        "requests_total": 2, "requests_running": 0, "requests_waiting": 1, "kv_cache_usage": 0.5,
        "prompt_tokens_total": 10, "generation_tokens_total": 6, "prefix_cache_queries_total": 10,
        "prefix_cache_hits_total": 4, "preemptions_total": 1, "preempted_tokens_total": 11, "accepted_tokens_total": 2,
        "draft_tokens_total": 4, "proposed_tokens_total": 7, "draft_steps_total": 1, "draft_step_seconds_total": 0.75,
        "draft_step_seconds_without_total": 1.0,
        "steps_total": 3, "step_seconds_total": 2, "step_predicted_seconds_total": 0.5,
        "step_prediction_error_seconds_total": 0.5, "step_time_ratio": 2, "step_time_error": 1,
        'requests_finished_total{finished_reason="stop"}': 1,
        "time_to_first_token_seconds_count": 2, "time_to_first_token_seconds_sum": 5,
        "inter_token_latency_seconds_count": 4, "inter_token_latency_seconds_sum": 2,
        "request_latency_seconds_sum": 4, "request_queue_seconds_sum": 3, "request_prefill_seconds_sum": 2,
        "request_decode_seconds_sum": 2, "request_generation_tokens_sum": 5,
        'http_requests_total{route="/health",status="200"}': 2, "up": 1,
        "step_host_seconds_sum": 1, "step_host_seconds_count": 3,
    }  # fmt: skip
    assert {name: now[f"headway:{name}"] for name in expected} == expected


def test_a_histograms_buckets_are_cumulative_and_inclusive() -> None:
    histogram = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 2.0, 100.0):
        histogram.observe(value)
    lines = list(histogram.lines("x", "l"))
    assert lines == [
        'x_bucket{l,le="1"} 2',
        'x_bucket{l,le="10"} 3',
        'x_bucket{l,le="+Inf"} 4',
        "x_sum{l} 103.5",
        "x_count{l} 4",
    ]


@pytest.mark.parametrize("text", ["", "plain", '"quoted"\\', "line\nend\r", "\u2028\u2029\x85", "\x00hole\x001", "🙂"])
def test_a_template_is_the_event_it_was_made_from(text: str) -> None:
    template = Template(event({"a": [hole(0), {"b": hole(1)}], "c": "\x00hole"}), 2)
    data = template.fill(json.dumps(text).encode(), b"[1, null]")
    assert json.loads(data.decode().removeprefix("data: ")) == {"a": [text, {"b": [1, None]}], "c": "\x00hole"}
    assert json.loads(event({"t": text}).decode().removeprefix("data: ")) == {"t": text}
    assert len(event({"t": text}).decode().splitlines()) == 2


def at(token: int, logprob: float = -1.0, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, 1, top)


def shown(*positions: TokenLogprobs) -> list[ShownToken]:
    return named_tokens(ByteTokenizer(), positions)


def test_offsets_count_characters_as_the_text_has_them() -> None:
    data = "aé".encode() + b"\xf0\x9f" + b"b" + b"\x80" + b"c"
    text = data.decode(errors="replace")
    lists = joined([CompletionLogprobs(ByteTokenizer(), 0, 0).piece(shown(*[at(byte) for byte in data]))])
    assert text == "aé\ufffdb\ufffdc"
    assert lists["text_offset"] == [0, 1, 1, 2, 2, 3, 4, 5]
    assert lists["tokens"] == ["a", r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xf0", r"bytes:\x9f", "b", r"bytes:\x80", "c"]


def test_a_start_token_that_is_not_in_the_text_has_no_width() -> None:
    lists = CompletionLogprobs(ByteTokenizer(), 1, 0)
    pieces = [lists.first(256, hidden=True), lists.piece(shown(at(97, -0.5, (98, -0.1)), at(99)))]
    assert joined(pieces)["text_offset"] == [0, 0, 1]
    assert joined(pieces)["top_logprobs"] == [None, {"a": -0.5, "b": -0.1}, {"c": -1.0}]


def test_chat_logprobs_have_raw_bytes_and_no_infinities() -> None:
    (entry,) = entries(ByteTokenizer(), shown(at(0xC3, -0.5, (0xC3, -0.5), (97, float("-inf")), (98, -2.0))), 2)
    assert entry["token"] == r"\xc3" and entry["bytes"] == [0xC3]
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [(r"\xc3", -0.5), ("a", -9999.0)]
