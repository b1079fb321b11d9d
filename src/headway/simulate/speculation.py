"""`headway simulate spec`: what drafts are worth, by the code that verifies them, on made-up distributions."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.core.errors import BadInput
from headway.report.document import Document, Grid, Text
from headway.roofline.speculation import Draft, expected_tokens, speedup
from headway.sampling.verify import race, reject

VOCAB = 16
AT_ONCE = 20_000  # steps that are played side by side
MOST_DRAFTS, MOST_STEPS = 64, 10_000_000
MODES = ("rejection", "coupled")


def overlapping(share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two distributions, the model's and the draft's, which have `share` of their mass in common -> float64 [VOCAB]
    each. That share is what `rejection` accepts (Leviathan et al. 2023)."""
    common, ours, theirs = (rng.dirichlet(np.ones(VOCAB)) for _ in range(3))
    first = np.arange(VOCAB) < VOCAB // 2
    ours, theirs = ours * first, theirs * ~first
    return share * common + (1 - share) * ours / ours.sum(), share * common + (1 - share) * theirs / theirs.sum()


def play(k: int, share: float, mode: str, steps: int, rng: np.random.Generator) -> tuple[float, float]:
    """(tokens per step, share of the drafts that were reached which was accepted) of many steps with k drafts each."""
    accepted = tried = 0
    for first in range(0, steps, AT_ONCE):
        rows = min(AT_ONCE, steps - first)
        p, q = overlapping(share, rng)
        whole, drafted = np.broadcast_to(p, (rows, k + 1, VOCAB)), np.broadcast_to(q, (rows, k, VOCAB))
        noise = rng.uniform(np.finfo(float).tiny, 1, (rows, k + 1, VOCAB))
        if mode == "rejection":
            draft = race(drafted, rng.uniform(np.finfo(float).tiny, 1, (rows, k, VOCAB)))
            counts = reject(whole, drafted, draft, rng.uniform(size=(rows, k)), noise)[0]
        else:  # the model's draws, of which those count that agree with the draft's by the same noise
            agree = race(whole[:, :k], noise[:, :k]) == race(drafted, noise[:, :k])
            counts = np.where(agree.all(axis=1), k, np.argmin(agree, axis=1))
        accepted += int(counts.sum())
        tried += int(np.minimum(counts + 1, k).sum())
    return 1 + accepted / steps, accepted / tried if tried else 0.0


def table(drafts: list[int], shares: list[float], cost: float, mode: str, steps: int, seed: int) -> dict[str, Any]:
    """A line per number of drafts and share accepted.

    Raises:
        BadInput: an argument is out of range.
    """
    if not drafts or not all(1 <= k <= MOST_DRAFTS for k in drafts):
        raise BadInput("--drafts", f"{drafts}: accepted: whole numbers from 1 to {MOST_DRAFTS}")
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise BadInput("--acceptance", f"{shares}: accepted: numbers from 0 to 1")
    if not cost >= 0:
        raise BadInput("--draft-cost", f"{cost} is not a number from 0 up")
    if mode not in MODES:
        raise BadInput("--verification", f"{mode!r} is not one of {', '.join(MODES)}")
    if not 1 <= steps <= MOST_STEPS:
        raise BadInput("--steps", f"{steps} is not from 1 to {MOST_STEPS}")
    lines = []
    for share in shares:
        for k in drafts:
            tokens, accepted = play(k, share, mode, steps, np.random.default_rng([seed, k, round(1e6 * share)]))
            lines.append({
                "drafts": k, "overlap": share, "acceptance": accepted, "tokens_per_step": tokens,
                "formula": expected_tokens(k, accepted if mode == "coupled" else share),
                "speedup": speedup(Draft(cost=cost, curve=(tokens,) * k), k),
            })  # fmt: skip
    return {"verification": mode, "draft_cost": cost, "steps": steps, "lines": lines}


def document(found: dict[str, Any]) -> Document:
    """The table for people."""
    head = ("drafts k", "in common", "accepted", "tokens per step", "(1-a^(k+1))/(1-a)", "speed-up")
    rows = [
        [str(line["drafts"]), f"{line['overlap']:.2f}", f"{line['acceptance']:.3f}", f"{line['tokens_per_step']:.3f}",
         f"{line['formula']:.3f}", f"{line['speedup']:.2f}"]
        for line in found["lines"]
    ]  # fmt: skip
    about = (
        f"{found['verification']} verification of {found['steps']:,} steps a line; a draft step costs "
        f"{found['draft_cost']:.0%} of a target step, and verifying no more than one: decode is bound by memory."
    )
    return Document("Speculative decoding", [Grid(head, rows), Text(about)], [])
