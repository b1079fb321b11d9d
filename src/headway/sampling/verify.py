"""Lossless verification of proposed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.sampling.pipeline import draw
from headway.sampling.rows import RowState


def verify(logits: np.ndarray, row: RowState, position: int, draft: Sequence[int]) -> list[int]:
    """Draw at each drafted position and go on while the draw equals the draft.

    The noise of a position is keyed, so each draw is exactly the one that would be made without a draft: the emitted
    tokens are the same ones, whatever was proposed, and every sampling feature works. The accepted ones and the
    last draw are counted in the row's state.

    Args:
        logits: float32 [len(draft) + 1, vocab]; row j predicts the token at `position` + j.
        position: index within the sequence of the first token to draw.
        draft: proposed ids for `position`, `position` + 1, ...

    Returns:
        The emitted ids: the accepted part of the draft, then one more.

    Raises:
        RowFailure: as `draw`.
    """
    emitted: list[int] = []
    for offset, proposed in enumerate([*draft, None]):
        token = draw(logits[offset], row, position + offset)
        row.observe(token)
        emitted.append(token)
        if token != proposed:
            break
    return emitted
