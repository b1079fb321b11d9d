"""How service-level objectives are written, wherever one is asked for: `ttft=1s,tpot=50ms,e2e=20s`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.core.errors import BadInput

NAMES = ("ttft", "tpot", "e2e")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TARGET = re.compile(r"(\w+)\s*=\s*([0-9.]+(?:e-?[0-9]+)?)\s*(\w*)")


def parse_slo(text: str, names: Sequence[str] = NAMES, field: str = "--slo") -> dict[str, float]:
    """Seconds by name; every time has a unit. "" = no target.

    Args:
        names: targets that are accepted here.

    Raises:
        BadInput: `field` has something else, a name twice, or a time that is not above 0.
    """
    targets: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _TARGET.fullmatch(part)
        unit = UNITS.get(match[3]) if match else None
        if match is None or unit is None or match[1] not in names:
            examples = ", ".join(f"{name}={time}" for name, time in zip(names, ("1s", "50ms", "20s"), strict=False))
            raise BadInput(field, f"{part!r}; accepted: {examples}, with a unit ({', '.join(UNITS)})")
        try:
            seconds = float(match[2]) * unit
        except ValueError:
            seconds = 0.0
        if match[1] in targets or not 0 < seconds < float("inf"):
            why = "comes twice" if match[1] in targets else "is not a time above 0"
            raise BadInput(field, f"{part!r}: {why}")
        targets[match[1]] = seconds
    return targets
