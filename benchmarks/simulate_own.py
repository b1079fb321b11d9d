"""Is what the simulator says of this machine what our engine then does? The same requests, served and simulated.

    python benchmarks/simulate_own.py PART ... [--model M.gguf] [--state FILE] [--quick]

    calibrate   loads of many sizes, probed around: a fit per regime of the machine, the host's time between steps
    cells       closed loops of 1 to 32 requests, of other lengths than those fitted on, each served twice
    arrivals    Poisson arrivals at 50, 80 and 95 % of the most that `cells` saw, each served twice
    simulate    all of these loads again, in virtual time
    report      the section of docs/accuracy-simulator.md

`calibrate` also saves the profile, as `headway calibrate` does, and what is measured afterwards is served with it. The
measuring parts begin no further load after `--most` seconds, keep what they found in the state file and the event logs
of all loads in `--logs`, and go on there when they are called again. Memory and arithmetic are probed just before and
after each load; a load during which they changed by more than 10 % is played again, `--tries` times at most (`--quick`:
once), and the time when they changed least is taken.
A server's engine, with its step budget, in this process: HTTP and its client are not simulated. The simulation has the
engine's own limits and budget, and the step times of the regime that was probed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway import SamplingParams
from headway.core.clock import to_seconds
from headway.core.errors import BadInput
from headway.core.events import StepDone
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.engine.event_file import read_events
from headway.engine.machine import usable_cores, wall_clock
from headway.engine.messages import Submit
from headway.engine.options import EngineOptions
from headway.engine.profile import held_formats, profile_path, saved_profile
from headway.measure.formats import machine_probe, measure_machine
from headway.measure.probe import save_profile
from headway.measure.served import Window, calibrate
from headway.metrics.records import TOKEN_KINDS, RequestRecord
from headway.roofline.profile import GAP, Profile, Rates, covers, device_of, nearest
from headway.roofline.timing import estimate
from headway.scheduling.budget import Budget
from headway.simulate.arrivals import Arrivals, Closed
from headway.simulate.deploy import Deployed, EngineSetup, deployed
from headway.simulate.driver import Source
from headway.simulate.play import play
from headway.traffic.load import Load
from headway.traffic.traces import TraceRow

PAGE = Path(__file__).parent.parent / "docs" / "accuracy-simulator.md"
FITTED = ((1, 32, 48), (3, 400, 24), (6, 64, 48), (12, 200, 32), (24, 48, 32), (2, 1500, 16), (1, 700, 8))
CELLS, CELL = (1, 2, 4, 8, 16, 32), (128, 64)  # requests in flight; tokens of prompt and answer
SHARES, SECONDS = (0.5, 0.8, 0.95), 30  # of the most requests/s; for how long they come
STEADY, PROBES = 1.1, 7  # change of the machine during a load; probes before and after, of which the median counts
BAR, TIMES = 0.1, 1.5  # an error that is none; and how many times what the engine differs by from itself is none
SEEDS = 9  # simulations, each with another draw of the steps' noise
FIGURES = ("ttft_ms", "tpot_ms")
Summary = dict[str, dict[str, float]]  # figure -> mean, p50, p99


class Machine:
    """A server's engine that notes its steps in a log, and a probe of the machine it runs on."""

    def __init__(self, args: argparse.Namespace, log: str) -> None:
        args.logs.mkdir(parents=True, exist_ok=True)
        self._tries, self._until = 1 if args.quick else args.tries, time.monotonic() + args.most
        self.log = args.logs / f"{log}.jsonl"
        self.engine = _engine(args, self.log)
        self._clock, self._random = wall_clock(), random.Random(time.time_ns())
        self._probe, self._numbers = machine_probe(args.threads, self.engine.backend.math), 0

    def serve(self, rows: Sequence[TraceRow], concurrency: int | None = None, until: float = 1e9) -> list[list[float]]:
        """Requests as they come, or so many in flight -> (TTFT, TPOT) in ms of each that began before `until` s."""
        loop, waiting, done = self.engine.loop, deque(rows), list[list[float]]()
        live: dict[str, list[float]] = {}  # when each was asked, and when its tokens came
        begin = time.perf_counter()
        while waiting or live:
            now = time.perf_counter() - begin
            while waiting and (len(live) < concurrency if concurrency else waiting[0].at <= now):
                row = waiting.popleft()
                if now < until:
                    live[self._ask(row)] = [begin + (now if concurrency else row.at)]
            if not live:
                time.sleep(1e-3)
                continue
            for delta in loop.turn():
                times = live[delta.id]
                times.extend([time.perf_counter()] * len(delta.tokens))
                if delta.finish is not None:
                    asked, first, *_, last = live.pop(delta.id)
                    done.append([1e3 * (first - asked), 1e3 * (last - first) / max(1, len(times) - 2)])
        return done

    def _ask(self, row: TraceRow) -> str:
        self._numbers += 1
        id, vocab = str(self._numbers), self.engine.info.vocab_size
        tokens = tuple(self._random.randrange(100, vocab) for _ in range(row.input_tokens))
        params = SamplingParams(max_tokens=row.output_tokens, temperature=0, ignore_eos=True)
        refused = self.engine.loop.submit(Submit(id, tokens, params))
        assert refused is None, refused
        return id

    def probed(self, serve: Callable[[], list[list[float]]]) -> tuple[list[list[float]], Window, bool]:
        """Serve between two probes, again if the machine changed meanwhile -> results, when and at what rates, and
        whether it was steady; if it never was, of the time when it changed least."""
        least, kept = float("inf"), None
        for _ in range(self._tries):
            before, begin = self._rates(), self._clock.now()
            found, end, after = serve(), self._clock.now(), self._rates()
            change = before.change(after)
            if change < least:
                least, kept = change, (found, Window(begin, end, before.between(after)))
            if change < STEADY or time.monotonic() > self._until:
                break
        assert kept is not None, "it was served once at least"
        return *kept, least < STEADY

    def _rates(self) -> Rates:
        """What the machine gives now."""
        return Rates(*(float(one) for one in np.median([self._probe() for _ in range(PROBES)], axis=0)))


