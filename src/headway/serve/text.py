"""The text side of the API process: prompts to ids, ids to what a client reads. Its calls run in a thread pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from headway.core.errors import BadInput
from headway.core.request import SamplingParams
from headway.serve.answer import Answer, Query
from headway.serve.calling import bound, offered, told
from headway.serve.choice import Prompt
from headway.serve.conversation import Message, Tool, template_messages, template_tools
from headway.serve.errors import ApiError
from headway.text.chat import Ending
from headway.text.grammar import GrammarChecker
from headway.text.thinking import TAIL
from headway.text.tool_formats import ToolFormat

MAX_MESSAGES = 4096


class Text(Protocol):
    """A model's tokenizer and chat template. Thread-safe."""

    vocab_size: int
    longest_token: int  # characters of the longest token: a text of more than n times that has more than n tokens
    knows_developer: bool  # the chat template has a `developer` role of its own
    control_tokens: Mapping[str, int]  # tokens that are no text, by name
    template: str  # the chat template's source; "" = there is none
    tool_format: ToolFormat  # how the model calls tools
    suffix: Sequence[int]  # ids behind a text that is complete

    def load(self) -> None:
        """Build now what long texts need; short ones can be encoded before. Other threads may stand still meanwhile."""
        ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def encode_whole(self, *texts: str) -> list[int]:
        """Of a text that is complete, or of two, as models read them that answer with a vector or a score."""
        ...

    def encode_chat(self, messages: Sequence[dict[str, Any]], ending: Ending, **options: Any) -> list[int]:
        """The conversation as the model reads it, with `options` of `ChatTemplate.render`. Names of control tokens in
        messages are plain text.

        Raises:
            HeadwayError: there is no template, or it refuses the conversation.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def strip_after(self, prompt: Sequence[int]) -> int:
        """How many spaces at the start of what follows `prompt` are not part of the text."""
        ...

    def token_bytes(self, id: int, skip_special: bool = False) -> bytes:
        """What one token stands for; of a control token, its name, or nothing with `skip_special`."""
        ...


class PromptReader:
    """Turns what a client wrote into ids that fit the model.

    Args:
        text: the model's text side.
        max_model_len: most tokens of prompt and output together.
        default_params: how requests are sampled that leave it open.
        caution: what every answer's usage says besides; "" = nothing.
    """

    def __init__(self, text: Text, max_model_len: int, default_params: SamplingParams, caution: str = "") -> None:
        self.text = text
        self._caution = caution
        self.max_model_len = max_model_len
        self.default_params = default_params
        self.grammars = GrammarChecker(text.control_tokens)

    def answer(
        self, query: Query, tenant: str, arrival: int, deadline: float | None = None, namespace: str | None = None
    ) -> Answer:
        """A query, tokenised and ready for the engine. Arguments as of `Answer`.

        Raises:
            HeadwayError: the request is at fault.
        """
        if query.messages is not None:
            tools = offered(query.tools, query.tool_choice)
            variables = {**query.reasoning.variables(), **query.variables}
            tokens = self.chat(query.messages, query.ending, tools, variables)
            query = bound(query, tools, self.text, self.text.decode(tokens[-TAIL:], skip_special=False))
            tokenised, fields = [Prompt(tokens[-query.truncate :] if query.truncate else tokens)], [query.field]
        else:
            many = len(query.prompts) > 1
            fields = [f"{query.field}[{index}]" if many else query.field for index in range(len(query.prompts))]
            tokenised = [self._prompt(*one, query) for one in zip(query.prompts, fields, strict=True)]
        rooms = [self._room(len(one.tokens), field, query) for one, field in zip(tokenised, fields, strict=True)]
        prompts = list(zip(tokenised, rooms, strict=True))
        return Answer(query, prompts, tenant, arrival, deadline, self.text, self._caution, namespace)

    def chat(
        self,
        messages: Sequence[Message],
        ending: Ending = Ending.NATURAL,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[int, ...]:
        """Ids of a conversation."""
        if not 0 < len(messages) <= MAX_MESSAGES:
            raise BadInput("messages", f"give 1 to {MAX_MESSAGES} messages")
        messages, tools = told(messages, tools, self.text)
        plain = template_messages(messages, self.text.knows_developer)
        options: dict[str, Any] = {}
        if tools:
            options["tools"] = template_tools(tools)
        if variables:
            options["variables"] = dict(variables)
        self._check_length(sum(map(_characters, (plain, options))), "messages")
        return tuple(self.text.encode_chat(plain, ending, **options))

    def _prompt(self, prompt: str | list[int], field: str, query: Query) -> Prompt:
        if isinstance(prompt, str):
            tokens = self.text_tokens(prompt, field=field)
        else:
            self.check_ids(prompt, field)
            tokens = tuple(prompt)
        if not tokens:
            raise ApiError(400, f"{field}: it holds no token", param=field, code="empty_prompt")
        if query.truncate is not None and len(tokens) > query.truncate:
            tokens = tokens[-query.truncate :]
            prompt = list(tokens)
        if not query.echo:
            return Prompt(tokens)
        if isinstance(prompt, str):
            named, shown = (self.text.decode(tokens[:1], skip_special=skip) for skip in (False, True))
            return Prompt(tokens, prompt, hidden=not shown and not prompt.startswith(named))
        return Prompt(tokens, self.text.decode(tokens, skip_special=False))

    def wholes(self, given: Sequence[str | list[int]], field: str, truncate: int | None = None) -> list[list[int]]:
        """Ids of texts that are complete.

        Args:
            truncate: how many tokens of each count, its first ones; -1 = as many as the context holds, None = all.
        """
        return [
            self._whole((one,) if isinstance(one, str) else one, f"{field}[{n}]" if len(given) > 1 else field, truncate)
            for n, one in enumerate(given)
        ]

    def pair(self, query: str, document: str, field: str, truncate: int | None = None) -> list[int]:
        """Ids of two texts that are to be compared. truncate: as of `wholes`."""
        if all(role in self.text.template for role in ("query", "document")):
            turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            self._check_length(len(query) + len(document), field)
            return self.text.encode_chat(turns, Ending.NATURAL)
        return self._whole((query, document), field, truncate)

    def _whole(self, given: tuple[str, ...] | list[int], field: str, truncate: int | None) -> list[int]:
        if truncate is not None and truncate != -1 and truncate < 1:
            raise BadInput("truncate_prompt_tokens", f"{truncate} is not a number of tokens above 0, or -1")
        longest = self.max_model_len
        most = None if truncate is None else longest if truncate == -1 else min(truncate, longest)
        if not isinstance(given, tuple):
            return given if most is None else given[:most]
        if most is not None:
            given = tuple(text[: most * self.text.longest_token] for text in given)
        self._check_length(sum(map(len, given)), field)
        tokens, end = self.text.encode_whole(*given), self.text.suffix
        if not tokens:
            raise ApiError(400, f"{field}: it holds no token", param=field, code="empty_prompt")
        if most is None or len(tokens) <= most:
            return tokens
        return [*tokens[: most - len(end)], *end] if len(end) < most else tokens[:most]

    def text_tokens(self, text: str, add_special: bool = True, field: str = "prompt") -> tuple[int, ...]:
        self._check_length(len(text), field)
        return tuple(self.text.encode(text, add_special))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens by name.

        Raises:
            BadInput: one is not in the vocabulary, or they are more than a context holds.
        """
        if len(ids) > self.max_model_len:
            raise BadInput("tokens", f"{len(ids)} ids; at most {self.max_model_len} are accepted, as in a context")
        self.check_ids(ids, "tokens")
        return self.text.decode(ids, skip_special=False)

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

    def _room(self, tokens: int, field: str, query: Query) -> int:
        """How many tokens a prompt of `tokens` may generate: what is wanted, or all that the context holds.

        Raises:
            ApiError: prompt and output do not fit into the context together.
        """
        context = min(self.max_model_len, query.max_context or self.max_model_len)
        generates = query.params.pooling is None
        left = context - tokens + (not generates)
        if left < 1:
            what = ("the prompt", ", one of them for output") if generates else ("it", "")
            problem = f"{what[0]} has {tokens} tokens; the context holds {context}{what[1]}"
            raise ApiError(400, f"{field}: {problem}", param=field, code="context_length_exceeded")
        if query.max_tokens is not None and query.max_tokens > left and not query.to_context:
            problem = (
                f"{query.limit_field}: {tokens} prompt tokens + {query.max_tokens} output tokens are more than the "
                f"context of {context}; at most {left} are left"
            )
            raise ApiError(400, problem, param=query.limit_field, code="context_length_exceeded")
        return left if query.max_tokens is None else min(query.max_tokens, left)


def _characters(value: Any) -> int:
    """Of all texts in plain JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0
