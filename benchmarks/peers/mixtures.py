"""GGUF files of shapes with experts: random numbers, written block by block as they are stored.

    moe-Q4_K, moe-Q8_0   Qwen 3's layout: 2.3 G parameters in 16 layers of 16 experts, 6 of which a token passes: 1.0 G
    latent-Q8_0          DeepSeek V2's layout: 0.9 G parameters, a cache of 512 + 64 numbers per token and layer

Blocks are random bits under small scales: speed depends on which experts are chosen, not on what they hold, and routers
of normal numbers choose evenly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MIXTURES = ("moe-Q4_K", "moe-Q8_0", "latent-Q8_0")
LAYERS, WIDTH, VOCAB, CONTEXT = 16, 2048, 32000, 8192
HEADS, KV_HEADS, HEAD = 16, 4, 128
MOE_EXPERTS, MOE_ACTIVE, MOE_INNER = 16, 6, 1280
EXPERTS, ACTIVE, INNER, DENSE = 8, 2, 768, 5632  # of the latent shape
Q_RANK, RANK, TURNED, PLAIN, VALUE = 768, 512, 64, 128, 128

Shapes = Iterator[tuple[str, tuple[int, ...]]]  # GGUF names, (..., out, in); vectors are norms and stay 32-bit


def moe_shapes() -> Shapes:
    yield "token_embd.weight", (VOCAB, WIDTH)
    yield "output_norm.weight", (WIDTH,)
    yield "output.weight", (VOCAB, WIDTH)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        yield at + "attn_norm.weight", (WIDTH,)
        yield at + "attn_q.weight", (HEADS * HEAD, WIDTH)
        yield at + "attn_k.weight", (KV_HEADS * HEAD, WIDTH)
        yield at + "attn_v.weight", (KV_HEADS * HEAD, WIDTH)
        yield at + "attn_q_norm.weight", (HEAD,)
        yield at + "attn_k_norm.weight", (HEAD,)
        yield at + "attn_output.weight", (WIDTH, HEADS * HEAD)
        yield at + "ffn_norm.weight", (WIDTH,)
        yield from expert_shapes(at, MOE_EXPERTS, MOE_INNER)


def latent_shapes() -> Shapes:
    yield "token_embd.weight", (VOCAB, WIDTH)
    yield "output_norm.weight", (WIDTH,)
    yield "output.weight", (VOCAB, WIDTH)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        yield at + "attn_norm.weight", (WIDTH,)
        yield at + "attn_q_a.weight", (Q_RANK, WIDTH)
        yield at + "attn_q_a_norm.weight", (Q_RANK,)
        yield at + "attn_q_b.weight", (HEADS * (PLAIN + TURNED), Q_RANK)
        yield at + "attn_kv_a_mqa.weight", (RANK + TURNED, WIDTH)
        yield at + "attn_kv_a_norm.weight", (RANK,)
        yield at + "attn_k_b.weight", (HEADS, RANK, PLAIN)
        yield at + "attn_v_b.weight", (HEADS, VALUE, RANK)
        yield at + "attn_output.weight", (WIDTH, HEADS * VALUE)
        yield at + "ffn_norm.weight", (WIDTH,)
        if layer == 0:
            yield from gated(at, "", (), DENSE)
        else:
            yield from expert_shapes(at, EXPERTS, INNER)
            yield from gated(at, "_shexp", (), INNER)


def expert_shapes(at: str, experts: int, inner: int) -> Shapes:
    yield at + "ffn_gate_inp.weight", (experts, WIDTH)
    yield from gated(at, "_exps", (experts,), inner)


def gated(at: str, suffix: str, stack: tuple[int, ...], inner: int) -> Shapes:
    yield f"{at}ffn_gate{suffix}.weight", (*stack, inner, WIDTH)
    yield f"{at}ffn_up{suffix}.weight", (*stack, inner, WIDTH)
    yield f"{at}ffn_down{suffix}.weight", (*stack, WIDTH, inner)


def blocks(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Stored bytes: uint8 [..., out, bytes of a row], of numbers with a deviation near 0.02."""
    *rows, inputs = shape
    numbers, size = {"Q8_0": (32, 34), "Q4_K": (256, 144)}[kind]
    count = int(np.prod(rows)) * (inputs // numbers)
    data = np.frombuffer(random.bytes(count * size), np.uint8).reshape(count, size).copy()
    if kind == "Q8_0":
        data[:, :2] = np.array([0.02 / 74], np.float16).view(np.uint8)
    else:  # 4-bit codes times 6-bit scales, less 6-bit minima, both independent: the mean is about 0
        data[:, :4] = np.array([1.2e-4, 9e-4], np.float16).view(np.uint8)
    return data.reshape(*rows, -1)


def metadata(writer: Any, latent: bool) -> None:
    import gguf

    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_feed_forward_length(DENSE if latent else MOE_INNER)
    writer.add_expert_count(EXPERTS if latent else MOE_EXPERTS)
    writer.add_expert_used_count(ACTIVE if latent else MOE_ACTIVE)
    writer.add_expert_feed_forward_length(INNER if latent else MOE_INNER)
    if latent:
        writer.add_head_count_kv(1)
        writer.add_rope_dimension_count(TURNED)
        writer.add_leading_dense_block_count(1)
        writer.add_q_lora_rank(Q_RANK)
        writer.add_kv_lora_rank(RANK)
        writer.add_key_length(RANK + TURNED)
        writer.add_value_length(RANK)
        writer.add_key_length_mla(PLAIN + TURNED)
        writer.add_value_length_mla(VALUE)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(False)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    else:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(HEAD)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)


def mixture(name: str, cache: Path) -> Path:
    """One of the module's files in the folder `cache`, written if it is not there."""
    path = cache / f"{name}.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"making {path}", file=sys.stderr, flush=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        write(unfinished, name)
        unfinished.rename(path)
    return path


def write(path: Path, name: str) -> None:
    import gguf

    shape, kind = name.split("-")
    latent, random = shape == "latent", np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "deepseek2" if latent else "qwen3moe", use_temp_file=True)
    metadata(writer, latent)
    for tensor, dims in latent_shapes() if latent else moe_shapes():
        if len(dims) == 1:
            writer.add_tensor(tensor, np.ones(dims, np.float32))
        elif "gate_inp" in tensor:
            writer.add_tensor(tensor, random.standard_normal(dims, np.float32) * np.float32(0.02))
        else:
            stored = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(tensor, blocks(random, kind, dims), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
