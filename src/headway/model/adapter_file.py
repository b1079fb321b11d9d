"""Reader of LoRA adapters: a folder as PEFT saves it, or a GGUF file as llama.cpp converts it.

    adapter_config.json, adapter_model.safetensors    base_model.model.MODULE.lora_A.weight, .lora_B.weight
    adapter.gguf                                      TENSOR.lora_a, TENSOR.lora_b; adapter.lora.alpha
                                                      A [rank, in], B [out, rank]

What is read is only what adds a low-rank product to linear layers. All else that adapters may hold (DoRA, biases, whole
modules, embeddings) is refused by name, and so is every setting that is not known to change nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.core.errors import BadInput, ModelFileError, shown
from headway.core.fields import Fields
from headway.model.checkpoint import WRAPPED
from headway.model.gguf import read_gguf
from headway.model.reading import read_json
from headway.model.safetensors import read_safetensors
from headway.ops.weight import Weight

MAX_SCALE = 1e4  # of what is added; beyond it an adapter drowns its model
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."

# Settings of a PEFT config: read here, or such that they change nothing once an adapter is trained.
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules",
         "init_lora_weights", "bias", "task_type"}  # fmt: skip
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "corda_config", "eva_config", "lora_ga_config",
}  # fmt: skip
# Ways to begin training that leave the base as it is; others (PiSSA, OLoRA, LoftQ, ...) change its weights.
_INITS = (True, False, "gaussian", "eva", "orthogonal")
_PATTERN = re.compile(r"\^?(?:[\w.-]|\\\.)+\$?", re.ASCII)


@dataclass(frozen=True)
class Pair:
    """What is added to a layer: scale * up @ down, down [rank, in], up [out, rank]."""

    down: Weight
    up: Weight
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True)
class AdapterFile:
    """An adapter whose header was read, and checked in itself.

    Attributes:
        path: the folder or file.
        gguf: whether it is a GGUF file.
        pairs: by the layer's name: the module's of a PEFT adapter, the tensor's of a GGUF.
    """

    path: Path
    gguf: bool
    pairs: dict[str, Pair]

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max(pair.rank for pair in self.pairs.values())

    @cached_property
    def digest(self) -> str:
        """The same for adapters that add the same numbers, in hex; reads all of them.

        Raises:
            ModelFileError: the file was cut short since its header was read.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name, pair in sorted(self.pairs.items()):
            for weight in (pair.down, pair.up):
                for origin in weight.origins:
                    origin.fetch()  # of a file that is being replaced: an error instead of a signal that ends a server
                digest.update(f"{name} {weight.format} {weight.shape} {pair.scale!r}\n".encode())
                digest.update(weight.data.reshape(-1).data)
        return digest.hexdigest()


def read_adapter(path: Path) -> AdapterFile:
    """Read an adapter's header and settings.

    Raises:
        BadInput: there is nothing at the path.
        ModelFileError: the adapter is broken, or adds something that is not supported.
    """
    if not os.path.exists(path):
        raise BadInput("lora", f"{shown(str(path))}: there is no such folder or file")
    return _read_peft(path) if path.is_dir() else _read_gguf(path)


def _read_peft(folder: Path) -> AdapterFile:
    if not os.path.lexists(folder / CONFIG):
        raise ModelFileError(
            f"{folder}: holds no {CONFIG}; a LoRA adapter is a folder as PEFT saves it, or a .gguf file"
        )
    config = Fields(read_json(folder / CONFIG), str(folder / CONFIG), ModelFileError.of)
    _check_settings(config)
    if not os.path.lexists(folder / TENSORS) and os.path.lexists(folder / PICKLED):
        raise ModelFileError(f"{folder / PICKLED}: pickled weights are not read; save the adapter as {TENSORS}")
    path = folder / TENSORS
    halves = {side: dict[str, Weight]() for side in ("A", "B")}
    for name, weight in read_safetensors(path).items():
        module, dot, side = name.removesuffix(".weight").removeprefix(_PREFIX).rpartition(".lora_")
        if not dot or side not in halves or not name.endswith(".weight"):
            raise ModelFileError(f"{path}: tensor {shown(name)}: only lora_A and lora_B of linear layers are supported")
        if halves[side].setdefault(_own_name(module), weight) is not weight:
            raise ModelFileError(f"{path}: tensor {shown(name)}: another one stands for the same matrix")
    ranks, alphas = (_patterns(config, name) for name in ("rank_pattern", "alpha_pattern"))
    rank, alpha, rooted = config.size("r"), config.number("lora_alpha", 8.0), config.flag("use_rslora")
    pairs = {}
    for module, (down, up) in _paired(path, halves["A"], halves["B"]).items():
        _check_target(path, config.values.get("target_modules"), module)
        own = _matched(ranks, module, rank)
        if down.shape[0] != own:
            raise ModelFileError(f"{path}: {shown(module)}: its rank is {down.shape[0]}, the config says {own}")
        scale = _matched(alphas, module, alpha) / (math.sqrt(own) if rooted else own)
        pairs[module] = Pair(down, up, _checked(path, module, scale))
    return AdapterFile(folder, False, pairs)


