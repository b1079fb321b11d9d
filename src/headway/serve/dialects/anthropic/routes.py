"""Anthropic's routes: what each asks of the server."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from headway.serve.answer import Query
from headway.serve.calling import offered
from headway.serve.dialect import Counted, Endpoint, Host, ModelHost
from headway.serve.dialects.anthropic.bodies import CountRequest, MessagesRequest
from headway.serve.dialects.anthropic.format import MessageFormat


def messages(body: MessagesRequest, host: Host) -> Query:
    model, fields = _common(body, host)
    reasoning = body.reasoning()
    return Query(
        **fields,
        tool_choice=body.choice(),
        reasoning=reasoning,
        params=replace(body.sampling_params(model.reader.default_params), grammar=body.grammar()),
        grammar_field="output_config.format",
        max_tokens=body.max_tokens,
        to_context=True,
        stream=bool(body.stream),
        id_prefix="msg_",
        format=partial(MessageFormat, reasoning.shown),
    )


def count_tokens(body: CountRequest, host: Host) -> Counted:
    model, fields = _common(body, host)
    tools = offered(fields["tools"], body.choice())
    tokens = model.reader.chat(fields["messages"], tools=tools, variables=body.reasoning().variables())
    return Counted({"input_tokens": len(tokens)}, len(tokens))


def _common(body: CountRequest, host: Host) -> tuple[ModelHost, dict[str, Any]]:
    """The model, and fields of the `Query`."""
    body.check()
    model, adapter = host.find(body.model)
    return model, {
        "model": model.name, "adapter": adapter, "messages": body.conversation(), "tools": body.tools_given(),
        "field": "messages",
    }  # fmt: skip


ENDPOINTS = (
    Endpoint("/v1/messages", "Answer a conversation.", messages, MessagesRequest, "text/event-stream"),
    Endpoint("/v1/messages/count_tokens", "How many tokens a conversation has.", count_tokens, CountRequest),
)
