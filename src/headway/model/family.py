"""What a decoder family makes of a checkpoint; the only thing loading knows of families."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.core.fields import Fields
from headway.model.blocks import Weights
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, DecoderConfig, decoder_config, stated
from headway.model.rope import FACTORS, LONG, SHORT
from headway.model.tensors import CUTS, Cut, TensorSpec, tensors_of
from headway.ops.protocol import Forward
from headway.ops.weight import Weight
from headway.shape.families import FAMILIES, Family, family_in_gguf

Build = Callable[[Any, Weights], Forward]  # of the family's config


@dataclass(frozen=True)
class Decoder:
    """A checkpoint understood by its family; no tensor has been read.

    Attributes:
        config: its sizes and constants.
        weights: the tensors to prepare, by role; each is needed once.
        parts: role of a weight -> the part it plays in a step, a field of `ByPart`.
        one_less: roles of weights that the file keeps less 1: norms that start as zeros.
        build: prepared weights by role -> the forward pass.
        specs: the tensor that each weight is, or is cut from, by role.
        gguf: whether it comes from a GGUF file.
    """

    config: DecoderConfig
    weights: dict[str, Weight]
    parts: dict[str, str]
    build: Callable[[Weights], Forward]
    specs: Mapping[str, TensorSpec]
    gguf: bool
    one_less: frozenset[str] = frozenset()

    def cut(self, vocab_size: int) -> Decoder:
        """The same with no more than `vocab_size` rows in embedding and output matrix."""
        roles = self.weights.keys() & {"embed", "head", "head_bias"}
        tables = {role: self.weights[role].first_rows(vocab_size) for role in roles}
        rows = min(vocab_size, self.config.vocab_size)
        return replace(self, config=replace(self.config, vocab_size=rows), weights=self.weights | tables)


def decoder_of(
    checkpoint: Checkpoint,
    fields: Fields,
    config: DecoderConfig,
    build: Build,
    *,
    family: Family | None = None,
    cuts: Mapping[str, Cut] = {},
    norms_less_one: bool = False,
    tables: Collection[str] = ("self_attn.rotary_emb.inv_freq",),
) -> Decoder:
    """A decoder with the tensors of its kind of model.

    Args:
        fields: of the checkpoint, under config.json's names.
        family: whose tensors it has; None = as the checkpoint says.
        cuts: role within a layer -> how such a tensor is cut, where that is not as in other families.
        norms_less_one: the file keeps norms less 1.
        tables: what some of its folders keep in a layer that is computed here: rope tables, masks.

    Raises:
        ModelFileError: the tensors are not exactly those.
    """
    if family is None:
        architecture = checkpoint.architecture
        family = family_in_gguf(architecture) if checkpoint.gguf else FAMILIES[architecture]
    # Experts come as `stacked` leaves them; a GGUF keeps all matrices (out, in).
    family = replace(family, experts="mlp", transposed=family.transposed and not checkpoint.gguf)
    specs = tensors_of(family, fields, config, {**CUTS, **cuts})
    ignored = {f"model.layers.{number}.{table}" for number in range(config.layers) for table in tables}
    ignored |= {"lm_head.weight"} if config.tied else set()  # the config says that the embedding is used instead
    weights = checkpoint.take(
        {role: spec.name(checkpoint.gguf) for role, spec in specs.items()},
        {role: spec.shape for role, spec in specs.items()},
        {family.named(name) for name in ignored} | {FACTORS, LONG, SHORT},
    )
    cut = {role: _cut(role, specs[role], weight, config) for role, weight in weights.items()}
    return Decoder(
        config=config,
        weights={name: weight for pieces in cut.values() for name, weight in pieces.items()},
        parts={name: specs[role].part for role, pieces in cut.items() for name in pieces},
        build=lambda prepared: build(config, prepared),
        specs={name: specs[role] for role, pieces in cut.items() for name in pieces},
        gguf=checkpoint.gguf,
        one_less=frozenset(
            role
            for role, spec in specs.items()
            if norms_less_one and spec.part == "norm" and not role.endswith("_bias")
        ),
    )


def common_decoder(
    checkpoint: Checkpoint, conventions: Conventions, build: Build, norms_less_one: bool = False
) -> Decoder:
    """A decoder of a family of which its conventions and its inventory say all. Errors as of `decoder_of`."""
    fields, config = stated(checkpoint, conventions), decoder_config(checkpoint, conventions)
    return decoder_of(checkpoint, fields, config, build, norms_less_one=norms_less_one)


def _cut(role: str, spec: TensorSpec, weight: Weight, config: DecoderConfig) -> dict[str, Weight]:
    """The weights that a tensor holds, by role in the whole model."""
    if spec.cut is None:
        return {role: weight}
    layer = role[: role.find(".") + 1]  # "3." of layer 3, "" beside the layers
    return {layer + name: piece for name, piece in spec.cut(weight, config).items()}
