"""`headway chat`: what can be typed, what happens when the context is full, and words that stay whole."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.cli.chat import Conversation, _remote
from headway.cli.repetition import Circling, not_circling
from headway.cli.terminal import AnswerCost, Wrapped
from headway.client.chat import Piece, ServerError
from headway.core.errors import HeadwayError, Reject, Rejected
from tests.serve.conftest import write_tiny_checkpoint

HEADWAY = [sys.executable, "-m", "headway"]


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, say: Any, system: bool = False) -> Conversation:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    start = [{"role": "system", "content": "Be short."}] if system else []
    conversation = Conversation("model", say, start, 100)
    conversation.run()
    return conversation


def echo(messages: list[dict[str, Any]]) -> AnswerCost:
    return AnswerCost(f"to {messages[-1]['content']}", "stop", 20, 8, 12, 0.1, 0.02)


def test_commands_are_not_sent_and_unknown_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def say(messages: list[dict[str, Any]]) -> AnswerCost:
        asked.append(messages[-1]["content"])
        return echo(messages)

    typed = "/stats\nhi\n/stats\n/hepl me\n/help\n/usr/bin is a folder\n/clear\nagain\n/bye\nnever\n"
    conversation = talk(monkeypatch, typed, say)
    assert asked == ["hi", "/usr/bin is a folder", "again"]
    assert [one["content"] for one in conversation.messages] == ["again", "to again"]
    shown = capsys.readouterr().err
    for words in ("nothing was answered yet", "20 prompt tokens, 8 from the cache", "/hepl is no command", "Ctrl-D"):
        assert words in shown
    assert shown.count("TTFT") == 1, "statistics on demand"


@pytest.mark.parametrize(
    "full", [Rejected(Reject.CONTEXT_LENGTH, "too long"), ServerError("400: too long", Reject.CONTEXT_LENGTH.code)]
)
def test_a_full_context_leaves_the_oldest_turns_out_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: HeadwayError
) -> None:
    """Reported t2-040."""

    def say(messages: list[dict[str, Any]]) -> AnswerCost:
        if sum(len(one["content"]) for one in messages) > 30:
            raise full
        return echo(messages)

    conversation = talk(monkeypatch, f"one\ntwo\nthree\n{'x' * 50}\n", say, system=True)
    contents = [one["content"] for one in conversation.messages]
    assert contents == ["Be short.", "two", "to two", "three", "to three"]
    shown = capsys.readouterr().err
    assert "from here on without the 1 oldest turn)" in shown
    assert "too long (/reset starts anew)" in shown


def test_an_answer_that_was_cut_is_marked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Reported t2-040."""
    tokens = iter((1, 100))
    talk(monkeypatch, "hi\nmore\n/help\n", lambda messages: AnswerCost("a", "length", 1, 0, next(tokens), 0.1, None))
    shown = capsys.readouterr().err
    assert "(cut: the context is full)" in shown
    assert "(cut after 100 tokens; --max-tokens allows more)" in shown
    assert "An answer has at most 100 tokens, or what is left of the context" in shown


def test_a_server_with_less_room_than_an_answers_limit_is_asked_for_what_is_left() -> None:
    class Small:
        """A server whose context has no room for 100 more tokens."""

        def stream_chat(self, messages: list[dict[str, Any]], **fields: Any) -> Iterator[Piece]:
            if fields.get("max_tokens", 0) > 50 or len(messages) > 1:
                raise ServerError("400: too long", Reject.CONTEXT_LENGTH.code)
            yield from (Piece(text="a"), Piece(finish_reason="length", usage={"completion_tokens": 50}))

    say = _remote(Small(), {"model": "small", "max_tokens": 100})  # type: ignore[arg-type]
    answer = say([{"role": "user", "content": "hi"}])
    assert (answer.text, answer.reason, answer.tokens) == ("a", "length", 50)
    with pytest.raises(ServerError):  # the messages themselves are too long
        say([{"role": "user", "content": "hi"}] * 2)


