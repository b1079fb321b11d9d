"""Sampling noise that depends on its key alone: (seed, choice, position, token, purpose).

There is no generator and no state: the noise of a token at a position can be computed again at any time, on any
device, in any batch, and is the same. So neighbours, preemption and speculation cannot change what is drawn.

The function is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
One block of four 32-bit words serves four neighbouring token ids:

    key     = (seed mod 2^64: low word, high word)
    counter = (token // 4, position, choice, purpose)      word token % 4 of the output is the token's
"""

from __future__ import annotations

import numpy as np

DRAW = 0  # purpose: drawing a token from the model's distribution
ACCEPT = 1  # deciding whether a drafted one is taken
DRAFT = 2  # drawing one from a draft model's, where that is independent of the model's own

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counters: tuple[np.ndarray, int, int, int], seed: int) -> np.ndarray:
    """Philox4x32-10 of many counters that differ in the first word.

    Args:
        counters: the first word, uint64 [n] below 2^32, and the three others.
        seed: the 64-bit key; taken modulo 2^64.

    Returns:
        uint64 [n, 4], each below 2^32.
    """
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    first, *others = counters
    a, b, c, d = (np.broadcast_to(np.uint64(word & 0xFFFFFFFF), first.shape) for word in (0, *others))
    a = first
    for turn in range(_ROUNDS):
        k0, k1 = (np.uint64((word + turn * step) & 0xFFFFFFFF) for word, step in zip(key, _WEYL, strict=True))
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> _SHIFT) ^ b ^ k0, right & _LOW, (left >> _SHIFT) ^ d ^ k1, left & _LOW
    return np.stack((a, b, c, d), axis=-1)


def uniforms(tokens: np.ndarray, *, seed: int, choice: int, position: int, purpose: int = DRAW) -> np.ndarray:
    """One number in the open interval (0, 1) per token id: (word + 1/2) / 2^32 -> float64 [n].

    Args:
        tokens: int [n], token ids.
        seed, choice, position: what identifies the draw.
        purpose: keeps independent uses of the same position apart.
    """
    words = philox(((tokens >> 2).astype(np.uint64), position, choice, purpose), seed)
    return _open_interval(words[np.arange(len(tokens)), tokens & 3])


def dense_uniforms(vocab: int, *, seed: int, choice: int, position: int, purpose: int = DRAW) -> np.ndarray:
    """`uniforms` of every token id below `vocab`, four times cheaper -> float64 [vocab]."""
    blocks = np.arange(-(-vocab // 4), dtype=np.uint64)
    return _open_interval(philox((blocks, position, choice, purpose), seed).reshape(-1)[:vocab])


def _open_interval(words: np.ndarray) -> np.ndarray:
    return (words + 0.5) * 2.0**-32
