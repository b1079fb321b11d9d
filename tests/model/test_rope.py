"""Every kind of rope, in every spelling, turns by transformers' angles."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headway.core.errors import ModelFileError
from headway.core.fields import Fields
from headway.model.rope import rope_from_hf, scaled_context

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT, LONG = [1.0 + 0.1 * n for n in range(8)], [1.0 + n for n in range(8)]
LONGROPE = {
    "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "theta beside": {"rope_theta": 500.0},
    "nothing": {},
    "null": {"rope_scaling": None, "rope_theta": 700.0},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}},
    "linear, older": {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 500.0},
    "linear, both names": {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 3}},
    "proportional": {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}},
    "llama3": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 500.0}},
    "llama3, original beside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 500.0},
    "llama3, no original": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "yarn": {"rope_parameters": YARN},
    "yarn, older": {"rope_scaling": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}},
    "yarn, no original": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, original beside": {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    "yarn, factor null": {"rope_scaling": {**YARN, "factor": None}},
    "yarn, attention factor": {"rope_parameters": {**YARN, "attention_factor": 1.5}},
    "yarn, mscale": {"rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7}},
    "yarn, mscale alone": {"rope_parameters": {**YARN, "mscale": 1.3}},
    "yarn, mscale 0": {"rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 0}},
    "yarn, betas": {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2.0}},
    "yarn, betas null": {"rope_parameters": {**YARN, "beta_fast": None, "beta_slow": None}},
    "yarn, not truncated": {"rope_parameters": {**YARN, "truncate": False, "rope_theta": 300.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_theta": 500.0},
    "longrope": {"rope_parameters": LONGROPE},
    "longrope, older": {
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        "original_max_position_embeddings": 64, "rope_theta": 500.0,
    },
    "longrope, factors": {"rope_parameters": {**LONGROPE, "attention_factor": 1.3, "factor": 2.0}},
    "longrope, factor": {"rope_parameters": {**LONGROPE, "factor": 6.0}},
    "yarn, factor below 1": {"rope_parameters": {**YARN, "factor": 0.5}},
}  # fmt: skip


def config(**changes: Any) -> dict[str, Any]:
    return {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 256} | changes


@pytest.mark.parametrize("kind", KINDS)
def test_angles_are_those_of_transformers(kind: str) -> None:
    stated = config(**KINDS[kind])
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **deepcopy(stated)))  # which writes into it
    ours = rope_from_hf(Fields(stated, "config.json", ModelFileError.of), 16)
    np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq.numpy(), rtol=2e-6)
    assert ours.magnitude == pytest.approx(theirs.attention_scaling)
    if ours.longer:
        theirs(torch.zeros(1), torch.tensor([[ours.original]]))  # one position more
        np.testing.assert_allclose(ours.longer, theirs.inv_freq.numpy(), rtol=2e-6)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling: factor: '4' is not a positive number"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate: 1 is neither true nor false"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast: -1 is not a positive number"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor: [1.0] is not a list of 8 numbers"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 8}}, "short_factor[0]: 0.0 is not a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported for this kind of model"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor: 2 is not supported"),
        ({"rope_parameters": {"rope_type": "axial"}}, "'axial' is not supported; default, linear, "),
    ],
)
def test_what_makes_no_sense_is_named(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelFileError) as error:
        rope_from_hf(Fields(config(**fields), "config.json", ModelFileError.of), 16)
    assert fault in str(error.value)


def test_layers_of_different_types_may_have_ropes_of_their_own() -> None:
    apart = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    fields = Fields(config(rope_parameters=apart, rope_theta=500.0), "config.json", ModelFileError.of)
    full, sliding = (rope_from_hf(fields, 16, layer_type) for layer_type in apart)
    alone = Fields(config(rope_parameters={**YARN, "rope_theta": 500.0}), "config.json", ModelFileError.of)
    assert full == rope_from_hf(alone, 16)
    np.testing.assert_allclose(sliding.inv_freq, 100.0 ** -(np.arange(8) / 8), rtol=1e-6)
    with pytest.raises(ModelFileError, match="chunked_attention"):
        rope_from_hf(fields, 16, "chunked_attention")
    assert rope_from_hf(alone, 16, "sliding_attention") == full  # one rope is everyone's


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({}, 256), (YARN, 256), ({**YARN, "factor": 8.0}, 512), ({"type": "yarn", "factor": 2.0}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 256),
    ],
)  # fmt: skip
def test_yarn_makes_room_for_more_positions_than_the_config_states(rope: dict[str, Any], context: int) -> None:
    fields = Fields(config(rope_scaling=dict(rope)), "config.json", ModelFileError.of)
    assert scaled_context(fields, 256) == context
