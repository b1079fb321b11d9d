"""An exercise: how do TTFT and TPOT depend on the length of the prompt, and what does sending the longest one twice
change?
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.bench.client import BenchClient, Endpoint, Timeouts
from headway.bench.load import Progress
from headway.bench.measure import first_contact
from headway.bench.workload import Prompts
from headway.core.errors import BadInput, HeadwayError
from headway.metrics.records import RequestRecord
from headway.metrics.summary import messages
from headway.report.document import Document, Grid, Part, Text
from headway.report.figures import DECODE, WAITS, new_figures, save_figure

MAX_SIZE = 10_000_000


def parse_sizes(text: str) -> list[int]:
    """From "50,500,5000"."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or any(not 0 < size <= MAX_SIZE for size in sizes):
        raise BadInput("--sizes", f"{text!r} is not a list of token counts such as 50,500,5000")
    return sizes


async def run(
    endpoint: Endpoint,
    limits: Timeouts,
    sizes: Sequence[int],
    times: int,
    output_tokens: int,
    seed: int,
    announce: Callable[[str], None],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Send each size `times` times, one after the other and never the same prompt twice; then the largest one twice."""
    for name, value in (("--times", times), ("--output-tokens", output_tokens)):
        if value < 1:
            raise BadInput(name, f"{value} is not an integer >= 1")
    async with BenchClient(endpoint, limits) as client:
        contact = await first_contact(client, seed)
        if contact.dead is not None:
            raise HeadwayError(contact.dead.message)
        prompts = Prompts(contact.measure, seed)
        rows: list[dict[str, Any]] = []
        sent: list[RequestRecord] = []

        async def send(prompt: str, size: int) -> RequestRecord:
            if progress is not None:
                progress(sent, 1, len(sizes) * times + 2)
            sent.append(await _send(client, prompt, size, output_tokens))
            return sent[-1]

        for size in sizes:
            records = [await send(prompts.unique(len(sent), size), size) for _ in range(times)]
            rows.append(_row(size, records))
            announce(f"{size} tokens: TTFT {_shown(rows[-1]['ttft_ms'])} ms, TPOT {_shown(rows[-1]['tpot_ms'])} ms")
        twice = prompts.unique(len(sent), max(sizes))
        pair = [await send(twice, max(sizes)) for _ in range(2)]
    found: dict[str, Any] = {"url": endpoint.url, "model": client.model, "seed": seed, "lengths": rows}
    found["twice"] = _twice(pair)
    failed = messages([record for record in [*contact.records, *pair] if record.failure is not None])
    found["warnings"] = contact.warnings + list(failed.values())
    return found


async def _send(client: BenchClient, prompt: str, size: int, output_tokens: int) -> RequestRecord:
    record = RequestRecord(
        index=0,
        intended=time.perf_counter_ns(),
        max_tokens=output_tokens,
        prompt_bytes=len(prompt.encode()),
        prompt_wanted=size,
    )
    await client.send(client.encode(prompt, output_tokens), record)
    return record


def _row(size: int, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Medians over the repetitions, and every single value for the plot."""
    done = [record for record in records if record.completed]
    ttft = [value for record in done if (value := record.ttft_ms) is not None]
    tpot = [value for record in done if (value := record.tpot_ms) is not None]
    counted = [record.prompt_tokens for record in done if record.prompt_tokens is not None]
    return {
        "wanted": size,
        "prompt_tokens": float(np.median(counted)) if counted else None,
        "completed": len(done),
        "ttft_ms": float(np.median(ttft)) if ttft else None,
        "tpot_ms": float(np.median(tpot)) if tpot else None,
        "ttft_all_ms": ttft,
        "tpot_all_ms": tpot,
        "failures": messages([record for record in records if record.failure is not None]),
    }


def _twice(pair: Sequence[RequestRecord]) -> dict[str, Any]:
    first, second = pair
    saved = None
    if first.ttft_ms is not None and second.ttft_ms is not None:
        saved = first.ttft_ms - second.ttft_ms
    return {
        "prompt_tokens": second.prompt_tokens,
        "ttft_ms": [first.ttft_ms, second.ttft_ms],
        "cached_tokens": [first.cached_tokens, second.cached_tokens],
        "saved_ms": saved,
    }


def document(found: dict[str, Any]) -> Document:
    """The exercise for a terminal."""
    rows = [
        [str(row["wanted"]), *(_shown(row[name]) for name in ("prompt_tokens", "ttft_ms", "tpot_ms")),
         str(row["completed"])]
        for row in found["lengths"]
    ]  # fmt: skip
    lines: list[Part] = [Grid(["wanted", "prompt tokens", "TTFT ms", "TPOT ms", "completed"], rows)]
    if twice := found["twice"]:
        first, second = (_shown(value) for value in twice["ttft_ms"])
        cached = " then ".join("not told" if value is None else str(value) for value in twice["cached_tokens"])
        lines.append(Text(f"the longest prompt twice: TTFT {first} then {second} ms, cached tokens {cached}"))
    lines.append(Text(f"seed: {found['seed']}"))
    lines += [Text(f"warning: {warning}", "warn") for warning in found["warnings"]]
    return Document(f"{found['model']} at {found['url']}", lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """TTFT and TPOT against prompt length, every repetition a point, medians joined."""
    figure, both = new_figures(2, 9, 3.8)
    for axes, name, label in zip(both, ("ttft", "tpot"), ("TTFT, ms", "TPOT, ms"), strict=True):
        rows = [row for row in found["lengths"] if row[f"{name}_ms"] is not None]
        sizes = [row["prompt_tokens"] or row["wanted"] for row in rows]
        axes.plot(sizes, [row[f"{name}_ms"] for row in rows], "-o", color=DECODE)
        for size, row in zip(sizes, rows, strict=True):
            axes.plot([size] * len(row[f"{name}_all_ms"]), row[f"{name}_all_ms"], ".", color=WAITS, zorder=0)
        axes.set(xlabel="prompt tokens", ylabel=label)
        if len(sizes) > 1:
            axes.set_xscale("log")
        axes.set_ylim(bottom=0)
    save_figure(figure, path)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
