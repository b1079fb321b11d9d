"""Whatever a checkpoint asks for that is not done, lacks, or has too much: one sentence that names it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headway.core.errors import ModelFileError
from headway.model.load import describe, load
from headway.ops.reference import ReferenceBackend
from tests.model.checkpoints import LLAMA3, make, to_gguf
from tests.model.test_gguf import array, entry, file, string, tensor


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    make(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((original / name).read_bytes())
    return tmp_path


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; a value of ... removes one."""
    values = (json.loads(path.read_text()) if path.exists() else {}) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported; accepted: llama"),
        ({"model_type": ...}, "model_type: is missing"),
        ({"hidden_size": ...}, "hidden_size: is missing"),
        ({"hidden_size": -64}, "hidden_size: -64 is not an integer"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not"),
        ({"num_hidden_layers": 2**31}, "2147483648 layers but only 21 tensors"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers: 1099511627776 is not"),
        ({"vocab_size": True}, "vocab_size: True is not"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of 3"),
        ({"head_dim": 15}, "15 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: 0 is not a positive number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: 1000"),
        ({"rope_theta": 10**400, "rope_parameters": ...}, "rope_theta: 1000"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' is not supported"),
        ({"mlp_bias": True}, "tensors 'model.layers.0.mlp.down_proj.bias', 'model.layers.0.mlp.gate_proj.bias'"),
        ({"residual_multiplier": 0.5}, "residual_multiplier: 0.5 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 is not supported"),
        ({"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported for this kind of model"),
        ({"alibi": True}, "alibi: True is not supported for this kind of model"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar: 256 is not supported"),
        ({"num_local_experts": 8}, "num_local_experts: 8 is not supported"),
        ({"sliding_window": 4096}, "sliding_window: 4096 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: 'sliding_attention' is not"),
        ({"layer_types": ["full_attention"]}, "layer_types: ['full_attention'] is not a list of 2 strings"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attention_bias": "yes"}, "attention_bias: 'yes' is neither true nor false"),
        ({"rope_parameters": {"rope_type": "axial", "factor": 4.0}}, "rope_type: 'axial' is not supported"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "mrope"}}, "rope_scaling: rope_type: 'mrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor: is missing"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "must be above low_freq_factor"),
        ({"rope_parameters": LLAMA3 | {"original_max_position_embeddings": None}}, "original_max_position_embeddings"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters: [1] is not an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention: a rope of its own"),
        ({"rope_parameters": LLAMA3, "rope_scaling": {"type": "mrope"}, "rope_theta": 500.0}, "rope_type: 'mrope'"),
        (
            {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters: rope_theta: 500.0 contradicts 10000, which rope_scaling implies",
        ),
        ({"eos_token_id": 160}, "eos_token_id: 160 is not a token id from 0 to 159"),
        ({"bos_token_id": [1, 2]}, "bos_token_id: (1, 2) is not one token id"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(folder: Path, fields: dict[str, Any], fault: str) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(ModelFileError) as error:
        describe(folder)
    assert str(folder) in str(error.value) and fault in str(error.value)


def test_older_spellings_mean_the_same(folder: Path) -> None:
    change(folder / "config.json", rope_parameters=LLAMA3)
    newer = describe(folder).config
    legacy = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    change(folder / "config.json", rope_parameters=..., rope_scaling=legacy, rope_theta=LLAMA3["rope_theta"])
    assert describe(folder).config == newer
    change(folder / "config.json", rope_parameters=..., rope_scaling=None, num_key_value_heads=None, head_dim=None)
    with pytest.raises(ModelFileError, match="k_proj"):  # as many key/value heads as heads: the tensors are too small
        describe(folder)


LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": LINEAR},
        {"rope_scaling": LINEAR, "rope_theta": 700.0},
        {"rope_parameters": LLAMA3, "rope_scaling": LINEAR, "rope_theta": 500.0},
        {"rope_parameters": LLAMA3, "rope_scaling": {**LINEAR, "rope_theta": 500.0}, "rope_theta": 700.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3, "rope_scaling": {}},
        {"rope_parameters": LLAMA3, "rope_scaling": None, "rope_theta": 700.0},
        {"rope_parameters": {}, "rope_scaling": {**LLAMA3, "type": "linear"}},
        {"rope_parameters": None, "rope_theta": 700.0},
    ],
)
def test_both_spellings_at_once_mean_what_they_mean_in_transformers(folder: Path, fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    change(folder / "config.json", rope_parameters=..., rope_theta=...)
    change(folder / "config.json", **fields)
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig.from_pretrained(folder)).inv_freq.numpy()
    np.testing.assert_allclose(describe(folder).config.rope.inv_freq, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda t: t.pop("model.norm.weight"), "tensor 'model.norm.weight' is missing"),
        (
            lambda t: [t.pop(name) for name in list(t) if "mlp" in name],
            "tensors 'model.layers.0.mlp.down_proj.weight', 'model.layers.0.mlp.gate_proj.weight', "
            "'model.layers.0.mlp.up_proj.weight' and 3 more are missing",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.zeros(16, np.float32)}),
            "tensor 'model.layers.0.self_attn.q_norm.weight' is not part of a llama model",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.zeros((161, 64), np.float32)}),
            "tensor lm_head.weight: its shape is (161, 64), the config asks for (160, 64)",
        ),
    ],
)
def test_tensors_must_be_exactly_those_of_the_config(folder: Path, edit: Callable[[Any], Any], fault: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError) as error:
        load(folder, ReferenceBackend())
    assert str(folder) in str(error.value) and fault in str(error.value)


