"""What the simulator is good for, one experiment each: a plot, and a paragraph that says what is seen.

All play Llama-3.1-8B on one H100; the figures in the paragraphs are those of the run just made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headway.core.clock import to_ps
from headway.core.errors import BadInput
from headway.metrics.figures import Draw
from headway.report.document import Document, Drawing, Grid, Text
from headway.report.figures import COLOURS
from headway.roofline.hardware import find_hardware
from headway.roofline.step import decode_step
from headway.shape.catalogue import find_model
from headway.simulate.arrivals import Arrivals, Closed, Lengths, rows_of
from headway.simulate.deploy import Deployed, EngineSetup, deployed
from headway.simulate.play import Played, play
from headway.simulate.workload import Ask, made_up
from headway.traffic.load import Load

MODEL, DEVICE = "llama-3.1-8b", "h100-sxm"
CHAT = Lengths(input_tokens=400, output_tokens=150, input_cv=1.0, output_cv=1.0)
LONG = 100_000  # tokens of the long prompt


@dataclass(frozen=True)
class Lesson:
    """What was played: rows of a table under `head`, a plot, and what is seen."""

    title: str
    head: Sequence[str]
    rows: list[list[float | str]]
    seen: str
    draw: Draw

    def json(self) -> dict[str, Any]:
        return {"title": self.title, "rows": [dict(zip(self.head, row, strict=True)) for row in self.rows],
                "seen": self.seen}  # fmt: skip

    def document(self) -> Document:
        rows = [[cell if isinstance(cell, str) else f"{cell:,.4g}" for cell in row] for row in self.rows]
        return Document(self.title, [Grid(self.head, rows), Text(self.seen)], [Drawing(self.draw)])


def lesson(name: str) -> Lesson:
    """Play the experiment of this name.

    Raises:
        BadInput: there is none.
    """
    if name not in LESSONS:
        raise BadInput("NAME", f"{name!r} is not one of {', '.join(LESSONS)}")
    return LESSONS[name]()


def _deployed(**setup: Any) -> Deployed:
    chosen = {"prefix_cache": False, "max_model_len": 8192, **setup}
    return deployed(find_model(MODEL), find_hardware(DEVICE), 1, EngineSetup(**chosen))


def _chat(one: Deployed, rate: float, count: int = 200) -> Played:
    load = Load("poisson", rate)
    return play(one, Arrivals(rows_of(CHAT, count, 0), load), load)


def _lines(label: str, name: str, points: dict[str, list[tuple[float, float]]], up: str) -> Draw:
    def draw(axes: Any) -> None:
        for (legend, line), colour in zip(points.items(), COLOURS, strict=False):
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, color=colour, label=legend)
        axes.legend(fontsize="small")
        axes.set(xlabel=label, ylabel=up, title=name)

    return draw


def batching() -> Lesson:
    """Static against continuous batching."""
    rows: list[list[Any]] = []
    title = "Static against continuous batching"
    points: dict[str, list[tuple[float, float]]] = {}
    for policy in ("static", "chunked"):
        one = _deployed(policy=policy, max_rows=16)
        line = []
        for rate in (2.0, 4.0, 8.0):
            found = _chat(one, rate).summary
            ttft, out = found["ttft_ms"]["p90"], found["throughput"]["output"]
            rows.append([policy, rate, ttft, out])
            line.append((rate, ttft))
        points[policy] = line
    worst = rows[2][2] / rows[5][2]
    seen = (
        f"A static batch waits for its longest answer while seats are empty, and whoever arrives waits for the whole "
        f"batch: at 8 requests/s nine in ten have their first token within {rows[2][2]:,.0f} ms. Continuous batching "
        f"fills a seat in the very next step: {rows[5][2]:,.0f} ms, {worst:,.0f} times sooner, on the same machine."
    )
    head = ["policy", "requests/s", "TTFT p90, ms", "output tokens/s"]
    return Lesson(title, head, rows, seen, _lines("requests/s", title, points, "time to first token, p90, ms"))


def memory() -> Lesson:
    """Contiguous against paged memory."""
    rows: list[list[Any]] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for kind in ("contiguous", "paged"):
        played = _chat(_deployed(memory=kind, kv_cache_gib=12.0, policy="fcfs"), 60.0)
        s = played.summary
        held = [(a[1], b[1]) for a, b in zip(s["kv_use"]["series"], s["kv_filled"]["series"], strict=True) if a[1]]
        waste = 1 - sum(full for _, full in held) / sum(owned for owned, _ in held)
        running = max(count for _, count in s["running"]["series"])
        rows.append([kind, running, waste, s["ttft_ms"]["p90"], s["throughput"]["output"]])
        points[kind] = [(at, count) for at, count in s["running"]["series"]]
    gain = rows[1][1] / rows[0][1]
    seen = (
        f"Reserving the longest context for everyone wastes {rows[0][2]:.0%} of the memory that is handed out, because "
        f"most answers are short; blocks of 32 tokens waste {rows[1][2]:.0%}. The same 12 GiB hold {gain:.1f} times as "
        "many requests at once, and the queue in front of them is gone."
    )
    head = ["memory", "most running", "share wasted", "TTFT p90, ms", "output tokens/s"]
    title = "Contiguous against paged memory"
    return Lesson(title, head, rows, seen, _lines("seconds", title, points, "requests running"))


class _Visited:
    """Eight chats that stream, and a long prompt that comes when they have begun."""

    def first(self) -> Any:
        for number in range(8):
            yield Ask(number, 0, made_up(number, 300), 900)
        yield Ask(8, to_ps(1.0), made_up(8, LONG), 2)

    def then(self, ask: Ask, emission: Any, now: int) -> None:
        return None


def long_prompt() -> Lesson:
    """A prompt of 100k tokens arrives among running chats."""
    rows: list[list[Any]] = []
    points: dict[str, list[tuple[float, float]]] = {}
    setups: dict[str, dict[str, Any]] = {
        "whole": {"policy": "prefill-first", "max_step_tokens": LONG},
        "chunks of 2048": {"max_step_tokens": 2048}, "30 ms a step": {"max_step_tokens": 2048, "step_ms": 30.0},
    }  # fmt: skip
    for name, setup in setups.items():
        played = play(_deployed(max_model_len=131072, **setup), _Visited(), Load("trace"))
        chats = played.run.records[:8]
        gaps = [gap for record in chats for gap in record.chunk_gaps_ms()]
        rows.append([name, max(gaps), played.run.records[8].ttft_ms or 0.0])
        times = [at / 1e9 for at, _ in chats[0].token_events()]
        points[name] = [(b, 1e3 * (b - a)) for a, b in pairwise(times)]
    seen = (
        f"Computed whole, the prompt stops every stream for {rows[0][1] / 1e3:.1f} s. In chunks the worst gap is "
        f"{rows[1][1]:,.0f} ms, and with a bound on the milliseconds of a step {rows[2][1]:,.0f} ms: the chunks shrink "
        f"as attention to what came before grows. The prompt itself pays: its first token comes after "
        f"{rows[1][2] / 1e3:.1f} s, or {rows[2][2] / 1e3:.1f} s, rather than {rows[0][2] / 1e3:.1f} s."
    )
    head = ["the prompt is computed", "worst gap of a chat, ms", "its own TTFT, ms"]
    title = "A prompt of 100,000 tokens arrives"
    return Lesson(title, head, rows, seen, _lines("seconds", title, points, "gap between tokens of a chat, ms"))


def frontier() -> Lesson:
    """Batch against latency, beside the closed form."""
    one = _deployed()
    rows: list[list[Any]] = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        asked = rows_of(Lengths(input_tokens=256, output_tokens=128), 2 * batch, 0)
        s = play(one, Closed(asked, batch), Load("closed", concurrency=batch)).summary
        closed = 1e3 * one.model.predict(decode_step(one.priced.shape, batch, 256 + 64))
        rows.append([batch, s["tpot_ms"]["mean"], closed, s["throughput"]["output"]])
    points = {
        "simulated": [(r[3], r[1]) for r in rows],
        "decode steps alone": [(1e3 * r[0] / r[2], r[2]) for r in rows],
    }
    seen = (
        f"From 1 to 128 streams a token takes {rows[-1][1] / rows[0][1]:.1f} times as long, and the machine makes "
        f"{rows[-1][3] / rows[0][3]:.0f} times as many: the weights are read once for all. The closed form knows "
        f"decode steps only; simulated tokens are {rows[-1][1] / rows[-1][2] - 1:.0%} slower at 128, because "
        "prompts share the steps."
    )
    head = ["streams", "TPOT simulated, ms", "decode step by formula, ms", "output tokens/s"]
    title = "Batch against latency"
    return Lesson(title, head, rows, seen, _lines("output tokens/s", title, points, "time per output token, ms"))


def littles_law() -> Lesson:
    """The number inside is rate times time, until there is no steady state."""
    one = _deployed(max_rows=16)
    rows: list[list[Any]] = []
    for rate in (2.0, 4.0, 6.0, 8.0, 40.0):
        s = _chat(one, rate).summary
        law = s["little"]["system"]
        rows.append([
            rate, law["mean_inside"], law["rate_times_seconds"], s["queue"]["mean"],
            "yes" if s["stability"]["stable"] else "no",
        ])  # fmt: skip
    points = {"inside": [(r[0], r[1]) for r in rows], "of these waiting": [(r[0], r[3]) for r in rows]}
    seen = (
        f"The mean number inside is the rate times the mean time inside at every load: {rows[0][1]:.1f} at 2/s,"
        f" {rows[3][1]:.1f} at 8. The law also holds where the system does not keep up, but then it says how long the "
        "run was: with a longer one both sides would be larger."
    )
    head = ["requests/s", "inside, counted", "rate x time", "of these waiting", "keeps up"]
    title = "Little's law under load"
    return Lesson(title, head, rows, seen, _lines("requests/s", title, points, "requests"))


LESSONS: dict[str, Callable[[], Lesson]] = {
    "batching": batching, "memory": memory, "long-prompt": long_prompt, "frontier": frontier, "little": littles_law,
}  # fmt: skip
