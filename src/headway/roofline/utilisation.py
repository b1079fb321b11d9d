"""How close a measurement comes to the machine: shares, so one above 1 cannot be true."""

from __future__ import annotations


def mbu(bytes_read: float, seconds: float, bandwidth: float) -> float:
    """Model bandwidth utilisation: bytes a step must read / its time / beta."""
    return bytes_read / seconds / bandwidth


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation: arithmetic a step must do / its time / pi."""
    return flops / seconds / peak
