"""What a token costs and what would make it cheaper: `headway plan cost`, `ratio`, `levers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.plan.answers_prices import Cost, CostTable, Levers, Ratio
from headway.plan.quotes import Asked, quoted
from headway.plan.setup import BOUNDS, Setup, gpus_needed, whole_from
from headway.plan.steps import kind_of
from headway.report.units import gigabytes
from headway.roofline import levers as lever_tables
from headway.roofline.capacity import capacity, memory_plan
from headway.roofline.cost import price_ratio, price_table, token_cost
from headway.roofline.deployment import Deployment
from headway.roofline.levers import Lever
from headway.roofline.replica import Replica, decode, not_negative
from headway.roofline.speculation import Draft
from headway.shape.formats import known_format


def input_note(mfu: float) -> tuple[str, ...]:
    """What an input price rests on: a bound only where prefill reaches the peak."""
    return () if mfu == 1 else (f"prices of input are estimates: prefill at an assumed {mfu:.0%} MFU (--mfu)",)


def cost(
    setup: Setup, table: bool = False, batches: Sequence[int] = (1, 8, 64, 256), batch: int | None = None,
    context: int | None = None, input_tokens: int = 2000, price: float | None = None, mfu: float = 0.5,
    cache_hit: float = 0.0, hit_cost: float = 0.0, utilisation: float = 1.0, tpot_ms: float | None = None,
    output_tokens: int = 500, prices: str | None = None, price_basis: str | None = None,
) -> Cost | CostTable:  # fmt: skip
    """$/M input and output tokens (B9), and what an engine's requests are estimated to cost. Without a batch: the
    largest that fits (and meets the TPOT target). With `table`: by batch, from `mfu`, `price` and the weights alone; of
    the first text's example if nothing is named."""
    if table:
        if setup.model is None and setup.hardware is None:  # the text's rounded peak included
            setup = msgspec.structs.replace(
                setup, model="llama-3.1-405b", hardware="h100-rounded-1e15", gpus=8, precision="fp8", kv="fp8"
            )
        return _cost_table(setup, batches, 8192 if context is None else context, mfu, (price, prices, price_basis))
    context = 4096 if context is None else context
    replica = setup.replica(BOUNDS)
    quote = quoted(replica.hardware, price, prices, price_basis)
    hourly = quote.usd
    setup.needs_peak(replica)  # of prompts
    found = capacity(replica, max(context, 1), None if tpot_ms is None else tpot_ms * 1e-3)
    batch = found.batch if batch is None else batch
    if batch < 1:
        reason = "allow more time or use fewer bytes"
        if not found.memory_batch:
            needed = gpus_needed(replica, context)
            reason = f"weights and one sequence need {needed} GPUs" if needed else "no number of GPUs holds it"
        raise BadInput("--batch", f"no batch is possible at this context: {found.because} allows none; {reason}")
    step = decode(replica, batch, context)
    tokens = token_cost(
        replica, batch, context, hourly, input_tokens=input_tokens, mfu=mfu, hit_share=cache_hit, hit_cost=hit_cost,
        attend_hits=True, utilisation=utilisation,
    )  # fmt: skip
    assumptions = (
        quote.line(),
        f"prompts of {input_tokens:,} tokens (--input-tokens), {cache_hit:.0%} cached (--cache-hit) at "
        f"{hit_cost:.0%} of the cost (--hit-cost)",
        f"busy {utilisation:.0%} of the time (--utilisation)",
    )
    return Cost(
        **setup.about(replica, input_note(mfu), assumptions, longest=context), batch=batch, context=context,
        fits=batch <= found.memory_batch, price_per_gpu_hour=hourly, price_source=quote.source,
        price_basis=quote.basis,
        utilisation=utilisation, mfu=mfu, cache_hit=cache_hit, seconds=step.seconds,
        binds=step.binds, terms=step.terms,
        ratio=tokens.usd_per_million_output / tokens.usd_per_million_input if tokens.usd_per_million_input else None,
        **msgspec.structs.asdict(tokens),
        **_served(setup, replica, batch, input_tokens, output_tokens, cache_hit, hourly, utilisation),
    )  # fmt: skip


def _served(
    setup: Setup, replica: Replica, batch: int, prompt: int, output: int, hit: float, hourly: float, utilisation: float
) -> dict[str, Any]:
    """The estimate at this batch, or as many as the engine holds; or why it abstains."""
    from headway.plan import forecast  # brings numpy, which a bound does not need

    whole_from(1, "--output-tokens", output)
    whole_from(1, "--input-tokens", prompt)
    one = forecast.deployed(setup, replica, batch, prompt, output)
    one = msgspec.structs.replace(one, cached=min(hit * prompt, prompt - 1))
    found = forecast.prices(one, [float(batch)], hourly * replica.gpus, utilisation)
    return {"abstained": found} if isinstance(found, str) else {"served": found[0]}


