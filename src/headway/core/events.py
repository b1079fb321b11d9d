"""Everything that happens to requests and steps, as small facts in order. Metrics, traces, receipts, logs and replay
are folds over this stream; no counter is kept anywhere else.

    Queued -> Admitted -> FirstToken -> Finished          StepPlanned -> StepDone -> StepPlanned -> ...
                 ^------- Preempted                       between a StepDone and the next StepPlanned: what was drained

Events hold no text and no token ids: prompts and answers appear as lengths and as salted names (keyed hashes) of
their full blocks. Times are picoseconds of the engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from headway.core.step import Capabilities, Seconds, StepShape

FORMAT = "headway-events"
VERSION = 4  # of the event file
MOST_TOKENS = 1 << 24  # of a request

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]  # what a file may claim
Length = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", gc=False):
    """Base of all events.

    Attributes:
        now: when it happened, ps.
    """

    now: int


class Queued(Event, frozen=True, kw_only=True, tag="queued"):
    """A request was accepted. Everything of it that scheduling depends on.

    Attributes:
        number: the request's number in this run, from 0; what step events call it.
        prompt_tokens, max_len: length of the prompt, and of prompt and answer at most.
        min_tokens: stop ids are not honoured before.
        choice, parent: which of n choices, and whose prompt it shares.
        prompt_logprobs: it wants them, so its prompt is never looked up.
        pooling: how its prompt is pooled; "" = it generates.
        tenant: whose it is: a number given in order of appearance.
        names: of the full blocks of its prompt.
    """

    id: str
    number: Count
    prompt_tokens: Length
    max_len: Length
    min_tokens: Count = 0
    priority: int = 0
    deadline: int | None = None
    choice: Count = 0
    parent: str | None = None
    adapter: str = ""
    prompt_logprobs: bool = False
    pooling: str = ""
    tenant: int = 0
    names: tuple[bytes, ...] = ()


class Refused(Event, frozen=True, kw_only=True, tag="refused"):
    """A request was refused at once; `reason` is a `Reject` code. It leaves no other trace."""

    id: str
    reason: str


class Admitted(Event, frozen=True, kw_only=True, tag="admitted"):
    """A request got its first blocks, or got blocks again after a preemption.

    Attributes:
        cached: tokens that need no computing: prefix hit, or shared with another choice.
        preemptions: how often its blocks were taken back before.
        waited: ps since it arrived.
    """

    id: str
    cached: int
    preemptions: int
    waited: int


class BlocksAwaited(Event, frozen=True, kw_only=True, tag="blocks_awaited"):
    """A request that was just queued waits for blocks of its prompt, from the cache's second tier or another engine.

    Attributes:
        blocks: which, (KV group, index in the prompt) each.
        remote: from another engine.
    """

    id: str
    blocks: tuple[tuple[Count, Count], ...]
    remote: bool = False


class BlocksLoaded(Event, frozen=True, kw_only=True, tag="blocks_loaded"):
    """Blocks came for a request, into the cache; nobody owns them yet.

    Attributes:
        blocks: which, as in `BlocksAwaited`.
        bytes: of them. seconds: that it took.
        last: the request waits no longer, whether or not all are there. failed: because one was missing, damaged, or
            late.
        remote: from another engine. recomputed: prompt tokens that did not come from there, and are computed here.
    """

    id: str
    blocks: tuple[tuple[Count, Count], ...]
    bytes: Count = 0
    seconds: float = 0.0
    last: bool = False
    failed: bool = False
    remote: bool = False
    recomputed: Count = 0


class BlocksSent(Event, frozen=True, kw_only=True, tag="blocks_sent"):
    """Another engine has got what it asked for of a prompt, or has not.

    Attributes:
        blocks, bytes: that went to it. seconds: from its asking to the last of them.
        problem: why it did not get all; "" = it did.
    """

    blocks: Count = 0
    bytes: Count = 0
    seconds: float = 0.0
    problem: str = ""


class BlocksSaved(Event, frozen=True, kw_only=True, tag="blocks_saved"):
    """Evicted blocks went to the cache's second tier.

    Attributes:
        blocks, bytes: how many it took. dropped: those it could not take. failed: earlier ones that were not written.
    """

    blocks: Count = 0
    bytes: Count = 0
    dropped: Count = 0
    failed: Count = 0


class FirstToken(Event, frozen=True, kw_only=True, tag="first_token"):
    """A request has its first token, `waited` ps after it arrived (time to first token, queue included)."""

    id: str
    waited: int


class Preempted(Event, frozen=True, kw_only=True, tag="preempted"):
    """A request's blocks were taken back; `wasted` computed tokens must be computed again (unless still cached)."""

    id: str
    wasted: int


class Cancelled(Event, frozen=True, kw_only=True, tag="cancelled"):
    """Someone asked to stop a request. `Finished` follows, at once or when the step in flight is done."""

    id: str


class Finished(Event, frozen=True, kw_only=True, tag="finished"):
    """A request ended; its blocks are given back.

    Attributes:
        reason: as in `Finish`: "stop", "length", "abort", "error".
        prompt_tokens, cached, generated: prompt length, what of it came from the cache, tokens emitted.
        lived: ps since it arrived.
        names: of all its full blocks, prompt included.
    """

    id: str
    reason: str
    prompt_tokens: Length
    cached: Length
    generated: Length
    lived: int
    names: tuple[bytes, ...] = ()


