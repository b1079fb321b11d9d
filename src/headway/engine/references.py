"""Find a model's shape from whatever the user names: a file, a folder, a catalogue name, a hub id. No weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.engine.machine import free_memory
from headway.roofline.hardware import Hardware, find_hardware
from headway.roofline.profile import Profile, device_of, load_profile
from headway.shape.catalogue import find_model, model_config
from headway.shape.config import shape_from_config
from headway.shape.gguf import shape_from_gguf
from headway.shape.model import ModelShape

LARGEST_CONFIG = 16 << 20  # bytes; a real config.json has a few thousand


def load_shape(reference: str) -> ModelShape:
    """The shape of `reference`: a .gguf file, a config.json or a folder with one, a catalogue name, or a hub id, whose
    config.json is taken from the local hub cache or downloaded (a few kilobytes; never weights).

    Raises:
        BadInput: none of these, or not a language model.
    """
    path = Path(reference).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return _from_files(path / "config.json", path / "hf_quant_config.json", path.name)
        return _from_gguf(path)
    if path.is_file():
        return _from_files(path, path.with_name("hf_quant_config.json"), path.stem)
    if model_config(reference) is None and reference.count("/") == 1:
        return shape_from_config(_hub_config(reference), reference)
    return find_model(reference)


def load_device(reference: str, field: str = "--hardware") -> Hardware:
    """A catalogued device, `this-machine` (measured by `headway probe`, with the memory that is free now), or a
    profile's .json file."""
    profile = profile_of(reference, field)
    return find_hardware(reference, field) if profile is None else device_of(profile)


def profile_of(reference: str, field: str = "--hardware") -> Profile | None:
    """The profile that a hardware reference names; None if it is a catalogued device's name."""
    if reference.endswith(".json"):
        return load_profile(reference)
    if reference != "this-machine":
        return None
    from headway.engine.profile import saved_profile

    profile = saved_profile()
    if profile is None:
        raise BadInput(field, "this machine was not measured yet; run `headway probe`")
    return msgspec.structs.replace(profile, memory=float(free_memory()))


def _from_gguf(path: Path) -> ModelShape:
    """The shape in the header of a GGUF file, of all its parts if it is one, or of the one model in a folder."""
    from headway.model.gguf_parts import gguf_in, model_name, read_model_header

    file = gguf_in(path) if path.is_dir() else path
    if file is None:
        raise BadInput("--model", f"{path} has no config.json; accepted: a model folder, a .gguf file, a name")
    metadata, tensors = read_model_header(file)
    return shape_from_gguf(metadata, tensors, model_name(file))


def _from_files(config: Path, quantisation: Path, name: str) -> ModelShape:
    raw = _read_json(config)
    if quantisation.is_file() and isinstance(raw, dict) and "quantization_config" not in raw:
        raw = raw | {"quantization_config": _read_json(quantisation)}
    return shape_from_config(raw, name)


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise BadInput("--model", f"{path} is {path.stat().st_size} bytes; not a config.json")
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput("--model", f"{path} is not a readable config.json: {error}") from None


def _hub_config(model: str) -> Any:
    """config.json of a hub id: from the local hub cache, else downloaded once (public models only, no token)."""
    from urllib.request import urlopen

    from huggingface_hub import constants, try_to_load_from_cache  # comes with tokenizers

    try:
        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return _read_json(Path(cached))
        with urlopen(f"{constants.ENDPOINT}/{model}/resolve/main/config.json", timeout=10) as reply:
            return json.loads(reply.read(LARGEST_CONFIG))
    except (OSError, ValueError) as error:  # URLError is an OSError, a bad id or bad JSON a ValueError
        raise BadInput(
            "--model", f"{model!r} is not in the catalogue and its config.json could not be fetched: {error}"
        ) from None
