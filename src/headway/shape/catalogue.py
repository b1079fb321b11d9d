"""Models by name: `models.toml` beside this file holds the shape-deciding fields of public `config.json` files."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import BadInput
from headway.shape.config import shape_from_config
from headway.shape.model import ModelShape, store_as

CATALOGUE = Path(__file__).with_name("models.toml")


@cache
def model_names() -> dict[str, str]:
    """Every accepted spelling (names, aliases, hub ids; lower case) -> catalogue name."""
    names: dict[str, str] = {}
    for name, entry in _entries().items():
        for spelling in (name, *entry.get("aliases", ()), *entry["ids"]):
            names[spelling.lower()] = name
            names.setdefault(spelling.lower().rpartition("/")[2], name)
    return names


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return tomllib.loads(CATALOGUE.read_text())


# What re-uploads append to a model's name: kinds of tuning, and formats of the weights with their flavours.
_TUNED = r"instruct|chat|it|hf|base|thinking|\d{4}"
_FORMATS = {
    "bf16": r"bf16", "fp8": r"fp8|f8", "nvfp4": r"nvfp4|fp4|w4a4", "mxfp4": r"mxfp4", "w8a8": r"w8a8|int8",
    "int8": r"8bit|8-bit", "int4": r"int4|w4a16|awq|gptq|4bit|4-bit|autoround",
}  # fmt: skip
_FLAVOUR = r"dynamic|block|static|kv|g?\d{2,3}g?|quantized|marlin|preview|v\d|ct|\d\.\d|asym|sym|mixed"
_ENDING = re.compile(rf"[-_.](?:{_TUNED}|{'|'.join(_FORMATS.values())}|{_FLAVOUR})$")


class Variant(NamedTuple):
    """A catalogued model under another name: the one it has there, and the format that the name gives its weights ("":
    it says none)."""

    model: str
    format: str


@cache
def variant_of(name: str) -> Variant | None:
    """What a quantised or tuned re-upload ("nvidia/Llama-3.1-8B-Instruct-FP8") is, by its name; None if its name is in
    the catalogue, or what is left of it is not."""
    stem = name.lower().rpartition("/")[2]
    if name.lower() in model_names():
        return None
    endings, known = "", model_names().get(stem)
    while known is None and (ending := _ENDING.search(stem)):
        stem, endings = stem[: ending.start()], endings + ending[0]
        known = model_names().get(stem) or model_names().get(stem.removeprefix("meta-"))
    if known is None:
        return None
    formats = [format for format, words in _FORMATS.items() if re.search(rf"[-_.](?:{words})(?![a-z0-9])", endings)]
    return Variant(known, formats[0] if formats else "")


def model_config(name: str) -> dict[str, Any] | None:
    """The config fields of a catalogued model, None if `name` is not in the catalogue."""
    known = model_names().get(name.lower())
    return None if known is None else _entries()[known]["config"]


@cache
def find_model(name: str, field: str = "--model") -> ModelShape:
    """The shape of a catalogued model, by name, alias or hub id, whatever the case; of a re-upload under a name that
    tells both (`variant_of`), in the format it tells.

    Raises:
        BadInput: unknown; the sentence names the nearest spellings.
    """
    if variant := variant_of(name):
        shape = find_model(variant.model)
        return store_as(shape, variant.format) if variant.format else shape
    config = model_config(name)
    if config is None:
        near = difflib.get_close_matches(name.lower(), sorted(model_names()), n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}; " if near else ""
        raise BadInput(
            field, f"{name!r} is not in the catalogue; {hint}accepted also: a folder with config.json, or a GGUF file"
        )
    return shape_from_config(config, model_names()[name.lower()])


def catalogue_ids() -> dict[str, list[str]]:
    """Every catalogued model: name -> the hub ids that have its shape."""
    return {name: list(entry["ids"]) for name, entry in _entries().items()}


def hub_id(name: str) -> str | None:
    """The first hub id of a catalogued model, None if it is not catalogued."""
    known = model_names().get(name.lower())
    return None if known is None else _entries()[known]["ids"][0]
