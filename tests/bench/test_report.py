"""What is written down of a run."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from headway.bench.document import document, server_rows
from headway.bench.lengths import parse_sizes
from headway.bench.live import frame, sparkline
from headway.bench.predict import backing, predict
from headway.bench.selftest import client_report
from headway.bench.server import ServerSide, server_report
from headway.core.errors import BadInput
from headway.metrics.files import COLUMNS, load_records, save_records, to_csv, to_json
from headway.metrics.run import Run
from headway.metrics.summary import Targets, summarize
from headway.report.document import show, write_page
from headway.roofline.hardware import find_hardware
from headway.shape.catalogue import find_model
from tests.bench.streams import failed, record, run_of
from tests.report.pages import self_contained


@pytest.fixture
def run() -> Run:
    return run_of(record(), record(at_ms=500, cached=3), failed(at_ms=700))


@pytest.fixture
def summary(run: Run) -> dict[str, object]:
    found = {"url": "http://h", "api": "chat", "model": "<m>", "warnings": ["careful & <b>"], "workload": {"seed": 7}}
    return found | summarize(run, Targets(ttft_ms=300)) | {"client": client_report(None, run)}


def test_csv_has_a_row_per_request(run: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(run.records))))
    assert len(rows) == 3 and tuple(rows[0]) == COLUMNS
    assert float(rows[0]["ttft_ms"]) == pytest.approx(200)
    assert float(rows[1]["intended_s"]) == pytest.approx(0.5)
    assert rows[2]["failure"] == "http_error" and rows[2]["ttft_ms"] == ""


def test_json_is_json_and_refuses_what_is_not_finite(summary: dict[str, object]) -> None:
    assert json.loads(to_json(summary))["failures"] == {"http_error": 1}
    with pytest.raises(ValueError, match="finite"):
        to_json({"x": [float("nan")]})


def test_records_survive_the_disk(tmp_path: Path, run: Run) -> None:
    save_records(tmp_path / "r.json", run, "chat")
    back, api = load_records(tmp_path / "r.json")
    assert (back.records, api) == (run.records, "chat")


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(BadInput, match="not written by"):
        load_records(tmp_path / "r.json")
    with pytest.raises(BadInput, match="cannot read"):
        load_records(tmp_path / "none.json")


def page_of(summary: dict[str, object], run: Run, folder: Path) -> str:
    write_page(document(summary, run), folder / "page.html", "headway bench")
    return (folder / "page.html").read_text()


def shown(summary: dict[str, object], run: Run, capsys: pytest.CaptureFixture[str]) -> str:
    show(document(summary, run))
    return capsys.readouterr().out


def test_the_terminal_table_says_what_failed(
    run: Run, summary: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(summary, run, capsys)
    assert "time to first token" in text and "http_error: 1 (it failed)" in text and "careful" in text
    assert "seed: 7" in text


def test_the_page_opens_offline_and_escapes(run: Run, summary: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = page_of(summary, run, tmp_path)
    assert self_contained(text).tags.count("svg") == 4
    assert "<m>" not in text and "careful &amp; &lt;b&gt;" in text


def test_the_page_shows_the_prediction(run: Run, summary: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    machine = backing(find_model("llama-3.1-8b"), find_hardware("h100-sxm"))
    text = page_of(summary | {"prediction": predict(run, summary, machine)}, run, tmp_path)
    assert "Prediction" in text and "weights" in text and "h100-sxm" in text


def test_page_and_table_show_where_the_time_went_inside_our_server(
    run: Run, summary: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run.records[0].server_id = "r0"
    sides = {"r0": ServerSide(queue_ms=10, prefill_ms=180, decode_ms=3000, alone_ms=2900, beside_prompts_ms=60,
                              stalled_ms=40, requeued_ms=30, cached=5, recomputed=7, preemptions=1)}  # fmt: skip
    found = summary | {"server": {"events": server_report(run.records, sides)}}
    text, printed = page_of(found, run, tmp_path), shown(found, run, capsys)
    assert self_contained(text).tags.count("svg") == 5
    for word in ("queue", "prefill", "beside prompts", "stalled", "outside, in all", "computed again"):
        assert word in text and word in printed
    mean = {"metrics": {"mean_request_queue_seconds": 0.25, "preemptions_total": 3.0}}
    assert server_rows(mean) == [["queue, ms", "250.00", "", "", ""], ["preemptions", "3", "", "", ""]]


def test_the_page_of_a_run_without_answers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = run_of(failed())
    found = (
        {"url": "u", "api": "chat", "model": "m", "warnings": []}
        | summarize(run)
        | {"client": client_report(None, run)}
    )
    assert "http_error" in page_of(found, run, tmp_path)


def test_the_live_frame(run: Run) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(frame(run.records, 2, 10))
    text = console.export_text()
    assert "3 of 10" in text and "http_error" in text and "p50 200.0" in text


def test_sparkline() -> None:
    assert sparkline([1, 2, 4, 8]) == "▁▂▄█"
    assert sparkline([]) == "" == sparkline([0.0])


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0", "-5", "99999999999"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="token counts"):
        parse_sizes(text)
