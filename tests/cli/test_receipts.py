"""`headway receipts`: every picosecond of a log is somebody's, or nobody's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.core.clock import VirtualClock
from headway.core.events import EventLog, Header
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities
from headway.engine.event_file import EventWriter
from headway.roofline.fixed import FixedCosts
from headway.scheduling.scheduler import Scheduler
from tests.simulated import HashedTokens, SimulatedExecutor

COSTS = FixedCosts(step=0.01, token=0.001, kv_token=1e-6)
LIMITS = Capabilities(
    block_size=8, blocks=(200,), windows=(None,), max_rows=4, max_tokens_per_step=64, max_model_len=400
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Five requests of two tenants, with a pause of a second; one is still running at the end."""
    path, clock = tmp_path / "events.jsonl", VirtualClock()
    header = Header(limits=LIMITS, policy="chunked", profile={"costs": {"step": 0.01, "token": 0.001}})
    with EventWriter(path, header) as writer:
        scheduler = Scheduler(LIMITS, key=b"k", log=EventLog(writer))
        executor = SimulatedExecutor(LIMITS, clock, COSTS, HashedTokens(1, 1000))

        def turns(most: int) -> None:
            for _ in range(most):
                plan = scheduler.plan(clock.now())
                if plan.empty:
                    return
                executor.submit(plan)
                scheduler.commit(executor.collect(plan.step), clock.now())

        for index in range(5):
            if index == 3:
                turns(1000)
                clock.advance_to(clock.now() + 10**12)
            tokens = [index * 100 + token for token in range(40)]
            answer = 20 if index < 4 else 300
            scheduler.add(
                Request(
                    f"r{index}", tokens, SamplingParams(seed=0), max_len=40 + answer, arrival=clock.now(),
                    tenant="ab"[index % 2],
                )
            )  # fmt: skip
        turns(100)
    return path


def told(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stopped:
        main(["receipts", *args, "--json"])
    assert not stopped.value.code
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", ["tenant", "request"])
def test_lines_and_idle_time_are_the_wall_time(log: Path, capsys: pytest.CaptureFixture[str], by: str) -> None:
    bill = told(capsys, str(log), "--by", by, "--price", "3.6")
    assert sum(line["seconds"] for line in bill["lines"]) + bill["idle"] == pytest.approx(bill["wall"], abs=1e-9)
    assert sum(line["dollars"] for line in bill["lines"]) + bill["idle_dollars"] == pytest.approx(bill["dollars"])
    assert bill["dollars"] == pytest.approx(bill["wall"] * 1e-3)
    assert bill["idle"] >= 1.0 and bill["open"] == 1
    assert sum(line["requests"] for line in bill["lines"]) == 5
    assert sum(line["prompt_tokens"] for line in bill["lines"]) == 200
    assert len(bill["lines"]) == (2 if by == "tenant" else 5)


def test_a_table_says_who_and_how_much(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["receipts", str(log), "--price", "2"])
    text = capsys.readouterr().out
    assert "idle 1 s of" in text and "1 choices had not ended" in text and "$" in text


def test_what_rotated_away_is_billed_to_nobody(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    cut = tmp_path / "midway.jsonl"
    cut.write_bytes(b"".join([lines[0], *lines[len(lines) // 3 :]]))
    bill = told(capsys, str(cut))
    assert sum(line["seconds"] for line in bill["lines"]) + bill["idle"] == pytest.approx(bill["wall"], abs=1e-9)
    assert bill["dollars"] is None


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["{log}", "--price", "-1"], "--price: -1.0; accepted: dollars per hour of the machine, from 0"),
        (["{log}", "--by", "day"], "--by: 'day'; accepted: tenant, request"),
        (["{log}.2"], "LOG: no such file"),
        (["{readme}"], "not an event file"),
        (["{profiled}"], "--model: the steps of this log were predicted by a profile"),
    ],
)
def test_a_bad_command_is_one_sentence(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], sentence: str
) -> None:
    readme, profiled = tmp_path / "README.md", tmp_path / "profiled.jsonl"
    readme.write_text("hello\n")
    first, *rest = log.read_text().splitlines(keepends=True)
    profile = {"name": "m", "created": "", "threads": 1, "memory": 1.0, "read_bandwidth": {"1": 1.0}, "rates": {}}
    profiled.write_text("".join([json.dumps(json.loads(first) | {"profile": profile}) + "\n", *rest]))
    with pytest.raises(SystemExit) as stopped:
        main(["receipts", *(arg.format(log=log, readme=readme, profiled=profiled) for arg in args)])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
