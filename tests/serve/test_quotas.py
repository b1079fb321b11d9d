"""What a key may use: rates in the time of a clock of ours, and what SDKs see of them over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.core.errors import BadInput
from headway.serve.errors import ApiError
from headway.serve.quotas import Quota, Quotas
from tests.serve.conftest import Server

Start = Callable[..., Server]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_minute_gives_its_rate_and_the_next_request_says_when() -> None:
    clock = Clock()
    quotas = Quotas(Quota(requests=2, input_tokens=100), clock=clock)
    quotas.admit("a", 10).close(0)
    quotas.admit("a", 10).close(0)
    with pytest.raises(ApiError, match="2 requests a minute; try again in 30 s") as refused:
        quotas.admit("a", 10)
    assert (refused.value.status, refused.value.retry_after, refused.value.code) == (429, 30, "rate_limit_exceeded")
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
    quotas.admit("b", 10)  # another key has its own
    clock.now += 30
    quotas.admit("a", 10)
    with pytest.raises(ApiError, match="requests a minute"):
        quotas.admit("a", 10)


def test_input_tokens_wait_for_what_is_missing() -> None:
    clock = Clock()
    quotas = Quotas(Quota(input_tokens=60), clock=clock)
    quotas.admit("a", 50)
    with pytest.raises(ApiError) as refused:
        quotas.admit("a", 20)
    assert refused.value.retry_after == 10
    clock.now += 10
    assert dict(quotas.admit("a", 20).headers)[b"x-ratelimit-remaining-tokens"] == b"0"
    with pytest.raises(BadInput, match="61 tokens; this key may send 60 a minute"):
        quotas.admit("a", 61)


def test_generated_tokens_may_overdraw_and_are_waited_for() -> None:
    clock = Clock()
    quotas = Quotas(Quota(output_tokens=60), clock=clock)
    lease = quotas.admit("a", 1)
    quotas.admit("a", 1)  # nothing is known of the first one yet
    lease.close(119)
    lease.close(119)  # closed once
    with pytest.raises(ApiError) as refused:
        quotas.admit("a", 1)
    assert refused.value.retry_after == 60
    clock.now += 60
    quotas.admit("a", 1)


def test_what_generates_nothing_does_not_wait_for_output_tokens() -> None:
    clock = Clock()
    quotas = Quotas(Quota(output_tokens=60, input_tokens=100), clock=clock)
    quotas.admit("a", 1).close(500)
    with pytest.raises(ApiError, match="60 output tokens a minute"):
        quotas.admit("a", 1)
    quotas.admit("a", 1, generates=False).close(0)
    with pytest.raises(BadInput, match=r"^input: 101 tokens"):
        quotas.admit("a", 101, generates=False, field="input")


def test_requests_at_once_and_a_refusal_takes_nothing() -> None:
    quotas = Quotas(Quota(concurrent=1, requests=10), {"vip": Quota(concurrent=3)}, clock=Clock())
    first = quotas.admit("a", 1)
    with pytest.raises(ApiError, match="1 requests in flight"):
        quotas.admit("a", 1)
    first.close(0)
    second = quotas.admit("a", 1)
    assert dict(second.headers)[b"x-ratelimit-remaining-requests"] == b"8"
    for _ in range(3):
        quotas.admit("vip", 1)
    with pytest.raises(ApiError):
        quotas.admit("vip", 1)


def test_a_bucket_never_gives_more_than_its_rate_in_any_minute() -> None:
    """After the first minute: what was saved up is spent, and from then on it is the rate."""
    clock = Clock()
    quotas = Quotas(Quota(requests=7), clock=clock)
    let_in = []
    for _ in range(2000):
        clock.now += 0.25
        try:
            quotas.admit("a", 1).close(0)
            let_in.append(clock.now)
        except ApiError:
            pass
    assert all(sum(start <= at < start + 60 for at in let_in) <= 14 for start in let_in)
    assert len(let_in) == pytest.approx(7 + 500 * 7 / 60, abs=1)


def test_sdks_read_the_limits_and_wait(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one requests=2\nsk-two\n")
    server = start(api_key_file=str(keys), output_tokens_per_minute=600)

    def client(key: str, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **options)

    ask: Any = {"model": "scripted", "messages": [{"role": "user", "content": "say:hi"}]}
    raw = client("sk-one").chat.completions.with_raw_response.create(**ask)
    assert raw.headers["x-ratelimit-limit-requests"] == "2" and raw.headers["x-ratelimit-remaining-requests"] == "1"
    assert raw.headers["x-ratelimit-limit-tokens"] == "600"
    client("sk-one").chat.completions.create(**ask)
    with pytest.raises(openai.RateLimitError) as refused:
        client("sk-one").chat.completions.create(**ask)
    assert refused.value.code == "rate_limit_exceeded" and 1 <= int(refused.value.response.headers["retry-after"]) <= 31
    stream = client("sk-two").chat.completions.with_raw_response.create(**ask, stream=True)
    assert stream.headers["x-ratelimit-limit-tokens"] == "600" and "x-ratelimit-limit-requests" not in stream.headers
    stream.parse().close()


def test_a_client_that_leaves_frees_its_place(start: Start) -> None:
    server = start(max_concurrent=1, engine={"seconds": 0.01})
    body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 2000, "stream": True}

    async def leave() -> None:
        async with server.async_client() as client, client.stream("POST", "/v1/chat/completions", json=body) as left:
            lines = left.aiter_lines()  # kept: its end would be the stream's
            await anext(lines)
            again = await client.post("/v1/chat/completions", json=body | {"stream": False, "max_tokens": 1})
            assert again.status_code == 429 and again.json()["error"]["type"] == "rate_limit_error"

    asyncio.run(leave())
    server.wait_idle(10)
    assert server.post("/v1/chat/completions", body | {"stream": False, "max_tokens": 1}).status_code == 200


def test_reading_without_generating_counts_too(start: Start, tmp_path: Path) -> None:
    server = start(requests_per_minute=5, input_tokens_per_minute=200)
    turns = [{"role": "user", "content": "hello"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "x" * 50}),
        ("/detokenize", {"tokens": [65] * 30}),
        ("/v1/messages/count_tokens", {"model": "scripted", "messages": turns}),
        ("/v1/cache/explain", {"prompt": "y" * 20}),
        ("/v1/cache/explain", {"prompt": "y" * 20, "against": {"prompt": "y" * 10}}),
    ]
    left = []
    for path, body in asked:
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        left.append([int(answer.headers[f"x-ratelimit-remaining-{kind}"]) for kind in ("requests", "tokens")])
    assert [requests for requests, _ in left] == [4, 3, 2, 1, 0]
    assert left[0][1] in (150, 149, 151) and left[-1][1] < left[-2][1] < left[1][1] < left[0][1]
    refused = server.post("/tokenize", {"prompt": "x"})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert server.post("/tokenize", {"prompt": "x" * 300}).status_code == 400


def cached(server: Server, key: str, prompt: str) -> int:
    answer = server.post(
        "/v1/completions", {"prompt": prompt, "max_tokens": 1}, headers={"authorization": f"Bearer {key}"}
    )
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_keys_share_cached_prefixes_only_where_the_operator_says_so(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one cache=team\nsk-two requests=99 cache=team\nsk-three\nsk-four\n")
    prompt = "a shared beginning of many words, " * 8
    server = start(api_key_file=str(keys))
    assert cached(server, "sk-one", prompt) == 0 and cached(server, "sk-two", prompt) > 200
    assert cached(server, "sk-three", prompt) == 0 and cached(server, "sk-four", prompt) == 0
    shared = start(api_key_file=str(keys), share_cache=True)
    assert cached(shared, "sk-three", prompt) == 0 and cached(shared, "sk-four", prompt) > 200
    assert cached(shared, "sk-one", prompt) == 0, "it has named a cache of its own"
    told = shared.post("/v1/cache/explain", {"prompt": prompt}, headers={"authorization": "Bearer sk-four"}).json()
    assert told["reused_tokens"] > 200
