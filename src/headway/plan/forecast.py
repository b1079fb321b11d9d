"""Estimates beside bounds: what requests served by an engine see and cost, for verbs whose own answer is a bound.

One closed loop, the one of `estimate`, at the loads the verb is about. Ranges are of TPOT and TTFT of measured runs;
what follows from both (requests and dollars) is given at the ends of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.plan.answers import ServedLoad
from headway.plan.answers_prices import ServedPrice
from headway.plan.estimates import served
from headway.plan.load import CHUNKS, curves
from headway.plan.setup import Setup
from headway.roofline.calibrate import Estimate, calibration
from headway.roofline.deployment import Deployment
from headway.roofline.replica import Replica
from headway.roofline.timing import Range

OUTPUT = 500  # tokens of an answer, where a verb knows only the mean context


class Forecasts(msgspec.Struct, frozen=True):
    """At every load asked for that memory holds; none, and the reason, where no measured runs support them."""

    points: list[ServedLoad]
    abstained: str = ""


def lengths(context: int, output_tokens: int = OUTPUT) -> tuple[int, int]:
    """(prompt, output) of requests that hold `context` tokens on average while they decode."""
    return max(1, context - output_tokens // 2), output_tokens


def deployed(setup: Setup, replica: Replica, load: float, prompt: float, output: float) -> Deployment:
    """The replica as the calibration knows it."""
    return served(
        replica.shape, replica.hardware, setup.engine, replica.precision, replica.gpus, load, prompt, output,
        {1.0: "fp8", 2.0: "bf16"}.get(replica.shape.kv_width), replica.layout,
    )  # fmt: skip


def forecasts(setup: Setup, replica: Replica, loads: Sequence[float], prompt: float, output: float) -> Forecasts:
    """Of equal requests, as many always in flight as each of `loads` says."""
    one = deployed(setup, replica, 1.0, prompt, output)
    held = sorted({min(max(1.0, float(load)), one.capacity // 1) for load in loads}) if one.fits else [1.0]
    found = calibration().predict_all([msgspec.structs.replace(one, concurrency=load) for load in held])
    points = [
        ServedLoad(load, each.tpot, each.ttft, rates(each, load, output), output)
        for load, each in zip(held, found, strict=True)
        if each.tpot and each.ttft
    ]
    return Forecasts(points, "" if points else found[0].reason)


def rates(estimate: Estimate, load: float, output: float) -> Range:
    """Requests/s of a closed loop, its slowest end first."""
    tpot, ttft = estimate.tpot, estimate.ttft
    assert tpot is not None and ttft is not None
    ends = ((tpot.p90, ttft.p90), (tpot.p50, ttft.p50), (tpot.p10, ttft.p10))
    return Range(*(load / (first + output * each) for each, first in ends))


def prices(
    deployment: Deployment, loads: Sequence[float], usd_per_hour: float, utilisation: float = 1.0
) -> list[ServedPrice] | str:
    """Dollars of a request, of its input and of its output, at each of these loads that memory holds; or why there is
    no estimate. Input and output share the bill as a prompt alone and the decode steps of its answer would, as in
    `search`; no prompt is taken to be quicker than its bound."""
    held = sorted({min(max(1.0, load), deployment.capacity // 1) for load in loads}) if deployment.fits else [1.0]
    each = [msgspec.structs.replace(deployment, concurrency=load) for load in held]
    found = calibration().predict_all(each)
    if found[0].tpot is None:
        return found[0].reason
    (curve,) = curves([deployment], (CHUNKS[0],))
    columns = curve.by_chunk[CHUNKS[0]]
    return [
        _priced(at, one, float(columns["own"][0]), float(np.interp(at.concurrency, curve.flying, columns["decode"])),
                usd_per_hour / utilisation)
        for at, one in zip(each, found, strict=True)
        if one.tpot
    ]  # fmt: skip


def _priced(deployment: Deployment, found: Estimate, own: float, decode: float, usd_per_hour: float) -> ServedPrice:
    """own, decode: seconds of a prompt alone, and of a step without prompts."""
    assert found.tpot is not None and found.ttft is not None
    output, requests = deployment.output, rates(found, deployment.concurrency, deployment.output)
    batch = max(1.0, requests.p50 * output * found.tpot.p50)
    own = max(own, found.bound_ttft)
    share = own / (own + output * decode / batch)
    dollars = [usd_per_hour / 3600.0 / rate for rate in (requests.p90, requests.p50, requests.p10)]

    def of(part: float, tokens: float) -> Range:
        return Range(*(1e6 * part * each / tokens for each in dollars))

    return ServedPrice(
        engine=deployment.engine, load=deployment.concurrency, input_tokens=deployment.prompt, output_tokens=output,
        tpot=found.tpot, ttft=found.ttft, requests_per_second=requests, usd_per_request=Range(*dollars),
        usd_per_million_input=of(share, deployment.prompt), usd_per_million_output=of(1.0 - share, output),
        validated=not deployment.cached,
    )  # fmt: skip


def requests_per_dollar(deployments: Sequence[Deployment]) -> list[float | None]:
    """Requests for the same money, up to a factor that is the same for all; None where there is no estimate."""
    return [
        rates(found, each.concurrency, each.output).p50 / each.gpus if found.tpot else None
        for found, each in zip(calibration().predict_all(deployments), deployments, strict=True)
    ]