class StepPlanned(Event, frozen=True, kw_only=True, tag="planned"):
    """A plan went out.

    Attributes:
        step: its number.
        digest: 16 bytes that two plans share exactly if they are equal, token values left out.
        blocked: why the first waiting request was not admitted; "" if none waits.
    """

    step: Count
    digest: bytes
    blocked: str = ""


class StepDone(Event, frozen=True, kw_only=True, tag="step"):
    """A plan's result was committed. Columns have one entry per row of the step.

    Attributes:
        step: the plan's number.
        steps: how many equal steps this stands for (`commit_run`); 1 = an ordinary one.
        planned: when it was planned, ps.
        idle: ps between the end of the step before and its planning.
        rows: `Queued.number` of each row.
        counts: tokens computed, per row.
        emitted: tokens emitted, per row.
        accepted: drafted tokens accepted, over all rows.
        drafted: drafted tokens verified, over all rows.
        proposed: tokens drafted for the next step, per row; () if none for any. odds: of one to be accepted, per row.
        shape: size of the step, what a step-time model is fitted on; of the first step if there are several.
        predicted: seconds the model expected; None without one. undrafted: without the drafts; None if it has none.
        seconds: measured (or simulated) time by part.
        times: when each of several steps ended, ps.
    """

    step: Count
    steps: Count = 1
    planned: int
    idle: int
    rows: tuple[Count, ...]
    counts: tuple[Length, ...]
    emitted: tuple[Length, ...]
    accepted: int = 0
    drafted: int = 0
    proposed: tuple[Length, ...] = ()
    odds: tuple[float, ...] = ()
    shape: StepShape
    predicted: float | None = None
    undrafted: float | None = None
    seconds: Seconds = Seconds()
    times: tuple[int, ...] = ()


class ExecutorReset(Event, frozen=True, kw_only=True, tag="executor_reset"):
    """The executor broke in the step before and has forgotten all rows; those that go on are sent to it again."""


class Regime(Event, frozen=True, kw_only=True, tag="regime"):
    """From here on another fit of the profile predicts steps, or recent steps have left the profile's range or come
    back to it.

    Attributes:
        regime: index of the fit.
        ratio: measured over predicted time of recent steps by it. inside: within the range that the profile gives.
    """

    regime: Count
    ratio: float
    inside: bool


class Idle(Event, frozen=True, kw_only=True, tag="idle"):
    """A plan was empty although requests wait; `blocked` says why."""

    blocked: str


AnyEvent = (
    Queued
    | Refused
    | BlocksAwaited
    | BlocksLoaded
    | BlocksSaved
    | BlocksSent
    | Admitted
    | FirstToken
    | Preempted
    | Cancelled
    | Finished
    | StepPlanned
    | StepDone
    | ExecutorReset
    | Regime
    | Idle
)
Fold = Callable[[AnyEvent], None]


class EventLog:
    """Hands every event to its subscribers, in order. A subscriber is a fold: it keeps what it needs of each.

    A subscriber that raises stops the engine: a metric or a recording that is silently wrong is worse.
    """

    def __init__(self, *subscribers: Fold) -> None:
        self._subscribers = list(subscribers)

    def subscribe(self, fold: Fold) -> None:
        self._subscribers.append(fold)

    def append(self, event: AnyEvent) -> None:
        for fold in self._subscribers:
            fold(event)


class PoolStart(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that nobody owns blocks of, as it was when a log began.

    Attributes:
        blank: blocks without content, the one to be taken first last.
        cached: (block, its name, when it was given back in ps) of the others, the least recently used first.
    """

    blank: tuple[int, ...]
    cached: tuple[tuple[int, bytes, int], ...]


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="header"):
    """What a run was, before its first event.

    Attributes:
        limits: what the executor could do.
        policy: name of the scheduling policy.
        budget: its figures by name, as in `scheduling.budget.Budget`.
        ttl: time-to-live of cached blocks, ps.
        ttft: ps to a first token that the policy works for.
        profile: the step-time model's figures; None if there was none. drafter: those of a draft model's passes.
        regime: which fit of the profile predicted its first steps.
        ratios: measured over predicted time of the last steps with chunks before them, by kind. draft_ratios: of those
            without chunks, by size, as `scheduling.drafting` keeps them.
        step: number of its first step.
        cache: per KV group, its pool when the log began; () if that was its first moment.
        config: whatever else describes the run (model, version, flags), for the reader's eyes.
        midway: requests were live when the log began, of which it does not tell; it cannot be replayed.
    """

    format: str = FORMAT
    version: int = VERSION
    limits: Capabilities
    policy: str
    budget: dict[str, int | float | None] = {}
    ttl: int | None = None
    ttft: int | None = None
    profile: dict[str, Any] | None = None
    drafter: dict[str, Any] | None = None
    regime: Count = 0
    ratios: dict[int, tuple[float, ...]] = {}
    draft_ratios: tuple[tuple[int, int, float], ...] = ()
    step: Count = 0
    cache: tuple[PoolStart, ...] = ()
    config: dict[str, Any] = {}
    midway: bool = False
