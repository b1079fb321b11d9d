"""Textbook mode beyond the texts' figures: landmarks, limits and laws that must hold for any model and device."""

from __future__ import annotations

from math import inf, sqrt
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import BadInput
from headway.roofline.capacity import capacity, memory_batch
from headway.roofline.collectives import AllReduce, Fastest, all_reduce_of, served_all_reduce
from headway.roofline.cost import blended_input, price_ratio, token_cost, usd_per_million
from headway.roofline.frontier import ceiling, critical_context, frontier, knee
from headway.roofline.hardware import BASES, UTILISATION, find_hardware, hardware_catalogue
from headway.roofline.levers import levers, mean_context
from headway.roofline.memory import replica_memory
from headway.roofline.queueing import (
    little,
    queue_quantile,
    queue_seconds,
)
from headway.roofline.replica import Replica, attention_overtakes, decode, deploy, prefill, tensor_parallel
from headway.roofline.speculation import Draft, best_length, expected_tokens, speedup, tokens_per_step, verify_costs
from headway.roofline.step import StepTime
from headway.shape.catalogue import find_model
from headway.shape.model import block_bytes

H100 = find_hardware("h100")
LLAMA = deploy(find_model("llama-3.1-8b"), H100)


# --- frontier -------------------------------------------------------------------------------------------------------


def test_the_knee_is_where_arithmetic_catches_up_with_reading_the_weights() -> None:
    batch = knee(LLAMA)
    assert batch is not None
    terms = decode(LLAMA, batch, 0).terms
    assert terms["arithmetic"] == pytest.approx(terms["weights"])


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "qwen2.5-7b"])
def test_past_the_critical_context_no_batch_is_compute_bound(model: str) -> None:
    d = deploy(find_model(model), H100)
    critical = critical_context(d)
    assert critical is not None
    assert decode(d, 10**7, critical * 1.02).binds == "memory"
    assert decode(d, 10**7, critical * 0.98).binds == "compute"


@given(batch=st.integers(1, 10**6), context=st.integers(0, 10**5))
def test_no_point_of_the_frontier_exceeds_the_ceiling(batch: int, context: int) -> None:
    top = ceiling(LLAMA, context)
    assert top is not None
    assert batch / decode(LLAMA, batch, context).seconds <= top * (1 + 1e-9)


def test_the_frontier_marks_what_does_not_fit() -> None:
    curve = frontier(LLAMA, 4096)
    assert curve.fits == 119
    assert [point.fits for point in curve.points] == [point.batch <= 119 for point in curve.points]
    assert any(not point.fits for point in curve.points)
    per_user = [point.tokens_per_second_per_user for point in curve.points]
    assert per_user == sorted(per_user, reverse=True)


# --- capacity -------------------------------------------------------------------------------------------------------

