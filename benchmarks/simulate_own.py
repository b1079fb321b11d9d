"""Is what the simulator says of this machine what our engine then does? The same requests, served and simulated.

    python benchmarks/simulate_own.py PART ... [--model M.gguf] [--state FILE] [--quick]

    calibrate   loads of many sizes, probed around: a fit per regime of the machine, the host's time between steps
    cells       closed loops of 1 to 32 requests, of other lengths than those fitted on
    arrivals    Poisson arrivals at 50, 80 and 95 % of the most that `cells` saw, each served twice
    report      the section of docs/accuracy-simulator.md

Each part takes at most five minutes, keeps what it found in the state file, and can be run again; `cells` and
`arrivals` go on where they were stopped. Memory and arithmetic are probed just before and after each load; a load
during which they changed by more than 10 % is played again, three times at most (`--quick`: once), and the time when
they changed least is taken.
In process: HTTP and its client are not simulated. The simulation has the engine's own limits and step budget, and the
step times of the regime that was probed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway import LLM, SamplingParams
from headway.core.clock import to_seconds
from headway.core.events import StepDone
from headway.engine.event_file import read_events
from headway.engine.machine import usable_cores, wall_clock
from headway.engine.messages import Delta
from headway.engine.profile import held_formats, saved_profile
from headway.measure.formats import machine_probe, measure_machine
from headway.measure.served import Window, calibrate
from headway.metrics.records import TOKEN_KINDS, RequestRecord
from headway.roofline.profile import Profile, Rates, device_of
from headway.roofline.timing import estimate
from headway.simulate.arrivals import Arrivals, Closed
from headway.simulate.deploy import Deployed, EngineSetup, deployed
from headway.simulate.driver import Source
from headway.simulate.play import play
from headway.traffic.load import Load
from headway.traffic.traces import TraceRow

PAGE = Path(__file__).parent.parent / "docs" / "accuracy-simulator.md"
FITTED = ((1, 32, 48), (3, 400, 24), (6, 64, 48), (12, 200, 32), (24, 48, 32), (2, 1500, 16), (1, 700, 8))
CELLS, CELL = (1, 2, 4, 8, 16, 32), (128, 64)  # requests in flight; tokens of prompt and answer
SHARES = (0.5, 0.8, 0.95)
STEADY, TRIES = 1.1, 3
FIGURES = ("ttft_ms", "tpot_ms")
Summary = dict[str, dict[str, float]]  # figure -> mean, p50, p99


class Machine:
    """The engine, what it serves, and a probe of the machine it runs on."""

    def __init__(self, args: argparse.Namespace, event_log: Path | None = None) -> None:
        self._tries = 1 if args.quick else TRIES
        self._until, self._clock = time.monotonic() + args.most, wall_clock()
        self.llm = LLM(args.model, threads=args.threads, max_rows=32, max_model_len=2048, event_log=event_log)
        self.probe = machine_probe(args.threads, self.llm.engine.backend.math)
        self._random = random.Random(time.time_ns())

    def serve(self, rows: Sequence[TraceRow], concurrency: int | None = None, until: float = 1e9) -> list[list[float]]:
        """Requests as they come, or so many in flight -> (TTFT, TPOT) in ms of each that began before `until` s."""
        waiting, done, held = deque(rows), list[list[float]](), list[Any]()
        begin = time.perf_counter()
        while waiting or any(not one.done for one in held):
            now = time.perf_counter() - begin
            held = [one for one in held if not one.done]
            while waiting and (len(held) < concurrency if concurrency else waiting[0].at <= now):
                row = waiting.popleft()
                if now < until:
                    held.append(self._ask(row, begin + (now if concurrency else row.at), done))
            if held:
                self.llm.turn()
            else:
                time.sleep(1e-3)
        return done

    def _ask(self, row: TraceRow, asked: float, done: list[list[float]]) -> Any:
        times: list[float] = []

        def heard(delta: Delta) -> None:
            times.extend([time.perf_counter()] * len(delta.tokens))
            if delta.finish is not None:
                tpot = (times[-1] - times[0]) / max(1, len(times) - 1)
                done.append([1e3 * (times[0] - asked), 1e3 * tpot])

        tokens = [self._random.randrange(100, self.llm.engine.info.vocab_size) for _ in range(row.input_tokens)]
        params = SamplingParams(max_tokens=row.output_tokens, temperature=0, ignore_eos=True)
        return self.llm.submit(tokens, params, heard)

    def probed(self, serve: Any) -> tuple[list[list[float]], Window, bool]:
        """Serve between two probes, again if the machine changed meanwhile -> results, when and at what rates, and
        whether it was steady; if it never was, of the time when it changed least."""
        least, kept = float("inf"), None
        for _ in range(self._tries):
            before, begin = self.probe(), self._clock.now()
            found, end, after = serve(), self._clock.now(), self.probe()
            change = max(max(pair) / min(pair) for pair in zip(before, after, strict=True))
            if change < least:
                least, kept = change, (found, Window(begin, end, before.between(after)))
            if change < STEADY or time.monotonic() > self._until:
                break
        assert kept is not None, "it was served once at least"
        return *kept, least < STEADY

    def simulated(self, profile: Profile, rates: Rates, host: float, source: Source, load: Load) -> Summary:
        """The same load in virtual time, with this engine's limits and budget."""
        engine = self.llm.engine
        formats = held_formats(engine.shape, engine.backend)
        timing = estimate(engine.shape, profile, engine.backend.name, formats, rates)
        assert timing is not None, "calibrate fits these formats"
        like: Deployed = deployed(engine.shape, device_of(profile), 1, EngineSetup(host_us=1e6 * host), profile=profile)
        limits = msgspec.structs.replace(engine.loop.scheduler.limits, max_in_flight=1)
        budget = engine.pacing.budget  # less what single steps vary by, which the engine learns
        if budget.milliseconds is not None:
            budget = msgspec.structs.replace(budget, milliseconds=budget.milliseconds / timing.high)
        here = msgspec.structs.replace(like, model=timing.model, limits=limits, budget=budget)
        return summed([_times(record) for record in play(here, source, load).run.records if record.completed])


