"""A checkpoint on disk, opened without reading its tensors: a GGUF file, or a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headway.core.errors import BadInput, ModelFileError, shown
from headway.core.fields import Fields
from headway.core.pooling import GENERATES, PoolingConfig
from headway.model.gguf_parts import gguf_in, read_model
from headway.model.pooling import pooling_config, split_score
from headway.model.quantised import unpacked
from headway.model.reading import MAX_JSON_BYTES, open_file, read_json
from headway.model.safetensors import holds_safetensors, read_folder
from headway.ops.weight import READABLE, Weight
from headway.shape.config import shape_from_config
from headway.shape.families import language_model
from headway.shape.gguf import shape_from_gguf
from headway.shape.model import ModelShape
from headway.text.source import TokenizerSource


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: the file or folder.
        gguf: whether it is a GGUF file.
        architecture: its family, as the file names it ("llama").
        config: config.json's fields, or the GGUF's metadata.
        tensors: by their name in the file, still in the file; as a model that generates has them.
        score: matrix of the classification head [labels, d]; None = it has none.
        pooling: what its files say of the vectors it makes of texts.
    """

    path: Path
    gguf: bool
    architecture: str
    config: Fields
    tensors: dict[str, Weight]
    score: Weight | None = None
    pooling: PoolingConfig = GENERATES

    def shape(self, name: str) -> ModelShape:
        """The model as the planner knows it, built as from any config.json or GGUF.

        Raises:
            ModelFileError: the planner does not understand it.
        """
        if not self.gguf:
            return shape_from_config(self.config, name)
        tensors = {tensor: (weight.shape, weight.format) for tensor, weight in self.tensors.items()}
        try:
            return shape_from_gguf(self.config.values, tensors, name)
        except BadInput as error:
            raise ModelFileError(f"{self.path}: {error}") from None

    def take(
        self, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
    ) -> dict[str, Weight]:
        """The tensors by role: exactly those named, each of its shape, and no others but the ignored ones.

        Raises:
            ModelFileError: names tensors that are missing, unexpected or mis-shaped.
        """
        missing = sorted(set(names.values()) - self.tensors.keys())
        if missing:
            raise ModelFileError(f"{self.path}: {_listed('tensor', missing)} missing")
        unexpected = sorted(self.tensors.keys() - set(names.values()) - set(ignored))
        if unexpected:
            raise ModelFileError(
                f"{self.path}: {_listed('tensor', unexpected)} not part of a {self.architecture} model"
            )
        for role, name in names.items():
            if self.tensors[name].format not in READABLE:
                raise ModelFileError(f"{self.path}: tensor {name} is stored as {self.tensors[name].format.upper()}")
            if self.tensors[name].shape != shapes[role]:
                raise ModelFileError(
                    f"{self.path}: tensor {name}: its shape is {self.tensors[name].shape}, "
                    f"the config asks for {shapes[role]}"
                )
        return {role: self.tensors[name] for role, name in names.items()}


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file (or any of its parts, or a folder of nothing else) or a Hugging Face folder; headers only.

    Raises:
        ModelFileError: truncated, hostile, or not a model.
    """
    file = gguf_in(path) if path.is_dir() and not holds_safetensors(path) else path
    if file is None or file.is_dir():
        if not os.path.lexists(path / "config.json"):
            raise ModelFileError(f"{path}: the folder holds neither a config.json nor a .gguf file, so it is no model")
        whole = Fields(read_json(path / "config.json"), str(path / "config.json"), ModelFileError.of)
        config, tensors = language_model(whole), unpacked(whole, read_folder(path))
        if config.where != whole.where:
            tensors = _of_language_model(tensors)
        return _opened(path, False, config.text("model_type"), config, tensors)
    model = read_model(file)
    config = Fields(model.metadata, str(file), ModelFileError.of)
    return _opened(file, True, config.text("general.architecture"), config, model.tensors)


def _opened(path: Path, gguf: bool, architecture: str, config: Fields, tensors: Mapping[str, Weight]) -> Checkpoint:
    config, rest, score, generates = split_score(config, tensors, gguf)
    pooling = replace(pooling_config(path, config, architecture, gguf, score), generates=generates)
    return Checkpoint(path, gguf, architecture, config, rest, score, pooling)


# How wrappers of language model and encoders prefix the language model's tensors -> how it does itself.
WRAPPED = {
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}  # fmt: skip


def _of_language_model(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Its tensors under its own names; those of the encoders are left out."""
    return {
        own + name.removeprefix(prefix): weight
        for name, weight in tensors.items()
        for prefix, own in WRAPPED.items()
        if name.startswith(prefix)
    }


