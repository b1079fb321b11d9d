"""The engine loop: drain, plan, submit, collect, commit, emit.

    submit, cancel --> scheduler.plan(now) --> executor --> text, stop strings --> scheduler.commit --> deltas

The same loop drives the real model, the simulator and a replay; which one is a matter of the executor and the clock
it is given. One turn is one step. Not thread-safe: one thread turns it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

import msgspec

from headway.core.clock import Clock, to_ps, to_seconds
from headway.core.errors import BadInput, HeadwayError, Rejected
from headway.core.request import Finish, Request, SamplingParams
from headway.core.step import StepPlan, StepResult
from headway.engine.messages import Cancel, Delta, Refusal, Submit
from headway.executor.protocol import Executor
from headway.sampling.rows import check_params
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import Output
from headway.text.output import OutputText
from headway.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EngineLoop:
    """Turns requests into deltas.

    Attributes:
        scheduler, executor, clock: what it drives, with, and by.
        tokenizer: for text and stop strings; None = deltas carry ids only, and stop strings are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._texts: dict[str, OutputText] = {}  # by choice id
        self._unreported = 0  # ps spent after the last step's event was out

    @property
    def idle(self) -> bool:
        """Nothing to do until something is submitted."""
        return self.scheduler.idle

    def submit(self, message: Submit) -> Refusal | None:
        """Accept a request, or say at once why not."""
        try:
            request = self._request(message)
            choices = self.scheduler.add(request)
        except HeadwayError as error:
            code = error.reason.code if isinstance(error, Rejected) else "invalid_value"
            return Refusal(message.id, str(error), code, error.status)
        if self.tokenizer is not None:
            for choice in choices:
                self._texts[choice.id] = OutputText(
                    self.tokenizer,
                    message.tokens,
                    stop=request.params.stop,
                    stop_ids=request.stop_ids,
                    min_tokens=request.params.min_tokens,
                )
        return None

    def _request(self, message: Submit) -> Request:
        params = message.params
        check_params(params, self._vocab_size)
        if message.tokens and not 0 <= min(message.tokens) <= max(message.tokens) < self._vocab_size:
            raise BadInput("prompt", f"holds a token id that is not from 0 to {self._vocab_size - 1}")
        if params.stop and self.tokenizer is None:
            raise BadInput("stop", "this engine has no tokenizer to find strings with; use stop_token_ids")
        if params.seed is None:
            params = _seeded(params)
        limit = self.scheduler.limits.max_model_len
        now = self.clock.now()
        arrival = now if message.arrival is None else message.arrival
        return Request(
            message.id,
            message.tokens,
            params,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            max_len=limit if params.max_tokens is None else len(message.tokens) + params.max_tokens,
            arrival=arrival,
            priority=message.priority,
            deadline=None if message.deadline is None else arrival + to_ps(message.deadline),
            tenant=message.tenant,
        )

    def cancel(self, message: Cancel) -> None:
        """Stop all choices of a request; unknown ids are ignored."""
        now = self.clock.now()
        for id in [id for id in self.scheduler.state.rows if id.partition("#")[0] == message.id]:
            self.scheduler.cancel(id, now)

    def turn(self) -> list[Delta]:
        """One step -> what every choice gained. Empty when there was nothing to do."""
        begin = self.clock.now()
        plan = self.scheduler.plan(begin)
        if plan.empty:
            outputs, result = self.scheduler.take_outputs(), StepResult(step=plan.step)
            return [self._delta(output, result, "") for output in outputs]
        planned = self.clock.now()
        result, broken = self._execute(plan)
        computed = self.clock.now()
        self._add_host_time(result, self._unreported + planned - begin)
        texts = self._read(result)
        outputs = [*self.scheduler.commit(result, self.clock.now())]
        if broken:
            self.scheduler.executor_reset(self.clock.now())
        told = {output.request.id for output in outputs}
        for id in result.prompt_logprobs:  # of a chunk that does not reach the prompt's end: nothing else to tell
            row = self.scheduler.state.rows.get(id)
            if id not in told and row is not None:
                outputs.append(Output(row.request, (), None))
        deltas = [self._delta(output, result, texts.get(output.request.id, "")) for output in outputs]
        self._unreported = self.clock.now() - computed
        return deltas

    @staticmethod
    def _add_host_time(result: StepResult, ps: int) -> None:
        """A step's host time: planning it, and the commit, texts and messages of the step before, which came after
        the event that tells of that one."""
        seconds = result.seconds
        result.seconds = msgspec.structs.replace(seconds, host=seconds.host + to_seconds(ps))

    def _execute(self, plan: StepPlan) -> tuple[StepResult, bool]:
        """(the result, whether the executor broke). Whatever broke, it costs this step's rows, not the server; nobody
        knows how far the executor came with the plan, so it forgets everything."""
        try:
            return self.executor.collect(self.executor.submit(plan)), False
        except Exception as error:
            logger.exception("step %d failed; its %d rows end with an error", plan.step, len(plan.work))
            self.executor.reset()
            sentence = f"the engine failed in step {plan.step}: {type(error).__name__}"
            return StepResult(step=plan.step, failed={work.id: sentence for work in plan.work}), True

    def _read(self, result: StepResult) -> dict[str, str]:
        """Text of the new tokens; a stop string that is met ends its row with this very step."""
        texts: dict[str, str] = {}
        for id, tokens in result.tokens.items():
            text = self._texts.get(id)
            if text is None:
                continue
            texts[id] = "".join([text.push(token) for token in tokens if text.matched is None])
            if text.matched is not None and id not in result.finish:
                result.finish[id] = Finish("stop", text.matched)
        return texts

    def _delta(self, output: Output, result: StepResult, text: str) -> Delta:
        request = output.request
        if output.finish is not None and request.id in self._texts:
            text += self._texts.pop(request.id).flush()
        return Delta(
            id=request.id.partition("#")[0],
            choice=request.choice,
            at=self.clock.now(),
            tokens=output.tokens,
            text=text,
            logprobs=result.logprobs.get(request.id, ()),
            prompt_logprobs=result.prompt_logprobs.get(request.id, ()),
            cached=request.cached,
            finish=output.finish,
        )

    def close(self) -> None:
        self.executor.close()


def _seeded(params: SamplingParams) -> SamplingParams:
    """With a random seed; the event log keeps it."""
    return msgspec.structs.replace(params, seed=secrets.randbits(63))
