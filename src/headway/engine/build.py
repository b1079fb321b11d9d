"""From options to a running engine: model, memory plan, scheduler, executor, loop."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from threadpoolctl import ThreadpoolController

from headway import __version__
from headway.cache.tier import Tier
from headway.core.clock import to_ps
from headway.core.errors import BadInput, ModelFileError
from headway.core.events import EventLog, Fold, Header
from headway.core.receipts import Receipts
from headway.core.request import SamplingParams
from headway.core.step import Capabilities
from headway.engine.draft_model import PROPOSERS, DraftModel, load_draft
from headway.engine.event_file import EventWriter
from headway.engine.kv_disk import PENDING, DiskTier, open_disk
from headway.engine.loop import EngineLoop
from headway.engine.machine import free_memory, usable_cores, wall_clock
from headway.engine.options import EngineOptions
from headway.engine.profile import held_formats, saved_profile, step_time
from headway.engine.regimes import RegimeWatch, nearest
from headway.engine.warmup import Pacing, pace
from headway.executor.adapters import AdapterTable
from headway.executor.grammars import Grammars
from headway.executor.model import ModelExecutor
from headway.model.adapters import AdapterLimits
from headway.model.load import Model, ModelInfo, open_model
from headway.model.source import DEFAULT_MODEL, DEFAULT_SAMPLING, Progress, cache_folder, is_default, merges_folder
from headway.ops.protocol import Backend, CacheLayout
from headway.ops.registry import BackendSetup, backends, find_backend
from headway.roofline.fixed import FixedCosts
from headway.roofline.hardware import GIB
from headway.roofline.memory import PROCESS, MemoryPlan, cut_pools, logit_bytes
from headway.roofline.step import decode_step
from headway.roofline.timing import Timing, regimes
from headway.scheduling.budget import StepTimeModel
from headway.scheduling.policies import policy_named
from headway.scheduling.scheduler import Scheduler
from headway.speculation.ngram import NgramProposer
from headway.speculation.proposer import Proposer
from headway.text.chat import encode_chat
from headway.text.grammar import GrammarChecker
from headway.text.template import ChatTemplate
from headway.text.thinking import TAIL, thinking_of
from headway.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BOOKKEEPING = 512  # bytes that the scheduler remembers of a cache block: owners, name, recency
PROMPT_LOGITS = 64  # prompt positions per step whose logits are kept for prompt_logprobs
DRAFTS = 64  # drafts per step that are verified, of all rows together
LEAST_PROMPT = 16  # prompt tokens that a step holds however many rows decode
STABLE_BLOCKS = (32, 64, 128, 256)  # divide the native kernels' SPLIT, and are no smaller than their vectors


class Engine:
    """A loaded model and the loop that serves it.

    Attributes:
        options: how it was set up.
        info: the model's description.
        shape: of the model, with the bytes that the backend holds.
        default_params: how requests are sampled that leave it open.
        tokenizer, template: text to ids and back; `template` is None if the checkpoint has none.
        memory: the memory plan.
        backend: what computes.
        threads: CPU threads it was given.
        loop: the engine loop; `loop.submit`, `loop.cancel`, `loop.turn`.
        pacing: how large its steps are to be.
        timing: what the saved profile of this machine says of its steps; None without one.
    """

    def __init__(
        self,
        options: EngineOptions,
        model: Model,
        tokenizer: Tokenizer,
        backend: Backend,
        threads: int,
        memory: MemoryPlan,
        loop: EngineLoop,
        resources: ExitStack,
        pacing: Pacing,
        timing: Timing | None = None,
    ) -> None:
        self.options = options
        self.pacing = pacing
        self.timing = timing
        self.info: ModelInfo = model.info
        self.shape = model.shape
        self.default_params = default_params(options, model.info)
        self.backend = backend
        self.threads = threads
        self.memory = memory
        self.loop = loop
        self.tokenizer = tokenizer
        self._resources = resources
        self._grammars = GrammarChecker(tokenizer.special_ids)
        resources.callback(self._grammars.close)
        source = model.info.tokenizer.chat_template
        self.template = None if source is None else ChatTemplate(source, tokenizer.template_tokens())
        if self.template is not None:
            resources.callback(self.template.close)

    @property
    def max_model_len(self) -> int:
        return self.loop.scheduler.limits.max_model_len

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs worth printing at start: the memory plan, and what predicts its steps."""
        predicted = {
            "none": "not predicted; `headway probe` measures this machine",
            "first steps": "predicted from the first ones; `headway probe` measures this machine",
        }
        times = predicted.get(self.step_times) or (self.timing.text() if self.timing else "")
        own = [("step times", times), ("steps", self.pacing.text)]
        own += [*self.disk_lines(), *self.draft_lines()]
        return [*self.memory.lines(), *own, *self.sampling_lines(), *self.adapter_lines()]

    def disk_lines(self) -> list[tuple[str, str]]:
        """What the prefix cache has on disk."""
        tier = self.loop.scheduler.cache.tier
        if tier is None:
            return []
        held = tier.blocks * self.options.block_size // len(self.shape.groups)
        return [("cache on disk", f"{held} tokens, {tier.bytes / GIB:.2f} of {tier.limit / GIB:g} GiB")]

    def draft_lines(self) -> list[tuple[str, str]]:
        """Who proposes drafts, and how they are verified."""
        if self.options.draft == "off":
            return []
        return [("drafts", f"{self.options.draft}, {self.options.verification} verification")]

    def adapter_lines(self) -> list[tuple[str, str]]:
        """What is loaded, and what there is room for."""
        if self.loop.adapters is None:
            return []
        names = ", ".join(self.loop.adapters.loaded) or "none"
        room = f"room for {self.options.lora_room} of rank up to {self.options.max_lora_rank}"
        return [("LoRA adapters", f"{names}; {room}")]

    def sampling_lines(self) -> list[tuple[str, str]]:
        """What requests that leave it open take from the model's files."""
        stated = stated_sampling(self.options, self.info)
        values = ", ".join(f"{name} {value}" for name, value in stated.items())
        built_in = stated is DEFAULT_SAMPLING
        said = "best for the built-in model" if built_in else f"as {Path(self.info.sampling.where).name} says"
        return [("sampling", f"{values}, {said}")] if stated else []

    @property
    def caution(self) -> str:
        """Why answers are not the model's; "" if they are."""
        if self.options.draft == "off" or self.options.verification != "accept-all":
            return ""
        return "accept-all: drafts were taken without asking the model; the text is not what it would have said"

    @property
    def step_times(self) -> str:
        """What predicts its steps: "estimate", "bound", "first steps", or "none"."""
        if self.timing is not None and (self.timing.label == "estimate" or self.pacing.costs is None):
            return self.timing.label
        return "none" if self.pacing.costs is None else "first steps"

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a plain text (with the model's start token, if it has one); ids are passed through."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not listed or not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            raise BadInput("prompt", "give a text, or a list of token ids")
        return list(prompt)

    def encode_whole(self, text: str | Sequence[int]) -> list[int]:
        """Token ids of a text that is complete, for a vector of it; ids are passed through."""
        return self.tokenizer.encode_whole(text) if isinstance(text, str) else self.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        if self.template is None:
            raise BadInput("messages", f"{self.info.name} has no chat template; give a plain prompt")
        return encode_chat(self.template, self.tokenizer, messages)

    def compiled(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """These parameters with their grammar, if there is one, tried and ready for `loop.submit`, and with how the
        model marks the reasoning after `prompt`, if that matters.

        Raises:
            BadInput: it cannot be followed.
        """
        if params.thinking is None and (params.thinking_budget is not None or params.grammar is not None):
            tail = self.tokenizer.decode(prompt[-TAIL:], skip_special=False)
            encode = partial(self.tokenizer.encode, add_special=False)
            template = self.info.tokenizer.chat_template or ""
            thinking = thinking_of(template, encode, tail, params.thinking_budget)
            params = msgspec.structs.replace(params, thinking=thinking)
        if params.grammar is None or self.loop.grammars is None:
            return params
        grammar = self._grammars.check(params.grammar)
        self.loop.grammars.begin(grammar).result()
        return msgspec.structs.replace(params, grammar=grammar)

    def close(self) -> None:
        """Give back cache, threads, files and processes; idempotent."""
        self._resources.close()


def stated_sampling(options: EngineOptions, info: ModelInfo) -> Mapping[str, Any]:
    """The sampling fields that the model's makers have defaults for, where those are to count."""
    if options.generation_config == "none":
        return {}
    return DEFAULT_SAMPLING if is_default(info.path) else info.sampling.values


def default_params(options: EngineOptions, info: ModelInfo) -> SamplingParams:
    """`SamplingParams`' own defaults, changed as the model's files say.

    Raises:
        ModelFileError: they hold a value that is out of range.
    """
    try:
        return SamplingParams(**stated_sampling(options, info))
    except BadInput as error:
        problem = f"{error}; --generation-config none leaves it out"
        raise ModelFileError(f"{info.sampling.where}: {problem}") from None


def make_backend(
    name: str,
    threads: int,
    weights: str = "stored",
    group: int | None = None,
    kv: str | None = None,
    pack_cache: bool = False,
) -> Backend:
    """The backend called `name`; "auto" is the best that can be used here, with a warning if it is slow.

    Raises:
        BadInput: there is none of that name, or it cannot be used here.
    """
    kind = find_backend(name)
    if weights != "stored" and not kind.quantises:
        raise BadInput("--weights", f"{weights!r} needs the native backend; the {name} one computes in float32")
    if kv not in (None, *kind.caches):
        raise BadInput("--kv", f"{kv!r}: the {kind.name} backend's cache holds {', '.join(kind.caches)}")
    best, *_ = backends().values()
    if name == "auto" and kind is not best:
        logger.warning("Serving with the %s backend, many times slower. %s", kind.name, best.why_not())
    folder = cache_folder() / "packed" if pack_cache and weights != "stored" else None
    return kind.make(BackendSetup(threads, weights, group, kv, folder))


def _limit_blas(asked: int | None, threads: int) -> None:
    """Let numpy use the threads that were asked for; by default, at most those this process may use."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    for library in libraries:
        if asked is not None or library.num_threads > threads:
            library.set_num_threads(threads)
    if asked is not None and not libraries:
        logger.warning("--threads does not reach numpy's linear algebra here; set OMP_NUM_THREADS=%d instead", asked)


def _check_deterministic(options: EngineOptions, backend: Backend) -> None:
    """
    Raises:
        BadInput: results are to depend on nothing but the row, and would not.
    """
    if not options.deterministic:
        return
    if not backend.deterministic:
        raise BadInput("--deterministic", f"the {backend.name} backend's results depend on batch shape; use native")
    if options.block_size not in STABLE_BLOCKS:
        accepted = ", ".join(map(str, STABLE_BLOCKS))
        raise BadInput(
            "--block-size",
            f"with {options.block_size}, attention sums in an order of its own; --deterministic accepts {accepted}",
        )


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
    backend, threads = _backend(options)
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
    limits, memory = _limits(options, model, backend, free, draft)
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
    files = tier = None
    if options.kv_disk is not None:
        layout = CacheLayout(model.shape.groups, limits.blocks, limits.block_size)
        files, tier = open_disk(opened, options, backend, layout)
        resources.callback(files.close)
    key = secrets.token_bytes(32) if files is None else files.key
    clock = wall_clock()
    models = [one.model for one in seen]
    scheduler = _scheduler(options, limits, pacing, steps, models, regime, log, drafter, key, tier)
    disk = None if files is None or tier is None else DiskTier(files, tier, scheduler, backend, clock.now, log)
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
        tier=disk,
    )
    resources.callback(loop.close)
    for name, path in options.loras.items():
        loop.load_adapter(name, Path(path))
    return Engine(options, model, tokenizer, backend, threads, memory, loop, resources, pacing, timing)


def _backend(options: EngineOptions) -> tuple[Backend, int]:
    """What computes, and with how many threads."""
    threads = options.threads or usable_cores()
    backend = make_backend(options.backend, threads, options.weights, options.group, options.kv, options.pack_cache)
    if backends()[backend.name].blas:
        _limit_blas(options.threads, threads)
    _check_deterministic(options, backend)
    return backend, threads


def _draft(
    options: EngineOptions, model: Model, threads: int, tokenizer: Tokenizer, room: float, progress: Progress | None
) -> DraftModel | None:
    """The model that drafts, if one does, on a backend like the other's."""
    if options.draft in PROPOSERS:
        return None
    backend = make_backend(options.backend, threads, options.weights, options.group, options.kv, options.pack_cache)
    return load_draft(options.draft, backend, model.shape.groups, tokenizer, room, progress)


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


def _memory(
    options: EngineOptions,
    model: Model,
    backend: Backend,
    free: int,
    max_len: int,
    step_tokens: int,
    draft: DraftModel | None,
) -> MemoryPlan:
    """Weights as they are, the largest step as the compiled program says, and pools for the rest."""
    groups, rows = model.shape.groups, options.max_rows
    logit_rows = rows + PROMPT_LOGITS + _max_drafts(options)
    remembered = BOOKKEEPING + 4 * rows  # 4: its place in the block table of any row
    blocks = [backend.block_bytes(group, options.block_size) + remembered for group in groups]
    drafted = 0 if draft is None else draft.block_bytes(options.block_size)
    if draft is not None:
        blocks[draft.group] += drafted
    backend.allocate(CacheLayout(groups, (1,) * len(groups), options.block_size))  # for the program to be measured
    cached = min(rows * max_len, int(free // sum(blocks)) * options.block_size)  # whatever the cache will be
    values = backend.compile(model.forward).step_bytes(step_tokens, rows, logit_rows, cached, min(max_len, cached))
    adapters = 0 if model.adaptable is None else model.adaptable.bytes
    activations = values + logit_bytes(model.shape, logit_rows)
    plan = MemoryPlan(free, backend.weight_bytes, activations, PROCESS, adapters=adapters)
    if draft is not None:
        own = draft.step_bytes(step_tokens, rows, DRAFTS, min(max_len, cached), options.block_size)
        plan = msgspec.structs.replace(plan, draft=draft.backend.weight_bytes, activations=activations + own)
    plan = cut_pools(
        plan,
        groups,
        blocks,
        block_size=options.block_size,
        max_rows=rows,
        max_len=max_len,
        step_tokens=step_tokens,
        kv_cache_gib=options.kv_cache_gib,
    )
    held = 0 if draft is None else drafted * plan.blocks[draft.group]
    return msgspec.structs.replace(plan, draft_cache=held)


def _max_drafts(options: EngineOptions) -> int:
    return 0 if options.draft == "off" else DRAFTS


def _limits(
    options: EngineOptions, model: Model, backend: Backend, free: int, draft: DraftModel | None
) -> tuple[Capabilities, MemoryPlan]:
    context = model.info.context_length
    max_len = options.max_model_len or context
    if max_len > context:
        raise BadInput("--max-model-len", f"{max_len} is above the model's context of {context}")
    step = max(options.max_step_tokens, options.max_rows + LEAST_PROMPT)  # prompts move beside as many decodes
    memory = _memory(options, model, backend, free, max_len, step, draft)
    if options.max_model_len and max_len > memory.longest:
        raise BadInput(
            "--max-model-len", f"{max_len} tokens do not fit in a cache of {memory.longest}; see --kv-cache-gib"
        )
    limits = Capabilities(
        block_size=options.block_size,
        blocks=memory.blocks,
        windows=tuple(group.window for group in model.shape.groups),
        max_rows=options.max_rows,
        max_tokens_per_step=step,
        max_model_len=memory.longest,
        long_after=model.info.config.rope.original if model.info.config.rope.longer else None,
        max_prompt_logits=PROMPT_LOGITS,
        max_drafts=_max_drafts(options),
    )
    return limits, memory
