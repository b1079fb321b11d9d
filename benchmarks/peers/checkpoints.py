"""Checkpoints of one random model in the formats that engines read: the same weights in each, to its precision.

    python benchmarks/peers/checkpoints.py FOLDER [NAME ...]      (all of them, about ten minutes and 11 GB)

The shape is Llama-3.2-1B's with a vocabulary of 32000: 1.04 G parameters, normal with deviation 0.02, tied embedding.
Speed does not depend on the values; equal values keep the comparison fair all the same. Files appear complete or not at
all, and one that is there is used as it is.

    bf16                       Hugging Face folder, bfloat16
    w8a8                       Hugging Face folder, compressed-tensors: int8 per channel, activations int8 per token
    BF16, Q8_0, Q4_0           GGUF
    Q4_K_M                     GGUF, llama.cpp's own recipe of mixed types (needs llama-cpp-python)
    openvino-int8, -int4       OpenVINO IR, int4 in groups of 128 (needs optimum-intel and nncf in that interpreter)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, VOCAB, CONTEXT = 16, 2048, 8192, 32, 8, 32000, 8192
HEAD = WIDTH // HEADS

# Matrices of a layer: name in Hugging Face's layout, name in GGUF, (out, in).
MATRICES = (
    ("self_attn.q_proj", "attn_q", (WIDTH, WIDTH)),
    ("self_attn.k_proj", "attn_k", (KV_HEADS * HEAD, WIDTH)),
    ("self_attn.v_proj", "attn_v", (KV_HEADS * HEAD, WIDTH)),
    ("self_attn.o_proj", "attn_output", (WIDTH, WIDTH)),
    ("mlp.gate_proj", "ffn_gate", (INNER, WIDTH)),
    ("mlp.up_proj", "ffn_up", (INNER, WIDTH)),
    ("mlp.down_proj", "ffn_down", (WIDTH, INNER)),
)
NORMS = (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"))
GGUF_KINDS = ("BF16", "Q8_0", "Q4_0")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

Tensors = Iterator[tuple[str, np.ndarray]]


def matrix(number: int, shape: tuple[int, int]) -> np.ndarray:
    """Matrix `number` of the model: uint16 [out, in], the bits of bfloat16."""
    values = np.random.default_rng((5, number)).standard_normal(shape, dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def layer_matrices(layer: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, GGUF name, bfloat16 bits) of a layer's matrices."""
    for place, (name, gguf_name, shape) in enumerate(MATRICES):
        yield name, gguf_name, matrix(1 + layer * len(MATRICES) + place, shape)


def bf16_tensors() -> Tensors:
    """In Hugging Face's names; uint16 stands for bfloat16."""
    ones = np.full(WIDTH, 0x3F80, np.uint16)
    yield "model.embed_tokens.weight", matrix(0, (VOCAB, WIDTH))
    yield "model.norm.weight", ones
    for layer in range(LAYERS):
        for name, _, bits in layer_matrices(layer):
            yield f"model.layers.{layer}.{name}.weight", bits
        for name, _ in NORMS:
            yield f"model.layers.{layer}.{name}.weight", ones


def w8a8_tensors() -> Tensors:
    """Projections rounded to int8 with one scale per output; everything else as in `bf16_tensors`."""
    for name, bits in bf16_tensors():
        if "_proj" not in name:
            yield name, bits
            continue
        values = widened(bits)
        scale = np.abs(values).max(axis=1, keepdims=True) / 127
        yield name, np.clip(np.rint(values / scale), -127, 127).astype(np.int8)
        yield f"{name}_scale", scale


def hugging_face(folder: Path, tensors: Callable[[], Tensors], config: dict[str, Any]) -> None:
    """Write config.json and model.safetensors. The tensors are made twice: once for the header, once for the data."""
    types = {"uint16": "BF16", "int8": "I8", "float32": "F32"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, data in tensors():
        offsets = [end, end := end + data.nbytes]
        header[name] = {"dtype": types[data.dtype.name], "shape": list(data.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors():
            file.write(data.tobytes())


def w8a8_config() -> dict[str, Any]:
    eight: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = eight | {"strategy": "channel", "dynamic": False}
    activations = eight | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return CONFIG | {"quantization_config": quantisation}


def gguf_file(path: Path, kind: str) -> None:
    """A GGUF with all matrices in one storage type."""
    import gguf

    stored = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_rope_dimension_count(HEAD)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(CONFIG["eos_token_id"])

    def add(name: str, bits: np.ndarray) -> None:
        data = bits.view(np.uint8) if kind == "BF16" else gguf.quants.quantize(widened(bits), stored)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=stored)

    add("token_embd", matrix(0, (VOCAB, WIDTH)))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        for _, name, bits in layer_matrices(layer):
            if name in ("attn_q", "attn_k"):  # GGUF rotates neighbouring pairs, Hugging Face the two halves
                bits = bits.reshape(-1, 2, HEAD // 2, WIDTH).swapaxes(1, 2).reshape(bits.shape)
            add(f"blk.{layer}.{name}", bits)
        for _, name in NORMS:
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q4_k_m(path: Path, source: Path) -> None:
    """llama.cpp's Q4_K_M of a BF16 GGUF."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params) != 0:
        raise SystemExit(f"llama.cpp could not quantise {source}")


def openvino(folder: Path, source: Path, bits: int, python: str) -> None:
    """OpenVINO IR of a Hugging Face folder, converted by another interpreter."""
    script = Path(__file__).with_name("to_openvino.py")
    subprocess.run([python, script, source, folder, str(bits)], check=True, stdout=sys.stderr)


def checkpoint(name: str, cache: Path, python: str = sys.executable) -> Path:
    """The file or folder of a checkpoint, made if it is not there.

    Args:
        name: one of the module's list.
        cache: folder that holds them.
        python: interpreter that has optimum-intel, for OpenVINO's.
    """
    path = cache / (f"{name}.gguf" if name in (*GGUF_KINDS, "Q4_K_M") else name)
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    if unfinished.is_dir():
        raise SystemExit(f"{unfinished} is being made, or was left by a run that was ended; remove it")
    print(f"making {path}", file=sys.stderr, flush=True)
    if name == "bf16":
        hugging_face(unfinished, bf16_tensors, CONFIG)
    elif name == "w8a8":
        hugging_face(unfinished, w8a8_tensors, w8a8_config())
    elif name in GGUF_KINDS:
        gguf_file(unfinished, name)
    elif name == "Q4_K_M":
        q4_k_m(unfinished, checkpoint("BF16", cache))
    elif name.startswith("openvino-int"):
        openvino(unfinished, checkpoint("bf16", cache), int(name[-1]), python)
    else:
        raise SystemExit(f"there is no checkpoint {name!r}")
    return unfinished.rename(path)


if __name__ == "__main__":
    every = ("bf16", "w8a8", *GGUF_KINDS, "Q4_K_M", "openvino-int8", "openvino-int4")
    for wanted in sys.argv[2:] or every:
        print(checkpoint(wanted, Path(sys.argv[1])))