def summed(found: Sequence[Sequence[float]]) -> Summary:
    """Mean, median and p99 of (TTFT, TPOT)."""
    columns = zip(FIGURES, np.transpose(found), strict=True)
    return {
        name: {"mean": float(values.mean()), **{f"p{q}": float(np.quantile(values, q / 100)) for q in (50, 99)}}
        for name, values in columns
    }


def _times(record: RequestRecord) -> list[float]:
    """(TTFT, TPOT) in ms of a simulated request."""
    first, last = record.first(TOKEN_KINDS), record.last(TOKEN_KINDS)
    assert first is not None and last is not None, "it was completed"
    return [(first - record.intended) / 1e6, (last - first) / 1e6 / max(1, (record.output_tokens or 0) - 1)]


def rows_of(count: int, prompt: int, output: int, rate: float | None = None, seed: int = 0) -> list[TraceRow]:
    """Equal ones for a closed loop; with a rate lengths vary by half, and they come at random."""
    noise, at, rows = random.Random(seed), 0.0, []
    for _ in range(count):
        if rate is None:
            rows.append(TraceRow(0.0, prompt, output))
            continue
        at += noise.expovariate(rate)
        ask, answer = (max(2, round(noise.lognormvariate(np.log(mean) - 0.11, 0.47))) for mean in (prompt, output))
        rows.append(TraceRow(at, ask, answer))
    return rows


