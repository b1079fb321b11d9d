"""Real clients: openai, langchain-openai, and our own, against the scripted model and against a real one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from headway.client.chat import Client, ServerError
from headway.client.watch import parse, view
from headway.core.errors import BadInput
from headway.model.source import DEFAULT_MODEL, asked_as
from tests.serve.conftest import Server

USER: Any = [{"role": "user", "content": "say:Hällo 🙂"}]


@pytest.fixture
def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="scripted", messages=USER, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "Hällo 🙂"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None


def test_openai_chat_stream(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="scripted", messages=USER, stream=True, n=2, stream_options={"include_usage": True}
    )
    texts, usage = ["", ""], None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == ["Hällo 🙂"] * 2
    assert usage is not None and usage.completion_tokens == 2 * (len("Hällo 🙂".encode()) + 1)


def test_openai_stream_helper(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="scripted", messages=USER) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hällo 🙂"
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(model="scripted", messages=USER, max_tokens=2)


def test_openai_completions(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="scripted", prompt=["say:a", "say:b"], echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["say:aa", "say:bb"]
    stream = sdk.completions.create(model="scripted", prompt="say:abc", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc"


def test_openai_raw_response(sdk: openai.OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(model="scripted", messages=USER)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == "Hällo 🙂"


def test_openai_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["scripted"]
    assert sdk.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_a_model_answers_to_the_short_name_that_it_was_served_by(start: Callable[..., Server]) -> None:
    sdk = openai.OpenAI(base_url=f"{start(also=['demo']).url}/v1", api_key="none", max_retries=0)
    for name in ("scripted", "demo"):
        answer = sdk.chat.completions.create(model=name, messages=USER)
        assert (answer.model, answer.choices[0].message.content) == ("scripted", "Hällo 🙂")
        assert sdk.models.retrieve(name).id == "scripted"
    assert [model.id for model in sdk.models.list()] == ["scripted"]
    with pytest.raises(openai.NotFoundError, match="this server has 'scripted' only"):
        sdk.chat.completions.create(model="demo2", messages=USER)


@pytest.mark.parametrize(
    ("source", "names"),
    [(DEFAULT_MODEL, ("demo",)), ("demo", ("demo",)), ("qwen2.5-0.5b", ("qwen2.5-0.5b",)), ("./model.gguf", ())],
)
def test_what_a_source_is_also_called(source: str, names: tuple[str, ...]) -> None:
    assert asked_as(source) == names


def test_openai_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="scripted", messages=USER, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.APIError, match="a scripted failure"):
        list(sdk.completions.create(model="scripted", prompt="fail", stream=True))


def test_openai_leaving_a_stream_frees_it(sdk: openai.OpenAI, server: Server) -> None:
    stream = sdk.completions.create(model="scripted", prompt="count", max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_idle()


def test_openai_async(server: Server) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:

            async def one(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"say:{number}"}]
                stream = await sdk.chat.completions.create(model="scripted", messages=messages, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[one(number) for number in range(20)])

    assert asyncio.run(run()) == [str(number) for number in range(20)]


def test_langchain(server: Server) -> None:
    model = ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="scripted", stream_usage=True)
    answer = model.invoke("say:Hällo 🙂")
    assert answer.content == "Hällo 🙂"
    assert answer.usage_metadata is not None
    chunks = list(model.stream([("system", "Be brief."), ("human", "say:abc")]))
    assert "".join(str(chunk.content) for chunk in chunks) == "abc"
    assert chunks[-1].usage_metadata or any(chunk.usage_metadata for chunk in chunks)


def test_headway_client(server: Server) -> None:
    client = Client(f"{server.url}/v1")
    assert client.models() == ["scripted"]
    pieces = list(client.stream_chat(USER))
    assert "".join(piece.text for piece in pieces) == "Hällo 🙂"
    assert pieces[-1].usage is not None and pieces[-2].finish_reason == "stop"
    with pytest.raises(ServerError, match="temperature"):
        next(client.stream_chat(USER, temperature=-1))
    with pytest.raises(ServerError, match="a scripted failure"):
        list(client.stream_chat([{"role": "user", "content": "fail"}]))
    with pytest.raises(ServerError, match="cannot reach"):
        Client("http://127.0.0.1:1").models()
    with pytest.raises(BadInput, match="--url"):
        Client("ftp://somewhere")


def test_top_sees_what_happened_in_between(server: Server) -> None:
    client = Client(server.url)
    before = parse(client.metrics(), 10.0)
    server.post("/v1/completions", {"prompt": "count", "max_tokens": 40})
    now = view(before, parse(client.metrics(), 12.0))
    assert now.output_rate == 20 and now.prompt_rate == 2.5
    assert now.model == "scripted" and now.running == now.waiting == 0
    assert 0 < now.ttft[0] <= now.ttft[2] and 0 < now.itl[0] <= now.itl[2]
    assert math.isnan(view(before, before).ttft[0])


def test_a_real_model_answers_the_same_whole_streamed_and_again(tiny: Server) -> None:
    sdk = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "developer", "content": "Be quick."}, {"role": "user", "content": "The fox 🎉"}]
    for temperature in (0.0, 0.8):
        fields: Any = {"model": "tiny", "messages": messages, "temperature": temperature, "seed": 3, "max_tokens": 24}
        whole = sdk.chat.completions.create(**fields).choices[0].message.content
        stream = sdk.chat.completions.create(**fields, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
        again = sdk.chat.completions.create(**fields, n=2).choices
        assert again[0].message.content == whole
        assert (again[1].message.content == whole) == (temperature == 0)


HI = {"role": "user", "content": "say:hi"}
SAY_HI = {"type": "text", "text": "say:hi"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{**HI, "id": 123, "opts": {"visible": True}}]},  # CodeCompanion
        {
            "messages": [HI],
            "tool_ids": None,
            "chat_id": "a",
            "session_id": "b",
            "features": {},
            "id": "c",
        },  # Open WebUI
        {"messages": [{**HI, "content": [{"type": "text", "text": "say:hi", "cache_control": {"type": "ephemeral"}}]}]},
        {"messages": [HI], "typical_p": 1, "mirostat_mode": 0, "top_a": 0, "tfs": 1},  # SillyTavern
        {"messages": [HI], "parallel_tool_calls": True, "anything": None},  # LangChain
        {"messages": [{**HI, "name": None, "refusal": None, "audio": None, "tool_calls": [], "function_call": None}]},
        {"messages": [HI], "response_format": {"type": "text"}},  # Dify
        {  # Continue
            "messages": [{"role": "system", "content": "Be an agent."}, {**HI, "content": [SAY_HI]}],
            "model": "scripted",
            "temperature": 0.2,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "stop": ["<|im_end|>"],
            "parallel_tool_calls": False,
            "prediction": None,
            "tools": None,
        },
        {  # Open WebUI's titles, in the background
            "messages": [HI],
            "model": "scripted",
            "max_completion_tokens": 2,
            "stream": False,
            "seed": None,
            "metadata": {"task": "title_generation", "task_body": {"chat_id": "a"}, "chat_id": "a"},
            "params": {},
            "tool_servers": [],
            "background_tasks": {"title_generation": True},
        },
        {  # LiteLLM
            "messages": [HI],
            "model": "scripted",
            "extra_body": {},
            "metadata": {},
            "user": "a",
            "drop_params": True,
        },
    ],
    ids=str,
)
def test_what_popular_clients_send(server: Server, body: dict[str, Any]) -> None:
    """Reported t2-047."""
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize("field", [{"mirostat": 2}, {"typical_p": 0.5}])
def test_what_would_change_the_answer_is_never_ignored(server: Server, field: dict[str, Any]) -> None:
    """Reported t2-047."""
    refused = server.post("/v1/chat/completions", {"messages": [HI], **field})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(field))


@pytest.mark.parametrize("batched", [False, True])
def test_what_lm_eval_sends_to_score_a_continuation(tiny: Server, batched: bool) -> None:
    """Its `local-completions`: the log-probabilities of the prompt, and whether greedy decoding would give it."""
    ids = tiny.post("/tokenize", {"prompt": "The quick brown fox jumps"}).json()["tokens"]
    body = {"model": "tiny", "prompt": [ids, ids[:-1]] if batched else [ids], "temperature": 0, "max_tokens": 1,
            "logprobs": 1, "seed": 1234, "echo": True}  # fmt: skip
    choices = tiny.post("/v1/completions", body).json()["choices"]
    for choice, prompt in zip(choices, (ids, ids[:-1]), strict=False):
        lists = choice["logprobs"]
        assert len(lists["token_logprobs"]) - 1 == len(prompt) == len(lists["tokens"]) - 1
        scored = lists["token_logprobs"][1:-1]
        greedy = [max(top.values()) == own for own, top in zip(scored, lists["top_logprobs"][1:-1], strict=True)]
        assert sum(scored) < 0 and len(greedy) == len(prompt) - 1


def test_an_echo_has_an_entry_for_what_was_generated_even_if_it_ended_there(server: Server) -> None:
    body = {"prompt": "say:", "echo": True, "logprobs": 1, "max_tokens": 1}
    lists = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert "".join(lists["tokens"]) == "say:" and len(lists["token_logprobs"]) == len("say:") + 1


def test_what_lm_eval_sends_to_generate(tiny: Server) -> None:
    body = {"model": "tiny", "prompt": ["The fox", "A dog"], "max_tokens": 8, "temperature": 0, "seed": 1234,
            "stop": ["\n", "<|im_end|>"]}  # fmt: skip
    answer = tiny.post("/v1/completions", body)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
