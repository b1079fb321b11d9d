"""Sixteen bytes that stand for a plan: equal digests, equal plans, whatever the token values are."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from headway.core.step import StepPlan

_ENCODER = msgspec.msgpack.Encoder()


def digest_of(plan: StepPlan) -> bytes:
    """Hash of everything that scheduling decided: rows, counts, blocks, order. Token values and sampling parameters
    are left out, so that a log without text can be replayed; so is the predicted time, which is not a decision."""
    new = [(row.id, len(row.tokens), row.prompt_len, row.choice, row.blocks, row.adapter) for row in plan.new]
    work = [
        (one.id, one.start, one.count, len(one.draft), one.blocks, one.logits, one.sample, one.prompt_logprobs)
        for one in plan.work
    ]
    copies = [(copy.group, copy.src, copy.dst) for copy in plan.copies]
    return blake2b(_ENCODER.encode((plan.step, new, work, plan.gone, copies)), digest_size=16).digest()
