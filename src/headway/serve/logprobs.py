"""Log-probabilities of tokens, as answers show them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from headway.core.step import TokenLogprobs
from headway.serve.text import Text

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot hold


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def readable(data: bytes) -> str | None:
    """The token's text; None if it is a piece of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def _entry(text: Text, token: int, logprob: float) -> dict[str, Any]:
    data = text.token_bytes(token)
    name = readable(data)
    return {"token": escaped(data) if name is None else name, "logprob": finite(logprob), "bytes": list(data)}


def entries(text: Text, logprobs: Iterable[TokenLogprobs], count: int) -> list[dict[str, Any]]:
    """One entry per token, with its exact bytes and the `count` likeliest alternatives."""
    found = []
    for position in logprobs:
        entry = _entry(text, position.token, position.logprob)
        entry["top_logprobs"] = [_entry(text, token, logprob) for token, logprob in position.top[:count]]
        found.append(entry)
    return found
