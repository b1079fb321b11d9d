"""What a decoder family makes of a checkpoint; the only thing loading knows of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headway.model.blocks import Weights
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig
from headway.model.rope import FACTORS
from headway.model.tensors import TensorSpec, tensors_of
from headway.ops.protocol import Forward
from headway.ops.weight import Weight

Build = Callable[[DecoderConfig, Weights], Forward]


@dataclass(frozen=True)
class Decoder:
    """A checkpoint understood by its family; no tensor has been read.

    Attributes:
        config: its sizes and constants.
        weights: the tensors to prepare, by role; each is needed once.
        parts: role of a weight -> the part it plays in a step, a field of `ByPart`.
        build: prepared weights by role -> the forward pass.
    """

    config: DecoderConfig
    weights: dict[str, Weight]
    parts: dict[str, str]
    build: Callable[[Weights], Forward]

    def cut(self, vocab_size: int) -> Decoder:
        """The same with no more than `vocab_size` rows in embedding and output matrix."""
        tables = {role: self.weights[role].first_rows(vocab_size) for role in ("embed", "head") if role in self.weights}
        rows = min(vocab_size, self.config.vocab_size)
        return replace(self, config=replace(self.config, vocab_size=rows), weights=self.weights | tables)


def decoder_of(checkpoint: Checkpoint, config: DecoderConfig, layer: Mapping[str, TensorSpec], build: Build) -> Decoder:
    """A decoder whose layers hold the tensors `layer`.

    Raises:
        ModelFileError: the tensors are not exactly those.
    """
    tensors = checkpoint.tensors
    if config.layers > len(tensors):  # before anything is built per layer: the count is the file's word
        raise checkpoint.config.fault("layers", f"{config.layers} layers but only {len(tensors)} tensors")
    specs = tensors_of(config, layer)
    weights = checkpoint.take(
        {role: spec.name(checkpoint.gguf) for role, spec in specs.items()},
        {role: spec.shape(config) for role, spec in specs.items()},
        _ignored(config),
    )
    return Decoder(
        config=config,
        weights=weights,
        parts={role: spec.part for role, spec in specs.items()},
        build=lambda prepared: build(config, prepared),
    )


def _ignored(config: DecoderConfig) -> set[str]:
    """Tensors that some files carry beside the weights: rope tables, which are computed (HF) or read with the config
    (GGUF), and the output matrix of a model whose config says that the embedding is used instead."""
    tables = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.layers)}
    return tables | {FACTORS} | ({"lm_head.weight"} if config.tied else set())
