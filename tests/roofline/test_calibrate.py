"""The calibrated model: an estimate is above its bound and inside its range, and outside the region there is none."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.roofline.calibrate import Calibration, Estimate, calibration
from headway.roofline.constants import ALL, IDEAL, LEVELS, family, resolve
from headway.roofline.deployment import Deployment, Pool
from headway.roofline.hardware import find_hardware
from headway.roofline.loop import Fleet, Loop, StepTimes
from headway.roofline.step import StepTime, decode_step, mixed_step, prefill_step
from headway.roofline.work import Amounts
from headway.roofline.work import amounts_of as unit_amounts
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
        pool = Pool(gpus=4, workers=99) if apart else None
        found = calibration().predict(deployment(prompt=prompt, output=output, prefill=pool, concurrency=64.0))
        assert found.tpot is not None
        return found.tpot.p50

    assert tpot(1920, 256, False) > 1.2 * tpot(1024, 2048, False)
    # Of short answers a larger share is still waiting for its prompt, so a few decode less.
    assert tpot(1920, 256, True) == pytest.approx(tpot(1024, 2048, True), rel=0.03)


def test_a_prefill_pool_that_is_too_small_keeps_decode_batches_small_and_lets_requests_wait():
    def found(workers: float) -> Estimate:
        return calibration().predict(
            deployment(prompt=8000.0, output=256.0, prefill=Pool(gpus=4, workers=workers), concurrency=256.0)
        )

    few, many = found(1.0), found(float("inf"))
    assert few.tpot is not None and few.ttft is not None and many.tpot is not None and many.ttft is not None
    assert few.tpot.p50 < many.tpot.p50 and few.ttft.p50 > 3 * many.ttft.p50
    # What is in flight is being prefilled or decoded: Little's law of a pool that is never idle.
    fleet = Fleet.of([deployment(prompt=8000.0, output=256.0, prefill=Pool(gpus=4, workers=1.0), concurrency=256.0)])
    solved = Loop.bound(fleet).tokens()
    rate = 256 / (solved["alone"] + 256 * solved["tpot"])
    assert rate * solved["own"] == pytest.approx(1.0, rel=0.05)


def test_messages_between_nodes_take_longer():
    inside, across = (find_hardware("h100").reach(gpus) for gpus in (8, 16))
    assert across < inside == find_hardware("h100").link.bandwidth
    assert not find_hardware("gb200").crosses_nodes(72)
    wide = [
        calibration().predict(deployment("llama-3.1-70b", name, gpus=16, concurrency=4.0)) for name in ("h200", "gb200")
    ]
    assert wide[0].terms["all_reduce"] > 2.5 * wide[1].terms["all_reduce"]


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


def amounts_of(deployment: Deployment) -> Amounts:
    return unit_amounts(deployment.stored, deployment.layout)


def test_a_bound_is_bytes_over_bandwidth_or_flops_over_peak():
    one = deployment("llama-3.1-8b", gpus=1, concurrency=1.0, prompt=128.0, output=8192.0)
    fleet = Fleet.of([one])
    found = Loop.bound(fleet).solve()
    weights = 2 * (one.shape.n_params - one.shape.params.embed)
    cache = one.shape.layers * one.shape.groups[0].layer_row_bytes() * (128 + 4096)
    assert found["tpot"][0] == pytest.approx((weights + cache) / 3.35e12, rel=1e-6)


@pytest.mark.parametrize("fields", [
    {}, {"model": "gpt-oss-120b", "hardware": "b200-sxm", "engine": "trtllm"},
    {"model": "deepseek-r1", "hardware": "b200-sxm", "precision": "fp8", "gpus": 8, "attention_dp": 8,
     "expert_parallel": 8, "engine": "sglang"},
    {"model": "glm-5", "hardware": "b200-sxm", "precision": "fp8", "gpus": 8, "engine": "sglang"},
    {"model": "qwen3.5-397b-a17b", "hardware": "h200-sxm", "precision": "fp8", "gpus": 8},
])  # fmt: skip
def test_every_step_of_the_loop_is_what_step_time_says_of_it(fields):
    """One formula: arrays in the closed loop, floats in the scheduler and the planner."""
    one = deployment(**{"prompt": 1000.0, "output": 200.0} | fields)
    fleet = Fleet.of([deployment(), one])  # beside another, with other KV groups
    loop = Loop.calibrated(fleet, resolve(calibration().offsets, [deployment(), one]))
    efficiency, reduce = calibration().constants(one)
    model = StepTime(one.stored, one.hardware, one.layout, math=one.hardware.math_for(one.precision),
                     efficiency=efficiency, all_reduce=reduce)  # fmt: skip
    bound = StepTime(one.stored, one.hardware, one.layout, math=model.math)
    for batch in (1, 2, 64, 300):
        step, decodes = decode_step(one.stored, batch, 1100), loop.decoding(batch)
        assert loop.model.predict(decodes)[1] == pytest.approx(model.predict(step), rel=1e-9)
        assert StepTimes(fleet).predict(decodes)[1] == pytest.approx(bound.predict(step), rel=1e-9)
        # a whole prompt beside: causal attention of 1000 tokens has 1000 * 1001 / 2 pairs, the loop counts 1000^2 / 2
        mixed = mixed_step(step, prefill_step(one.stored, 1000))
        beside = mixed_step(decodes, loop.piece(np.full(2, 1000.0)))
        assert loop.model.predict(beside)[1] == pytest.approx(model.predict(mixed), rel=1e-3)


def test_the_terms_of_an_estimate_are_those_of_its_steps():
    found = calibration().predict(deployment(concurrency=1.0))
    assert found.terms["prompts"] == 0 and found.tpot is not None
    assert {"weights", "head", "kv", "all_reduce", "overhead"} <= {name for name, value in found.terms.items() if value}


def test_four_bit_mixtures_quantise_their_routed_experts_only():
    mixture, dense = deployment("gpt-oss-120b", "b200-sxm"), deployment("llama-3.1-70b", "b200-sxm", precision="fp4")
    body = amounts_of(mixture).linear_read + amounts_of(mixture).head_read
    assert body * 4 == pytest.approx(2 * (mixture.shape.params.body + mixture.shape.head_params))
    experts = amounts_of(mixture).expert_read * mixture.shape.moe.experts
    assert experts * 4 == pytest.approx(mixture.shape.params.experts * (0.5 + 1 / 32))
    assert amounts_of(dense).linear_read < 0.6 * 70e9 / 4


def test_a_latent_cache_is_not_split_and_data_parallel_attention_copies_all_but_the_experts():
    alone = deployment("deepseek-r1", "b200-sxm", precision="fp8", gpus=8)
    a, b = amounts_of(alone), amounts_of(msgspec.structs.replace(alone, attention_dp=8))
    assert a.caches[0].read == b.caches[0].read
    assert b.linear_read == pytest.approx(8 * a.linear_read) and b.head_read == pytest.approx(8 * a.head_read)
    assert a.expert_read == b.expert_read


def test_constants_have_no_level_that_could_remember_a_model():
    one = deployment("llama-3.1-70b", precision="bf16")
    twin = msgspec.structs.replace(one, shape=find_model("qwen2.5-72b"))
    for level, of in LEVELS.items():
        assert of(one) == of(twin), level
    a, b = resolve(calibration().offsets, [one]), resolve(calibration().offsets, [twin])
    assert all(a[name] == b[name] for name in a)


def test_every_constant_has_a_fitted_table_for_both_kinds():
    names = {constant.name for constant in ALL}
    assert set(IDEAL) < names
    assert all(set(calibration().offsets[kind]) == names for kind in ("dense", "moe"))


def test_fitted_shares_of_peak_are_physical():
    for model, precision in MODELS.items():
        for hardware in ("h100-sxm", "b200-sxm"):
            for engine in ("vllm", "sglang", "trtllm"):
                one = deployment(model, hardware, engine=engine, precision=precision, gpus=8)
                found, _ = calibration().constants(one)
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
