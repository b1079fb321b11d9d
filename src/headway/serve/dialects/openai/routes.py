"""OpenAI's routes, and vLLM's two that go with them: what each asks of the server."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.serve.answer import Query
from headway.serve.dialect import Endpoint, Host
from headway.serve.dialects.openai.bodies import (
    MAX_ROWS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
    ending,
    sampling_params,
)
from headway.serve.dialects.openai.format import ChatFormat, CompletionFormat
from headway.serve.dialects.openai.messages import conversation

EVENTS = "text/event-stream"


def chat(body: ChatRequest, host: Host) -> Query:
    fields = _common(body, host)
    make = partial(ChatFormat, host.reader.text, body.alternatives(), body.wants_usage)
    return Query(
        messages=conversation(body.messages), ending=ending(body), field="messages", id_prefix="chatcmpl-",
        format=make, **fields,
    )  # fmt: skip


def completions(body: CompletionRequest, host: Host) -> Query:
    fields = _common(body, host)
    prompts, n = body.prompts(), fields["params"].n
    if len(prompts) * n > MAX_ROWS:
        rows = len(prompts) * n
        raise BadInput("n", f"{len(prompts)} prompts x n = {rows} generations; at most {MAX_ROWS} per request")
    make = partial(CompletionFormat, host.reader.text, body.alternatives(), body.wants_usage)
    return Query(
        prompts=prompts, echo=bool(body.echo), field="prompt", id_prefix="cmpl-", format=make, **fields
    )  # fmt: skip


def _common(body: Sampling, host: Host) -> dict[str, Any]:
    body.check()
    host.check_model(body.model)
    params = sampling_params(body, host.reader.text.vocab_size, host.reader.default_params)
    return {"params": params, "max_tokens": body.limit(), "stream": body.streams}


def tokenize(body: TokenizeRequest, host: Host) -> dict[str, Any]:
    host.check_model(body.model)
    reader = host.reader
    if (body.prompt is None) == (body.messages is None):
        raise BadInput("prompt", "give either prompt or messages")
    if body.messages is not None:
        tokens = reader.chat(conversation(body.messages), ending(body))
    else:
        tokens = reader.text_tokens(body.prompt or "", body.add_special_tokens is not False)
    return {"count": len(tokens), "max_model_len": reader.max_model_len, "tokens": tokens}


def detokenize(body: DetokenizeRequest, host: Host) -> dict[str, Any]:
    host.check_model(body.model)
    return {"prompt": host.reader.decode(body.tokens)}


def models(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    return {"object": "list", "data": [model({"id": host.model}, host)]}


def model(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    host.check_model(parameters["id"])
    about: dict[str, Any] = {"id": host.model, "object": "model", "created": host.created, "owned_by": "headway"}
    if host.ready is not None:
        context = host.ready.max_model_len
        meta = {"n_ctx_train": context, "n_ctx": context, "n_vocab": host.ready.vocab_size}
        about |= {"root": host.ready.model, "parent": None, "max_model_len": context, "meta": meta}
        about["shape"] = msgspec.to_builtins(host.ready.shape)  # what `headway bench --hardware` predicts with
    return about


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "Answer a conversation.", chat, ChatRequest, EVENTS),
    Endpoint("/v1/completions", "Continue a text.", completions, CompletionRequest, EVENTS),
    Endpoint("/tokenize", "Ids of a text or conversation.", tokenize, TokenizeRequest),
    Endpoint("/detokenize", "Text of ids.", detokenize, DetokenizeRequest),
    Endpoint("/v1/models", "The model this server has.", models),
    Endpoint("/v1/models/{id:path}", "One model.", model),
)