def _cost_table(setup: Setup, batches: Sequence[int], context: int, mfu: float, priced: Asked) -> CostTable:
    """The first text's table (weights only), and which batches' caches do not fit at the context."""
    replica = setup.replica()
    quote = quoted(replica.hardware, *priced)
    if not batches or min(batches) < 1:
        raise BadInput("--batches", "accepted: whole numbers from 1, like 1,8,64,256")
    rows = price_table(replica, list(batches), context, quote.usd, mfu)
    memory, free = (setup.gpus * size for size in (replica.hardware.usable, memory_plan(replica).room))
    notes = list(input_note(mfu))
    if slower := [str(row.batch) for row in rows if row.compute_seconds > row.seconds]:
        notes.append(f"batch {', '.join(slower)}: the arithmetic, left out here, takes longer than reading the weights")
    assumptions = (
        "steps read the weights and nothing else",
        quote.line(),
        f"weights {gigabytes(replica.weights)} of {gigabytes(memory)}; the cache sized at context {context}",
    )
    return CostTable(
        **setup.about(replica, tuple(notes), assumptions, longest=context), context=context,
        price_per_gpu_hour=quote.usd, price_source=quote.source, price_basis=quote.basis, mfu=mfu,
        weights_gb=replica.weights / 1e9, memory_gb=memory / 1e9,
        free_gb=free / 1e9, rows=rows,
    )  # fmt: skip


def ratio(
    setup: Setup, batch: int = 64, context: int = 4096, mfu: float = 0.5, input_tokens: int | None = None
) -> Ratio:
    """Output over input price (B9). `input_tokens`: length of a prompt, which only exact mode asks for (2000)."""
    whole_from(1, "--batch", batch)
    whole_from(0, "--context", context)
    if input_tokens is not None and setup.counting == "textbook":
        raise BadInput("--input-tokens", "the textbook ratio has no prompt length; accepted with --mode exact")
    prompt = 2000 if input_tokens is None else input_tokens
    whole_from(1, "--input-tokens", prompt)
    replica = setup.replica(BOUNDS)
    setup.needs_peak(replica)
    attention = setup.counting != "textbook"
    whole, weights = (price_ratio(replica, batch, cached, mfu, prompt, attention) for cached in (context, 0))
    return Ratio(
        **setup.about(replica, longest=context) | {"kind": kind_of(mfu)}, batch=batch, context=context, mfu=mfu,
        input_tokens=prompt if attention else None, ratio=whole, weights_part=weights, cache_part=whole - weights,
    )  # fmt: skip


def levers(
    setup: Setup, batch: int = 64, input_tokens: int = 2000, output_tokens: int = 500, acceptance: float = 0.8,
    draft_cost: float = 0.05, acceptance_curve: Sequence[float] = (), cache_hit: float = 0.5, mfu: float = 0.5,
) -> Levers:  # fmt: skip
    """Every lever on this replica: which term, by how much (B11)."""
    draft = Draft(acceptance, draft_cost, tuple(acceptance_curve))
    for field, value in (("--batch", batch), ("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        whole_from(1, field, value)
    if not 0 <= cache_hit <= 1:
        raise BadInput("--cache-hit", f"{cache_hit}; accepted: from 0 to 1")
    not_negative("--draft-cost", draft.cost)
    if any(not value >= 1 for value in draft.curve):
        raise BadInput("--acceptance-curve", f"{min(draft.curve)}; accepted: tokens per step from 1")
    replica = setup.replica(BOUNDS)
    setup.needs_peak(replica)  # of prompts
    accepted = (
        f"drafts emit {', '.join(f'{value:g}' for value in draft.curve)} tokens per step (--acceptance-curve)"
        if draft.curve
        else f"each drafted token is accepted with {draft.acceptance:.0%} (--acceptance)"
    )
    assumptions = (
        f"{accepted} and costs {draft.cost:.0%} of a step (--draft-cost): measure yours",
        f"{cache_hit:.0%} of input is found in the prefix cache (--cache-hit); prefill at {mfu:.0%} MFU (--mfu)",
    )
    return Levers(
        **setup.about(replica, assumptions=assumptions, longest=input_tokens + output_tokens),
        batch=batch, input_tokens=input_tokens, output_tokens=output_tokens,
        levers=_estimated(
            setup, replica, lever_tables.levers(replica, batch, input_tokens, output_tokens, draft, cache_hit, mfu),
            batch, input_tokens, output_tokens, cache_hit,
        ),
    )  # fmt: skip


def _estimated(
    setup: Setup, replica: Replica, found: list[Lever], batch: int, prompt: int, output: int, hit: float
) -> list[Lever]:
    """The levers with what an engine's closed loop says of those that it knows, by that, then by the bound."""
    from headway.plan import forecast

    def after(lever: Lever) -> Deployment | None:
        name, change = lever.name, msgspec.structs.replace
        if name.startswith("weights in "):
            format = known_format(name.removeprefix("weights in "))
            return change(now, precision=format.measured or format.name) if format else None
        if name == "speculative decoding":
            drafts = lever.note.partition(" ")[0]
            return change(now, drafts=int(drafts)) if drafts.isdigit() else None
        changes: dict[str, dict[str, float]] = {
            "cache in 8 bits": {"cache_bytes": 1.0}, "half the output tokens": {"output": output / 2},
            "twice the GPUs": {"gpus": 2 * now.gpus}, "prefix cache": {"cached": min(hit * prompt, prompt - 1)},
        }  # fmt: skip
        return change(now, **changes[name]) if name in changes else None

    now = forecast.deployed(setup, replica, batch, prompt, output)
    then = {lever.name: one for lever in found if (one := after(lever)) is not None}
    before, *rates = forecast.requests_per_dollar([now, *then.values()])
    worth = {
        name: rate / before for name, rate in zip(then, rates, strict=True) if rate is not None and before is not None
    }
    levers = [msgspec.structs.replace(lever, estimated=worth.get(lever.name)) for lever in found]
    return sorted(levers, key=lambda lever: -(lever.requests if lever.estimated is None else lever.estimated))
