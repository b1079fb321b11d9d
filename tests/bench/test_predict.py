"""The step-time model's bound beside measured numbers."""

from __future__ import annotations

import msgspec
import pytest

from headway.bench.predict import backing, mean_batch, predict
from headway.core.errors import BadInput
from headway.metrics.summary import summarize
from headway.roofline.hardware import find_hardware
from headway.roofline.step import StepTime, decode_step, prefill_step
from headway.shape.catalogue import find_model
from tests.bench.streams import failed, record, run_of

SHAPE, DEVICE = find_model("llama-3.1-8b"), find_hardware("h100-sxm")
MACHINE = backing(SHAPE, DEVICE)


def test_the_batch_is_what_the_mean_token_saw() -> None:
    """Streams of 3 s: alone 1; two in step 2; two that overlap for half their time, half alone."""
    assert mean_batch([record()]) == pytest.approx(1)
    assert mean_batch([record(), record()]) == pytest.approx(2)
    assert mean_batch([record(), record(at_ms=1500)]) == pytest.approx((1 * 3 + 4 * 1.5) / 6)
    assert mean_batch([]) == 1.0


def test_each_number_stands_beside_its_bound() -> None:
    """One stream, 2,000 prompt tokens of which 500 were cached, 301 tokens at 10 ms."""
    run = run_of(record(prompt=2000, cached=500))
    found = predict(run, summarize(run), MACHINE)
    model = StepTime(SHAPE, DEVICE)
    step = model.predict(decode_step(SHAPE, 1, round(2000 + 301 / 2)))
    chunk = model.predict(prefill_step(SHAPE, 1500, 500))
    rows = found["metrics"]
    assert rows["tpot_ms"]["predicted"] == pytest.approx(step * 1e3)
    assert rows["ttft_ms"]["predicted"] == pytest.approx(chunk * 1e3)
    assert rows["e2e_ms"]["predicted"] == pytest.approx((chunk + 300 * step) * 1e3)
    assert rows["tpot_ms"]["measured"] == pytest.approx(10)
    assert rows["tpot_ms"]["unexplained"] == pytest.approx(10 - step * 1e3)
    assert rows["tpot_ms"]["terms"]["weights"] > rows["tpot_ms"]["terms"]["kv"] > 0
    assert found["binds"] == {"decode": "memory", "prefill": "compute"}


def test_mbu_is_bytes_of_a_step_over_tpot_and_bandwidth() -> None:
    """15 GB of weights (all but the embedding) in 10 ms are 1.5 TB/s, 45 % of an H100."""
    run = run_of(record())
    found = predict(run, summarize(run), MACHINE)
    assert found["mbu"] == pytest.approx((SHAPE.n_params - SHAPE.params.embed) * 2 / 0.01 / DEVICE.bandwidth, rel=0.01)
    assert 0 < found["mfu"] < 1 and found["reason"] is None


def test_faster_than_the_machine_is_called_out() -> None:
    run = run_of(record(gap_ms=3))
    found = predict(run, summarize(run), MACHINE)
    assert found["mbu"] > 1 and "above 1" in found["reason"]


def test_precision_changes_the_bound() -> None:
    run = run_of(record(prompt=8000))
    whole = predict(run, summarize(run), MACHINE)["metrics"]["tpot_ms"]
    narrow = predict(run, summarize(run), backing(SHAPE, DEVICE, 1, "int4", "fp8"))["metrics"]["tpot_ms"]
    assert narrow["predicted"] < 0.4 * whole["predicted"]
    assert narrow["terms"]["kv"] == pytest.approx(whole["terms"]["kv"] / 2)


def test_without_an_answer_there_is_no_prediction_but_a_reason() -> None:
    run = run_of(failed())
    assert predict(run, summarize(run), MACHINE).keys() == {"reason"}


def test_gpus_need_a_link() -> None:
    lonely = msgspec.structs.replace(DEVICE, link=None)
    with pytest.raises(BadInput, match="link"):
        backing(SHAPE, lonely, 2)
