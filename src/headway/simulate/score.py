"""`headway simulate score DIR`: a measured run simulated, and how far off every figure is.

The engine was vLLM; what plays it is our scheduler under the policy `fcfs` with its limits, two steps in flight as it
had, and blocks as its own log says or by the memory plan. Constants of the step time start from those fitted on public
runs and are fitted to every fifth request (`fit.py`). Nothing else of the run is looked at before it is scored.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.core.clock import VirtualClock, to_ps, to_seconds
from headway.core.errors import Rejected
from headway.core.step import StepPlan
from headway.executor.simulated import SimulatedRanks
from headway.metrics.stats import percentile
from headway.report.document import Document, Grid, Text
from headway.report.units import decimal
from headway.roofline.calibrate import calibration
from headway.roofline.step import StepTime
from headway.roofline.work import StepWork
from headway.scheduling.policies.fcfs import FCFS
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import Emission
from headway.shape.model import ModelShape
from headway.simulate.driver import SimulatedReplica, run
from headway.simulate.fit import NOISE, Constants, Spans, improved
from headway.simulate.front import Front
from headway.simulate.measured import Measured, MeasuredRequest, read_measured
from headway.simulate.workload import Answers, Ask, made_up

EVERY = 5  # the constants are fitted to one request in so many
ROUNDS = 4  # of simulating and fitting
CORRECTIONS = 3  # simulations after these, with all steps a little faster or slower
WEIGHTS = {"ttft": 0.15, "tpot": 0.03, "e2e": 0.05}  # errors of means that count as one, of the sampled requests
METRICS = ("ttft", "tpot", "e2e", "itl")
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    **{f"p{p}": lambda values, p=p: percentile(values, p / 100) for p in (50, 90, 99)},  # type: ignore[misc]
}


class Seen(msgspec.Struct):
    """A simulated request: seconds, and steps of its replica."""

    queued: float = 0.0
    first: float = 0.0
    last: float = 0.0
    replica: int = 0
    planned_after: int = 0  # steps that had ended when it was first planned
    first_step: int = 0  # steps that had ended when its first and last tokens were there
    last_step: int = 0


class Witness:
    """An observer that keeps what a fit and a score need.

    Attributes:
        works, took: of every step, per replica, and its seconds. ends: when each ended, s, 0.0 before all.
        states: (when, running, waiting) after every plan.
    """

    def __init__(self, model: StepTime, replicas: int) -> None:
        self.seen: dict[str, Seen] = {}
        self.works: list[list[StepWork]] = [[] for _ in range(replicas)]
        self.ends: list[list[float]] = [[0.0] for _ in range(replicas)]
        self.took: list[list[float]] = [[] for _ in range(replicas)]
        self.states: list[tuple[float, float, float]] = []
        self._model = model
        self._replicas: dict[int, int] = {}
        self._counts: dict[int, tuple[int, int]] = {}

    def arrived(self, ask: Ask) -> None:
        self.seen[str(ask.number)] = Seen()

    def idle(self, replica: int) -> np.ndarray:
        """Seconds between steps, up to the end of each; [steps + 1]."""
        ends = np.array(self.ends[replica])
        return ends - np.concatenate([[0.0], np.cumsum(self.took[replica])])

    def taken(self, id: str, now: int) -> None:
        self.seen[id].queued = to_seconds(now)

    def refused(self, ask: Ask, error: Rejected, now: int) -> None:
        raise error

    def planned(self, replica: SimulatedReplica, plans: Sequence[StepPlan], now: int) -> None:
        index = self._replicas.setdefault(id(replica), len(self._replicas))
        shape = replica.executor.shape()
        self.works[index].append(self._model.work(shape))
        end = replica.executor.last_due
        self.took[index].append(to_seconds(end) - max(self.ends[index][-1], to_seconds(now)))
        self.ends[index].append(to_seconds(end))
        ended = len(self.works[index]) - replica.executor.in_flight
        for plan in plans:
            for row in plan.new:
                seen = self.seen[row.id]
                if not seen.first and not seen.planned_after:
                    seen.replica, seen.planned_after = index, ended
        self._counts[index] = (
            sum(scheduler.running for scheduler in replica.schedulers),
            sum(scheduler.waiting for scheduler in replica.schedulers),
        )
        running, waiting = map(sum, zip(*self._counts.values(), strict=True))
        self.states.append((to_seconds(now), running, waiting))

    def repeated(self, plan: StepPlan, more: int) -> None:
        raise AssertionError("a witness sees every step: its replicas do not leap")

    def emitted(self, emission: Emission, times: Sequence[int]) -> None:
        seen, now = self.seen[emission.request.id], to_seconds(times[-1])
        if not emission.tokens:
            return
        step = bisect_left(self.ends[seen.replica], now - 1e-9)
        if not seen.first:
            seen.first, seen.first_step = now, step
        seen.last, seen.last_step = now, step


def score(
    folder: Path, shape: ModelShape, progress: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Any]:
    """The JSON object of `simulate score`.

    Raises:
        BadInput: the folder is no such run.
    """
    measured = read_measured(folder, shape)
    start, model = published(measured)
    sample = list(range(0, len(measured.requests), EVERY))
    offsets: dict[str, float] = {}
    tried: list[tuple[float, dict[str, float], Witness]] = []
    turns = ROUNDS + CORRECTIONS + 1
    for turn in range(turns):
        progress(turn, turns)
        witness = simulate(measured, start.moved(offsets).model(model))
        off, late = _off(measured, witness, sample)
        tried.append((off, offsets, witness))
        if turn < ROUNDS:
            spans = _spans(measured, witness, sample)
            offsets = improved(start, offsets, model, [work for works in witness.works for work in works], spans)
        else:  # plans shift as step times do, so the best ones are felt for: all steps a little faster or slower
            offsets = start.scaled(min(tried, key=lambda one: one[0])[1], -late / 2 ** (turn - ROUNDS), model)
    progress(turns, turns)
    _, offsets, witness = min(tried, key=lambda one: one[0])
    fitted = start.moved(offsets)
    found = compared(measured, witness, range(len(measured.requests)))
    left = [index for index in range(len(measured.requests)) if index not in sample]
    return found | {
        "left_out": {name: table["mean"] for name, table in compared(measured, witness, left).items()},
        "about": _about(measured, sample, fitted, offsets),
    }


def _off(measured: Measured, witness: Witness, sample: Sequence[int]) -> tuple[float, float]:
    """(how far the means of the sampled requests are off, how late they end, as a share)."""
    found = compared(measured, witness, sample)
    errors = {name: (found[name]["mean"]["error_pct"] or 0.0) / 100 for name in WEIGHTS}
    return sum((errors[name] / most) ** 2 for name, most in WEIGHTS.items()), errors["e2e"]


def published(measured: Measured) -> tuple[Constants, StepTime]:
    """The constants that public runs of the engine gave, and the model of a step they belong to."""
    deployment = measured.deployment
    efficiency, reduce = calibration().constants(deployment)
    constants = Constants(efficiency, reduce if deployment.gpus > 1 else None)
    device = deployment.hardware
    model = StepTime(
        deployment.stored, device, deployment.layout, math=device.math_for(deployment.precision),
        efficiency=efficiency, all_reduce=constants.all_reduce,
    )  # fmt: skip
    return constants, model


def simulate(measured: Measured, model: StepTime) -> Witness:
    """Play the run."""
    ranks = measured.deployment.attention_dp
    answers, replicas = Answers(), []
    for _ in range(measured.replicas):
        clock = VirtualClock()
        schedulers = [Scheduler(measured.limits, key=b"", policy=FCFS) for _ in range(ranks)]
        replicas.append(
            SimulatedReplica(
                schedulers, SimulatedRanks(measured.limits, clock, model, answers, ranks=ranks), clock, answers
            )
        )
    witness = Witness(model, len(replicas))
    run(replicas, _Recorded(measured.requests), witness, answers, Front("least-loaded", len(replicas)))
    return witness


class _Recorded:
    """The run's arrivals. Its client asked for as many tokens as the answer has."""

    def __init__(self, requests: Sequence[MeasuredRequest]) -> None:
        self._requests = requests

    def first(self) -> Any:
        start = self._requests[0].arrival_time
        for number, one in enumerate(self._requests):
            at = to_ps(one.arrival_time - start)
            yield Ask(number, at, made_up(number, one.input_toks), one.output_toks, most=one.output_toks)

    def then(self, ask: Ask, emission: Emission | None, now: int) -> None:
        return None


