"""From records to the numbers of a run.

Latencies are reported twice: over what was measured, and with every failed request as infinite. The first says how fast
the endpoint is when it works; only the second may be compared between endpoints that fail differently often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.core.errors import BadInput
from headway.core.slo import parse_slo
from headway.metrics.records import NS_PER_S, TOKEN_KINDS, FailureKind, RequestRecord
from headway.metrics.run import Run
from headway.metrics.stats import CONFIDENCE, METHOD, Ordered, describe, requests_to_prove, share_interval, tail


@dataclass(frozen=True)
class Targets:
    """Service-level objectives of one request, ms; None = no target. `attainment`: share that must meet all of them."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    attainment: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.attainment < 1:
            raise BadInput("--attainment", f"{self.attainment!r} is not a share between 0 and 1")
        for name, limit in self.limits.items():
            if not limit > 0:
                raise BadInput("--slo", f"{name} = {limit!r} is not a time above 0")

    @classmethod
    def parse(cls, text: str, attainment: float) -> Targets:
        """From "ttft=1s,tpot=50ms,e2e=20s"."""
        return cls(**{f"{name}_ms": 1e3 * seconds for name, seconds in parse_slo(text).items()}, attainment=attainment)

    @property
    def limits(self) -> dict[str, float]:
        named = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: limit for name, limit in named.items() if limit is not None}

    def met_by(self, record: RequestRecord) -> bool:
        """All targets met. A failed request meets none; an answer of one token has no gap that could be too long."""
        if not record.completed:
            return False
        measured = {"ttft": record.ttft_ms, "tpot": record.tpot_ms, "e2e": record.e2e_ms}
        for name, limit in self.limits.items():
            value = measured[name]
            if value is None and not (name == "tpot" and record.output_tokens == 1):
                return False
            if value is not None and value > limit:
                return False
        return True


def summarize(run: Run, targets: Targets | None = None) -> dict[str, Any]:
    """The metrics of a run, as the JSON contract names them (docs/bench.md)."""
    records = [record for record in run.records if not record.warmup]
    done = [record for record in records if record.completed]
    failed = [record for record in records if not record.completed]
    found: dict[str, Any] = {
        "requests": {
            "total": len(records),
            "completed": len(done),
            "failed": len(failed),
            "warmup": len(run.records) - len(records),
        },
        "percentiles": {"method": METHOD, "confidence": CONFIDENCE},
        **latencies(records),
        "throughput": throughput(records),
        "cached_tokens": cached(records),
        "answers": answers(records),
        "failures": dict(Counter(_kind(record).value for record in failed)),
        "failure_messages": messages(failed),
        "load": delivered(run),
    }
    if run.gave_up:
        found["stopped_early"] = run.gave_up
    if targets is not None and targets.limits:
        found["slo"] = attainment(records, targets)
    return found


