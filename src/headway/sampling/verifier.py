"""Verification for an executor: the drafts of all rows of a step, whatever their sampling parameters.

A row's drafts stand in its logits one after another. Rows whose draws depend on nothing but logits and key are drawn at
all their positions in one call; those with penalties, masks, grammars or a budget of reasoning go on position by
position, all of them together, because what was drawn changes what may come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.core.step import TokenLogprobs
from headway.sampling.noise import ACCEPT, dense_uniforms, uniforms
from headway.sampling.operations import AnyLogits, LogitOps
from headway.sampling.pipeline import distribution, draw
from headway.sampling.rows import RowFailure
from headway.sampling.sampler import Sampler
from headway.sampling.verify import acceptance, agreeing, race, residual


@dataclass(frozen=True)
class Drafted:
    """What one entry proposes.

    Attributes:
        tokens: the drafts, for the positions before the last one whose logits are there.
        q: float64 [len(tokens), vocab], what they were drawn from; None = they were certain.
    """

    tokens: tuple[int, ...] = ()
    q: np.ndarray | None = None


UNDRAFTED = Drafted()


@dataclass
class Verified:
    """What came of it, by entry.

    Attributes:
        tokens: emitted: accepted drafts, then one drawn token; none of an entry that failed.
        logprobs: one per emitted token, where the row asks for them.
        failed: the sentence that says why.
    """

    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Verifier:
    """Verifies drafts by one of `verify.MODES`.

    Args:
        sampler: whose rows they are.
        ops: operations on logits, the sampler's.
    """

    def __init__(self, sampler: Sampler, ops: LogitOps, mode: str = "coupled") -> None:
        self._sampler = sampler
        self._ops = ops
        self._mode = mode

    def verify(
        self, logits: AnyLogits, slots: np.ndarray, last: np.ndarray, positions: np.ndarray, drafts: Sequence[Drafted]
    ) -> Verified:
        """Emit tokens for every entry.

        Args:
            logits: of the raw model; as before afterwards.
            slots: int32 [n], whose.
            last: int32 [n], the last of its rows of logits; it has one per draft before that.
            positions: int32 [n], of the token drawn from the last.
        """
        if not any(draft.tokens for draft in drafts):
            sampled = self._sampler.sample(logits, slots, last, positions)
            reports = {entry: [report] for entry, report in sampled.logprobs.items()}
            return Verified([[token] if token >= 0 else [] for token in sampled.tokens], reports, sampled.failed)
        verified = Verified([[] for _ in drafts])
        together: list[int] = []
        in_turn: list[int] = []
        for entry, (slot, draft) in enumerate(zip(slots.tolist(), drafts, strict=True)):
            if self._mode == "rejection" and draft.tokens:
                self._reject(verified, entry, logits, slot, int(last[entry]), int(positions[entry]), draft)
            else:
                (in_turn if self._sampler.remembers(slot) else together).append(entry)
        if together:
            self._at_once(verified, together, logits, slots, last, positions, drafts)
        if in_turn:
            self._step_by_step(verified, in_turn, logits, slots, last, positions, drafts)
        return verified

    def _at_once(
        self, verified: Verified, entries: list[int], logits: AnyLogits, slots: np.ndarray, last: np.ndarray,
        positions: np.ndarray, drafts: Sequence[Drafted],
    ) -> None:  # fmt: skip
        counts = [len(drafts[entry].tokens) + 1 for entry in entries]
        ends = np.cumsum(counts)
        back = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - 1, counts).astype(np.int32)  # ..., -2, -1, 0
        of = np.repeat(entries, counts)
        drawn = self._sampler.draw(logits, slots[of], last[of] + back, positions[of] + back)
        begin = 0
        for entry, count in zip(entries, counts, strict=True):
            slot, draft = int(slots[entry]), drafts[entry].tokens
            tokens = drawn.tokens[begin : begin + count]
            if self._mode == "accept-all":
                tokens[:-1] = draft
            kept = tokens[: agreeing(tokens, draft, self._sampler.ends(slot))]
            while kept and kept[-1] < 0:  # it will fail there in the next step, as it would without drafts
                kept.pop()
            verified.tokens[entry] = kept
            if not kept:
                verified.failed[entry] = drawn.failed[begin]
            if self._sampler.reports(slot):
                first = int(last[entry]) - len(draft)
                verified.logprobs[entry] = [
                    self._sampler.report(logits, slot, first + index, token) for index, token in enumerate(kept)
                ]
            begin += count

    def _step_by_step(
        self, verified: Verified, entries: list[int], logits: AnyLogits, slots: np.ndarray, last: np.ndarray,
        positions: np.ndarray, drafts: Sequence[Drafted],
    ) -> None:  # fmt: skip
        done = 0  # positions of each that is left
        while entries:
            back = np.array([done - len(drafts[entry].tokens) for entry in entries], np.int32)
            sampled = self._sampler.sample(logits, slots[entries], last[entries] + back, positions[entries] + back)
            going_on = []
            for number, entry in enumerate(entries):
                token, draft, tokens = sampled.tokens[number], drafts[entry].tokens, verified.tokens[entry]
                if token < 0:
                    if not tokens:
                        verified.failed[entry] = sampled.failed[number]
                    continue
                tokens.append(token)
                if number in sampled.logprobs:
                    verified.logprobs.setdefault(entry, []).append(sampled.logprobs[number])
                ends = token in self._sampler.ends(int(slots[entry]))
                if done < len(draft) and token == draft[done] and not ends:
                    going_on.append(entry)
            entries, done = going_on, done + 1

    def _reject(
        self, verified: Verified, entry: int, logits: AnyLogits, slot: int, last: int, position: int, draft: Drafted
    ) -> None:
        state, tokens, ends = self._sampler.state(slot), verified.tokens[entry], self._sampler.ends(slot)
        key = {"seed": state.seed, "choice": state.choice}
        try:
            for index, drafted in enumerate((*draft.tokens, None)):
                back = index - len(draft.tokens)
                raw, at = self._ops.row(logits, last + back), position + back
                if drafted is None:
                    token = draw(raw, state, at)
                else:
                    p = distribution(raw, state, at)
                    q = draft.q[index] if draft.q is not None else (np.arange(len(p)) == drafted).astype(np.float64)
                    (uniform,) = uniforms(np.array([drafted]), position=at, purpose=ACCEPT, **key)
                    token = drafted
                    if uniform >= acceptance(p, q, np.array(drafted)):
                        token = int(race(residual(p, q), dense_uniforms(len(p), position=at, **key)))
                tokens.append(token)
                state.observe(token)
                if self._sampler.reports(slot):
                    report = self._sampler.report(logits, slot, last + back, token)
                    verified.logprobs.setdefault(entry, []).append(report)
                if token != drafted or token in ends:
                    return
        except RowFailure as failure:
            if not tokens:
                verified.failed[entry] = str(failure)
