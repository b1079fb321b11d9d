"""The cheapest deployments of a search, played by the simulator: the very scheduler, on steps of the same model.

The closed loop is made of means, its queue of a formula (Kingman). Near a target neither decides: there the deployments
that may come first are played, request by request, and those predicted to miss a target by up to a quarter too. One
replica is played with its share of the arrivals, which is what a router at random leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, exp, inf
from typing import NamedTuple

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.metrics.stats import share_interval
from headway.plan.answers_lists import Finalist, Offer, Tail
from headway.plan.candidates import Candidate
from headway.plan.traffic import Target, Traffic
from headway.roofline.residual import corrections
from headway.roofline.served import Corrected

NEAR = 1.25  # times a target: predicted within, a deployment may be played all the same
MEASURED = 300  # requests of a play, at least
MOST = 1500  # requests of a play, those before and after the measured ones included
EACH = 600  # requests for every play asked for, after which there is no other
LOOKED_AT = 5  # times as many deployments as are to be played: some cannot be
OFTENEST = 2  # times as many plays as asked for, while none meets the targets


class Staged(NamedTuple):
    """How one replica is played, set up as its command lines say.

    Attributes:
        rows, step_tokens: of a step at most. longest: context.
        rate: requests/s of this replica. cv2: squared coefficient of variation of the gaps between them.
        prompt, output: tokens. shared: of the prompt, which all begin with.
        slower: steps take so many times what the fitted constants say, as measured runs suggest.
        before: seconds of a first token outside of steps: the engine's front end.
        settling: seconds until the batch is full, and before the end in which it empties: not measured.
        requests: to play.
    """

    rows: int
    step_tokens: int
    longest: int
    rate: float
    cv2: float
    prompt: int
    output: int
    shared: int
    slower: float
    before: float
    settling: float
    requests: int


Request = tuple[float, float | None]  # seconds to its first token, and per token after it, if any; inf: it failed
Play = Callable[[Candidate, Staged], Sequence[Request]]  # BadInput: there are no step times for it


class Plays(NamedTuple):
    """`most` plays, by whom."""

    most: int
    play: Play


class Entry(NamedTuple):
    """A deployment, what it is of, and whether the prediction misses a target by a little."""

    row: Offer
    candidate: Candidate
    near: bool = False


def looser(target: Target) -> Target:
    """What a deployment predicted to miss a target by a little meets."""
    ttft, tpot = (None if value is None else value * NEAR for value in (target.ttft, target.tpot))
    return Target(ttft, tpot, target.share)


def finals(
    found: Sequence[Entry], near: Sequence[Entry], plays: Plays, traffic: Traffic, target: Target
) -> list[Finalist]:
    """Play the cheapest of `found` (cheapest first), and of `near` those that would come before them: half of the
    plays at most, the nearest to the targets first. While none meets its targets, `OFTENEST` times as many; none more
    once all had `EACH` requests for every play asked for."""
    spent, holding = 0, False
    answers: list[Finalist] = []

    def counted(candidate: Candidate, staged: Staged) -> Sequence[Request]:
        nonlocal spent
        spent += staged.requests
        return plays.play(candidate, staged)

    first = min((one.row.usd_per_hour for one in found if one.row.prefill is None), default=inf)
    close = sorted((one for one in near if one.row.usd_per_hour < first), key=lambda one: _excess(one.row, target))
    close = close[: plays.most // 2 if found else plays.most]
    left, reached = plays.most - len(close), len(close)
    for one in (*close, *found[: LOOKED_AT * plays.most]):
        if spent >= EACH * plays.most or left <= (0 if holding else plays.most * (1 - OFTENEST)):
            break
        answers.append(_played(one, counted, traffic, target))
        if answers[-1].ttft is not None and not one.near:
            left, holding, reached = left - 1, holding or answers[-1].placed, len(answers)
    shown = answers[: max(reached, plays.most)]  # nothing that was not played after the last one that was
    return sorted(shown, key=lambda one: (one.deployment.usd_per_hour, one.deployment.ttft_ms))


def _excess(row: Offer, target: Target) -> float:
    """How many times over its targets it is predicted to be, at the worst."""
    pairs = ((row.ttft_ms, target.ttft), (row.tpot_ms, target.tpot))
    return max((ms / 1e3 / wanted for ms, wanted in pairs if wanted is not None), default=0.0)


def _played(one: Entry, play: Play, traffic: Traffic, target: Target) -> Finalist:
    def silent(why: str) -> Finalist:
        return Finalist(deployment=one.row, near=one.near, verdict="not played", reason=f"not played: {why}")

    layout = one.candidate.deployment.layout
    if one.row.prefill is not None:
        return silent("the simulator has no separate prefill and decode pools")
    if layout.attention_dp > 1 or layout.expert_parallel > 1 or layout.pipeline > 1:
        return silent("the simulator plays tensor parallelism alone, no stages and no attention or expert groups")
    staged = staging(one, traffic)
    if staged is None:
        return silent(f"{MOST:,} requests are too few to fill its batch")
    try:
        return judged(one, play(one.candidate, staged), staged, target)
    except BadInput as error:
        return silent(str(error))


def staging(one: Entry, traffic: Traffic) -> Staged | None:
    """How to play a deployment; None where that takes too many requests."""
    row, candidate = one.row, one.candidate
    rate = row.rate / row.replicas
    settling = (row.ttft_ms + traffic.output_tokens * row.mean_tpot_ms) / 1e3
    requests = MEASURED + ceil(2 * rate * settling)
    slower, before = _engine(candidate, row.batch) if row.basis != "measured" else (1.0, 0.0)
    prompt = max(1, round(traffic.input_tokens))
    return None if requests > MOST else Staged(
        row.rows, max(row.chunk, row.rows), row.max_model_len, rate, traffic.arrival_cv2, prompt,
        max(1, round(traffic.output_tokens)), min(prompt - 1, round(traffic.input_tokens - traffic.fresh_tokens)),
        slower, before, settling, requests,
    )  # fmt: skip


def _engine(candidate: Candidate, batch: float) -> tuple[float, float]:
    """(times that its steps take longer than fitted, seconds of a first token outside of them)."""
    curve = candidate.mixed
    columns = curve.by_chunk[max(curve.by_chunk)]
    corrected = Corrected([curve.deployment], corrections())
    slower = exp(float(corrected.log("tpot", np.array([0]), np.array([max(1.0, batch)]))[0]))
    alone = float(columns["first"][0]) - float(columns["own"][0]) - float(columns["decode"][0])
    return slower, max(0.0, alone)


def judged(one: Entry, requests: Sequence[Request], staged: Staged, target: Target) -> Finalist:
    """What the measured requests say of it. It misses a target for sure where even the upper end of the 95 % interval
    of the share in time is below the one promised."""
    good = sum(_in_time(request, target) for request in requests)
    share = good / len(requests)
    high = share_interval(good, len(requests))[1]
    verdict = "meets" if share >= target.share else "misses" if high < target.share else "close"
    said = f"{share:.1%} of {len(requests)} requests are within the targets, {100 * target.share:g} % promised"
    return Finalist(
        deployment=one.row, near=one.near, verdict=verdict, reason=f"in the simulation {said}",
        requests=len(requests), played=staged.requests, seconds=len(requests) / staged.rate,
        ttft=_tail([ttft for ttft, _ in requests]),
        tpot=_tail([tpot for _, tpot in requests if tpot is not None]), attainment=share,
    )  # fmt: skip


def _in_time(request: Request, target: Target) -> bool:
    limits = zip(request, (target.ttft, target.tpot), strict=True)
    return all(limit is None or value is None or value <= limit for value, limit in limits) and request[0] < inf


def _tail(seconds: Sequence[float]) -> Tail | None:
    """None of nothing."""
    if not seconds:
        return None
    return Tail(*(1e3 * float(np.quantile(seconds, share, method="inverted_cdf")) for share in (0.5, 0.95, 0.99)))


def promoted(row: Offer) -> Offer:
    """A deployment that only its simulation gave a place: known to carry this traffic, and no more."""
    return msgspec.structs.replace(row, goodput=row.rate, utilisation=1.0, headroom=0.0, survives_one_loss=False)
