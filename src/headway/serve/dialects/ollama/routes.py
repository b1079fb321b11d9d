"""Ollama's routes: what each asks of the server."""

from __future__ import annotations

from functools import partial
from typing import Any

import headway
from headway.serve.answer import Query
from headway.serve.dialect import Endpoint, Host, refuse
from headway.serve.dialects.ollama.bodies import (
    REFUSED,
    REFUSED_OPTIONS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    Options,
    max_tokens,
    sampling_params,
)
from headway.serve.dialects.ollama.format import LineFormat, timestamp

LINES = "application/x-ndjson"


def chat(body: OllamaChatRequest, host: Host) -> Query | dict[str, Any]:
    fields = _common(body, host, chat=True)
    if not body.messages:
        return _loaded(host, {"message": {"role": "assistant", "content": ""}})
    return Query(messages=body.conversation(), field="messages", **fields)


def generate(body: OllamaGenerateRequest, host: Host) -> Query | dict[str, Any]:
    fields = _common(body, host, chat=False)
    if not body.prompt:
        return _loaded(host, {"response": ""})
    if body.raw:
        return Query(prompts=[body.prompt], field="prompt", **fields)
    return Query(messages=body.conversation(), field="prompt", **fields)


def _common(body: OllamaChatRequest | OllamaGenerateRequest, host: Host, chat: bool) -> dict[str, Any]:
    options = body.options or Options()
    refuse(body, REFUSED)
    refuse(options, REFUSED_OPTIONS, "options.")
    host.check_model(body.model.removesuffix(":latest"))
    return {
        "params": sampling_params(options, body.alternatives, host.reader.default_params),
        "max_tokens": max_tokens(options),
        "max_context": options.num_ctx,
        "stream": body.streams,
        "limit_field": "options.num_predict",
        "id_prefix": "ollama-",
        "format": partial(LineFormat, chat, host.reader.text, body.alternatives),
    }


def _loaded(host: Host, content: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients have a model loaded."""
    return {"model": host.model, "created_at": timestamp(), **content, "done": True, "done_reason": "load"}


def tags(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    return {"models": [{"name": host.model, "model": host.model, "modified_at": timestamp(host.created)}]}


def version(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    return {"version": headway.__version__}


ENDPOINTS = (
    Endpoint("/api/chat", "Answer a conversation, as Ollama does.", chat, OllamaChatRequest, LINES),
    Endpoint("/api/generate", "Answer or continue a prompt, as Ollama does.", generate, OllamaGenerateRequest, LINES),
    Endpoint("/api/tags", "The models this server has, as Ollama lists them.", tags),
    Endpoint("/api/version", "Version of the server, as Ollama says it.", version),
)
