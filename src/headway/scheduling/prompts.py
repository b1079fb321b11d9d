"""The fair pass: what a step has for prompts, shared among running and waiting ones.

Shortest first, by tokens left to compute: a short prompt does not wait for any number of long ones. But the prompt that
waits longest has its share of every step: only prompts at most half as long pass it, and only with the other share. So
no stream of short ones stops a long one, and prompts of about one length keep their order.

    tokens, time of a step   | decodes | half: much shorter prompts, shortest first | half: the oldest | rest, if any |

A waiting row whose blocks are not there is passed by those that fit, but not for ever: after so many, blocks are kept
for it (see `Admission.keep_for`).
"""

from __future__ import annotations

from headway.scheduling.planning import NO_BLOCKS, PREFIX, Step
from headway.scheduling.row import Place, Row

MOST_PARTIAL = 4  # prompts computed in pieces side by side, and never in more than half of the rows
LOOK_PAST = 8  # waiting rows without room that a step looks at


def prompts(step: Step) -> None:
    """Plan chunks of running prompts, and admit waiting ones. Call it after `Step.decodes`."""
    queue = step.state.queue
    partial = [row for row in step.partial if row.place is Place.RUNNING]  # some were preempted
    first, waiting = None, []
    if step.running < step.state.limits.max_rows and len(queue):
        first, waiting = queue.first(), queue.by_work(step.admission.remaining)
    if first is not None or partial:
        step.open()
        _Share(step, partial, waiting, first).run()
    step.asked()


class _Share:
    """One pass."""

    def __init__(self, step: Step, partial: list[Row], waiting: list[Row], first: Row | None) -> None:
        self._step = step
        self._partial = sorted(partial, key=lambda row: row.work)  # what is planned in this step leaves it
        self._waiting = waiting  # what is admitted leaves it
        self._pieces = len(partial)  # prompts begun and not done
        self._most_pieces = max(1, min(MOST_PARTIAL, step.state.limits.max_rows // 2))
        self._oldest = min([*partial, first] if first else partial, key=lambda row: row.order)
        if first is not None:
            step.admission.keep_for(first, first is self._oldest)

    def run(self) -> None:
        step, oldest = self._step, self._oldest
        priority, rest, *_ = oldest.work
        if self._next(0, priority, rest // 2) is not None:
            with step.sparing(min(rest, -(-step.left // 2)), 2):
                self._serve(priority, rest // 2)
        if oldest.place is Place.WAITING:
            if not step.admit_row(oldest):
                self._pieces += oldest.request.todo > 1
        elif oldest in self._partial:
            self._chunk(oldest)
        self._serve(None, None)

    def _serve(self, priority: int | None, most: int | None) -> None:
        """Chunks for prompts of this priority with at most `most` tokens left (None = any), least first."""
        passed = missed = 0  # waiting rows that stay where they are, and those of them without room
        while self._step.left > 0 and (row := self._next(passed, priority, most)) is not None:
            if row.place is Place.RUNNING:
                self._chunk(row)
                continue
            reason = self._step.admit_row(row, partly=row is self._oldest or self._pieces < self._most_pieces)
            if not reason:
                self._pieces += row.request.todo > 1
                continue
            missed += reason == NO_BLOCKS
            if reason in (NO_BLOCKS, PREFIX) and missed < LOOK_PAST:
                passed += 1
            else:
                passed = len(self._waiting)

    def _next(self, passed: int, priority: int | None, most: int | None) -> Row | None:
        """The prompt with the least left to compute, if it is within bounds."""
        heads = [*self._partial[:1], *self._waiting[passed : passed + 1]]
        row = min(heads, key=lambda row: row.work) if heads else None
        if row is None or (most is not None and (row.work[0] != priority or row.work[1] > most)):
            return None
        return row

    def _chunk(self, row: Row) -> None:
        self._partial.remove(row)
        self._step.chunk(row)
        self._pieces -= row.request.todo <= 1
