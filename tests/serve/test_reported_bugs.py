"""Faults that users reported of other servers, each test named by repository and number of the report.

The whole kind of each fault is covered where it can be. `server` runs a scripted model, for answers that must be known;
`tiny` is `headway serve` on a small random model, for everything that goes through sampling and the cache.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serve import test_reported_tools
from tests.serve.conftest import Server, events
from tests.serve.scripted import CONTEXT
from tests.serve.test_answers import CHAT, TEXT, ask, streamed, whole

GENERATING = (CHAT, TEXT)


def refused(response: httpx.Response, param: str | None = None, code: str | None = None) -> None:
    """400, in OpenAI's shape, naming the field, and small."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert param is None or param in (error["param"] or ""), error
    assert code is None or error["code"] == code, error
    assert len(response.content) < 4096


def works(server: Server) -> None:
    assert server.post(TEXT, {"prompt": "say:ok" if server.port else "", "max_tokens": 2}).status_code == 200


def post_raw(server: Server, path: str, body: bytes) -> httpx.Response:
    with server.client() as client:
        return client.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("path", GENERATING)
def test_vllm_3574_nothing_of_a_stop_string_is_sent(server: Server, path: str) -> None:
    body = ask(path, "say:one two three four", stop=["o thr", "never"], max_tokens=50)
    assert streamed(server, path, body)[0] == ("one tw", None, "stop")
    assert whole(server, path, body)[0] == ("one tw", None, "stop")


@pytest.mark.parametrize("path", GENERATING)
def test_vllm_13087_a_long_stop_string_holds_back_only_live_prefixes(server: Server, path: str) -> None:
    text = "abcabcabc xyz"
    never = "abcabcabc" + "?" * 51
    chunks = events(server.post(path, ask(path, f"say:{text}", stop=[never], stream=True)))
    pieces = [
        (choice["delta"].get("content", "") if path == CHAT else choice["text"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is None
    ]
    if path == CHAT:
        assert pieces.pop(0) == ""  # the role
    assert "".join(pieces) == text
    assert "" not in pieces
    assert len(pieces) >= 4, "what follows the broken prefix comes token by token"


def test_exo_1691_emoji_come_whole_beside_others(server: Server) -> None:
    async def one(client: httpx.AsyncClient) -> str:
        response = await client.post(CHAT, json=ask(CHAT, "say:🙂🚀👩‍👩‍👧‍👦 é 日本語", stream=True))
        return "".join(choice["delta"].get("content", "") for chunk in events(response) for choice in chunk["choices"])

    async def four() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*[one(client) for _ in range(4)])

    assert asyncio.run(four()) == ["🙂🚀👩‍👩‍👧‍👦 é 日本語"] * 4


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ds4_815_half_a_character_is_still_valid_json(server: Server, path: str, count: int) -> None:
    for stream in (False, True):
        response = server.post(
            path, ask(path, "say:🙂", max_tokens=count, stream=stream, logprobs=True if path == CHAT else 1)
        )
        assert response.content.decode("utf-8", errors="strict")
        assert whole(server, path, ask(path, "say:🙂", max_tokens=count))[0][0] == "\ufffd"


@pytest.mark.parametrize("path", GENERATING)
def test_deepseek_recipe_16_a_held_tail_is_flushed_and_counted(server: Server, path: str) -> None:
    body = ask(path, "say:ab🙂", max_tokens=4)  # a, b, and half of the emoji
    assert whole(server, path, body)[0][0] == streamed(server, path, body)[0][0] == "ab\ufffd"
    assert server.post(path, body).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]], ids=str)
def test_vllm_7746_an_empty_prompt(server: Server, prompt: Any) -> None:
    refused(server.post(TEXT, {"prompt": prompt}), "prompt")
    works(server)


@pytest.mark.parametrize("path", GENERATING)
def test_vllm_19862_null_means_default(server: Server, path: str) -> None:
    with server.client() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatRequest" if path == CHAT else "CompletionRequest"]["properties"].keys()
    fields -= {"messages", "prompt"}
    assert {
        "max_tokens",
        "stop",
        "seed",
        "n",
        "logit_bias",
        "top_p",
        "stream_options",
        "tools",
        "response_format",
    } <= fields
    for field in fields:
        response = server.post(path, {**ask(path, "say:hi"), field: None})
        assert response.status_code == 200, (field, response.text)


