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
from headway.report.figures import new_figure, save_figure, svg
from headway.report.files import write

STYLES = {"": "", "bad": "bold red", "warn": "yellow", "kind": "bold", "note": "dim"}
BAR = 40  # characters of the longest bar in a terminal
PIPED = 200  # columns where output is no terminal and COLUMNS says nothing


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
    """A table: the first column and those named in `left` are words, which may wrap; all others are figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    """(name, figure, length of its bar as a share of the whole)."""

    rows: Sequence[tuple[str, str, float]]


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


Part = Text | Listing | Grid | Bars | Commands | Drawing | Folded


@dataclass(frozen=True)
class Document:
    """`details`: what only the page has, after the rest."""

    title: str
    parts: Sequence[Part]
    details: Sequence[Part] = ()


def show(document: Document) -> None:
    """Print a document. In a terminal paragraphs wrap between words; piped, they stay lines."""
    from rich.console import Console

    piped = not sys.stdout.isatty()
    console = Console(highlight=False, width=PIPED if piped and "COLUMNS" not in environ else None)
    for part in (Text(document.title, "kind"), *document.parts):
        for renderable in _renderables(part, piped):
            console.print(
                renderable, soft_wrap=(piped and isinstance(part, Text | Listing)) or isinstance(part, Commands)
            )


def _renderables(part: Part, piped: bool) -> list[Any]:
    """What rich prints for a part."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text as Line

    match part:
        case Text():
            return [Line(part.text, STYLES[part.style])]
        case Listing():
            lines = [Line(line if not piped else f"  {line}", STYLES[part.style]) for line in part.lines]
            indented = lines if piped else [Padding(line, (0, 0, 0, 2), expand=False) for line in lines]
            return [Line(f"{part.heading}:", STYLES[part.style]), *indented]
        case Grid():
            return ["", *([Line(part.title, "bold")] if part.title else []), _table(part), ""]
        case Bars():
            table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
            table.add_column()
            table.add_column(justify="right")
            for name, figure, share in part.rows:
                table.add_row(name, figure, "#" * min(BAR, round(BAR * share)))
            return [table]
        case Commands():
            return ["", *map(Line, part.lines)]
        case Drawing() | Folded():
            return []


def _table(grid: Grid) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, name in enumerate(grid.head):
        words = index == 0 or name in grid.left
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in grid.rows:
        table.add_row(*row)
    return table


def write_page(document: Document, path: Path, command: str) -> None:
    """Write a document as one page that opens offline, with the command that made it and the date.

    Raises:
        BadInput: it has plots and matplotlib is not installed, or the file cannot be written.
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
        case Commands():
            return html.preformatted("\n".join(part.lines))
        case Folded():
            return html.details(part.summary, part.text)
        case Drawing():
            if not part.on_page:
                return ""
            figure, axes = new_figure("--html")
            part.draw(axes)
            return svg(figure)


def write_plot(document: Document, path: Path) -> None:
    """Write the document's first plot."""
    figure, axes = new_figure()
    next(part for part in (*document.parts, *document.details) if isinstance(part, Drawing)).draw(axes)
    save_figure(figure, path)
