"""A fault inside a message, in every dialect: a 400 whose sentence begins with the message's index and the field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server

TEXT = {"type": "text", "text": "x"}
ROUTES = {
    "/v1/chat/completions": ("messages", {"max_tokens": 3}),
    "/v1/messages": ("messages", {"max_tokens": 3}),
    "/v1/responses": ("input", {"max_output_tokens": 16}),
    "/api/chat": ("messages", {"stream": False, "options": {"num_predict": 3}}),
}
# What the second message is -> the field that is at fault: of all dialects, and of those whose contents have parts.
EVERYWHERE: list[tuple[Any, str]] = [
    (None, ""),
    (5, ""),
    ("text", ""),
    ([], ""),
    ({"content": "x"}, ".role"),
    ({"role": 5, "content": "x"}, ".role"),
    ({"role": "king", "content": "x"}, ".role"),
    ({"role": "user", "content": 5}, ".content"),
    ({"role": "user", "content": {"a": 1}}, ".content"),
    ({"role": "user", "content": []}, ".content"),
]
IN_PARTS: list[tuple[Any, str]] = [
    ({"role": "user"}, ".content"),
    ({"role": "user", "content": None}, ".content"),
    ({"role": "user", "content": ["x"]}, ".content[0]"),
    ({"role": "user", "content": [TEXT, [TEXT]]}, ".content[1]"),
    ({"role": "user", "content": [{"text": "x"}]}, ".content[0].type"),
    ({"role": "user", "content": [TEXT, {"type": "text"}]}, ".content[1].text"),
    ({"role": "user", "content": [{"type": "text", "text": None}]}, ".content[0].text"),
    ({"role": "user", "content": [{"type": "text", "text": [TEXT]}]}, ".content[0].text"),
    ({"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "x"}}]}, ".content[1]"),
]


def sentence(server: Server, route: str, messages: Any) -> tuple[int, str]:
    field, others = ROUTES[route]
    answer = httpx.post(server.url + route, json={"model": "scripted", field: messages, **others})
    error = answer.json().get("error", "")
    return answer.status_code, error["message"] if isinstance(error, dict) else error


@pytest.mark.parametrize("route", ROUTES)
def test_a_fault_names_its_message_and_its_field(server: Server, route: str) -> None:
    field = ROUTES[route][0]
    good = {"role": "user", "content": "say:a"}
    for message, place in EVERYWHERE + ([] if route == "/api/chat" else IN_PARTS):
        status, said = sentence(server, route, [good, message])
        assert (status, said.partition(": ")[0]) == (400, f"{field}[1]{place}"), (message, said)
    assert sentence(server, route, [good])[0] == 200


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "/api/chat"])  # there it loads the model
def test_a_list_without_messages_is_refused(server: Server, route: str) -> None:
    assert sentence(server, route, []) == (400, f"{ROUTES[route][0]}: give 1 to 4096 messages")