def test_stored_rope_tables_and_the_unused_head_of_a_tied_model_are_let_be(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save_file(tensors, folder / "model.safetensors")
    whole = describe(folder).parameters
    change(folder / "config.json", tie_word_embeddings=True)
    assert describe(folder).parameters == whole - 160 * 64


def key(name: str, value: int | float | str) -> bytes:
    """A GGUF metadata entry."""
    if isinstance(value, str):
        return entry(name, 8, string(value))
    kind, code = (6, "<f") if isinstance(value, float) else (4, "<I")
    return entry(name, kind, struct.pack(code, value))


LLAMA_KEYS: dict[str, int | float | str] = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 8,
    "llama.feed_forward_length": 8, "llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
TENSORS = {
    "token_embd.weight": (8, 3), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
} | {f"blk.0.{name}.weight": (8, 8) for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
                                               "ffn_down")}  # fmt: skip
WORDS = entry("tokenizer.ggml.tokens", 9, array(8, 3, string("a") + string("b") + string("c")))


def tiny_gguf(path: Path, tensors: dict[str, tuple[int, ...]] = TENSORS, words: bytes = WORDS, **keys: Any) -> Path:
    values = {name: value for name, value in (LLAMA_KEYS | keys).items() if value is not ...}
    infos = [tensor(name, shape, 0, 256 * n) for n, (name, shape) in enumerate(tensors.items())]
    path.write_bytes(file([key(*pair) for pair in values.items()] + [words], infos, bytes(256 * len(infos))))
    return path


