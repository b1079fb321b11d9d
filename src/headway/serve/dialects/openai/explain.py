"""Why a prompt is not served from the prefix cache: compared with an earlier one, or with all that is cached now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from headway.cache.explain import Explanation, Verdict
from headway.core.errors import BadInput
from headway.serve.conversation import template_messages
from headway.serve.dialect import CacheQuestion, Counted, Host
from headway.serve.dialects.openai.bodies import ExplainRequest, PromptRequest, ending
from headway.serve.dialects.openai.messages import conversation
from headway.serve.text import PromptReader, Text
from headway.serve.tools import tools_of
from headway.text.difference import AROUND, PromptDifference, advice, difference, place

Messages = Sequence[Mapping[str, Any]]


def explain(body: ExplainRequest, host: Host) -> CacheQuestion | Counted:
    model, adapter = host.find(body.model)
    reader = model.reader
    tokens, messages = prompt_of(body, reader)
    if body.against is None:
        return CacheQuestion(model.name, adapter, tokens, partial(_told, reader.text, tokens, messages))
    block_size = model.ready.status.block_size if model.ready else 32
    found = compared(body.against, body, reader, block_size)
    return Counted(msgspec.to_builtins(found), found.first + found.second)


def compared(first: PromptRequest, second: PromptRequest, reader: PromptReader, block_size: int) -> PromptDifference:
    """Two requests, the earlier one first."""
    earlier, _ = prompt_of(first, reader, "against.")
    tokens, messages = prompt_of(second, reader)
    return difference(earlier, tokens, partial(reader.text.decode, skip_special=False), block_size, messages)


def prompt_of(body: PromptRequest, reader: PromptReader, where: str = "") -> tuple[tuple[int, ...], Messages]:
    """Ids of a request's prompt, and its messages as the template takes them.

    Raises:
        BadInput: it has none, or two.
    """
    if (body.prompt is None) == (body.messages is None):
        raise BadInput(f"{where}prompt", "give either prompt or messages")
    if body.messages is not None:
        turns = conversation(body.messages)
        tokens = reader.chat(turns, ending(body), tools_of(body.tools), body.chat_template_kwargs or {})
        return tokens, template_messages(turns, reader.text.knows_developer)
    if isinstance(body.prompt, str):
        return reader.text_tokens(body.prompt), ()
    if len(body.prompt or ()) > reader.max_model_len:
        raise BadInput(f"{where}prompt", f"{len(body.prompt or ())} ids; a context holds {reader.max_model_len}")
    reader.check_ids(body.prompt or [], f"{where}prompt")
    return tuple(body.prompt or ()), ()


def _told(text: Text, tokens: tuple[int, ...], messages: Messages, found: Explanation) -> dict[str, Any]:
    decode = partial(text.decode, skip_special=False)
    told = {
        "verdict": found.verdict.name.lower(), "prompt_tokens": found.prompt, "reused_tokens": found.reused,
        "matched_tokens": found.matched, "lost_tokens": found.cost, "advice": found.verdict.value,
    }  # fmt: skip
    if found.verdict is not Verdict.DIVERGED:
        return told
    before, had = decode(tokens[: found.matched]), decode(found.cached)
    has = decode(tokens[found.matched : found.matched + len(found.cached)])
    where = place(decode(tokens), len(before), messages)
    return told | {
        "where": where, "before": before[-AROUND:], "cached": had[:AROUND], "yours": has[:AROUND],
        "advice": advice(where, before[-AROUND:], had, has, found.cost),
    }  # fmt: skip