def tokenizer_source(checkpoint: Checkpoint, vocab_size: int) -> TokenizerSource:
    """What the checkpoint says about its tokenizer."""
    return (_gguf_tokenizer if checkpoint.gguf else _hf_tokenizer)(checkpoint, vocab_size)


def _gguf_tokenizer(checkpoint: Checkpoint, vocab_size: int) -> TokenizerSource:
    fields = checkpoint.config
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or set(map(type, tokens)) - {str}:
        raise fields.fault("tokenizer.ggml.tokens", "must be a list of strings")
    if len(tokens) > vocab_size:
        raise fields.fault(
            "tokenizer.ggml.tokens",
            f"{len(tokens)} tokens but the embedding has {vocab_size} rows; {shown(tokens[vocab_size])} has none",
        )
    ends = [fields.token_id(f"tokenizer.ggml.{kind}_token_id", vocab_size) for kind in ("eos", "eot", "eom")]
    ends += fields.token_ids("tokenizer.ggml.eos_token_ids", vocab_size)
    template, add_bos = "tokenizer.chat_template", "tokenizer.ggml.add_bos_token"
    return TokenizerSource(
        kind="gguf",
        path=checkpoint.path,
        vocab_size=vocab_size,
        metadata={key: value for key, value in fields.values.items() if key.startswith("tokenizer.")},
        chat_template=fields.text(template) if fields.has(template) else None,
        bos_id=fields.token_id("tokenizer.ggml.bos_token_id", vocab_size),
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        add_bos=fields.flag(add_bos, False) if fields.has(add_bos) else None,
    )


def _hf_tokenizer(checkpoint: Checkpoint, vocab_size: int) -> TokenizerSource:
    folder = checkpoint.path
    if os.path.lexists(folder / "tokenizer.json"):
        open_file(folder / "tokenizer.json").close()  # what is there instead of it is said here
    tokenizer, generation = (_optional(folder / f"{name}_config.json") for name in ("tokenizer", "generation"))
    return TokenizerSource(
        kind="hf",
        path=folder,
        vocab_size=vocab_size,
        metadata=dict(tokenizer.values),
        chat_template=_hf_template(folder, tokenizer),
        bos_id=checkpoint.config.token_id("bos_token_id", vocab_size),
        eos_ids=tuple(
            dict.fromkeys(
                id for file in (generation, checkpoint.config) for id in file.token_ids("eos_token_id", vocab_size)
            )
        ),
    )


# SamplingParams' fields that a checkpoint may have defaults for -> the key in a GGUF.
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip


def sampling_defaults(checkpoint: Checkpoint) -> Fields:
    """How its makers sample, as far as they say so: `SamplingParams`' fields, not checked, and where they stand."""
    if checkpoint.gguf:
        stated, names = checkpoint.config, {ours: f"general.sampling.{theirs}" for ours, theirs in _SAMPLING.items()}
    else:
        stated, names = _optional(checkpoint.path / "generation_config.json"), {name: name for name in _SAMPLING}
    found = {ours: stated.values[theirs] for ours, theirs in names.items() if stated.has(theirs)}
    if stated.values.get("do_sample") is False:
        found["temperature"] = 0.0
    return Fields(found, stated.where, stated.error)


def read_template(path: Path) -> str:
    """A chat template in a file of its own.

    Raises:
        ModelFileError: it cannot be read.
    """
    try:
        with open_file(path) as file:
            return file.read(MAX_JSON_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from None


def _hf_template(folder: Path, tokenizer: Fields) -> str | None:
    """chat_template.jinja if there is one, else the (default) template of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return read_template(path)
    template: Any = tokenizer.values.get("chat_template")
    if isinstance(template, list):
        texts = [
            entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        template = texts[-1] if texts else None
    if template is not None and not isinstance(template, str):
        raise tokenizer.fault("chat_template", f"{shown(template)} is not a string")
    return template


def _optional(path: Path) -> Fields:
    return Fields(read_json(path) if os.path.lexists(path) else {}, str(path), ModelFileError.of)


def _listed(noun: str, names: list[str]) -> str:
    """'tensor a is', or 'tensors a, b and 7 more are'."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{noun}{'s' * (len(names) > 1)} {', '.join(map(shown, names[:3]))}{more} {'are' if len(names) > 1 else 'is'}"
    )