def _engine(args: argparse.Namespace, log: Path | None = None) -> Engine:
    given = {"model": args.model, "threads": args.threads, "max_rows": 32, "max_model_len": 2048, "max_wait": None}
    return build_engine(EngineOptions.of(given | {"event_log": str(log) if log else None}), serves=True)


def simulated(
    engine: Engine, profile: Profile, rates: Rates, host: float, budget: Budget, rows: list[TraceRow], many: int | None
) -> Summary:
    """A load in virtual time, with the engine's limits and the budget that it had: medians of `SEEDS` draws of the
    noise of steps. The step times are those of the regime that was probed, at its own rates: two probes of one regime
    differ more than its steps do."""
    load = Load("closed" if many else "trace")

    def source() -> Source:
        return Closed(rows, many) if many else Arrivals(rows, load)

    formats = held_formats(engine.shape, engine.backend)
    usual = nearest(profile.fits[engine.backend.name][formats[0]], rates.bandwidth)
    seen = covers(usual, rates.bandwidth) and usual.peak / GAP < rates.peak < usual.peak * GAP
    timing = estimate(engine.shape, profile, engine.backend.name, formats, usual.rates if seen else rates)
    assert timing is not None and timing.noise, "calibrate fits these formats"
    like: Deployed = deployed(engine.shape, device_of(profile), 1, EngineSetup(host_us=1e6 * host), profile=profile)
    limits = msgspec.structs.replace(engine.loop.scheduler.limits, max_in_flight=1)
    here = msgspec.structs.replace(like, model=timing.model, limits=limits, budget=budget, noise=timing.noise)
    played = [play(msgspec.structs.replace(here, seed=seed), source(), load) for seed in range(SEEDS)]
    every = [summed([_times(one) for one in run.run.records if one.completed]) for run in played]
    return {
        name: {key: float(np.median([one[name][key] for one in every])) for key in every[0][name]} for name in FIGURES
    }


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
    """Play what is to be fitted on, as far as it was not, and fit when all was."""
    known, end = state.setdefault("fitted", {}), time.monotonic() + args.most
    missing = [number for number in range(len(FITTED)) if str(number) not in known]
    profile = saved_profile() or measure_machine(args.threads)
    machine = Machine(args, f"fitted-{len(known)}")
    for number in missing:
        if time.monotonic() < end:
            concurrency, *lengths = FITTED[number]
            rows = rows_of(10_000, *lengths)
            _, window, steady = machine.probed(partial(machine.serve, rows, concurrency, args.seconds))
            known[str(number)] = {"window": msgspec.to_builtins(window), "steady": steady}
            print("fitted on", FITTED[number], known[str(number)], flush=True)
            args.state.write_text(json.dumps(state))
    machine.engine.close()
    if len(known) < len(FITTED):
        print(f"{len(known)} of {len(FITTED)} loads; call it again", flush=True)
        return
    engine, windows = machine.engine, [msgspec.convert(one["window"], Window) for one in known.values()]
    with tempfile.TemporaryDirectory() as folder:
        log = joined(sorted(args.logs.glob("fitted-*.jsonl")), Path(folder) / "all.jsonl")
        formats = held_formats(engine.shape, engine.backend)
        found = calibrate(log, engine.shape, profile, engine.backend.math, formats, windows)
        steps = [one for one in read_events(log) if isinstance(one, StepDone) and to_seconds(one.idle) < 0.05]
    host = [to_seconds(one.now - one.planned + one.idle) - one.seconds.executor for one in steps]
    save_profile(found.profile, profile_path())
    state |= {
        "model": engine.info.name, "profile": msgspec.to_builtins(found.profile), "host": float(np.median(host)),
        "held_out": msgspec.to_builtins(found.held_out), "regimes": [one.bandwidth[1] for one in found.fits],
    }  # fmt: skip