CASES = {  # tpot ms, reserve GB -> what limits
    "memory": (None, 0, 119, "memory"), "reading": (12.0, 0, 44, "tpot-memory"), "loose": (1000.0, 0, 119, "memory"),
    "too fast for one": (1.0, 0, 0, "nothing fits"), "no room": (None, 70, 0, "nothing fits"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_capacity_names_its_limit(name: str) -> None:
    tpot, reserve, batch, limited_by = CASES[name]
    found = capacity(LLAMA, 4096, None if tpot is None else tpot / 1e3, reserve * 1e9)
    assert (found.batch, found.limited_by) == (batch, limited_by)


def test_short_contexts_are_limited_by_arithmetic() -> None:
    assert capacity(LLAMA, 50, 0.010).limited_by == "tpot-compute"


@given(tpot=st.floats(0.0048, 1), context=st.integers(1, 30000))
def test_the_batch_meets_the_target_and_one_more_does_not(tpot: float, context: int) -> None:
    found = capacity(LLAMA, context, tpot)
    if found.batch:
        assert decode(LLAMA, found.batch, context).seconds <= tpot * (1 + 1e-9)
    if found.limited_by.startswith("tpot"):
        assert decode(LLAMA, found.batch + 1, context).seconds > tpot


def test_exact_capacity_counts_per_gpu_and_never_splits_a_latent_cache() -> None:
    deepseek = find_model("deepseek-v3")
    h200 = find_hardware("h200")
    per_gpu = memory_batch(deploy(deepseek, h200, 8, mode=Replica), 8192)
    assert per_gpu == int((h200.memory - deepseek.stored.total / 8) / (8192 * 70272))
    assert per_gpu < memory_batch(deploy(deepseek, h200, 8), 8192) / 7


def test_kv_blocks_of_a_measured_engine_within_ten_percent() -> None:
    # vLLM 0.19 on an RTX 4090 (casys-kaist/LLMServingSim, MIT): Llama-3.1-8B in bf16, 2,588 blocks of 16 tokens
    shape, device = find_model("llama-3.1-8b"), find_hardware("rtx-4090")
    block = block_bytes(shape.groups[0], 16)
    share = 0.9 / UTILISATION  # what that engine was told to use
    told = msgspec.structs.replace(device, visible=device.visible * share)
    assert replica_memory(shape, told, step_tokens=2048).sequences(block) == pytest.approx(2588, rel=0.1)
    small = msgspec.structs.replace(device, visible=16e9)
    assert replica_memory(shape, small).sequences(block) == 0  # the weights alone are more


# --- prefill and tensor parallel ------------------------------------------------------------------------------------


def test_prefill_attention_overtakes_the_weights_where_it_should() -> None:
    terms = prefill(LLAMA, attention_overtakes(LLAMA.shape)).terms
    assert terms["prefill_attention"] == pytest.approx(terms["arithmetic"])


def test_prefill_of_a_hit_is_the_rest_of_the_whole() -> None:
    whole, first = prefill(LLAMA, 3000).seconds, prefill(LLAMA, 1000).seconds
    assert prefill(LLAMA, 3000, cached=1000).seconds == pytest.approx(whole - first)


def test_short_prompts_cannot_be_faster_than_reading_the_weights() -> None:
    cost = prefill(LLAMA, 10)
    assert cost.binds == "memory" and cost.seconds == decode(LLAMA, 1, 0).terms["weights"]


def test_windowed_layers_attend_to_their_window_only() -> None:
    mistral = deploy(find_model("mistral-7b-v0.1"), H100)  # 4096 positions in every layer
    short, long = (prefill(mistral, tokens).terms["prefill_attention"] for tokens in (4096, 8192))
    assert short == pytest.approx(2 * 4096 * 32 * 4096**2 / mistral.pi)
    assert long == pytest.approx(3 * short)
    assert attention_overtakes(mistral.shape) == inf


def test_more_gpus_than_heads_replicate_the_cache() -> None:
    d = deploy(find_model("llama-3.1-70b"), H100)
    costs = tensor_parallel(d, [8, 16], 1, 10_000)
    assert costs[16].terms["kv"] == costs[8].terms["kv"]
    assert costs[16].terms["weights"] == costs[8].terms["weights"] / 2


def test_all_reduce_kinds() -> None:
    ring, shot = all_reduce_of("ring", 100e9, 1e-6), AllReduce("one-shot", 100e9, 1e-6)
    assert ring.seconds(8e5, 8) == pytest.approx(14e-6 + 2 * 7 / 8 * 8e5 / 100e9)
    assert shot.seconds(8e5, 8) == pytest.approx(1e-6 + 7 * 8e5 / 100e9)
    assert ring.seconds(8e5, 1) == 0
    best = Fastest((ring, msgspec.structs.replace(shot, limit=1e6)))
    assert best.seconds(1e4, 8) == shot.seconds(1e4, 8)
    assert best.seconds(1e9, 8) == ring.seconds(1e9, 8)
    assert served_all_reduce(find_hardware("m4-max")) is None


# measured on H100 NVSwitch with nccl-tests (APEX, MIT): GPUs, bytes, microseconds
NCCL = [(2, 8 << 10, 8), (4, 64 << 10, 13), (8, 4 << 10, 17), (8, 8 << 20, 80), (4, 64 << 20, 323), (8, 128 << 20, 597)]


@pytest.mark.parametrize(("gpus", "message", "microseconds"), NCCL)
def test_served_all_reduce_is_close_to_measurements(gpus: int, message: int, microseconds: float) -> None:
    way = served_all_reduce(H100)
    assert way is not None
    assert way.seconds(message, gpus) * 1e6 == pytest.approx(microseconds, rel=0.25)


# --- cost -----------------------------------------------------------------------------------------------------------


def test_cache_hits_and_idleness_move_the_price() -> None:
    full = token_cost(LLAMA, 64, 4096, 2.0)
    hit = token_cost(LLAMA, 64, 4096, 2.0, hit_share=0.5, hit_cost=0.1)
    idle = token_cost(LLAMA, 64, 4096, 2.0, utilisation=0.25)
    assert hit.usd_per_million_input == pytest.approx(full.usd_per_million_input * 0.55)
    assert idle.usd_per_million_output == pytest.approx(4 * full.usd_per_million_output)
    assert blended_input(1.0, 1.0, 0.0) == 0
    assert usd_per_million(3600, 1e6) == pytest.approx(1.0)


@given(batch=st.integers(1, 128), context=st.integers(500, 30000))
def test_the_ratio_is_the_price_of_output_over_input_while_decode_is_memory_bound(batch: int, context: int) -> None:
    cost = token_cost(LLAMA, batch, context, 2.0, prefill_attention=False)
    expected = cost.usd_per_million_output / cost.usd_per_million_input
    assert price_ratio(LLAMA, batch, context) == pytest.approx(expected, rel=1e-9)


# --- queueing -------------------------------------------------------------------------------------------------------


def test_little_holds_in_a_simulation_and_the_peak_is_ten_percent_above_the_mean() -> None:
    """The third text's experiment: 50 arrivals/s for five minutes, mean TTFT 1 s, mean decode 11 s."""
    random, clock, spans = Random(0), 0.0, []
    while clock < 300:
        clock += random.expovariate(50)
        first = clock + random.expovariate(1)
        spans.append((clock, first, first + random.expovariate(1 / 11)))
    instants = [60 + 0.05 * tick for tick in range(4000)]  # the middle of the run, after it filled up
    decoding = [sum(first <= at < last for _, first, last in spans) for at in instants[::10]]
    mean = sum(decoding) / len(decoding)
    assert mean == pytest.approx(little(50, 11), rel=0.05)
    assert little(50, 1) + little(50, 11) == 600
    assert max(decoding) / mean == pytest.approx(1 + 2.326 / sqrt(550), rel=0.06)  # Poisson: its quantile at 99 %


def test_queues() -> None:
    assert queue_seconds(0.5, 1.0) == pytest.approx(1.0)  # M/M/1: rho/(1-rho)
    assert queue_seconds(0.5, 1.0, service_cv2=0) == pytest.approx(0.5)  # M/D/1: half of it
    assert queue_seconds(1.0, 1.0) == inf
    assert queue_quantile(0.5, 1.0, 0.4) == 0  # half of the arrivals do not wait
    assert queue_quantile(0.5, 1.0, 0.99) == pytest.approx(2.0 * 3.912, rel=1e-3)  # 2 ln(0.5/0.01)


# --- speculation ----------------------------------------------------------------------------------------------------


@given(k=st.integers(0, 8), acceptance=st.floats(0, 1))
def test_expected_tokens_lie_between_one_and_all(k: int, acceptance: float) -> None:
    assert 1 - 1e-9 <= expected_tokens(k, acceptance) <= k + 1 + 1e-9


def test_a_measured_curve_replaces_the_formula_and_is_not_extrapolated() -> None:
    draft = Draft(curve=(1.84, 2.50, 2.99))  # GLM-5.2 MTP on SPEED-Bench coding (InferenceX, Apache-2.0)
    assert [tokens_per_step(draft, k) for k in range(5)] == [1.0, 1.84, 2.50, 2.99, 2.99]
    assert best_length(draft, 8)[0] == 3


def test_speculation_turns_itself_off_when_the_batch_is_compute_bound() -> None:
    model = StepTime(find_model("llama-3.1-8b"), H100)
    gains = [best_length(Draft(0.6, 0.05), 8, verify_costs(model, batch, 100, 8)) for batch in (1, 4096)]
    assert gains[0][0] > 1 and gains[0][1] > 1.5
    assert gains[1] == (0, 1.0)
    assert speedup(Draft(), 0) == 1


# --- levers ---------------------------------------------------------------------------------------------------------


def test_each_lever_moves_its_own_term() -> None:
    table = {lever.name: lever for lever in levers(LLAMA, 64, 8000, 2000, Draft())}
    assert mean_context(8000, 2000) == 9000
    assert table["cache in 8 bits"].term_after == pytest.approx(table["cache in 8 bits"].term_before / 2)
    assert table["cache in 8 bits"].batch_after == pytest.approx(2 * table["cache in 8 bits"].batch_before, abs=1)
    assert table["weights in fp8"].term_after == pytest.approx(table["weights in fp8"].term_before / 2)
    assert table["sliding window of 4096"].term_after == pytest.approx(
        table["sliding window of 4096"].term_before * 4096 / 9000
    )
    assert table["prefix cache"].throughput == 1
    assert all(lever.throughput >= 0.99 for lever in table.values())


def test_levers_are_ranked_by_requests_per_dollar() -> None:
    rows = levers(LLAMA, 64, 8000, 100, Draft())
    assert [row.requests for row in rows] == sorted((row.requests for row in rows), reverse=True)
    by_name = {row.name: row for row in rows}
    assert by_name["prefix cache"].requests > 1.6  # of long prompts and short answers, prefill is nearly all
    assert by_name["twice the GPUs"].requests == pytest.approx(1, abs=0.01)
    long = {row.name: row for row in levers(LLAMA, 64, 100, 4000, Draft())}
    assert long["prefix cache"].requests == pytest.approx(1, abs=0.02)


def test_tokens_that_are_no_hits_attend_to_the_hits_too() -> None:
    def price(tokens: float, share: float) -> float:
        found = token_cost(LLAMA, 1, tokens, 1.0, input_tokens=tokens, hit_share=share, attend_hits=True)
        return found.usd_per_million_input

    assert price(2000, 0.5) == pytest.approx(0.5 * price(2000, 0), rel=0.03)
    assert price(100_000, 0.9) > 0.14 * price(100_000, 0)


# --- hardware -------------------------------------------------------------------------------------------------------


def test_every_figure_has_a_source_and_a_date() -> None:
    for device in hardware_catalogue().values():
        assert device.source and device.date and device.bandwidth > 0 and device.memory > 0, device.name
        assert set(device.price) <= set(BASES)
        for price in device.price.values():
            assert price.low <= price.typical <= price.high and price.source


def test_peaks_are_dense_and_never_derived() -> None:
    assert find_hardware("h100").peaks == {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12}
    assert find_hardware("b300").peaks["int8"] < find_hardware("b200").peaks["int8"] / 20
    assert find_hardware("l40s").peaks["fp8"] == 733e12  # 1466 is the sparse figure
    assert find_hardware("a100").peak("fp8") is None


@pytest.mark.parametrize("name", ["h100", "H100_SXM", "H100-SXM5-80GB", "h100-sxm", "b200_sxm", "RTX 4090", "mi300x"])
def test_devices_are_found_by_any_spelling(name: str) -> None:
    assert find_hardware(name).name


def test_unknown_devices_are_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"'h1000' is not in the catalogue; nearest: .*h100.*`headway plan hardware`"):
        find_hardware("h1000")
