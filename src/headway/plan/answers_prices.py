"""What the verbs about dollars answer: `cost`, `ratio`, `levers`, `invoice`. Units as in `answers`."""

from __future__ import annotations

import msgspec

from headway.plan.answers import Answer
from headway.roofline.cost import PriceRow
from headway.roofline.levers import Lever
from headway.roofline.timing import Range


class ServedPrice(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of what served requests cost, `load` of them always in flight. `validated`: runs like these were
    measured, so the ranges hold; no runs with prefix hits were."""

    engine: str
    load: float
    input_tokens: float
    output_tokens: float
    tpot: Range
    ttft: Range
    requests_per_second: Range
    usd_per_request: Range
    usd_per_million_input: Range
    usd_per_million_output: Range
    validated: bool


class Priced(Answer, frozen=True, kw_only=True):
    """An answer in dollars, on one price basis ("given": the user's figure). `mfu`: share of the peak that prefill is
    taken to reach."""

    context: int
    price_per_gpu_hour: float
    price_source: str
    price_basis: str
    mfu: float


class Cost(Priced, frozen=True, kw_only=True):
    """Dollars per million tokens of a replica busy `utilisation` of the time; the decode step behind it. `ratio`: price
    of output over that of input. The input price counts `cache_hit` of it as hits, the "fresh" one none. `served`: an
    estimate for an engine's requests; `abstained`: why there is none."""

    batch: int
    fits: bool
    utilisation: float
    cache_hit: float
    seconds: float
    binds: str
    terms: dict[str, float]
    ratio: float | None
    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_million_fresh_input: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    usd_per_hour: float
    served: ServedPrice | None = None
    abstained: str = ""


class CostTable(Priced, frozen=True, kw_only=True):
    """Prices by batch, the weights' read alone counted, and which batches' caches do not fit at `context`."""

    weights_gb: float
    memory_gb: float
    free_gb: float
    rows: list[PriceRow]


class Ratio(Answer, frozen=True, kw_only=True):
    """Price of an output token over that of an input token: the weights' part and the cache's. `input_tokens`: length
    of a prompt, which only exact mode asks for."""

    batch: int
    context: int
    mfu: float
    input_tokens: int | None
    ratio: float
    weights_part: float
    cache_part: float


class Levers(Answer, frozen=True, kw_only=True):
    """What each change to the replica is worth, largest gain first."""

    batch: int
    input_tokens: int
    output_tokens: int
    levers: list[Lever]


class SoldRow(msgspec.Struct, frozen=True):
    """Costs of a million computed tokens at one batch, the prices that leave the margin asked for, what a thousand
    requests cost, and the share of their price that is left."""

    batch: int
    usd_per_million_input: float
    usd_per_million_output: float
    input_price: float | None = None
    output_price: float | None = None
    usd_per_thousand_requests: float | None = None
    margin: float | None = None

    def prices(self, hit_cost: float) -> tuple[float, float, float]:
        """(input, cached, output), a cached token at `hit_cost` of a computed one's price."""
        fresh, written = self.input_price or 0.0, self.output_price or 0.0
        return fresh, hit_cost * fresh, written


class PriceList(Priced, frozen=True, kw_only=True):
    """Three prices and what they imply.

    Attributes:
        asked: the prices were given; else they are those that leave `margin` at the largest batch.
        break_even_batch: the smallest of `rows` at which requests pay for themselves; None = none does.
        margin: left at the largest batch. price_ratio, cost_ratio: output over input, as sold, and as it costs there.
        hit_cost: price of a cached token over that of a computed one. hit_share: of all input, at which the cached
            price alone would pay for the rest.
        abstained: why costs are bounds; "" where they are an engine's estimate.
    """

    asked: bool
    input_price: float
    cached_price: float
    output_price: float
    break_even_batch: int | None
    margin: float | None
    price_ratio: float
    cost_ratio: float
    hit_cost: float
    hit_share: float
    abstained: str
    rows: list[SoldRow]

    @property
    def failed(self) -> bool:
        return self.break_even_batch is None
