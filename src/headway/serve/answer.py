"""What all APIs have in common: a conversation, what is asked of the engine, and the answer as it grows.

    a dialect's body -> Query --tokenised--> Answer --Submits--> engine --Deltas--> Answer -> a dialect's bytes

Nothing here knows how any API spells it.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.core.receipts import Receipt
from headway.core.request import Finish, SamplingParams
from headway.engine.messages import TRANSFER_HEADER, Delta, Refusal, Submit
from headway.serve.choice import Choice, Gain, Prompt
from headway.serve.conversation import AS_IT_DOES, AUTO, Message, Reasoning, Tool, ToolChoice
from headway.serve.errors import ApiError
from headway.serve.logprobs import ShownToken, ShownTokens
from headway.text.chat import Ending
from headway.text.parts import CallBegun, Part, PartParser, Said

if TYPE_CHECKING:
    from headway.serve.text import Text

ENTRY_BYTES = 64  # of one log-probability in JSON, about
NUMBER_BYTES = 24  # of one number of a vector
MAX_ANSWER_BYTES = 64 << 20

DEADLINE_HEADER = "x-request-timeout"
DEADLINE = "deadline exceeded"  # as the scheduler says it

log = logging.getLogger("headway.serve")


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a request of any API asks for.

    Attributes:
        messages: a conversation to answer; None = `prompts` are to be continued.
        ending: how the conversation ends.
        tools: what the model may call, and `tool_choice`, whether it does.
        variables: of the chat template.
        reasoning: whether the model thinks first, where it can.
        parser: makes what reads a choice's text as parts; None = all of it is said.
        prompts: texts or token ids; the choices of an answer are numbered prompt by prompt.
        params: how to sample; its `max_tokens` is not looked at.
        best: how many choices of a prompt are answered, those of the highest mean log-probability; None = all.
        max_tokens: most tokens to generate; None = what the context holds, 0 = none, for the sake of an echo.
        to_context: more `max_tokens` than the context holds are no fault: the answer says that the context ended it.
        truncate: how many tokens of a prompt count, its last ones; None = all.
        max_context: most tokens of prompt and output together, if that is less than the model's context.
        model: who answers.
        adapter: the LoRA adapter over it; "" = the model itself.
        priority: its class; a lower one goes first.
        stream: answer piece by piece.
        echo: the answer begins with the prompt.
        field, limit_field, grammar_field: what the API calls messages or prompts, `max_tokens`, and the grammar in
            `params`, for errors.
        id_prefix: of the answer's id.
        format: makes what writes the answer.
    """

    messages: Sequence[Message] | None = None
    ending: Ending = Ending.NATURAL
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = AUTO
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: Reasoning = AS_IT_DOES
    parser: Callable[[], PartParser] | None = None
    prompts: Sequence[str | list[int]] = ()
    params: SamplingParams
    best: int | None = None
    max_tokens: int | None = None
    to_context: bool = False
    truncate: int | None = None
    max_context: int | None = None
    model: str
    adapter: str = ""
    priority: int = 0
    stream: bool = False
    echo: bool = False
    field: str
    limit_field: str = "max_tokens"
    grammar_field: str = "grammar"
    id_prefix: str
    format: Callable[[Answer], Format]


class Format(Protocol):
    """Writes one answer as an API spells it.

    Attributes:
        stream_type: media type of a stream.
        keep_alive: bytes that say nothing, and may stand between any two chunks.
    """

    stream_type: bytes
    keep_alive: bytes

    def chunk(self, choice: Choice, gain: Gain) -> bytes:
        """What a gain adds to the stream; may be empty."""
        ...

    def end(self) -> bytes:
        """What ends a stream."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that fails: its status is sent already."""
        ...

    def whole(self) -> list[bytes]:
        """The answer that is not streamed, as JSON in pieces."""
        ...


