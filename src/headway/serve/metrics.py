"""Prometheus metrics as folds over events: those of an engine, and those of HTTP defined here.

Every series has a `headway:` name; those that dashboards and gateways know from vLLM (Grafana boards, llm-d, the
Gateway API's endpoint picker) are repeated under their `vllm:` name with the same value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.core import events
from headway.core.clock import to_seconds
from headway.core.folds import Totals
from headway.core.receipts import Receipt
from headway.engine.ipc import Status

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
RECENT = 100  # steps that the running prediction error looks back over
HOST = (0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.005, 0.01, 0.1)
TOKENS = tuple(float(4**power) for power in range(11))  # 1 to 1M
REASONS = ("stop", "length", "abort", "error")
VLLM_NAMES = {  # of the series that have one there
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "kv_cache_usage": "kv_cache_usage_perc",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
    "prefix_cache_queries_total": "prefix_cache_queries_total",
    "prefix_cache_hits_total": "prefix_cache_hits_total",
    "preemptions_total": "num_preemptions_total",
    "draft_tokens_total": "spec_decode_num_draft_tokens_total",
    "accepted_tokens_total": "spec_decode_num_accepted_tokens_total",
    "requests_finished_total": "request_success_total",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_seconds": "request_queue_time_seconds",
    "request_prefill_seconds": "request_prefill_time_seconds",
    "request_decode_seconds": "request_decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
}
ADAPTER_SERIES = {
    "adapter_requests_finished_total": "Requests (choices) that ended",
    "adapter_prompt_tokens_total": "Their prompt tokens",
    "adapter_generation_tokens_total": "Tokens generated for them",
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpDone(msgspec.Struct, frozen=True):
    """An HTTP request was answered. `status` 499: the client left before it was."""

    route: str
    status: int


class LoopLag(msgspec.Struct, frozen=True):
    """The event loop woke so many seconds later than asked."""

    seconds: float


class Histogram:
    """Counts per bucket (upper bounds, inclusive), and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            within = _braced(labels, f'le="{bound}"')
            yield f"{name}_bucket{within} {total}"
        yield f"{name}_sum{_braced(labels)} {self.sum!r}"
        yield f"{name}_count{_braced(labels)} {total}"


@dataclass(frozen=True)
class Series:
    """Samples of one name, kind and set of labels.

    Attributes:
        text: what they are, for people; "" = the name says it.
        value: a number, a `Histogram`, or numbers by further labels.
    """

    name: str
    kind: str
    text: str
    labels: str
    value: float | Histogram | Mapping[str, float]

    def lines(self) -> Iterator[str]:
        if isinstance(self.value, Histogram):
            yield from self.value.lines(self.name, self.labels)
        elif isinstance(self.value, Mapping):
            for more, count in self.value.items():
                yield f"{self.name}{_braced(self.labels, more)} {count}"
        else:
            yield f"{self.name}{_braced(self.labels)} {self.value!r}"


@dataclass
class _Live:
    """What is remembered of a request between its events. Times in ps; `number`: what steps call it."""

    number: int
    prompt_tokens: int
    shares_prompt: bool
    adapter: str
    admitted: int | None = None
    first: int | None = None
    last: int | None = None


def _seconds() -> Histogram:
    return Histogram(SECONDS)


@dataclass
class _Seen:
    """What the fold keeps beside the sums of `core.folds.Totals`. Times in seconds, of the engine's clock.

    Attributes:
        prompt_tokens: prompt tokens of requests that reached their first token, cached ones included; the n choices of
            one prompt count it once.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache at first admission, and found.
        predicted: steps that were predicted.
        adapters: LoRA adapter -> choices that ended, their prompt tokens (once per prompt), and tokens generated.
        billed: ps of the machine by tenant, of choices that ended.
        recent_ratio, recent_error: measured / predicted of steps and its distance from 1, over about the last `RECENT`.
        regime: which fit of the profile predicts. outside: recent steps have left the profile's range.
    """

    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    disk: Counter[str] = field(default_factory=Counter)  # what moved between the cache and its second tier
    disk_seconds: float = 0.0
    pool: Counter[str] = field(default_factory=Counter)  # what came from other engines, and went to them
    pool_seconds: float = 0.0
    predicted: int = 0
    recent_ratio: float = 1.0
    recent_error: float = 0.0
    regime: int = 0
    outside: bool = False
    adapters: dict[str, list[int]] = field(default_factory=dict)
    billed: dict[str, int] = field(default_factory=dict)
    ttft: Histogram = field(default_factory=_seconds)
    itl: Histogram = field(default_factory=_seconds)
    e2e: Histogram = field(default_factory=_seconds)
    queue: Histogram = field(default_factory=_seconds)
    prefill: Histogram = field(default_factory=_seconds)
    decode: Histogram = field(default_factory=_seconds)
    host: Histogram = field(default_factory=lambda: Histogram(HOST))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))


