"""`StepTime` in exact mode: what is counted, per GPU, and how the estimate prices a mixed step."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import BadInput
from headway.core.step import StepShape, keys_read, pairs_computed
from headway.roofline.collectives import all_reduce_of
from headway.roofline.hardware import find_hardware
from headway.roofline.step import (
    Efficiency,
    StepTime,
    decode_step,
    mixed_step,
    prefill_step,
)
from headway.roofline.work import Layout, experts_touched
from headway.shape.catalogue import find_model
from headway.shape.model import kv_bytes, store_as

H100 = find_hardware("h100")
LLAMA = find_model("llama-3.1-8b")
MEASURED = Efficiency(
    stream=0.8, stream_cache=0.7, linear=0.6, attention=0.5, prefill_attention=0.4, step=1e-4, row=1e-6
)


def test_a_decode_step_streams_body_and_head_once_and_every_cache() -> None:
    cost = StepTime(LLAMA, H100).explain(decode_step(LLAMA, 64, 4096))
    streamed = 2.0 * (LLAMA.n_params - LLAMA.params.embed)  # the input embedding is gathered
    read = streamed + 64 * kv_bytes(LLAMA, 4096)
    assert cost.seconds == pytest.approx(read / H100.bandwidth)
    assert cost.binds == "memory"
    assert cost.largest == "kv"


def test_linear_flops_are_the_body_per_token_and_the_head_per_logit_row() -> None:
    cost = StepTime(LLAMA, H100).explain(prefill_step(LLAMA, 2000))
    peak = H100.peak("bf16")
    assert peak is not None
    assert cost.terms["arithmetic"] == pytest.approx(2 * LLAMA.params.body * 2000 / peak)
    assert cost.terms["head_arithmetic"] == pytest.approx(2 * 128256 * 4096 / peak)
    assert cost.binds == "compute"


def test_a_tied_head_is_streamed_once_and_the_table_not_again() -> None:
    gemma = find_model("gemma-3-270m")  # 168 of its 268 million parameters are embedding
    cost = StepTime(gemma, H100).explain(decode_step(gemma, 1, 1))
    assert cost.terms["head"] == pytest.approx(2 * 262144 * 640 / H100.bandwidth)
    assert cost.terms["weights"] == pytest.approx(2 * gemma.params.body / H100.bandwidth)


def test_a_chunk_without_logits_does_not_read_the_head() -> None:
    step = prefill_step(LLAMA, 100, logits=0)
    assert "head" not in StepTime(LLAMA, H100).explain(step).terms


def test_an_empty_step_costs_nothing() -> None:
    assert StepTime(LLAMA, H100, efficiency=MEASURED).predict(StepShape(0, 0, 0, (0,), (0,))) == 0


@given(batch=st.integers(1, 512), context=st.integers(1, 8192), chunk=st.integers(1, 4096), done=st.integers(0, 8192))
def test_estimates_never_beat_the_bound_and_mixing_never_costs_more_than_two_steps(
    batch: int, context: int, chunk: int, done: int
) -> None:
    bound, estimate = StepTime(LLAMA, H100), StepTime(LLAMA, H100, efficiency=MEASURED)
    decodes, prompt = decode_step(LLAMA, batch, context), prefill_step(LLAMA, chunk, done)
    mixed = mixed_step(decodes, prompt)
    for step in (decodes, prompt, mixed):
        assert bound.predict(step) <= estimate.predict(step)
    assert estimate.predict(mixed) <= estimate.predict(decodes) + estimate.predict(prompt)
    assert estimate.predict(mixed) >= max(estimate.predict(decodes), estimate.predict(prompt))


def test_a_growing_chunk_beside_decodes_has_no_cliff() -> None:
    model = StepTime(LLAMA, H100, efficiency=MEASURED)
    decodes = decode_step(LLAMA, 64, 2048)
    times = [model.predict(mixed_step(decodes, prefill_step(LLAMA, chunk, 512))) for chunk in range(1, 2000)]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # a token costs its own arithmetic and cache row, and never more than twice that where the branches meet
    assert min(steps) >= 0 and max(steps) < 2 * steps[-1]


def test_tensor_parallel_splits_weights_and_heads_and_pays_two_reduces_per_layer() -> None:
    ring = all_reduce_of("ring", 450e9, 2e-6)
    step = decode_step(LLAMA, 8, 1000)
    one, four = StepTime(LLAMA, H100).explain(step), StepTime(LLAMA, H100, Layout(4), all_reduce=ring).explain(step)
    for term in ("weights", "kv", "head", "attention"):
        assert four.terms[term] == pytest.approx(one.terms[term] / 4)
    assert four.terms["all_reduce"] == pytest.approx(64 * ring.seconds(8 * 4096 * 2, 4))


def test_latent_caches_are_read_whole_by_every_gpu_unless_attention_is_data_parallel() -> None:
    model = find_model("deepseek-v3")
    h200, step = find_hardware("h200"), decode_step(find_model("deepseek-v3"), 64, 4096)
    alone = 64 * kv_bytes(model, 4096) / h200.bandwidth
    split = StepTime(model, h200, Layout(8)).explain(step)
    apart = StepTime(model, h200, Layout(8, attention_dp=8)).explain(step)
    assert split.terms["kv"] == pytest.approx(alone)
    assert apart.terms["kv"] == pytest.approx(alone / 8)
    # the price of it: every GPU reads all attention weights
    assert apart.terms["weights"] > split.terms["weights"]


@given(tokens=st.integers(0, 3000), skew=st.floats(0, 2))
def test_experts_touched(tokens: int, skew: float) -> None:
    even, skewed = experts_touched(256, 8, tokens), experts_touched(256, 8, tokens, skew)
    assert 0 <= skewed <= even + 1e-9 <= 256 + 1e-6
    if tokens == 1:
        assert even == pytest.approx(8) and skewed == pytest.approx(8)


def test_a_mixtures_weights_grow_with_the_batch() -> None:
    model = StepTime(find_model("deepseek-v3"), find_hardware("h200"), Layout(8))
    terms = [model.explain(decode_step(model.shape, batch, 100)).terms["experts"] for batch in (1, 8, 64, 4096)]
    assert terms == sorted(terms)
    assert terms[0] == pytest.approx(terms[-1] * 8 / 256, rel=1e-6)


def test_windows_cap_what_decode_reads_and_what_a_chunk_attends_to() -> None:
    gemma = find_model("gemma-3-27b")
    short, long = decode_step(gemma, 1, 1024), decode_step(gemma, 1, 9000)
    assert long.kv_tokens == (1024, 9000) and short.kv_tokens == (1024, 1024)
    for start, count, window in ((0, 10, 4), (3, 5, 4), (9, 2, 4), (0, 3, 10), (5, 20, 8)):
        expected = sum(min(position + 1, window) for position in range(start, start + count))
        assert pairs_computed(start, count, window) == expected
        oldest = max(0, start - window + 1)
        assert keys_read(start, count, window) == start + count - oldest
    assert pairs_computed(5, 3, None) == 6 + 7 + 8


def test_states_cost_the_same_at_every_context() -> None:
    model = StepTime(find_model("qwen3-next-80b-a3b"), H100)
    full = next(index for index, group in enumerate(model.shape.groups) if group.kind == "full")
    short, long = (model.explain(decode_step(model.shape, 4, context)) for context in (100, 200))
    per_token = model.shape.groups[full].layer_row_bytes() * len(model.shape.groups[full].layers)
    assert long.terms["kv"] - short.terms["kv"] == pytest.approx(4 * 100 * per_token / H100.bandwidth, rel=1e-6)


def test_quantised_weights_are_read_in_their_stored_size() -> None:
    plain, small = (StepTime(shape, H100) for shape in (LLAMA, store_as(LLAMA, "fp8")))
    step = decode_step(LLAMA, 1, 1)
    ratio = small.explain(step).terms["weights"] / plain.explain(step).terms["weights"]
    assert ratio == pytest.approx(0.5, rel=1e-3)
    assert small.math == "fp8" and small.explain(step).terms["head"] == plain.explain(step).terms["head"]


def test_a_device_without_a_known_peak_is_modelled_by_memory_alone() -> None:
    cost = StepTime(LLAMA, find_hardware("m4-max")).explain(prefill_step(LLAMA, 4096))
    assert cost.binds == "memory" and "arithmetic" not in cost.terms


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [(Layout(3), "3 does not divide the 32 attention heads; accepted: 1, 2, 4"), (Layout(0), "--gpus: 0"),
     (Layout(8, 3), "--attention-dp: 3 does not divide the 8 GPUs; accepted: 1, 2, 4, 8")],
)  # fmt: skip
def test_impossible_layouts_are_refused(layout: Layout, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        StepTime(LLAMA, H100, layout)


def test_an_unknown_number_format_is_refused() -> None:
    with pytest.raises(BadInput, match="--math: 'fp4' has no catalogued peak on h100-sxm; accepted: bf16, fp8, int8"):
        StepTime(LLAMA, H100, math="fp4")


def test_predictions_are_frozen_data() -> None:
    cost = StepTime(LLAMA, H100).explain(decode_step(LLAMA, 1, 1))
    assert msgspec.json.decode(msgspec.json.encode(cost))["binds"] == "memory"


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v3"])
def test_the_parts_of_a_step_put_together_are_the_step(model: str) -> None:
    shape = find_model(model)
    timed = StepTime(shape, H100, efficiency=MEASURED)
    decode, prefill = decode_step(shape, 8, 1000), prefill_step(shape, 512, cached=256)
    for step in (decode, prefill, mixed_step(decode, prefill)):
        parts = timed.parts(step)
        old = step.decode_kv_tokens
        new = [
            (keys - before, pairs - before) for keys, pairs, before in zip(step.kv_tokens, step.pairs, old, strict=True)
        ]
        together = parts.fixed + parts.row * step.rows + parts.token * step.tokens + parts.logit * step.logit_rows
        together += sum(rate * keys for rate, keys in zip(parts.decode, old, strict=True))
        together += sum(rate * keys for rate, (keys, _) in zip(parts.keys, new, strict=True))
        together += sum(rate * pairs for rate, (_, pairs) in zip(parts.pairs, new, strict=True))
        assert together == pytest.approx(timed.predict(step))
