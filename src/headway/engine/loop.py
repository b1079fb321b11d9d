"""The engine loop: drain, plan, submit, collect, commit, emit.

    submit, cancel --> scheduler.plan(now) --> executor --> text, stop strings --> scheduler.commit --> deltas

The same loop drives the real model, the simulator and a replay; which one is a matter of the executor and the clock
it is given. One turn is one step. Not thread-safe: one thread turns it.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from headway.cache.explain import Explanation, explain
from headway.core.clock import MAX_SECONDS, Clock, to_ps, to_seconds
from headway.core.errors import BadInput, EngineDead, HeadwayError, Rejected
from headway.core.pooling import GENERATES, PoolingConfig, check_use
from headway.core.receipts import Receipts
from headway.core.request import Finish, Request, SamplingParams
from headway.core.step import StepPlan, StepResult
from headway.engine.connector import KVConnector
from headway.engine.messages import TRANSFER_HEADER, Cancel, Delta, Explain, Refusal, Submit
from headway.engine.picture import Picture, picture
from headway.engine.regimes import RegimeWatch
from headway.executor.adapters import AdapterTable
from headway.executor.grammars import Grammars
from headway.executor.protocol import Executor
from headway.sampling.rows import check_params
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import Emission
from headway.text.output import OutputText
from headway.text.tokenizer import Tokenizer

MAX_FAILURES = 8  # steps in a row that break; then the executor is taken for broken for good

logger = logging.getLogger(__name__)


class EngineLoop:
    """Turns requests into deltas.

    Attributes:
        scheduler, executor, clock: what it drives, with, and by.
        tokenizer: for text and stop strings; None = deltas carry ids only, and stop strings are refused.
        adapters: those that requests may name; None = the engine takes none.
        receipts: the fold that shares the machine's time among requests; None = deltas carry no receipts.
        grammars: those that requests are bound to; None = the engine takes none.
        pooling: what the model makes of whole texts.
        regimes: the fold that knows the machine's regime; None = steps are predicted by one model.
        connector: brings and gives blocks of the cache; None = evicted prefixes are forgotten, all are computed here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        adapters: AdapterTable | None = None,
        receipts: Receipts | None = None,
        grammars: Grammars | None = None,
        regimes: RegimeWatch | None = None,
        pooling: PoolingConfig = GENERATES,
        connector: KVConnector | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.tokenizer = tokenizer
        self.adapters = adapters
        self._receipts = receipts
        self.grammars = grammars
        self._regimes = regimes
        self._connector = connector
        self._pooling = pooling
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._texts: dict[str, OutputText] = {}  # by choice id
        self._followed: dict[str, Future[Any]] = {}  # grammars of live choices
        self._plans: deque[StepPlan] = deque()  # in flight, oldest first
        self._failures = 0  # steps in a row that broke
        self._unreported = 0  # ps spent outside of the executor since the last step's event was out

    @property
    def idle(self) -> bool:
        """Nothing to do until something is submitted."""
        return self.scheduler.idle and self._failures < MAX_FAILURES

    def compiling(self, params: SamplingParams) -> Future[Any] | None:
        """What a request should wait for before it is submitted; None = nothing."""
        if params.grammar is None or self.grammars is None:
            return None
        future = self.grammars.begin(params.grammar)
        return None if future.done() else future

    def submit(self, message: Submit) -> Refusal | None:
        """Accept a request, or say at once why not. One with a grammar waits here until that is compiled."""
        try:
            message = message if self._connector is None else self._connector.order(message)
            if message.transfer:
                raise BadInput(TRANSFER_HEADER, "this server is in no pool; --role and --kv-secret-file put it in one")
            grammar = self._grammar(message.params)
            request = self._request(message)
            choices = self.scheduler.add(request)
            if self._connector is not None:
                self._connector.added(message, request)
        except HeadwayError as error:
            if isinstance(error, Rejected):
                return Refusal(message.id, str(error), error.reason.code, error.status, error.retry_after)
            return Refusal(message.id, str(error), "invalid_value", error.status)
        if grammar is not None:
            self._followed.update((choice.id, grammar) for choice in choices)
        if self.tokenizer is not None:
            for choice in choices:
                self._texts[choice.id] = OutputText(
                    self.tokenizer,
                    message.tokens,
                    stop=request.params.stop,
                    stop_ids=request.stop_ids,
                    min_tokens=request.params.min_tokens,
                    include_stop=request.params.include_stop_str_in_output,
                    skip_special=request.params.skip_special_tokens,
                )
        return None

    def _grammar(self, params: SamplingParams) -> Future[Any] | None:
        """What keeps the request's grammar compiled."""
        if params.grammar is None:
            return None
        if self.grammars is None:
            raise BadInput("grammar", "this engine has no tokenizer to follow one with")
        future = self.grammars.begin(params.grammar)
        future.result()
        if params.allowed_token_ids:
            self.grammars.check_allowed(params.grammar, params.allowed_token_ids)
        return future

    def _request(self, message: Submit) -> Request:
        params = message.params
        check_params(params, self._vocab_size)
        if message.tokens and not 0 <= min(message.tokens) <= max(message.tokens) < self._vocab_size:
            raise BadInput("prompt", f"holds a token id that is not from 0 to {self._vocab_size - 1}")
        check_use(self._pooling, params.pooling)
        if params.stop and self.tokenizer is None:
            raise BadInput("stop", "this engine has no tokenizer to find strings with; use stop_token_ids")
        deadline = message.deadline
        if deadline is not None and not 0 <= deadline <= MAX_SECONDS:
            raise BadInput("deadline", f"{deadline!r} is not a number of seconds from 0 to {MAX_SECONDS:g}")
        if params.seed is None:
            params = _seeded(params)
        adapter = self._adapters.identity(message.adapter) if message.adapter else ""
        limit = self.scheduler.limits.max_model_len
        wanted = params.max_tokens if params.pooling is None else 1
        now = self.clock.now()
        arrival = now if message.arrival is None else message.arrival
        return Request(
            message.id,
            message.tokens,
            params,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            max_len=limit if wanted is None else len(message.tokens) + wanted,
            arrival=arrival,
            priority=message.priority,
            deadline=None if deadline is None else arrival + to_ps(deadline),
            tenant=message.tenant,
            namespace=message.namespace,
            adapter=adapter,
            remote=message.remote,
        )

    def cancel(self, message: Cancel) -> None:
        """Stop all choices of a request; unknown ids are ignored."""
        self.scheduler.cancel_request(message.id, self.clock.now())

    @property
    def _adapters(self) -> AdapterTable:
        if self.adapters is None:
            raise BadInput("adapter", "this engine takes no adapters; --max-loras makes room for them")
        return self.adapters

    def adapter_paths(self) -> dict[str, str]:
        """Where each LoRA adapter that requests may name comes from."""
        loaded = {} if self.adapters is None else self.adapters.loaded
        return {name: str(file.path) for name, file in loaded.items()}

    def load_adapter(self, name: str, path: Path, replace: bool = False) -> None:
        """Make a LoRA adapter known to requests from now on, instead of one of its name with `replace`. Steps wait.

        Raises:
            HeadwayError: it cannot be loaded; nothing has changed.
        """
        self._adapters.load(name, path, self.scheduler.adapters_in_use(), replace)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; requests that have it go on with it to their end.

        Raises:
            BadInput: there is none of that name.
        """
        self._adapters.unload(name, self.scheduler.adapters_in_use())

    def explain(self, message: Explain) -> Explanation:
        """What the prefix cache has of a prompt now. Changes nothing.

        Raises:
            BadInput: there is no such adapter.
        """
        adapter = self._adapters.identity(message.adapter) if message.adapter else ""
        return explain(self.scheduler.cache, message.tokens, message.namespace, adapter)

    def look(self) -> Picture:
        """What the engine holds now. Changes nothing."""
        return picture(self.scheduler.state, self.scheduler.blocked, self.clock.now())

    def turn(self) -> list[Delta]:
        """Plan as many steps as the executor takes, and take the result of the oldest -> what every choice gained.
        Empty when there was nothing to do.

        Raises:
            EngineDead: the last `MAX_FAILURES` steps all broke; their rows have ended.
        """
        if self._failures >= MAX_FAILURES:
            raise EngineDead(f"the last {self._failures} steps all failed; the log has their tracebacks")
        if self._regimes is not None and not self._plans and (news := self._regimes.news(self.clock.now())) is not None:
            self.scheduler.enter_regime(news)
        if self._connector is not None:
            self._connector.turn()
        failure = self._hand_out()
        if not self._plans:
            none = StepResult(step=-1)
            now = self.clock.now()
            return [self._delta(emission, none, "", now) for emission in self.scheduler.take_emissions()]
        result, broken = self._collect(failure)
        computed = self.clock.now()
        self._add_host_time(result)
        texts = self._read(result)
        emissions = self.scheduler.commit(result, self.clock.now())
        if broken:
            self.scheduler.executor_reset(self.clock.now())
        self._save()
        now = self.clock.now()
        deltas = [self._delta(emission, result, texts.get(emission.request.id, ""), now) for emission in emissions]
        if self.adapters is not None and self.adapters.leaving:
            self.adapters.release(self.scheduler.adapters_in_use())
        self._unreported = self.clock.now() - computed
        return deltas

    def _hand_out(self) -> Exception | None:
        """Plan and submit until the executor has enough, or there is nothing to plan -> what broke it."""
        while len(self._plans) < self.scheduler.limits.max_in_flight:
            begin = self.clock.now()
            plan = self.scheduler.plan(begin)
            self._save()
            self._unreported += self.clock.now() - begin
            if plan.empty:
                break
            self._plans.append(plan)
            try:
                self.executor.submit(plan)
            except Exception as error:
                return error
        return None

    def _save(self) -> None:
        """Let go what leaves the cache, while it is there."""
        if self._connector is not None:
            self._connector.save()

    def _collect(self, failure: Exception | None) -> tuple[StepResult, bool]:
        """(the result of the oldest plan, whether the executor broke). Whatever broke, it costs this step's rows, not
        the server; nobody knows how far the executor came with the plan, so it forgets everything."""
        plan = self._plans.popleft()
        try:
            if failure is not None:
                raise failure
            result = self.executor.collect(plan.step)
            self._failures = 0
            return result, False
        except Exception as error:
            self._failures += 1
            logger.exception(
                "step %d failed, number %d in a row; its %d rows end with an error (tokens by row: %s; %d wait)",
                plan.step, self._failures, len(plan.work), [work.count for work in plan.work], self.scheduler.waiting,
            )  # fmt: skip
            self._plans.clear()
            self.executor.reset()
            sentence = f"the engine failed in step {plan.step}: {type(error).__name__}"
            return StepResult(step=plan.step, failed={work.id: sentence for work in plan.work}), True

    def _add_host_time(self, result: StepResult) -> None:
        """A step's host time: planning, and the commit, texts and messages of the step before, which came after the
        event of that one."""
        seconds = result.seconds
        result.seconds = msgspec.structs.replace(seconds, host=seconds.host + to_seconds(self._unreported))

    def _read(self, result: StepResult) -> dict[str, str]:
        """Text of the new tokens; a stop string that is met ends its row with this very step."""
        texts: dict[str, str] = {}
        for request, tokens in self.scheduler.emitting(result):
            text = self._texts.get(request.id)
            if text is None:
                continue
            if len(tokens) == 1:
                texts[request.id] = text.push(tokens[0])
            else:
                pushed = [text.push(token) for token in tokens if text.matched is None]
                texts[request.id] = "".join(pushed)
                result.tokens[request.id] = tokens[: len(pushed)]  # what was accepted behind a stop string never was
            if text.matched is not None and request.id not in result.finish:
                result.finish[request.id] = Finish("stop", text.matched)
        return texts

    def _delta(self, emission: Emission, result: StepResult, text: str, now: int) -> Delta:
        request = emission.request
        if emission.finish is not None:
            self._followed.pop(request.id, None)
            if request.id in self._texts:
                text += self._texts.pop(request.id).flush()
        return Delta(
            id=request.request_id,
            choice=request.choice,
            at=now,
            tokens=emission.tokens,
            text=text,
            logprobs=result.logprobs.get(request.id, ())[: len(emission.tokens)],
            prompt_logprobs=result.prompt_logprobs.get(request.id, ()),
            pooled=result.pooled.get(request.id, b""),
            cached=request.cached,
            finish=emission.finish,
            receipt=self._receipts.take(request.id, request.tenant) if self._receipts and emission.finish else None,
        )

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()
        self.executor.close()
        if self.grammars is not None:
            self.grammars.close()


def _seeded(params: SamplingParams) -> SamplingParams:
    """With a random seed; the event log keeps it."""
    return msgspec.structs.replace(params, seed=secrets.randbits(63))