class Metrics:
    """The fold over an engine's events.

    Args:
        model: value of the `model_name` label.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.totals = Totals()
        self._seen = _Seen()
        self._live: dict[str, _Live] = {}
        self._by_number: dict[int, _Live] = {}
        self._ended: list[int] = []  # in the step whose StepDone, which still names them, is to come
        self._folds: dict[type, Callable[[Any], None]] = {
            events.Queued: self._queued,
            events.Admitted: self._admitted,
            events.FirstToken: self._first_token,
            events.Finished: self._finished,
            events.StepDone: self._step,
            events.Regime: self._regime,
            events.BlocksAwaited: self._loading,
            events.BlocksLoaded: self._loaded,
            events.BlocksSaved: self._saved,
            events.BlocksSent: self._sent,
            Receipt: self._bill,
        }

    def fold(self, event: events.AnyEvent | Receipt) -> None:
        if isinstance(event, events.Event):
            self.totals(event)
        handler = self._folds.get(type(event))
        if handler is not None:  # of the others only the sums matter
            handler(event)

    def _queued(self, event: events.Queued) -> None:
        adapter = event.adapter.rpartition("@")[0]  # without the digest of what it adds
        live = _Live(event.number, event.prompt_tokens, event.parent is not None, adapter)
        self._live[event.id] = self._by_number[event.number] = live

    def _admitted(self, event: events.Admitted) -> None:
        live = self._live[event.id]
        if live.admitted is None:
            live.admitted = event.now
            self._seen.queue.observe(to_seconds(event.waited))
            if not live.shares_prompt:
                self._seen.prefix_queries += live.prompt_tokens
                self._seen.prefix_hits += event.cached

    def _first_token(self, event: events.FirstToken) -> None:
        live = self._live[event.id]
        live.first = event.now
        self._seen.ttft.observe(to_seconds(event.waited))
        if live.admitted is not None:
            self._seen.prefill.observe(to_seconds(event.now - live.admitted))
        if not live.shares_prompt:
            self._seen.prompt_tokens += live.prompt_tokens
            self._seen.prompt_lengths.observe(live.prompt_tokens)

    def _finished(self, event: events.Finished) -> None:
        live = self._live.pop(event.id)
        self._ended.append(live.number)
        self._seen.e2e.observe(to_seconds(event.lived))
        self._seen.output_lengths.observe(event.generated)
        if live.adapter:
            sums = self._seen.adapters.setdefault(live.adapter, [0, 0, 0])
            for place, more in enumerate((1, 0 if live.shares_prompt else live.prompt_tokens, event.generated)):
                sums[place] += more
        if live.first is not None:
            self._seen.decode.observe(to_seconds(event.now - live.first))

    def _step(self, event: events.StepDone) -> None:
        self._seen.host.observe(event.seconds.outside / event.steps, event.steps)
        if event.predicted:
            self._compare(event.seconds.executor / event.predicted, event.steps)
        self._gaps(event)
        for number in self._ended:
            del self._by_number[number]
        self._ended.clear()

    def _regime(self, event: events.Regime) -> None:
        self._seen.regime, self._seen.outside = event.regime, not event.inside

    def _loading(self, event: events.BlocksAwaited) -> None:
        if event.remote:
            self._seen.pool["transfers"] += 1
        else:
            self._seen.disk["hits"] += 1

    def _loaded(self, event: events.BlocksLoaded) -> None:
        if event.remote:
            came = {"bytes": event.bytes, "blocks": len(event.blocks), "failures": int(event.failed)}
            self._seen.pool.update(came | {"recomputed": event.recomputed})
            self._seen.pool_seconds += event.seconds
            return
        moved = {"loaded": len(event.blocks), "loaded_bytes": event.bytes, "load_failures": int(event.failed)}
        self._seen.disk.update(moved)
        self._seen.disk_seconds += event.seconds

    def _saved(self, event: events.BlocksSaved) -> None:
        moved = {"saved": event.blocks, "saved_bytes": event.bytes, "dropped": event.dropped, "failed": event.failed}
        self._seen.disk.update(moved)

    def _sent(self, event: events.BlocksSent) -> None:
        sent = {"sent": 1, "sent_blocks": event.blocks, "sent_bytes": event.bytes, "send_failures": bool(event.problem)}
        self._seen.pool.update({name: int(value) for name, value in sent.items()})

    def _compare(self, ratio: float, steps: int) -> None:
        """A step took `ratio` times what was predicted. Weights fall off exponentially; at first it is a plain mean."""
        seen = self._seen
        seen.predicted += steps
        share = min(1.0, steps * max(1 / RECENT, 1 / seen.predicted))
        seen.recent_ratio += share * (ratio - seen.recent_ratio)
        seen.recent_error += share * (abs(ratio - 1) - seen.recent_error)

    def _gaps(self, event: events.StepDone) -> None:
        """Time between tokens: of a step's tokens all but the first have gap 0, as a client sees it. Rows of a step
        mostly share the step before it, so that one gap is counted for all of them."""
        before: dict[int, int] = {}
        together = 0
        for number, emitted in zip(event.rows, event.emitted, strict=True):
            if not emitted:
                continue
            live = self._by_number[number]
            if live.last is not None:
                before[live.last] = before.get(live.last, 0) + 1
            together += emitted - 1
            live.last = event.now
        for last, rows in before.items():
            self._seen.itl.observe(to_seconds(event.now - last), rows)
        if together:
            self._seen.itl.observe(0.0, together)

    def _bill(self, receipt: Receipt) -> None:
        self._seen.billed[receipt.tenant] = self._seen.billed.get(receipt.tenant, 0) + receipt.billed

    def series(self, status: Status) -> Iterator[Series]:
        """What is known of the engine.

        Args:
            status: its KV cache now.
        """
        label = f'model_name="{escape(self.model)}"'
        for name, kind, text, value in self._values(status):
            yield Series(f"headway:{name}", kind, text, label, value)
            if name in VLLM_NAMES:
                yield Series(f"vllm:{VLLM_NAMES[name]}", kind, text, label, value)
        info = f'{label},block_size="{status.block_size}",num_gpu_blocks="{status.blocks}",num_cpu_blocks="0"'
        yield Series("vllm:cache_config_info", "gauge", "The KV cache.", info, 1)

    def _pool(self) -> Iterator[tuple[str, str, str, Any]]:
        """Blocks that came from other engines, and went to them."""
        pool, counter = self._seen.pool, "counter"
        for name, text in (
            ("transfers", "Prompts whose blocks were to come from another engine."),
            ("blocks", "Blocks that came."),
            ("bytes", "Bytes of them."),
            ("failures", "Prompts of which not all came."),
            ("recomputed", "Prompt tokens that did not come, and were computed here."),
            ("sent", "Prompts that another engine asked for."),
            ("sent_blocks", "Blocks that went to it."),
            ("sent_bytes", "Bytes of them."),
            ("send_failures", "Prompts of which not all went."),
        ):
            suffix = "_tokens" if name == "recomputed" else ""
            yield f"kv_transfer_{name}{suffix}_total", counter, text, pool[name]
        yield "kv_transfer_seconds_total", counter, "From asking to the last block that came.", self._seen.pool_seconds

    def _disk(self, status: Status) -> Iterator[tuple[str, str, str, Any]]:
        """The same of the cache's second tier."""
        disk = self._seen.disk
        yield "kv_disk_blocks", "gauge", "Blocks on disk.", status.disk_blocks
        yield "kv_disk_bytes", "gauge", "Bytes in the folder, of other models too.", status.disk_bytes
        yield "kv_disk_limit_bytes", "gauge", "Most bytes in the folder.", status.disk_limit
        yield "kv_disk_hits_total", "counter", "Requests whose prompts went on on disk.", disk["hits"]
        yield "kv_disk_loaded_blocks_total", "counter", "Blocks read back into the cache.", disk["loaded"]
        yield "kv_disk_loaded_bytes_total", "counter", "Bytes of them.", disk["loaded_bytes"]
        yield "kv_disk_load_seconds_total", "counter", "Time spent reading them.", self._seen.disk_seconds
        yield "kv_disk_load_failures_total", "counter", "Blocks that were missing or damaged.", disk["load_failures"]
        yield "kv_disk_saved_blocks_total", "counter", "Evicted blocks that went to disk.", disk["saved"]
        yield "kv_disk_saved_bytes_total", "counter", "Bytes of them.", disk["saved_bytes"]
        lost = {f'reason="{why}"': disk[why] for why in ("dropped", "failed")}
        yield "kv_disk_lost_blocks_total", "counter", "Evicted blocks without room to wait, or not written.", lost

    def _values(self, status: Status) -> Iterator[tuple[str, str, str, Any]]:
        """(name, kind, help, value)."""
        t, seen = self.totals, self._seen
        use = status.used / status.blocks if status.blocks else 0.0
        reasons = {f'finished_reason="{reason}"': t.finished[reason] for reason in REASONS}
        refused = {f'reason="{escape(reason)}"': count for reason, count in t.refused.items()}
        blocked = {f'reason="{reason}"': count for reason, count in t.blocked.items()}
        billed = {f'key="{escape(tenant)}"': to_seconds(time) for tenant, time in seen.billed.items()}
        counter, gauge, histogram = "counter", "gauge", "histogram"
        for place, (name, what) in enumerate(ADAPTER_SERIES.items() if seen.adapters else ()):
            sums = {f'adapter="{escape(adapter)}"': counts[place] for adapter, counts in seen.adapters.items()}
            yield name, counter, f"{what}, by LoRA adapter.", sums
        yield "requests_running", gauge, "Requests that hold cache blocks.", t.running
        yield "requests_waiting", gauge, "Requests that wait for blocks.", t.waiting
        yield "waiting_steps_total", counter, "Steps that left the first waiting request waiting, by reason.", blocked
        yield "predicted_wait_seconds", gauge, "How long a request that came now would wait.", status.wait
        yield "kv_cache_usage", gauge, "Share of cache blocks owned by requests.", use
        yield "kv_blocks", gauge, "Blocks of the KV cache.", status.blocks
        yield "kv_blocks_used", gauge, "Blocks owned by requests.", status.used
        yield "kv_blocks_cached", gauge, "Free blocks that hold a reusable prefix.", status.cached
        yield "prompt_tokens_total", counter, "Prompt tokens prefilled, cached ones included.", seen.prompt_tokens
        yield "generation_tokens_total", counter, "Tokens generated.", t.emitted_tokens
        yield "prefix_cache_queries_total", counter, "Prompt tokens looked up.", seen.prefix_queries
        yield "prefix_cache_hits_total", counter, "Prompt tokens found in the cache.", seen.prefix_hits
        if status.disk_limit:
            yield from self._disk(status)
        if self._seen.pool:
            yield from self._pool()
        yield "preemptions_total", counter, "Requests whose blocks were taken back.", t.preemptions
        yield "preempted_tokens_total", counter, "Computed tokens lost by preemption.", t.wasted_tokens
        yield "proposed_tokens_total", counter, "Draft tokens proposed, verified or not.", t.proposed_tokens
        yield "draft_tokens_total", counter, "Draft tokens verified.", t.drafted_tokens
        yield "accepted_tokens_total", counter, "Draft tokens accepted.", t.accepted_tokens
        yield "draft_steps_total", counter, "Steps that verified drafts.", t.drafted_steps
        yield "draft_step_seconds_total", counter, "Time spent in them.", t.drafted_seconds
        undrafted = "Time that their tokens would have taken without drafts, as predicted."
        yield "draft_step_seconds_without_total", counter, undrafted, t.undrafted_seconds
        yield "requests_total", counter, "Requests (choices) the engine accepted.", t.queued
        yield "requests_finished_total", counter, "Requests that ended, by reason.", reasons
        yield "requests_refused_total", counter, "Requests the scheduler refused.", refused
        yield "steps_total", counter, "Engine steps.", t.steps
        yield "executor_resets_total", counter, "Steps in which the executor broke.", t.executor_resets
        yield "event_log_lost_total", counter, "Events that the event log could not take.", status.events_lost
        yield "step_seconds_total", counter, "Time spent in steps.", t.busy
        yield "step_predicted_steps_total", counter, "Steps the step-time model predicted.", t.predicted_steps
        yield "step_predicted_seconds_total", counter, "Time the model predicted for them.", t.predicted_seconds
        yield "step_prediction_error_seconds_total", counter, "Sum of absolute errors.", t.prediction_error
        yield "billed_seconds_total", counter, "Time of the machine on receipts, by (the digest of) the key.", billed
        yield "idle_seconds_total", counter, "Time between steps.", to_seconds(t.idle)
        if seen.predicted:
            yield "step_time_ratio", gauge, "Measured over predicted step time, recent steps.", seen.recent_ratio
            yield "step_time_regime", gauge, "Which fit of the machine's profile predicts steps.", seen.regime
            outside = "1: recent steps have left the range of the machine's profile."
            yield "step_times_outside_profile", gauge, outside, int(seen.outside)
            yield "step_time_error", gauge, "Mean of |ratio - 1| over recent steps.", seen.recent_error
        yield "time_to_first_token_seconds", histogram, "From arrival; queue included.", seen.ttft
        yield "inter_token_latency_seconds", histogram, "Between tokens of a request.", seen.itl
        yield "request_latency_seconds", histogram, "From arrival to the end.", seen.e2e
        yield "request_queue_seconds", histogram, "From arrival to blocks.", seen.queue
        yield "request_prefill_seconds", histogram, "From blocks to first token.", seen.prefill
        yield "request_decode_seconds", histogram, "From first token to the end.", seen.decode
        yield "request_prompt_tokens", histogram, "Prompt length.", seen.prompt_lengths
        yield "request_generation_tokens", histogram, "Output length.", seen.output_lengths
        yield "step_host_seconds", histogram, "Of a step, all but the forward pass.", seen.host


