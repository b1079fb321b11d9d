"""Which models can be named, which of them are here, and what each would do on this machine. Reads headers only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import HeadwayError
from headway.engine.backends import make_backend
from headway.engine.machine import free_memory, usable_cores
from headway.engine.profile import held_formats, saved_profile
from headway.engine.references import load_shape
from headway.model.hub import HubSource, cached, hub_cache
from headway.model.load import FAMILIES
from headway.model.quantised import METHODS
from headway.model.source import DEFAULT_MODEL, cache_folder, is_default, named_source, parse_package
from headway.ops.protocol import Backend
from headway.roofline.memory import PROCESS, MemoryPlan, activation_bytes
from headway.roofline.profile import Profile, device_of
from headway.roofline.step import StepTime, decode_step
from headway.roofline.timing import estimate
from headway.shape.catalogue import catalogue_ids, find_model, model_config
from headway.shape.formats import FORMATS
from headway.shape.model import ModelShape, kv_bytes

CONTEXT = 4096  # tokens of one conversation, which must fit beside the weights
STEP_TOKENS = 512  # of the largest step
DEMO_SHAPE = "smollm2-135m"


class KnownModel(msgspec.Struct, frozen=True):
    """A model that can be named.

    Attributes:
        name: what to give a verb. source: what it stands for: a path, a repository, a package.
        here: nothing has to be downloaded.
        format: of most of its weights. bytes: of all of them.
        fits: they and one conversation of `CONTEXT` tokens, in the memory that is free now.
        tokens_per_second: of one request that decodes, as `headway probe` measured the machine; None = not measured.
        label: "estimate", or "bound" where such steps were not fitted; "" = not measured.
    """

    name: str
    source: str
    here: bool
    format: str
    bytes: float
    fits: bool
    tokens_per_second: float | None
    label: str


def known_models() -> list[KnownModel]:
    """Those on this machine first, then those to download, each by size. A file that cannot be read is left out."""
    profile, backend, free = saved_profile(), make_backend("auto", usable_cores()), free_memory()
    try:
        here = {source: (name, shape) for name, source, shape in _local()}
        models = [_known(name, source, True, shape, profile, backend, free) for source, (name, shape) in here.items()]
        if not any(is_default(Path(source)) for source in here):
            demo = parse_package(DEFAULT_MODEL)
            shape = find_model(DEMO_SHAPE)
            models.append(_known("demo", f"{demo.name}=={demo.version}", False, shape, profile, backend, free))
        for name, ids in catalogue_ids().items():
            if _runs(model_config(name) or {}) and not any(id in here for id in ids):
                models.append(_known(name, named_source(name) or "", False, find_model(name), profile, backend, free))
    finally:
        backend.close()
    return sorted(models, key=lambda model: (not model.here, model.bytes))


def _local() -> Iterator[tuple[str, str, ModelShape]]:
    """(name, source, shape) of models in the caches."""
    for path in sorted((cache_folder() / "packages").rglob("*.gguf")):
        if (shape := _shape(path)) is not None:
            yield ("demo" if is_default(path) else str(path)), str(path), shape
    for folder in sorted(hub_cache().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for revision in sorted((folder / "refs").iterdir()) if (folder / "refs").is_dir() else ():
            snapshot = cached(HubSource(repo, None, revision.name))
            if snapshot is not None and (shape := _shape(snapshot)) is not None:
                name = repo if revision.name == "main" else f"{repo}@{revision.name}"
                yield name, name, shape


def _runs(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config.json can be loaded."""
    method = config.get("quantization_config", {}).get("quant_method")
    return config.get("model_type") in FAMILIES and (method is None or method in METHODS)


def _shape(path: Path) -> ModelShape | None:
    try:
        return load_shape(os.fspath(path))
    except (HeadwayError, OSError):
        return None


def _known(
    name: str, source: str, here: bool, shape: ModelShape, profile: Profile | None, backend: Backend, free: float
) -> KnownModel:
    plan = MemoryPlan(free, shape.stored.total, activation_bytes(shape, STEP_TOKENS), PROCESS)
    fits = plan.room >= kv_bytes(shape.groups, min(CONTEXT, shape.context or CONTEXT))
    rate, label = (None, "") if profile is None else _decoding(shape, profile, backend)
    return KnownModel(name, source, here, shape.weight_format, shape.stored.total, fits, rate, label)


def _decoding(shape: ModelShape, profile: Profile, backend: Backend) -> tuple[float | None, str]:
    """(tokens/s of one request, what that is)."""
    timing = estimate(shape, profile, backend.name, held_formats(shape, backend))
    step = decode_step(shape, 1, CONTEXT // 8)
    if timing is not None:
        return 1 / timing.model.predict(step), timing.label
    math = FORMATS[shape.weight_format].multiplied_on_cpu
    if math not in profile.rates:
        return None, ""
    return 1 / StepTime(shape, device_of(profile), math=math).predict(step), "bound"
