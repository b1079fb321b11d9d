"""One replica of a planned deployment, played for some traffic: what its requests see once its batch is full."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec

from headway.core.errors import BadInput
from headway.metrics.records import NS_PER_S, RequestRecord
from headway.roofline.calibrate import calibration
from headway.roofline.deployment import Deployment
from headway.roofline.profile import Profile
from headway.roofline.replica import Replica, deploy
from headway.roofline.step import StepTime
from headway.simulate.deploy import EngineSetup, deployed
from headway.simulate.play import play
from headway.simulate.traffic import Traffic


def play_replica(
    planned: Deployment, profile: Profile | None, *, rows: int, step_tokens: int, longest: int, rate: float, cv2: float,
    prompt: int, output: int, shared: int, slower: float, before: float, settling: float, requests: int,
    progress: Callable[[int], None] = lambda ended: None,
) -> list[tuple[float, float | None]]:  # fmt: skip
    """Seconds to the first token, and per token after it (None of one token), of every request that arrived when the
    batch was full; inf of those that were refused.

    Args:
        planned: tensor-parallel, if anything. profile: of the machine whose own steps are played.
        rows, step_tokens: most requests, and new tokens, of a step. longest: context.
        rate: Poisson arrivals per second, or gamma ones where `cv2` of the gaps is not 1.
        prompt, output, shared: tokens; all prompts begin with `shared` equal ones.
        slower: steps take so many times what the engine's fitted constants say.
        before: seconds of a first token outside of the steps.
        settling: seconds at the beginning and at the end whose arrivals do not count.

    Raises:
        BadInput: there is no estimate of its steps' times, or it cannot be set up so.
    """
    setup = EngineSetup(max_rows=rows, max_step_tokens=step_tokens, max_model_len=longest, prefix_cache=shared > 0)
    replica = deployed(planned.stored, planned.hardware, planned.gpus, setup, profile=profile)
    if replica.label.startswith("predicted by a bound"):
        raise BadInput("--hardware", f"no step times are known of {planned.hardware.name}")
    replica = replica if profile else msgspec.structs.replace(replica, model=planned_steps(planned, slower))
    load = Traffic(
        requests=requests, rate=rate, input_tokens=prompt, output_tokens=output, shared_prefix=shared,
        max_tokens=output, arrival="poisson" if cv2 == 1 else "gamma", burstiness=1 / max(cv2, 1e-6),
    )  # fmt: skip
    source = load.source(replica.limits.max_model_len)
    found = play(replica, source, load.load, detail=0, progress=progress)
    records, empty = found.run.records, round(settling * NS_PER_S)
    first, last = records[0].intended + empty, records[-1].intended - empty
    counted = [one for one in records if first <= one.intended <= last]
    return [_seen(one, before) for one in counted or records]


def planned_steps(planned: Deployment, slower: float = 1.0) -> StepTime:
    """The steps of the plan: the constants of its engine and device, so many times as slow. Arithmetic is that of its
    precision, in which the constants are shares."""
    device = planned.hardware
    math = device.math_for(planned.precision)
    replica = deploy(planned.stored, device, planned.gpus, math=math, mode=Replica)
    efficiency, reduce = calibration().constants(planned)
    reduce = msgspec.structs.replace(reduce, bandwidth=reduce.bandwidth / slower, floor=reduce.floor * slower)
    return replica.step_time(efficiency.slower(slower), reduce if planned.gpus > 1 else None)


def _seen(record: RequestRecord, before: float) -> tuple[float, float | None]:
    if record.ttft_ms is None or not record.completed:
        return inf, inf
    tpot = record.tpot_ms
    return before + record.ttft_ms / 1e3, None if tpot is None else tpot / 1e3