@pytest.mark.parametrize("as_ids", [False, True])
def test_vllm_12600_a_prompt_of_ten_contexts(server: Server, as_ids: bool) -> None:
    prompt: Any = [97] * 10 * CONTEXT if as_ids else "a" * 10 * CONTEXT
    begin = time.monotonic()
    refused(server.post(TEXT, {"prompt": prompt}), "prompt", "context_length_exceeded")
    assert time.monotonic() - begin < 1
    with server.client() as client, client.stream("POST", TEXT, json={"prompt": "count", "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused(server.post(TEXT, {"prompt": prompt}), "prompt", "context_length_exceeded")
        assert any('"text"' in next(lines) for _ in range(20)), "the other stream goes on"
    refused(server.post(TEXT, {"prompt": "abc", "max_tokens": CONTEXT}), "max_tokens", "context_length_exceeded")
    message = server.post(TEXT, {"prompt": "abc", "max_tokens": CONTEXT}).json()["error"]["message"]
    assert all(str(number) in message for number in (3, CONTEXT, CONTEXT - 3)), message


@pytest.mark.parametrize("size", [5 << 20, 27 << 20])
def test_vllm_24910_health_answers_while_large_messages_are_refused(server: Server, size: int) -> None:
    body = json.dumps(ask(CHAT, "word " * (size // 5))).encode()

    times = []
    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(post_raw, server, CHAT, body)
        while not posting.done():
            begin = time.monotonic()
            with server.client() as client:
                assert client.get("/health").status_code == 200
            times.append(time.monotonic() - begin)
            time.sleep(0.02)
    response = posting.result()
    assert response.status_code in (400, 413)
    assert times and max(times) < 0.2


@pytest.mark.parametrize("path", GENERATING)
def test_vllm_4529_seeds(server: Server, path: str) -> None:
    for seed in (2**63, 2**64, -(2**63) - 1, 1.5, "7", True, 10**30):
        refused(server.post(path, {**ask(path, "say:hi"), "seed": seed}), "seed")
    for seed in (-1, 0, 2**63 - 1, -(2**63)):
        assert server.post(path, {**ask(path, "say:hi"), "seed": seed}).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "bias",
    [{"191222": -100, "99999": 5}, {"-1": 1}, {"abc": 1}, {"1": 1e9}, {"1": "NaN"}, {"1": True}, {"²": 1}, [1], 5],
)
def test_vllm_16529_logit_bias(server: Server, path: str, bias: Any) -> None:
    refused(server.post(path, {**ask(path, "say:hi"), "logit_bias": bias}), "logit_bias")
    works(server)


def test_vllm_16529_logit_bias_of_300k_entries(server: Server) -> None:
    refused(server.post(TEXT, {"prompt": "a", "logit_bias": {str(id): 1 for id in range(300_000)}}), "logit_bias")
    assert post_raw(server, TEXT, b'{"prompt":"a","logit_bias":{"1":NaN}}').status_code == 400


@pytest.mark.parametrize(
    "prompt", [[200000], [-1], [[1], [10**9]], [1.5], [True], [[1, True]], [2**70], [1, "a"], {}, 5], ids=str
)
def test_sglang_31908_token_ids_outside_the_vocabulary(server: Server, prompt: Any) -> None:
    refused(server.post(TEXT, {"prompt": prompt}), "prompt")
    with server.client() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("n", [0, -1, "2", True, 1.0, 129, 2**40])
def test_vllm_8548_n(server: Server, path: str, n: Any) -> None:
    refused(server.post(path, {**ask(path, "say:hi"), "n": n}), "n")


def test_sendnn_inference_542_top_k_above_the_vocabulary(tiny: Server) -> None:
    bodies = [
        {"prompt": "the fox", "temperature": 1, "top_k": 9999999},
        {"prompt": "the fox", "temperature": 1, "top_k": 2, "top_p": 0.5},
        {"prompt": "the fox", "temperature": 0},
        {"prompt": "the fox", "temperature": 1, "top_k": -1},
    ] * 3

    async def all_at_once() -> list[httpx.Response]:
        async with tiny.async_client() as client:
            return await asyncio.gather(
                *[client.post(TEXT, json={**body, "max_tokens": 8, "seed": 1}) for body in bodies]
            )

    responses = asyncio.run(all_at_once())
    assert {response.status_code for response in responses} == {200}
    texts = [response.json()["choices"][0]["text"] for response in responses]
    assert texts[0] == texts[3], "above the vocabulary is the whole vocabulary"


def test_vllm_3063_small_temperatures_are_greedy(tiny: Server) -> None:
    def text(temperature: float) -> str:
        body = {"prompt": "the quick brown", "temperature": temperature, "max_tokens": 16, "seed": 1}
        return tiny.post(TEXT, body).json()["choices"][0]["text"]

    greedy = text(0)
    assert greedy
    assert [text(temperature) for temperature in (1e-6, 1e-5, 1e-4, 1e-3)] == [greedy] * 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**12]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {}, "messages"),
        (TEXT, {}, "prompt"),
    ],
)
def test_vllm_17038_malformed_bodies(server: Server, path: str, body: Any, param: str) -> None:
    refused(server.post(path, body), param)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": 5}] * 3000},
        {"messages": [{"content": [{"kind": "x" * 100}] * 10}] * 500},
        {"messages": [{"role": "x" * 100_000, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "y" * 100_000}]}]},
    ],
    ids=["roles", "parts", "role", "type"],
)
def test_vllm_49239_an_error_never_echoes_the_request(server: Server, body: Any) -> None:
    refused(server.post(CHAT, body))


