"""A two-layer random Llama held in memory, and engine loops over it in any shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from headway.cache.tier import Tier
from headway.core.clock import VirtualClock
from headway.core.events import EventLog
from headway.core.request import SamplingParams
from headway.core.step import Capabilities
from headway.engine.connector import Connectors, KVConnector
from headway.engine.kv_disk import DiskTier
from headway.engine.kv_files import BlockFiles
from headway.engine.loop import EngineLoop
from headway.engine.messages import Delta, Refusal, Submit
from headway.engine.transfer.peers import PeerConnector, PeerSetup
from headway.executor.draft import ModelProposer
from headway.executor.grammars import Grammars
from headway.executor.model import ModelExecutor
from headway.model import llama
from headway.model.config import DecoderConfig
from headway.model.rope import inverse_frequencies, rope
from headway.ops.protocol import Backend
from headway.ops.reference import ReferenceBackend
from headway.ops.weight import Weight
from headway.scheduling.scheduler import Scheduler
from headway.shape.config import tensors_of
from headway.shape.model import KVGroup
from headway.speculation.proposer import Proposer

VOCAB = 64
CONFIG = DecoderConfig(
    layers=2, heads=4, kv_heads=2, head_dim=8, hidden_size=32, intermediate_size=64, vocab_size=VOCAB,
    context_length=256, norm_eps=1e-5, rope=rope(inverse_frequencies(8, 10000.0)),
)  # fmt: skip
NO_EOS = VOCAB - 1  # id that prompts avoid, so that it can serve as a stop id


def weights(noise: float = 0.0) -> dict[str, Weight]:
    """Random float32 weights by role, spread enough that the two likeliest tokens seldom tie. noise: share of others in
    them."""
    rng, other = np.random.default_rng(0), np.random.default_rng(1)
    made = {}
    for tensor in tensors_of(llama.config_json(CONFIG)):
        role, shape = tensor.role, tensor.shape
        values = (
            rng.normal(0, 1 if role == "embed" else shape[-1] ** -0.5 * 2, shape) if len(shape) > 1 else np.ones(shape)
        )
        if noise and len(shape) > 1:
            values = values + noise * values.std() * other.normal(size=shape)
        made[role] = Weight(role, shape, "f32", np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1))
    return made


class TinyModel:
    """The model on a backend; make as many loops from it as you like, one at a time.

    Args:
        window: what its second layer looks back on; None = everything, as the first.
        noise: what makes it another model, but a similar one.
    """

    def __init__(self, backend: Backend | None = None, window: int | None = None, noise: float = 0.0) -> None:
        self.backend = backend or ReferenceBackend(poison=True)
        prepared = {role: self.backend.prepare(weight) for role, weight in weights(noise).items()}
        self._forward = llama.build(CONFIG, prepared)
        kinds = [("full", (0, 1), None)] if window is None else [("full", (0,), None), ("window", (1,), window)]
        self.groups = tuple(
            KVGroup(kind, layers, 2, 8, 8, window, dtype_bytes=self.backend.kv_dtype_bytes)
            for kind, layers, window in kinds
        )

    def loop(
        self,
        *,
        blocks: int = 400,
        max_rows: int = 16,
        log: EventLog | None = None,
        grammars: Grammars | None = None,
        eos_ids: tuple[int, ...] = (),
        proposer: Proposer | None = None,
        draft: TinyModel | None = None,
        mode: str = "coupled",
        disk: tuple[BlockFiles, Tier] | None = None,
        peers: PeerSetup | None = None,
        **options: Any,
    ) -> EngineLoop:
        limits = Capabilities(
            block_size=4,
            blocks=(blocks,) * len(self.groups),
            windows=tuple(group.window for group in self.groups),
            max_rows=max_rows,
            max_tokens_per_step=256,
            max_model_len=256,
            max_drafts=0 if proposer is None and draft is None else 40,
        )
        if draft is not None:
            proposer = ModelProposer(draft.backend, draft._forward, draft.groups, limits, 0, 256, mode)
        log, clock = log or EventLog(), VirtualClock()
        key = peers.key if peers else disk[0].key if disk else b"test" * 8
        scheduler = Scheduler(limits, key=key, log=log, verify=True, tier=disk and disk[1], **options)
        connectors: list[KVConnector] = []
        if disk is not None:
            connectors.append(DiskTier(*disk, scheduler, self.backend, clock.now, log))
        if peers is not None:
            evicted = connectors[0].save if connectors else lambda: None
            connectors.append(PeerConnector(peers, scheduler, self.backend, clock.now, log, evicted))
        return EngineLoop(
            scheduler,
            ModelExecutor(self.backend, self._forward, self.groups, limits, None, grammars, proposer, mode),
            clock,
            VOCAB,
            eos_ids=eos_ids,
            grammars=grammars,
            connector=Connectors(*connectors) if len(connectors) > 1 else connectors[0] if connectors else None,
        )


def prompts(count: int, seed: int = 1) -> list[tuple[int, ...]]:
    """Random prompts of 1 to 60 tokens, many of them sharing a beginning."""
    rng = np.random.default_rng(seed)
    stems = [tuple(rng.integers(0, NO_EOS, 24).tolist()) for _ in range(5)]
    made = []
    for number in range(count):
        stem = stems[number % 5][: int(rng.integers(0, 25))]
        made.append(stem + tuple(rng.integers(0, NO_EOS, int(rng.integers(1, 36))).tolist()))
    return made


def submit_all(loop: EngineLoop, prompts: Iterable[tuple[int, ...]], params: SamplingParams) -> None:
    for number, tokens in enumerate(prompts):
        refused = loop.submit(Submit(id=str(number), tokens=tokens, params=params))
        assert not isinstance(refused, Refusal), refused


def drain(loop: EngineLoop) -> list[Delta]:
    """Turn until nothing is left to do."""
    deltas = []
    while not loop.idle:
        deltas += loop.turn()
    return deltas


def complete(loop: EngineLoop, prompts: Iterable[tuple[int, ...]], params: SamplingParams) -> dict[str, list[Delta]]:
    """All prompts at once -> deltas by id."""
    submit_all(loop, prompts, params)
    by_id: dict[str, list[Delta]] = {}
    for delta in drain(loop):
        by_id.setdefault(delta.id, []).append(delta)
    return by_id


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]
