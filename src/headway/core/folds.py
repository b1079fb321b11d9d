"""Folds over events: figures that are true because they are derived, never counted by hand."""

from __future__ import annotations

from collections import Counter

from headway.core.events import (
    Admitted,
    AnyEvent,
    Cancelled,
    Finished,
    FirstToken,
    Preempted,
    Queued,
    Refused,
    StepDone,
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
        computed_tokens, emitted_tokens, drafted_tokens, accepted_tokens: over all steps.
        preemptions, wasted_tokens: blocks taken back, and computed tokens thrown away with them.
        first_tokens: time to first token of each request that had one, ps, in order.
        steps, busy, idle: steps done, seconds in them, ps between them.
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
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.preemptions = 0
        self.wasted_tokens = 0
        self.first_tokens: list[int] = []
        self.steps = 0
        self.busy = 0.0
        self.idle = 0
        self._running: set[str] = set()

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
                self.first_tokens.append(event.waited)
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

    def _step(self, event: StepDone) -> None:
        self.steps += event.steps
        self.computed_tokens += sum(event.counts)
        self.emitted_tokens += sum(event.emitted)
        self.drafted_tokens += event.drafted
        self.accepted_tokens += event.accepted
        self.busy += event.seconds.total
        self.idle += event.idle
