"""Ollama's routes: what each asks of the server."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

import headway
from headway.core.pooling import GENERATES
from headway.engine.machine import wall_clock
from headway.serve.answer import Answer, Query
from headway.serve.dialect import Endpoint, Host, ModelHost, refuse
from headway.serve.dialects.ollama.bodies import (
    REFUSED,
    REFUSED_OPTIONS,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    Options,
    max_tokens,
    sampling_params,
)
from headway.serve.dialects.ollama.format import PS_PER_NS, LineFormat
from headway.serve.encode import timestamp
from headway.serve.pooled import Vectors, WholeFormat, asked, inputs, query
from headway.serve.structured import named_or_schema
from headway.serve.tools import tools_of
from headway.text.thinking import HARMONY, MARKS

LINES = "application/x-ndjson"
FOREVER = 100 * 365 * 86400  # seconds


def chat(body: OllamaChatRequest, host: Host) -> Query | dict[str, Any]:
    fields = _common(body, host, chat=True)
    if not body.messages:
        return _loaded(fields["adapter"] or fields["model"], {"message": {"role": "assistant", "content": ""}})
    return Query(messages=body.conversation(), tools=tools_of(body.tools), field="messages", **fields)


def generate(body: OllamaGenerateRequest, host: Host) -> Query | dict[str, Any]:
    fields = _common(body, host, chat=False)
    if not body.prompt:
        return _loaded(fields["adapter"] or fields["model"], {"response": ""})
    if body.raw:
        return Query(prompts=[body.prompt], field="prompt", **fields)
    return Query(messages=body.conversation(), field="prompt", **fields)


def _common(body: OllamaChatRequest | OllamaGenerateRequest, host: Host, chat: bool) -> dict[str, Any]:
    options = body.options or Options()
    refuse(body, REFUSED)
    refuse(options, REFUSED_OPTIONS, "options.")
    model, adapter = _found(host, body.model)
    params = sampling_params(options, body.alternatives, model.reader.default_params)
    return {
        "model": model.name,
        "adapter": adapter,
        "params": replace(params, grammar=named_or_schema(body.format, "format")),
        "grammar_field": "format",
        "reasoning": body.thinking,
        "max_tokens": max_tokens(options),
        "max_context": options.num_ctx,
        "stream": body.streams,
        "limit_field": "options.num_predict",
        "id_prefix": "ollama-",
        "format": partial(LineFormat, chat, model.reader.text, body.alternatives),
    }


def embed(body: OllamaEmbedRequest, host: Host) -> Query | dict[str, Any]:
    if not body.input:
        return {"model": _found(host, body.model)[0].name, "embeddings": []}
    model, adapter, config, pooling = asked(host, _untagged(body.model))
    _refuse_options(body.options)
    vectors = Vectors(model, config, body.dimensions)
    prompts = model.reader.wholes(inputs(body.input, "input"), "input", None if body.truncate is False else -1)
    make = partial(WholeFormat, partial(_embedded, vectors))
    return query(model, adapter, pooling, prompts, "input", make, "ollama-")


def embeddings(body: OllamaEmbeddingsRequest, host: Host) -> Query | dict[str, Any]:
    if not body.prompt:
        return {"embedding": []}
    model, adapter, config, pooling = asked(host, _untagged(body.model))
    _refuse_options(body.options)
    vectors = Vectors(model, config, None)
    prompts = model.reader.wholes([body.prompt], "prompt", -1)
    make = partial(WholeFormat, lambda answer: {"embedding": vectors.of(answer)[0].tolist()})
    return query(model, adapter, pooling, prompts, "prompt", make, "ollama-")


def _refuse_options(options: Options | None) -> None:
    if options is not None:
        refuse(options, REFUSED_OPTIONS, "options.")


def _embedded(vectors: Vectors, answer: Answer) -> dict[str, Any]:
    return {
        "model": answer.model,
        "embeddings": [one.tolist() for one in vectors.of(answer)],
        "total_duration": max(wall_clock().now() - answer.arrival, 0) // PS_PER_NS,
        "load_duration": max((answer.admitted or answer.arrival) - answer.arrival, 0) // PS_PER_NS,
        "prompt_eval_count": answer.prompt_tokens,
    }


def _untagged(name: str | None) -> str | None:
    return name and name.removesuffix(":latest")


def _found(host: Host, name: str | None) -> tuple[ModelHost, str]:
    """The model and adapter of a name, with or without Ollama's tag; None where there is one model."""
    return host.find(_untagged(name))