def test_the_smallest_gguf_is_accepted(tmp_path: Path) -> None:
    info = describe(
        tiny_gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 1})
    )
    assert (info.name, info.vocab_size, info.tokenizer.eos_ids) == ("m", 3, (2, 1))
    assert info.tokenizer.metadata["tokenizer.ggml.tokens"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"general.architecture": "bloom"}, "architecture 'bloom' is not supported"),
        ({"general.architecture": ...}, "general.architecture: is missing"),
        ({"llama.block_count": ...}, "block_count: is missing"),
        ({"llama.block_count": 2}, "tensors 'blk.1.attn_k.weight'"),
        ({"llama.block_count": 2**31}, "2147483648 layers but only 11 tensors"),
        ({"llama.expert_count": 8}, "expert_count: 8 experts but no ffn_down_exps tensor"),
        ({"llama.attention.sliding_window": 8}, "attention.sliding_window: this setting is not known"),
        ({"llama.rope.scaling.type": "longer"}, "rope.scaling.type: 'longer'"),
        ({"llama.rope.dimension_count": 2}, "rope.dimension_count: 2 differs from the head size 4"),
        ({"llama.embedding_length": 16}, "shape"),
        ({"llama.attention.head_count": "2"}, "attention.head_count: '2' is not an integer"),
        ({"llama.vocab_size": 2}, "shape"),
        ({"tokenizer.ggml.eos_token_id": 3}, "tokenizer.ggml.eos_token_id: 3 is not a token id from 0 to 2"),
    ],
)
def test_a_gguf_that_asks_for_something_else_is_refused(tmp_path: Path, keys: dict[str, Any], fault: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", **keys)
    with pytest.raises(ModelFileError) as error:
        describe(path)
    assert str(path) in str(error.value) and fault in str(error.value)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 1.0),
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "linear"}, 4.0),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}, 1.0),
    ],
)
def test_linear_rope_scaling_of_a_gguf(tmp_path: Path, keys: dict[str, Any], factor: float) -> None:
    assert describe(tiny_gguf(tmp_path / "m.gguf", **keys)).config.rope.inv_freq[0] == 1 / factor


@pytest.mark.parametrize("shape", [(3,), (2, 1)])
def test_rope_factors_must_fit_the_heads(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelFileError, match="rope_freqs"):
        describe(tiny_gguf(tmp_path / "m.gguf", TENSORS | {"rope_freqs.weight": shape}))


def test_rope_factors_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="positive"):  # the tensors of the tiny file are zeros
        describe(tiny_gguf(tmp_path / "m.gguf", TENSORS | {"rope_freqs.weight": (2,)}))


@pytest.mark.parametrize(
    "words",
    [key("tokenizer.ggml.tokens", 3), key("other", 3), entry("tokenizer.ggml.tokens", 9, array(4, 1, bytes(4)))],
)
def test_a_gguf_needs_its_tokens(tmp_path: Path, words: bytes) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens: must be a list of strings"):
        describe(tiny_gguf(tmp_path / "m.gguf", words=words))


def test_a_gguf_cannot_have_more_tokens_than_embeddings(tmp_path: Path) -> None:
    words = entry("tokenizer.ggml.tokens", 9, array(8, 4, string("a") * 4))
    with pytest.raises(ModelFileError, match="4 tokens but the embedding has 3 rows"):
        describe(tiny_gguf(tmp_path / "m.gguf", words=words))


def test_the_tokenizer_of_a_folder_is_described(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template="{{ 1 }}", bos_token="<s>")
    change(folder / "generation_config.json", eos_token_id=[5, 7])
    source = describe(folder).tokenizer
    assert (source.kind, source.path, source.vocab_size) == ("hf", folder, 160)
    assert (source.bos_id, source.eos_ids, source.chat_template) == (1, (5, 7, 2), "{{ 1 }}")
    assert source.metadata["bos_token"] == "<s>"

    change(folder / "generation_config.json", eos_token_id=...)
    assert describe(folder).tokenizer.eos_ids == (2,)  # config.json's
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    assert describe(folder).tokenizer.chat_template == "d"
    (folder / "chat_template.jinja").write_text("{{ 2 }}")
    assert describe(folder).tokenizer.chat_template == "{{ 2 }}"
    change(folder / "tokenizer_config.json", chat_template=3)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelFileError, match="chat_template: 3 is not a string"):
        describe(folder)


def test_llama3_scaling_of_a_gguf_stays_with_its_factors(tmp_path: Path) -> None:
    make(tmp_path, rope_parameters=LLAMA3)
    to_gguf(tmp_path, tmp_path / "m.gguf")
    assert describe(tmp_path / "m.gguf").parameters == describe(tmp_path).parameters
