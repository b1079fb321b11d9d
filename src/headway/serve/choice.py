"""One choice of an answer, and what it gains step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headway.core.request import Finish
from headway.core.step import TokenLogprobs
from headway.serve.logprobs import ShownToken
from headway.text.parts import CallArguments, CallBegun, Part, Said, Thought


@dataclass
class Prompt:
    """A prompt, and what became known of it.

    Attributes:
        tokens: its ids.
        text: what an echo shows; "" without echo.
        hidden: the first id is a start token that is not part of `text`.
        logprobs: one entry per id from the second on, as they come, if asked for.
        cached: tokens that came from the prefix cache.
        pooled: what the engine pooled of it, if that was asked for.
    """

    tokens: tuple[int, ...]
    text: str = ""
    hidden: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int = 0
    pooled: bytes = b""


class Gain(msgspec.Struct, frozen=True, gc=False):
    """What a choice gained.

    Attributes:
        parts: what became certain of its content, in order; each call has an id.
        logprobs: of the tokens whose text came, if asked for.
        finish: set on the last one. Its reason is "stop", "length", or "tool_calls" (it stopped to have tools called).
    """

    parts: Sequence[Part]
    logprobs: Sequence[ShownToken] = ()
    finish: Finish | None = None


@dataclass
class Block:
    """A stretch of a choice's content that is of one kind.

    Attributes:
        texts: pieces of what is said or thought, or of a call's arguments.
        name, id: of a call.
    """

    kind: Literal["text", "reasoning", "call"]
    texts: list[str] = field(default_factory=list)
    name: str = ""
    id: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a call, as an object; a text that was cut, or that the model got wrong, gives {}."""
        try:
            value = msgspec.json.decode(self.text)
        except msgspec.DecodeError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass
class Choice:
    """One choice of an answer; `blocks` and `logprobs` are folded only if the answer is not streamed.

    Attributes:
        index: among all choices of the answer.
        prompt: what it continues.
        calls: how many calls of tools it has begun.
        blocks: its content, in order.
        logprob_sum, logprob_count: of its tokens' log-probabilities, if the engine tells them.
    """

    index: int
    prompt: Prompt
    calls: int = 0
    blocks: list[Block] = field(default_factory=list)
    logprobs: list[ShownToken] = field(default_factory=list)
    finish: Finish | None = None
    logprob_sum: float = 0.0
    logprob_count: int = 0

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, those that ended it included."""
        return self.logprob_sum / max(1, self.logprob_count)

    def add(self, gain: Gain) -> None:
        for part in gain.parts:
            match part:
                case Said(text):
                    self._block("text").texts.append(text)
                case Thought(text):
                    self._block("reasoning").texts.append(text)
                case CallBegun(name, id):
                    self.blocks.append(Block("call", name=name, id=id))
                case CallArguments(text):
                    self.blocks[-1].texts.append(text)
        self.logprobs += gain.logprobs

    def _block(self, kind: Literal["text", "reasoning"]) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        return self.blocks[-1]

    @property
    def text(self) -> str:
        """All that is said."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        """All that is thought."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def called(self) -> list[Block]:
        """The calls of tools."""
        return [block for block in self.blocks if block.kind == "call"]
