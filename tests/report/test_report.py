"""Pages, plots and files, whichever verb makes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headway.core.errors import BadInput
from headway.report import page as pages
from headway.report.document import Document, Drawing, Text, write_page
from headway.report.figures import check_plot, new_figure, save_figure, svg
from headway.report.files import check_writable, write, write_csv
from tests.report.pages import self_contained

EVIL = "<script>alert(1)</script>\"'&"


def test_a_page_runs_nothing_fetches_nothing_and_escapes_everything() -> None:
    text = pages.page(EVIL, [
        pages.heading(EVIL), pages.paragraph(EVIL, "bad"), pages.preformatted(EVIL), pages.details(EVIL, EVIL),
        pages.table([EVIL], [[EVIL]]), pages.listing(EVIL, [EVIL]), pages.bars([(EVIL, EVIL, 1)]),
    ])  # fmt: skip
    found = self_contained(text)
    assert found.tags.count("table") == 2
    assert text.count(pages.safe(EVIL)) == 13  # title and heading are one argument


def test_the_policy_forbids_everything_but_what_is_inside() -> None:
    assert pages.POLICY.split("; ")[0] == "default-src 'none'"
    assert "http" not in pages.POLICY and "script-src" not in pages.POLICY


def test_a_plot_is_part_of_the_page() -> None:
    pytest.importorskip("matplotlib")
    figure, axes = new_figure()
    axes.plot([1, 2], [3, 4])
    assert "svg" in self_contained(pages.page("plot", [svg(figure)])).tags


@pytest.mark.parametrize("name", ["x.pdf", "x", "x.jpeg"])
def test_a_plot_of_an_unknown_kind_is_refused_before_the_work(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--plot.*\.png or \.svg"):
        check_plot(tmp_path / name)


def test_a_plot_into_no_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(BadInput, match="--draw"):
        check_plot(tmp_path / "none" / "x.svg", "--draw")
    check_plot(None)
    check_plot(tmp_path / "x.svg")


def test_without_matplotlib_one_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plot is refused; a page answers all the same."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInput, match=r"--plot: plots need matplotlib; install it with: pip install matplotlib"):
        check_plot(tmp_path / "x.svg")
    write_page(Document("t", [Text("the answer"), Drawing(lambda axes: None)]), tmp_path / "page.html", "headway verb")
    page = (tmp_path / "page.html").read_text()
    assert "the answer" in page and "A plot is missing here: plots need matplotlib" in page


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_are_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_figure(new_figure()[0], tmp_path / f"x{suffix}")
    start = (tmp_path / f"x{suffix}").read_bytes()[:100]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


def test_files_that_cannot_be_written_name_the_option(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "x"):
        with pytest.raises(BadInput, match="--csv"):
            check_writable(path, "--csv")
        with pytest.raises(BadInput, match="--csv"):
            write(path, "--csv", "text")
    check_writable(None, "--csv")


def test_rows_are_written_flat(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv([{"a": 1, "b": {"x": 2, "y": 3}, "c": [4, 5]}], path)
    assert path.read_bytes() == b"a,b,c\r\n1,x=2; y=3,4; 5\r\n"
    with pytest.raises(BadInput, match="no rows"):
        write_csv([], path)
