"""What a draft model is worth beside a target of 1.04 G parameters: measured, and predicted by B11.

    python benchmarks/draft_model.py                 measures; about two minutes
    python benchmarks/draft_model.py --show          the table of what was measured

Both models are synthetic (matrices of zeros, held in 8 bits: kernels take as long for them as for any others), so what
is accepted is made up too: of every draft, a coin with a fixed seed says whether it is what the target says next. All
else is the engine's own: the draft model's passes, the verification, the loop. k is fixed, so that a formula can say

    speed-up = E / (verify + k c)      E = tokens per step, verify = a step with k drafts, c = a pass, in plain steps

with E as it was emitted, and verify and c as the steps took in the same run ("B11"), or as the engine predicts them by
the first steps of both models ("B11 at start"). Runs with and without drafts take turns; their speed is in CPU seconds
of one thread, since wall time of a machine that others use says little. Results are kept in
benchmarks/data/draft_model.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headway.core.clock import VirtualClock
from headway.core.events import EventLog, StepDone
from headway.core.folds import Totals
from headway.core.request import SamplingParams
from headway.core.step import Capabilities, StepPlan
from headway.engine.loop import EngineLoop
from headway.engine.messages import Submit
from headway.engine.warmup import measure_steps
from headway.executor.draft import ModelProposer, draft_limits
from headway.executor.model import ModelExecutor
from headway.measure.synthetic import WIDE
from headway.model import llama
from headway.model.config import DecoderConfig
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Forward
from headway.ops.weight import Weight
from headway.roofline.fixed import FixedCosts
from headway.roofline.speculation import Draft, expected_tokens, speedup
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.shape import ShapeBuilder
from headway.shape.config import shape_from_config, tensors_of
from headway.shape.formats import stored_bytes
from headway.shape.model import ByPart, ModelShape
from headway.speculation.proposer import Proposal

RESULTS = Path(__file__).parent / "data" / "draft_model.json"
TARGET = replace(WIDE, layers=16, vocab_size=32000)  # 1.04 G parameters
SMALL = replace(
    WIDE, layers=6, heads=9, kv_heads=3, hidden_size=576, intermediate_size=1536, vocab_size=32000
)  # 40 M parameters
FORMAT, PROMPT, RIGHT, WRONG = "q8_0", 64, 0, 1  # zeros say token 0


class Coin(ModelProposer):
    """A draft model whose every draft is right with probability `odds`, and of which k are verified."""

    odds, k, seed = 0.8, 4, 0

    def step(self, plan: StepPlan) -> dict[str, Proposal]:
        said = super().step(plan)
        for id in said:
            rng = np.random.default_rng((self.seed, self._rows[id].known))
            drafts = np.where(rng.random(len(said[id].tokens)) < self.odds, RIGHT, WRONG)
            said[id] = Proposal(tuple(drafts.tolist()), self.odds)
            self._rows[id].draft = said[id].tokens
        return said

    def propose(self, rows: Any, most: int) -> dict[str, Proposal]:
        offers = super().propose(rows, min(self.k, most))
        return {id: Proposal(offer.tokens, 1.0) for id, offer in offers.items()}  # all of them are taken


def decode(model: FixedCosts, batch: int, drafts: int) -> float:
    """Predicted seconds of a step of `batch` rows with so many drafts each."""
    shape = ShapeBuilder((None,))
    for _ in range(batch):
        shape.add(PROMPT + 32, 1 + drafts, 1 + drafts, drafts)
    return model.predict(shape.build())


class Bench:
    """Target and draft model on a backend each, one thread."""

    def __init__(self) -> None:
        self.target, self.small = NativeBackend(threads=1), NativeBackend(threads=1)
        blocks = 8 * -(-256 // 32)
        forward, shape = synthetic(TARGET, self.target)
        small, small_shape = synthetic(SMALL, self.small)
        self.limits = Capabilities(
            block_size=32, blocks=(blocks,), windows=(None,), max_rows=8, max_tokens_per_step=512, max_model_len=256,
            max_drafts=64,
        )  # fmt: skip
        own = draft_limits(self.limits, 0, 1)
        self.small_costs = measure_steps(ModelExecutor(self.small, small, small_shape.groups, own))
        self.coin = Coin(self.small, small, small_shape.groups, self.limits, 0, 1 << 20)
        self.executor = ModelExecutor(self.target, forward, shape.groups, self.limits)
        self.costs = measure_steps(self.executor)

    def seconds(self, batch: int, tokens: int, k: int) -> tuple[float, Totals, dict[str, float]]:
        """CPU seconds of decoding so many tokens of each row, with k drafts; and the steps' own, by part."""
        self.coin.k = k
        self.executor._proposer = self.coin if k else None
        self.executor.reset()
        totals, parts = Totals(), {"steps": 0.0, "target": 0.0, "draft": 0.0}
        log = EventLog(totals)
        loop = EngineLoop(Scheduler(self.limits, key=b"k" * 32, log=log), self.executor, VirtualClock(), 32000)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=0)
        for row in range(batch):
            prompt = tuple((row * 31 + place) % 1000 + 2 for place in range(PROMPT))
            assert loop.submit(Submit(id=str(row), tokens=prompt, params=params)) is None
        loop.turn()  # the prompts
        log.subscribe(lambda event: add(parts, event))
        begin = time.process_time()
        while not loop.idle:
            loop.turn()
        return time.process_time() - begin, totals, parts


