"""What scheduler tests are written with: an executor whose cache holds *contexts*, and a bench that plays steps.

`ContextExecutor` keeps, for every cache slot, a digest of all tokens up to that position. Before it emits a token it
checks that every slot the row may look at holds the digest it should; so a block shared, freed or overwritten too
early is caught at once. What it emits depends on the row's context only, hence not on how steps were cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from headway.core.events import AnyEvent, EventLog
from headway.core.folds import Totals
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities, RowInit, StepPlan, StepResult, Work
from headway.scheduling.invariants import check, check_plan
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import Emission


def digest(context: bytes, token: int) -> bytes:
    return blake2b(context + token.to_bytes(8, "little", signed=True), digest_size=8).digest()


@dataclass
class HeldRow:
    init: RowInit
    tokens: list[int]
    blocks: list[list[int]]


class ContextExecutor:
    """Emits `digest(context) % vocab`, so answers are a function of the prompt (and of the choice)."""

    def __init__(self, limits: Capabilities, vocab: int = 8) -> None:
        self.limits = limits
        self.vocab = vocab
        self.slots: dict[tuple[int, int, int], bytes] = {}  # (group, block, offset) -> context digest
        self.rows: dict[str, HeldRow] = {}
        self.written: dict[int, set[tuple[int, int, int]]] = {}  # slots, by step

    def spoil(self, step: int) -> None:
        """What a step wrote was never written."""
        self.slots.update(dict.fromkeys(self.written[step], b"spoiled"))

    def run(self, plan: StepPlan) -> StepResult:
        for id in plan.gone:
            del self.rows[id]
        written = self.written[plan.step] = set[tuple[int, int, int]]()
        for copy in plan.copies:
            for offset in range(self.limits.block_size):
                written.add((copy.group, copy.dst, offset))
                source = self.slots.get((copy.group, copy.src, offset))
                if source is not None:
                    self.slots[copy.group, copy.dst, offset] = source
        for init in plan.new:
            assert init.id not in self.rows
            self.rows[init.id] = HeldRow(init, list(init.tokens), [list(blocks) for blocks in init.blocks])
        computed: set[tuple[int, int, int]] = set()
        for work in plan.work:
            self._write(work, computed)
        written |= computed
        return StepResult(plan.step, {work.id: self._emit(work) for work in plan.work if work.sample})

    def _write(self, work: Work, written: set[tuple[int, int, int]]) -> None:
        row = self.rows[work.id]
        for own, new in zip(row.blocks, work.blocks, strict=False):
            own.extend(new)
        contexts = self._contexts(work)
        for group, blocks in enumerate(row.blocks):
            for position in range(work.start, work.start + work.count):
                slot = (group, blocks[position // self.limits.block_size], position % self.limits.block_size)
                assert slot not in written, "two rows of a step write the same slot"
                written.add(slot)
                self.slots[slot] = contexts[position]

    def _contexts(self, work: Work) -> list[bytes]:
        """Digest of the context up to each position, drafts included."""
        row = self.rows[work.id]
        known = [*row.tokens[: work.start + work.count - len(work.draft)], *work.draft]
        long = self.limits.long_after is not None and len(row.init.tokens) > self.limits.long_after
        contexts, context = [], b"long" if long else b""
        for token in known:
            context = digest(context, token)
            contexts.append(context)
        return contexts

    def _emit(self, work: Work) -> tuple[int, ...]:
        row = self.rows[work.id]
        contexts = self._contexts(work)
        self._check_slots(work, contexts)
        emitted: list[int] = []
        first = len(contexts) - len(work.draft) - 1
        for index, draft in enumerate((*work.draft, None)):
            emitted.append(self.says(contexts[first + index], row.init.choice))
            if emitted[-1] != draft:
                break
        row.tokens.extend(emitted)
        return tuple(emitted)

    def _check_slots(self, work: Work, contexts: list[bytes]) -> None:
        row = self.rows[work.id]
        size = self.limits.block_size
        for group, window in enumerate(self.limits.windows):
            first = 0 if window is None else max(0, work.start - window + 1)
            for position in range(first, len(contexts)):
                block = row.blocks[group][position // size]
                held = self.slots.get((group, block, position % size))
                assert held == contexts[position], f"{work.id}: wrong content at position {position}, group {group}"

    def says(self, context: bytes, choice: int) -> int:
        return (int.from_bytes(context, "little") + choice) % self.vocab


@dataclass
class Ask:
    """One line of a test's traffic: a request that arrives before step `at`."""

    id: str
    prompt: int
    most: int = 3
    at: int = 0
    priority: int = 0
    like: str = ""  # prompt content is a function of this name (of the id by default)
    n: int = 1
    options: dict[str, object] = field(default_factory=dict)

    def request(self, now: int) -> Request:
        name = self.like or self.id
        return Request(
            self.id,
            [1000 * (1 + sum(name.encode())) + index for index in range(self.prompt)],
            SamplingParams(seed=0, n=self.n, **self.options),  # type: ignore[arg-type]
            max_len=self.prompt + self.most,
            arrival=now,
            priority=self.priority,
        )


