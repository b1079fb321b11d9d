"""Requests that nobody reported, and that a client will send one day."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.serve.conftest import Server, events
from tests.serve.test_answers import CHAT, TEXT, ask, streamed, whole


def test_choices_of_a_seed_differ_repeat_and_do_not_depend_on_n(tiny: Server) -> None:
    def texts(n: int) -> list[str]:
        body = {"prompt": "the fox", "n": n, "seed": 5, "temperature": 1.5, "max_tokens": 12}
        return [choice["text"] for choice in tiny.post(TEXT, body).json()["choices"]]

    three = texts(3)
    assert len(set(three)) == 3
    assert texts(3) == three and texts(2) == three[:2] and texts(1) == three[:1]


def test_best_of_answers_the_choices_with_the_highest_mean_logprob(tiny: Server) -> None:
    body = {"prompt": ["the fox", "a dog"], "seed": 5, "temperature": 1.5, "max_tokens": 6, "ignore_eos": True}
    every = tiny.post(TEXT, {**body, "n": 4, "logprobs": 0}).json()["choices"]
    means = [sum(one["logprobs"]["token_logprobs"]) / 6 for one in every]
    wanted = [sorted(range(first, first + 4), key=lambda index: -means[index])[:2] for first in (0, 4)]
    best = tiny.post(TEXT, {**body, "n": 2, "best_of": 4}).json()
    assert [one["text"] for one in best["choices"]] == [every[index]["text"] for pair in wanted for index in pair]
    assert [one["index"] for one in best["choices"]] == [0, 1, 2, 3]
    assert all(one["logprobs"] is None for one in best["choices"])
    assert best["usage"]["completion_tokens"] == 2 * 4 * 6, "all of them were made"
    for wrong in ({"n": 3, "best_of": 2}, {"n": 1, "best_of": 2, "stream": True}, {"best_of": 1000}):
        assert "best_of" in tiny.post(TEXT, {**body, **wrong}).json()["error"]["message"]


def test_two_identical_requests_on_a_cold_cache(tiny: Server) -> None:
    body = {"prompt": "nobody asked this before: the lazy dog " * 6, "max_tokens": 8, "temperature": 0}

    async def both() -> list[str]:
        async with tiny.async_client() as client:
            responses = await asyncio.gather(*[client.post(TEXT, json=body) for _ in range(2)])
            return [response.json()["choices"][0]["text"] for response in responses]

    first, second = asyncio.run(both())
    assert first == second


@pytest.mark.parametrize("extra", [{}, {"top_k": 5}, {"repetition_penalty": 1.2}, {"presence_penalty": -2}])
def test_a_bias_of_100_forces_a_token(tiny: Server, extra: dict[str, Any]) -> None:
    token = tiny.post("/tokenize", {"prompt": "Q"}).json()["tokens"][0]
    body = {"prompt": "the", "logit_bias": {str(token): 100}, "max_tokens": 4, "temperature": 1, **extra}
    assert tiny.post(TEXT, body).json()["choices"][0]["text"] == "QQQQ"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("stop", "text"),
    [(["ab", "ab"], ""), (["abcd"], ""), (["d"], "abc"), (["zz", "cd", "bcd"], "a"), (["say:"], "abcd"), ("b", "a")],
    ids=str,
)
def test_stop_strings(server: Server, path: str, stop: Any, text: str) -> None:
    body = ask(path, "say:abcd", stop=stop)
    assert whole(server, path, body)[0][0] == streamed(server, path, body)[0][0] == text


def test_a_stop_string_does_not_match_the_echo(server: Server) -> None:
    assert whole(server, TEXT, ask(TEXT, "say:abc", stop=["say"], echo=True))[0][0] == "say:abcabc"


def test_stop_ids_more_than_once(server: Server) -> None:
    assert whole(server, TEXT, ask(TEXT, "say:abc", stop_token_ids=[99, 99, 99]))[0][0] == "ab"


def test_one_word_of_200k_characters(tiny: Server) -> None:
    response = tiny.post(TEXT, {"prompt": "a" * 200_000, "max_tokens": 1})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_of_duplicate_keys_the_last_counts(server: Server) -> None:
    with server.client() as client:
        answer = client.post(TEXT, content=b'{"prompt":"say:a","max_tokens":1,"prompt":"say:b"}').json()
    assert answer["choices"][0]["text"] == "b"


def test_a_request_that_comes_byte_by_byte(server: Server) -> None:
    body = json.dumps({"prompt": "say:slow", "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in f"{head}content-length: {len(body)}\r\n\r\n".encode() + body:
            raw.sendall(bytes([byte]))
        answer = b""
        while piece := raw.recv(7):
            answer += piece
    assert b"[DONE]" in answer and answer.count(b'"text":') == len("slow") + 1


def test_control_tokens_in_stop_and_text(server: Server) -> None:
    assert whole(server, CHAT, ask(CHAT, "say:a", stop=["<|im_end|>", "<eos>"]))[0][0] == "a"
    chunks = events(server.post(CHAT, ask(CHAT, "say:a", stream=True, logprobs=True)))
    names = [entry["token"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]
             for entry in choice["logprobs"]["content"]]  # fmt: skip
    assert names == ["a"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_is_scored_without_an_answer(server: Server, stream: bool, n: int) -> None:
    body = {"prompt": ["say:a", [104, 105]], "echo": True, "logprobs": 1, "max_tokens": 0, "n": n, "stream": stream}
    answer = (streamed if stream else whole)(server, TEXT, body)
    with_one = whole(server, TEXT, {**body, "max_tokens": 1, "stream": False})
    assert len(answer) == 2 * n
    for index, (text, logprobs, reason) in answer.items():
        assert (text, reason) == (["say:a", "hi"][index // n], "length")
        assert logprobs == {name: values[: len(text)] for name, values in with_one[index][1].items()}
    if not stream:
        assert server.post(TEXT, body).json()["usage"]["completion_tokens"] == 0
    assert server.post(TEXT, {**body, "echo": False}).status_code == 400


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (["a", "x" * 5000], "prompt[1]"),
        (["a", "x" * 500_000], "prompt[1]"),
        ([[1], [1, 999]], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        (["x" * 5000], "prompt"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_of_many_prompts_the_one_at_fault_is_named(server: Server, prompts: Any, field: str) -> None:
    error = server.post(TEXT, {"prompt": prompts}).json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, 10**60, -(2**64)])
def test_no_integer_is_too_large_to_be_refused(server: Server, value: int) -> None:
    fields = ["max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs", "best_of", "stop_token_ids", "prompt"]
    for field in fields:
        body = {"prompt": "say:a", field: [value] if field in ("stop_token_ids", "prompt") else value}
        status = server.post(TEXT, body).status_code
        assert status == 400 or (field == "seed" and value == 2**31), (field, value)
    for field in ("max_completion_tokens", "top_logprobs"):
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, field: value}
        assert server.post(CHAT, body).status_code == 400
    assert server.post("/detokenize", {"tokens": [value]}).status_code == 400
    for field in ("num_predict", "top_k", "seed"):
        body = {"model": "scripted", "prompt": "say:a", "options": {field: value}}
        assert server.post("/api/generate", body).status_code == (200 if field == "seed" and value == 2**31 else 400)
