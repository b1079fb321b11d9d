"""What a device costs per hour: given by the user, of a file of their own, or catalogued; always on one named basis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headway.core.errors import BadInput
from headway.engine.references import load_device
from headway.report.units import dollars
from headway.roofline.hardware import BASES, Hardware
from headway.roofline.own_hardware import read_prices

GIVEN = "given"
Asked = tuple[float | None, str | None, str | None]  # --price, --prices, --price-basis


class Quote(msgspec.Struct, frozen=True):
    """Dollars per GPU-hour on a basis ("given": the user's figure), and where they are from."""

    device: Hardware
    usd: float
    basis: str
    source: str

    def line(self, option: str = "--price, --price-basis") -> str:
        """The price in one line, with its basis and date; the sources stand in `plan hardware`."""
        start = f"{self.device.name} at {dollars(self.usd)} per GPU-hour"
        if self.basis == GIVEN:
            return f"{start}, as given"
        known = self.device.price[self.basis]
        spread = known.low < known.high
        span = f"typical of {dollars(known.low)} to {dollars(known.high)} seen by" if spread else "as of"
        dated = known.date if known.date == "as given" else f"{span} {known.date}"
        return f"{start} ({self.basis}), {dated} ({option})"


def quoted(device: Hardware, given: float | None, prices: str | None = None, basis: str | None = None) -> Quote:
    """One device's price. `prices`: as `plan search --prices` takes them; `basis`: None = the first it has a price on.

    Raises:
        BadInput: no such price; names the bases there are.
    """
    if given is not None:
        if not 0 <= given < float("inf"):
            raise BadInput("--price", f"{given}; accepted: dollars per GPU-hour from 0")
        return Quote(device, given, GIVEN, GIVEN)
    figures = own_prices(prices)
    if device.name in figures.figures:
        return Quote(device, figures.figures[device.name], GIVEN, GIVEN)
    device, wanted = figures.priced(device), checked_basis(basis)
    if not device.price:
        raise BadInput("--price", f"no price is catalogued for {device.name}; give dollars per GPU-hour")
    if (wanted := wanted or device.basis() or "") not in device.price:
        raise BadInput("--price-basis", f"{device.name} has no {wanted} price; it has {', '.join(device.price)}")
    known = device.price[wanted]
    source = f"{wanted}: typical of {known.low:g}-{known.high:g} $/GPU-h seen by {known.date}: {known.source}"
    return Quote(device, known.typical, wanted, source)


def checked_basis(basis: str | None) -> str | None:
    """Refuse a basis that is none."""
    if basis is not None and basis not in BASES:
        raise BadInput("--price-basis", f"{basis!r}; accepted: {', '.join(BASES)}")
    return basis


def common_basis(devices: Sequence[Hardware], figures: Mapping[str, float]) -> str:
    """The basis on which most of these devices have a price, so that a ranking compares like with like."""
    priced = [device for device in devices if device.name not in figures]
    return max(BASES, key=lambda basis: sum(basis in device.price for device in priced))


class OwnPrices(msgspec.Struct, frozen=True):
    """A user's prices: `figures`, good on any basis, and by basis, by device."""

    figures: dict[str, float] = {}
    by_basis: dict[str, Hardware] = {}

    def priced(self, device: Hardware) -> Hardware:
        """The device with these in place of, or beside, its catalogued prices."""
        own = self.by_basis.get(device.name)
        return msgspec.structs.replace(device, price=device.price | own.price) if own else device


def own_prices(text: str | None) -> OwnPrices:
    """`h100-sxm=2,b200=4` as dollars per GPU-hour, or a FILE.toml with prices by device and basis."""
    if text is None:
        return OwnPrices()
    if text.endswith(".toml") and "=" not in text:
        return OwnPrices({}, {
            (device := _device(name)).name: msgspec.structs.replace(device, price=found)
            for name, found in read_prices(Path(text)).items()
        })  # fmt: skip
    found = {}
    for part in text.split(","):
        name, _, price = part.partition("=")
        try:
            value = float(price)
        except ValueError:
            raise BadInput("--prices", f"{part!r}; accepted: device=dollars, like h100-sxm=2, or a FILE.toml") from None
        if not 0 <= value < float("inf"):
            raise BadInput("--prices", f"{part!r}; accepted: dollars per GPU-hour from 0")
        found[_device(name.strip()).name] = value
    return OwnPrices(found)


def _device(name: str) -> Hardware:
    return load_device(name, "--prices")