def _spans(measured: Measured, witness: Witness, sample: Sequence[int]) -> Spans:
    """What the sampled requests say about sums of steps. Moments count from when the first request was queued."""
    start = min(one.queued_ts for one in measured.requests)
    base = [0]
    for works in witness.works:
        base.append(base[-1] + len(works))
    rows = []

    idle = [witness.idle(index) for index in range(len(witness.works))]

    def add(seen: Seen, begin: int, end: int, took: float, noise: float) -> None:
        between, first = idle[seen.replica], base[seen.replica]
        if end > begin and took > 0:
            rows.append((first + begin, first + end, took, noise, between[end] - between[begin]))

    for index in sample:
        one, seen = measured.requests[index], witness.seen[str(index)]
        if one.output_toks > 1:
            add(seen, seen.first_step, seen.last_step, one.last_token_ts - one.first_token_ts, NOISE["decode"])
        add(seen, seen.planned_after, seen.first_step, one.first_token_ts - one.scheduled_ts, NOISE["prompt"])
        for step, at in ((seen.first_step, one.first_token_ts), (seen.last_step, one.last_token_ts)):
            add(seen, 0, step, at - start, NOISE["moment"])
    begin, end, took, noise, gaps = (np.array(column) for column in zip(*rows, strict=True))
    return Spans(begin, end, took, noise, gaps)


