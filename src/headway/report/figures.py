"""Plots without a window or global state. matplotlib is an extra: where it is missing, one sentence says so."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import BadInput
from headway.report.files import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
COLOURS = ("#0b6b62", "#b4541a", "#5b4fc7", "#8a7a1c", "#a8326f", "#2b6cb0", "#5d626b")  # those of kit/tokens.css first
WAITS, PREFILL, DECODE, STALLS, LIMIT = "#c9c4b9", "#b4541a", "#0b6b62", "#8a7a1c", "#a8261b"


NEEDED = "plots need matplotlib; install it with: pip install matplotlib"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def check_plot(path: Path | None, option: str = "--plot") -> None:
    """Refuse now what `save_figure` would refuse after the work: no matplotlib, a wrong suffix, no such folder."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise BadInput(option, f"{path}; accepted: a name that ends in {' or '.join(SUFFIXES)}")
    if not can_plot():
        raise BadInput(option, NEEDED)
    check_writable(path, option)


def new_figure(width: float = 7.0, height: float = 4.2) -> tuple[Figure, Any]:
    """A figure with one pair of axes; inches. There must be matplotlib."""
    figure, (axes,) = new_figures(1, width, height)
    return figure, axes


def new_figures(count: int, width: float = 7.0, height: float = 4.2) -> tuple[Figure, Sequence[Any]]:
    """A figure with `count` pairs of axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    found = figure.subplots(1, count, squeeze=False)[0]
    for axes in found:
        axes.grid(True, alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_prop_cycle(color=COLOURS)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(found)


def save_figure(figure: Figure, path: Path, option: str = "--plot") -> None:
    """Write a plot; the suffix chooses PNG or SVG."""
    check_plot(path, option)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise BadInput(option, f"cannot write {path}: {error.strerror}") from None


def svg(figure: Figure) -> str:
    """The figure as an SVG element to put into a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight")
    content = text.getvalue()
    return content[content.index("<svg") :]
