"""Folds over events: figures that are true because they are derived, never counted by hand."""

from __future__ import annotations

from collections import Counter

from headway.core.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    ExecutorReset,
    Finished,
    FirstToken,
    Preempted,
    Queued,
    Refused,
    StepDone,
    StepPlanned,
)


class Totals:
    """Sums over a run; subscribe it to an `EventLog`, or feed it a recording.

    Attributes:
        queued, cancelled: requests accepted, and asked to stop.
        refused: requests refused, by reason.
        finished: requests ended, by reason.
        waiting, running: requests in these places now.
        prompt_tokens: of accepted requests.
        cached_tokens: prompt tokens served from the cache at first admission.
        computed_tokens, emitted_tokens, proposed_tokens, drafted_tokens, accepted_tokens: over all steps; drafted ones
            are those proposed that were verified.
        drafted_steps, drafted_seconds, undrafted_seconds: steps that verified drafts, the time they took, and the time
            that their tokens would have taken without, as predicted.
        preemptions, wasted_tokens: blocks taken back, and computed tokens thrown away with them.
        first_tokens: requests that had a token.
        steps, busy, idle: steps done, seconds in them, ps between them.
        predicted_steps, predicted_seconds, prediction_error: steps the step-time model predicted, the time it predicted
            for them, and the sum of its absolute errors, s.
        executor_resets: steps in which the executor broke.
        blocked: steps in which the first waiting request had to wait on, by reason.
    """

    def __init__(self) -> None:
        self.queued = 0
        self.cancelled = 0
        self.refused: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.emitted_tokens = 0
        self.proposed_tokens = 0
        self.drafted_tokens = 0
        self.drafted_steps = 0
        self.drafted_seconds = 0.0
        self.undrafted_seconds = 0.0
        self.accepted_tokens = 0
        self.preemptions = 0
        self.wasted_tokens = 0
        self.first_tokens = 0
        self.steps = 0
        self.busy = 0.0
        self.idle = 0
        self.predicted_steps = 0
        self.predicted_seconds = 0.0
        self.prediction_error = 0.0
        self.executor_resets = 0
        self.blocked: Counter[str] = Counter()
        self._running: set[str] = set()
        self._blocked = ""  # as the step planned last says

    @property
    def live(self) -> int:
        return self.queued - self.finished.total()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return self.live - self.running

    def __call__(self, event: AnyEvent) -> None:
        match event:
            case StepDone():
                self._step(event)
            case Queued():
                self.queued += 1
                self.prompt_tokens += event.prompt_tokens
            case Admitted():
                self._running.add(event.id)
                if event.preemptions == 0:
                    self.cached_tokens += event.cached
            case FirstToken():
                self.first_tokens += 1
            case Preempted():
                self._running.remove(event.id)
                self.preemptions += 1
                self.wasted_tokens += event.wasted
            case Finished():
                self._running.discard(event.id)
                self.finished[event.reason] += 1
            case Refused():
                self.refused[event.reason] += 1
            case Cancelled():
                self.cancelled += 1
            case ExecutorReset():
                self.executor_resets += 1
            case StepPlanned():
                self._blocked = event.blocked
                self._wait(1)

    def _wait(self, steps: int) -> None:
        if steps and self._blocked:
            self.blocked[self._blocked] += steps

    def _step(self, event: StepDone) -> None:
        self.steps += event.steps
        self._wait(event.steps - 1)  # of a run, only the first was planned
        self.computed_tokens += sum(event.counts)
        self.emitted_tokens += sum(event.emitted)
        self.drafted_tokens += event.drafted
        self.accepted_tokens += event.accepted
        self.proposed_tokens += sum(event.proposed)
        if event.undrafted is not None and any(event.emitted):
            self.drafted_steps += 1
            self.drafted_seconds += event.seconds.executor + event.seconds.draft
            self.undrafted_seconds += event.undrafted * sum(event.emitted) / sum(map(bool, event.emitted))
        self.busy += event.seconds.total
        self.idle += event.idle
        if event.predicted is not None:
            self.predicted_steps += event.steps
            self.predicted_seconds += event.predicted
            self.prediction_error += abs(event.predicted - event.seconds.executor)
