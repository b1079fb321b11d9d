"""The Responses API's route."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from headway.serve.answer import Query
from headway.serve.choice import Block
from headway.serve.conversation import Message
from headway.serve.dialect import Endpoint, Host
from headway.serve.dialects.responses.bodies import ResponsesRequest, answered
from headway.serve.dialects.responses.format import ResponseFormat


def responses(body: ResponsesRequest, host: Host) -> Query:
    body.check()
    model, adapter = host.find(body.model)
    before = [] if body.previous_response_id is None else host.conversations.get(body.previous_response_id)
    turns = [*before, *body.turns()]
    tools, params = body.tools_given(), body.sampling_params(model.reader.default_params)
    params = replace(params, grammar=body.grammar())
    choice, alternatives = body.choice(tools), body.alternatives()

    def keep(id: str, blocks: Sequence[Block]) -> None:
        if body.store is not False:
            host.conversations.put(id, answered(turns, blocks))

    echoed: dict[str, Any] = {
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "metadata": {},
        "parallel_tool_calls": choice.parallel, "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.thinking().effort, "summary": None}, "store": body.store is not False,
        "temperature": params.temperature, "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": choice.mode,
        "tools": [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
             "strict": tool.strict} for tool in tools
        ],
        "top_logprobs": alternatives or 0, "top_p": params.top_p, "truncation": "disabled",
    }  # fmt: skip
    system = [Message("system", body.instructions)] if body.instructions else []
    return Query(
        model=model.name, adapter=adapter, messages=[*system, *turns], tools=tools, tool_choice=choice,
        reasoning=body.thinking(), params=params, max_tokens=body.max_output_tokens, stream=bool(body.stream),
        field="input", grammar_field="text.format", limit_field="max_output_tokens", id_prefix="resp_",
        format=partial(ResponseFormat, model.reader.text, alternatives, echoed, keep),
    )  # fmt: skip


ENDPOINTS = (
    Endpoint("/v1/responses", "Answer, as the Responses API has it.", responses, ResponsesRequest, "text/event-stream"),
)