def synthetic(config: DecoderConfig, backend: NativeBackend) -> tuple[Forward, ModelShape]:
    """A model of zeros."""
    described, prepared, taken = llama.config_json(config), {}, Counter[str]()
    for tensor in tensors_of(described):
        stored = FORMAT if len(tensor.shape) > 1 else "f32"
        data = np.zeros(stored_bytes(stored, tensor.shape), np.uint8)
        data.fill(0)
        before = backend.weight_bytes
        prepared[tensor.role] = backend.prepare(Weight(tensor.role, tensor.shape, stored, data))
        taken[tensor.part] += backend.weight_bytes - before
    shape = shape_from_config(described, "synthetic").held(ByPart(**taken), backend.kv_dtype_bytes, FORMAT, FORMAT)
    return llama.build(config, prepared), shape


def add(parts: dict[str, float], event: object) -> None:
    if isinstance(event, StepDone) and any(event.emitted):
        parts["steps"] += 1
        parts["target"] += event.seconds.executor
        parts["draft"] += event.seconds.draft


def compare(bench: Bench, batch: int, odds: float, k: int, tokens: int, rounds: int) -> dict[str, float]:
    """Plain and drafting runs in turns -> what was measured, and B11 of it."""
    bench.coin.odds = odds
    ratios, told = [], []
    for number in range(rounds):
        bench.coin.seed = number
        plain, _, alone = bench.seconds(batch, tokens, 0)
        drafted, totals, parts = bench.seconds(batch, tokens, k)
        per_step = (tokens - 1) / parts["steps"]
        step = alone["target"] / alone["steps"]
        verify, cost = parts["target"] / parts["steps"] / step, parts["draft"] / parts["steps"] / k / step
        told.append((per_step, verify, cost, totals.accepted_tokens / totals.drafted_tokens))
        ratios.append((plain / drafted, speedup(Draft(0, cost, (per_step,) * k), k, verify)))
    per_step, verify, cost, accepted = (median(column) for column in zip(*told, strict=True))
    plain = decode(bench.costs, batch, 0)
    first = Draft(0, decode(bench.small_costs, batch, 0) / plain, (per_step,) * k)
    return {
        "speedup": round(median(one for one, _ in ratios), 3), "least": round(min(one for one, _ in ratios), 3),
        "most": round(max(one for one, _ in ratios), 3), "b11": round(median(two for _, two in ratios), 3),
        "b11_at_start": round(speedup(first, k, decode(bench.costs, batch, k) / plain), 3),
        "tokens_per_step": round(per_step, 2), "expected": round(expected_tokens(k, odds), 2),
        "verify": round(verify, 3), "cost": round(cost, 3), "accepted": round(accepted, 2),
    }  # fmt: skip


def show() -> None:
    print("rows  odds  k  measured (least to most)  B11   B11 at start  tokens/step  verify  cost")
    for name, line in json.loads(RESULTS.read_text()).items():
        rows, odds, k = name.split()
        print(f"{rows:>4s}  {odds:>4s}  {k}  {line['speedup']:.2f} ({line['least']:.2f} to {line['most']:.2f})      "
              f"{line['b11']:.2f}  {line['b11_at_start']:.2f}          {line['tokens_per_step']:.2f}         "
              f"{line['verify']:.2f}    {line['cost']:.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    if not given.show:
        bench, found = Bench(), {}
        for batch, odds, k in ((1, 0.8, 4), (1, 0.6, 2), (4, 0.8, 4)):
            found[f"{batch} {odds} {k}"] = compare(bench, batch, odds, k, given.tokens, given.rounds)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    show()


if __name__ == "__main__":
    main()
