"""The sampler of an executor: the state of all rows by slot, and one call per step that draws for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.core.step import TokenLogprobs
from headway.sampling.operations import AnyLogits, LogitOps, Undo
from headway.sampling.rows import RowFailure, RowState
from headway.sampling.table import NOTHING_ALLOWED, Draws, DrawTable, failure


@dataclass
class Sampled:
    """What was drawn. Entries are numbered as the draws were.

    Attributes:
        tokens: the drawn ids; negative for a row that failed.
        logprobs: of the raw distribution, by entry, where the row asks for them.
        failed: entry to the sentence that says why.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Draws tokens.

    Args:
        slots: most rows at once.
        ops: a backend's operations on logits, or the reference ones.
    """

    def __init__(self, slots: int, ops: LogitOps) -> None:
        self._ops = ops
        self._table = DrawTable(slots)
        self._states: list[RowState | None] = [None] * slots
        self._special: set[int] = set()  # slots whose logits are adjusted, or that want log probabilities
        self._remembering: set[int] = set()  # slots whose next draw depends on what was drawn before
        self._ends: list[frozenset[int]] = [frozenset()] * slots

    def add(self, slot: int, state: RowState) -> None:
        """Take a slot over for a row."""
        self._states[slot] = state
        self._table.set(slot, state.params, state.choice)
        self._ends[slot] = frozenset(state.end_ids.tolist())
        self._special.discard(slot)
        self._remembering.discard(slot)
        if state.adjusts or state.masks:
            self._remembering.add(slot)
        if state.adjusts or state.masks or state.params.logprobs is not None:
            self._special.add(slot)

    def drop(self, slot: int) -> None:
        """The row is gone."""
        self._states[slot] = None
        self._special.discard(slot)
        self._remembering.discard(slot)

    def remembers(self, slot: int) -> bool:
        """Whether what is drawn for it changes what is drawn next."""
        return slot in self._remembering

    def reports(self, slot: int) -> bool:
        """Whether it asks for log probabilities."""
        return slot in self._special and self.state(slot).params.logprobs is not None

    def ends(self, slot: int) -> frozenset[int]:
        """Ids that end it."""
        return self._ends[slot]

    def report(self, logits: AnyLogits, slot: int, row: int, token: int) -> TokenLogprobs:
        """Log probabilities that it asks for, of a token that was drawn from a row of the logits."""
        top = self.state(slot).params.logprobs
        assert top is not None, "it asks for some"
        return self._ops.logprobs(logits, row, [token], top)[0]

    def draw(self, logits: AnyLogits, slots: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """Draw a token per entry for slots that remember nothing; a slot may come at several positions."""
        draws = Draws(self._table, slots, rows, positions)
        return _checked(self._ops.draw(logits, draws).tolist(), positions)

    def sample(self, logits: AnyLogits, slots: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """Draw one token per entry, and count it in its row's state. The logits are as before afterwards.

        Args:
            logits: of the raw model.
            slots: int32 [n], whose token.
            rows: int32 [n], drawn from which row of the logits; no row twice.
            positions: int32 [n], index of the token within its sequence.
        """
        draws = Draws(self._table, slots, rows, positions)
        if not self._special:
            return _checked(self._ops.draw(logits, draws).tolist(), positions)
        special = [(entry, self.state(slot)) for entry, slot in enumerate(slots.tolist()) if slot in self._special]
        adjusted = [(entry, state) for entry, state in special if state.adjusts]
        states = [state for _, state in adjusted]
        entries = [entry for entry, _ in adjusted]
        numbers, places = rows[entries].tolist(), positions[entries].tolist()
        change = self._ops.adjust(logits, numbers, states, places) if adjusted else None
        masking, lost = self._mask(logits, special, rows, positions)
        sampled = _checked(self._ops.draw(logits, draws).tolist(), positions)
        for entry, sentence in lost.items():
            sampled.tokens[entry], sampled.failed[entry] = NOTHING_ALLOWED, sentence
        for undoing in (masking, change):
            if undoing is not None:
                undoing.undo(logits)
        for entry, state in special:
            if entry in sampled.failed:
                continue
            token, row = sampled.tokens[entry], int(rows[entry])
            if state.params.logprobs is not None:
                sampled.logprobs[entry] = self._ops.logprobs(logits, row, [token], state.params.logprobs)[0]
            state.observe(token)
        return sampled

    def _mask(
        self, logits: AnyLogits, special: list[tuple[int, RowState]], rows: np.ndarray, positions: np.ndarray
    ) -> tuple[Undo | None, dict[int, str]]:
        """Forbid what the rows' grammars do -> (how to take that back, entries whose grammar is lost, and why)."""
        numbers, masks, lost = [], [], {}
        undoable = any(state.params.logprobs is not None for _, state in special)  # of the raw distribution
        vocab = self._ops.vocab(logits)
        for entry, state in special:
            if state.masks:
                try:
                    mask = state.mask(int(positions[entry]), vocab)
                except RowFailure as failure:
                    lost[entry] = str(failure)
                    continue
                if mask is not None:
                    numbers.append(int(rows[entry]))
                    masks.append(mask)
        return self._ops.mask(logits, numbers, _stacked(masks), undoable) if masks else None, lost

    def prepare(self, slots: list[int]) -> None:
        """Work out what grammars allow next, before there are logits; may run beside the forward pass."""
        for slot in slots:
            self.state(slot).prepare()

    def follows(self, slots: list[int]) -> list[int]:
        """Those of the slots whose rows have a grammar."""
        return [slot for slot in slots if slot in self._special and self.state(slot).grammar is not None]

    def state(self, slot: int) -> RowState:
        """Of the row that has it."""
        state = self._states[slot]
        assert state is not None, f"slot {slot} is free"
        return state


def _stacked(masks: list[np.ndarray]) -> np.ndarray:
    """Masks of any length as uint32 [rows, words]; what one does not name is not allowed."""
    stacked = np.zeros((len(masks), max(map(len, masks))), np.uint32)
    for row, mask in zip(stacked, masks, strict=True):
        row[: len(mask)] = mask
    return stacked


def _checked(tokens: list[int], positions: np.ndarray) -> Sampled:
    sampled = Sampled(tokens)
    if tokens and min(tokens) < 0:
        for entry, token in enumerate(tokens):
            if token < 0:
                sampled.failed[entry] = failure(token, int(positions[entry]))
    return sampled
