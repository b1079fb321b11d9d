"""How long a request that arrives now will wait, and when it will have its first token."""

from __future__ import annotations

from headway.cache.table import BlockTable
from headway.core.request import Request
from headway.scheduling.budget import Budget, StepTimeModel
from headway.scheduling.pace import Pace
from headway.scheduling.planning import BY_POLICY, NO_BLOCKS, NO_ROWS, PREEMPTING
from headway.scheduling.shape import ShapeBuilder
from headway.scheduling.state import State


class Forecast:
    """Read off the queue and measured speed, or before that off the step-time model.

    Args:
        blocked: why the first waiting request waits.
        model: None = nothing is known before it is measured.
    """

    def __init__(self, state: State, pace: Pace, budget: Budget, model: StepTimeModel | None, blocked: str) -> None:
        self._state, self._pace, self._budget, self._model, self._blocked = state, pace, budget, model, blocked

    def wait(self) -> float:
        """Seconds to its first blocks; 0 if nobody waits or nothing is known."""
        state = self._state
        if not len(state.queue):
            return 0.0
        if self._blocked in (NO_ROWS, NO_BLOCKS, PREEMPTING, BY_POLICY):
            waiting = len(state.rows) - len(state.running)
            wait = self._pace.seconds_for_requests(waiting, len(state.running))
            if wait is not None:
                return wait
        return self.prompts(state.waiting_tokens + sum(self._begun()))

    def first_token(self, tokens: int) -> float:
        """Seconds to the first token of a prompt of which so many are not cached: its wait, shorter prompts that are
        being computed, and its own, beside the decodes that run now."""
        if len(self._state.queue):
            return self.wait() + self.prompts(tokens)
        return self.prompts(tokens + sum(todo for todo in self._begun() if todo <= tokens))

    def uncached(self, request: Request) -> int:
        """Prompt tokens that it would have to compute if it came in now."""
        if request.params.prompt_logprobs is not None:
            return request.prompt_len
        table = BlockTable(self._state.cache, request.namespace, request.adapter, request.prompt_len)
        hit, cache = table.lookup(request.tokens), self._state.cache
        return request.prompt_len - max(hit.length, cache.reach(table.names).length) * cache.block_size

    def prompts(self, tokens: int) -> float:
        """Seconds of so many prompt tokens beside the decodes that run now; 0 if nothing is known."""
        seconds = self._pace.seconds_for_tokens(tokens)
        return self.by_model(tokens, decodes=True) if seconds is None else seconds

    def by_model(self, tokens: int, decodes: bool) -> float:
        """The same by the step-time model; without decodes: in an engine with nothing else to do."""
        if self._model is None or not tokens:
            return 0.0
        state, limits = self._state, self._state.limits
        most = min(tokens, limits.max_tokens_per_step, self._budget.tokens or limits.max_tokens_per_step)
        builder, beside = ShapeBuilder(limits.windows), 0.0
        for row in state.running if decodes else ():
            if row.request.todo == 1:
                builder.add(row.request.computed, 1, 1)
        if builder.rows:
            beside = self._model.predict(builder.build())
        chunk = self._model.predict(builder.with_row(0, most, 1)) - beside
        size = float(most)
        if beside and chunk > 0:  # in smaller chunks, so that decodes come in time
            size = min(size, most * (1e-3 * self._budget.until(1e3 * beside) - beside) / chunk)
        return tokens / size * (beside + chunk * size / most)

    def _begun(self) -> list[int]:
        """Tokens left of each prompt that is being computed."""
        return [todo for row in self._state.running if (todo := row.request.todo) > 1]
