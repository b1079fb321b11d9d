"""Ollama's dialect, with Ollama's own client, against the scripted model."""

from __future__ import annotations

import json
import time
from typing import Any

import ollama
import pytest

from tests.serve.conftest import Server
from tests.serve.scripted import BABBLE, CONTEXT, ByteTokenizer

USER = [{"role": "user", "content": "say:Hällo 🙂"}]
CHAT, GENERATE = "/api/chat", "/api/generate"


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def lines(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, body)
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.content.decode().splitlines()]


def test_the_client_talks(client: ollama.Client) -> None:
    answer = client.chat("scripted", USER)
    assert answer.message.content == "Hällo 🙂" and answer.done and answer.done_reason == "stop"
    pieces = list(client.chat("scripted:latest", USER, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == "Hällo 🙂"
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert client.generate("scripted", "say:abc").response == "abc"
    assert "".join(piece.response or "" for piece in client.generate("scripted", "say:abc", stream=True)) == "abc"
    assert [model.model for model in client.list().models] == ["scripted"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": USER}), (GENERATE, {"prompt": "say:abc"})])
def test_one_model_need_not_be_named(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, {**body, "stream": False})
    assert answer.status_code == 200 and answer.json()["model"] == "scripted"


def test_a_model_is_listed_and_shown(tiny: Server) -> None:
    client = ollama.Client(host=tiny.url)
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.size and listed.digest and listed.digest == loaded.digest and loaded.expires_at is not None
    assert listed.details is not None and listed.details.family == "llama"
    shown = client.show("tiny")
    assert shown.modelinfo is not None and shown.modelinfo["llama.block_count"] == 2
    with pytest.raises(ollama.ResponseError, match="model: this server has 'tiny' only"):
        client.show("other")


def test_counts_and_durations_are_true(client: ollama.Client) -> None:
    begin = time.perf_counter_ns()
    for answer in (client.chat("scripted", USER), list(client.chat("scripted", USER, stream=True))[-1]):
        took = time.perf_counter_ns() - begin
        assert answer.prompt_eval_count == len(ByteTokenizer().encode(ByteTokenizer().render(USER)))
        assert answer.eval_count == len("Hällo 🙂".encode()) + 1
        parts = (answer.load_duration or 0) + (answer.prompt_eval_duration or 0) + (answer.eval_duration or 0)
        assert 0 < parts == answer.total_duration < took


def test_options_are_honoured(server: Server, client: ollama.Client) -> None:
    assert client.generate("scripted", "babble", options={"num_predict": 5, "seed": 1, "top_k": 3}).eval_count == 5
    stopped = client.generate("scripted", "say:one two", options={"stop": [" "], "num_ctx": 100, "num_thread": 4})
    assert stopped.response == "one" and stopped.done_reason == "stop"
    limited = client.generate("scripted", "babble", raw=True, options={"num_ctx": 20})
    assert limited.eval_count == 20 - len("babble") and limited.done_reason == "length"
    with pytest.raises(ollama.ResponseError, match=r"options.num_predict: 6 prompt tokens \+ 90") as caught:
        client.generate("scripted", "babble", raw=True, options={"num_predict": 90, "num_ctx": 50})
    assert caught.value.status_code == 400
    full = server.post(GENERATE, {"model": "scripted", "prompt": "x" * CONTEXT, "stream": False})
    assert full.status_code == 400 and "the context holds" in full.json()["error"]


def test_a_system_text_and_a_raw_prompt(server: Server) -> None:
    body = {"model": "scripted", "prompt": "say:a", "stream": False}
    rendered = ByteTokenizer().render([{"role": "system", "content": "S"}, {"role": "user", "content": "say:a"}])
    assert server.post(GENERATE, {**body, "system": "S"}).json()["prompt_eval_count"] == len(
        ByteTokenizer().encode(rendered)
    )
    assert server.post(GENERATE, {**body, "raw": True}).json()["prompt_eval_count"] == len("say:a")


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_stream_is_the_whole_answer_in_lines_no_splitter_cuts(server: Server, path: str) -> None:
    body = {"model": "scripted", "options": {"num_predict": len(BABBLE)}, "logprobs": True, "top_logprobs": 2}
    body |= {"messages": [{"role": "user", "content": "babble"}]} if path == CHAT else {"prompt": "babble"}

    def text(answer: dict[str, Any]) -> str:
        return answer["message"]["content"] if path == CHAT else answer["response"]

    pieces = lines(server, path, body)
    whole = server.post(path, {**body, "stream": False}).json()
    assert "".join(map(text, pieces)) == text(whole) and whole["done_reason"] == "length"
    assert [entry for piece in pieces for entry in piece.get("logprobs", [])] == whole["logprobs"]
    assert len(whole["logprobs"]) == whole["eval_count"] == len(BABBLE)


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"messages": USER, "format": "xml"}, "format"),
        (CHAT, {"messages": USER, "think": "loudly"}, "think"),
        (CHAT, {"messages": USER, "options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"messages": USER, "options": {"temperature": -1}}, "options.temperature"),
        (CHAT, {"messages": USER, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        (CHAT, {"messages": USER, "options": {"num_predict": 0}}, "options.num_predict"),
        (CHAT, {"messages": USER, "options": {"num_ctx": 0}}, "options.num_ctx"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix"),
        (GENERATE, {"prompt": "a", "context": [1]}, "context"),
    ],
    ids=str,
)
def test_what_is_not_honoured_is_refused_by_name(server: Server, path: str, fields: dict[str, Any], name: str) -> None:
    refused = server.post(path, {"model": "scripted", **fields})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith(f"{name}: ") and list(refused.json()) == ["error"]


def test_errors_have_ollamas_shape(client: ollama.Client, server: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="this server has 'scripted' only") as caught:
        client.chat("other", USER)
    assert caught.value.status_code == 404
    assert isinstance(server.post("/api/embed", {"input": 5}).json()["error"], str)
    with pytest.raises(ollama.ResponseError, match="a scripted failure"):
        list(client.generate("scripted", "fail", stream=True))
    with pytest.raises(ollama.ResponseError, match="a scripted failure"):
        client.generate("scripted", "fail")


def test_without_a_prompt_the_model_is_said_to_be_loaded(client: ollama.Client, server: Server) -> None:
    assert client.generate("scripted").done_reason == client.chat("scripted", []).done_reason == "load"
    with server.client() as http:
        assert http.get("/api/version").json()["version"]


def test_leaving_a_stream_frees_it(client: ollama.Client, server: Server) -> None:
    stream = client.generate("scripted", "count", stream=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    server.wait_idle()


def test_routes_are_in_the_document(server: Server) -> None:
    with server.client() as http:
        paths = http.get("/openapi.json").json()["paths"]
    assert "application/x-ndjson" in paths[CHAT]["post"]["responses"]["200"]["content"]
    assert {CHAT, GENERATE, "/api/tags", "/api/version"} < set(paths)
