"""What OpenAI's API has at its edges, and vLLM's extensions of it: each field is honoured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from headway.core.step import TokenLogprobs
from headway.serve.logprobs import ShownTokens
from tests.serve.conftest import Server, events
from tests.serve.scripted import EOS, ByteTokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def complete(server: Server, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = server.post(TEXT, {"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_completion_has_16_tokens_by_default(server: Server) -> None:
    assert complete(server, "count")["usage"]["completion_tokens"] == 16
    full = complete(server, "count" + " " * 4083)  # the context has room for 8 more
    assert full["usage"]["completion_tokens"] == 8 and full["choices"][0]["finish_reason"] == "length"
    assert server.post(CHAT, ask("say:" + "a" * 40)).json()["usage"]["completion_tokens"] == 41


@pytest.mark.parametrize("text", ["say:Hällo 🙂 ok", "say:abEND", "babble", "say:\U0001f642END"])
@pytest.mark.parametrize("include", [False, True])
def test_logprobs_join_to_the_text(server: Server, text: str, include: bool) -> None:
    """No token that the text does not hold; streamed and not, on both routes."""
    fields = {"max_tokens": 20, "stop": ["END", "nothing"], "include_stop_str_in_output": include}
    chat = {**ask(text, logprobs=True), **fields}
    message = server.post(CHAT, chat).json()["choices"][0]
    joined, told = b"", ""
    for chunk in events(server.post(CHAT, {**chat, "stream": True})):
        choice = chunk["choices"][0]
        told += choice["delta"].get("content") or ""
        joined += b"".join(bytes(entry["bytes"]) for entry in (choice["logprobs"] or {"content": []})["content"])
        assert len(joined.decode(errors="ignore")) <= len(told)
    assert told == message["message"]["content"] == joined.decode(errors="replace")
    whole = complete(server, text, logprobs=0, **fields)["choices"][0]
    lists = whole["logprobs"]
    if all(not name.startswith("bytes:") for name in lists["tokens"]):
        assert "".join(lists["tokens"]) == whole["text"]
    assert len(lists["tokens"]) == len(lists["token_logprobs"]) == len(lists["text_offset"])


def position(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1)


def test_a_token_that_is_cut_keeps_what_is_shown_of_it() -> None:
    class Words(ByteTokenizer):
        def token_bytes(self, id: int, skip_special: bool = False) -> bytes:
            return {0: b" one", 1: b" two", 2: b"\xf0\x9f", 3: b"\x99\x82", EOS: b"" if skip_special else b"<eos>"}[id]

        def strip_after(self, prompt: Any) -> int:
            return 1

    shown = ShownTokens(Words(), (), True)
    assert [token.data for token in shown.push("one", [position(0)], False)] == [b"one"]
    assert shown.push("", [position(2)], False) == []
    assert [token.data for token in shown.push("🙂", [position(3)], False)] == [b"\xf0\x9f", b"\x99\x82"]
    assert shown.push("", [position(1)], False) == []
    assert [token.data for token in shown.push(" t", [position(EOS)], True)] == [b" t"]


def test_stop_strings_and_stop_ids_in_the_output(server: Server) -> None:
    for stream in (False, True):
        fields = {"stop": ["cd"], "include_stop_str_in_output": True, "stream": stream}
        answer = server.post(TEXT, {"prompt": "say:abcdef", **fields})
        pieces = events(answer) if stream else [answer.json()]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "abcd"
    ids = {"stop_token_ids": [ord("c")]}
    assert complete(server, "say:abcdef", **ids)["choices"][0]["text"] == "ab"
    assert complete(server, "say:abcdef", include_stop_str_in_output=True, **ids)["choices"][0]["text"] == "abc"


def test_control_tokens_by_name(server: Server) -> None:
    fields = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(server, "say:a", **fields)["choices"][0]["text"] == "a<eos>"
    assert complete(server, "say:a", skip_special_tokens=False)["choices"][0]["text"] == "a"


def test_usage_in_each_event(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = events(server.post(CHAT, ask('say:a"usage":null}', stream=True, stream_options=options)))
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == 'a"usage":null}'


def test_prompt_logprobs(server: Server) -> None:
    answer = complete(server, "say:hi", prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert answer[0] is None and len(answer) == len("say:hi")
    entry = answer[1][str(ord("a"))]
    assert entry["decoded_token"] == "a" and entry["rank"] == 1 and math.isfinite(entry["logprob"])
    chat = server.post(CHAT, ask("say:hi", prompt_logprobs=0)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    for fields in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True}):
        assert server.post(TEXT, {"prompt": "a", **fields}).json()["error"]["param"] == "prompt_logprobs"


def test_only_the_end_of_a_prompt(server: Server) -> None:
    answer = complete(server, "count say:hi", truncate_prompt_tokens=6, echo=True)
    assert answer["choices"][0]["text"] == "say:hihi" and answer["usage"]["prompt_tokens"] == 6
    chat = server.post(CHAT, ask("count", truncate_prompt_tokens=9)).json()
    assert chat["usage"]["prompt_tokens"] == 9
    for wrong in (0, -2):
        refused = server.post(TEXT, {"prompt": "a", "truncate_prompt_tokens": wrong}).json()
        assert refused["error"]["param"] == "truncate_prompt_tokens"


def test_variables_of_the_template_come_from_the_request(server: Server, tiny: Server) -> None:
    assert server.post(CHAT, ask("say:hi", chat_template_kwargs={"enable_thinking": False})).status_code == 200
    for reserved in ({"messages": []}, {"tokenize": True, "add_generation_prompt": False}, {"a b": 1}):
        refused = tiny.post(CHAT, ask("hi", chat_template_kwargs=reserved))
        assert refused.status_code == 400, refused.text


def test_tokens_that_are_not_to_be_drawn(tiny: Server) -> None:
    """On a real model: nothing but what is allowed, and no bad word, at any temperature."""
    fields = {"prompt": "The fox", "max_tokens": 24, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    allowed = tiny.post("/tokenize", {"prompt": " the fox jumps", "add_special_tokens": False}).json()["tokens"]
    answer = complete(tiny, allowed_token_ids=allowed, logprobs=0, **{**fields, "prompt": "The fox"})
    ids = tiny.post("/tokenize", {"prompt": answer["choices"][0]["text"], "add_special_tokens": False}).json()["tokens"]
    assert answer["usage"]["completion_tokens"] == 24 and ids
    names = {tiny.post("/detokenize", {"tokens": [id]}).json()["prompt"] for id in allowed}
    assert set(answer["choices"][0]["logprobs"]["tokens"]) <= names
    free = complete(tiny, **{**fields, "temperature": 0}, logprobs=0)["choices"][0]
    first = free["logprobs"]["tokens"][0]
    assert not first.startswith("bytes:")
    held = complete(tiny, **{**fields, "temperature": 0}, logprobs=0, bad_words=[first])["choices"][0]
    assert first not in held["logprobs"]["tokens"]
    for wrong in ({"allowed_token_ids": []}, {"allowed_token_ids": [10**6]}, {"bad_words": [""]}):
        refused = tiny.post(TEXT, {**fields, **wrong})
        assert refused.json()["error"]["param"] == next(iter(wrong)), refused.text


def test_top_p_of_0_is_greedy(tiny: Server) -> None:
    fields = {"prompt": "The fox", "max_tokens": 12}
    greedy = complete(tiny, **fields, temperature=0)["choices"][0]["text"]
    assert complete(tiny, **fields, top_p=0, temperature=1.7, seed=5)["choices"][0]["text"] == greedy


def test_a_fields_name_that_is_not_known_is_told_not_refused(server: Server, start: Callable[..., Server]) -> None:
    body = ask("say:hi", anything=1, stream_options=None, other=None)
    answer = server.post(CHAT, body)
    assert answer.status_code == 200 and answer.headers["x-headway-ignored"] == "anything"
    options = {"include_usage": True, "new": 1}
    streamed = server.post(CHAT, {**ask("say:hi"), "stream": True, "stream_options": options, "a\nb": 1})
    assert streamed.headers["x-headway-ignored"] == "(a name that no header may have), stream_options.new"
    ollama = {"model": "scripted", "messages": body["messages"], "options": {"wat": 1}, "stream": False}
    assert server.post("/api/chat", ollama).headers["x-headway-ignored"] == "options.wat"
    assert "x-headway-ignored" not in server.post(CHAT, ask("say:hi", other=None)).headers
    many = server.post(CHAT, ask("say:hi", **{f"f{number:02}": 1 for number in range(40)}))
    assert many.headers["x-headway-ignored"].endswith("f15, (and 24 more)")
    long = server.post(CHAT, ask("say:hi", **{"x" * 100_000: 1}))
    assert long.status_code == 200 and len(long.headers["x-headway-ignored"]) < 50
    strict = start(strict=True)
    refused = strict.post(CHAT, body)
    assert refused.status_code == 400
    assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == ("anything", "unknown_field")
    assert strict.post(CHAT, ask("say:hi", other=None)).status_code == 200


def test_errors_have_openais_types(server: Server, start: Callable[..., Server], tmp_path: Any) -> None:
    def error(response: httpx.Response) -> tuple[Any, ...]:
        return response.status_code, response.json()["error"]["type"], response.json()["error"]["code"]

    assert error(server.post(CHAT, ask("a", model="x"))) == (404, "invalid_request_error", "model_not_found")
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    locked = start(api_key_file=str(keys))
    assert error(locked.post(CHAT, ask("a"))) == (401, "invalid_request_error", "invalid_api_key")


def test_the_trained_context_is_told(tiny: Server) -> None:
    with tiny.client() as client:
        model = client.get("/v1/models/tiny").json()
    assert model["meta"]["n_ctx_train"] == 1024


def test_refusals_in_a_conversation(server: Server) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    turns: Any = [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "say:ok"},
    ]
    assert sdk.chat.completions.create(model="scripted", messages=turns).choices[0].message.content == "ok"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": HELLO, "thinking_token_budget": -1}, "thinking_token_budget"),
        (CHAT, {"messages": HELLO, "bad_words": ["x" * 80]}, "bad_words"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "stop_sequences": [""]}, "stop_sequences"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": -1}, "max_output_tokens"),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("/api/generate", {"prompt": "hi", "options": {"stop": [""]}}, "options.stop"),
    ],
)
def test_a_field_is_blamed_by_the_name_its_client_wrote(
    tiny: Server, path: str, body: dict[str, Any], field: str
) -> None:
    answer = tiny.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error if isinstance(error, str) else error["message"]).startswith(f"{field}: ")
