"""The text side of the API process: prompts to ids, ids to what a client reads. Its calls run in a thread pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headway.core.errors import BadInput
from headway.serve.errors import ApiError
from headway.serve.openai import MAX_MESSAGES, Message

ROLES = ("system", "developer", "user", "assistant")


class Text(Protocol):
    """A model's tokenizer and chat template. Thread-safe."""

    vocab_size: int
    longest_token: int  # characters of the longest token: a text of more than n times that has more than n tokens
    bos_id: int | None  # what `encode` may put in front of a text
    knows_developer: bool  # the chat template has a `developer` role of its own

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The conversation as the model reads it, ready for the assistant's turn. Names of control tokens in messages
        are plain text.

        Raises:
            HeadwayError: there is no template, or it refuses the conversation.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, id: int) -> bytes:
        """What one token stands for; of a control token, its name."""
        ...


def template_messages(messages: Sequence[Message], knows_developer: bool) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: role and text.

    The `developer` role becomes `system` where the template does not know it; then all system texts are joined into one
    first message, because templates accept a system message only there.

    Raises:
        ApiError: a role or a content part this server does not know, or tool calls.
    """
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if knows_developer or not any(message["role"] == "developer" for message in plain):
        return plain
    system = [message["content"] for message in plain if message["role"] in ("system", "developer")]
    rest = [message for message in plain if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest]


def _plain(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        problem = "tools are not supported by this server" if message.role in ("tool", "function") else "unknown role"
        raise ApiError(
            400, f"{where}.role: {problem}; use one of {', '.join(ROLES)}", param=f"{where}.role", code="invalid_value"
        )
    for field in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, field) not in (None, []):
            param = f"{where}.{field}"
            raise ApiError(400, f"{param}: not supported by this server; leave it out", param=param, code="unsupported")
    if message.content is None and message.role != "assistant":
        raise BadInput(f"{where}.content", "the field is required")
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, f"{where}.content")}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    return plain


def _content(message: Message, where: str) -> str:
    if isinstance(message.content, list):
        texts = []
        for index, part in enumerate(message.content):
            param = f"{where}[{index}]"
            if part.type != "text":
                problem = f"parts of type {part.type[:40]!r} are not supported by this server; send text"
                raise ApiError(400, f"{param}: {problem}", param=param, code="unsupported")
            if part.text is None:
                raise BadInput(f"{param}.text", "the field is required")
            texts.append(part.text)
        return "\n".join(texts)  # as the Python API and vLLM do
    return message.content or ""


class PromptReader:
    """Turns what a client wrote into ids that fit the model.

    Args:
        text: the model's text side.
        max_model_len: most tokens of prompt and output together.
    """

    def __init__(self, text: Text, max_model_len: int) -> None:
        self.text = text
        self.max_model_len = max_model_len

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if not 0 < len(messages) <= MAX_MESSAGES:
            raise BadInput("messages", f"give 1 to {MAX_MESSAGES} messages")
        plain = template_messages(messages, self.text.knows_developer)
        self._check_length(sum(len(message["content"]) for message in plain), "messages")
        return tuple(self.text.encode_chat(plain))

    def prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            tokens = self.text_tokens(prompt)
        else:
            self.check_ids(prompt, "prompt")
            tokens = tuple(prompt)
        if not tokens:
            raise ApiError(400, "prompt: it holds no token", param="prompt", code="empty_prompt")
        return tokens

    def text_tokens(self, text: str, add_special: bool = True) -> tuple[int, ...]:
        self._check_length(len(text), "prompt")
        return tuple(self.text.encode(text, add_special))

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """
        Raises:
            BadInput: one is not in the vocabulary.
        """
        for token in ids:
            if not 0 <= token < self.text.vocab_size:
                raise BadInput(field, f"{token} is not a token id from 0 to {self.text.vocab_size - 1}")

    def _check_length(self, characters: int, field: str) -> None:
        """Refuse before tokenising what cannot fit even if every token were the longest one."""
        if characters > self.max_model_len * self.text.longest_token:
            problem = f"{characters} characters are more than the context of {self.max_model_len} tokens can hold"
            raise ApiError(400, f"{field}: {problem}", param=field, code="context_length_exceeded")

    def check_room(self, tokens: int, wanted: int | None, field: str) -> int:
        """How many tokens a prompt of `tokens` may generate: what is wanted, or all that the context holds.

        Raises:
            ApiError: prompt and output do not fit into the context together.
        """
        left = self.max_model_len - tokens
        if left < 1:
            problem = f"the prompt has {tokens} tokens; the context holds {self.max_model_len}, one of them for output"
            raise ApiError(400, f"{field}: {problem}", param=field, code="context_length_exceeded")
        if wanted is not None and wanted > left:
            problem = (
                f"max_tokens: {tokens} prompt tokens + {wanted} output tokens are more than the context of "
                f"{self.max_model_len}; at most {left} are left"
            )
            raise ApiError(400, problem, param="max_tokens", code="context_length_exceeded")
        return left if wanted is None else wanted
