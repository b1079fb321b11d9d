"""The command line as a user meets it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cli import VERBS, main
from headway.cli.batch import open_batch
from headway.cli.terminal import stderr
from headway.engine import profile
from headway.measure import formats, synthetic
from headway.report.progress import PlainProgress
from tests.serve.conftest import write_tiny_checkpoint


def headway(*args: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headway", *args], capture_output=True, text=True, input=typed)


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    code = "import sys; from headway.cli import usage; print(usage()); print([m for m in HEAVY if m in sys.modules])"
    code = code.replace("HEAVY", "('numpy', 'typer', 'msgspec')")
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert all(verb in shown for verb in VERBS)
    assert shown.endswith("[]\n")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_whole_in_80_columns(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = headway(verb, "-h")
    assert shown.returncode == 0 and f"usage: headway {verb}" in shown.stdout.lower(), shown.stderr
    assert "…" not in shown.stdout and "--help" in shown.stdout


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["bogus"], "'bogus' is not a verb; choose from demo"),
        (["generate", "--max-tokens", "few"], "--max-tokens: 'few'; accepted: a whole number"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "--max-tokens: 0 is not"),
        (["bench", "--rte", "1"], "--rte: no such option; did you mean --rate?"),
        (["generate"], "--prompt: give either --prompt TEXT or --input FILE"),
        (["generate", "--prompt", ""], "--prompt: is empty; give a text to continue"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature: -1.0 is not a number from 0"),
        (["generate", "no/such/model", "--prompt", "x"], "no/such/model"),
        (["generate", "--prompt", "x", "--kv-cache-gib", "100000"], "--kv-cache-gib: 100000 does not fit"),
        (
            ["generate", "--prompt", "x", "--kv-cache-gib", "0.1", "--max-model-len", "8192"],
            "--max-model-len: 8192 tokens",
        ),
        (["generate", "--prompt", "x", "--weights", "int3"], "--weights: 'int3' is not one of stored, int8, int4"),
        (
            ["generate", "--prompt", "x", "--weights", "int4", "--group", "48"],
            "--group: 48 is not one of 16, 32, 64, 128",
        ),
        (["generate", "--prompt", "x", "--group", "64"], "--group: 64 needs --weights int8 or int4"),
        (["generate", "--prompt", "x", "--weights", "int4", "--backend", "reference"], "needs the native backend"),
        (["serve", "--step-ms", "-1"], "--step-ms: -1.0 is not a number above 0"),
        (["chat", "--backend", "cuda"], "--backend: 'cuda' is not one of auto, native, reference"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(args: list[str], sentence: str) -> None:
    shown = headway(*args)
    assert shown.returncode == 2
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    time = 0.0
    report = PlainProgress(stderr, 1e6, now=lambda: time)
    for second in range(13):
        time = float(second)
        report("downloading [x]", second * 1_000_000, None)
    report("unpacking", 0, 3_000_000)
    report("unpacking", 1_000_000, 3_000_000)
    report("unpacking", 3_000_000, 3_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "downloading [x]: 0.0 MB",
        "downloading [x]: 5.0 MB",
        "downloading [x]: 10.0 MB",
        "unpacking: 0.0 MB of 3.0 MB",
        "unpacking: 3.0 MB of 3.0 MB",
    ]


def test_progress_says_how_much_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    time = 0.0
    report = PlainProgress(stderr, now=lambda: time)
    report("loading", 0, None)
    for second in range(11):
        time = float(second)
        report("steps", 2 * second, 1000 if second < 10 else 20)
    assert capsys.readouterr().err.splitlines() == [
        "loading",
        "steps: 0 of 1000",
        "steps: 10 of 1000, about 8 min left",
        "steps: 20 of 20",
    ]


def test_demo_streams_an_answer_and_its_cost() -> None:
    shown = headway("demo", "--max-tokens", "12")
    assert shown.returncode == 0
    assert "Paris" in shown.stdout
    assert all(word in shown.stderr for word in ("TTFT", "TPOT", "tokens/s", "KV cache"))
    assert max(map(len, shown.stderr.splitlines())) <= 100


def test_chat_keeps_the_history_in_the_cache_until_it_is_reset() -> None:
    typed = "Tell me about the sea.\nMore.\n/reset\nMore.\n/quit\n"
    shown = headway("chat", "--stats", "--temperature", "0", "--max-tokens", "12", typed=typed)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) >= 3
    (first, _), (second, cached), (third, _) = re.findall(r"(\d+) prompt tokens, (\d+) from the cache", shown.stderr)
    assert int(third) < int(first) < int(second)
    assert int(cached) >= 32


def test_generate_from_a_file_resumes_where_it_stopped(tmp_path: Path) -> None:
    given, made = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    jobs = [
        {"id": "a", "prompt": "The capital of France is"},
        {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        {"id": "c", "prompt": "x" * 100_000},
    ]
    given.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    made.write_text(json.dumps({"id": "a", "text": "kept"}) + "\n" + '{"id": "b", "te')  # killed while writing b
    shown = headway("generate", "--input", str(given), "--output", str(made), "--max-tokens", "3")
    assert shown.returncode == 1, shown.stderr
    assert "prompts: 1 of 3" in shown.stderr and "1 of 3 prompts failed" in shown.stderr
    results = {line["id"]: line for line in map(json.loads, made.read_text().splitlines())}
    assert results["a"] == {"id": "a", "text": "kept"}
    assert len(results["b"]["tokens"]) == 2
    assert "leave no room" in results["c"]["error"]
    kept = [line for line in made.read_text().splitlines() if "error" not in line]
    jobs[2]["prompt"] = "One, two,"  # what failed is tried again, and only that
    given.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    shown = headway("generate", "--input", str(given), "--output", str(made), "--max-tokens", "3")
    assert shown.returncode == 0, shown.stderr
    assert len(kept) == 2 and made.read_text().splitlines()[:2] == kept
    again = [json.loads(line) for line in made.read_text().splitlines()[2:]]
    assert [(line["id"], len(line["tokens"])) for line in again] == [("c", 3)]


@pytest.mark.parametrize(
    ("line", "done"),
    [
        ({"id": 1, "text": "x", "finish_reason": "stop"}, True),
        ({"id": 1, "text": "x", "finish_reason": "length", "error": None}, True),
        ({"id": 1, "error": "prompt: too long"}, False),
        ({"id": 1, "text": "x", "finish_reason": "error"}, False),
        ({"id": 1, "text": "x", "finish_reason": "stop", "choices": [{"finish_reason": "abort"}]}, False),
    ],
)
def test_a_line_counts_as_done_when_it_holds_a_whole_answer(tmp_path: Path, line: dict[str, Any], done: bool) -> None:
    given, made = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"id": 1, "prompt": "x"}\n')
    other = {**line, "id": "of another input"}
    text = "".join(json.dumps(one) + "\n" for one in (line, other))
    made.write_text(text)
    made.chmod(0o640)
    todo = open_batch(given, made, {}).todo
    assert [job.id for job in todo] == ([] if done else [1])
    assert made.read_text() == (text if done else json.dumps(other) + "\n")
    assert made.stat().st_mode & 0o777 == 0o640 and sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "--input line 1: not a JSON object"),
        ('{"promt": "x"}', "--input line 1: needs"),
        ('{"prompt": "x", "temprature": 1}', "unknown fields: temprature"),
        ('{"prompt": "x", "top_p": 7}', "--input line 1: top_p: 7.0 is not a number"),
        ('{"prompt": 5}', '"prompt" is a text or a list'),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(tmp_path: Path, line: str, sentence: str) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text(line + "\n")
    shown = headway("generate", "--input", str(given), "--output", str(tmp_path / "out.jsonl"))
    assert shown.returncode == 2
    assert sentence in shown.stderr


def test_json_has_the_ids_and_the_times() -> None:
    shown = headway(
        "generate", "--prompt", "The capital of France is", "--max-tokens", "2", "--temperature=0", "--json"
    )
    answer = json.loads(shown.stdout)
    assert answer["text"].startswith(" Paris") and len(answer["tokens"]) == 2
    assert answer["ttft_ms"] > 0 and answer["prompt_tokens"] == 5


def test_doctor_says_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that was never probed; the models that formats are timed on are small here."""
    small = replace(
        synthetic.NARROW, layers=2, heads=4, kv_heads=2, hidden_size=256, intermediate_size=512, vocab_size=512
    )
    write_tiny_checkpoint(tmp_path)
    monkeypatch.setattr(synthetic, "SIZES", (("narrow", small), ("wide", replace(small, layers=1, hidden_size=512))))
    monkeypatch.setattr(formats, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(profile, "profile_path", lambda: tmp_path / "profile.json")
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(tmp_path), "--json", "--quick", "--context", "64"])
    assert not end.value.code
    shown = capsys.readouterr()
    assert "this takes about half a minute" in shown.err and "running real steps of" in shown.err
    report = json.loads(shown.out)
    assert report["threads"] >= 1 and max(report["read_bandwidth"].values()) > 1e8
    kept = (tmp_path / "profile.json").exists()  # or the machine was too busy
    assert report["kept"].startswith(str(tmp_path / "profile.json") if kept else "nothing: ")
    assert [one["batch"] for one in report["decode"]] == [1, 8, 32]
    assert report["decode"][0]["tokens_per_second"] <= report["decode"][2]["tokens_per_second"]
