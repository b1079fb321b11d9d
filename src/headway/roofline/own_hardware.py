"""Devices and prices that a user writes down, in the form of `hardware.toml`; every figure is checked.

[my-gpu]                                  # --hardware mine.toml, or mine.toml:my-gpu where it has several
memory = 48e9                             # bytes
bandwidth = 1.2e12                        # bytes/s
peaks = { bf16 = 3e14, fp8 = 6e14 }       # dense FLOP/s; without: nothing that arithmetic decides
link = { name = "PCIe5", bandwidth = 6.4e10, group = 8 }
power = 350                               # watts
price = { on-demand = 1.2, owned = 0.7 }  # dollars per device-hour

[h100-sxm]                                # --prices prices.toml: catalogued or own devices
1-year = { typical = 1.9, date = "2026-11", source = "our contract" }
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.core.toml_file import read_toml
from headway.roofline.hardware import BASES, Hardware, Price, device_from
from headway.shape.formats import known_format

LEAST = {"memory": 1e8, "bandwidth": 1e9}  # below, a unit was mistaken
FIELDS = {field.name for field in msgspec.structs.fields(Hardware)} - {"name"}


def is_file(reference: str) -> bool:
    """Is this a file of devices, with or without the name of one of them, and not a catalogued name?"""
    return _parted(reference)[0].suffix == ".toml"


def read_devices(reference: str, field: str = "--hardware") -> list[Hardware]:
    """The devices of FILE.toml, or the one that FILE.toml:NAME names.

    Raises:
        BadInput: no such file, or the first figure in it that cannot be.
    """
    path, wanted = _parted(reference)
    table = _table(path, field)
    devices = [_device(f"{path}: [{name}]", name, entry, path, field) for name, entry in table.items()]
    if wanted and wanted not in table:
        raise BadInput(field, f"{path} has no [{wanted}]; it has {', '.join(table)}")
    return [device for device in devices if not wanted or device.name == wanted]


def read_prices(path: Path, field: str = "--prices") -> dict[str, dict[str, Price]]:
    """By device and basis, dollars per device-hour."""
    table = _table(path, field)
    return {name: _prices(f"{path}: [{name}]", entry, path, field) for name, entry in table.items()}


def _parted(reference: str) -> tuple[Path, str]:
    name, mark, device = reference.rpartition(":")
    return (Path(name), device) if mark and name.endswith(".toml") else (Path(reference), "")


def _table(path: Path, field: str) -> dict[str, dict[str, Any]]:
    """The tables of a file, one per device."""
    table = read_toml(path, field)
    if not table or not all(isinstance(entry, dict) for entry in table.values()):
        raise BadInput(field, f"{path}; accepted: one [device] or more, each with its figures")
    return table


def _device(where: str, name: str, entry: dict[str, Any], path: Path, field: str) -> Hardware:
    if unknown := sorted(set(entry) - FIELDS):
        raise BadInput(field, f"{where} {unknown[0]}: unknown; accepted: {', '.join(sorted(FIELDS))}")
    priced = entry.get("price", {})
    if not isinstance(priced, dict):
        raise BadInput(field, f"{where} price; accepted: dollars by basis, like {{ on-demand = 1.2 }}")
    price = _prices(f"{where} price.", priced, path, field)
    given = {"kind": "gpu", "peaks": {}, "source": str(path), "date": "as given"} | entry | {"price": {}}
    try:
        device = msgspec.structs.replace(device_from(name, given), price=price)
    except msgspec.ValidationError as error:
        raise BadInput(field, f"{where} {error}") from None
    if device.kind not in ("gpu", "tpu", "cpu"):
        raise BadInput(field, f"{where} kind: {device.kind!r}; accepted: gpu, tpu, cpu")
    link = device.link
    for what, value in [
        ("memory", device.memory), ("bandwidth", device.bandwidth), ("visible", device.visible or 1.0),
        *((f"peaks.{format}", peak) for format, peak in device.peaks.items()),
        *([("link.bandwidth", link.bandwidth), ("link.group", link.group)] if link else []),
    ]:  # fmt: skip
        least = LEAST.get(what, 1e9 if what.startswith("peaks") or what == "link.bandwidth" else 0.0)
        if not least < value < float("inf"):
            unit = {"memory": "bytes", "visible": "bytes", "link.group": "devices"}.get(
                what, "FLOP/s" if what.startswith("peaks") else "bytes/s"
            )
            raise BadInput(field, f"{where} {what}: {value:g}; accepted: {unit} above {least:g}")
    if not 0 <= device.power < float("inf"):
        raise BadInput(field, f"{where} power: {device.power:g}; accepted: watts from 0")
    if strange := [format for format in device.peaks if known_format(format) is None]:
        raise BadInput(field, f"{where} peaks.{strange[0]}: not a number format; accepted: bf16, fp8, fp4, int8...")
    return device


def _prices(where: str, entry: dict[str, Any], path: Path, field: str) -> dict[str, Price]:
    """Prices by basis, each a number or a table like the catalogue's."""
    found = {}
    for basis, value in entry.items():
        if basis not in BASES:
            raise BadInput(field, f"{where} {basis}: not a price basis; accepted: {', '.join(BASES)}")
        given = {"typical": value} if isinstance(value, int | float) and not isinstance(value, bool) else value
        if not isinstance(given, dict) or "typical" not in given:
            raise BadInput(field, f"{where} {basis}; accepted: dollars per hour, or a table with typical = dollars")
        ends = {"low": given["typical"], "high": given["typical"], "date": "as given", "source": str(path)}
        try:
            price = msgspec.convert(ends | given, Price)
        except msgspec.ValidationError as error:
            raise BadInput(field, f"{where} {basis}: {error}") from None
        if not 0 <= price.low <= price.typical <= price.high < float("inf"):
            raise BadInput(field, f"{where} {basis}: {price.typical:g}; accepted: 0 <= low <= typical <= high")
        found[basis] = price
    return found
