"""Several engines on one machine: what each gets of its memory, its threads, and the adapters that were named."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from headway.core.errors import BadInput, shown
from headway.engine.machine import free_memory, usable_cores
from headway.engine.options import EngineOptions
from headway.model.load import ModelInfo
from headway.roofline.hardware import GIB
from headway.roofline.memory import PROCESS, shares


def divided(
    options: EngineOptions, models: Mapping[str, ModelInfo], draft: ModelInfo | None = None
) -> dict[str, EngineOptions]:
    """The options of each model's engine, by name. Of one, they are `options`.

    Memory: each may use what its weights, its draft model's and its process need, and an equal part of the rest; its
    cache comes out of that. Disk: an equal part of `--kv-disk-gib`. Threads: an equal part of the cores, unless
    `--threads` says how many each has.

    Args:
        options: of all of them. Of several models, `lora` says which one's an adapter is: MODEL/NAME=PATH.
        draft: the model that drafts for each of them, loaded once for each.

    Raises:
        BadInput: together they do not fit, or an option cannot be that of several.
    """
    if len(models) == 1:
        return {name: replace(options, model=str(info.path)) for name, info in models.items()}
    for flag, value in (("--chat-template", options.chat_template), ("--event-log", options.event_log)):
        if value is not None:
            raise BadInput(flag, "it is one model's, and several are given; serve that one by itself")
    usable = min(free_memory(), (options.memory_gib or float("inf")) * GIB)
    cache = (options.kv_cache_gib or 0.0) * GIB
    drafting = 0 if draft is None else draft.weight_bytes
    needs = [info.weight_bytes + drafting + PROCESS + cache for info in models.values()]
    if sum(needs) > usable:
        what = ["weights", *(["draft models"] if drafting else []), *(["caches"] if cache else [])]
        problem = f"{', '.join(what)} and processes of {', '.join(models)} take {sum(needs) / GIB:.2f} GiB together"
        raise BadInput("model", f"{problem}; {usable / GIB:.2f} may be used")
    threads = options.threads or max(1, usable_cores() // len(models))
    if options.kv_disk is not None:
        options = replace(options, kv_disk_gib=options.disk_gib / len(models))
    adapters = _by_model(options, models)
    return {
        name: replace(
            options, model=str(info.path), memory_gib=share / GIB, threads=threads, lora=tuple(adapters[name])
        )
        for (name, info), share in zip(models.items(), shares(usable, needs), strict=True)
    }


def _by_model(options: EngineOptions, models: Mapping[str, ModelInfo]) -> dict[str, list[str]]:
    """`lora` of each model, as NAME=PATH."""
    found: dict[str, list[str]] = {name: [] for name in models}
    names: set[str] = set()
    for name, path in options.loras.items():
        base = max((one for one in models if name.startswith(f"{one}/")), key=len, default=None)
        adapter = name.removeprefix(f"{base}/")
        if base is None or not adapter:
            of = ", ".join(models)
            raise BadInput("--lora", f"{shown(name)} does not say which model it is over: MODEL/NAME=PATH, of {of}")
        if adapter in names or adapter in models:
            raise BadInput("--lora", f"{shown(adapter)} is the name of another model or adapter; give it another")
        names.add(adapter)
        found[base].append(f"{adapter}={path}")
    return found
