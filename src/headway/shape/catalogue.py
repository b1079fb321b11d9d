"""Models by name: `models.toml` beside this file holds the shape-deciding fields of public `config.json` files."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from headway.core.errors import BadInput
from headway.shape.config import shape_from_config
from headway.shape.model import ModelShape

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


def model_config(name: str) -> dict[str, Any] | None:
    """The config fields of a catalogued model, None if `name` is not in the catalogue."""
    known = model_names().get(name.lower())
    return None if known is None else _entries()[known]["config"]


@cache
def find_model(name: str, field: str = "--model") -> ModelShape:
    """The shape of a catalogued model, by name, alias or hub id, whatever the case.

    Raises:
        BadInput: unknown; the sentence names the nearest spellings.
    """
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
