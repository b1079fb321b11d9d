"""The command line where things are not as they should be: outputs that break, files of the wrong kind, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEADWAY = [sys.executable, "-m", "headway"]
SHORT = ["generate", "--prompt", "One, two,", "--max-tokens", "4", "--temperature=0", "--kv-cache-gib", "0.1"]
FULL = Path("/dev/full")


def headway(*args: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    options.setdefault("stdout", subprocess.PIPE)
    return subprocess.run([*HEADWAY, *args], stderr=subprocess.PIPE, **options)  # type: ignore[call-overload]


def assert_one_sentence(shown: subprocess.CompletedProcess[bytes], sentence: str, code: int) -> None:
    assert sentence in shown.stderr.decode()
    assert "Traceback" not in shown.stderr.decode()
    assert shown.returncode == code


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], SHORT, [*SHORT, "--json"]])
def test_a_full_disk_is_one_sentence(args: list[str]) -> None:
    """Reported t2-036."""
    with FULL.open("wb") as full:
        shown = headway(*args, stdout=full)
    assert_one_sentence(shown, ": No space left on device", 1)


@pytest.mark.parametrize("args", [["--help"], SHORT])
def test_a_reader_that_has_read_enough_is_no_fault_of_ours(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    shown = headway(*args, stdout=writer)
    os.close(writer)
    assert b"Traceback" not in shown.stderr and b"Broken pipe" not in shown.stderr
    assert shown.returncode == 1


def test_a_closed_stdout_hides_the_answer_and_nothing_else() -> None:
    """Reported t2-036."""
    shown = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *HEADWAY, *SHORT], stderr=subprocess.PIPE)
    assert shown.returncode == 0, shown.stderr


def test_what_the_terminal_cannot_show_is_spelled_out() -> None:
    args = ["generate", "--prompt", "🐺 emoji: 😀😀😀", "--max-tokens", "8", "--temperature=0", "--kv-cache-gib", "0.1"]
    plain, ascii_only = (
        headway(*args, env=os.environ | {"PYTHONIOENCODING": encoding}) for encoding in ("utf-8", "ascii")
    )
    assert not plain.stdout.isascii()
    assert ascii_only.stdout.decode("ascii").encode().decode("unicode_escape") == plain.stdout.decode()


def test_a_prompt_that_is_not_text_is_refused() -> None:
    shown = subprocess.run([*HEADWAY, "generate", "--prompt", b"\xff"], stderr=subprocess.PIPE)
    assert_one_sentence(shown, "prompt: holds half of a surrogate pair", 2)


def test_brackets_in_a_question_are_text() -> None:
    shown = headway("demo", "What is [/b]?", "--max-tokens", "2")
    assert shown.returncode == 0 and b"What is [/b]?" in shown.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["doctor", "--context", "0"], "--context: 0 is not an integer >= 1"),
        (["doctor", "--threads", "0"], "--threads: 0 is not an integer >= 1"),
        (["doctor", "--backend", "cuda"], "--backend: 'cuda' is not one of auto, native, reference"),
    ],
)
def test_a_value_out_of_range_is_one_sentence(args: list[str], sentence: str) -> None:
    assert_one_sentence(headway(*args), sentence, 2)


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """Ten jobs, with a byte-order mark and Windows line ends."""
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": number, "prompt": f"Count from {number}:"}) for number in range(10)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    return path


def generate(jobs: Path, output: Path | str, **options: object) -> subprocess.CompletedProcess[bytes]:
    more = ["--max-tokens", "20", "--temperature=0", "--kv-cache-gib", "0.1"]
    return headway("generate", "--input", str(jobs), "--output", str(output), *more, **options)


@pytest.mark.parametrize("name", ["no/such/folder/out.jsonl", "."])
def test_an_output_that_cannot_be_is_named_before_anything_runs(tmp_path: Path, jobs: Path, name: str) -> None:
    shown = generate(jobs, tmp_path / name)
    assert_one_sentence(shown, "--output: ", 2)
    assert b"KV cache" not in shown.stderr


@pytest.mark.parametrize("content", [b"a text without an end", b'{"id": 1, "text": "x"}\n[1', b'{"prompt": "x"}'])
def test_a_file_that_is_no_output_of_ours_is_left_as_it_is(tmp_path: Path, jobs: Path, content: bytes) -> None:
    other = tmp_path / "other"
    other.write_bytes(content)
    assert_one_sentence(generate(jobs, other), "is not the output of an earlier run", 2)
    assert other.read_bytes() == content


def test_a_pipe_is_an_output_too(jobs: Path) -> None:
    shown = generate(jobs, "/dev/stdout")
    assert sorted(json.loads(line)["id"] for line in shown.stdout.splitlines()) == list(range(10))


def test_a_run_killed_at_any_moment_continues(tmp_path: Path, jobs: Path) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert generate(jobs, whole).returncode == 0
    moments = random.Random(3)
    for _ in range(4):
        command = [
            *HEADWAY,
            "generate",
            "--input",
            str(jobs),
            "--output",
            str(killed),
            "--max-tokens",
            "20",
            "--temperature=0",
        ]
        with subprocess.Popen([*command, "--kv-cache-gib", "0.1"], stderr=subprocess.DEVNULL) as process:
            time.sleep(moments.uniform(0.3, 1.5))
            process.kill()
    assert generate(jobs, killed).returncode == 0
    first, second = (
        {line["id"]: line["text"] for line in map(json.loads, path.read_text().splitlines())}
        for path in (whole, killed)
    )
    assert len(killed.read_text().splitlines()) == 10
    assert first == second


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "x", "id": true}', "id must be a string or an integer"),
        ('{"messages": [1]}', '"messages" a list of messages'),
        ('{"messages": []}', '"messages" a list of messages'),
        ('{"prompt": [{"role": "user", "content": "x"}]}', '"prompt" is a text or a list of token ids'),
        ('{"prompt": [1, "a"]}', '"prompt" is a text or a list of token ids'),
    ],
)
def test_prompts_are_not_taken_for_messages(tmp_path: Path, line: str, sentence: str) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text(line)
    assert_one_sentence(generate(given, tmp_path / "out.jsonl"), sentence, 2)


def test_ctrl_c_ends_generate_with_its_own_code() -> None:
    endless = ["--prompt", "1, 2, 3, 4, 5,", "--max-tokens", "8000", "--temperature=0"]  # greedy, it goes on counting
    command = [*HEADWAY, "generate", *endless, "--kv-cache-gib", "0.4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert b"Traceback" not in process.stderr.read()


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on() -> None:
    terminal, theirs = pty.openpty()
    command = [*HEADWAY, "chat", "--stats", "--temperature", "0", "--max-tokens", "400", "--kv-cache-gib", "0.2"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as chat:
        os.close(theirs)
        assert chat.stdout is not None
        shown = b""

        def read_until(wanted: bytes) -> bytes:
            nonlocal shown
            while wanted not in shown:
                piece = os.read(chat.stdout.fileno(), 4096)  # type: ignore[union-attr]
                assert piece, shown
                shown += piece
            before, _, shown = shown.partition(wanted)
            return before

        read_until(b"you")
        os.write(terminal, b"Tell me a very long story about the sea.\n")
        read_until(b"the")
        chat.send_signal(signal.SIGINT)
        read_until(b"(stopped)")
        assert b"ended by abort" in read_until(b"you")
        os.write(terminal, b"/reset\nSay hi.\n/quit\n")
        assert b"Traceback" not in read_until(b"KV cache")
        assert chat.wait() == 0
    os.close(terminal)
