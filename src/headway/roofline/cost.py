"""From seconds to dollars (B9): a token costs the price of the GPUs for the time it takes to make it."""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput
from headway.roofline.capacity import memory_batch
from headway.roofline.replica import Replica, decode, prompt_seconds, share


class TokenCost(msgspec.Struct, frozen=True):
    """Dollars per million tokens of one replica, kept busy `utilisation` of the time.

    usd_per_million_input counts prefix hits at their cost; the others are for a token that is computed.
    """

    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_million_fresh_input: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    usd_per_hour: float


def usd_per_million(usd_per_hour: float, tokens_per_second: float, utilisation: float = 1.0) -> float:
    """1e6 * price / 3600 / (tokens/s), over utilisation: a replica costs the same busy or idle (B9)."""
    share("--utilisation", utilisation)
    return 1e6 * usd_per_hour / 3600.0 / (tokens_per_second * utilisation)


def blended_input(fresh: float, hit_share: float, hit_cost: float, rest: float | None = None) -> float:
    """$/M of input when `hit_share` of it is found in the prefix cache, at `hit_cost` of a computed token's cost.
    `rest`: $/M of it if hits cost nothing, where that is not simply the share that is no hit: such tokens attend to the
    hits too."""
    for field, value in (("--cache-hit", hit_share), ("--hit-cost", hit_cost)):
        if not 0 <= value <= 1:
            raise BadInput(field, f"{value}; accepted: from 0 to 1")
    computed = fresh * (1.0 - hit_share) if rest is None else rest
    return computed + hit_cost * (fresh - computed)


def token_cost(
    d: Replica,
    batch: float,
    context: float,
    usd_per_gpu_hour: float,
    *,
    input_tokens: float = 2000,
    mfu: float = 0.5,
    prefill_attention: bool = True,
    hit_share: float = 0.0,
    hit_cost: float = 0.0,
    attend_hits: bool = False,
    utilisation: float = 1.0,
) -> TokenCost:
    """Price of an input and of an output token: prefill at `mfu`, decode at `batch` and mean context `context` (B9).
    `attend_hits`: count that tokens which are no hits attend to those that are, which B9 leaves out."""
    if usd_per_gpu_hour < 0:
        raise BadInput("--price", f"{usd_per_gpu_hour}; accepted: dollars per GPU-hour from 0")
    hour = usd_per_gpu_hour * d.gpus
    decode_rate = batch / decode(d, batch, context).seconds
    prefill_rate = input_tokens / prompt_seconds(d, input_tokens, mfu, prefill_attention)
    fresh = usd_per_million(hour, prefill_rate, utilisation)
    rest = None
    if attend_hits and 0 < hit_share < 1:
        computed = prompt_seconds(d, input_tokens, mfu, prefill_attention, hit_share * input_tokens)
        rest = usd_per_million(hour, input_tokens / computed, utilisation)
    return TokenCost(
        usd_per_million_input=blended_input(fresh, hit_share, hit_cost, rest),
        usd_per_million_output=usd_per_million(hour, decode_rate, utilisation),
        usd_per_million_fresh_input=fresh, prefill_tokens_per_second=prefill_rate,
        decode_tokens_per_second=decode_rate, usd_per_hour=hour,
    )  # fmt: skip


def price_ratio(
    d: Replica, batch: float, context: float, mfu: float = 0.5, input_tokens: float = 2000,
    prefill_attention: bool = False,
) -> float:  # fmt: skip
    """Output over input price: MFU * (I* s_W / (2B) + I* m_KV T / (2N)) while decode is memory-bound and prefill's
    attention is left out (B9): the weights are shared by B tokens only, and a written token reads its own cache."""
    prompt = prompt_seconds(d, input_tokens, mfu, prefill_attention) / input_tokens
    return decode(d, batch, context).seconds / batch / prompt


class PriceRow(msgspec.Struct, frozen=True):
    """One line of the first text's table. `seconds`: reading the weights once. `compute_seconds`: the arithmetic of
    the batch, which the text leaves out; where it is longer, the price shown is too low."""

    batch: int
    seconds: float
    tokens_per_second: float
    usd_per_million_output: float
    usd_per_million_input: float
    kv_gb: float
    fits: bool
    compute_seconds: float


def price_table(
    d: Replica, batches: list[int], context: float, usd_per_gpu_hour: float, mfu: float = 0.5
) -> list[PriceRow]:
    """The first text's table, by batch: the step is the weights' read alone, input tokens are priced by prefill's
    linear layers alone; the caches at `context` are sized beside it, and a batch whose caches do not fit says so."""
    most = memory_batch(d, context)
    hour = usd_per_gpu_hour * d.gpus
    rows = []
    for batch in batches:
        step = decode(d, batch, 0)
        rate = batch / step.weights
        cost = token_cost(d, batch, 0, usd_per_gpu_hour, mfu=mfu, prefill_attention=False)
        rows.append(PriceRow(
            batch, step.weights, rate, usd_per_million(hour, rate), cost.usd_per_million_input,
            batch * d.sequence_bytes(context) * d.gpus / d.attention_dp / 1e9, batch <= most, step.compute,
        ))  # fmt: skip
    return rows
