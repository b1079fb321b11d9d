"""From options to a running engine: model, memory plan, scheduler, executor, loop."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headway import __version__
from headway.cache.tier import Tier
from headway.core.clock import to_ps
from headway.core.events import EventLog, Fold, Header
from headway.core.receipts import Receipts
from headway.core.step import Capabilities
from headway.engine.backends import backend_of, choose_backend
from headway.engine.connector import KVConnector
from headway.engine.draft_model import PROPOSERS, DraftModel, load_draft
from headway.engine.engine import Engine
from headway.engine.event_file import EventWriter
from headway.engine.kv_disk import PENDING, DiskTier, open_disk
from headway.engine.limits import plan_limits
from headway.engine.loop import EngineLoop
from headway.engine.machine import free_memory, wall_clock
from headway.engine.options import EngineOptions
from headway.engine.pools import peer_setup, with_peers
from headway.engine.profile import held_formats, saved_profile, step_time
from headway.engine.regimes import RegimeWatch, nearest
from headway.engine.warmup import Pacing, pace
from headway.executor.adapters import AdapterTable
from headway.executor.grammars import Grammars
from headway.executor.model import ModelExecutor
from headway.model.adapters import AdapterLimits
from headway.model.load import Model, open_model
from headway.model.source import DEFAULT_MODEL, Progress, merges_folder
from headway.ops.protocol import CacheLayout
from headway.roofline.fixed import FixedCosts
from headway.roofline.hardware import GIB
from headway.roofline.step import decode_step
from headway.roofline.timing import regimes
from headway.scheduling.budget import StepTimeModel
from headway.scheduling.policies import policy_named
from headway.scheduling.scheduler import Scheduler
from headway.speculation.ngram import NgramProposer
from headway.speculation.proposer import Proposer
from headway.text.tokenizer import Tokenizer


def build_engine(
    options: EngineOptions,
    progress: Progress | None = None,
    subscribers: Sequence[Fold] = (),
    make_writer: Callable[[Path, Header], EventWriter] = EventWriter,
    serves: bool = False,
) -> Engine:
    """Load the model and get everything ready to serve.

    Args:
        options: how.
        progress: called while the model is fetched.
        subscribers: folds that receive every event of the engine.
        make_writer: opens the event log, if one is kept.
        serves: whether it is a server's: streams are read while prompts of others come in, so that steps are kept short
            beside them; and it is given ids, never texts, so that the tokenizer only has to decode.

    Raises:
        HeadwayError: an option cannot be honoured, or the model's files are at fault.
    """
    backend, threads = choose_backend(options)
    free = free_memory() if options.memory_gib is None else min(free_memory(), int(options.memory_gib * GIB))
    free -= 0 if options.kv_disk is None else PENDING
    source = DEFAULT_MODEL if options.model is None else options.model
    opened = open_model(source, progress, options.chat_template)
    tokenizer = Tokenizer(opened.info.tokenizer, cache=merges_folder())
    room = AdapterLimits(options.lora_room, options.max_lora_rank) if options.lora_room else None
    with ThreadPoolExecutor(1) as aside:
        tried = None if serves else aside.submit(tokenizer.encode, "")  # which finds what is damaged
        model = opened.prepare(backend, free, tokenizer.vocab_size, room)
        if tried is not None:
            tried.result()
    adapters = None if model.adaptable is None else AdapterTable(model.adaptable)
    draft = _draft(options, model, threads, tokenizer, free - backend.weight_bytes, progress)
    limits, memory = plan_limits(options, model, backend, free, draft)
    drafter = draft.measure(limits) if draft is not None else None
    profile = saved_profile()
    timing = step_time(model.shape, profile, backend) if profile and backend.math in profile.rates else None
    grammars = Grammars(tokenizer)
    proposer: Proposer | None = NgramProposer() if options.draft == "ngram" else None
    if draft is not None:
        proposer = draft.proposer(limits, options.verification)
    executor = ModelExecutor(
        backend,
        model.forward,
        model.shape.groups,
        limits,
        adapters,
        grammars,
        proposer,
        options.verification,
        model.score,
    )
    seen = regimes(model.shape, profile, backend.name, held_formats(model.shape, backend)) if profile and timing else []
    known = seen[0].model if seen else None
    pacing = pace(
        executor, options.max_step_tokens, options.step_ms, known, measured=backend.deterministic, streams=serves
    )
    regime = 0
    if seen and pacing.costs is not None:
        regime = nearest(seen, pacing.costs, decode_step(model.shape, 1, 1))
        timing, pacing = seen[regime], replace(pacing, model=seen[regime].model)
    watch = RegimeWatch(seen, regime) if seen else None
    steps = pacing.model or (timing.model if timing else None)
    receipts = Receipts((steps or FixedCosts(token=1.0)).parts, limits.windows)
    log = EventLog(*subscribers, receipts, *([watch] if watch else []))
    resources = ExitStack()
    resources.callback(backend.close)
    if draft is not None:
        resources.callback(draft.backend.close)
    if options.event_log is not None:
        formats = held_formats(model.shape, backend)
        config = {"model": model.info.name, "backend": backend.name, "formats": formats, "version": __version__}
        config |= {} if draft is None else {"draft": draft.model.info.name}
        measured = msgspec.to_builtins(profile) if known else {"costs": msgspec.to_builtins(pacing.costs)}
        header = _header(options, limits, pacing, measured, regime, config, drafter)
        log.subscribe(resources.enter_context(make_writer(Path(options.event_log), header)))
    layout = CacheLayout(model.shape.groups, limits.blocks, limits.block_size)
    peers = peer_setup(opened, options, backend, layout)
    files = tier = None
    if options.kv_disk is not None:
        files, tier = open_disk(opened, options, backend, layout, b"" if peers is None else peers.key)
        resources.callback(files.close)
    key = peers.key if peers is not None else secrets.token_bytes(32) if files is None else files.key
    clock = wall_clock()
    models = [one.model for one in seen]
    scheduler = _scheduler(options, limits, pacing, steps, models, regime, log, drafter, key, tier)
    connector: KVConnector | None = None
    address = ""
    if files is not None and tier is not None:
        connector = DiskTier(files, tier, scheduler, backend, clock.now, log)
    if peers is not None:
        connector, address = with_peers(connector, peers, scheduler, backend, clock.now, log)
    loop = EngineLoop(
        scheduler=scheduler,
        executor=executor,
        clock=clock,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_ids,
        adapters=adapters,
        receipts=receipts,
        grammars=grammars,
        regimes=watch,
        pooling=model.info.pooling,
        connector=connector,
    )
    resources.callback(loop.close)
    for name, path in options.loras.items():
        loop.load_adapter(name, Path(path))
    return Engine(options, model, tokenizer, backend, threads, memory, loop, resources, pacing, timing, address)


def _draft(
    options: EngineOptions, model: Model, threads: int, tokenizer: Tokenizer, room: float, progress: Progress | None
) -> DraftModel | None:
    """The model that drafts, if one does, on a backend like the other's."""
    if options.draft in PROPOSERS:
        return None
    return load_draft(options.draft, backend_of(options, threads), model.shape.groups, tokenizer, room, progress)


