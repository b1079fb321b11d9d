"""Ollama's request bodies as typed structs, and what of their options becomes `SamplingParams`.

As everywhere, a field is honoured, refused with its name, or declared as without effect; `null` means "not given". An
option that is not given has this server's default, not Ollama's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import BadInput
from headway.core.request import SamplingParams
from headway.serve import conversation
from headway.serve.conversation import ROLES, ToolCall
from headway.serve.dialect import known_fields, refuse
from headway.serve.logprobs import asked
from headway.serve.tools import ToolBody

# Would change the answer, and are not built: refused unless null or one of these values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
}
REFUSED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "repeat_last_n": (-1,),  # the penalty sees the whole context, always
    "embedding_only": (False,),
}
REFUSED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"images": ([],)}
# About what is off above, and about loading and speed, which this server decides when it starts.
IGNORED_OPTIONS = (
    "mirostat_tau", "mirostat_eta", "penalize_newline", "num_keep", "numa", "num_batch", "num_gpu", "main_gpu",
    "num_thread", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock",
)  # fmt: skip
if TYPE_CHECKING:
    _Known = msgspec.Struct
    _KnownOptions = msgspec.Struct
else:
    _Known = known_fields("keep_alive", *REFUSED)
    _KnownOptions = known_fields(*IGNORED_OPTIONS, *REFUSED_OPTIONS)
HONOURED = ("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "presence_penalty", "frequency_penalty")


class Options(_KnownOptions, forbid_unknown_fields=True, kw_only=True):
    """`options`."""

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


class _Body(_Known, forbid_unknown_fields=True, kw_only=True):
    """What both generating routes accept. `keep_alive` is ignored: the model is always loaded."""

    model: str | None = None
    stream: bool | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    format: Any = None
    think: bool | str | None = None

    @property
    def thinking(self) -> conversation.Reasoning:
        """What `think` asks for: whether, or how much."""
        if isinstance(self.think, str):
            return conversation.effort(self.think, "think")
        return conversation.Reasoning(self.think, shown=self.think is not False)

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def alternatives(self) -> int | None:
        """How many likeliest alternatives to report per token; None = no logprobs at all."""
        return asked(self.logprobs, self.top_logprobs)


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation; fields this server does not know are ignored."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Any = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call of a tool that the assistant made."""

    id: str | None = None
    function: OllamaCalledFunction


class OllamaCalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaChatRequest(_Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[ToolBody] | None = None

    def conversation(self) -> list[conversation.Message]:
        return [_turn(message, f"messages[{index}]") for index, message in enumerate(self.messages or ())]


class OllamaGenerateRequest(_Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate: `prompt` becomes a conversation of one turn, unless `raw`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    def conversation(self) -> list[conversation.Message]:
        system = [conversation.Message("system", self.system)] if self.system else []
        return [*system, conversation.Message("user", self.prompt or "")]


class OllamaEmbedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed. `truncate`: what the context does not hold is left out, not refused; that is the default."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None  # token ids are accepted too
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: Any = None


class OllamaEmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings, as that was called before."""

    model: str | None = None
    prompt: str | None = None
    options: Options | None = None
    keep_alive: Any = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """POST /api/show; `name` is what `model` was called once."""

    model: str | None = None
    name: str | None = None


def _turn(message: OllamaMessage, where: str) -> conversation.Message:
    if message.role not in ROLES:
        raise BadInput(f"{where}.role", f"unknown role; use one of {', '.join(ROLES)}")
    refuse(message, REFUSED_IN_MESSAGES, f"{where}.")
    if message.tool_calls and message.role != "assistant":
        raise BadInput(f"{where}.tool_calls", f"only the assistant makes calls, not {message.role!r}")
    calls = [
        ToolCall(call.id or f"call_{number}", call.function.name, msgspec.json.encode(call.function.arguments).decode())
        for number, call in enumerate(message.tool_calls or ())
    ]
    about = {"name": message.tool_name, "tool_call_id": message.tool_call_id} if message.role == "tool" else {}
    return conversation.Message(
        message.role, message.content or "", reasoning=message.thinking, tool_calls=tuple(calls), **about
    )


def max_tokens(options: Options) -> int | None:
    """`num_predict`, where -1 and -2 mean what is left of the context."""
    return None if options.num_predict in (None, -1, -2) else options.num_predict


def sampling_params(options: Options, alternatives: int | None, defaults: SamplingParams) -> SamplingParams:
    """
    Raises:
        BadInput: a value is out of range.
    """
    if options.num_ctx is not None and options.num_ctx < 1:
        raise BadInput("options.num_ctx", f"{options.num_ctx} is not an integer >= 1")
    given = {name: getattr(options, name) for name in HONOURED}
    given["repetition_penalty"] = given.pop("repeat_penalty")
    given |= {"max_tokens": max_tokens(options), "logprobs": alternatives}
    if options.stop is not None:
        given["stop"] = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
    return defaults.but(given)