@pytest.mark.parametrize("text", [r"\ud83d", r"x \ude00 y", r"\udcf0", r"\ud83d\ud83d", r"\ud83d\u0041"])
@pytest.mark.parametrize(
    ("path", "template"),
    [
        (CHAT, '{"messages":[{"role":"user","content":"@"}]}'),
        (CHAT, '{"messages":[{"role":"system","content":"@"},{"role":"user","content":"a"}]}'),
        (CHAT, '{"messages":[{"role":"user","content":[{"type":"text","text":"@"}]}]}'),
        (CHAT, '{"messages":[{"role":"user","content":"a"}],"stop":["@"]}'),
        (CHAT, '{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"@"}}]}'),
        (TEXT, '{"prompt":"@"}'),
        (TEXT, '{"prompt":["a","@"]}'),
        ("/tokenize", '{"prompt":"@"}'),
    ],
)
def test_colibri_1589_unpaired_surrogates(server: Server, path: str, template: str, text: str) -> None:
    refused(post_raw(server, path, template.replace("@", text).encode()))


def test_colibri_1589_a_nul_character_is_a_character(server: Server) -> None:
    assert post_raw(server, "/tokenize", rb'{"prompt":"a\u0000b"}').json()["tokens"] == [97, 0, 98]
    assert (
        post_raw(server, CHAT, rb'{"messages":[{"role":"user","content":"\u0000"}],"max_tokens":1}').status_code == 200
    )


@pytest.mark.parametrize("stream", [False, True])
def test_sglang_5984_infinite_logprobs_are_valid_json(server: Server, tiny: Server, stream: bool) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    masked = {"logit_bias": {str(id): -100 for id in range(3, 300)}, "top_k": 1}
    for one, extra in ((server, {}), (tiny, masked)):
        body = ask(CHAT, "hello", logprobs=True, top_logprobs=20, max_tokens=3, stream=stream, **extra)
        response = one.post(CHAT, body)
        parts = response.text.split("data: ") if stream else [response.text]
        for part in parts:
            if part.strip() and "[DONE]" not in part:
                json.loads(part, parse_constant=no_constant)
    assert "-9999.0" in server.post(CHAT, ask(CHAT, "x", logprobs=True, top_logprobs=5, max_tokens=1)).text


