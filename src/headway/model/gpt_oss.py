"""gpt-oss: layers with and without a window in turns, a learned sink per head, experts with biases and a clamped gate
(OpenAI 2025)."""

from __future__ import annotations

from dataclasses import replace

from headway.model import mixtral
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.mixture import DENSE, GGUF_KEYS, UNDERSTOOD, active_experts, mixture
from headway.ops.routing import ClampedSwiGLU, Routing
from headway.ops.weight import Weight
from headway.shape.formats import FORMATS

CONVENTIONS = Conventions(
    understood=UNDERSTOOD | {"sliding_window"}, gguf=GGUF_KEYS | {"attention.sliding_window": "sliding_window"}
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, plain = stated(checkpoint, CONVENTIONS), decoder_config(checkpoint, CONVENTIONS)
    routing = Routing(active_experts(fields), renormalise=True)  # the softmax over the chosen alone
    gate = ClampedSwiGLU(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    config = replace(mixture(checkpoint, plain, fields, routing), expert_activation=gate)
    return decoder_of(_apart(checkpoint), fields, config, mixtral.build)


def _apart(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with gates and what they gate apart. Its folders keep the two in turns, matrices (in, out)
    where they are not quantised."""
    if checkpoint.gguf:
        return checkpoint
    tensors: dict[str, Weight] = {}
    for name, weight in checkpoint.tensors.items():
        layer, _, last = name.rpartition("experts.")
        if last in ("gate_up_proj", "down_proj") and len(weight.shape) == 3:
            turned = weight.each_transposed() if FORMATS[weight.format].numbers == 1 else weight
            if last == "down_proj":
                tensors[_stack(layer, "down", "weight")] = turned
            else:
                tensors[_stack(layer, "gate", "weight")] = turned.within(slice(0, None, 2))
                tensors[_stack(layer, "up", "weight")] = turned.within(slice(1, None, 2))
        elif last == "gate_up_proj_bias" and len(weight.shape) == 2 and weight.shape[1] % 2 == 0:
            pairs = weight.data.reshape(weight.shape[0], weight.shape[1] // 2, 2, -1)
            for number, of in enumerate(DENSE[:2]):
                shape = (weight.shape[0], weight.shape[1] // 2)
                tensors[_stack(layer, of, "bias")] = replace(weight, shape=shape, data=pairs[:, :, number])
        elif last == "down_proj_bias":
            tensors[_stack(layer, "down", "bias")] = weight
        else:
            tensors[name.replace(".mlp.router.", ".mlp.gate.")] = weight
    return replace(checkpoint, tensors=tensors)


def _stack(layer: str, of: str, kind: str) -> str:
    return f"{layer}experts.{{}}.{of}_proj.{kind}"
