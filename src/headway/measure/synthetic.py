"""Made-up models that a machine's profile is fitted on: real widths, few layers, any weight format.

Two sizes, because one cannot tell what a step costs per layer from what it costs per byte. Weights are zeros: kernels
take as long for them as for any others, and zeros are valid in every format.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headway.measure.fit import Observation, fit_regimes
from headway.measure.patience import Patience
from headway.measure.trial import Point, Trial, observe
from headway.model import llama
from headway.model.config import DecoderConfig
from headway.model.rope import inverse_frequencies, rope
from headway.ops.protocol import Backend
from headway.ops.weight import Weight
from headway.roofline.hardware import Hardware
from headway.roofline.profile import Fit, Rates
from headway.roofline.step import StepTime
from headway.shape.config import shape_from_config, tensors_of
from headway.shape.formats import stored_bytes
from headway.shape.model import ByPart, ModelShape

NARROW = DecoderConfig(
    layers=9, heads=12, kv_heads=4, head_dim=64, hidden_size=768, intermediate_size=2048, vocab_size=24576,
    context_length=2048, norm_eps=1e-5, rope=rope(inverse_frequencies(64, 10000.0)), tied=True,
)  # fmt: skip
WIDE = replace(NARROW, layers=2, heads=32, kv_heads=8, hidden_size=2048, intermediate_size=8192, vocab_size=12288)
POINTS = (
    *(Point(rows, 128) for rows in (1, 2, 4, 8, 16, 32)), Point(1, 1024), Point(8, 1024),
    Point(0, 128, 32), Point(0, 128, 128), Point(0, 128, 512), Point(8, 128, 64),
    Point(0, 128, 32, 1536), Point(0, 128, 128, 1536), Point(4, 1024, 32, 1536),
)  # fmt: skip
ROUNDS, QUICK_ROUNDS = 6, 2  # how often each point is timed
SIZES = (("narrow", NARROW), ("wide", WIDE))
SECONDS = 0.055  # of a step between two probes, on an idle machine of two cores


def steps(rounds: int) -> int:
    """Measured for one format."""
    return len(SIZES) * len(POINTS) * rounds


def synthetic(config: DecoderConfig, name: str, backend: Backend, format: str) -> tuple[Trial, ModelShape]:
    """A model of zeros on a backend, with matrices stored in `format`, ready to run `POINTS`."""
    prepared, taken = {}, Counter[str]()
    described = llama.config_json(config)
    for tensor in tensors_of(described):
        stored = format if len(tensor.shape) > 1 else "f32"
        data = np.empty(stored_bytes(stored, tensor.shape), np.uint8)
        data.fill(0)  # written, so that it is memory of its own
        before = backend.weight_bytes
        prepared[tensor.role] = backend.prepare(Weight(tensor.role, tensor.shape, stored, data))
        taken[tensor.part] += backend.weight_bytes - before
    shape = shape_from_config(described, name).held(ByPart(**taken), backend.kv_dtype_bytes, format, format)
    return Trial(backend, llama.build(config, prepared), shape, POINTS), shape


def measure_format(
    make: Callable[[], Backend], format: str, probe_of: Callable[[str], Callable[[], Rates]],
    progress: Callable[[], None] = lambda: None, rounds: int = ROUNDS, patience: Patience | None = None,
) -> list[Fit]:  # fmt: skip
    """Fit what a backend reaches on matrices stored in `format`, in each regime the machine was in.

    Args:
        make: a fresh backend of the kind.
        probe_of: number format -> what measures the machine.
        progress: called after every measured step.
        rounds: how often each size of step is timed.

    Raises:
        OutOfTime: patience ran out.
    """
    patience = patience or Patience()
    found: list[Observation] = []
    math = ""
    for name, config in SIZES:
        backend = make()
        trial, shape = synthetic(config, name, backend, format)
        math = backend.math
        trial.run(Point(0, 128, 512))  # buffers grow once
        machine = Hardware(name, "cpu", 1.0, 1.0, {}, "", "")  # rates are probed beside every step
        model = StepTime(shape, machine, math=math)
        found += observe(trial, model, POINTS, probe_of(math), rounds, progress, patience)
        trial.close()
        patience.check()
        del trial, backend
        gc.collect()  # a model's weights are gone before the next one's are made
    return fit_regimes(found, math)
