"""A planned replica, played: its requests take what its steps take, and no more than arrives in a full batch counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headway.core.errors import BadInput
from headway.plan.estimates import served
from headway.plan.load import curves
from headway.roofline.hardware import find_hardware
from headway.roofline.profile import Profile, device_of
from headway.roofline.residual import corrections
from headway.roofline.served import Corrected
from headway.roofline.step import decode_step, mixed_step, prefill_step
from headway.roofline.work import Layout
from headway.shape.catalogue import find_model
from headway.simulate.deploy import EngineSetup, deployed
from headway.simulate.staged import planned_steps, play_replica

SHAPE, H100 = find_model("llama-3.1-8b"), find_hardware("h100")
PLANNED = served(SHAPE, H100, "vllm", "bf16", 1, 1, 1000, 100, None, Layout(1))
ALONE: dict[str, Any] = {
    "rows": 64, "step_tokens": 8192, "longest": 4096, "rate": 0.01, "cv2": 1.0, "prompt": 1000, "output": 100,
    "shared": 0, "slower": 1.0, "before": 0.0, "settling": 0.0, "requests": 20,
}  # fmt: skip


@pytest.mark.parametrize("device", ["h100", "b200", "mi300x"])
@pytest.mark.parametrize(("name", "precision"), [("llama-3.1-8b", "bf16"), ("llama-3.1-8b", "fp8"),
                                                 ("gpt-oss-120b", "mxfp4"), ("qwen3-30b-a3b", "bf16")])  # fmt: skip
@pytest.mark.parametrize("gpus", [1, 4])
def test_steps_take_what_they_take_in_the_closed_loop(device: str, name: str, precision: str, gpus: int) -> None:
    shape = find_model(name)
    planned = served(shape, find_hardware(device), "vllm", precision, gpus, 1, 2000, 500, None, Layout(gpus))
    (curve,) = curves([planned], (2048,))
    columns, flying = curve.by_chunk[2048], curve.flying
    model = planned_steps(planned)
    factor = math.exp(float(Corrected([planned], corrections()).log("tpot", np.array([0]), np.array([64.0]))[0]))
    decodes = decode_step(planned.stored, 64, 2250)
    mixed = mixed_step(decodes, prefill_step(planned.stored, 2000))
    for step, column in ((decodes, "decode"), (mixed, "full")):
        assert factor * model.predict(step) == pytest.approx(float(np.interp(64, flying, columns[column])), rel=0.03)


def test_a_request_alone_takes_what_its_steps_take() -> None:
    token = planned_steps(PLANNED).predict(decode_step(PLANNED.stored, 1, 1050))
    seen = play_replica(PLANNED, None, **ALONE)
    assert len(seen) == 20
    for ttft, tpot in seen:
        assert tpot == pytest.approx(token, rel=0.01)
        assert ttft > token


def test_slower_steps_and_the_front_end_are_counted_once() -> None:
    plain = play_replica(PLANNED, None, **ALONE)
    other = play_replica(PLANNED, None, **(ALONE | {"slower": 2.0, "before": 0.5}))
    for (ttft, tpot), (late, slow) in zip(plain, other, strict=True):
        assert tpot is not None and slow == pytest.approx(2 * tpot, rel=1e-3)
        assert late == pytest.approx(0.5 + 2 * ttft, rel=1e-3)


def test_a_shared_prefix_is_computed_once() -> None:
    cold, warm = (
        play_replica(PLANNED, None, **(ALONE | {"shared": shared, "prompt": 3000})) for shared in (0, 2900)
    )  # fmt: skip
    assert warm[0] == pytest.approx(cold[0], rel=0.01)
    assert all(hit[0] < 0.7 * miss[0] for hit, miss in zip(warm[1:], cold[1:], strict=True))


def test_only_those_that_come_while_the_batch_is_full_count() -> None:
    busy = ALONE | {"rate": 20.0, "requests": 200}
    everyone = play_replica(PLANNED, None, **busy)
    counted = play_replica(PLANNED, None, **(busy | {"settling": 2.0}))
    assert len(everyone) == 200 and 80 < len(counted) < 160
    assert set(counted) <= set(everyone)
    assert play_replica(PLANNED, None, **busy) == everyone  # in virtual time, so always the same


def test_bursts_wait_longer() -> None:
    def worst(cv2: float) -> float:
        return max(
            ttft for ttft, _ in play_replica(PLANNED, None, **(ALONE | {"rate": 10.0, "requests": 300, "cv2": cv2}))
        )

    assert worst(16.0) > worst(1.0)


def test_a_device_without_known_steps_is_refused() -> None:
    box = device_of(Profile("box", "2026-01-01", 32, 256e9, {"32": 400e9}, {"bf16": 2e13, "fp32": 4e12}))
    planned = served(SHAPE, box, "vllm", "bf16", 1, 1, 100, 50, None, Layout(1))
    with pytest.raises(BadInput, match="no step times are known of box"):
        play_replica(planned, None, **ALONE)


@pytest.mark.parametrize(("model", "device"), [("gpt-oss-120b", "rtx-pro-6000"), ("gpt-oss-20b", "h100-sxm")])
def test_a_replica_with_windows_holds_the_sequences_that_were_planned(model: str, device: str) -> None:
    """Pools of equal size leave half of the memory to windows that never fill it, and requests wait for the rest."""
    planned = served(find_model(model), find_hardware(device), "vllm", "mxfp4", 1, 1, 2000, 500)
    rows = round(planned.capacity)
    setup = EngineSetup(max_rows=rows, max_step_tokens=8192, max_model_len=5120, prefix_cache=False)
    limits = deployed(planned.stored, planned.hardware, 1, setup).limits
    blocks = [size for size, window in zip(limits.blocks, limits.windows, strict=True) if window is None]
    assert min(blocks) * limits.block_size / (2000 + 0.6 * 500) >= 0.9 * rows
