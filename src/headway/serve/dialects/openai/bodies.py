"""OpenAI's request bodies as typed structs, and what of them becomes `SamplingParams`.

Every field is honoured, refused with its name, or declared as without effect; a field this file does not know is
refused. `null` means "not given" everywhere.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.core.request import SamplingParams
from headway.serve.dialects.openai.messages import Message
from headway.serve.errors import ApiError
from headway.text.chat import Ending

MAX_PROMPTS = 1024
MAX_ROWS = 1024  # prompts x n of one request
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_STOP_IDS = 256

# Known, would change the answer, not built: refused unless null or one of these values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "suffix": ("",),
    "thinking_token_budget": (),
    "structured_outputs": (),
    "typical_p": (1,),
    "tfs": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_obfuscation` is ignored: it pads OpenAI's chunks and changes nothing else."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generating routes accept. The second block extends OpenAI's API, under vLLM's names."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    # Accepted and without effect, because official clients or gateways send them and they do not change the answer's
    # text: who asks, how OpenAI would bill, cache or store it, and hints for speed.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None
    parallel_tool_calls: Any = None
    # Of Open WebUI and others that keep their own books.
    id: Any = None
    chat_id: Any = None
    session_id: Any = None
    conversation_id: Any = None
    user_id: Any = None
    trace_id: Any = None
    features: Any = None
    variables: Any = None
    model_item: Any = None
    background_tasks: Any = None
    tool_ids: Any = None
    tool_servers: Any = None
    filter_ids: Any = None
    extra_headers: Any = None
    drop_params: Any = None

    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    thinking_token_budget: Any = None
    structured_outputs: Any = None
    typical_p: Any = None
    tfs: Any = None
    top_a: Any = None
    mirostat: Any = None
    mirostat_mode: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def limit(self) -> int | None:
        """Most tokens to generate; None = what the context holds."""
        return self.max_tokens

    def alternatives(self) -> int | None:
        """How many likeliest alternatives to report per token; None = no logprobs at all."""
        raise NotImplementedError

    def check(self) -> None:
        """
        Raises:
            ApiError: a field asks for something this server cannot do, or two fields contradict each other.
        """
        for field, neutral in REFUSED.items():
            value = getattr(self, field, None)
            if value is not None and value not in neutral:
                raise ApiError(
                    400, f"{field}: not supported by this server; leave it out", param=field, code="unsupported"
                )
        if self.stream_options is not None and not self.streams:
            raise ApiError(
                400, "stream_options: only allowed with stream=true", param="stream_options", code="invalid_value"
            )


class ChatRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def limit(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise BadInput("max_tokens", "give max_completion_tokens or max_tokens, not both")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def alternatives(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs and self.top_logprobs != 0:
            raise BadInput("top_logprobs", "only allowed with logprobs=true")
        return _logprobs("top_logprobs", self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions: `prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None

    def alternatives(self) -> int | None:
        return None if self.logprobs is None else _logprobs("logprobs", self.logprobs)

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadInput("best_of", "not supported by this server unless equal to n; leave it out")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one per element.

        Raises:
            BadInput: there is none, or the list mixes texts and token ids.
        """
        prompt = self.prompt
        if prompt is None:
            raise BadInput("prompt", "the field is required")
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise BadInput("prompt", "the list is empty")
        if all(isinstance(item, int) for item in prompt):
            return [prompt]  # type: ignore[list-item]
        if any(isinstance(item, int) for item in prompt):
            raise BadInput("prompt", "a list holds token ids only, or prompts only")
        if len(prompt) > MAX_PROMPTS:
            raise BadInput("prompt", f"{len(prompt)} prompts; at most {MAX_PROMPTS} are accepted in one request")
        return prompt  # type: ignore[return-value]


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a text in `prompt`, or a conversation in `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def ending(body: ChatRequest | TokenizeRequest) -> Ending:
    """How the model reads the end of `messages`; fields and meaning are vLLM's.

    Raises:
        BadInput: they contradict each other.
    """
    opened, continued = body.add_generation_prompt, body.continue_final_message
    if opened and continued:
        raise BadInput("continue_final_message", "not together with add_generation_prompt")
    if continued:
        return Ending.CONTINUED
    if opened is False:
        return Ending.CLOSED
    return Ending.NATURAL if opened is None and continued is None else Ending.OPENED


def sampling_params(body: Sampling, vocab_size: int, defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters a body asks for; `defaults` for what it leaves open.

    Raises:
        BadInput: a value is out of range; named as the client wrote it.
    """
    alternatives = body.alternatives()
    stop_ids = tuple(body.stop_token_ids or ())
    if len(stop_ids) > MAX_STOP_IDS:
        raise BadInput("stop_token_ids", f"{len(stop_ids)} ids; at most {MAX_STOP_IDS} are accepted")
    for token in stop_ids:
        _in_vocabulary("stop_token_ids", token, vocab_size)
    given: dict[str, Any] = {
        "max_tokens": 1 if body.limit() == 0 and getattr(body, "echo", None) else body.limit(),  # 0: to score a prompt
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "min_tokens": body.min_tokens,
        "n": body.n,
        "seed": body.seed,
        "stop": (body.stop,) if isinstance(body.stop, str) else None if body.stop is None else tuple(body.stop),
        "stop_token_ids": stop_ids,
        "logit_bias": _logit_bias(body.logit_bias or {}, vocab_size),
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "ignore_eos": body.ignore_eos,
        "logprobs": alternatives,
        "prompt_logprobs": alternatives if getattr(body, "echo", None) else None,
    }
    try:
        return defaults.but(given)
    except BadInput as error:
        if error.field == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
            raise BadInput("max_completion_tokens", str(error).partition(": ")[2]) from None
        raise


def _logprobs(field: str, value: int) -> int:
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise BadInput(field, f"{value} is not an integer from 0 to {MAX_TOP_LOGPROBS}")
    return value


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise BadInput("logit_bias", f"{len(bias)} entries; at most {MAX_LOGIT_BIAS} are accepted")
    pairs = []
    for key, value in bias.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 10:
            raise BadInput("logit_bias", f"{key[:32]!r} is not a token id from 0 to {vocab_size - 1}")
        _in_vocabulary("logit_bias", int(key), vocab_size)
        pairs.append((int(key), value))
    return tuple(pairs)


def _in_vocabulary(field: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise BadInput(field, f"{token} is not a token id from 0 to {vocab_size - 1}")