def latencies(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Every latency metric, and the tails with failures as infinite.

    A request that failed after its first token keeps its time to first token and its gaps: they were measured. End to
    end and time per output token need the whole answer.
    """
    done = [record for record in records if record.completed]
    failed = len(records) - len(done)
    nothing = "no request was completed" if records else "no request was sent"
    no_output = nothing
    if done and not any(record.usage_trusted for record in done):
        no_output = "the endpoint reported no output tokens (usage)"
    elif done:
        no_output = "no answer had two tokens"
    per_request: dict[str, tuple[Callable[[RequestRecord], float | None], Sequence[RequestRecord], str]] = {
        "ttft_ms": (lambda record: record.ttft_ms, records, "no token arrived"),
        "ttfa_ms": (lambda record: record.ttfa_ms, records, "no token of an answer arrived"),
        "e2e_ms": (lambda record: record.e2e_ms, done, nothing),
        "e2e_done_ms": (lambda record: record.e2e_done_ms, done, "no stream had an end mark" if done else nothing),
    }
    found: dict[str, Any] = {}
    tails: dict[str, Any] = {}
    for name, (read, source, empty) in per_request.items():
        known = Ordered(_known(read, source))
        found[name] = describe(known, empty)
        tails[name] = tail(known if len(source) == len(done) else Ordered(_known(read, done)), failed)
    tpot, chunk_gaps, token_gaps, counts = list[float](), list[float](), list[float](), list[int]()
    for record in records:
        pace = record.pace()
        chunk_gaps += pace.chunk_gaps_ms
        if not record.completed:
            continue
        if (mean := pace.tpot_ms) is not None:
            tpot.append(mean)
        for gap, tokens in pace.token_gaps_ms():
            token_gaps.append(gap)
            counts.append(tokens)
    known = Ordered(tpot)
    found["tpot_ms"], tails["tpot_ms"] = describe(known, no_output), tail(known, failed)
    per_token = Ordered(token_gaps, counts)
    found["itl_chunk_ms"] = describe(chunk_gaps, "no stream had two chunks", independent=False)
    found["itl_token_ms"] = describe(per_token, no_output, independent=False)
    found["tails_with_failures"] = tails
    return found


def _known(read: Callable[[RequestRecord], float | None], records: Sequence[RequestRecord]) -> list[float]:
    return [value for record in records if (value := read(record)) is not None]


def window_seconds(records: Sequence[RequestRecord]) -> float:
    """From the first intended start to the last token: the measured window."""
    starts = [record.intended for record in records if record.sent]
    ends = [last for record in records if (last := record.last(TOKEN_KINDS)) is not None]
    return (max(ends) - min(starts)) / NS_PER_S if starts and ends else 0.0


def throughput(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Tokens per second of the measured window, by trusted usage of completed requests; null without any."""
    seconds = window_seconds(records)
    counted = [record for record in records if record.completed and record.usage_trusted]
    output = sum(record.output_tokens or 0 for record in counted)
    inputs = sum(record.prompt_tokens or 0 for record in counted)
    done = sum(record.completed for record in records)
    known = seconds > 0 and bool(counted)
    reason = None
    if not known:
        reason = "no request was completed" if not done else "the endpoint reported no output tokens (usage)"
    elif len(counted) < len(records):
        left_out = len(records) - len(counted)
        reason = f"{left_out} of {len(records)} requests failed or have no token count, and count for nothing"
    return {
        "output": output / seconds if known else None,
        "input": inputs / seconds if known else None,
        "total": (output + inputs) / seconds if known else None,
        "unit": "tokens/s",
        "requests": done / seconds if seconds > 0 else None,
        "output_tokens": output,
        "input_tokens": inputs,
        "reasoning_tokens": sum(record.reasoning_tokens or 0 for record in counted),
        "window_s": seconds,
        "reason": reason,
    }


def cached(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Prompt tokens the endpoint says it read from its cache, in all and as a share."""
    reported = [record for record in records if record.completed and record.cached_tokens is not None]
    total = sum(record.cached_tokens or 0 for record in reported)
    prompt = sum(record.prompt_tokens or 0 for record in reported)
    return {
        "total": total if reported else None,
        "share": total / prompt if reported and prompt else None,
        "requests_with_hits": sum(bool(record.cached_tokens) for record in reported),
        "reason": None if reported else "the endpoint does not report cached tokens",
    }


def answers(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Lengths of the answers beside those asked for; `short`: how many ended before, and their `finish_reasons`."""
    counted = [record for record in records if record.completed and record.usage_trusted]
    short = [record for record in counted if (record.output_tokens or 0) < record.max_tokens]
    return {
        "counted": len(counted),
        "asked": float(np.mean([record.max_tokens for record in counted])) if counted else None,
        "mean": float(np.mean([record.output_tokens or 0 for record in counted])) if counted else None,
        "short": len(short),
        "finish_reasons": dict(Counter(record.finish_reason for record in short if record.finish_reason)),
    }


def attainment(records: Sequence[RequestRecord], targets: Targets) -> dict[str, Any]:
    """Share of requests, failed ones included, that met all targets, with its exact interval."""
    good = sum(targets.met_by(record) for record in records)
    low, high = share_interval(good, len(records)) if records else (0.0, 1.0)
    return {
        "targets_ms": targets.limits,
        "attainment_target": targets.attainment,
        "attainment": good / len(records) if records else None,
        "ci95": [low, high],
        "good": good,
        "requests": len(records),
        "held": low >= targets.attainment,
        "needed": requests_to_prove(good, len(records), targets.attainment),
    }


def delivered(run: Run) -> dict[str, Any]:
    """Was the load delivered as intended? Rates over intended and real starts, and how late the starts were."""
    records = [record for record in run.records if record.sent]
    late = [(record.sent - record.intended) / 1e6 for record in records]
    found: dict[str, Any] = {"kind": run.load.kind, "nominal_rate": run.load.rate if run.load.open else None}
    if not run.load.open:
        return found | {"concurrency": run.load.concurrency, "sent": len(records)}
    intended, real = _rate([r.intended for r in records]), _rate([r.sent for r in records])
    return found | {
        "intended_rate": intended,
        "delivered_rate": real,
        "late_ms": {"p50": float(np.median(late)), "max": max(late)} if late else None,
        "sent": len(records),
        "delivered": bool(late)
        and len(records) == len(run.records)
        and (real is None or abs(real / (intended or real) - 1) < 0.05),
    }


def _rate(starts: list[int]) -> float | None:
    span = (max(starts) - min(starts)) / NS_PER_S if starts else 0.0
    return (len(starts) - 1) / span if span > 0 else None


def messages(failed: Sequence[RequestRecord]) -> dict[str, str]:
    """One sentence per kind of failure: the first that happened."""
    found: dict[str, str] = {}
    for record in failed:
        if record.failure is not None:
            found.setdefault(record.failure.kind.value, record.failure.message)
    return found


def _kind(record: RequestRecord) -> FailureKind:
    return record.failure.kind if record.failure is not None else FailureKind.NOT_SENT
