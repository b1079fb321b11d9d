"""Find a model's shape from whatever the user names: a file, a folder, a catalogue name, a hub id. No weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headway.core.errors import BadInput
from headway.engine.machine import free_memory
from headway.model.hub import CONFIG, FetchError, HubSource, fetch_config, parse_hub
from headway.model.reading import read_json
from headway.model.source import DEFAULT_MODEL, resolve
from headway.roofline.hardware import Hardware, find_hardware
from headway.roofline.own_hardware import is_file, read_devices
from headway.roofline.profile import Profile, device_of, load_profile
from headway.shape.catalogue import find_model, model_config, variant_of
from headway.shape.config import shape_from_config
from headway.shape.gguf import shape_from_gguf
from headway.shape.model import ModelShape

QUANTISATION = "hf_quant_config.json"  # beside config.json, where that does not say it


def load_shape(reference: str) -> ModelShape:
    """The shape of `reference`: a .gguf file, a config.json or a folder with one, a catalogue name, a hub id, whose
    config.json is taken from the local hub cache or downloaded (a few kilobytes; never weights) or, where that fails,
    replaced by the catalogued model whose re-upload it is by its name; or `demo`: the
    built-in model, fetched once, as by all verbs.

    Raises:
        BadInput: none of these, or not a language model.
        FetchError: the hub's config.json could not be fetched.
    """
    path = Path(reference).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path)
    if path.is_dir():
        if (path / CONFIG).is_file():
            return _from_files(path / CONFIG, path / QUANTISATION, path.name)
        return _from_gguf(path)
    if path.is_file():
        return _from_files(path, path.with_name(QUANTISATION), path.stem)
    if model_config(reference) is None and (hub := parse_hub(reference)) is not None:
        try:
            return _from_hub(hub)
        except FetchError:
            if variant_of(reference) is None:
                raise  # else its name says enough
    if reference == "demo":
        return _from_gguf(resolve(DEFAULT_MODEL))
    return find_model(reference)


def load_device(reference: str, field: str = "--hardware") -> Hardware:
    """A catalogued device, `this-machine` (measured by `headway probe`, with the memory that is free now), a
    profile's .json file, or a device of a user's FILE.toml (FILE.toml:NAME where it has several)."""
    if is_file(reference):
        devices = read_devices(reference, field)
        if len(devices) > 1:
            names = ", ".join(f"{reference}:{device.name}" for device in devices)
            raise BadInput(field, f"{reference} has several devices; name one: {names}")
        return devices[0]
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


def _from_hub(source: HubSource) -> ModelShape:
    found = fetch_config(source)
    if found.suffix == ".gguf":
        return _from_gguf(found)
    folder = found if found.is_dir() else found.parent
    return _from_files(folder / CONFIG, folder / QUANTISATION, source.repo)


def _from_files(config: Path, quantisation: Path, name: str) -> ModelShape:
    raw = read_json(config)
    if quantisation.is_file() and "quantization_config" not in raw:
        raw = raw | {"quantization_config": read_json(quantisation)}
    return shape_from_config(raw, name)
