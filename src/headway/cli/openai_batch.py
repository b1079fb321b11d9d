"""Lines of OpenAI's batches: {"custom_id", "method", "url", "body"} in, and answers as their output files have them.

A body is read, checked and answered by what `headway serve` reads, checks and answers it with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput, HeadwayError
from headway.core.request import SamplingParams
from headway.engine.ipc import Ready
from headway.engine.llm import LLM
from headway.engine.messages import Delta
from headway.engine.results import Completion
from headway.serve.conversation import template_messages
from headway.serve.dialects.openai.bodies import ChatRequest, CompletionRequest, sampling_params
from headway.serve.dialects.openai.format import error_body
from headway.serve.dialects.openai.messages import conversation
from headway.serve.dialects.openai.routes import chat, completions
from headway.serve.encode import json_bytes
from headway.serve.errors import from_headway
from headway.serve.model_text import ModelText
from headway.serve.store import Conversations
from headway.serve.text import PromptReader

ANY_VOCABULARY = 1 << 31  # ids are checked once the model is there
KINDS = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
# Fields of the bodies that have another name here.
PARAMETER_OF = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs", "echo": "prompt_logprobs"}
NEED_MODEL = (  # to be read, or a server
    "tools", "bad_words", "truncate_prompt_tokens", "chat_template_kwargs", "continue_final_message",
    "reasoning_effort", "priority",
)  # fmt: skip
SAMPLING = frozenset(SamplingParams.__struct_fields__)


def read(fields: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """-> prompt, the sampling parameters that the line names, and its body.

    Raises:
        HeadwayError, msgspec.ValidationError: it asks for what cannot be had.
    """
    url, body = fields.get("url"), fields.get("body")
    if fields.get("method", "POST") != "POST" or url not in KINDS or not isinstance(body, dict):
        raise HeadwayError(f'needs "url" (one of {", ".join(KINDS)}), "body", and no "method" other than POST')
    request = msgspec.convert(body, KINDS[url])
    request.check()
    if request.streams:
        raise HeadwayError("stream: answers of a batch come whole; leave it out")
    for name in NEED_MODEL:
        if getattr(request, name, None):
            raise BadInput(name, "not supported in batches; leave it out")
    params = sampling_params(request, ANY_VOCABULARY, SamplingParams())
    asked = {PARAMETER_OF.get(name, name) for name, value in body.items() if value is not None} & SAMPLING
    usual, built = (msgspec.to_builtins(one) for one in (SamplingParams(max_tokens=params.max_tokens), params))
    given = {name: value for name, value in built.items() if name in asked or value != usual[name]}
    if isinstance(request, ChatRequest):
        return template_messages(conversation(request.messages), knows_developer=False), given, request
    prompts = request.prompts()
    if len(prompts) != 1:
        raise HeadwayError(f"prompt: {len(prompts)} prompts; a line has one")
    return prompts[0], given, request


class BatchAnswers:
    """Writes lines of an output file. It stands where a server and its one model would (`serve.dialect`)."""

    created = 0
    ready: Ready | None = None
    lora_folder: Path | None = None

    def __init__(self, llm: LLM) -> None:
        engine = llm.engine
        self.name = engine.info.name
        self.conversations = Conversations().of("")
        self.models = [self]
        self.reader = PromptReader(ModelText(engine.info), engine.max_model_len, engine.default_params)

    @property
    def adapters(self) -> dict[str, str]:
        """None may be named: `--adapter` is the whole run's."""
        return {}

    def find(self, name: str | None) -> tuple[BatchAnswers, str]:
        """Whatever a line calls the model: it is answered by the one there is."""
        return self, ""

    def encode(
        self, id: str | int, request: ChatRequest | CompletionRequest, result: Completion | HeadwayError
    ) -> bytes:
        """The line of a request; of one that failed, too."""
        try:
            if isinstance(result, HeadwayError):
                raise result
            status, body = 200, self._body(request, result)
        except HeadwayError as error:
            refused = from_headway(error)
            status, body = refused.status, json_bytes(error_body(refused))
        response = {"status_code": status, "request_id": f"req-{id}", "body": msgspec.Raw(body)}
        return msgspec.json.encode({"id": f"batch_req_{id}", "custom_id": id, "response": response, "error": None})

    def _body(self, request: ChatRequest | CompletionRequest, result: Completion) -> bytes:
        query = chat(request, self) if isinstance(request, ChatRequest) else completions(request, self)
        answer = self.reader.answer(query, "", result.arrival, None)
        (prompt,) = answer.prompts
        prompt.logprobs, prompt.cached = result.prompt_logprobs, result.cached_tokens
        for choice, made in zip(answer.choices, result.choices, strict=True):
            delta = Delta(answer.id, 0, 0, text=made.text, logprobs=tuple(made.logprobs), finish=made.finish)
            choice.add(answer.gain(choice, delta))
            answer.completion_tokens += len(made.tokens)
        return b"".join(query.format(answer).whole())
