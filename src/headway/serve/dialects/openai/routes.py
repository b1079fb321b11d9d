"""OpenAI's routes, and vLLM's four that go with them: what each asks of the server."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput, shown
from headway.engine.messages import LoadAdapter, UnloadAdapter
from headway.serve.answer import Query
from headway.serve.conversation import effort
from headway.serve.dialect import AdapterChange, Counted, Endpoint, Host, ModelHost, priority_of, refuse
from headway.serve.dialects.openai.bodies import (
    MAX_ROWS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ExplainRequest,
    LoadLoraRequest,
    Sampling,
    TokenizeRequest,
    UnloadLoraRequest,
    bad_token_ids,
    ending,
    sampling_params,
)
from headway.serve.dialects.openai.explain import explain
from headway.serve.dialects.openai.format import ChatFormat, CompletionFormat
from headway.serve.dialects.openai.messages import conversation, tool_choice_of
from headway.serve.encode import timestamp
from headway.serve.errors import ApiError
from headway.serve.tools import tools_of

EVENTS = "text/event-stream"


def chat(body: ChatRequest, host: Host) -> Query:
    model, fields = _common(body, host)
    make = partial(ChatFormat, model.reader.text, body.alternatives(), body.wants_usage, body.prompt_logprobs)
    tools = tools_of(body.tools)
    choice = tool_choice_of(body.tool_choice, body.parallel_tool_calls, tools)
    return Query(
        messages=conversation(body.messages), ending=ending(body), variables=body.chat_template_kwargs or {},
        tools=tools, tool_choice=choice, reasoning=effort(body.reasoning_effort, "reasoning_effort"), field="messages",
        id_prefix="chatcmpl-", format=make, **fields,
    )  # fmt: skip


def completions(body: CompletionRequest, host: Host) -> Query:
    model, fields = _common(body, host)
    refuse(body, {"thinking_token_budget": ()})
    prompts, n = body.prompts(), fields["params"].n
    if len(prompts) * n > MAX_ROWS:
        rows = len(prompts) * n
        raise BadInput("n", f"{len(prompts)} prompts x n = {rows} generations; at most {MAX_ROWS} per request")
    make = partial(CompletionFormat, model.reader.text, body.alternatives(), body.wants_usage, body.prompt_logprobs)
    return Query(
        prompts=prompts, echo=bool(body.echo), to_context=body.max_tokens is None, field="prompt", id_prefix="cmpl-",
        format=make, best=(body.n or 1) if body.picks else None, **fields,
    )  # fmt: skip


def _common(body: Sampling, host: Host) -> tuple[ModelHost, dict[str, Any]]:
    """The model, and fields of the `Query`."""
    body.check()
    model, adapter = host.find(body.model)
    params = sampling_params(body, model.reader.text.vocab_size, model.reader.default_params)
    if body.bad_words:
        params = msgspec.structs.replace(params, bad_token_ids=bad_token_ids(body.bad_words, model.reader.text.encode))
    priority = priority_of(body.priority, model)
    return model, {
        "model": model.name, "adapter": adapter, "params": params, "max_tokens": body.limit(), "stream": body.streams,
        "priority": priority, "truncate": body.truncate_prompt_tokens, "grammar_field": body.grammar()[1],
    }  # fmt: skip


def tokenize(body: TokenizeRequest, host: Host) -> Counted:
    reader = host.find(body.model)[0].reader
    if (body.prompt is None) == (body.messages is None):
        raise BadInput("prompt", "give either prompt or messages")
    if body.messages is not None:
        tokens = reader.chat(conversation(body.messages), ending(body), variables=body.chat_template_kwargs or {})
    else:
        tokens = reader.text_tokens(body.prompt or "", body.add_special_tokens is not False)
    return Counted({"count": len(tokens), "max_model_len": reader.max_model_len, "tokens": tokens}, len(tokens))


def detokenize(body: DetokenizeRequest, host: Host) -> Counted:
    return Counted({"prompt": host.find(body.model)[0].reader.decode(body.tokens)}, len(body.tokens))


def models(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    names = [name for one in host.models for name in (one.name, *one.adapters)]
    anthropic = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [model({"id": name}, host) for name in names], **anthropic}


def model(parameters: dict[str, str], host: Host) -> dict[str, Any]:
    """A model as OpenAI's clients read it, and in the last line of the first fields Anthropic's, who ask here too."""
    found, adapter = host.find(parameters["id"])
    name = adapter or found.name
    about: dict[str, Any] = {
        "id": name, "object": "model", "created": host.created, "owned_by": "headway",
        "type": "model", "display_name": name, "created_at": timestamp(host.created),
    }  # fmt: skip
    if found.ready is not None:
        context = found.ready.max_model_len
        trained = found.ready.shape.context if found.ready.shape else context
        meta = {"n_ctx_train": trained, "n_ctx": context, "n_vocab": found.ready.vocab_size}
        about |= {"root": found.ready.model, "parent": None, "max_model_len": context, "meta": meta}
        about["shape"] = msgspec.to_builtins(found.ready.shape)  # what `headway bench --hardware` predicts with
    if adapter:
        about |= {"root": Path(found.adapters[adapter]).name, "parent": found.name}
    return about


def load_lora(body: LoadLoraRequest, host: Host) -> AdapterChange:
    path, name = _within(_lora_folder(host), body.lora_path), body.lora_name
    base, over = host.find(body.model)
    if over:
        raise BadInput("model", f"{shown(over)} is an adapter itself; name the model that it is over")
    if any(name == one.name for one in host.models):
        which = "the model itself" if name == base.name else "another model of this server"
        raise BadInput("lora_name", f"{shown(name)} is {which}")
    if any(name in one.adapters for one in host.models if one is not base):
        raise BadInput("lora_name", f"{shown(name)} is an adapter of another model")
    command = LoadAdapter(secrets.token_hex(8), name, str(path), replace=bool(body.load_inplace))
    return AdapterChange(base.name, command, lambda: model({"id": body.lora_name}, host))


def _within(folder: Path, text: str) -> Path:
    """What a path leads to. A client is not told what there is elsewhere."""
    try:
        path = (folder / text).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # links in a circle (RuntimeError before Python 3.13); a NUL
        path = None
    if path is None or not path.is_relative_to(folder):
        problem = "there is no such folder or file within the folder that --allow-lora-loading names"
        raise BadInput("lora_path", f"{shown(text)}: {problem}")
    return path


def unload_lora(body: UnloadLoraRequest, host: Host) -> AdapterChange:
    _lora_folder(host)
    base = next((one for one in host.models if body.lora_name in one.adapters), None)
    if base is None:
        problem = f"lora_name: no adapter {shown(body.lora_name)} is loaded"
        raise ApiError(404, problem, param="lora_name", code="model_not_found")
    command = UnloadAdapter(secrets.token_hex(8), body.lora_name)
    return AdapterChange(base.name, command, lambda: {"id": body.lora_name, "object": "model", "deleted": True})


def _lora_folder(host: Host) -> Path:
    if host.lora_folder is None:
        problem = "adapters are not loaded on request; --allow-lora-loading FOLDER lets them be"
        raise ApiError(403, problem, code="not_allowed")
    return host.lora_folder


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "Answer a conversation.", chat, ChatRequest, EVENTS),
    Endpoint("/v1/completions", "Continue a text.", completions, CompletionRequest, EVENTS),
    Endpoint("/tokenize", "Ids of a text or conversation.", tokenize, TokenizeRequest),
    Endpoint("/detokenize", "Text of ids.", detokenize, DetokenizeRequest),
    Endpoint("/v1/cache/explain", "Why a prompt is not served from the cache.", explain, ExplainRequest),
    Endpoint("/v1/models", "The models this server has, and their LoRA adapters.", models),
    Endpoint("/v1/models/{id:path}", "One model.", model),
    Endpoint("/v1/load_lora_adapter", "Load a LoRA adapter, as a model of its own.", load_lora, LoadLoraRequest),
    Endpoint("/v1/unload_lora_adapter", "Forget a LoRA adapter.", unload_lora, UnloadLoraRequest),
)
