"""What a verb has to say, put together once from a few kinds of parts, then shown in a terminal or as a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from os import environ
from pathlib import Path
from typing import Any

from headway.report import page as html
from headway.report.figures import NEEDED, can_plot, new_figure, save_figure, svg
from headway.report.files import write
from headway.report.prose import PROSE

STYLES = {"": "", "bad": "bold red", "warn": "yellow", "kind": "bold", "note": "dim"}
BAR = 40  # characters of the longest bar in a terminal
PIPED = 200  # columns of all but paragraphs where output is no terminal and COLUMNS says nothing
GAP = 2  # blanks between the columns of a table
SHADES = " ·░▒▓█"  # of a share in a terminal


@dataclass(frozen=True)
class Text:
    """A paragraph. `style`: a key of `STYLES`."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Listing:
    """Short lines under a heading."""

    heading: str
    lines: Sequence[str]
    style: str = ""


@dataclass(frozen=True)
class Grid:
    """A table: the first column and those named in `left` are words, which may wrap; all others are figures. Where a
    terminal has no room for a name beside its figures, they stand below it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    """(name, figure, length of its bar as a share of the whole)."""

    rows: Sequence[tuple[str, str, float]]


@dataclass(frozen=True)
class Heat:
    """Rows of shares from 0 to 1, darker for more; as many in each as `columns` has names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]


@dataclass(frozen=True)
class Commands:
    """Lines to copy: never wrapped."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Drawing:
    """A plot, drawn by `draw` onto matplotlib axes. A terminal has none, a page where nothing else of it shows the
    same (`on_page`)."""

    draw: Callable[[Any], None]
    on_page: bool = True


@dataclass(frozen=True)
class Folded:
    """A long text that pages fold away, and a terminal leaves out."""

    summary: str
    text: str


Part = Text | Listing | Grid | Bars | Heat | Commands | Drawing | Folded


@dataclass(frozen=True)
class Document:
    """`details`: what only the page has, after the rest."""

    title: str
    parts: Sequence[Part]
    details: Sequence[Part] = ()


def show(document: Document) -> None:
    """Print a document. Paragraphs wrap between words."""
    from rich.console import Console

    free = sys.stdout.isatty() or "COLUMNS" in environ
    console = Console(highlight=False, markup=False, width=None if free else PIPED)
    for part in (Text(document.title, "kind"), *document.parts):
        prose = None if free or not isinstance(part, Text | Listing) else PROSE
        for renderable in _renderables(part, console.width):
            console.print(renderable, width=prose, soft_wrap=isinstance(part, Commands))


def _renderables(part: Part, width: int) -> list[Any]:
    """What rich prints for a part on so many columns."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text as Line

    match part:
        case Text():
            return [Line(part.text, STYLES[part.style])]
        case Listing():
            lines = [Line(line, STYLES[part.style]) for line in part.lines]
            indented = [Padding(line, (0, 0, 0, 2), expand=False) for line in lines]
            return [Line(f"{part.heading}:", STYLES[part.style]), *indented]
        case Grid():
            return ["", *([Line(part.title, "bold")] if part.title else []), _stacked(part, width) or _table(part), ""]
        case Bars():
            table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
            table.add_column()
            table.add_column(justify="right")
            for name, figure, share in part.rows:
                table.add_row(name, figure, "#" * min(BAR, round(BAR * share)))
            return [table]
        case Heat():
            widest = max((len(name) for name, _ in part.rows), default=0)
            shaded = [f"{name:<{widest}}  {''.join(map(_shade, shares))}" for name, shares in part.rows]
            return ["", Line(part.title, "bold"), *map(Line, shaded), ""]
        case Commands():
            return ["", *map(Line, part.lines)]
        case Drawing() | Folded():
            return []


def _stacked(grid: Grid, width: int) -> str:
    """The figures of each row below its name; "" where a name has room beside them, or they have none themselves."""
    from rich.cells import cell_len

    lines = [list(map(str, line)) for line in (grid.head, *grid.rows)]
    widths = [max(map(cell_len, column)) for column in zip(*(line[1:] for line in lines), strict=True)]
    figures = sum(GAP + cells for cells in widths)
    name = max(cell_len(word) for line in lines for word in line[0].split() or [""])
    if name + figures <= width or figures > width:
        return ""
    left = [name in grid.left for name in grid.head[1:]]
    shown = []
    for first, *rest in lines:
        blanks = [" " * (cells - cell_len(text)) for cells, text in zip(widths, rest, strict=True)]
        padded = [
            text + blank if words else blank + text for text, blank, words in zip(rest, blanks, left, strict=True)
        ]
        shown += [first, "".join(" " * GAP + text for text in padded).rstrip()]
    return "\n".join([*shown[:2], "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * figures, *shown[2:]])


def _shade(share: float) -> str:
    """A share as a character: the square root, so that small ones show."""
    return SHADES[min(len(SHADES) - 1, int(len(SHADES) * max(0.0, share) ** 0.5))]


def _table(grid: Grid) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    for index, name in enumerate(grid.head):
        words = index == 0 or name in grid.left
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in grid.rows:
        table.add_row(*row)
    return table


def write_page(document: Document, path: Path, command: str) -> None:
    """Write a document as one page that opens offline, with the command that made it and the date. Where matplotlib is
    not installed it has a sentence in place of its plots.

    Raises:
        BadInput: the file cannot be written.
    """
    made = html.paragraph(f"Made on {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} with:", "note")
    parts = [_element(part) for part in (*document.parts, *document.details)]
    write(path, "--html", html.page(document.title, [made, html.preformatted(command), *parts]))


def _element(part: Part) -> str:
    match part:
        case Text():
            return html.paragraph(part.text, part.style)
        case Listing():
            return html.listing(part.heading, part.lines, part.style)
        case Grid():
            title = html.heading(part.title, 3) if part.title else ""
            return title + html.table(part.head, part.rows, part.left)
        case Bars():
            return html.bars(part.rows)
        case Heat():
            return html.heading(part.title, 3) + html.heat(part.columns, part.rows)
        case Commands():
            return html.preformatted("\n".join(part.lines))
        case Folded():
            return html.details(part.summary, part.text)
        case Drawing():
            if not part.on_page:
                return ""
            if not can_plot():
                return html.paragraph(f"A plot is missing here: {NEEDED}", "note")
            figure, axes = new_figure()
            part.draw(axes)
            return svg(figure)


def write_plot(document: Document, path: Path) -> None:
    """Write the document's first plot."""
    figure, axes = new_figure()
    next(part for part in (*document.parts, *document.details) if isinstance(part, Drawing)).draw(axes)
    save_figure(figure, path)
