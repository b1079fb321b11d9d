"""Steps do not take what they usually do: how a fitted machine's own steps varied, played again in a simulation.

What a fit leaves unexplained is kept in the order in which it was measured (`Fit.noise`). A simulation resamples
stretches of it: blocks of `BLOCK` steps that followed each other, so that slow spells last as long as they did and a
pause hits one step (the block bootstrap: Künsch, The jackknife and the bootstrap for general stationary observations,
1989). Which stretch a block takes depends on the seed and on the number of the step alone, and all is in whole
numbers, so stepping and leaping draw alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DECODE, CHUNK = "decode", "chunk"  # kinds of step: without and with prompt tokens
UNIT = 1000  # of a factor: as long as predicted
BLOCK = 128  # steps
KEPT = 16 * BLOCK  # factors of a kind that a fit keeps
_MASK = (1 << 64) - 1


class StepNoise:
    """Factors, in thousandths, of the steps of one replica.

    Args:
        known: per kind of step, measured over predicted times in the order of the steps, in thousandths; a kind that
            is not there takes what is predicted.
        seed: of the draw.
    """

    def __init__(self, known: Mapping[str, Sequence[int]], seed: int) -> None:
        self._known = {kind: _long(factors) for kind, factors in known.items() if factors}
        self._seed = seed
        self._at: dict[str, tuple[int, Sequence[int]]] = {}  # kind -> (number of the block, its factors)

    def factor(self, step: int, kind: str) -> int:
        """Of one step, by its number."""
        block, index = divmod(step, BLOCK)
        return self._block(block, kind)[index]

    def factors(self, step: int, count: int, kind: str) -> list[int]:
        """Of `count` steps from one on."""
        found: list[int] = []
        while len(found) < count:
            block, index = divmod(step + len(found), BLOCK)
            found += self._block(block, kind)[index : index + count - len(found)]
        return found

    def _block(self, block: int, kind: str) -> Sequence[int]:
        """Both kinds take theirs from the same part of what was measured: a spell slows all steps."""
        known = self._at.get(kind)
        if known is not None and known[0] == block:
            return known[1]
        factors = self._known.get(kind, _USUAL)
        begin = (_mixed(self._seed, block) * (len(factors) - BLOCK + 1)) >> 64
        chosen = factors[begin : begin + BLOCK]
        self._at[kind] = block, chosen
        return chosen


def _long(factors: Sequence[int]) -> list[int]:
    """At least a block."""
    return list(factors) * -(-BLOCK // len(factors))


_USUAL = [UNIT] * BLOCK


def _mixed(seed: int, block: int) -> int:
    """64 bits that look random (SplitMix64: Steele et al., Fast splittable pseudorandom number generators, 2014)."""
    value = 0
    for part in (seed, block):
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value
