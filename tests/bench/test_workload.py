"""Prompts of a wanted length, traces with their prefixes, data sets."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.bench.client import BenchClient, Endpoint
from headway.bench.dataset import read_dataset
from headway.bench.options import Workload
from headway.bench.workload import Measure, Prompts, check_prompts, measure_prompts
from headway.core.errors import BadInput
from headway.traffic.traces import TraceRow, read_trace, scaled
from tests.bench.mock import MockServer, Script
from tests.bench.streams import record

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""


def mooncake(path: Path, rows: list[tuple[int, int, list[int]]]) -> Path:
    lines = [json.dumps({"timestamp": t, "input_length": n, "output_length": 5, "hash_ids": ids}) for t, n, ids in rows]
    path.write_text("\n".join(lines))
    return path


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text(AZURE)
    rows = read_trace(path)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109), (879, 55)]
    assert [row.at for row in rows] == pytest.approx([0, 4.314579, 4.541877], abs=1e-5)
    assert len(read_trace(path, limit=2)) == 2


def test_mooncake_ticks_are_spread_and_nothing_else_moves(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "m.jsonl", [(3000 * (n // 50), 600, [n]) for n in range(500)])
    rows = read_trace(path)
    per_tick = [sum(tick * 3 <= row.at + 0.2 < tick * 3 + 3 for row in rows) for tick in range(10)]
    assert all(40 <= count <= 60 for count in per_tick)
    assert len({row.at for row in rows}) == 500
    gaps = [late.at - early.at for early, late in itertools.pairwise(rows)]
    assert max(gaps) < 1, "no burst every three seconds is left"
    assert rows == read_trace(path)


def test_a_trace_with_a_real_clock_is_left_alone(tmp_path: Path) -> None:
    rows = read_trace(mooncake(tmp_path / "m.jsonl", [(0, 600, [1]), (1234, 600, [2]), (1301, 600, [3])]))
    assert [row.at for row in rows] == pytest.approx([0, 1.234, 1.301])


def test_scaling() -> None:
    row = scaled([TraceRow(10, 1024, 100, (1, 2))], speed=5, lengths=0.25)[0]
    assert (row.at, row.input_tokens, row.output_tokens, row.block_tokens) == (2, 256, 25, 128)
    assert scaled([TraceRow(1, 2, 2)], 1, 0.01)[0].output_tokens == 1
    for speed, lengths in ((1e308, 1), (1e-308, 1), (1, 1e308), (math.nan, 1)):
        with pytest.raises(BadInput, match="--speed" if lengths == 1 else "--length-scale"):
            scaled([TraceRow(1, 2, 2)], speed, lengths)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "a,b\n1,2\n", "columns"),
        ("a.csv", AZURE + "yesterday,1,2\n", "line 5"),
        ("a.csv", AZURE.splitlines()[0], "no request"),
        ("a.jsonl", '{"timestamp": 0}', "line 1"),
        ("a.jsonl", "", "no request"),
        ("a.csv", AZURE + "x" * 200_000 + ",1,1\n", "line 5: field larger than"),
        (
            "a.jsonl",
            '{"timestamp": 1e308, "input_length": 1, "output_length": 1}',
            "a time of more than 1e\\+09 seconds",
        ),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=problem):
        read_trace(tmp_path / name)
    with pytest.raises(BadInput, match="cannot read"):
        read_trace(tmp_path / f"no-{name}")


def test_what_is_no_trace_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(BadInput, match="not a regular file"):
        read_trace(tmp_path / "a.csv")
    with pytest.raises(BadInput, match="neither"):
        read_trace(Path("/dev/zero"))


@given(st.integers(1, 3000), st.floats(0, 60), st.floats(0.8, 2.0))
def test_prompts_have_the_length_the_measure_says(tokens: int, overhead: float, per_word: float) -> None:
    measure = Measure(overhead, per_word, known=True)
    count = len(Prompts(measure, 0).unique(0, tokens).split())
    assert count == 1 or abs(overhead + per_word * count - tokens) <= per_word


def test_prompts_share_exactly_the_prefix_that_was_asked_for() -> None:
    prompts = Prompts(Measure(), 0)
    first, second = (prompts.after_prefix(index, 100, 60).split() for index in (0, 1))
    assert len(first) == len(second) == 100
    assert first[:60] == second[:60]
    assert first[60:] != second[60:]
    assert prompts.unique(0, 50).split()[:3] != prompts.unique(1, 50).split()[:3]
    assert Prompts(Measure(), 0).unique(0, 50) == prompts.unique(0, 50)


def test_trace_prompts_share_as_many_tokens_as_their_blocks() -> None:
    prompts = Prompts(Measure(overhead=10, per_word=1), 0)
    rows = [TraceRow(0, 1290, 1, (7, 8, 9)), TraceRow(0, 1500, 1, (7, 8, 11)), TraceRow(0, 1500, 1, (12, 8, 9))]
    texts = [prompts.of_trace(index, row).split() for index, row in enumerate(rows)]
    assert [len(text) for text in texts] == [1280, 1490, 1490]
    assert texts[0][:1024] == texts[1][:1024]
    assert texts[0][1024:] != texts[1][1024:1280]
    assert texts[2][512:1024] == texts[0][512:1024], "equal blocks hold equal text"
    assert texts[2][:512] != texts[0][:512]


@pytest.mark.parametrize("fault", ["", "no_usage"])
def test_the_measure_is_read_off_the_endpoints_usage_streamed_or_not(fault: str) -> None:
    async def work() -> tuple[Measure, list[object]]:
        async with BenchClient(Endpoint.parse(server.url, "chat", "mock")) as client:
            measure, records = await measure_prompts(client, 0)
            return measure, list(records)

    with MockServer(Script(chunks=1, fault=fault)) as server:
        measure, records = asyncio.run(work())
    assert measure == Measure(overhead=7.0, per_word=1.0, known=True)
    assert len(records) == 3


def test_prompt_lengths_are_held_against_usage() -> None:
    exact, short, wild = record(prompt=100), record(prompt=96), record(prompt=100)
    wild.prompt_tokens = 50
    short.prompt_wanted = 100
    known = Measure(known=True)
    assert check_prompts([exact, short], known)["verified"] is True
    found = check_prompts([exact, wild], known)
    assert (found["verified"], found["off"]) == (False, 1) and found["reason"]
    untold = record(prompt=100)
    untold.prompt_tokens = None
    assert "no prompt_tokens" in str(check_prompts([untold], known)["reason"])
    assert "do not grow" in str(check_prompts([wild], Measure())["reason"])


def test_datasets(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    lines = [
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": "b"}], "max_tokens": 9},
        {"prompt": "c", "x": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    items = read_dataset(path, 5, output_tokens=64)
    talk = [{"role": "user", "content": "b"}]
    expected = [("a", 64), (talk, 9), ("c", 64)]
    assert [(item.prompt, item.max_tokens) for item in items] == expected
    again = Workload(requests=5, dataset=path).items(Measure())
    assert [(item.prompt, item.max_tokens) for item in again] == [*expected, *expected[:2]]


SHAREGPT = {"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("d.jsonl", '{"prompt": "a\u2028b"}\n{"prompt": "c\x85"}\r\n', ["a\u2028b", "c\x85"]),
        ("d.jsonl", "\ufeff" + json.dumps(SHAREGPT), [[{"role": "user", "content": "Hi"}]]),
        ("d.json", json.dumps([SHAREGPT, {"prompt": "b"}], indent=1), [[{"role": "user", "content": "Hi"}], "b"]),
        ("d.jsonl", '{"conversations": [{"role": "user", "content": "Hi"}]}', [[{"role": "user", "content": "Hi"}]]),
        ("d.csv", 'id,prompt,max_tokens\n1,"a, b\nc",\n2,d,7\n', ["a, b\nc", "d"]),
        ("d.txt", "one\n\ntwo\u2028half\r\n", ["one", "two\u2028half"]),
    ],
)
def test_common_formats_are_taken(tmp_path: Path, name: str, text: str, prompts: list[object]) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert [item.prompt for item in read_dataset(tmp_path / name, 9, 64)] == prompts


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("d.jsonl", b'{"text_input": "a"}', 'line 1 holds text_input; a request has "prompt"'),
        ("d.csv", b"question\nwhy\n", 'row 1 holds question; a request has "prompt"'),
        ("d.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', "line 2 is not JSON"),
        ("d.jsonl", b'{"prompt": "a", "messages": []}', "and one of them"),
        ("d.jsonl", b'{"conversations": [{"from": "tool", "value": "a"}]}', "a turn needs a speaker"),
        ("d.jsonl", b'{"conversations": [{"from": "gpt", "value": "a"}]}', "no turn of the conversation is the user's"),
        ("d.jsonl", b'{"prompt": "a", "max_tokens": -1}', "max_tokens -1 is not"),
        ("d.jsonl", b"\x1f\x8b\x08", "it is compressed: unpack it first"),
        ("d.jsonl", "{}".encode("utf-16"), "it is not UTF-8"),
        (".", None, "Is a directory"),
    ],
)
def test_an_unsuitable_file_is_told_what_is_accepted(
    tmp_path: Path, name: str, data: bytes | None, sentence: str
) -> None:
    """Reported t2-053."""
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput) as error:
        read_dataset(tmp_path / name, 9, 64)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"), [("", "no request"), ("{}", "line 1"), ('{"prompt": 3}', "line 1"), ("[", "line 1")]
)
def test_bad_datasets_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(BadInput, match=problem):
        read_dataset(tmp_path / "d.jsonl", 5, 64)


def test_seeds_do_not_touch_the_global_generator() -> None:
    random.seed(1)
    before = random.getstate()
    Prompts(Measure(), 3).unique(0, 100)
    assert random.getstate() == before
