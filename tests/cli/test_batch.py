"""`headway generate --input`: lines of other shapes, what it says at its end, and lines that stay lines."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway import LLM
from headway.cli.batch import BatchLine, encode, open_batch, run
from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.core.request import Finish, SamplingParams
from headway.engine.results import Choice, Completion
from tests.serve.conftest import write_tiny_checkpoint

HEADWAY = [sys.executable, "-m", "headway"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
GIVEN = {"temperature": 0.0}


def opened(tmp_path: Path, line: dict[str, Any]) -> BatchLine:
    given = tmp_path / "in.jsonl"
    given.write_text(json.dumps(line) + "\n")
    (one,) = open_batch(given, tmp_path / "out.jsonl", GIVEN).todo
    return one


@pytest.mark.parametrize(
    ("url", "body", "prompt", "given"),
    [
        (CHAT, {"model": "any", "messages": HI}, HI, {}),
        (CHAT, {"messages": HI, "max_completion_tokens": 7, "top_p": 0.5}, HI, {"max_tokens": 7, "top_p": 0.5}),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 3, "user": "me"}, HI, {"logprobs": 3}),
        (
            CHAT,
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, *HI]},
            [{"role": "system", "content": "a"}, *HI],
            {},
        ),
        (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, HI, {"grammar": Grammar.json_object()}),
        (CHAT, {"messages": HI, "guided_regex": "a+"}, HI, {"grammar": Grammar.regex("a+")}),
        (CHAT, {"messages": HI, "thinking_token_budget": 9}, HI, {"thinking_budget": 9}),
        (TEXT, {"prompt": "One,", "stop": "four", "temperature": 1}, "One,", {"stop": ("four",), "temperature": 1.0}),
        (TEXT, {"prompt": [1, 2], "echo": True, "logprobs": 0}, [1, 2], {"logprobs": 0, "prompt_logprobs": 0}),
    ],
)
def test_lines_of_openais_batches_are_taken(tmp_path: Path, url: str, body: Any, prompt: Any, given: Any) -> None:
    line = opened(tmp_path, {"custom_id": "a", "method": "POST", "url": url, "body": body})
    assert (line.id, line.prompt) == ("a", prompt)
    assert SamplingParams(**line.given) == SamplingParams(**{"temperature": 0.0, **given})


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"url": "/v1/embeddings", "body": {}}, 'needs "url" (one of /v1/chat/completions, /v1/completions)'),
        ({"url": CHAT}, '"body"'),
        ({"url": CHAT, "method": "GET", "body": {"messages": HI}}, "POST"),
        ({"url": CHAT, "body": {"messages": HI, "stream": True}}, "stream: answers of a batch come whole"),
        ({"url": CHAT, "body": {"messages": HI, "tools": [{}]}}, "tools: not supported"),
        ({"url": CHAT, "body": {"messages": HI, "max_tokns": 3}}, "max_tokns"),
        ({"url": TEXT, "body": {"prompt": ["a", "b"]}}, "prompt: 2 prompts; a line has one"),
    ],
)
def test_what_such_a_line_may_not_hold_is_named(tmp_path: Path, line: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as error:
        opened(tmp_path, {"custom_id": "a", **line})
    assert str(error.value).startswith("--input line 1: ") and sentence in str(error.value)


def test_input_may_be_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n\n{"prompt": "b"}')))
    batch = open_batch(Path("-"), tmp_path / "out.jsonl", GIVEN)
    assert [(line.id, line.prompt) for line in batch.todo] == [(1, "a"), (3, "b")]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"])
def test_a_line_is_one_line_for_every_splitter(tmp_path: Path, separator: str) -> None:
    """Reported t2-012."""
    choice = Choice(0, [1], f"a{separator}b", Finish("stop"))
    line = encode("x", Completion("x", 1, 0, [choice]))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["text"] == f"a{separator}b"
    made = tmp_path / "out.jsonl"
    made.write_bytes(line + b"\n")
    given = tmp_path / "in.jsonl"
    given.write_bytes(json.dumps({"id": "x", "prompt": f"a{separator}b"}, ensure_ascii=False).encode() + b"\n")
    assert open_batch(given, made, GIVEN).todo == []


def test_nothing_left_to_do_loads_no_model(tmp_path: Path) -> None:
    given, made = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text('{"id": 1, "prompt": "a"}\n')
    made.write_text('{"id": 1, "text": "b"}\n')
    shown = subprocess.run(
        [*HEADWAY, "generate", "no/such/model", "--input", given, "--output", made], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert f"nothing is left to do: {made} holds all 1 answers" in shown.stderr.replace("\n", "")


def test_the_last_line_sums_up_and_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    given, made = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": 0, "prompt": "a", "max_tokens": 1}, {"id": 1, "prompt": "1, 2, 3,", "max_tokens": 8000}]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [*HEADWAY, "generate", "--input", str(given), "--output", str(made), "--kv-cache-gib", "0.4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and (not made.exists() or not made.read_bytes()):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        shown = process.stderr.read().replace("\n", "")
        assert process.wait() == 130
    assert f"stopped: 1 of 2 answers are in {made}; run this again for the others" in shown
    given.write_text(json.dumps(lines[0] | {"id": 2}) + "\n")
    shown = subprocess.run(command, capture_output=True, text=True).stderr
    assert "1 answered, 0 failed, " in shown and "tokens/s" in shown


def test_answers_to_openais_lines_are_as_its_output_files_have_them(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    given, made = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"model": "gpt", "messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 1, "n": 2}
    text = {"prompt": "the fox", "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1}
    lines = [
        {"custom_id": "a", "method": "POST", "url": CHAT, "body": chat},
        {"custom_id": "b", "method": "POST", "url": TEXT, "body": text},
        {"custom_id": "c", "method": "POST", "url": TEXT, "body": {"prompt": "a", "logit_bias": {"99999": 1}}},
    ]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with LLM(tmp_path, kv_cache_gib=0.01, backend="reference") as llm:
        assert run(llm, open_batch(given, made, {})) == 1
    found = {line["custom_id"]: line for line in map(json.loads, made.read_text().splitlines())}
    assert [found[id]["response"]["status_code"] for id in "abc"] == [200, 200, 400]
    a, b, c = (found[id]["response"]["body"] for id in "abc")
    assert a["object"] == "chat.completion" and [choice["index"] for choice in a["choices"]] == [0, 1]
    assert all(len(choice["logprobs"]["content"]) <= 3 for choice in a["choices"])  # of what the text holds
    assert 2 <= a["usage"]["completion_tokens"] <= 6
    (choice,) = b["choices"]
    assert choice["text"].startswith("the fox") and choice["logprobs"]["text_offset"][0] == 0
    assert len(choice["logprobs"]["tokens"]) == b["usage"]["total_tokens"]
    assert "logit_bias" in c["error"]["message"]
    assert [line.id for line in open_batch(given, made, {}).todo] == ["c"], "what failed is tried again"
