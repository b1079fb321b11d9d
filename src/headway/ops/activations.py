"""The functions between the matrices of an MLP, in numpy float32."""

from __future__ import annotations

import numpy as np

from headway.ops.routing import ClampedSwiGLU


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp of a large number is inf, and x / inf is the right 0
        return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The tanh approximation of GELU (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the share of the normal distribution below x, within 8e-8 of it (Abramowitz and Stegun 7.1.26)."""
    size = np.abs(x, dtype=np.float64)
    t = 1 / (1 + 0.3275911 * np.sqrt(0.5) * size)
    series = np.polyval([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0], t)
    return (np.maximum(x, 0) - size * 0.5 * series * np.exp(-0.5 * size**2)).astype(np.float32)


def relu(x: np.ndarray) -> np.ndarray:
    """What is positive of x."""
    return np.maximum(x, 0)


def relu2(x: np.ndarray) -> np.ndarray:
    """The square of what is positive of x (So et al., Primer, 2021)."""
    return np.square(np.maximum(x, 0))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu, "relu": relu, "relu2": relu2}


def gated(gate: np.ndarray, up: np.ndarray, activation: str | ClampedSwiGLU) -> np.ndarray:
    """activation(gate) * up, or what stands for it."""
    if isinstance(activation, str):
        return ACTIVATIONS[activation](gate) * up
    gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    return silu(activation.alpha * gate) * ((up + 1) / np.float32(activation.alpha))
