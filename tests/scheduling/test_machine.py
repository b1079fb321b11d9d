"""The laws hold whatever happens: random adds, forks, cancels, preemptions, failures, drafts, evictions and steps, one
or several in flight, over several cache layouts with pools so small that preemption is common.

The model is a dict: what each request must answer, computed from its prompt alone. The executor checks that every
cache slot a row looks at has the right content; `invariants.check` runs after every step.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.core.errors import Rejected
from headway.core.events import EventLog, Preempted
from headway.core.folds import Totals
from headway.core.request import Finish, Request, SamplingParams
from headway.core.step import StepPlan, StepResult
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget
from headway.scheduling.invariants import check, check_plan
from headway.scheduling.policies import POLICIES
from headway.scheduling.row import STRICT_AFTER
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import Emission
from tests.scheduling.context_bench import ContextExecutor, digest, limits_of

LAYOUTS = [  # (blocks per group, window per group)
    ((7,), (None,)),
    ((12,), (None,)),
    ((9, 7), (None, 5)),
    ((9, 9), (None, 8)),
    ((7,), (3,)),
    ((10, 8, 9), (None, 5, 10)),
]
STOP = 7
TTL = 12


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        policy=st.sampled_from(list(POLICIES.values())),
        rows=st.integers(1, 5),
        tokens=st.integers(5, 12),
        budget=st.sampled_from([None, Budget(tokens=3)]),
        ttl=st.sampled_from([None, TTL]),
        logged=st.booleans(),
        in_flight=st.sampled_from([1, 1, 2, 2, 3]),
    )
    def start(self, layout, policy, rows, tokens, budget, ttl, logged, in_flight) -> None:
        blocks, windows = layout
        limits = limits_of(
            blocks=blocks, windows=windows, max_rows=rows, max_tokens_per_step=tokens, max_model_len=26,
            max_in_flight=in_flight,
        )  # fmt: skip
        self.logged = logged
        self.flying: list[tuple[StepPlan, StepResult]] = []
        self.totals = Totals()
        self.preempted: dict[str, int] = {}
        self.scheduler = Scheduler(
            limits,
            key=b"test",
            policy=policy,
            budget=budget,
            model=FixedCosts(step=1e-9, token=1e-9) if policy.predicts else None,
            log=EventLog(self.totals, self.note_preemption) if logged else None,
            ttl=ttl,
            verify=True,
        )
        self.executor = ContextExecutor(limits)
        self.now = 0
        self.count = 0
        self.answers: dict[str, list[int]] = {}  # the model: what each request must say, to the end
        self.heard: dict[str, list[int]] = {}
        self.ends: dict[str, Finish] = {}
        self.disturbed: set[str] = set()  # cancelled, failed, stopped by the engine, or past a deadline
        self.forced: set[str] = set()

    def note_preemption(self, event) -> None:
        if isinstance(event, Preempted) and event.id not in self.forced:
            self.preempted[event.id] = self.preempted.get(event.id, 0) + 1

    def answer(self, request: Request) -> list[int]:
        context = b""
        for token in request.tokens:
            context = digest(context, token)
        said: list[int] = []
        if request.params.pooling is not None:
            return said
        while len(said) < request.max_len - request.prompt_len:
            said.append(self.executor.says(context, request.choice))
            context = digest(context, said[-1])
            if said[-1] in request.stop_ids and len(said) > request.params.min_tokens:
                break
        return said

    @rule(
        prompt=st.lists(st.integers(0, 1), max_size=18),
        most=st.integers(1, 10),
        min_tokens=st.integers(0, 2),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 1),
        patience=st.none() | st.integers(0, 30),
        tenant=st.sampled_from(["", "", "other"]),
        report=st.sampled_from([None, None, None, 0]),
        pooling=st.sampled_from([None, None, None, "last", "mean"]),
    )
    def add(self, prompt, most, min_tokens, n, priority, patience, tenant, report, pooling) -> None:
        self.count += 1
        if pooling is not None:
            most, n, report = 1, 1, None
        request = Request(
            f"r{self.count}",
            prompt,
            SamplingParams(
                seed=0, n=n, min_tokens=min(min_tokens, most), max_tokens=most, prompt_logprobs=report, pooling=pooling
            ),
            stop_ids=frozenset({STOP}),
            max_len=len(prompt) + most,
            arrival=self.now,
            priority=priority,
            deadline=None if patience is None else self.now + patience,
            tenant=tenant,
        )
        try:
            choices = self.scheduler.add(request)
        except Rejected:
            return
        for choice in choices:
            self.answers[choice.id] = self.answer(choice)
            self.heard[choice.id] = []
            if patience is not None:
                self.disturbed.add(choice.id)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        id = data.draw(st.sampled_from(sorted(self.answers)))
        self.disturbed.add(id)
        self.scheduler.cancel(id, self.now)
        self.hear(self.scheduler.take_emissions())

    @precondition(lambda self: self.scheduler.running and not self.flying)
    @rule(data=st.data())
    def preempt(self, data) -> None:
        row = data.draw(st.sampled_from(self.scheduler.state.running))
        self.forced.add(row.request.id)
        self.scheduler.state.preempt(row, self.now)

    @rule(duration=st.integers(1, TTL + 3))
    def wait(self, duration: int) -> None:
        """Time passes: with a time-to-live, cached blocks are evicted; deadlines pass."""
        self.now += duration

    @rule(data=st.data())
    def step(self, data) -> None:
        """Hand out a plan, if the executor takes one more; take the oldest result, if there is none to hand out, or
        as it comes."""
        if len(self.flying) < self.scheduler.limits.max_in_flight and self.submit() and data.draw(st.booleans()):
            return
        self.now += 1
        if not self.flying:
            self.hear(self.scheduler.take_emissions())
            return
        plan, result = self.flying.pop(0)
        if data.draw(st.sampled_from([False] * 15 + [True])):
            for broken in (plan, *(plan for plan, _ in self.flying)):
                self.executor.spoil(broken.step)
            self.executor.rows.clear()
            self.flying.clear()
            self.disturbed |= {work.id for work in plan.work}
            result = StepResult(plan.step, failed={work.id: "broken" for work in plan.work})
            self.hear(self.scheduler.commit(result, self.now))
            self.forced |= self.scheduler.state.rows.keys()  # those with a copied block start again
            self.scheduler.executor_reset(self.now)
            return
        result = self.disturb(plan, result, data)
        self.hear(self.scheduler.commit(result, self.now))

    def submit(self) -> bool:
        """Plan and compute a step, whose result comes later -> whether there was anything to do."""
        plan = self.scheduler.plan(self.now)
        check_plan(self.scheduler, plan)
        self.hear(self.scheduler.take_emissions())
        if not plan.empty:
            self.flying.append((plan, self.executor.run(plan)))
        return not plan.empty

    def disturb(self, plan: StepPlan, result: StepResult, data) -> StepResult:
        """Things that happen while a step is in flight; and drafts for the next one, some right, some wrong."""
        ids = [work.id for work in plan.work]
        what = data.draw(st.sampled_from(["", "", "", "", "cancel", "fail", "stop"]))
        changes: dict[str, dict] = {"finish": {}, "failed": {}, "drafts": {}, "odds": {}}
        right = data.draw(st.sampled_from([None, 0, 1, 2, 5]))
        for work in plan.work if right is not None else ():
            said = len(self.heard[work.id]) + len(result.tokens.get(work.id, ()))
            changes["drafts"][work.id] = (*self.answers[work.id][said : said + right], 0)
            changes["odds"][work.id] = right / 5
        id = data.draw(st.sampled_from(ids)) if ids else ""
        if id not in self.scheduler.state.rows or not what:
            return StepResult(plan.step, result.tokens, **changes)
        if what == "cancel":
            self.scheduler.cancel(id, self.now)
        elif what == "fail":
            changes["failed"][id] = "out of luck"
        else:
            changes["finish"][id] = Finish("stop", "a stop string")
        self.disturbed.add(id)
        return StepResult(plan.step, result.tokens, **changes)

    def hear(self, outputs: list[Emission]) -> None:
        for output in outputs:
            id = output.request.id
            assert id not in self.ends, "a request ends once, and says nothing after"
            self.heard[id] += output.tokens
            assert self.heard[id] == self.answers[id][: len(self.heard[id])], "the answer depends on the prompt alone"
            if output.finish is not None:
                self.ends[id] = output.finish
                if id not in self.disturbed:
                    assert self.heard[id] == self.answers[id], "nothing is missing"
                    if output.request.params.pooling is not None:
                        assert output.finish == Finish("stop") and output.request.computed == output.request.prompt_len
                        continue
                    stopped = self.heard[id][-1] == STOP and len(self.heard[id]) > output.request.params.min_tokens
                    assert output.finish == (Finish("stop", STOP) if stopped else Finish("length"))

    @invariant()
    def laws(self) -> None:
        check(self.scheduler)
        live = self.answers.keys() - self.ends.keys()
        assert live == self.scheduler.state.rows.keys(), "law: accepted = finished + live"
        if not self.logged:
            return
        assert (self.totals.live, self.totals.running) == (len(live), self.scheduler.running)
        assert self.totals.emitted_tokens == sum(map(len, self.heard.values())), "law: metrics = what clients got"
        assert self.totals.preemptions >= sum(self.preempted.values())
        assert max(self.preempted.values(), default=0) <= STRICT_AFTER, "law: preempted twice, then never again"

    def teardown(self) -> None:
        """Whatever happened, everything ends, and the pool is whole again."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if self.scheduler.idle:
                break
            while len(self.flying) < self.scheduler.limits.max_in_flight and self.submit():
                pass
            self.now += 1
            if self.flying:
                self.hear(self.scheduler.commit(self.flying.pop(0)[1], self.now))
            self.hear(self.scheduler.take_emissions())
        assert self.scheduler.idle, "no request waits for ever"
        assert self.answers.keys() == self.ends.keys()
        assert all(pool.available == pool.size for pool in self.scheduler.cache.pools), "every block is back"
        assert not self.executor.rows, "the executor was told of every end"


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLaws = SchedulerMachine.TestCase
