"""The calibrated model: an estimate is above its bound and inside its range, and outside the region there is none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.roofline.calibrate import Calibration, calibration
from headway.roofline.constants import ALL, IDEAL, LEVELS, family, ideal, resolve
from headway.roofline.deployment import Deployment, quantities
from headway.roofline.hardware import find_hardware
from headway.roofline.loop import Loop
from headway.shape.catalogue import find_model

MODELS = {"llama-3.1-8b": "bf16", "llama-3.1-70b": "fp8", "gpt-oss-120b": "fp4", "minimax-m2.5": "fp8"}


def deployment(model: str = "llama-3.1-70b", hardware: str = "h100-sxm", **fields: object) -> Deployment:
    known = {"engine": "vllm", "concurrency": 16.0, "prompt": 1024.0, "output": 512.0, "gpus": 4}
    known |= {"precision": MODELS.get(model, "bf16")} | fields
    return Deployment(find_model(model), find_hardware(hardware), **known)  # type: ignore[arg-type]


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["h100-sxm", "h200-sxm", "b200-sxm"]),
    st.sampled_from(["vllm", "sglang", "trtllm"]),
    st.sampled_from([4, 8]),
    st.floats(1, 512),
    st.floats(128, 8192),
    st.floats(128, 8192),
)
def test_an_estimate_is_above_its_bound_and_inside_its_range(model, hardware, engine, gpus, load, prompt, output):
    found = calibration().predict(
        deployment(model, hardware, engine=engine, gpus=gpus, concurrency=load, prompt=prompt, output=output)
    )
    assert (found.label, found.reason) == ("estimate", "")
    assert found.tpot is not None and found.ttft is not None
    assert found.bound_tpot <= found.tpot.p50 and found.bound_ttft <= found.ttft.p50
    for one in (found.tpot, found.ttft):
        assert 0 < one.p10 < one.p50 < one.p90
    assert sum(found.terms.values()) == pytest.approx(found.tpot.p50)
    assert min(found.terms.values()) >= 0


@given(st.sampled_from(sorted(MODELS)), st.floats(1, 200), st.floats(1.01, 2))
def test_more_load_never_makes_a_token_faster(model, load, factor):
    few, many = (
        calibration().predict(deployment(model, "b200-sxm", concurrency=c)).tpot for c in (load, load * factor)
    )
    assert few is not None and many is not None and many.p50 >= few.p50 * 0.999


def test_more_prompt_per_output_token_slows_aggregated_tokens_and_not_disaggregated_ones():
    def tpot(prompt: float, output: float, apart: bool) -> float:
        # Equal mean context, so that only the interference differs.
        found = calibration().predict(deployment(prompt=prompt, output=output, disaggregated=apart, concurrency=64.0))
        assert found.tpot is not None
        return found.tpot.p50

    assert tpot(1920, 256, False) > 1.2 * tpot(1024, 2048, False)
    assert tpot(1920, 256, True) == pytest.approx(tpot(1024, 2048, True), rel=0.01)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"engine": "headway"}, "no measured runs of engine headway"),
        ({"hardware": "a100-sxm"}, "no measured runs on a100-sxm"),
        ({"precision": "int4", "model": "llama-3.1-8b", "hardware": "mi300x"}, "no measured runs on mi300x"),
        ({"gpus": 1, "precision": "bf16"}, "does not fit: 141 GB of weights per GPU"),
        ({"precision": "fp4"}, ""),
        ({"concurrency": 1e6}, "concurrency 1e+06 is outside the measured"),
        ({"prompt": 64e3, "concurrency": 1.0, "gpus": 8}, "prompt 64000 is outside the measured"),
    ],
)
def test_it_abstains_with_a_reason_outside_the_validated_region(fields, reason):
    found = calibration().predict(deployment(**fields))
    assert found.reason.startswith(reason) and bool(found.reason) == bool(reason)
    if reason:
        assert found.label == "bound" and found.tpot is None and found.ttft is None and found.bound_tpot > 0


def test_a_bound_is_bytes_over_bandwidth_or_flops_over_peak():
    one = deployment("llama-3.1-8b", gpus=1, concurrency=1.0, prompt=128.0, output=8192.0)
    column = quantities([one])
    found = Loop(column, ideal(1)).solve()
    read = column["body_bytes"][0] + column["cache_read"][0]
    assert found["tpot"][0] == pytest.approx(read / 3.35e12, rel=1e-6)
    weights = 2 * (one.shape.n_params - one.shape.params.embed - one.shape.params.norm)
    assert column["body_bytes"][0] == pytest.approx(weights)


def test_four_bit_mixtures_quantise_their_routed_experts_only():
    mixture, dense = deployment("gpt-oss-120b", "b200-sxm"), deployment("llama-3.1-70b", "b200-sxm", precision="fp4")
    assert quantities([mixture])["body_bytes"][0] * 4 == pytest.approx(
        2 * (mixture.shape.params.attention + mixture.shape.params.router + mixture.shape.head_params)
    )
    assert quantities([mixture])["expert_bytes"][0] * 4 == pytest.approx(mixture.shape.params.experts * (0.5 + 1 / 32))
    assert quantities([dense])["body_bytes"][0] < 0.6 * 70e9 / 4 * 1.1


def test_a_latent_cache_is_not_split_and_data_parallel_attention_copies_attention_weights():
    alone = deployment("deepseek-r1", "b200-sxm", precision="fp8", gpus=8)
    apart = msgspec.structs.replace(alone, attention_dp=8)
    a, b = quantities([alone]), quantities([apart])
    assert a["cache_read"][0] == b["cache_read"][0]
    assert b["body_bytes"][0] == pytest.approx(8 * a["body_bytes"][0])
    assert a["expert_bytes"][0] == b["expert_bytes"][0]


def test_constants_have_no_level_that_could_remember_a_model():
    one = deployment("llama-3.1-70b", precision="bf16")
    twin = msgspec.structs.replace(one, shape=find_model("qwen2.5-72b"))
    for level, of in LEVELS.items():
        assert of(one) == of(twin), level
    a, b = resolve(calibration().offsets, [one]), resolve(calibration().offsets, [twin])
    assert all(a[name] == b[name] for name in a)


def test_every_constant_has_a_bound_and_a_fitted_table_for_both_kinds():
    names = {constant.name for constant in ALL}
    assert names == set(IDEAL)
    assert all(set(calibration().offsets[kind]) == names for kind in ("dense", "moe"))


def test_fitted_shares_of_peak_are_physical():
    for model, precision in MODELS.items():
        for hardware in ("h100-sxm", "b200-sxm"):
            for engine in ("vllm", "sglang", "trtllm"):
                found = calibration().efficiency(find_model(model), find_hardware(hardware), engine, precision, 8)
                assert 0.2 < found.stream < 1 and 0.2 < found.stream_cache < 1 and found.stream_experts < 1, (
                    model,
                    hardware,
                    engine,
                )
                assert 0.05 < found.linear < 1, (model, hardware, engine, found)
                assert 0 < found.layer < 3e-4 and 0 < found.step < 3e-3 and 0 <= found.row < 2e-4


def test_families_are_by_architecture():
    assert family("h100-sxm") == family("h200-sxm") == "hopper"
    assert family("gb300") == "blackwell" and family("mi300x") == "mi300x"


def test_the_calibration_survives_its_file_format():
    known = calibration()
    assert msgspec.json.decode(msgspec.json.encode(known), type=Calibration) == known
