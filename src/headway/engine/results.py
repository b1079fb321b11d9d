"""What the Python API returns: a finished request folded from its deltas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.core.clock import to_seconds
from headway.core.request import Finish
from headway.core.step import TokenLogprobs
from headway.engine.messages import Delta


@dataclass
class Choice:
    """One of the n continuations.

    Attributes:
        index: which one.
        tokens: generated ids, an ending stop id included.
        text: what they say; without stop strings and ids.
        finish: why it ended; None while it runs.
        logprobs: one entry per token, if asked for.
        token_times: seconds from arrival at which tokens were emitted, one per token.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token, queueing included."""
        return self.token_times[0] if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; undefined for fewer than two tokens."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass
class Completion:
    """A request with all its choices.

    Attributes:
        id: the request.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them came from the prefix cache.
        choices: by index.
        prompt_logprobs: one entry per prompt token from the second on, if asked for.
        pooled: of a prompt that is pooled, when it is done: float32 numbers, little-endian.
        listener: called with every delta, for streaming.
    """

    id: str
    prompt_tokens: int
    arrival: int
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: bytes = b""
    listener: Callable[[Delta], None] | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def done(self) -> bool:
        return all(choice.finish for choice in self.choices)

    def abort(self) -> None:
        """Nothing more comes: choices that did not finish are aborted."""
        for choice in self.choices:
            choice.finish = choice.finish or Finish("abort")

    def add(self, delta: Delta) -> None:
        choice = self.choices[delta.choice]
        choice.tokens += delta.tokens
        choice.text += delta.text
        choice.logprobs += delta.logprobs
        choice.token_times += [to_seconds(delta.at - self.arrival)] * len(delta.tokens)
        self.prompt_logprobs += delta.prompt_logprobs
        self.pooled = self.pooled or delta.pooled
        if delta.choice == 0:
            self.cached_tokens = delta.cached
        if self.listener is not None:
            self.listener(delta)
        choice.finish = delta.finish  # last: whoever sees the end has got everything before it