def limits_of(**changes: object) -> Capabilities:
    """Four-token blocks, one full group of 100, at most 8 rows and 16 tokens per step."""
    figures: dict[str, object] = {
        "block_size": 4,
        "blocks": (100,),
        "windows": (None,),
        "max_rows": 8,
        "max_tokens_per_step": 16,
        "max_model_len": 200,
        "max_drafts": 100,
    }
    return Capabilities(**(figures | changes))  # type: ignore[arg-type]


class Bench:
    """A scheduler and a `ContextExecutor`; every step is checked against all laws."""

    def __init__(self, limits: Capabilities | None = None, **options: object) -> None:
        self.events: list[AnyEvent] = []
        self.totals = Totals()
        self.limits = limits or limits_of()
        log = EventLog(self.events.append, self.totals)
        self.scheduler = Scheduler(self.limits, key=b"test", log=log, verify=True, **options)  # type: ignore[arg-type]
        self.executor = ContextExecutor(self.limits)
        self.now = 0
        self.outputs: dict[str, list[int]] = {}
        self.finishes: dict[str, str] = {}

    def add(self, ask: Ask) -> None:
        self.scheduler.add(ask.request(self.now))

    def step(self) -> str:
        """Play one step -> the plan in words, e.g. `a[0:4]* b[0:9] -c`: a computes 0 to 3 and samples, c is dropped."""
        plan = self.scheduler.plan(self.now)
        check_plan(self.scheduler, plan)
        self.now += 1
        if plan.empty:
            self.hear(self.scheduler.take_emissions())
        else:
            self.hear(self.scheduler.commit(self.executor.run(plan), self.now))
        self.check()
        return words(plan)

    def check(self) -> None:
        check(self.scheduler)
        assert self.totals.waiting == self.scheduler.waiting, "law: accepted = finished + live"
        assert self.totals.running == self.scheduler.running
        assert self.totals.emitted_tokens == sum(map(len, self.outputs.values())), "law: metrics = what clients got"

    def hear(self, outputs: list[Emission]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request.id, []).extend(output.tokens)
            if output.finish is not None:
                assert output.request.id not in self.finishes, "a request ends once"
                self.finishes[output.request.id] = output.finish.reason

    def play(self, asks: list[Ask], steps: int = 1000) -> list[str]:
        """Play until nothing is left -> the plans in words."""
        plans = []
        for step in range(steps):
            for ask in asks:
                if ask.at == step:
                    self.add(ask)
            plans.append(self.step())
            if self.scheduler.idle and all(ask.at <= step for ask in asks):
                return plans
        return plans


def words(plan: StepPlan) -> str:
    work = [f"{one.id}[{one.start}:{one.start + one.count}]{'*' * one.sample}" for one in plan.work]
    return " ".join(work + [f"-{id}" for id in plan.gone])
