"""The traffic a deployment must carry, given by hand or read from a trace: rate, lengths, burstiness, prefix hits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.core.errors import BadInput

MOST_USERS = 1e9


class Traffic(msgspec.Struct, frozen=True):
    """Attributes:
    rate: requests per second. input_tokens, output_tokens: mean lengths. cache_hit: share of input tokens found in
        the prefix cache. arrival_cv2: squared coefficient of variation of the gaps (1 = Poisson). longest: longest
        input + output, for the context limit. source: where the figures are from.
    users, think: people who read an answer and think for so many seconds before they ask again, where the rate follows
        from how fast they are answered (0 users: it does not).
    """

    rate: float
    input_tokens: float
    output_tokens: float
    cache_hit: float = 0.0
    arrival_cv2: float = 1.0
    longest: int = 0
    source: str = "given"
    users: float = 0.0
    think: float = 0.0

    def settled(self, response: Callable[[float], float]) -> Traffic:
        """With the rate that users make who are answered in `response(rate)` seconds: N = rate * (think + response)."""
        if not self.users:
            return self
        low, high = 0.0, self.users / max(self.think, 1e-3)
        for _ in range(40):
            rate = (low + high) / 2
            low, high = (low, rate) if rate * (self.think + response(rate)) > self.users else (rate, high)
        return msgspec.structs.replace(self, rate=high)

    @property
    def fresh_tokens(self) -> float:
        """Input tokens of one request that must be computed."""
        return max(1.0, self.input_tokens * (1.0 - self.cache_hit))

    @property
    def mean_context(self) -> float:
        """Tokens a decoding request holds on average: T_in + T_out/2."""
        return self.input_tokens + self.output_tokens / 2.0


def of_users(users: float, think: float, turns: int, input_tokens: float, output_tokens: float) -> Traffic:
    """Users with think time, in sessions of so many turns: a turn's prompt is all that was said before, which is found
    in the prefix cache, and `input_tokens` of its own.

    Raises:
        BadInput: figures that cannot be.
    """
    if not 0 < users <= MOST_USERS:
        raise BadInput("--users", f"{users:g}; accepted: a number above 0, up to {MOST_USERS:g}")
    for field, value in (("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        if not 0 < value < float("inf"):
            raise BadInput(field, f"{value:g}; accepted: a number above 0")
    if not 0 <= think < float("inf"):
        raise BadInput("--think-time", f"{think:g}; accepted: seconds from 0")
    if turns < 1:
        raise BadInput("--turns", f"{turns}; accepted: a whole number from 1")
    said = (turns - 1) / 2 * (input_tokens + output_tokens)
    longest = turns * (input_tokens + output_tokens)
    return Traffic(
        users / (think + 1.0), input_tokens + said, output_tokens, said / (said + input_tokens), 1.0,
        round(longest) if turns > 1 else 0, users=users, think=think,
    )  # fmt: skip


class Target(msgspec.Struct, frozen=True):
    """What was promised to `share` of requests: seconds to the first token, and per output token (None = nothing)."""

    ttft: float | None = None
    tpot: float | None = None
    share: float = 0.99


def check(traffic: Traffic, target: Target) -> None:
    """Refuse impossible traffic or targets, naming the option."""
    for field, value in (
        ("--rate", traffic.rate), ("--input-tokens", traffic.input_tokens), ("--output-tokens", traffic.output_tokens),
        ("--ttft-ms", target.ttft), ("--tpot-ms", target.tpot),
    ):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(field, f"{value:g}; accepted: a number above 0")
    if not 0 <= traffic.cache_hit < 1:
        raise BadInput("--cache-hit", f"{traffic.cache_hit:g}; accepted: from 0 to below 1")
    if not 0.5 <= target.share < 1:
        raise BadInput("--percentile", f"{target.share * 100:g}; accepted: from 50 to below 100")


def from_trace(path: Path, rate: float | None = None) -> Traffic:
    """Mean traffic of a trace file (Azure CSV or Mooncake JSON lines); `rate` replaces its own.

    Prefix hits are those of an unbounded cache: a block of a prompt is a hit if an earlier request began with the same
    blocks up to it. A real cache forgets, so this is the most there can be.
    """
    from headway.traffic.traces import read_trace

    rows = read_trace(path)
    if len(rows) < 2:
        raise BadInput("--trace", f"{path} has {len(rows)} requests; at least 2 are needed for a rate")
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for row in rows:
        matching = True
        for depth in range(1, len(row.blocks) + 1):
            prefix = row.blocks[:depth]
            matching = matching and prefix in seen
            hits += row.block_tokens if matching else 0
            seen.add(prefix)
    inputs = sum(row.input_tokens for row in rows)
    times = sorted(row.at for row in rows)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    if mean <= 0:
        raise BadInput("--trace", f"{path}: all requests arrive at once; give --rate")
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
    return Traffic(
        rate=rate if rate is not None else 1.0 / mean, input_tokens=inputs / len(rows),
        output_tokens=sum(row.output_tokens for row in rows) / len(rows),
        cache_hit=min(0.99, hits / inputs) if inputs else 0.0, arrival_cv2=spread,
        longest=max(row.input_tokens + row.output_tokens for row in rows), source=str(path.name),
    )  # fmt: skip
