"""What a sampler asks of whoever holds the logits. A backend implements it where they lie; numpy is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from headway.core.step import TokenLogprobs
from headway.sampling.adjust import adjust_rows, mask_rows
from headway.sampling.logits import Logits
from headway.sampling.logprobs import token_logprobs
from headway.sampling.pipeline import draw_rows
from headway.sampling.rows import RowState
from headway.sampling.table import Draws

AnyLogits = Any  # of a step, in the backend's own form


class Undo(Protocol):
    """What an adjustment changed."""

    def undo(self, logits: AnyLogits) -> None:
        """Make the logits what they were."""
        ...


class LogitOps(Protocol):
    """Operations on the logits of a step."""

    def adjust(
        self, logits: AnyLogits, numbers: Sequence[int], rows: Sequence[RowState], positions: Sequence[int]
    ) -> Undo:
        """Penalties, biases and the mask of min_tokens: rows `numbers` of the logits belong to `rows`, which draw at
        `positions`."""
        ...

    def vocab(self, logits: AnyLogits) -> int:
        """How many tokens each row has a logit for."""
        ...

    def row(self, logits: AnyLogits, number: int) -> np.ndarray:
        """One row, for looking at -> float32 [vocab]."""
        ...

    def mask(self, logits: AnyLogits, numbers: Sequence[int], masks: np.ndarray, undoable: bool) -> Undo | None:
        """Forbid tokens: rows `numbers`, each once, may only draw what is set in uint32 [n, words], a bit per token,
        the lowest first; a token behind them may not be drawn. None = it cannot be undone, and need not be."""
        ...

    def draw(self, logits: AnyLogits, draws: Draws) -> np.ndarray:
        """A token per draw -> int32 [draws]; exactly what `sampling.pipeline.draw_rows` says."""
        ...

    def logprobs(self, logits: AnyLogits, first: int, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
        """What the model thought of `tokens`, one per row from `first` on; see `sampling.logprobs`.

        Raises:
            RowFailure: a row holds a NaN or +inf, or nothing but -inf.
        """
        ...


class NumpyLogits:
    """The reference, on `Logits` in this process's memory."""

    def adjust(
        self, logits: Logits, numbers: Sequence[int], rows: Sequence[RowState], positions: Sequence[int]
    ) -> Undo:
        return adjust_rows(logits, numbers, rows, positions)

    def vocab(self, logits: Logits) -> int:
        return logits.rows.shape[1]

    def row(self, logits: Logits, number: int) -> np.ndarray:
        return logits.rows[number]

    def mask(self, logits: Logits, numbers: Sequence[int], masks: np.ndarray, undoable: bool) -> Undo | None:
        return mask_rows(logits, numbers, masks)

    def draw(self, logits: Logits, draws: Draws) -> np.ndarray:
        return draw_rows(logits, draws)

    def logprobs(self, logits: Logits, first: int, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
        return token_logprobs(logits.part(first, first + len(tokens)), tokens, top)
