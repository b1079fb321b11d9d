"""One run under the definitions of four other tools, so that numbers can be compared with what they print.

Each tool counts from when the request was sent (ours from the intended start), over completed requests only, and never
refuses a percentile. What differs beside that:

* vLLM `bench serve` (May 2026): the first chunk with `choices` is the first token, an empty role chunk included; on the
  chat route the usage chunk ends the request; ITL is one gap per chunk, the finish chunk included.
* SGLang `bench_serving` (July 2026), OpenAI chat backend: first chunk with text; [DONE] ends the request.
* GuideLLM 0.8: "TPOT" = (last token - start) / tokens, so it includes the time to first token; ITL is per request,
  weighted by its tokens; percentiles are steps of the cumulative distribution, without interpolation.
* AIPerf 0.13: the last chunk with text ends the request; ITL is per request; ICL (inter chunk latency) per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from headway.core.errors import BadInput
from headway.metrics.records import ANSWER_KINDS, NS_PER_MS, NS_PER_S, TOKEN_KINDS, Kind, RequestRecord
from headway.metrics.run import Run
from headway.metrics.stats import inverse_cdf

CHOICES = TOKEN_KINDS | {Kind.ROLE, Kind.FINISH}  # what comes in `choices`
ALL = frozenset(Kind)


def view(tool: str, run: Run, api: str) -> dict[str, Any]:
    """The run's metrics with the tool's names and definitions.

    Raises:
        BadInput: no such tool.
    """
    if tool not in VIEWS:
        raise BadInput("--as", f"{tool!r} is not one of {', '.join(VIEWS)}")
    records = [r for r in run.records if r.completed and not r.warmup and r.first(TOKEN_KINDS) is not None]
    return {"tool": tool, **VIEWS[tool](records, api)}


def _vllm(records: Sequence[RequestRecord], api: str) -> dict[str, Any]:
    closing = CHOICES if api == "completions" else ALL - {Kind.DONE}
    ttft = [_ms(r, r.first(CHOICES)) for r in records]
    latency = [_ms(r, r.last(closing)) for r in records]
    itl = [gap for r in records for gap in _gaps(r, CHOICES)]
    return {
        **_flat("ttft", ttft, (99,)),
        **_flat("tpot", _per_output_token(records, ttft, latency), (99,)),
        **_flat("itl", itl, (99,)),
        **_flat("e2el", latency, (99,)),
        **_rates(records, "request_throughput", "output_throughput", "total_token_throughput"),
    }


def _sglang(records: Sequence[RequestRecord], api: str) -> dict[str, Any]:
    ttft = [_ms(r, r.first(TOKEN_KINDS)) for r in records]
    latency = [_ms(r, r.last(ALL)) for r in records]
    itl = [gap for r in records for gap in r.chunk_gaps_ms()]
    return {
        **_flat("ttft", ttft, (99,)),
        **_flat("tpot", _per_output_token(records, ttft, latency), (99,)),
        **_flat("itl", itl, (95, 99)),
        **_flat("e2e_latency", latency, (90, 99)),
        **_rates(records, "request_throughput", "output_throughput", "total_throughput"),
    }


def _guidellm(records: Sequence[RequestRecord], api: str) -> dict[str, Any]:
    last = [_ms(r, r.last(TOKEN_KINDS)) for r in records]
    ttft = [_ms(r, r.first(TOKEN_KINDS)) for r in records]
    answer = [_ms(r, at) for r in records if (at := r.first(ANSWER_KINDS)) is not None]
    counts = [r.output_tokens or 0 for r in records]
    tpot = [value for end, n in zip(last, counts, strict=True) for value in [end / max(n, 1)] * n]
    itl = [
        value
        for first, end, n in zip(ttft, last, counts, strict=True)
        if n > 1
        for value in [(end - first) / (n - 1)] * (n - 1)
    ]
    latency = [(r.ended - r.sent) / NS_PER_S for r in records]
    return {
        "time_to_first_token_ms": _steps(ttft),
        "time_to_first_output_token_ms": _steps(answer),
        "time_per_output_token_ms": _steps(tpot),
        "inter_token_latency_ms": _steps(itl),
        "request_latency": _steps(latency),
        **_rates(records, "requests_per_second", "output_tokens_per_second", "tokens_per_second"),
    }


def _aiperf(records: Sequence[RequestRecord], api: str) -> dict[str, Any]:
    ttft = [_ms(r, r.first(TOKEN_KINDS)) for r in records]
    latency = [_ms(r, r.last(TOKEN_KINDS)) for r in records]
    output = [_ms(r, at) for r in records if (at := r.first(ANSWER_KINDS)) is not None]
    itl = []
    for r, first, end in zip(records, ttft, latency, strict=True):
        in_first = max(1, r.token_events()[0][1])  # told only where usage comes with every chunk
        if (r.output_tokens or 0) > in_first:
            itl.append((end - first) / ((r.output_tokens or 0) - in_first))
    return {
        "time_to_first_token": _linear(ttft),
        "time_to_second_token": _linear([gaps[0] for r in records if (gaps := r.chunk_gaps_ms())]),
        "time_to_first_output_token": _linear(output),
        "inter_token_latency": _linear(itl),
        "inter_chunk_latency": _linear([gap for r in records for gap in r.chunk_gaps_ms()]),
        "request_latency": _linear(latency),
        **_rates(records, "request_throughput", "output_token_throughput", "total_token_throughput"),
    }


VIEWS: dict[str, Callable[[Sequence[RequestRecord], str], dict[str, Any]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "guidellm": _guidellm,
    "aiperf": _aiperf,
}


def _ms(record: RequestRecord, at: int | None) -> float:
    assert at is not None
    return (at - record.sent) / NS_PER_MS


def _gaps(record: RequestRecord, kinds: frozenset[Kind]) -> list[float]:
    times = list({chunk.event: chunk.at for chunk in record.chunks if chunk.kind in kinds}.values())
    return [(late - early) / NS_PER_MS for early, late in pairwise(times)]


def _per_output_token(records: Sequence[RequestRecord], ttft: list[float], latency: list[float]) -> list[float]:
    counts = [r.output_tokens or 0 for r in records]
    return [(end - first) / (n - 1) for first, end, n in zip(ttft, latency, counts, strict=True) if n > 1]


def _flat(name: str, values: Sequence[float], percentiles: tuple[int, ...]) -> dict[str, float | None]:
    found: dict[str, float | None] = {f"mean_{name}_ms": float(np.mean(values)) if values else None}
    found[f"median_{name}_ms"] = float(np.median(values)) if values else None
    for p in percentiles:
        found[f"p{p}_{name}_ms"] = float(np.percentile(values, p)) if values else None
    return found


def _linear(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"avg": None}
    found: dict[str, float | None] = {"avg": float(np.mean(values)), "min": min(values), "max": max(values)}
    return found | {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 95, 99)}


def _steps(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None}
    found: dict[str, float | None] = {"mean": float(np.mean(values)), "median": inverse_cdf(values, 0.5)}
    return found | {f"p{p}": inverse_cdf(values, p / 100) for p in (90, 95, 99)}


def _rates(records: Sequence[RequestRecord], requests: str, output: str, total: str) -> dict[str, float | None]:
    """Per second of the whole benchmark: from the first request sent to the last one ended."""
    if not records:
        return {requests: None, output: None, total: None}
    seconds = (max(r.ended for r in records) - min(r.sent for r in records)) / NS_PER_S
    out = sum(r.output_tokens or 0 for r in records)
    everything = out + sum(r.prompt_tokens or 0 for r in records)
    return {requests: len(records) / seconds, output: out / seconds, total: everything / seconds}
