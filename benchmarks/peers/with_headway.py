"""Headway, driven in two ways: the kernels alone, as llama.cpp's loop is, and the whole engine, as servers are.

python with_headway.py FILE THREADS WEIGHTS GROUP

WEIGHTS and GROUP are those of `NativeBackend`; GROUP 0 is the default. Both ways share the weights and the cache, of
which the engine's scheduler is told only its part.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from worker import LONG, PREFILL, ROWS, SHORT, STEPS, Answer, prompt, serve, timed_steps

from headway.core.request import SamplingParams
from headway.core.step import Capabilities, StepResult
from headway.engine.loop import EngineLoop
from headway.engine.machine import wall_clock
from headway.engine.messages import Cancel, Submit
from headway.engine.profile import saved_profile, step_time
from headway.executor.model import ModelExecutor
from headway.measure.formats import for_regime
from headway.model.load import Model, load
from headway.ops.native.backend import NativeBackend, NativeProgram
from headway.ops.protocol import GroupBatch, StepBatch
from headway.roofline.profile import Profile, Rates
from headway.roofline.step import decode_step
from headway.roofline.work import experts_touched
from headway.scheduling.scheduler import Scheduler
from headway.shape.model import kv_bytes

BLOCK = 32
BLOCKS_SHORT = (SHORT + STEPS) // BLOCK + 2  # the engine's decodes run a few tokens longer
BLOCKS_LONG = (LONG + STEPS) // BLOCK + 2
BLOCKS = ROWS * BLOCKS_SHORT + BLOCKS_LONG  # what either way needs
PREFILL_BLOCKS = PREFILL // BLOCK + 1
PREFILL_SHORT = 128

Row = tuple[list[int], int, list[int]]  # block table, first position, token ids


class Timed(ModelExecutor):
    """Remembers how long the last forward pass took."""

    forward_seconds = 0.0

    def collect(self, ticket: int) -> StepResult:
        result = super().collect(ticket)
        self.forward_seconds = result.seconds.forward
        return result


class Engine:
    """The engine loop over one model: scheduler, executor, sampler, without tokenizer and server."""

    def __init__(self, model: Model, backend: NativeBackend) -> None:
        windows = tuple(group.window for group in model.shape.groups)
        own = BLOCKS + 2 * PREFILL_BLOCKS
        limits = Capabilities(
            block_size=BLOCK,
            blocks=(own,) * len(windows),
            windows=windows,
            max_rows=ROWS,
            max_tokens_per_step=max(512, ROWS),
            max_model_len=LONG + PREFILL,
        )
        both = msgspec.structs.replace(limits, blocks=(own + BLOCKS,) * len(windows))
        self.first_free_block = own
        self.executor = Timed(backend, model.forward, model.shape.groups, both)
        self.loop = EngineLoop(
            Scheduler(limits, key=bytes(32)), self.executor, wall_clock(), vocab_size=model.info.vocab_size
        )
        self.sent = 0
        self.host: list[float] = []

    def add(self, ids: list[int], tokens: int) -> str:
        self.sent += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        refused = self.loop.submit(Submit(id=str(self.sent), tokens=tuple(ids), params=params))
        if refused is not None:
            raise RuntimeError(refused.message)
        return str(self.sent)

    def step(self) -> int:
        if self.loop.idle:
            return -1
        begin = time.perf_counter()
        deltas = self.loop.turn()
        self.host.append(time.perf_counter() - begin - self.executor.forward_seconds)
        return sum(bool(delta.tokens) for delta in deltas)

    def drain(self) -> None:
        while self.step() >= 0:
            pass


class Headway:
    def __init__(self, path: str, threads: int, weights: str, group: int) -> None:
        self.backend = NativeBackend(threads, weights=weights, group=group or None)
        self.model = load(Path(path), self.backend)
        self.vocab = self.model.info.vocab_size
        self.engine = Engine(self.model, self.backend)
        self.program: NativeProgram = self.backend.compile(self.model.forward)  # type: ignore[assignment]
        first = self.engine.first_free_block
        self.tables = [list(range(first + row * BLOCKS_SHORT, first + (row + 1) * BLOCKS_SHORT)) for row in range(ROWS)]
        self.long = list(range(first + ROWS * BLOCKS_SHORT, first + BLOCKS))
        self.filled: set[int] = set()
        self.fits: Profile | None = None  # the profile of the last prediction

    def facts(self) -> Answer:
        """What the roofs need: bytes of the weights that every step reads, and of the experts by its tokens, cache
        bytes per token, multiply-adds, arithmetic."""
        params, tied = self.model.shape.params, self.model.shape.tied
        untied = 0 if tied else self.backend.weight_bytes * params.embed / params.total
        moe = self.model.shape.moe
        routed = self.backend.weight_bytes * params.experts / params.total
        experts = {}  # bytes, by the step's tokens
        if moe is not None:
            for tokens in (*range(1, ROWS + 1), PREFILL_SHORT, PREFILL):
                experts[str(tokens)] = routed / moe.experts * experts_touched(moe.experts, moe.active, tokens)
        return {
            "engine": "headway",
            "kernels": self.backend.kernels,
            "bytes": self.backend.weight_bytes - untied - routed,
            "cache": kv_bytes(self.model.shape.groups, 1),
            "experts": experts,
            "body": params.body + self.model.shape.n_routed,
            "head": params.embed if tied else params.head,
            "math": self.backend.math,
        }

    def run(self, rows: list[Row]) -> float:
        """Seconds of one step of the kernels, and of making its batch."""
        begin = time.perf_counter()
        counts = np.array([len(ids) for _, _, ids in rows])
        positions = np.concatenate([np.arange(at, at + len(ids)) for _, at, ids in rows]).astype(np.int32)
        table = np.full((len(rows), max(len(blocks) for blocks, _, _ in rows)), -1, np.int32)
        for row, (blocks, _, _) in enumerate(rows):
            table[row, : len(blocks)] = blocks
        block = table[np.repeat(np.arange(len(rows)), counts), positions // BLOCK].astype(np.int64)
        start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        view = GroupBatch(table, block * BLOCK + positions % BLOCK)
        self.program.run(
            StepBatch(
                ids=np.concatenate([ids for _, _, ids in rows]).astype(np.int32),
                positions=positions,
                query_start=start,
                kv_len=np.array([at + len(ids) for _, at, ids in rows], np.int32),
                groups=(view,) * len(self.model.shape.groups),
                logit_index=start[1:] - 1,
                adapter=np.zeros(len(rows), np.int32),
            )
        )
        return time.perf_counter() - begin

    def prefill(self, tokens: int) -> Answer:
        return {"seconds": [self.run([(self.long, 0, prompt(ROWS, tokens))])]}

    def decode(self, batch: int, context: int) -> Answer:
        tables = dict(enumerate(self.tables[:batch])) if context == SHORT else {ROWS: self.long}
        for row in tables.keys() - self.filled:
            ids = prompt(row, context)
            for at in range(0, context, 512):
                self.run([(tables[row], at, ids[at : at + 512])])
            self.filled.add(row)
        seconds, attention = [], []
        for n in range(STEPS):
            seconds.append(self.run([(blocks, context + n, [1000 + n]) for blocks in tables.values()]))
            attention.append(self.program.seconds.get("attention", 0.0))
        return {"seconds": seconds, "attention": attention}

    def engine_prefill(self, tokens: int) -> Answer:
        begin = time.perf_counter()
        self.engine.add(prompt(1000 + self.engine.sent, tokens), 1)
        self.engine.drain()
        return {"seconds": [time.perf_counter() - begin]}

    def engine_decode(self, batch: int, context: int) -> Answer:
        ids = [self.engine.add(prompt(row, context + 1), STEPS + 8) for row in range(batch)]
        self.engine.host.clear()
        seconds = timed_steps(self.engine.step, batch)
        host = self.engine.host[-STEPS:]
        for id in ids:
            self.engine.loop.cancel(Cancel(id))
        self.engine.drain()
        return {"seconds": seconds, "host": host}

    def predict(self, batch: int, context: int, bandwidth: float, rates: dict[str, float]) -> Answer:
        """Tokens/s as `headway doctor` predicts them from a probe: an estimate where `headway probe` timed this format
        before (timed again if the machine's memory had another speed then), else a bound."""
        threads = self.backend.threads
        saved = self.fits or saved_profile()
        fits = saved.fits if saved else {}
        profile = Profile("this machine", "", threads, 0.0, {str(threads): bandwidth}, rates, fits)
        self.fits = profile = for_regime(profile, self.backend, self.model.shape, bandwidth)
        now = Rates(bandwidth, rates[self.backend.math])
        model = step_time(self.model.shape, profile, self.backend, now).model
        return {"predicted": batch / model.predict(decode_step(self.model.shape, batch, context))}

    def memory(self) -> Answer:
        """Bytes: the most this process ever held in memory, mapped files included; what it holds now without them; its
        weights, and its cache."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        blocks = self.engine.first_free_block + BLOCKS
        return {
            "peak": int(status["VmHWM"].split()[0]) * 1024,
            "anonymous": int(status["RssAnon"].split()[0]) * 1024,
            "weights": self.backend.weight_bytes,
            "cache": kv_bytes(self.model.shape.groups, 1) * BLOCK * blocks,
        }


if __name__ == "__main__":
    _, path, threads, weights, group = sys.argv
    serve(lambda: Headway(path, int(threads), weights, int(group)))