@pytest.mark.parametrize(
    ("stream", "echo", "logprobs"), list(itertools.product([False, True], [False, True], [None, 2]))
)
def test_vllm_1967_echo_and_logprobs(tiny: Server, stream: bool, echo: bool, logprobs: int | None) -> None:
    prompt = "The quick brown fox"
    body = {"prompt": prompt, "echo": echo, "logprobs": logprobs, "max_tokens": 8, "temperature": 0}
    answer = streamed(tiny, TEXT, body) if stream else whole(tiny, TEXT, body)
    text, lists, _ = answer[0]
    assert text.startswith(prompt) == echo
    if logprobs is None:
        assert lists is None
        return
    count = len(lists["tokens"])
    assert count == len(lists["token_logprobs"]) == len(lists["text_offset"]) == len(lists["top_logprobs"])
    assert lists["text_offset"][0] == 0 and lists["text_offset"] == sorted(lists["text_offset"])
    assert (lists["token_logprobs"][0] is None) == echo
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)


def test_vllm_27300_alternatives_are_decoded_on_their_own(server: Server) -> None:
    """Pieces of characters have a name, and the sampled token is always among the alternatives of a completion."""
    answer = whole(server, TEXT, ask(TEXT, "say:“日🙂”", logprobs=5))[0][1]
    for token, top in zip(answer["tokens"], answer["top_logprobs"], strict=True):
        assert token in top
        assert all(top)
    content = whole(server, CHAT, ask(CHAT, "say:“日🙂”", logprobs=True, top_logprobs=5))[0][1]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).startswith("“日🙂”".encode())
    for entry in content:
        assert entry["token"] and all(other["token"] for other in entry["top_logprobs"])
        assert len(entry["top_logprobs"]) == 5


def test_sglang_30188_logprobs_stay_with_their_tokens_when_streamed(server: Server) -> None:
    body = ask(CHAT, "say:hello wörld", logprobs=True, top_logprobs=2, stop=["never", "wörldwide"])
    assert streamed(server, CHAT, body) == whole(server, CHAT, body)
    body = ask(TEXT, "say:hello wörld", logprobs=2, stop=["never", "wörldwide"])
    assert streamed(server, TEXT, body) == whole(server, TEXT, body)


@pytest.mark.parametrize("n", [1, 3])
def test_vllm_7262_usage_comes_once_and_last(server: Server, n: int) -> None:
    chunks = events(server.post(CHAT, ask(CHAT, "say:abc", n=n, stream=True, stream_options={"include_usage": True})))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4 * n


def test_litellm_28735_the_usage_chunk_has_no_choices_and_the_streams_identity(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    chunks = list(
        client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "say:abc"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == []
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


def test_rapid_mlx_461_legacy_completions(server: Server) -> None:
    assert whole(server, TEXT, ask(TEXT, "say:x", echo=True))[0][0] == "say:xx"
    assert whole(server, TEXT, ask(TEXT, "say:x", logprobs=3))[0][1]["tokens"][0] == "x"
    assert len({chunk["id"] for chunk in events(server.post(TEXT, ask(TEXT, "say:abc", stream=True)))}) == 1
    refused(server.post(TEXT, ask(TEXT, "a", n=0)), "n")
    for field, value in (("suffix", "b"), ("best_of", 0), ("response_format", {"type": "xml"})):
        refused(server.post(TEXT, ask(TEXT, "a", **{field: value})), field)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema", "schema": {}},
        {"type": "json_schema"},
        {"type": "xml"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": "not-a-type"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "["}}},
        "text",
        5,
    ],
    ids=str,
)
def test_vllm_35438_response_format(server: Server, value: Any) -> None:
    refused(server.post(CHAT, ask(CHAT, "a", response_format=value)), "response_format")
    deep: Any = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    refused(server.post(CHAT, ask(CHAT, "a", response_format=deep)))
    assert server.post(CHAT, ask(CHAT, "say:a", response_format={"type": "text"})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["prefill", "queued", "decoding"])
def test_llama_cpp_24496_and_atom_1562_a_client_that_leaves_ends_its_request(
    start: Callable[..., Server], when: str, stream: bool
) -> None:
    server = start(engine={"seconds": 0.05, "max_rows": 2, "blocks": 2000, "context": 30000})
    prompt = "count" + " " * (20000 if when == "prefill" else 10)  # 40 steps of 512 tokens
    body = {"prompt": prompt, "max_tokens": 4000, "ignore_eos": True, "stream": stream}

    async def leave() -> dict[str, float]:
        async with server.async_client() as client:
            requests = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(4 if when == "queued" else 1)]
            await asyncio.sleep(0.4)
            seen = server.metrics()
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
        return seen

    seen = asyncio.run(leave())
    assert seen["headway:requests_running"] >= 1 and seen["headway:kv_blocks_used"] > 0
    assert (seen["headway:requests_waiting"] >= 1) == (when == "queued")
    assert (seen["headway:generation_tokens_total"] == 0) == (when == "prefill")
    now = server.wait_idle(1.0)
    assert now['headway:requests_finished_total{finished_reason="abort"}'] == (4 if when == "queued" else 1)


def test_sendnn_inference_492_cancelling_among_min_tokens_and_penalties(tiny: Server) -> None:
    def body(number: int) -> dict[str, Any]:
        return {
            "prompt": f"number {number} jumps over the lazy dog",
            "min_tokens": 50,
            "max_tokens": 60,
            "temperature": 0,
            "presence_penalty": (number % 5 - 2) / 2,
            "frequency_penalty": (number % 3) / 2,
            "repetition_penalty": 1 + (number % 4) / 10,
        }

    rng = random.Random(492)

    async def one(client: httpx.AsyncClient, number: int) -> str | None:
        if number % 2:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.01, 0.15)):
                    await client.post(TEXT, json={**body(number), "max_tokens": 600, "min_tokens": 600})
            return None
        return (await client.post(TEXT, json=body(number))).json()["choices"][0]["text"]

    async def run() -> list[str | None]:
        async with tiny.async_client() as client:
            return await asyncio.gather(*[one(client, number) for number in range(16)])

    solo = {number: tiny.post(TEXT, body(number)).json()["choices"][0]["text"] for number in range(0, 16, 2)}
    for _ in range(3):
        texts = asyncio.run(run())
        same = sum(texts[number] == solo[number] for number in solo)
        assert same >= len(solo) - 1  # numpy's sums depend on the batch; ties may fall the other way
    tiny.wait_idle()


