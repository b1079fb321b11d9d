"""What verbs print where nobody says how wide it may be: a pipe, a file, a log of continuous integration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway.cli import main

WIDEST = 100
MODEL = "--model llama-3.1-8b --hardware h100-sxm"
LOAD = f"{MODEL} --input-tokens 2000 --output-tokens 200"
PRINTED = [
    "plan models",
    "plan hardware",
    f"plan step {MODEL} --batch 64 --context 4096",
    f"plan step {MODEL} --batch 64 --context 4096 --mode calibrated",
    f"plan prefill {MODEL} --input-tokens 8192",
    f"plan frontier {MODEL}",
    f"plan capacity {MODEL}",
    f"plan tp {MODEL}",
    f"plan cost {MODEL}",
    f"plan invoice {MODEL}",
    f"plan ratio {MODEL}",
    f"plan levers {MODEL}",
    f"plan explain {MODEL}",
    f"plan estimate {MODEL}",
    f"plan search {LOAD} --rate 10 --finalists 1",
    f"simulate {LOAD} --rate 10 --requests 50 --slo ttft=1s,tpot=30ms --policy chunked,prefill-first",
    "simulate spec",
    "models",
    "inspect --prompt hello",
    "cache explain {folder}/a.json {folder}/b.json",
    "quality --text {folder}/text.txt --weights int8",
]
ELSEWHERE = {
    "demo", "chat", "generate",  # print the model's own text
    "serve",  # test_the_printed_command_asks_the_server_something
    "route", "top", "lab", "bench",  # need a server, or are one
    "doctor", "probe", "calibrate", "receipts",  # of reports like those above, whose width tests/report holds
}  # fmt: skip


@pytest.mark.parametrize("command", PRINTED)
def test_no_line_is_wider_than_a_page(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in "ab":
        messages = [{"role": "system", "content": f"It is {name * 60}."}, {"role": "user", "content": "Why? " * 40}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"messages": messages}))
    (tmp_path / "text.txt").write_text("The capital of France is Paris, and that of Italy is Rome. " * 4)
    try:
        main(command.format(folder=tmp_path).split())
    except SystemExit as ended:
        assert not ended.code, capsys.readouterr().err
    shown = capsys.readouterr()
    lines = f"{shown.out}\n{shown.err}".splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= WIDEST, max(lines, key=len)


def test_every_verb_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs = set(re.findall(r"^  ([a-z]+) ", capsys.readouterr().out, re.MULTILINE))
    assert verbs == {command.split()[0] for command in PRINTED} | ELSEWHERE
