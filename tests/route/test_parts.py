"""What the router reads: bodies, metrics of three engines, and answers that are none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headway.client.upstream import Upstream, UpstreamError
from headway.core.errors import BadInput
from headway.routing.index import USUAL_BLOCKS
from headway.serve.route.fleet import CAPACITY, MOST_BLOCKS, reported
from headway.serve.route.prompts import PromptNames

OURS = """headway:requests_running{model_name="m"} 3
vllm:num_requests_running{model_name="m"} 3
headway:requests_waiting{model_name="m"} 2
vllm:num_requests_waiting{model_name="m"} 2
vllm:cache_config_info{model_name="m",block_size="32",num_gpu_blocks="500",num_cpu_blocks="0"} 1
"""
VLLM = """vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",x="y"} 1.0
"""
TURNED = 'vllm:cache_config_info{num_gpu_blocks="1000",block_size="64"} 1.0\n'
SGLANG = """sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 5.0
sglang:max_total_num_tokens{model_name="m"} 64000.0
"""


@pytest.mark.parametrize(
    ("text", "requests", "blocks"),
    [
        (OURS, 5, 500), (VLLM, 8, 500), (TURNED, 0, 2000), (SGLANG, 9, 2000), ("", 0, USUAL_BLOCKS),
        ("sglang:max_total_num_tokens 1e30\n", 0, MOST_BLOCKS), ("vllm:num_requests_running -4\n", 0, USUAL_BLOCKS),
    ],
)  # fmt: skip
def test_metrics_of_every_engine_are_read(text: str, requests: int, blocks: int) -> None:
    assert reported(text) == (requests, blocks)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "inf", "nan"])
def test_figures_that_are_no_numbers_count_as_not_said(value: str) -> None:
    text = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 3\n{CAPACITY} {value}\n"
    assert reported(text) == (3, USUAL_BLOCKS)


NAMES = PromptNames()
SAID = [{"role": "system", "content": "rules " * 100}, {"role": "user", "content": "a question " * 40}]


def names(body: Any, namespace: str = "", raw: bytes | None = None) -> list[bytes]:
    data = raw if raw is not None else json.dumps(body).encode()
    return list(NAMES.request("id", data, namespace, "", None, True).names)


def common(one: list[bytes], other: list[bytes]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"messages": SAID}, {"messages": [*SAID, {"role": "assistant", "content": "yes"}, SAID[1]], "temperature": 1}),
        ({"prompt": "x" * 1000}, {"prompt": "x" * 1000 + "y" * 500, "max_tokens": 3}),
        ({"prompt": list(range(500))}, {"prompt": list(range(700))}),
        ({"system": "s" * 500, "messages": SAID}, {"messages": [*SAID, SAID[1]], "system": "s" * 500}),
        ({"input": SAID, "instructions": "i" * 300}, {"input": [*SAID, SAID[1]], "instructions": "i" * 300}),
    ],
)
def test_a_conversation_that_goes_on_begins_with_the_same_blocks(first: Any, then: Any) -> None:
    before, after = names(first), names(then)
    assert len(before) >= 7 and common(before, after) == len(before) < len(after)


@pytest.mark.parametrize("change", [{"model": "other"}, {"tools": [{"name": "f"}]}, {"messages": SAID[1:]}])
def test_what_changes_the_cache_changes_the_blocks(change: dict[str, Any]) -> None:
    assert common(names({"messages": SAID}), names({"messages": SAID, **change})) == 0


def test_keys_share_nothing() -> None:
    assert common(names({"messages": SAID}, "one"), names({"messages": SAID}, "other")) == 0


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"text"', b"\xff", b'{"messages": 3}'])
def test_what_is_no_prompt_has_no_blocks(raw: bytes) -> None:
    assert names(None, raw=raw) == []


@pytest.mark.parametrize(
    ("body", "header", "session"),
    [
        ({"user": "u"}, "", "u"), ({"user": "u", "prompt_cache_key": "k"}, "", "k"), ({"user": "u"}, "h", "h"),
        ({"user": 3}, "", ""), ({}, "", ""),
    ],
)  # fmt: skip
def test_sessions_are_found(body: dict[str, Any], header: str, session: str) -> None:
    assert NAMES.request("id", json.dumps(body).encode(), "", header, None, True).session == session


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://", "http://host:99999", "http://h/?a=b", "http://[::1",
                                 "http://me:secret@host"])  # fmt: skip
def test_what_is_no_replica_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="--replica"):
        Upstream(url)


SECOND = b"HTTP/1.1 404 No\r\ncontent-length: 5\r\nx-evil: 1\r\n\r\nEVIL!"
Talk = Callable[[Upstream], Awaitable[Any]]


def against(answer: bytes, talk: Talk, folder: Path) -> Any:
    """What `talk` finds at a server that says `answer` to each request, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def both() -> Any:
        path = folder / "socket"
        server = await asyncio.start_unix_server(serve, str(path))
        async with server:
            upstream = Upstream(f"unix:{path}")
            try:
                return await talk(upstream)
            finally:
                upstream.close()

    return asyncio.run(both())


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n", 404, b"no"),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", 200, b"to the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n!", 200, b"!"),
        # A second answer that nobody asked for, in the same piece.
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" + SECOND, 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + SECOND, 200, b"ok"),
    ],
)
def test_answers_are_read(answer: bytes, status: int, body: bytes, tmp_path: Path) -> None:
    assert against(answer, lambda upstream: upstream.get(b"/"), tmp_path) == (status, body)


@pytest.mark.parametrize(
    ("answer", "began", "says"),
    [
        (b"", False, "closed before the answer"), (b"hello\r\n\r\n", False, "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", True, "closed before the answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", False, "head is too large"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n" + b"x" * 999, True, "more than 100 bytes"),
    ],
)  # fmt: skip
def test_answers_that_are_none_are_told_apart(answer: bytes, began: bool, says: str, tmp_path: Path) -> None:
    with pytest.raises(UpstreamError, match=says) as caught:
        against(answer, lambda upstream: upstream.get(b"/", most=100), tmp_path)
    assert caught.value.began == began and caught.value.connected


def test_nobody_there_is_told_apart_too() -> None:
    with pytest.raises(UpstreamError, match="cannot be reached") as caught:
        asyncio.run(Upstream("unix:/nowhere/at/all").get(b"/"))
    assert not caught.value.connected