def test_vllm_40896_and_23138_the_same_prompt_cold_warm_and_among_strangers(tiny: Server) -> None:
    body = {"prompt": "the lazy dog jumps over " * 20, "temperature": 0, "max_tokens": 12, "logprobs": 1}
    answers = [tiny.post(TEXT, body).json() for _ in range(3)]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0 and cached[1] == cached[2] > 0

    async def among() -> list[dict[str, Any]]:
        async with tiny.async_client() as client:
            strangers = [{"prompt": f"{i} " * (5 * i + 1), "max_tokens": 20, "temperature": 1} for i in range(6)]
            tasks = [client.post(TEXT, json=one) for one in [*strangers, *[body] * 6]]
            return [response.json() for response in (await asyncio.gather(*tasks))[6:]]

    answers += asyncio.run(among())
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert len(set(texts)) == 1
    first = answers[0]["choices"][0]["logprobs"]["token_logprobs"]
    for answer in answers[1:]:
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(first, abs=1e-3)


def test_every_report_is_tested() -> None:
    reports = (
        "vllm 3574", "vllm 13087", "exo 1691", "ds4 815", "deepseek_recipe 16", "vllm 7746", "vllm 19862", "vllm 12600",
        "vllm 24910", "vllm 4529", "vllm 16529", "sglang 31908", "vllm 8548", "sendnn_inference 542", "vllm 3063",
        "vllm 17038", "vllm 49239", "colibri 1589", "sglang 5984", "vllm 1967", "vllm 27300", "sglang 30188",
        "vllm 7262", "litellm 28735", "rapid_mlx 461", "vllm 35438", "llama_cpp 24496", "atom 1562",
        "sendnn_inference 492", "vllm 40896", "23138", "vllm 42210", "lmdeploy 3412", "sglang 4700", "vllm 47903",
        "mlx_openai_server 205", "sglang 7639", "llama_cpp 16790", "vllm 45636", "vllm 50624", "sglang 20678",
    )  # fmt: skip
    names = [name for name in {**globals(), **vars(test_reported_tools)} if name.startswith("test_")]
    assert not [report for report in reports if not any(report.replace(" ", "_") in name for name in names)]
    assert len(reports) == 41
