"""How often drafts are accepted: shares that forget."""

from __future__ import annotations

HALVED_AT = 32.0  # tries at which what is known counts half
FADING = 1 / 128  # what is forgotten of it when `fade` is called


class Share:
    """Successes among tries; the older they are, the less they count.

    Args:
        prior: the share before anything is known. weight: tries that it counts as.
    """

    __slots__ = ("_hits", "_prior", "_tries", "_weight")

    def __init__(self, prior: float, weight: float) -> None:
        self._prior, self._weight = prior, weight
        self._hits = self._tries = 0.0

    def learn(self, hit: bool) -> None:
        """One more try."""
        self._hits += hit
        self._tries += 1
        if self._tries >= HALVED_AT:
            self._hits, self._tries = self._hits / 2, self._tries / 2

    def fade(self) -> None:
        """Time passes without a try: the prior counts for more."""
        self._hits -= FADING * self._hits
        self._tries -= FADING * self._tries

    def estimate(self, prior: float | None = None) -> float:
        """The share now. prior: in place of its own."""
        start = self._prior if prior is None else prior
        return (self._hits + start * self._weight) / (self._tries + self._weight)
