"""What the planner knows by name: `headway plan models` and `headway plan hardware`."""

from __future__ import annotations

from headway.plan.answers_lists import Devices, Model, Models
from headway.roofline.hardware import hardware_catalogue
from headway.roofline.own_hardware import is_file, read_devices
from headway.shape.catalogue import catalogue_ids, find_model
from headway.shape.model import kv_bytes

CONTEXT = 8192  # tokens at which caches are compared


def models(word: str = "") -> Models:
    """Catalogued models whose name or hub ids contain `word`."""
    found = []
    for name, ids in catalogue_ids().items():
        if not any(word.lower() in known.lower() for known in (name, *ids)):
            continue
        shape = find_model(name)
        found.append(Model(
            name, ids, shape.n_params, shape.n_active, shape.layers, shape.context, shape.weight_format,
            shape.stored.total, kv_bytes(shape, CONTEXT),
        ))  # fmt: skip
    return Models(models=found)


def hardware(word: str = "") -> Devices:
    """Catalogued devices whose name or aliases contain `word`, as they stand in hardware.toml; or a FILE.toml's."""
    if is_file(word):
        return Devices(devices=read_devices(word, "WORD"))
    known = hardware_catalogue().values()
    return Devices(devices=[d for d in known if any(word.lower() in name for name in (d.name, *d.aliases))])
