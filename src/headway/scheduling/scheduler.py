"""The door to the scheduler. An engine turns like this, with one step in flight, or as many as the executor can take:

    scheduler.add(request) ...            what has arrived
    plan = scheduler.plan(now)            -> executor.submit
    emissions = scheduler.commit(result, now)   <- executor.collect

It never sees an array, a clock or a text: time is an argument, tokens are compared with stop ids and hashed.
Same calls with the same arguments give the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.cache.kv import KVCache
from headway.cache.tier import Tier
from headway.core.bound import QueueBound
from headway.core.errors import BadInput, Reject, Rejected
from headway.core.events import Cancelled, EventLog, ExecutorReset, Header, Idle, Refused, Regime, StepPlanned
from headway.core.request import Request
from headway.core.step import Capabilities, Seconds, StepPlan, StepResult
from headway.scheduling import run
from headway.scheduling.budget import Budget, RoutingModel, StepTimeModel
from headway.scheduling.commit import apply
from headway.scheduling.digest import digest_of
from headway.scheduling.drafting import Drafting
from headway.scheduling.flight import Flight
from headway.scheduling.forecast import Forecast
from headway.scheduling.loading import LoadingDesk
from headway.scheduling.pace import Pace
from headway.scheduling.planning import Step
from headway.scheduling.policies.chunked import CHUNKED
from headway.scheduling.policies.policy import Policy
from headway.scheduling.state import Emission, State


class Scheduler:
    """Decides what every step computes.

    Args:
        limits: what the executor can hold and do.
        key: secret of the cache's block names.
        policy: order of passes in a step.
        budget: size a step aims for.
        model: step-time model, for a budget in milliseconds and `StepPlan.predicted`; frozen during a run.
        regimes: models that may take its place by a `Regime` event, which names them by index. regime: the one that
            `model` is.
        log: receives every event.
        ttl: how long an unused cached block is kept, ps; None = until its place is needed.
        bound: on what may wait.
        max_wait: seconds that a request may wait for its first blocks; it is refused if it would wait longer, and
            aborted when it has. None = no bound.
        max_ttft: seconds that the first token of a request may be predicted to take when it comes; it is refused if it
            would take longer. None = no bound.
        verify: compare tokens on every prefix hit (debug).
        reuse: keep the blocks of ended requests for prompts that begin alike. Without it blocks are only counted: for
            simulations, whose executor never looks at one.
        ttft: ps in which a request should have its first token, for the policy `slo`; None = no target.
        drafter: step times of the model that drafts; None = there is none, or nobody knows them.
        tier: the cache's second one; None = there is none.

    Raises:
        BadInput: the policy needs a step-time model.
    """

    def __init__(
        self,
        limits: Capabilities,
        *,
        key: bytes,
        policy: Policy = CHUNKED,
        budget: Budget | None = None,
        model: StepTimeModel | None = None,
        regimes: Sequence[StepTimeModel] = (),
        regime: int = 0,
        log: EventLog | None = None,
        ttl: int | None = None,
        bound: QueueBound | None = None,
        max_wait: float | None = None,
        max_ttft: float | None = None,
        verify: bool = False,
        reuse: bool = True,
        ttft: int | None = None,
        drafter: StepTimeModel | None = None,
        tier: Tier | None = None,
    ) -> None:
        if policy.predicts and model is None:
            raise BadInput("--policy", f"{policy.name} needs predicted step times; see `headway probe`")
        self.limits = limits
        self.policy = policy
        self.cache = KVCache(limits, key, ttl, verify, reuse, tier)
        self.state = State(limits, self.cache, log, max_wait, policy.strict_after, ttft)
        self.loading = LoadingDesk(self.state, log)
        self.blocked = ""
        self.drafting = Drafting(limits.windows, drafter)
        self.pace = Pace(model if isinstance(model, RoutingModel) else None)
        self._budget = budget or Budget()
        self._model = model
        self._regimes = regimes
        self._regime = regime
        self._log = log
        self._ttl = ttl
        self._bound = bound or QueueBound()
        self._max_wait, self._max_ttft = max_wait, max_ttft
        self._steps = 0
        self._last_commit: int | None = None
        self._last_landed: Flight | None = None

    @property
    def waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self.state.rows) - len(self.state.running)

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self.state.running)

    def adapters_in_use(self) -> set[str]:
        """Of all live requests, and those that ended while a plan with them is in flight."""
        flights = (row for flight in self.state.flights for row in flight.rows)
        return {row.request.adapter for row in (*self.state.rows.values(), *flights)} - {""}

    @property
    def idle(self) -> bool:
        """No request is live, and the executor has nothing to drop."""
        return not self.state.rows and not self.state.gone and not self.state.flights

    @property
    def in_flight(self) -> int:
        """Plans whose results are not committed yet."""
        return len(self.state.flights)

    def predicted_wait(self) -> float:
        """Seconds that a request which arrived now would wait for its first blocks, by the speed measured while others
        waited, or before that by the step-time model; 0 if nobody waits or nothing is known."""
        return self._forecast().wait()

    def seconds_to_compute(self, tokens: int) -> float:
        """Of so many prompt tokens with nothing else to do, as predicted; 0 if nothing is known."""
        return self._forecast().by_model(tokens, decodes=False)

    def _forecast(self) -> Forecast:
        return Forecast(self.state, self.pace, self._budget, self._model, self.blocked)

    def header(self, profile: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> Header:
        """First line of an event file of this scheduler; write it while no request is live.

        Args:
            profile: figures of the step-time model.
            config: whatever else describes the run.
        """
        return Header(
            limits=self.limits,
            policy=self.policy.name,
            ttft=self.state.ttft,
            budget=msgspec.structs.asdict(self._budget),
            ttl=self._ttl,
            profile=profile,
            drafter=self.drafting.costs,
            regime=self._regime,
            ratios=self.pace.ratios if self._steps else {},
            draft_ratios=self.drafting.ratios,
            step=self._steps,
            cache=tuple(pool.start() for pool in self.cache.pools) if self._steps else (),
            config=config or {},
        )

    def begin_at(self, header: Header) -> None:
        """Take over where another scheduler wrote `header`: its cache, by names as this one's hasher gives them.

        Raises:
            ValueError: its cache is not one of this size.
        """
        assert self._steps == 0 and self.idle, "only a fresh scheduler can take over"
        self._steps = header.step
        self._predict_by(header.regime)
        self.pace.predict_anew(header.ratios)
        self.drafting.begin_with(header.draft_ratios)
        for pool, start in zip(self.cache.pools, header.cache, strict=bool(header.cache)):
            for _, name, _ in start.cached:
                self.cache.remember(name, b"", b"")  # what it follows is not known any more, and not needed
            pool.restore(start)

    def enter_regime(self, news: Regime) -> None:
        """Predict by another of the models from the next plan on, or hear that none is right."""
        self._predict_by(news.regime)
        if self._log:
            self._log.append(news)

    def _predict_by(self, regime: int) -> None:
        if regime != self._regime:
            self._regime, self._model = regime, self._regimes[regime]
            self.pace.predict_anew()
            self.drafting.begin_with(())

    def add(self, request: Request) -> tuple[Request, ...]:
        """Accept a request; with n > 1, all its choices (ids "x", "x#1", ...), which are returned.

        Raises:
            Rejected: it can never be served, or not now; nothing was added.
        """
        choices = [request, *(_choice(request, number) for number in range(1, request.params.n))]
        try:
            self._check(request, choices)
        except Rejected as refusal:
            if self._log:
                self._log.append(Refused(now=request.arrival, id=request.id, reason=refusal.reason.code))
            raise
        for choice in choices:
            self.state.add(choice)
        self.loading.consider(self.state.rows[request.id], self._forecast)
        return tuple(choices)

    def cancel(self, id: str, now: int) -> None:
        """Abort a request (one choice of it). Unknown and finished ids are ignored. What a step in flight computes of
        it is discarded, and its blocks stay until then: the executor may be writing them. `take_emissions` has the end.
        """
        row = self.state.rows.get(id)
        if row is not None:
            if self._log:
                self._log.append(Cancelled(now=now, id=id))
            self.state.abort(row, None, now)

    def cancel_request(self, id: str, now: int) -> None:
        """Abort all choices of a request."""
        for row in list(self.state.choices.get(id, ())):
            self.cancel(row.request.id, now)

    def plan(self, now: int) -> StepPlan:
        """The next step. Unless it is empty it is to be submitted, and its result to be committed; plans in flight are
        at most as many as the executor takes.

        An empty plan is not to be submitted; if requests wait nevertheless, `blocked` says why. Where blocks are so
        short that a row might have to yield, there is no plan before the step in flight is committed.
        """
        state = self.state
        assert len(state.flights) < self.limits.max_in_flight, "a step in flight must be committed first"
        if state.flights and self._needs_blocks_back():
            return StepPlan(self._steps)
        state.abort_expired(now)
        self.cache.expire(now)
        waited = len(state.queue) > 0
        self.drafting.begin_step(self._steps, self._model)
        step = Step(
            state, self._budget, self._model, self._log is not None, now, self.pace, self.policy.headroom, self.drafting
        )
        self.policy.fill(step)
        plan, shape = step.finish(self._steps)
        self.blocked = step.blocked
        if plan.empty:
            if self._log and (self.blocked or state.flights):
                self._log.append(Idle(now=now, blocked=self.blocked))
            return plan
        self._steps += 1
        idle = now - self._last_commit if self._last_commit is not None and not state.flights else 0
        state.flights.append(
            Flight(
                plan, step.rows, step.copied,
                admitted=step.admitted, waited=waited, planned=now, idle=idle, shape=shape, undrafted=step.undrafted,
            )
        )  # fmt: skip
        if self._log:
            self._log.append(StepPlanned(now=now, step=plan.step, digest=digest_of(plan), blocked=self.blocked))
        return plan

    def _needs_blocks_back(self) -> bool:
        """More rows need another block for their next token than there are blocks."""
        available = min(pool.available for pool in self.cache.pools)
        if available >= len(self.state.running):
            return False
        rows = self.state.running
        return sum(row.request.todo == 1 and row.request.planned >= row.table.capacity for row in rows) > available

    def emitting(self, result: StepResult) -> list[tuple[Request, tuple[int, ...]]]:
        """The requests that gain tokens by the result of the oldest plan in flight, and which; those that ended
        meanwhile are left out."""
        rows = self.state.flights[0].rows if self.state.flights else ()
        return [
            (row.request, result.tokens[row.request.id])
            for row in rows
            if row.request.finish is None and row.request.id in result.tokens
        ]

    def commit(self, result: StepResult, now: int) -> list[Emission]:
        """Apply the result of the oldest plan in flight. -> everything for clients, as `take_emissions`."""
        flight = self._land(result.step)
        apply(self.state, flight, result, now)
        if self.limits.max_drafts:
            self.drafting.learn(flight, result)
        self.pace.count(flight, result, max(flight.planned, self._last_commit or 0), now)
        self._last_commit = now
        return self.take_emissions()

    def executor_reset(self, now: int) -> None:
        """The executor broke in the step that was just committed as failed, and has forgotten all rows; whatever else
        was in flight is void. Plans to come name those that go on anew."""
        broken = [self._last_landed] if self._last_landed else []
        self.state.void([*broken, *self.state.flights], now)
        if self._log:
            self._log.append(ExecutorReset(now=now))

    def take_emissions(self) -> list[Emission]:
        """What happened since the last call: tokens emitted, requests ended (also by deadline or cancel)."""
        emissions, self.state.emissions = self.state.emissions, []
        return emissions

    @property
    def next_deadline(self) -> int | None:
        """The earliest deadline of a live request, ps; a plan at or after it aborts that request."""
        return self.state.next_deadline()

    def horizon(self, most: int = run.MOST_STEPS) -> int:
        """For how many steps, the one in flight included and `most` in all, plans keep their shape if nothing arrives,
        is cancelled, passes its deadline, gets drafts, or ends before the last of them. 0 unless exactly one step is in
        flight."""
        flights = self.state.flights
        if len(flights) != 1:
            return 0
        return run.horizon(self.state, flights[0], self.blocked, most) if self.policy.timeless(self.state) else 1

    def commit_run(
        self, tokens: Mapping[str, Sequence[int]], times: Sequence[int], seconds: Seconds | None = None
    ) -> list[Emission]:
        """Commit `len(times)` equal steps at once, at most `horizon` of them: the plan in flight and the ones that
        would have followed it. Leaves exactly what single steps leave.

        Args:
            tokens: one token per step for every row of the plan.
            times: when each step ended, which is when the next would have been planned, ps.
            seconds: time of all of them, by part.

        Raises:
            ValueError: the run is longer than the horizon, or goes past the end, deadline or cancel of a row; nothing
                was changed, so the steps can still be committed one by one.
        """
        assert self.in_flight == 1, "a run continues the one plan in flight"
        if not 1 <= len(times) <= self.horizon(len(times)):
            raise ValueError(f"{len(times)} steps; the plan keeps its shape for {self.horizon()}")
        run.check(self.state, self.state.flights[0], tokens, times)
        flight = self._land(self._steps - 1)
        since = max(flight.planned, self._last_commit or 0)
        run.apply_run(self.state, flight, tokens, times, seconds or Seconds())
        self.pace.count_run(flight, since, times)
        self._steps += len(times) - 1
        self._last_commit = times[-1]
        return self.take_emissions()

    def _land(self, step: int) -> Flight:
        assert self.state.flights and self.state.flights[0].plan.step == step, "results are committed in order"
        self._last_landed = self.state.flights.popleft()
        return self._last_landed

    def _check(self, request: Request, choices: Sequence[Request]) -> None:
        """Refuse at once what can never be served."""
        limits = self.limits
        if not request.tokens:
            raise Rejected(Reject.EMPTY_PROMPT, "prompt: it is empty; give at least one token")
        pooled = request.params.pooling is not None  # computes its prompt, and no token after it
        longest = limits.max_model_len + pooled
        if request.prompt_len >= min(request.max_len, longest):
            raise Rejected(
                Reject.CONTEXT_LENGTH,
                f"prompt: {request.prompt_len} tokens {'are too many' if pooled else 'leave no room to generate'}; "
                f"the context holds {limits.max_model_len}",
            )
        if request.max_len > longest:
            raise Rejected(
                Reject.CONTEXT_LENGTH,
                f"max_tokens: {request.prompt_len} prompt tokens and {request.max_len - request.prompt_len} to "
                f"generate exceed the context of {limits.max_model_len}",
            )
        for group, size in enumerate(limits.blocks):
            needed = self.cache.holding(group, request.max_len - 1)
            if needed > size:
                raise Rejected(
                    Reject.CACHE_TOO_SMALL,
                    f"max_tokens: {request.max_len} tokens need {needed} cache blocks of {limits.block_size}, and "
                    f"there are {size}; ask for fewer tokens or start with a larger cache",
                )
        for choice in choices:
            if choice.id in self.state.rows:
                raise Rejected(Reject.DUPLICATE_ID, f"id: {choice.id!r} is the id of a request in progress")
        self._check_queue(request, len(choices))

    def _check_queue(self, request: Request, choices: int) -> None:
        problem = self._bound.full(self.waiting, self.state.waiting_tokens, choices, choices * request.prompt_len)
        if not problem and self._max_wait is self._max_ttft is None:
            return
        forecast = self._forecast()
        wait = forecast.wait()
        if not problem and self._max_wait is not None and wait > self._max_wait:
            problem = f"it would wait {wait:.0f} s, and may wait {self._max_wait:g}"
        if not problem and self._max_ttft is not None:
            tokens = forecast.uncached(request)
            ttft = forecast.first_token(tokens)
            if ttft <= self._max_ttft:
                return
            if (alone := forecast.by_model(tokens, decodes=False)) > self._max_ttft:
                raise Rejected(
                    Reject.TTFT_UNREACHABLE,
                    f"prompt: the {tokens} tokens of it that are not cached take {alone:.1f} s even alone, and a first "
                    f"token may take {self._max_ttft:g} s here (--max-ttft)",
                )
            problem = f"its first token would take {ttft:.1f} s, and may take {self._max_ttft:g}"
            wait = ttft - self._max_ttft  # what waits and runs will have shrunk by then
        if not problem:
            return
        raise Rejected(
            Reject.QUEUE_FULL, f"{problem}; try again in {max(1, round(wait))} s", retry_after=max(1.0, wait)
        )


def _choice(request: Request, number: int) -> Request:
    """Choice `number` of a request with n > 1."""
    return Request(
        f"{request.id}#{number}",
        request.tokens,
        request.params,
        stop_ids=request.stop_ids,
        max_len=request.max_len,
        arrival=request.arrival,
        priority=request.priority,
        deadline=request.deadline,
        tenant=request.tenant,
        namespace=request.namespace,
        adapter=request.adapter,
        choice=number,
        parent=request.id,
    )
