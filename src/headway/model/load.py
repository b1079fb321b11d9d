"""From a model source to a model an executor can run."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import BadInput, ModelFileError, shown
from headway.core.fields import Fields
from headway.core.pooling import GENERATES, PoolingConfig
from headway.model.adapters import Adaptable, AdapterLimits, make_adaptable
from headway.model.checkpoint import (
    Checkpoint,
    open_checkpoint,
    read_template,
    sampling_defaults,
    tokenizer_source,
)
from headway.model.config import DecoderConfig
from headway.model.family import Decoder
from headway.model.gguf_parts import model_name
from headway.model.source import Progress, resolve
from headway.ops.protocol import Backend, Forward
from headway.ops.weight import NOT_FINITE, plus_one
from headway.shape.model import ByPart, ModelShape
from headway.text.source import TokenizerSource

# Module of this package -> the architectures it understands, as folders and GGUF files name them.
SAMPLED = 16  # bytes of a weight that `OpenModel.content` looks at

_MODULES = {
    "llama": ("llama",),
    "cohere": ("cohere", "cohere2", "command-r"),
    "deepseek2": ("deepseek2",),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "exaone4": ("exaone4",),
    "falcon": ("falcon", "falcon_40b"),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3", "gemma3_text"),
    "glm4": ("glm", "glm4"),
    "gpt2": ("gpt2",),
    "gpt_neox": ("gpt_neox", "gptneox"),
    "gpt_oss": ("gpt-oss", "gpt_oss"),
    "granite": ("granite",),
    "granite_moe": ("granitemoe",),
    "mistral": ("ministral", "mistral"),
    "mixtral": ("mixtral",),
    "nemotron": ("nemotron",),
    "olmo2": ("olmo2",),
    "olmo3": ("olmo3",),
    "olmoe": ("olmoe",),
    "phi": ("phi", "phi2"),
    "phi3": ("phi3",),
    "qwen2": ("qwen2",),
    "qwen2_moe": ("qwen2_moe", "qwen2moe"),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3_moe", "qwen3moe"),
    "smollm3": ("smollm3",),
    "stablelm": ("stablelm",),
    "starcoder2": ("starcoder2",),
}
FAMILIES = {name: module for module, names in _MODULES.items() for name in names}


@dataclass(frozen=True)
class ModelInfo:
    """A model as its files' headers describe it.

    Attributes:
        name: the folder's or file's name.
        path: the folder or file.
        architecture: "llama".
        config: sizes and constants.
        tokenizer: what the checkpoint says about its tokenizer, end-of-sequence ids included.
        sampling: `SamplingParams`' fields that the checkpoint has defaults for, not checked.
        parameters: numbers in the tensors it computes with; a tied table counts once.
        weight_bytes: bytes of those tensors as stored.
        formats: storage format -> how many tensors have it.
        pooling: what it makes of whole texts.
    """

    name: str
    path: Path
    architecture: str
    config: DecoderConfig
    tokenizer: TokenizerSource
    sampling: Fields
    parameters: int
    weight_bytes: int
    formats: dict[str, int]
    pooling: PoolingConfig = GENERATES

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.context_length


@dataclass(frozen=True)
class Model:
    """A model on a backend.

    Attributes:
        info: what it is.
        shape: what it is made of and what it caches, in the bytes that weights and cache take on this backend.
        forward: its forward pass, for `backend.compile`.
        adaptable: where adapters are loaded; None = it takes none.
        score: its classification head, float32 [labels, d]; None = it has none.
    """

    info: ModelInfo
    shape: ModelShape
    forward: Forward
    adaptable: Adaptable | None = None
    score: np.ndarray | None = None


@dataclass(frozen=True)
class OpenModel:
    """A model of which the headers were read, and no tensor."""

    info: ModelInfo
    checkpoint: Checkpoint
    decoder: Decoder

    def identity(self) -> str:
        """Changes with the model's files (see `File.identity`) and with how they are understood."""
        digest = hashlib.blake2b(repr(self.info.config).encode(), digest_size=16)
        for name, weight in self.decoder.weights.items():
            origins = [origin.file_identity() for origin in weight.origins]
            digest.update(repr((name, weight.name, weight.shape, weight.format, origins)).encode())
            if not origins:
                digest.update(weight.dequantise().tobytes())
        return digest.hexdigest()

    def content(self) -> str:
        """The same for copies of the model's files, wherever they are: of how they are understood, and a few bytes of
        every weight."""
        digest = hashlib.blake2b(repr(self.info.config).encode(), digest_size=16)
        for name, weight in self.decoder.weights.items():
            digest.update(repr((name, weight.shape, weight.format)).encode())
            data = weight.data
            if isinstance(data, np.ndarray) and data.size:
                digest.update(data.flat[np.linspace(0, data.size - 1, SAMPLED).astype(np.int64)].tobytes())
        return digest.hexdigest()

    def prepare(
        self,
        backend: Backend,
        room: float = math.inf,
        vocab_size: int | None = None,
        adapters: AdapterLimits | None = None,
    ) -> Model:
        """Its weights on a backend.

        Args:
            room: bytes that they may take.
            vocab_size: tokens to have: rows that pad embedding and output matrix are left out, so that no id beyond can
                be drawn; None = all rows.
            adapters: what is to be provided for; None = no adapters.

        Raises:
            ModelFileError: a tensor is broken.
            BadInput: the weights are larger than `room`, as stored (before any is read) or prepared.
        """
        info, decoder = self.info, self.decoder if vocab_size is None else self.decoder.cut(vocab_size)
        if info.weight_bytes > room:
            needed, free = info.weight_bytes / 2**30, room / 2**30
            raise BadInput("model", f"the weights of {info.name} take {needed:.2f} GiB; {free:.2f} are free")
        prepared, taken = {}, Counter[str]()
        for role, weight in decoder.weights.items():
            before, part = backend.weight_bytes, decoder.parts[role]
            stored = plus_one(weight) if role in decoder.one_less else weight
            prepared[role] = backend.prepare(replace(stored, part=part))
            for origin in weight.origins:
                origin.forget()
            taken[part] += backend.weight_bytes - before
            if backend.weight_bytes > room:  # some formats take more room in the form that is computed with
                raise BadInput(
                    "model", f"the weights of {info.name} take more than the {room / 2**30:.2f} GiB that are free"
                )
        numbers = Counter[str]()
        for weight in decoder.weights.values():
            numbers[weight.format] += math.prod(weight.shape)
        shape = self.checkpoint.shape(info.name).with_vocab(decoder.config.vocab_size)
        held = shape.held(
            ByPart(**taken),
            kv_bytes=backend.kv_dtype_bytes,
            format=max(numbers, key=numbers.__getitem__),
            head_format=decoder.weights["embed" if decoder.config.tied else "head"].format,
        )
        if adapters is None:
            return Model(info, held, decoder.build(prepared), score=self._score())
        return Model(info, held, *make_adaptable(backend, decoder, prepared, adapters), score=self._score())

    def _score(self) -> np.ndarray | None:
        head = self.checkpoint.score
        if head is None:
            return None
        if head.shape[1] != self.decoder.config.hidden_size:
            raise ModelFileError(f"tensor {head.name}: its shape {head.shape} does not fit the model")
        numbers = np.require(head.dequantise(), np.float32, ["C", "A"])
        if not np.isfinite(numbers).all():
            raise ModelFileError(f"tensor {head.name}: {NOT_FINITE}")
        return numbers