def _loaded(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients have a model loaded."""
    return {"model": name, "created_at": timestamp(), **content, "done": True, "done_reason": "load"}


def tags(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    return {"models": [_listed(host, model, adapter) for model in host.models for adapter in ("", *model.adapters)]}


def ps(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    """They are loaded for as long as the server runs, in main memory."""
    forever = {"expires_at": timestamp(host.created + FOREVER), "size_vram": 0}
    loaded = [(model, model.ready.max_model_len) for model in host.models if model.ready is not None]
    return {
        "models": [
            {**_listed(host, model, adapter), **forever, "context_length": context}
            for model, context in loaded
            for adapter in ("", *model.adapters)
        ]
    }


def show(body: OllamaShowRequest, host: Host) -> dict[str, Any]:
    model, adapter = _found(host, body.model or body.name)
    shape = model.reader and model.ready and model.ready.shape
    info: dict[str, Any] = {}
    if shape:
        info = {
            "general.architecture": shape.family, "general.parameter_count": int(shape.params.total),
            f"{shape.family}.context_length": shape.context, f"{shape.family}.block_count": shape.layers,
            f"{shape.family}.embedding_length": shape.d_model, f"{shape.family}.attention.head_count": shape.heads,
            f"{shape.family}.attention.head_count_kv": shape.kv_heads,
        }  # fmt: skip
    about = _listed(host, model, adapter)
    return {
        "modelfile": "", "parameters": "", "template": "", "details": about["details"], "model_info": info,
        "capabilities": _capabilities(model), "modified_at": about["modified_at"],
    }  # fmt: skip


def _capabilities(model: ModelHost) -> list[str]:
    """What it was made for."""
    pooling, template = model.ready.pooling if model.ready else GENERATES, model.reader.text.template
    has = {
        "completion": pooling.generates and not pooling.embeds,
        "tools": pooling.generates and "tools" in template,
        "thinking": pooling.generates and (MARKS[0] in template or HARMONY in template),
        "embedding": pooling.embeds or not (pooling.generates or pooling.labels),
    }
    return [name for name, true in has.items() if true]


def _listed(host: Host, model: ModelHost, adapter: str) -> dict[str, Any]:
    """A model as lists have it, itself or with a LoRA adapter. The digest tells models apart; it is not of a file."""
    shape, name = model.ready and model.ready.shape, adapter or model.name
    details = {"parent_model": model.name if adapter else "", "format": "", "family": "", "families": [],
               "parameter_size": "", "quantization_level": ""}  # fmt: skip
    if shape:
        details |= {
            "family": shape.family, "families": [shape.family], "parameter_size": _short(shape.params.total),
            "quantization_level": shape.weight_format.upper(),
        }  # fmt: skip
    return {
        "name": name, "model": name, "modified_at": timestamp(host.created),
        "size": int(shape.stored.total) if shape else 0,
        "digest": hashlib.sha256(name.encode() + msgspec.json.encode(shape)).hexdigest(), "details": details,
    }  # fmt: skip


def _short(count: float) -> str:
    """As Ollama writes parameters: 134.5M, 8.0B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def version(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    return {"version": headway.__version__}


ENDPOINTS = (
    Endpoint("/api/chat", "Answer a conversation, as Ollama does.", chat, OllamaChatRequest, LINES),
    Endpoint("/api/generate", "Answer or continue a prompt, as Ollama does.", generate, OllamaGenerateRequest, LINES),
    Endpoint("/api/embed", "Vectors of texts, as Ollama makes them.", embed, OllamaEmbedRequest),
    Endpoint("/api/embeddings", "The same of one text.", embeddings, OllamaEmbeddingsRequest),
    Endpoint("/api/tags", "The models this server has, as Ollama lists them.", tags),
    Endpoint("/api/ps", "The models that are loaded, as Ollama lists them.", ps),
    Endpoint("/api/show", "About a model, as Ollama tells it.", show, OllamaShowRequest),
    Endpoint("/api/version", "Version of the server, as Ollama says it.", version),
)
