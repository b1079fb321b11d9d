"""Law: whatever a config.json leaves out, planner and engine take for the same, and for what transformers takes it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from headway.core.errors import ModelFileError
from headway.core.fields import Fields
from headway.model.checkpoint import Checkpoint
from headway.model.family import Decoder
from headway.model.load import FAMILIES, understood
from headway.ops.weight import Weight
from headway.shape.config import shape_from_config, tensors_of
from headway.shape.families import FAMILIES as SHAPES
from headway.shape.families import language_model

KNOWN_TO_BOTH = sorted(FAMILIES.keys() & SHAPES.keys())
# What every config.json says; 32 heads are a multiple of any default of key/value heads.
STATED = {
    "vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 7, "num_attention_heads": 32, "intermediate_size": 48,
}  # fmt: skip
# Whose defaults are none, or do not go with 32 heads.
STATED_TOO = {"deepseek_v2": {"num_experts_per_tok": 2}, "deepseek_v3": {"num_key_value_heads": 32}}
ZEROS = np.zeros(1 << 28, np.uint8)  # never touched, so no memory


def sparse(model_type: str) -> dict[str, Any]:
    names = dict(SHAPES[model_type].fields)
    stated = {names.get(name, name): value for name, value in STATED.items()}
    return {"model_type": model_type} | stated | STATED_TOO.get(model_type, {})


def decoder_of(raw: dict[str, Any]) -> Decoder:
    """What the engine makes of a config, and of the tensors that the planner thinks it has."""
    config = language_model(Fields(raw, "config.json", ModelFileError.of))
    names = [(tensor.name.format(copy), tensor.shape) for tensor in tensors_of(raw) for copy in range(tensor.copies)]
    weights = {name: Weight(name, shape, "f32", ZEROS[: 4 * math.prod(shape)]) for name, shape in names}
    family = config.text("model_type")
    return understood(Checkpoint(Path("model"), False, family, config, weights))


@pytest.mark.parametrize("model_type", KNOWN_TO_BOTH)
def test_engine_and_planner_read_a_sparse_config_alike(model_type: str) -> None:
    raw = sparse(model_type)
    shape, decoder = shape_from_config(raw), decoder_of(raw)
    config, params = decoder.config, Counter[str]()
    for role, weight in decoder.weights.items():
        params[decoder.parts[role]] += math.prod(weight.shape)
    assert params == {part: count for part, count in msgspec.structs.asdict(shape.params).items() if count}
    windowed = {layer for group in shape.groups if group.kind == "window" for layer in group.layers}
    assert (config.layers, config.hidden_size, config.vocab_size, config.heads, config.tied, config.windowed) == (
        shape.layers, shape.d_model, shape.vocab, shape.heads, shape.tied, windowed
    )  # fmt: skip
    assert config.context_length == shape.context
    if shape.groups[0].kind != "latent":
        assert (config.kv_heads, config.head_dim) == (shape.kv_heads, shape.head_width)


@pytest.mark.parametrize("model_type", KNOWN_TO_BOTH)
def test_what_a_config_leaves_out_is_what_transformers_takes_it_for(model_type: str) -> None:
    raw = sparse(model_type)
    if model_type not in CONFIG_MAPPING:
        pytest.skip("a variant that the planner tells apart, and transformers does not by its name")
    whole = CONFIG_MAPPING[model_type](**{name: value for name, value in raw.items() if name != "model_type"}).to_dict()
    assert shape_from_config(raw) == shape_from_config(whole)
    assert asdict(decoder_of(raw).config) == asdict(decoder_of(whole).config)