def calibrated(args: argparse.Namespace, state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        machine, windows = Machine(args, log), list[Window]()
        kept = 0
        for cell in FITTED:
            rows = rows_of(10_000, *cell[1:])
            _, window, steady = machine.probed(lambda r=rows, c=cell: machine.serve(r, c[0], args.seconds))
            kept += steady
            windows.append(window)
        engine = machine.llm.engine
        profile = saved_profile() or measure_machine(args.threads)
        formats = held_formats(engine.shape, engine.backend)
        machine.llm.close()
        found = calibrate(log, engine.shape, profile, engine.backend.math, formats, windows)
        steps = [one for one in read_events(log) if isinstance(one, StepDone) and to_seconds(one.idle) < 0.05]
        host = [to_seconds(one.now - one.planned + one.idle) - one.seconds.executor for one in steps]
    state |= {
        "model": engine.info.name, "profile": msgspec.to_builtins(found.profile), "host": float(np.median(host)),
        "held_out": msgspec.to_builtins(found.held_out), "regimes": [one.bandwidth[1] for one in found.fits],
        "steady": f"{kept} of {len(FITTED)}",
    }  # fmt: skip


def loads(args: argparse.Namespace, state: dict[str, Any], part: str) -> None:
    """Those of a part that were not played yet."""
    machine, profile = Machine(args), msgspec.convert(state["profile"], Profile)
    found, begin = state.setdefault(part, {}), time.monotonic()
    for key in CELLS if part == "cells" else SHARES:
        if str(key) in found or time.monotonic() - begin > args.most:
            continue
        if part == "cells":
            count = int(max(2 * key, 8 if args.quick else 40))
            rows, load = rows_of(count + int(key), *CELL), Load("closed")
            concurrency: int | None = int(key)
            source: Source = Closed(rows, int(key))
        else:
            rate = key * max(cell["requests_per_second"] for cell in state["cells"].values())
            rows = rows_of(20 if args.quick else int(max(60, 100 * rate)), *CELL, rate=rate, seed=round(100 * key))
            load, concurrency, source = Load("trace"), None, Arrivals(rows, Load("trace"))
        runs = []
        for _ in range(1 if part == "cells" else 2):
            served, window, steady = machine.probed(lambda r=rows, c=concurrency: machine.serve(r, c))
            runs.append((summed(served), window.rates, steady, len(rows) / to_seconds(window.end - window.begin)))
        _, rates, _, rate = runs[0]
        said = machine.simulated(profile, rates, state["host"], source, load)
        found[str(key)] = {
            "measured": [run[0] for run in runs], "simulated": said, "gb_s": rates.bandwidth / 1e9,
            "steady": all(run[2] for run in runs), "requests_per_second": rate,
            "slowness": machine.llm.engine.loop.scheduler.pace.slowness,
        }  # fmt: skip
        print(part, key, found[str(key)], flush=True)
        args.state.write_text(json.dumps(state, indent=1))
    machine.llm.close()


def report(state: dict[str, Any]) -> str:
    """The section, from `## Our own engine` on."""
    lines = [
        "## Our own engine", "",
        f"`python benchmarks/simulate_own.py calibrate cells arrivals report`: {state['model']}, in process, on the "
        "machine that this page was written on. Step times are fitted on other loads than those shown "
        f"({state['steady']} of them while the machine kept its speed; regimes at "
        f"{', '.join(f'{rate / 1e9:.0f} GB/s' for rate in state['regimes'])}); errors on steps left out, median: "
        + ", ".join(f"{one['kind']} {one['median']:.1%}" for one in state["held_out"])
        + ". *again*: how much the engine's second run of the same arrivals differs from its first.", "",
        "| load | GB/s | TTFT p50, ms | error | TPOT p50, ms | error | p99: TTFT, TPOT | again: TTFT, TPOT |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for part, name in (("cells", "{} in flight"), ("arrivals", "{:.0%} of saturation")):
        for key, one in state.get(part, {}).items():
            lines.append(_row(name.format(int(key) if part == "cells" else float(key)), one))
    return "\n".join(lines) + "\n"


def _row(name: str, one: dict[str, Any]) -> str:
    first, said = one["measured"][0], one["simulated"]

    def error(figure: str, key: str, of: dict[str, Any] = said) -> str:
        return f"{of[figure][key] / first[figure][key] - 1:+.0%}"

    ttft, tpot = (f"{first[figure]['p50']:.1f} | {error(figure, 'p50')}" for figure in FIGURES)
    high = ", ".join(error(figure, "p99") for figure in FIGURES)
    again = ", ".join(error(figure, "p50", one["measured"][1]) for figure in FIGURES) if one["measured"][1:] else ""
    unsteady = "" if one["steady"] else " (unsteady)"
    return f"| {name}{unsteady} | {one['gb_s']:.0f} | {ttft} | {tpot} | {high} | {again} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("calibrate", "cells", "arrivals", "report"))
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--state", type=Path, default=Path(__file__).with_name("data") / "simulate_own.json")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each load that is fitted on")
    parser.add_argument(
        "--most",
        type=float,
        default=240.0,
        help="seconds after which a part begins no further load, and plays none again",
    )
    parser.add_argument("--quick", action="store_true", help="few requests, to try the script out")
    args = parser.parse_args()
    state: dict[str, Any] = json.loads(args.state.read_text()) if args.state.is_file() else {}
    for part in args.parts:
        if part == "calibrate":
            calibrated(args, state)
        elif part == "report":
            head, _, tail = PAGE.read_text().partition("## Our own engine\n")
            rest = tail.partition("\n## ")[2]
            PAGE.write_text(head.rstrip() + "\n\n" + report(state) + (f"\n## {rest}" if rest else ""))
        else:
            loads(args, state, part)
        args.state.write_text(json.dumps(state, indent=1))


if __name__ == "__main__":
    main()
