"""A family that looks at a size or a value is caught while it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headway.ops.protocol import CacheLayout
from headway.ops.recording import Handle, LookedAtHandle, RecordedWeight, RecordingBackend, RecordingOps
from headway.ops.reference import ReferenceBackend
from headway.shape.model import KVGroup

LAYOUT = CacheLayout((KVGroup("full", (0,), 2, 4, 3),), (4,), 4)


def weight(*shape: int) -> RecordedWeight:
    return RecordedWeight(shape, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    "look",
    [
        len, bool, int, float, iter, list, np.asarray, hash,
        lambda x: x.shape, lambda x: x[0], lambda x: x + x, lambda x: 2 * x, lambda x: x @ x, lambda x: x == 0,
        lambda x: x < 1, lambda x: -x, lambda x: x.dtype, lambda x: 1 if x else 0,
    ],
)  # fmt: skip
def test_looking_at_a_handle_is_refused(look: Callable[[Any], Any]) -> None:
    with pytest.raises(LookedAtHandle):
        look(Handle(0, "tokens", 8))


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda ops, x: ops.linear(x, weight(5, 9)), "9"),
        (lambda ops, x: ops.linear(x, weight(5, 8), weight(4)), "bias"),
        (lambda ops, x: ops.linear(x, weight(5, 8), residual=x), "residual"),
        (lambda ops, x: ops.rms_norm(x, weight(7), 1e-5), "rms_norm"),
        (lambda ops, x: ops.logits(x, weight(10, 8)), "rows"),
        (lambda ops, x: ops.logit_rows(ops.logit_rows(x)), "logit_rows"),
        (lambda ops, x: ops.attention(ops.linear(x, weight(12, 8)), 0, 1.0), "heads"),
        (lambda ops, x: ops.attention(ops.logit_rows(x), 0, 1.0), "rows"),
        (lambda ops, x: ops.rope_and_cache(x, x, x, 0, None), "v"),
        (lambda ops, x: ops.gated_mlp(x, weight(6, 8), weight(6, 8), weight(6, 8), "silu"), "gated_mlp"),
        (lambda ops, x: ops.attention(x, 1, 1.0), "layer 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(call: Callable[..., Any], fault: str) -> None:
    ops = RecordingOps(LAYOUT)
    with pytest.raises((ValueError, KeyError), match=fault):
        call(ops, ops.embed(weight(10, 8)))


def test_compiling_needs_a_cache() -> None:
    with pytest.raises(ValueError, match="allocate"):
        RecordingBackend(ReferenceBackend()).compile(lambda ops: None)