class Answer:
    """A query on its way.

    Args:
        prompts: tokenised, one per prompt, with how many tokens each may generate.
        arrival: when the body had come, ps: queueing in this process and tokenising are part of the wait.
        deadline: seconds after it at which the request ends; None = never.
        text: the model's, by which log-probabilities are told apart; None = none are asked for.
        caution: what usage warns of; "" = nothing.

    Attributes:
        model: as the answer calls it.
        created: Unix seconds.
        submits: what the engine is asked, one per prompt of `prompts`.
        choices: in order of their index.
        completion_tokens: generated so far, by all choices; `reasoning_tokens`, how many of them in reasoning.
        admitted: when the first prompt got its cache blocks, ps; None = not yet.
        receipt: what its choices that have ended took of the machine.
        itemise: makes the bill that usage shows; None = it shows none.
        ended: is told when it has ended, and why it failed, if it did; None = nobody wants to know.
        first, last: when the first and the latest token came, ps; 0 = none did.
    """

    def __init__(
        self,
        query: Query,
        prompts: Sequence[tuple[Prompt, int]],
        tenant: str,
        arrival: int,
        deadline: float | None = None,
        text: Text | None = None,
        caution: str = "",
        namespace: str | None = None,
    ) -> None:
        self.query = query
        self._caution = caution
        self.id = query.id_prefix + secrets.token_hex(12)
        self.model = query.adapter or query.model
        self.created = int(time.time())
        self.arrival = arrival
        self.submits = [
            Submit(
                id=f"{self.id}-{number}",
                tokens=prompt.tokens,
                params=replace(query.params, max_tokens=max(room, 1)),  # of 0 wanted one is made, and dropped
                arrival=arrival,
                deadline=deadline,
                tenant=tenant,
                namespace=namespace,
                adapter=query.adapter,
                priority=query.priority,
            )
            for number, (prompt, room) in enumerate(prompts)
        ]
        n = query.params.n
        self.prompts = [prompt for prompt, _ in prompts]
        self.choices = [Choice(index, self.prompts[index // n]) for index in range(len(prompts) * n)]
        self.completion_tokens = self.reasoning_tokens = 0
        self.receipt = Receipt()
        self.itemise: Callable[[Receipt], dict[str, float]] | None = None
        self.ended: Callable[[BaseException | None], None] | None = None
        self._check_size()
        self.admitted: int | None = None
        self.first = self.last = 0
        skip = query.params.skip_special_tokens
        self._shown = {
            choice.index: ShownTokens(text, choice.prompt.tokens, skip, keep_end=query.echo)
            for choice in self.choices
            if text is not None and query.params.logprobs is not None
        }
        self._parsers = {choice.index: query.parser() for choice in self.choices} if query.parser else {}
        self._choices = {
            (submit.id, number): self.choices[index * n + number]
            for index, submit in enumerate(self.submits)
            for number in range(n)
        }

    def _check_size(self) -> None:
        """
        Raises:
            BadInput: the answer could be too large to be held, or an echo to be sent.
        """
        params, stream = self.query.params, self.query.stream
        prompts = self.query.echo or params.prompt_logprobs is not None
        tokens = sum(
            (submit.params.max_tokens or 0) * (not stream) + len(submit.tokens) * prompts for submit in self.submits
        )
        counts = [count for count in (params.logprobs, params.prompt_logprobs) if count is not None]
        size = params.n * tokens * (ENTRY_BYTES * (max(counts) + 1) if counts else 4)
        if size > MAX_ANSWER_BYTES:
            problem = f"the answer could have {size >> 20} MiB, and {MAX_ANSWER_BYTES >> 20} are accepted"
            hint = "ask for fewer log-probabilities, choices or tokens" + ("" if stream else ", or stream it")
            raise BadInput("n" if params.logprobs is None else "logprobs", f"{problem}; {hint}")

    def send_by(self, way: str) -> None:
        """Let its prompt's blocks go to, or come from, another engine of the pool.

        Raises:
            BadInput: it has several prompts, and a ticket is for one.
        """
        if len(self.submits) != 1:
            raise BadInput(TRANSFER_HEADER, f"it is for one prompt, and the request has {len(self.submits)}")
        self.submits = [replace(self.submits[0], transfer=way)]

    def bind(self, grammar: Grammar) -> None:
        """Let its choices follow a grammar, in its compiled form."""
        self.submits = [replace(submit, params=replace(submit.params, grammar=grammar)) for submit in self.submits]

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; the choices of one count it once."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def answered(self) -> list[Choice]:
        """The choices that a whole answer shows, of each prompt the best first if only some are."""
        best, n = self.query.best, self.query.params.n
        if best is None:
            return self.choices
        groups = [self.choices[first : first + n] for first in range(0, len(self.choices), n)]
        return [one for group in groups for one in sorted(group, key=lambda choice: -choice.mean_logprob)[:best]]

    @property
    def cut_by_context(self) -> bool:
        """The context holds less than was asked for."""
        wanted = self.query.max_tokens
        return wanted is not None and any((submit.params.max_tokens or 0) < wanted for submit in self.submits)

    @property
    def logprob_entries(self) -> int:
        """Log-probabilities in the answer so far, the prompts' in an echo included."""
        if self.query.params.logprobs is None:
            return 0
        echoed = self.query.params.n * self.prompt_tokens if self.query.echo else 0
        return (echoed + self.completion_tokens) * (self.query.params.logprobs + 1)

    @property
    def bytes_to_build(self) -> int:
        """Of the answer so far, what takes time to write."""
        numbers = sum(len(prompt.pooled) // 4 for prompt in self.prompts)
        return self.logprob_entries * ENTRY_BYTES + numbers * NUMBER_BYTES

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(prompt.cached for prompt in self.prompts)

    @property
    def bill(self) -> dict[str, Any]:
        """What usage says besides: the receipt, if the client wants one, and what it should know."""
        receipt = {} if self.itemise is None else {"receipt": self.itemise(self.receipt)}
        return receipt | ({"warning": self._caution} if self._caution else {})

    def take(self, outputs: Sequence[Delta | Refusal]) -> list[tuple[Choice, Gain]]:
        """Count what came, and say which choices gained something.

        Raises:
            ApiError: the engine refused a prompt, or a row failed.
        """
        gained = []
        for output in outputs:
            if isinstance(output, Refusal):
                retry = None if output.retry_after is None else math.ceil(output.retry_after)
                named, _, problem = output.message.partition(":")
                own = self.query.field if named == "prompt" else None  # this API may call it otherwise
                message = f"{own}:{problem}" if own else output.message
                raise ApiError(output.status, message, param=own, code=output.code, retry_after=retry)
            if output.finish is not None and output.finish.reason not in ("stop", "length"):
                raise failure(output.finish)
            if self.query.max_tokens == 0:
                output = replace(output, tokens=(), text="", logprobs=(), finish=output.finish and Finish("length"))
            if output.receipt is not None:
                self.receipt += output.receipt
            choice = self._choices[output.id, output.choice]
            if output.logprobs:
                choice.logprob_sum += sum([one.logprob for one in output.logprobs])
                choice.logprob_count += len(output.logprobs)
            if output.choice == 0:
                choice.prompt.cached = output.cached
            if output.prompt_logprobs:
                choice.prompt.logprobs += output.prompt_logprobs
            choice.prompt.pooled = output.pooled
            if output.tokens:
                self.completion_tokens += len(output.tokens)
                self.first = self.first or output.at
                self.last = output.at
            if output.tokens or output.text or output.finish is not None:
                gain = self.gain(choice, output)
                choice.finish = gain.finish
                gained.append((choice, gain))
        return gained

    def gain(self, choice: Choice, delta: Delta) -> Gain:
        """What a delta is to its choice: its text read as parts."""
        parser, finish = self._parsers.get(choice.index), delta.finish
        logprobs: Sequence[ShownToken] = ()
        if self._shown:
            logprobs = self._shown[choice.index].push(delta.text, delta.logprobs, finish is not None)
        if parser is None:
            return Gain((Said(delta.text),) if delta.text else (), logprobs, finish)
        before = parser.thinking
        read = [*parser.push(delta.text), *(parser.flush() if finish is not None else ())]
        if before or parser.thinking:
            self.reasoning_tokens += len(delta.tokens)
        parts: list[Part] = []
        for part in read:
            if isinstance(part, CallBegun):
                choice.calls += 1
                part = CallBegun(part.name, part.id or f"call_{secrets.token_hex(12)}")
            parts.append(part)
        if finish is not None and finish.reason == "stop" and choice.calls:
            finish = Finish("tool_calls", finish.matched)
        return Gain(parts, logprobs, finish)


def failure(finish: Finish) -> ApiError:
    """What a client is told about a request that ended neither by itself nor by its limit."""
    if finish.reason == "abort":
        why = "the server ended the request before it was complete" + (f": {finish.matched}" if finish.matched else "")
        waited = "queue_timeout" if finish.matched else "aborted"
        code = "deadline_exceeded" if finish.matched == DEADLINE else waited
        return ApiError(503, why, code=code)
    log.error("a request failed: %s", finish.matched)
    return ApiError(500, f"the request failed: {finish.matched}", code="engine_error")