def compared(measured: Measured, witness: Witness, rows: Sequence[int]) -> dict[str, Any]:
    """Measured beside simulated, errors signed and in per cent."""
    ones = [measured.requests[index] for index in rows]
    seen = [witness.seen[str(index)] for index in rows]
    pairs: dict[str, tuple[list[float], list[float]]] = {
        "ttft": ([one.ttft for one in ones], [s.first - s.queued for s in seen]),
        "tpot": (
            [one.tpot for one in ones if one.tpot is not None],
            [
                (s.last - s.first) / (one.output_toks - 1)
                for one, s in zip(ones, seen, strict=True)
                if one.tpot is not None
            ],
        ),
        "e2e": ([one.e2e for one in ones], [s.last - s.queued for s in seen]),
    }
    found = {name: _table(*sides, 1e3) for name, sides in pairs.items()}
    # A run has no times of single tokens: its gaps are each answer's mean, once per gap, and so are the simulated ones.
    spread = [
        [
            gap
            for one, gap in zip([o for o in ones if o.tpot is not None], side, strict=True)
            for _ in range(one.output_toks - 1)
        ]
        for side in pairs["tpot"]
    ]
    found["itl"] = _table(spread[0], spread[1], 1e3)
    for name, values in _states(measured, witness).items():
        found[name] = _table(*values, 1.0)
    return found


def _states(measured: Measured, witness: Witness) -> dict[str, tuple[list[float], list[float]]]:
    """Running and waiting at each second of the run; after its end, nobody."""
    times = [at for at, _, _ in witness.states]
    end = max(seen.last for seen in witness.seen.values())
    found: dict[str, tuple[list[float], list[float]]] = {}
    for column, name in ((1, "running"), (2, "waiting")):
        simulated = []
        for second in measured.seconds:
            index = bisect_right(times, second.t) - 1
            simulated.append(float(witness.states[index][column]) if index >= 0 and second.t < end else 0.0)
        found[name] = ([getattr(second, name) for second in measured.seconds], simulated)
    return found


def _table(measured: Sequence[float], simulated: Sequence[float], scale: float) -> dict[str, Any]:
    table = {}
    for name, of in STATISTICS.items():
        left, right = (of(values) * scale if len(values) else None for values in (measured, simulated))
        error = None if not left or right is None else 100 * (right / left - 1)
        table[name] = {"measured": left, "simulated": right, "error_pct": error}
    return table


def _about(measured: Measured, sample: Sequence[int], fitted: Constants, offsets: dict[str, float]) -> dict[str, Any]:
    deployment = measured.deployment
    return {
        "run": measured.name, "model": deployment.shape.name, "hardware": deployment.hardware.name,
        "tensor_parallel": deployment.attention_tp, "data_parallel_ranks": deployment.attention_dp,
        "replicas": measured.replicas, "policy": FCFS.name, "blocks": measured.limits.blocks[0],
        "blocks_from": measured.blocks_from, "requests": len(measured.requests),
        "units": "ms; running and waiting: requests",
        "ttft": "from when the engine took the request off its socket (queued_ts), on both sides",
        "itl": "means per answer, once per gap: the run has no times of single tokens",
        "fitted_on": f"{len(sample)} requests, every {EVERY}th by arrival: their scheduled, first and last token times",
        "start": "constants fitted on public runs of vllm (calibration.json)",
        "moved_by": {name: float(np.exp(value)) for name, value in offsets.items()},
        "efficiency": {name: getattr(fitted.efficiency, name) for name in offsets if hasattr(fitted.efficiency, name)},
    }  # fmt: skip


def document(found: dict[str, Any]) -> Document:
    """For people."""
    rows = [
        [f"{metric}, {name}", *(decimal(cell[key]) for key in ("measured", "simulated")), _signed(cell["error_pct"])]
        for metric in (*METRICS, "running", "waiting") for name, cell in found[metric].items()
    ]  # fmt: skip
    about = found["about"]
    left = ", ".join(f"{name} {_signed(cell['error_pct'])}" for name, cell in found["left_out"].items())
    return Document(f"{about['run']}: {about['requests']} requests simulated", [
        Grid(["", "measured", "simulated", "error"], rows), Text(f"fitted on {about['fitted_on']}"),
        Text(f"means of the requests that were left out of the fit: {left}"),
        Text(f"{about['units']}; TTFT {about['ttft']}; ITL {about['itl']}", "note"),
    ])  # fmt: skip


def _signed(per_cent: float | None) -> str:
    return "-" if per_cent is None else f"{per_cent:+.1f} %"
