"""Cache misses explained: by a server from what it holds, and of two recorded requests on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from tests.serve.conftest import Server

LONG = "The rules of this house are many, and they are the same for all. " * 6


def body(system: str, *users: str) -> dict[str, Any]:
    turns = [{"role": "system", "content": system}, *({"role": "user", "content": text} for text in users)]
    return {"messages": turns}


def explained(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/v1/cache/explain", request)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_a_server_says_where_a_prompt_leaves_what_is_cached(start: Callable[..., Server]) -> None:
    server = start()
    first = body("It is 2026-11-30 10:41:03. " + LONG, "say:hello")
    unknown = explained(server, first)
    assert (unknown["verdict"], unknown["reused_tokens"]) == ("nothing_beyond", 0)
    server.post("/v1/chat/completions", {**first, "max_tokens": 1})
    full = explained(server, first)
    assert full["verdict"] == "full" and full["reused_tokens"] >= len(LONG)
    later = explained(server, body("It is 2026-11-30 10:42:17. " + LONG, "say:hello"))
    assert later["verdict"] == "diverged"
    assert later["advice"].startswith("a date or a time in messages[0].content (system)")
    assert later["lost_tokens"] >= len(LONG) and str(later["lost_tokens"]) in later["advice"]
    assert (later["cached"][0], later["yours"][0]) == ("1", "2")
    usage = server.post("/v1/chat/completions", {**first, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == full["reused_tokens"]


def test_two_requests_are_compared_without_the_cache(server: Server) -> None:
    one, two = (body(f"Request 7f3a9c0e1b2d{end} asks. " + LONG, "hello") for end in ("4455", "9911"))
    found = explained(server, {**two, "against": one})
    assert found["advice"].startswith("an identifier in messages[0].content") and found["lost"] >= len(LONG)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({}, "prompt: give either prompt or messages"),
        ({"prompt": "a", "against": {}}, "against.prompt: give either prompt or messages"),
        ({"prompt": [10**9]}, "is not a token id"),
        ({"prompt": [65] * 5000}, "5000 ids; a context holds 4096"),
        ({"prompt": "a", "against": {"prompt": [65] * 5000}}, "against.prompt: 5000 ids"),
        ({"prompt": "a", "model": "other"}, "this server has"),
    ],
)
def test_what_cannot_be_explained_is_refused(server: Server, request_: dict[str, Any], sentence: str) -> None:
    answer = server.post("/v1/cache/explain", request_)
    assert answer.status_code in (400, 404) and sentence in answer.json()["error"]["message"]


def test_a_strict_server_refuses_unknown_fields_of_either_request(start: Callable[..., Server]) -> None:
    server, known = start(strict=True), {"prompt": "a", "temperature": 0.5, "max_tokens": 3}
    assert server.post("/v1/cache/explain", {**known, "against": known}).status_code == 200
    for request in ({**known, "mood": 1}, {**known, "against": {**known, "mood": 1}}):
        answer = server.post("/v1/cache/explain", request)
        assert answer.status_code == 400 and "mood: this server does not know the field" in answer.text
    lenient = start().post("/v1/cache/explain", {**known, "against": {**known, "mood": 1}})
    assert lenient.status_code == 200 and lenient.headers["x-headway-ignored"] == "against.mood"


def test_the_command_line_explains_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the built-in model's own tokenizer and template."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, minute in zip(files, ("41", "42"), strict=True):
        file.write_text(json.dumps({**body(f"Now it is 10:{minute}. {LONG}", "hello"), "temperature": 0.2}))
    with pytest.raises(SystemExit) as stopped:
        main(["cache", "explain", *map(str, files), "--json"])
    assert not stopped.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["advice"].startswith("a date or a time in messages[0].content (system)")
    assert 80 < found["lost"] < found["second"] and found["reused"] == found["common"] // 32 * 32
    files[1].write_text("[]")
    with pytest.raises(SystemExit) as stopped:
        main(["cache", "explain", *map(str, files)])
    assert stopped.value.code == 2 and "is no request" in capsys.readouterr().err
