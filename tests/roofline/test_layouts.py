"""Ways to spread a model over GPUs: what each holds, how steps scale, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from headway.core.errors import BadInput
from headway.roofline.capacity import memory_batch, memory_plan
from headway.roofline.collectives import served_all_reduce
from headway.roofline.cost import token_cost
from headway.roofline.hardware import find_hardware
from headway.roofline.memory import weights_per_gpu
from headway.roofline.replica import Replica, decode, deploy
from headway.roofline.step import check_layout
from headway.roofline.work import Layout
from headway.shape.catalogue import find_model

R1, LLAMA, H100 = find_model("deepseek-r1"), find_model("llama-3.1-70b"), find_hardware("h100")


def spread(layout: Layout, model: str = "deepseek-r1") -> Replica:
    one = deploy(find_model(model), H100, layout.gpus, mode=Replica)
    return msgspec.structs.replace(
        one, attention_dp=layout.attention_dp, expert_parallel=layout.expert_parallel, pipeline=layout.pipeline
    )


def test_a_pipeline_holds_a_part_of_the_layers_and_passes_micro_batches_through_all() -> None:
    tensor, stages = spread(Layout(8), "llama-3.1-70b"), spread(Layout(16, pipeline=2), "llama-3.1-70b")
    assert memory_plan(stages).weights == pytest.approx(memory_plan(tensor).weights / 2)
    assert stages.sequence_bytes(4096) == pytest.approx(tensor.sequence_bytes(4096) / 2)
    assert decode(stages, 64, 4096).seconds == pytest.approx(decode(tensor, 32, 4096).seconds)
    assert decode(stages, 1, 4096).seconds == decode(tensor, 1, 4096).seconds  # no token is quicker for it


def test_data_parallel_attention_keeps_a_latent_cache_once_and_the_other_matrices_in_every_group() -> None:
    whole, apart = spread(Layout(16)), spread(Layout(16, attention_dp=16))
    assert memory_plan(apart).weights > 1.2 * memory_plan(whole).weights
    assert memory_batch(apart, 4096) > 8 * memory_batch(whole, 4096)
    assert decode(apart, 64, 4096).terms["kv"] == pytest.approx(decode(whole, 64, 4096).terms["kv"] / 16)


def test_deepseeks_unit_of_144_gpus_holds_two_of_its_256_experts_each() -> None:
    unit = Layout(144, attention_dp=144, expert_parallel=144)
    rest = R1.stored.total - R1.stored.experts
    assert weights_per_gpu(R1, unit) == pytest.approx(rest + R1.stored.experts * 2 / 256)
    priced = token_cost(spread(unit), batch=144 * 128, context=4096, usd_per_gpu_hour=2.0)
    small = token_cost(spread(Layout(16, 16, 16)), batch=16 * 128, context=4096, usd_per_gpu_hour=2.0)
    assert priced.usd_per_million_output < small.usd_per_million_output  # each expert's read serves more tokens
    assert priced.usd_per_million_fresh_input == pytest.approx(small.usd_per_million_fresh_input, rel=0.5)


@pytest.mark.parametrize(("shape", "layout", "sentence"), [
    (LLAMA, Layout(6), "--gpus: 6 does not divide the 64 attention heads; accepted: 1, 2, 4, 8, 16, 32, 64"),
    (LLAMA, Layout(8, pipeline=3), "--pipeline: 3 stages of 8 GPUs; accepted: 1, 2, 4, 8"),
    (LLAMA, Layout(160, pipeline=160), "--pipeline: 160 stages of 160 GPUs; accepted: 1, 2, 4, 5"),
    (LLAMA, Layout(8, expert_parallel=8), "--expert-parallel: 8: llama-3.1-70b has no experts"),
    (R1, Layout(16, expert_parallel=3), "--expert-parallel: 3 does not divide the 16 GPUs; accepted: 1, 2, 4, 8, 16"),
    (R1, Layout(16, 16, pipeline=2), "--attention-dp: 16 does not divide the 8 GPUs of a stage"),
])  # fmt: skip
def test_what_does_not_divide_is_refused_with_what_does(shape: object, layout: Layout, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_layout(shape, layout)  # type: ignore[arg-type]
    assert str(caught.value).startswith(sentence)


def test_no_reduction_runs_at_nvlink_speed_between_nodes() -> None:
    inside, across = served_all_reduce(H100, 8), served_all_reduce(H100, 16)
    assert inside is not None and across is not None
    for message in (2e4, 1e6, 1e9):
        assert across.seconds(message, 16) > 1.1 * inside.seconds(message, 16)
