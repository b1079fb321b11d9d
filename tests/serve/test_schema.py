"""Requests made from the OpenAPI document, valid and not: never a 500, 502 or 504, and a 503 only with Retry-After."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headway.serve.openapi import document
from tests.serve.conftest import Server

schema = schemathesis.openapi.from_dict(json.loads(document()))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=10,
)
SCHEMAS = json.loads(document())["components"]["schemas"]


def check(response: Any) -> None:
    assert response.status_code not in (500, 502, 504), response.text
    assert response.status_code != 503 or int(response.headers["retry-after"]) >= 1
    if response.status_code >= 400:
        body = json.loads(response.content)
        error = body["error"]
        if body.get("type") == "error":  # Anthropic's
            assert error["message"] and error["type"]
        elif isinstance(error, dict):
            assert error["message"] and {"type", "param", "code"} <= error.keys()
        else:  # Ollama's
            assert error
        assert len(response.content) < 4096


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_requests_made_from_the_document(case: Any, server: Server) -> None:
    case.headers = {name: value for name, value in case.headers.items() if name.lower() not in ("host", "origin")}
    if isinstance(case.body, dict) and "max_tokens" in case.body:
        case.body["max_tokens"] = 1 if case.body["max_tokens"] else case.body["max_tokens"]
    if isinstance(case.body, dict) and isinstance(case.body.get("options"), dict):
        case.body["options"]["num_predict"] = 1
    check(case.call(base_url=server.url, timeout=30))


@pytest.mark.parametrize(
    ("path", "kind", "base"),
    [
        ("/v1/messages", "MessagesRequest", {"model": "scripted", "messages": [{"role": "user", "content": "say:a"}]}),
        ("/v1/chat/completions", "ChatRequest", {"messages": [{"role": "user", "content": "say:a"}]}),
        ("/v1/completions", "CompletionRequest", {"prompt": "say:a"}),
        ("/tokenize", "TokenizeRequest", {"prompt": "a"}),
        ("/detokenize", "DetokenizeRequest", {"tokens": [1]}),
    ],
)
def test_one_field_at_a_time_with_any_value(server: Server, path: str, kind: str, base: dict[str, Any]) -> None:
    @settings(max_examples=150, deadline=None, database=None, phases=[Phase.generate])
    @given(st.sampled_from(sorted(SCHEMAS[kind]["properties"])), JSON)
    def one(field: str, value: Any) -> None:
        with server.client() as client:
            check(
                client.post(
                    path, json={"max_tokens": 1, **base, field: value} if path[1] == "v" else {**base, field: value}
                )
            )

    one()


def test_the_server_is_well_afterwards(server: Server) -> None:
    now = server.wait_idle(5)
    assert now["headway:up"] == 1
    assert server.post("/v1/completions", {"prompt": "say:ok"}).json()["choices"][0]["text"] == "ok"
