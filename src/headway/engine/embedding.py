"""From what an engine pools of a text to the vector or the score that a user gets."""

from __future__ import annotations

import math

import numpy as np

from headway.core.errors import BadInput
from headway.core.pooling import PoolingConfig


def vector(pooled: bytes, dimensions: int | None = None, normalise: bool = True) -> np.ndarray:
    """Float32 numbers: the first `dimensions` of a pooled text (None = all), with length 1 if they are normalised."""
    numbers = np.frombuffer(pooled, "<f4")[:dimensions]
    if not normalise:
        return numbers
    length = math.sqrt(float(np.square(numbers, dtype=np.float64).sum()))
    return (numbers / np.float64(length or 1.0)).astype(np.float32)


def check_dimensions(dimensions: int | None, width: int, config: PoolingConfig) -> None:
    """
    Raises:
        BadInput: the model has no vectors of so many numbers.
    """
    if dimensions is None or dimensions == width:
        return
    if not 0 < dimensions < width:
        raise BadInput("dimensions", f"{dimensions} is not from 1 to {width}, the width of this model")
    if not config.embeds:
        problem = f"this model was not made for embeddings, so {dimensions} of its {width} numbers mean nothing"
        raise BadInput("dimensions", problem)


def relevance(pooled: bytes, config: PoolingConfig) -> float:
    """How well two texts fit, from 0 to 1, of what a classification head says of them.

    Raises:
        BadInput: its labels are more than no and yes.
    """
    numbers = np.frombuffer(pooled, "<f4").astype(np.float64)
    if len(numbers) == 1:
        return 1 / (1 + math.exp(-min(max(float(numbers[0]), -700.0), 700.0)))
    if len(numbers) > 2:
        raise BadInput("model", f"its classification head has {len(numbers)} labels, which is no yes or no")
    weights = np.exp(numbers - numbers.max())
    return float(weights[config.positive] / weights.sum())
