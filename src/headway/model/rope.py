"""Angles of rotary position embeddings, with the length scalings Llama checkpoints use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def inverse_frequencies(width: int, theta: float) -> np.ndarray:
    """theta^(-2i/width) for pair i, float64 [width / 2] (Su et al., RoFormer, 2021)."""
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)


@dataclass(frozen=True)
class Llama3Scaling:
    """Parameters of Llama 3.1's rope scaling: longer waves than original_context / low_freq_factor are slowed by
    `factor`, shorter ones than original_context / high_freq_factor are kept, those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


def llama3(inv_freq: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Scaled frequencies, float64 [width / 2] (`apply_scaling` in Meta's llama-models)."""
    turns = scaling.original_context * inv_freq / (2 * np.pi)  # of each pair over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return inv_freq * (kept + (1 - kept) / scaling.factor)
