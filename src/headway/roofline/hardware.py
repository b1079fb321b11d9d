"""Devices as the step-time model sees them: peak arithmetic per number format, memory bandwidth, memory, links, price.

Figures come from `hardware.toml` beside this file, each device with its source. Peaks are dense, never sparse, and
never derived from one another: a B300 multiplies int8 thirty times slower than a B200. Plain floats only.
"""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.shape.formats import known_format

CATALOGUE = Path(__file__).with_name("hardware.toml")
GIB = float(1 << 30)
UTILISATION = round(1e9 / GIB, 2)  # of a GPU's memory, what engines plan with; recipes of measured runs: 0.90-0.95


NETWORK = 50e9  # bytes/s per device between nodes: one 400 Gbit/s port each


class Link(msgspec.Struct, frozen=True):
    """Links between the devices of one scale-up group: `bandwidth` bytes/s per device and direction, `group` devices.
    `peer`: bytes/s to any one peer, where the group is a mesh without a switch."""

    name: str
    bandwidth: float
    group: int
    peer: float | None = None


# What an hourly price pays for, cheapest to leave first. Owned: cost of ownership; spot: may be taken away at any time.
BASES = ("on-demand", "1-year", "3-year", "owned", "spot")


class Price(msgspec.Struct, frozen=True):
    """Dollars for one device and hour, on one basis: a range seen on the market, and a typical figure to plan with."""

    low: float
    high: float
    typical: float
    date: str
    source: str


class Hardware(msgspec.Struct, frozen=True):
    """One device.

    Attributes:
        name, aliases: what users may call it.
        kind: "gpu", "tpu" or "cpu".
        memory: bytes on the label. visible: bytes a process was seen to have; None = not looked up.
        bandwidth: beta, bytes/s of that memory.
        price: by basis (`BASES`).
        peaks: pi by number format, dense FLOP/s.
        power: watts, 0 = not known.
        measured: bandwidth share of the label that was measured, where it is far from usual.
    """

    name: str
    kind: str
    memory: float
    bandwidth: float
    peaks: dict[str, float]
    source: str
    date: str
    aliases: tuple[str, ...] = ()
    visible: float | None = None
    link: Link | None = None
    price: dict[str, Price] = {}
    power: float = 0.0
    measured: float | None = None
    notes: str = ""

    @property
    def usable(self) -> float:
        """C_HBM, what one device has for weights, activations and caches, in every mode and for every verb. An "80 GB"
        GPU has 80 GiB of chips; what engines plan with of them are the label's 80e9 bytes."""
        return self.memory if self.visible is None else self.visible * UTILISATION

    def basis(self) -> str | None:
        """Of its price where none is asked for; None if it has no price."""
        return next((basis for basis in BASES if basis in self.price), None)

    def crosses_nodes(self, gpus: int) -> bool:
        """Do so many devices need more than one scale-up group?"""
        return self.link is not None and gpus > self.link.group

    def reach(self, gpus: int) -> float:
        """Bytes/s in one direction that one of `gpus` devices sends to the others; infinite without catalogued links.
        Between groups every device has a port of its own, and a reduction uses those of its group at once."""
        if self.link is None:
            return float("inf")
        across = self.link.group * NETWORK if self.crosses_nodes(gpus) else float("inf")
        return min(self.link.bandwidth, across)

    def peak(self, math: str) -> float | None:
        """pi in a number format, None if the catalogue has no figure. fp16 runs at the bf16 rate on all of these."""
        return self.peaks.get("bf16" if math == "fp16" else math)

    def math_for(self, weights: str) -> str:
        """The format weights stored as `weights` are multiplied in on this device."""
        format = known_format(weights)
        wanted = format.multiplied if format else "bf16"
        if wanted in self.peaks:
            return wanted
        return "bf16" if "bf16" in self.peaks or not self.peaks else next(iter(self.peaks))


@cache
def hardware_catalogue() -> dict[str, Hardware]:
    """Every catalogued device by name."""
    table = tomllib.loads(CATALOGUE.read_text())
    return {name: device_from(name, entry) for name, entry in table.items()}


def device_from(name: str, entry: dict[str, Any]) -> Hardware:
    """A device of its table.

    Raises:
        msgspec.ValidationError: a field that is missing or of another kind.
    """
    return msgspec.convert({"name": name} | entry, Hardware)


def find_hardware(name: str, field: str = "--hardware") -> Hardware:
    """A device by name or alias, whatever the case and dashes.

    Raises:
        BadInput: unknown; the sentence names the nearest.
    """
    wanted = _plain(name)
    for device in hardware_catalogue().values():
        if wanted in {_plain(known) for known in (device.name, *device.aliases)}:
            return device
    near = difflib.get_close_matches(wanted, {_plain(known): known for known in hardware_catalogue()}, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(known for known in hardware_catalogue() if _plain(known) in near)}; " if near else ""
    raise BadInput(field, f"{name!r} is not in the catalogue; {hint}`headway plan hardware` lists it")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
