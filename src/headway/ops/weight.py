"""A weight as it lies in the checkpoint: name, shape, storage format, raw bytes. Quantisation is a weight type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint, still in its stored form (usually a view of the mapped file, so free to hold).

    Attributes:
        name: as in the file; for error messages.
        shape: (out, in) of a matrix, (n,) of a vector.
        format: "f32", "f16", "bf16", "q8_0", "q4_0" or "q4_1" (block formats as defined by GGUF).
        data: uint8 [bytes], row-major, rows of a block format one after another.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray

    def dequantise(self) -> np.ndarray:
        """The whole weight as float32 of `shape`."""
        raise NotImplementedError
