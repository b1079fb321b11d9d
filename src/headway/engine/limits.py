"""How much a step and the cache may hold: the memory plan of an engine, and the limits that follow from it."""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput
from headway.core.step import Capabilities
from headway.engine.draft_model import DraftModel
from headway.engine.options import EngineOptions
from headway.model.load import Model
from headway.ops.protocol import Backend, CacheLayout
from headway.roofline.memory import PROCESS, MemoryPlan, cut_pools, logit_bytes

BOOKKEEPING = 512  # bytes that the scheduler remembers of a cache block: owners, name, recency
PROMPT_LOGITS = 64  # prompt positions per step whose logits are kept for prompt_logprobs
DRAFTS = 64  # drafts per step that are verified, of all rows together
LEAST_PROMPT = 16  # prompt tokens that a step holds however many rows decode


def plan_limits(
    options: EngineOptions, model: Model, backend: Backend, free: int, draft: DraftModel | None
) -> tuple[Capabilities, MemoryPlan]:
    """What the scheduler goes by, and the memory plan behind it. free: bytes that there are.

    Raises:
        BadInput: the context that was asked for is longer than the model's, or than the cache.
    """
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