def _header(
    options: EngineOptions,
    limits: Capabilities,
    pacing: Pacing,
    profile: dict[str, Any],
    regime: int,
    config: dict[str, Any],
    drafter: FixedCosts | None,
) -> Header:
    """What an event log begins with. profile: what predicts steps."""
    return Header(
        limits=limits,
        policy=options.policy,
        budget=msgspec.structs.asdict(pacing.budget),
        ttl=to_ps(options.prefix_ttl),
        profile=profile,
        drafter=msgspec.to_builtins(drafter),
        regime=regime,
        config=config,
    )


def _scheduler(
    options: EngineOptions,
    limits: Capabilities,
    pacing: Pacing,
    steps: StepTimeModel | None,
    regimes: Sequence[StepTimeModel],
    regime: int,
    log: EventLog,
    drafter: FixedCosts | None,
    key: bytes,
    tier: Tier | None,
) -> Scheduler:
    return Scheduler(
        limits,
        key=key,
        policy=policy_named(options.policy),
        budget=pacing.budget,
        model=steps,
        regimes=regimes,
        regime=regime,
        log=log,
        ttl=to_ps(options.prefix_ttl),
        bound=options.queue,
        max_wait=options.max_wait,
        max_ttft=options.max_ttft,
        ttft=None if options.ttft_target is None else to_ps(options.ttft_target),
        drafter=drafter,
        tier=tier,
    )