class ServerMetrics:
    """The fold over what the server itself does.

    Args:
        model: value of the `model_name` label; "" = none, as of a server with several.
    """

    def __init__(self, model: str) -> None:
        self._label = f'model_name="{escape(model)}"' if model else ""
        self._http: dict[tuple[str, int], int] = {}
        self._lag = Histogram(LAGS)

    def fold(self, event: HttpDone | LoopLag) -> None:
        if isinstance(event, LoopLag):
            self._lag.observe(event.seconds)
        else:
            key = (event.route, event.status)
            self._http[key] = self._http.get(key, 0) + 1

    def series(self) -> Iterator[Series]:
        counts = {f'route="{escape(route)}",status="{status}"': n for (route, status), n in self._http.items()}
        yield Series("headway:http_requests_total", "counter", "HTTP requests answered.", self._label, counts)
        about = "How late the API's event loop wakes."
        yield Series("headway:event_loop_lag_seconds", "histogram", about, self._label, self._lag)


def gauges(model: str, values: Mapping[str, float]) -> Iterator[Series]:
    """Further values of a model, by name without prefix (`up`, ...)."""
    for name, value in values.items():
        yield Series(f"headway:{name}", "gauge", "", f'model_name="{escape(model)}"', value)


def render(series: Iterable[Series]) -> str:
    """The text Prometheus scrapes. Series of one name come together, as its format wants them."""
    named: dict[str, list[Series]] = {}
    for one in series:
        named.setdefault(one.name, []).append(one)
    lines: list[str] = []
    for name, (first, *rest) in named.items():
        lines += [*([f"# HELP {name} {first.text}"] if first.text else []), f"# TYPE {name} {first.kind}"]
        for one in (first, *rest):
            lines += one.lines()
    return "\n".join([*lines, ""])


def _braced(*labels: str) -> str:
    given = ",".join(filter(None, labels))
    return f"{{{given}}}" if given else ""


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else repr(value)


def escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
