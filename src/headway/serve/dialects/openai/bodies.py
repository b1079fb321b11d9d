"""OpenAI's request bodies as typed structs, and what of them becomes `SamplingParams`.

Every field is honoured, refused with its name, or declared as without effect; one this file does not know is left out
and named in a header of the answer, or refused with `--strict`. `null` means "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import BadInput
from headway.core.request import SamplingParams
from headway.serve.dialect import known_fields, refuse
from headway.serve.dialects.openai.messages import Message, NamedTool
from headway.serve.errors import ApiError
from headway.serve.logprobs import alternatives_of, asked
from headway.serve.structured import Structured
from headway.serve.tools import ToolBody
from headway.text.chat import Ending

MAX_PROMPTS = 1024
MAX_ROWS = 1024  # prompts x n of one request
MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 256
MAX_BAD_WORDS = 128
DEFAULT_COMPLETION = 16  # tokens, as OpenAI has it

# Known, would change the answer, not built: refused unless null or one of these values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "moderation": (),
    "verbosity": ("medium",),
    "suffix": ("",),
    "typical_p": (1,),
    "tfs": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True, False),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
}


# Accepted and without effect, because clients or gateways send them and they do not change the answer's text: who asks,
# how OpenAI would bill, cache or store it, hints for speed, and what Open WebUI and others need for their own books.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "parallel_tool_calls",
    "id", "chat_id", "session_id", "conversation_id", "user_id", "trace_id", "features", "variables", "model_item",
    "background_tasks", "tool_ids", "tool_servers", "filter_ids", "extra_headers", "drop_params", "cache_prompt",
)  # fmt: skip
if TYPE_CHECKING:
    _Known = Structured
else:
    _Known = known_fields(*IGNORED, *(name for name in REFUSED if name != "suffix"), base=Structured)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`include_obfuscation` is ignored: it pads OpenAI's chunks and changes nothing else."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(_Known, forbid_unknown_fields=True, kw_only=True):
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
    thinking_token_budget: int | None = None
    priority: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool | None:
        """In the end of a stream; None = in each of its events."""
        options = self.stream_options or StreamOptions()
        return None if options.include_usage and options.continuous_usage_stats else bool(options.include_usage)

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
        refuse(self, REFUSED)
        if self.prompt_logprobs is not None and self.streams:
            raise BadInput("prompt_logprobs", "not together with stream=true")
        if self.truncate_prompt_tokens is not None and (self.truncate_prompt_tokens < 1):
            raise BadInput("truncate_prompt_tokens", f"{self.truncate_prompt_tokens} is not a number of tokens above 0")
        if len(self.bad_words or ()) > MAX_BAD_WORDS or not all(self.bad_words or ()):
            raise BadInput("bad_words", f"give at most {MAX_BAD_WORDS} words, none of them empty")
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

    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    def limit(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise BadInput("max_tokens", "give max_completion_tokens or max_tokens, not both")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def alternatives(self) -> int | None:
        return asked(self.logprobs, self.top_logprobs)


class CompletionRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions: `prompt` is a text, a list of token ids, or a list of either."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None
    tools: Any = None
    tool_choice: Any = None

    def limit(self) -> int | None:
        return DEFAULT_COMPLETION if self.max_tokens is None else self.max_tokens

    def alternatives(self) -> int | None:
        return None if self.logprobs is None else alternatives_of("logprobs", self.logprobs)

    def check(self) -> None:
        super().check()
        refuse(self, {"tools": ([],), "tool_choice": ("none", "auto")})
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise BadInput("best_of", f"{self.best_of} is less than n, {self.n or 1}")
        if self.picks and self.stream:
            raise BadInput("best_of", "more than n, not together with stream: the best are known at the end")

    @property
    def picks(self) -> bool:
        """Whether more choices are made than are answered."""
        return self.best_of is not None and self.best_of > (self.n or 1)

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
    chat_template_kwargs: dict[str, Any] | None = None


if TYPE_CHECKING:
    _Generating = msgspec.Struct
else:
    _PROMPT = {
        "model", "prompt", "messages", "tools", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message",
    }  # fmt: skip
    _OF_BOTH = {*ChatRequest.__struct_encode_fields__, *CompletionRequest.__struct_encode_fields__}
    _Generating = known_fields(*sorted(_OF_BOTH - _PROMPT))


class PromptRequest(_Generating, forbid_unknown_fields=True, kw_only=True):
    """A request of either generating route, of which only the prompt counts."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ExplainRequest(PromptRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/cache/explain. `against`: an earlier request to compare with; without it, all that the cache holds."""

    against: PromptRequest | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def ending(body: ChatRequest | TokenizeRequest | PromptRequest) -> Ending:
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
        "n": body.n if getattr(body, "best_of", None) is None else body.best_of,  # type: ignore[attr-defined]
        "seed": body.seed,
        "stop": (body.stop,) if isinstance(body.stop, str) else None if body.stop is None else tuple(body.stop),
        "stop_token_ids": stop_ids,
        "logit_bias": _logit_bias(body.logit_bias or {}, vocab_size),
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "ignore_eos": body.ignore_eos,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "allowed_token_ids": _allowed(body.allowed_token_ids, vocab_size),
        "thinking_budget": body.thinking_token_budget,
        "grammar": body.grammar()[0],
        "logprobs": 0 if alternatives is None and getattr(body, "picks", False) else alternatives,
        "prompt_logprobs": _prompt_logprobs(body, alternatives),
    }
    try:
        return defaults.but(given)
    except BadInput as error:
        if error.field == "n" and getattr(body, "best_of", None) is not None:
            raise BadInput("best_of", str(error).partition(": ")[2]) from None
        if error.field == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
            raise BadInput("max_completion_tokens", str(error).partition(": ")[2]) from None
        raise


def _allowed(ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not ids:
        raise BadInput("allowed_token_ids", "the list is empty: no token could be generated")
    for token in ids:
        _in_vocabulary("allowed_token_ids", token, vocab_size)
    return tuple(sorted(set(ids)))


def _prompt_logprobs(body: Sampling, alternatives: int | None) -> int | None:
    """What is asked for, or what an echo shows; of both the most."""
    counts = [alternatives] if alternatives is not None and getattr(body, "echo", None) else []
    if body.prompt_logprobs is not None:
        counts.append(alternatives_of("prompt_logprobs", body.prompt_logprobs))
    return max(counts, default=None)


def bad_token_ids(words: Sequence[str], encode: Callable[[str, bool], list[int]]) -> tuple[tuple[int, ...], ...]:
    """The ids that words are, at the start of a text and, where that is another token, after a blank; as vLLM does.

    Raises:
        BadInput: a word has no token.
    """
    found = []
    for word in words:
        plain = encode(word, False)
        if not plain:
            raise BadInput("bad_words", f"{word[:40]!r} has no token")
        found.append(tuple(plain))
        spaced = encode(f" {word.lstrip()}", False)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(tuple(spaced))
    return tuple(found)


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


class LoadLoraRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/load_lora_adapter. `lora_path`: within the folder that is open to this; `load_inplace`: a loaded adapter
    of the name is replaced; `model`: what it is over, where the server has several."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    model: str | None = None


class UnloadLoraRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