def _own_name(module: str) -> str:
    """A module's name in the language model, also where that is wrapped together with encoders."""
    for prefix, own in WRAPPED.items():
        if module.startswith(prefix):
            return own + module.removeprefix(prefix)
    return module


def _check_settings(config: Fields) -> None:
    """
    Raises:
        ModelFileError: a setting asks for more than low-rank products of linear layers.
    """
    if config.text("peft_type") != "LORA":
        raise config.fault("peft_type", f"{shown(config.values['peft_type'])} is not supported; LORA is")
    if config.text("task_type", "CAUSAL_LM") != "CAUSAL_LM":
        raise config.fault("task_type", f"{shown(config.values['task_type'])} is not supported; CAUSAL_LM is")
    if config.text("bias", "none") != "none":
        raise config.fault("bias", f"{shown(config.values['bias'])} is not supported; none is")
    if config.values.get("init_lora_weights", True) not in _INITS:
        kind = shown(config.values["init_lora_weights"])
        raise config.fault("init_lora_weights", f"{kind} changes the base model; convert it to a plain LoRA adapter")
    targets = config.values.get("target_modules")
    named = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not named and not isinstance(targets, str | None):
        raise config.fault("target_modules", f"{shown(targets)} is neither a list of names nor a pattern")
    for name, value in config.values.items():
        if name not in _READ | _HARMLESS and value not in (None, False, {}, []):
            raise config.fault(name, f"{shown(value)} is not supported")


def _patterns(config: Fields, name: str) -> dict[str, float]:
    """Ends of module names -> the number that replaces the general one."""
    patterns = config.group(name)
    for key in patterns.values:
        if not _PATTERN.fullmatch(key):
            raise patterns.fault(key, "is a regular expression; names of modules are supported, with ^ and $")
    return {key: patterns.number(key) for key in patterns.values}


def _matched(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """What the first pattern says that names the module, or its last parts."""
    for key, value in patterns.items():
        name = key.removesuffix("$").replace("\\.", ".")
        if module == name.removeprefix("^") or (not key.startswith("^") and module.endswith(f".{name}")):
            return value
    return otherwise


def _check_target(path: Path, targets: Any, module: str) -> None:
    """A list of targets names every module that has tensors; a pattern says no more than the tensors do."""
    if isinstance(targets, list) and not any(module == name or module.endswith(f".{name}") for name in targets):
        raise ModelFileError(f"{path}: {shown(module)}: target_modules of the config does not name it")


def _paired(path: Path, downs: Mapping[str, Weight], ups: Mapping[str, Weight]) -> dict[str, tuple[Weight, Weight]]:
    """By layer; each pair fits together."""
    if not downs and not ups:
        raise ModelFileError(f"{path}: holds no LoRA tensors")
    for name in sorted(downs.keys() ^ ups.keys()):
        raise ModelFileError(f"{path}: {shown(name)}: one of its two matrices is missing")
    for name, down in downs.items():
        up = ups[name]
        for weight in (down, up):
            if weight.format not in ("f32", "f16", "bf16"):
                raise ModelFileError(
                    f"{path}: tensor {weight.name}: {weight.format} is not supported; f32, f16, bf16 are"
                )
        if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
            raise ModelFileError(f"{path}: {shown(name)}: shapes {down.shape} and {up.shape} do not fit together")
    return {name: (down, ups[name]) for name, down in downs.items()}


def _read_gguf(path: Path) -> AdapterFile:
    file = read_gguf(path)
    config = Fields(file.metadata, str(path), ModelFileError.of)
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if config.text(key, "model") != wanted:
            raise config.fault(key, f"{shown(config.values.get(key))} is not {wanted!r}: this is no LoRA adapter")
    halves = {side: dict[str, Weight]() for side in ("a", "b")}
    for name, weight in file.tensors.items():
        tensor, dot, side = name.rpartition(".lora_")
        if not dot or side not in halves:
            raise ModelFileError(f"{path}: tensor {shown(name)}: only lora_a and lora_b of linear layers are supported")
        halves[side][tensor] = weight
    alpha = config.number("adapter.lora.alpha")
    pairs = _paired(path, halves["a"], halves["b"])
    scaled = {name: Pair(down, up, _checked(path, name, alpha / down.shape[0])) for name, (down, up) in pairs.items()}
    return AdapterFile(path, True, scaled)


def _checked(path: Path, module: str, scale: float) -> float:
    """
    Raises:
        ModelFileError: what is added would be out of all proportion.
    """
    if scale > MAX_SCALE:
        raise ModelFileError(f"{path}: {shown(module)}: alpha over rank is {scale:g}; up to {MAX_SCALE:g} is accepted")
    return scale
