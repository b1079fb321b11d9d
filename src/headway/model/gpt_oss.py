"""gpt-oss: layers with and without a window in turns, a learned sink per head, experts with biases and a clamped gate
(OpenAI 2025)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.model import mixtral
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.mixture import DENSE, GGUF_KEYS, SPARSE, UNDERSTOOD, mixture, mixture_layers
from headway.model.tensors import LAYER, TensorSpec, attention_biases
from headway.ops.routing import ClampedSwiGLU, Routing
from headway.ops.weight import Weight
from headway.shape.formats import FORMATS

DIALECT = Dialect(
    understood=UNDERSTOOD | {"sliding_window"}, gguf=GGUF_KEYS | {"attention.sliding_window": "sliding_window"}
)
AROUND = {
    "mlp_norm": replace(LAYER["mlp_norm"], gguf="post_attention_norm.weight"),
    "sinks": TensorSpec("self_attn.sinks", "attn_sinks.weight", "norm", ("heads",)),
}
EXPERTS = SPARSE | {
    "router": replace(SPARSE["router"], hf="mlp.router.weight"),
    "router_bias": TensorSpec("mlp.router.bias", "ffn_gate_inp.bias", "router", ("experts",)),
    "experts_gate_bias": TensorSpec("mlp.experts.gate_bias", "ffn_gate_exps.bias", "experts", ("expert_numbers",)),
    "experts_up_bias": TensorSpec("mlp.experts.up_bias", "ffn_up_exps.bias", "experts", ("expert_numbers",)),
    "experts_down_bias": TensorSpec("mlp.experts.down_bias", "ffn_down_exps.bias", "experts", ("expert_outputs",)),
}


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, plain = stated(checkpoint, DIALECT), decoder_config(checkpoint, DIALECT)

    def routing(active: int) -> Routing:  # the softmax over the chosen alone
        return Routing(active, renormalise=True)

    every = frozenset(range(plain.layers))
    gate = ClampedSwiGLU(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    config = mixture(plain, fields, every, routing, "moe_intermediate_size" if checkpoint.gguf else "intermediate_size")
    layer = LAYER | AROUND | attention_biases(checkpoint)
    config = replace(config, expert_activation=gate)
    return decoder_of(_apart(checkpoint), config, mixture_layers(config, layer, EXPERTS), mixtral.build)


def _apart(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with gates and what they gate apart, biases as vectors. Its folders keep the two in turns,
    and matrices as inputs by outputs where they are not quantised."""
    tensors: dict[str, Weight] = {}
    for name, weight in checkpoint.tensors.items():
        layer, _, last = name.rpartition("experts.")
        if last in ("gate_up_proj", "down_proj") and len(weight.shape) == 3:
            turned = weight.each_transposed() if FORMATS[weight.format].numbers == 1 else weight
            if last == "down_proj":
                tensors[name] = turned
            else:
                tensors[f"{layer}experts.gate_proj"] = turned.within(slice(0, None, 2))
                tensors[f"{layer}experts.up_proj"] = turned.within(slice(1, None, 2))
        elif last == "gate_up_proj_bias" and len(weight.shape) == 2 and weight.shape[1] % 2 == 0:
            pairs = weight.data.reshape(weight.shape[0], weight.shape[1] // 2, 2, -1)
            for number, of in enumerate(DENSE[:2]):
                tensors[f"{layer}experts.{of}_bias"] = _vector(weight, pairs[:, :, number])
        elif last == "down_proj_bias" or name.endswith("_exps.bias"):
            name = f"{layer}experts.down_bias" if last == "down_proj_bias" else name
            tensors[name] = _vector(weight, weight.data.reshape(-1))
        else:
            tensors[name] = weight
    return replace(checkpoint, tensors=tensors)


def _vector(weight: Weight, data: np.ndarray) -> Weight:
    """Numbers of a matrix one after another."""
    return replace(weight, shape=(data.size // FORMATS[weight.format].bytes,), data=data)
