"""Ollama's request bodies as typed structs, and what of their options becomes `SamplingParams`.

As everywhere, a field is honoured, refused with its name, or declared as without effect; `null` means "not given". An
option that is not given has this server's default, not Ollama's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.core.request import SamplingParams
from headway.serve import answer
from headway.serve.errors import ApiError
from headway.serve.text import ROLES

MAX_TOP_LOGPROBS = 20

# Known, would change the answer, not built: refused unless null or one of these values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "format": ("",),
    "think": (False,),
    "tools": ([],),
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
    "tool_calls": ([],),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "repeat_last_n": (-1,),  # the penalty sees the whole context, always
    "embedding_only": (False,),
}
HONOURED = ("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "presence_penalty", "frequency_penalty")


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`options`. The third block is about loading and speed, which this server decides when it starts."""

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    typical_p: Any = None
    tfs_z: Any = None
    mirostat: Any = None
    repeat_last_n: Any = None
    embedding_only: Any = None

    mirostat_tau: Any = None
    mirostat_eta: Any = None
    penalize_newline: Any = None
    num_keep: Any = None
    numa: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generating routes accept. `keep_alive` is ignored: the model is always loaded."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: Any = None
    format: Any = None
    think: Any = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def alternatives(self) -> int | None:
        """How many likeliest alternatives to report per token; None = no logprobs at all."""
        if not self.logprobs:
            return None
        count = self.top_logprobs or 0
        if not 0 <= count <= MAX_TOP_LOGPROBS:
            raise BadInput("top_logprobs", f"{count} is not an integer from 0 to {MAX_TOP_LOGPROBS}")
        return count


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation; fields this server does not know are ignored."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Any = None
    tool_calls: Any = None


class OllamaChatRequest(_Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: Any = None

    def conversation(self) -> list[answer.Message]:
        return [_turn(message, f"messages[{index}]") for index, message in enumerate(self.messages or ())]


class OllamaGenerateRequest(_Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate: `prompt` becomes a conversation of one turn, unless `raw`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Any = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    width: Any = None
    height: Any = None
    steps: Any = None

    def conversation(self) -> list[answer.Message]:
        system = [answer.Message("system", self.system)] if self.system else []
        return [*system, answer.Message("user", self.prompt or "")]


def _turn(message: OllamaMessage, where: str) -> answer.Message:
    if message.role not in ROLES:
        problem = "tools are not supported by this server" if message.role == "tool" else "unknown role"
        raise BadInput(f"{where}.role", f"{problem}; use one of {', '.join(ROLES)}")
    refuse(message, f"{where}.")
    return answer.Message(message.role, message.content or "", reasoning=message.thinking)


def refuse(body: msgspec.Struct, where: str = "") -> None:
    """
    Raises:
        ApiError: a field asks for something this server cannot do.
    """
    for field, neutral in REFUSED.items():
        value = getattr(body, field, None)
        if value is not None and value not in neutral:
            name = where + field
            raise ApiError(400, f"{name}: not supported by this server; leave it out", param=name, code="unsupported")


def max_tokens(options: Options) -> int | None:
    """`num_predict`, where -1 and -2 mean what is left of the context."""
    return None if options.num_predict in (None, -1, -2) else options.num_predict


def sampling_params(options: Options, alternatives: int | None, defaults: SamplingParams) -> SamplingParams:
    """
    Raises:
        BadInput: a value is out of range; named as the client wrote it.
    """
    if options.num_ctx is not None and options.num_ctx < 1:
        raise BadInput("options.num_ctx", f"{options.num_ctx} is not an integer >= 1")
    given = {name: getattr(options, name) for name in HONOURED}
    given["repetition_penalty"] = given.pop("repeat_penalty")
    given |= {"max_tokens": max_tokens(options), "logprobs": alternatives}
    if options.stop is not None:
        given["stop"] = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
    try:
        return defaults.but(given)
    except BadInput as error:
        names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
        raise BadInput(f"options.{names.get(error.field, error.field)}", str(error).partition(": ")[2]) from None