def test_a_closed_stdin_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported t2-036."""
    monkeypatch.setattr(sys, "stdin", None)
    Conversation("model", echo, [], 100).run()


def test_a_model_without_a_template_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """Reported t2-009."""
    write_tiny_checkpoint(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": None}))
    shown = subprocess.run([*HEADWAY, "chat", str(tmp_path)], input=b"hi\n", capture_output=True)
    assert shown.returncode == 2
    assert b"has no chat template; complete texts with `headway generate --prompt`" in shown.stderr
    assert b"KV cache" not in shown.stderr


def test_options_of_the_engine_are_not_for_a_server() -> None:
    shown = subprocess.run([*HEADWAY, "chat", "--url", "http://127.0.0.1:1", "--threads", "2"], capture_output=True)
    assert shown.returncode == 2 and b"--url: the server has loaded its model already" in shown.stderr


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (12, ["the quick", "  brown fox", "jumps", "", "over 語語語", "incomprehensibilities", "."]),
        (80, ["the quick", "  brown fox jumps", "", "over 語語語 incomprehensibilities ."]),
    ],
)
def test_words_stay_whole(width: int, lines: list[str]) -> None:
    text = "the quick\n  brown fox jumps\n\nover 語語語 incomprehensibilities ."
    for size in (1, 3, 100):
        pieces: list[str] = []
        wrapped = Wrapped(pieces.append, width)
        for start in range(0, len(text), size):
            wrapped.push(text[start : start + size])
        wrapped.flush()
        assert "".join(pieces).split("\n") == lines


def test_in_a_terminal_lines_are_edited_and_pasted(tmp_path: Path) -> None:
    script = (
        "from headway.cli.lines import Lines\n"
        "for line in Lines('history', ('/help', '/quit')): print('GOT', repr(line), flush=True)\n"
        "print('END', flush=True)"
    )
    terminal, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "HEADWAY_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = ""

    def until(wanted: str) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while wanted not in shown:
            assert time.monotonic() < end, shown
            if select.select([terminal], [], [], 0.2)[0]:
                piece = os.read(terminal, 4096)
                if b"\x1b[6n" in piece:
                    os.write(terminal, b"\x1b[1;1R")  # where the cursor is
                shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", piece.decode(errors="replace"))

    try:
        for keys, wanted in (
            (b"helo\x1b[Dl\r", "GOT 'hello'"),  # left arrow, then an l
            (b"\x1b[200~two\nlines\x1b[201~\r", r"GOT 'two\nlines'"),
            (b"\x1b[A\x1b[A\x1b[A!\r", "GOT 'hello!'"),  # up, through the lines of what was pasted
            (b"/he\t\r", "GOT '/help'"),
            (b"gone\x03", "you:"),
            (b"\x04", "END"),
        ):
            until("you:")
            shown = ""
            os.write(terminal, keys)
            until(wanted)
    finally:
        process.kill()
        process.wait()
    os.close(terminal)
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "circles"),
    [
        ("Well: " + "la France, " * 60, True),
        ("aye, aye, aye,\nAbele's crew, " * 20, True),
        ("x" * 1000, True),
        ("la France, " * 20, False),  # as somebody may have asked for
        ("".join(f"{number}. Fish\n" for number in range(300)), False),
        ("-" * 1000, False),
        ("| 1 |   |\n" * 3 + "done", False),
        ("A passage of some length, " * 3, False),
        ((string.printable + "\n") * 6, True),
    ],
)
def test_an_answer_that_goes_in_a_circle_is_stopped(text: str, circles: bool) -> None:
    passed: list[str] = []
    pieces = (text[start : start + 3] for start in range(0, len(text), 3))
    try:
        for piece in not_circling(pieces):
            passed.append(piece)
    except Circling as error:
        assert circles and "repeats itself" in str(error)
        assert "".join(passed) == text[: len("".join(passed))] and len("".join(passed)) >= 400
    else:
        assert not circles and "".join(passed) == text


def test_a_chat_goes_on_after_an_answer_in_a_circle(capsys: pytest.CaptureFixture[str]) -> None:
    client: Any = type("Endless", (), {"stream_chat": lambda *_, **__: (Piece(text="and on ") for _ in iter(int, 1))})()
    answer = _remote(client, {})([{"role": "user", "content": "Go"}])
    said = capsys.readouterr()
    assert answer.reason == "abort" and answer.text.startswith("and on and on ")
    assert "(stopped: the answer repeats itself" in said.err
