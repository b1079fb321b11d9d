"""What the generating routes answer: whole or streamed, one choice or many, with and without extras."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from tests.serve.conftest import Server, events
from tests.serve.scripted import BABBLE, CONTEXT, ByteTokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(path: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    return (
        {"messages": [{"role": "user", "content": prompt}], **fields} if path == CHAT else {"prompt": prompt, **fields}
    )


def whole(server: Server, path: str, body: dict[str, Any]) -> dict[int, tuple[str, Any, str]]:
    """index -> text, logprobs, finish reason."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return {
        choice["index"]: (
            choice["message"]["content"] if path == CHAT else choice["text"],
            choice["logprobs"],
            choice["finish_reason"],
        )
        for choice in response.json()["choices"]
    }


def streamed(server: Server, path: str, body: dict[str, Any]) -> dict[int, tuple[str, Any, str]]:
    """The same, put together from a stream."""
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    for chunk in events(server.post(path, {**body, "stream": True})):
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "nothing follows the finish reason"
            texts[index] += (choice["delta"].get("content") or "") if path == CHAT else choice["text"]
            logprobs[index] = _add(logprobs.get(index), choice["logprobs"])
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    return {index: (texts[index], logprobs[index], reasons[index]) for index in reasons}


def _add(so_far: Any, piece: Any) -> Any:
    if so_far is None or piece is None:
        return so_far or piece
    return {name: None if piece[name] is None else so_far[name] + piece[name] for name in piece}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 3},
        {"logprobs": True, "n": 2},
        {"stop": ["back\n", "never"]},
        {"stop": "日本", "logprobs": True},
        {"max_tokens": 1},
        {"max_tokens": 2, "logprobs": True},  # ends within a character
    ],
    ids=str,
)
def test_chat_streams_what_it_answers_whole(server: Server, fields: dict[str, Any]) -> None:
    body = ask(CHAT, "hello", **{"max_tokens": 80, **fields})
    assert streamed(server, CHAT, body) == whole(server, CHAT, body)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("prompt", ["hello", ["one", "two é"], [104, 105], [[104, 105], [0xF0, 0x9F]]], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_completions_stream_what_they_answer_whole(
    server: Server, echo: bool, logprobs: int | None, prompt: Any, n: int
) -> None:
    body = ask(TEXT, prompt, max_tokens=60, echo=echo, logprobs=logprobs, n=n)
    answer = whole(server, TEXT, body)
    assert streamed(server, TEXT, body) == answer
    prompts = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert sorted(answer) == list(range(prompts * n))


def test_an_index_is_the_prompts_times_n_plus_the_choices(server: Server) -> None:
    answer = whole(server, TEXT, {"prompt": ["say:A", "say:B"], "n": 2})
    assert [answer[index][0] for index in range(4)] == ["A", "A", "B", "B"]


def test_a_long_prompt_is_echoed_with_all_its_logprobs(server: Server) -> None:
    prompt = "x" * 1500  # three chunks of a step's budget
    body = ask(TEXT, prompt, max_tokens=3, echo=True, logprobs=1)
    text, logprobs, _ = whole(server, TEXT, body)[0]
    assert text.startswith(prompt)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 1503
    assert streamed(server, TEXT, body)[0][:2] == (text, logprobs)


@pytest.mark.parametrize(
    ("prompt", "limit", "reason"), [("say:hi", 10, "stop"), ("babble", 10, "length"), ("say:hi", 3, "stop")]
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_finish_reasons(server: Server, path: str, prompt: str, limit: int, reason: str) -> None:
    assert whole(server, path, ask(path, prompt, max_tokens=limit))[0][2] == reason


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_counts_a_prompt_once_and_every_generated_token(server: Server, path: str) -> None:
    body = ask(path, "say:abc", n=3)
    usage = server.post(path, body).json()["usage"]
    prompt = len(ByteTokenizer().encode(ByteTokenizer().render(body["messages"]))) if path == CHAT else len("say:abc")
    assert usage["prompt_tokens"] == prompt
    assert usage["completion_tokens"] == 3 * len("abc" + "\0")  # the end-of-sequence id is generated too
    assert usage["total_tokens"] == prompt + 12


def test_cached_tokens_are_counted_on_the_second_time(server: Server) -> None:
    body = {"prompt": "a prompt that is new to this server " * 8, "max_tokens": 1}
    cached = [server.post(TEXT, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] == (36 * 8 - 1) // 16 * 16


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 3])
def test_a_streams_chunks_agree_on_id_and_time_and_only_the_last_has_usage(server: Server, path: str, n: int) -> None:
    chunks = events(server.post(path, ask(path, "say:abc", n=n, stream=True, stream_options={"include_usage": True})))
    for field in ("id", "created", "model", "object"):
        assert len({chunk[field] for chunk in chunks}) == 1, field
    *others, last = chunks
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4 * n
    assert last["object"] == ("chat.completion.chunk" if path == CHAT else "text_completion")


def test_without_include_usage_chunks_have_no_usage(server: Server) -> None:
    assert all("usage" not in chunk for chunk in events(server.post(CHAT, ask(CHAT, "say:abc", stream=True))))


def test_the_first_chunk_of_a_chat_choice_has_the_role_and_the_last_an_empty_delta(server: Server) -> None:
    first, *_, last = events(server.post(CHAT, ask(CHAT, "say:abc", stream=True)))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_events_cannot_be_cut_by_line_splitters(server: Server) -> None:
    """Reported t2-012: The text holds U+2028, U+2029 and a vertical tab, which some clients take for line ends."""
    body = server.post(CHAT, ask(CHAT, "babble", max_tokens=len(BABBLE), stream=True)).content.decode()
    assert all(line.startswith("data: ") for line in body.splitlines() if line)


def test_absent_max_tokens_is_the_rest_of_the_context(server: Server) -> None:
    prompt = [104] * (CONTEXT - 10)
    answer = server.post(TEXT, {"prompt": prompt}).json()
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi"}, {"role": "developer", "content": "Be brief."}],
    ],
)
def test_the_developer_role_becomes_one_system_message_in_front(server: Server, messages: list[dict[str, str]]) -> None:
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert tokens == ByteTokenizer().encode(ByteTokenizer().render(plain))


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_assistants_turn_may_be_empty(server: Server, content: Any) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "refusal": None},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    plain = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", ""), ("user", "b\nc"))]
    assert tokens == ByteTokenizer().encode(ByteTokenizer().render(plain))


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    answer = server.post("/tokenize", {"prompt": "naïve 🙂"}).json()
    assert answer == {"count": len("naïve 🙂".encode()), "max_model_len": CONTEXT, "tokens": list("naïve 🙂".encode())}
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "naïve 🙂"}
    control = server.post("/tokenize", {"prompt": "<|im_start|>a<|im_end|>"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": control}).json() == {"prompt": "<|im_start|>a<|im_end|>"}


def test_models(server: Server) -> None:
    with server.client() as client:
        model = client.get("/v1/models/scripted").json()
        listed = client.get("/v1/models").json()
        assert (listed["object"], listed["data"]) == ("list", [model])
        assert model["id"] == "scripted"
        assert model["max_model_len"] == model["meta"]["n_ctx_train"] == CONTEXT
        missing = client.get("/v1/models/org/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models", "/v1/models//"])
def test_bases_with_a_slash_too_many_work(server: Server, path: str) -> None:
    with server.client() as client:
        assert client.get(server.url + path).json()["object"] == "list"
        assert client.head("/").status_code == 200 and "running" in client.get("/").text


def test_t2_013_each_choice_ends_once_with_its_own_index(tiny: Server) -> None:
    """Choices that end at different times, on both routes, with log-probabilities."""
    fields = {"n": 4, "temperature": 1, "seed": 7, "stop": ["e", "t"], "max_tokens": 12}
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2, **fields}),
        (TEXT, {"prompt": ["Hi", "Ho"], "logprobs": 2, **fields, "n": 2}),
    ):
        whole = tiny.post(path, body).json()
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *pieces, usage = events(tiny.post(path, body))
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        ends = []
        for index, expected in enumerate(whole["choices"]):
            mine = [choice for piece in pieces for choice in piece["choices"] if choice["index"] == index]
            (end,) = [place for place, choice in enumerate(mine) if choice["finish_reason"]]
            assert end == len(mine) - 1 and mine[end]["finish_reason"] == expected["finish_reason"]
            ends.append(next(at for at, piece in enumerate(pieces) if piece["choices"][0] is mine[end]))
            tokens = [choice["logprobs"] for choice in mine if choice.get("logprobs")]
            if path == CHAT:
                assert sum("role" in choice["delta"] for choice in mine) == 1
                assert [one for each in tokens for one in each["content"]] == expected["logprobs"]["content"]
            else:
                assert "".join(choice["text"] for choice in mine) == expected["text"]
                assert [one for each in tokens for one in each["tokens"]] == expected["logprobs"]["tokens"]
        assert max(ends) - min(ends) > 3, "who is done does not wait for the others"


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65, 320])
def test_t2_026_a_repeated_prompt_is_cached_up_to_its_last_block(tiny: Server, count: int) -> None:
    prompt = [7 + (index * 31 + count) % 200 for index in range(count)]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    answers = [tiny.post(TEXT, body).json() for _ in range(2)]
    answers += [tiny.post(TEXT, {**body, "temperature": 1, "top_p": 0.5}).json()]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, *[(count - 1) // 32 * 32] * 2]


def test_the_document_lists_exactly_the_routes(server: Server) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"} < set(document["paths"])
    assert (
        json.dumps(document).count('"additionalProperties": false') >= 4
    )  # unknown fields are refused, and it says so


def test_every_answer_has_a_request_id_and_keeps_the_clients(server: Server) -> None:
    with server.client() as client:
        assert client.get("/version").headers["x-request-id"].startswith("req-")
        assert client.get("/nowhere", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert client.get("/version", headers={"x-request-id": "no blanks"}).headers["x-request-id"].startswith("req-")
