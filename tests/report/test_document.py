"""A document says the same in a terminal and on a page; each leaves out what it cannot show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.report.document import (
    Bars,
    Commands,
    Document,
    Drawing,
    Folded,
    Grid,
    Listing,
    Text,
    show,
    write_page,
    write_plot,
)
from headway.report.units import metric, parameters, seconds
from tests.report.pages import self_contained

LONG = "serve --flag " + "word " * 30
DOCUMENT = Document(
    "A <title>",
    [
        Text("a paragraph", "warn"), Listing("assumed", ["one thing", "another"]),
        Grid(["name", "figure", "note"], [["row", "1.5", "words that may wrap"]], "A table", left=("note",)),
        Bars([("kv", "10 ms", 0.75), ("weights", "2 ms", 0.15)]), Commands([LONG]),
    ],
    [Folded("All numbers", "folded away"), Text("only on the page")],
)  # fmt: skip


def page_of(document: Document, folder: Path) -> str:
    write_page(document, folder / "page.html", "headway verb --option 1")
    return (folder / "page.html").read_text()


def test_both_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show(DOCUMENT)
    printed, page = capsys.readouterr().out, page_of(DOCUMENT, tmp_path)
    self_contained(page)
    for word in ("a paragraph", "assumed", "another", "A table", "words that may wrap", "10 ms", LONG.strip()):
        assert word in printed and word in page
    assert "A <title>" in printed and "A &lt;title&gt;" in page
    assert "headway verb --option 1" in page and 'style="width:75.0%"' in page
    assert "folded away" in page and "folded away" not in printed and "only on the page" not in printed


def test_narrow_terminals_lose_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    show(Document("t", [Grid(["name", "figure"], [["abcdefghijklmnopqrstuvwxyz", "123456789012"]]), Commands([LONG])]))
    printed = capsys.readouterr().out
    letters = "".join(line.split()[0] for line in printed.splitlines() if line.strip())
    assert "abcdefghijklmnopqrstuvwxyz" in letters and LONG.strip() in printed
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed


def test_a_long_name_stands_above_its_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id is to be copied: it is not broken while there is another way."""
    monkeypatch.setenv("COLUMNS", "30")
    table = Grid(["id", "first", "second"], [["chatcmpl-0123456789abcdef", "1.5 ms", "[2]"], ["b", "0", "10 s"]])
    show(Document("t", [table]))
    line = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * 16
    assert capsys.readouterr().out.split("\n")[2:9] == [
        "id", "   first  second", line, "chatcmpl-0123456789abcdef", "  1.5 ms     [2]", "b", "       0    10 s",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "60")
    show(Document("t", [table]))
    assert "chatcmpl-0123456789abcdef  1.5 ms     [2]" in capsys.readouterr().out


def test_paragraphs_wrap_between_words_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(Document("t", [Text(LONG), Listing("why", [LONG]), Commands([LONG])]))
    *lines, command = capsys.readouterr().out.strip().splitlines()
    assert max(map(len, lines)) <= 100 and command.strip() == LONG.strip()
    assert " ".join(" ".join(lines).split()) == f"t {LONG}why: {LONG}".strip()


def test_plots_are_on_pages_where_nothing_else_shows_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def draw(axes: Any) -> None:
        axes.plot([1, 2], [3, 4])

    assert "svg" in self_contained(page_of(Document("t", [Drawing(draw)]), tmp_path)).tags
    hidden = Document("t", [Drawing(draw, on_page=False)])
    assert "svg" not in self_contained(page_of(hidden, tmp_path)).tags
    write_plot(hidden, tmp_path / "plot.svg")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (seconds(0.0151), "15.1 ms"), (seconds(0), "0"), (seconds(None), "-"), (metric(3.35e12, "B/s"), "3.35 TB/s"),
        (metric(989e12, "FLOP/s"), "989 TFLOP/s"), (parameters(70.6e9), "70.6B"), (parameters(1.03e12), "1.03T"),
        (parameters(135e6), "135M"),
    ],
)  # fmt: skip
def test_figures_read_well(shown: str, text: str) -> None:
    assert shown == text
