"""`headway plan invoice`: from a provider's three prices to the batch, hit share and margin they imply, and back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.core.errors import BadInput
from headway.plan.answers_prices import PriceList, SoldRow
from headway.plan.quotes import quoted
from headway.plan.setup import BOUNDS, Setup, whole_from
from headway.roofline.capacity import memory_batch
from headway.roofline.cost import token_cost
from headway.roofline.frontier import default_batches
from headway.roofline.levers import mean_context
from headway.roofline.replica import Replica

HIT_COST = 0.1  # of a computed token's cost: what providers ask for a cached one, where no margin says more


def invoice(
    setup: Setup, input_price: float | None = None, cached_price: float | None = None,
    output_price: float | None = None, margin: float = 0.5, input_tokens: int = 2000, output_tokens: int = 500,
    cache_hit: float = 0.0, price: float | None = None, utilisation: float = 1.0, mfu: float = 0.5,
    prices: str | None = None, price_basis: str | None = None,
) -> PriceList:  # fmt: skip
    """With prices: what is left of them at every batch on this replica, and what they imply. Without: the prices that
    leave `margin`. Costs are an engine's estimate where runs like it were measured, else bounds."""
    asked = (input_price, output_price)
    if (input_price is None) != (output_price is None):
        raise BadInput("--input-price", "with --output-price both or neither; --cached-price only beside them")
    for field, value in (("--input-price", input_price), ("--cached-price", cached_price),
                         ("--output-price", output_price)):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(field, f"{value}; accepted: dollars per million tokens above 0")
    if not 0 <= margin < 1:
        raise BadInput("--margin", f"{margin}; accepted: from 0 to below 1")
    if not 0 <= cache_hit < 1:
        raise BadInput("--cache-hit", f"{cache_hit}; accepted: from 0 to below 1")
    whole_from(1, "--input-tokens", input_tokens)
    whole_from(1, "--output-tokens", output_tokens)
    replica = setup.replica(BOUNDS)
    setup.needs_peak(replica)
    quote = quoted(replica.hardware, price, prices, price_basis)
    hourly = quote.usd
    most = memory_batch(replica, mean_context(input_tokens, output_tokens))
    if not most:
        raise BadInput("--gpus", "not one request fits in the memory of these")
    rows, abstained = _costs(
        setup, replica, default_batches(most), hourly, input_tokens, output_tokens, utilisation, mfu
    )
    if None in asked:
        rows = [_priced(row, margin) for row in rows]
        given = rows[-1].prices(HIT_COST)
    else:
        assert input_price is not None and output_price is not None
        given = (input_price, input_price * HIT_COST if cached_price is None else cached_price, output_price)
    rows = [_sold(row, given, input_tokens, output_tokens, cache_hit) for row in rows]
    last = rows[-1]
    covered = [row.batch for row in rows if row.margin is not None and row.margin >= 0]
    return PriceList(
        **setup.about(
            replica, () if not abstained else (f"costs are bounds, so margins are the most there can be: {abstained}",),
            (quote.line(),
             f"{input_tokens:,} tokens in, {cache_hit:.0%} cached (--cache-hit), {output_tokens:,} out",
             f"busy {utilisation:.0%} of the time (--utilisation)"),
            longest=input_tokens + output_tokens,
        )
        | {"kind": "bound" if abstained else "estimate"},
        context=round(mean_context(input_tokens, output_tokens)), price_per_gpu_hour=hourly,
        price_source=quote.source, price_basis=quote.basis, mfu=mfu,
        asked=None not in asked, input_price=given[0], cached_price=given[1], output_price=given[2],
        break_even_batch=min(covered, default=None), margin=last.margin if None not in asked else margin,
        price_ratio=given[2] / given[0], cost_ratio=last.usd_per_million_output / last.usd_per_million_input,
        hit_cost=given[1] / given[0],
        hit_share=max(0.0, 1.0 - given[1] / last.usd_per_million_input), abstained=abstained, rows=rows,
    )  # fmt: skip


def _costs(
    setup: Setup, replica: Replica, batches: Sequence[int], hourly: float, prompt: int, output: int, busy: float,
    mfu: float,
) -> tuple[list[SoldRow], str]:  # fmt: skip
    """Dollars per million tokens, computed ones, by batch; and why these are bounds, if they are."""
    from headway.plan import forecast  # brings numpy

    one = forecast.deployed(setup, replica, 1.0, prompt, output)
    found = forecast.prices(one, batches, hourly * replica.gpus, busy)
    if not isinstance(found, str):
        return [
            SoldRow(int(each.load), each.usd_per_million_input.p50, each.usd_per_million_output.p50) for each in found
        ], ""
    context = mean_context(prompt, output)
    bounds = [token_cost(replica, batch, context, hourly, input_tokens=prompt, mfu=mfu, utilisation=busy)
              for batch in batches]  # fmt: skip
    return [
        SoldRow(batch, each.usd_per_million_fresh_input, each.usd_per_million_output)
        for batch, each in zip(batches, bounds, strict=True)
    ], found


def _priced(row: SoldRow, margin: float) -> SoldRow:
    return msgspec.structs.replace(
        row, input_price=row.usd_per_million_input / (1 - margin),
        output_price=row.usd_per_million_output / (1 - margin),
    )  # fmt: skip


def _sold(row: SoldRow, prices: tuple[float, float, float], prompt: int, output: int, hit: float) -> SoldRow:
    """With what is left of a request's price: hits are sold at theirs and cost nothing."""
    fresh, cached, written = prices
    revenue = prompt * ((1 - hit) * fresh + hit * cached) + output * written
    cost = prompt * (1 - hit) * row.usd_per_million_input + output * row.usd_per_million_output
    return msgspec.structs.replace(row, usd_per_thousand_requests=cost / 1e3, margin=1 - cost / revenue)