def describe(
    source: str | Path, progress: Progress | None = None, chat_template: str | Path | None = None
) -> ModelInfo:
    """What a model is. Arguments and errors as of `open_model`."""
    return open_model(source, progress, chat_template).info


def load(source: str | Path, backend: Backend, progress: Progress | None = None, room: float = math.inf) -> Model:
    """A model with all rows of its vocabulary. Arguments and errors as of `open_model` and `OpenModel.prepare`."""
    return open_model(source, progress).prepare(backend, room)


def open_model(
    source: str | Path, progress: Progress | None = None, chat_template: str | Path | None = None
) -> OpenModel:
    """Read a model's headers. A `package:` source is fetched if it is not cached.

    Args:
        chat_template: a Jinja file in place of the model's own template.

    Raises:
        ModelFileError: the files are missing, broken, or of an unsupported kind; names file, tensor and fault.
        BadInput: the source is not one.
    """
    path = resolve(source, progress)
    checkpoint = open_checkpoint(path)
    if checkpoint.architecture not in FAMILIES:
        raise ModelFileError(
            f"{path}: architecture {shown(checkpoint.architecture)} is not supported; accepted: {', '.join(FAMILIES)}"
        )
    decoder = understood(checkpoint)
    weights = decoder.weights.values()
    tokenizer = tokenizer_source(checkpoint, decoder.config.vocab_size)
    if chat_template is not None:
        tokenizer = msgspec.structs.replace(tokenizer, chat_template=read_template(Path(chat_template).expanduser()))
    info = ModelInfo(
        name=_name(checkpoint),
        path=checkpoint.path,
        architecture=checkpoint.architecture,
        config=decoder.config,
        tokenizer=tokenizer,
        sampling=sampling_defaults(checkpoint),
        parameters=sum(math.prod(weight.shape) for weight in weights),
        weight_bytes=sum(weight.bytes for weight in weights),
        formats=dict(Counter(weight.format for weight in weights)),
        pooling=checkpoint.pooling,
    )
    return OpenModel(info, checkpoint, decoder)


def understood(checkpoint: Checkpoint) -> Decoder:
    """A checkpoint of one of `FAMILIES`, as its family understands it.

    Raises:
        ModelFileError: config or tensors are not those of a model that the family runs.
    """
    module = FAMILIES[checkpoint.architecture]
    if checkpoint.gguf and checkpoint.config.values.get("llama.expert_count"):
        module = "mixtral"  # which GGUF files call a llama
    decoder: Callable[[Checkpoint], Decoder] = import_module(f"headway.model.{module}").decoder
    return decoder(checkpoint)


def _name(checkpoint: Checkpoint) -> str:
    """What the user calls the model, links not followed; of a snapshot in the Hugging Face cache, the repository's."""
    path = Path(os.path.abspath(checkpoint.path))
    if checkpoint.gguf:
        return model_name(path)
    repository = path.parent.parent.name
    cached = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if cached else path.name