def joined(logs: Sequence[Path], into: Path) -> Path:
    """Event logs as one, with the first one's header."""
    with open(into, "wb") as file:
        for number, log in enumerate(logs):
            with open(log, "rb") as part:
                header = part.readline()
                file.write(b"" if number else header)
                shutil.copyfileobj(part, file)
    return into


def load_of(key: str, state: dict[str, Any], quick: bool) -> tuple[list[TraceRow], int | None]:
    """Requests of a load, and how many are in flight; None = they come at their times."""
    part, value = key.split()
    if part == "cells":
        count = max(2 * int(value), 8 if quick else 40)
        return rows_of(count + int(value), *CELL), int(value)
    most = max(one["requests_per_second"] for name, one in state["loads"].items() if name.startswith("cells"))
    rate = float(value) * most
    rows = rows_of(20 if quick else int(max(40, SECONDS * rate)), *CELL, rate=rate, seed=round(100 * float(value)))
    return rows, None


def loads(args: argparse.Namespace, state: dict[str, Any], part: str) -> None:
    """Those of a part that were not played yet, or not often enough."""
    found, end = state.setdefault("loads", {}), time.monotonic() + args.most
    if part == "arrivals" and any(f"cells {value}" not in found for value in CELLS):
        raise SystemExit("play all cells first: they say what saturation is")
    machine, runs = None, 2
    for key in [f"{part} {value}" for value in (CELLS if part == "cells" else SHARES)] * runs:
        if len(found.get(key, {"runs": []})["runs"]) == runs or time.monotonic() > end:
            continue
        machine = machine or Machine(args, f"{part}-{int(time.time())}")
        rows, concurrency = load_of(key, state, args.quick)
        served, window, steady = machine.probed(partial(machine.serve, rows, concurrency))
        one = found.setdefault(key, {"runs": []})
        one["requests_per_second"] = len(rows) / to_seconds(window.end - window.begin)
        run = {"window": window, "steady": steady, "measured": summed(served), "log": machine.log.name,
               "budget": machine.engine.pacing.budget}  # fmt: skip
        one["runs"].append(msgspec.to_builtins(run))
        print(key, one["runs"][-1], flush=True)
        args.state.write_text(json.dumps(state))
    if machine is not None:
        machine.engine.close()


def simulate(args: argparse.Namespace, state: dict[str, Any]) -> None:
    """All runs of all loads, each at the rates that were probed around it; and with step times that are fitted on the
    run's own steps, where they are of enough sizes: what is wrong then is not their length."""
    engine, profile = _engine(args), msgspec.convert(state["profile"], Profile)
    formats = held_formats(engine.shape, engine.backend)
    for key, one in state["loads"].items():
        for run in one["runs"]:
            rows, concurrency = load_of(key, state, args.quick)
            window = msgspec.convert(run["window"], Window)
            about = state["host"], msgspec.convert(run["budget"], Budget), rows, concurrency
            run["simulated"] = simulated(engine, profile, window.rates, *about)
            try:
                found = calibrate(args.logs / run["log"], engine.shape, profile, engine.backend.math, formats, [window])
            except (BadInput, OSError):
                continue
            run["simulated_own"] = simulated(engine, found.profile, window.rates, *about)
    engine.close()


