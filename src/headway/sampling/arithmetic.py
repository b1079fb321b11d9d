"""exp and log made of additions, multiplications and divisions alone, each rounded as IEEE 754 says.

The libraries' own differ in the last bits from machine to machine, and with them a sampled token might. These are the
same bits in numpy and in the native kernels, on every machine and instruction set, so that a token is a function of
its logits and its key and of nothing else, and so that one sampler can be tested against the other bit for bit.
"""

from __future__ import annotations

import numpy as np

LOWEST = -86.0  # e^x is 0 below: 2^-124, so that nothing above needs a subnormal number
MASS_UNIT = 2.0**42  # weights are added up as whole numbers of 2^-42, so that sums depend on no order

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # the first is exact in few bits
_EXP_TERMS = [np.float32(1) / np.float32(n) for n in (720, 120, 24, 6, 2, 1, 1)]
_LOG_TERMS = [1.0 / n for n in range(21, 0, -2)]
_LN2 = 0.6931471805599453


def exponential(x: np.ndarray) -> np.ndarray:
    """e^x for float32 x <= 0, within 3 units in the last place -> float32. 0 below `LOWEST`; NaN stays NaN."""
    clamped = np.maximum(x, np.float32(LOWEST))
    n = np.rint(clamped * _LOG2_E)
    r = clamped - n * _LN2_HIGH
    r -= n * _LN2_LOW
    p = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p *= r
        p += term
    with np.errstate(invalid="ignore"):  # the power of a NaN does not matter
        p = np.ldexp(p, n.astype(np.int32))
    p[x < np.float32(LOWEST)] = 0.0
    return p


def logarithm(x: np.ndarray) -> np.ndarray:
    """ln x of float64 x >= 0, within 2 units in the last place -> float64. NaN for anything that is not a number >= 0.

    With x = m 2^e and m around 1: ln m = 2 artanh((m - 1) / (m + 1)), whose series ends at the 21st power.
    """
    m, e = np.frexp(x)
    low = m < 0.7071067811865476
    m, e = np.where(low, m * 2.0, m), e - low
    with np.errstate(divide="ignore", invalid="ignore"):  # of what is no number >= 0, and answered below
        s = (m - 1.0) / (m + 1.0)
    square = s * s
    p = np.full_like(s, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        p = p * square + term
    result = e * _LN2 + 2.0 * s * p
    result[x == 0] = -np.inf
    result[~((x >= 0) & (x < np.inf))] = np.nan
    return result


def masses(weights: np.ndarray) -> np.ndarray:
    """float32 weights in [0, 1] as whole numbers of 2^-42 -> int64."""
    return np.rint(weights.astype(np.float64) * MASS_UNIT).astype(np.int64)