def report(state: dict[str, Any]) -> str:
    """The section, from `## Our own engine` on."""
    steady = f"{sum(one['steady'] for one in state['fitted'].values())} of {len(FITTED)}"
    lines = [
        "## Our own engine", "",
        f"`python benchmarks/simulate_own.py calibrate cells arrivals simulate report`: {state['model']}, a "
        "server's engine, on the machine that this page was written on. Step times are fitted on other loads than "
        f"those shown ({steady} of them while the machine kept its speed; regimes at "
        f"{', '.join(f'{rate / 1e9:.0f} GB/s' for rate in state['regimes'])}); errors on steps left out, median: "
        + ", ".join(f"{one['kind']} {one['median']:.1%}" for one in state["held_out"])
        + f". Simulated: medians of {SEEDS} draws of the steps' noise, which is what the fitted steps varied by; step "
        "times are those of the regime that was probed. *again*: how much the engine's second run of the same load "
        f"differs from its first. **Bold**: an error of more than {BAR:.0%} and of {TIMES:g} times that. *Own steps*: "
        "errors of the p50 where step times and noise are fitted on the load's own steps, so that only queue, "
        "scheduling and budget are foretold.", "",
        "| load | GB/s | TTFT p50, ms | error | TPOT p50, ms | error | p99: TTFT, TPOT | own steps: TTFT, TPOT | "
        "again: TTFT, TPOT (p99) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for key, one in state["loads"].items():
        part, value = key.split()
        name = f"{value} in flight" if part == "cells" else f"{float(value):.0%} of saturation"
        lines += [_row(name if number == 0 else "the same again", one["runs"], run)
                  for number, run in enumerate(one["runs"])]  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(name: str, runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> str:
    """Of one run, with what the last differs by from the first."""
    first, last = runs[0], runs[-1]
    measured, said = run["measured"], run["simulated"]

    def apart(figure: str, key: str) -> float:
        """How much the engine differs from itself."""
        return float(last["measured"][figure][key] / first["measured"][figure][key] - 1)

    def error(figure: str, key: str, said: Summary = said) -> str:
        off = said[figure][key] / measured[figure][key] - 1
        told = f"{off:+.0%}"
        return f"**{told}**" if abs(off) > max(BAR, TIMES * abs(apart(figure, key))) else told

    ttft, tpot = (f"{measured[figure]['p50']:.1f} | {error(figure, 'p50')}" for figure in FIGURES)
    high = ", ".join(error(figure, "p99") for figure in FIGURES)
    alone = (
        ", ".join(error(figure, "p50", run["simulated_own"]) for figure in FIGURES) if "simulated_own" in run else ""
    )
    own = [", ".join(f"{apart(figure, key):+.0%}" for figure in FIGURES) for key in ("p50", "p99")]
    again = f"{own[0]} ({own[1]})" if run is last and run is not first else ""
    unsteady = "" if run["steady"] else " (unsteady)"
    return (
        f"| {name}{unsteady} | {run['window']['rates'][0] / 1e9:.0f} | {ttft} | {tpot} | {high} | {alone} | {again} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("calibrate", "cells", "arrivals", "simulate", "report"))
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--state", type=Path, default=Path(__file__).with_name("data") / "simulate_own.json")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "headway-simulate-own")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each load that is fitted on")
    parser.add_argument(
        "--most",
        type=float,
        default=120.0,
        help="seconds after which a part begins no further load, and plays none again",
    )
    parser.add_argument("--tries", type=int, default=3, help="of a load during which the machine changed")
    parser.add_argument("--quick", action="store_true", help="few requests, to try the script out")
    args = parser.parse_args()
    state: dict[str, Any] = json.loads(args.state.read_text()) if args.state.is_file() else {}
    whole = {"calibrate": calibrated, "simulate": simulate}
    for part in args.parts:
        if part in whole:
            whole[part](args, state)
        elif part == "report":
            head, _, tail = PAGE.read_text().partition("## Our own engine\n")
            rest = tail.partition("\n## ")[2]
            PAGE.write_text(head.rstrip() + "\n\n" + report(state) + (f"\n## {rest}" if rest else ""))
        else:
            loads(args, state, part)
        args.state.write_text(json.dumps(state))


if __name__ == "__main__":
    main()
