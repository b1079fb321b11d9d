"""A request's itemised bill, as `usage` shows it to clients that ask for one with `x-headway-receipt: 1`."""

from __future__ import annotations

from headway.core.clock import to_seconds
from headway.core.receipts import Receipt, dollars

RECEIPT_HEADER = "x-headway-receipt"


def itemised(receipt: Receipt, price: float | None) -> dict[str, float]:
    """The bill in milliseconds of the machine.

    Args:
        receipt: of all choices together.
        price: dollars per hour of the machine; None = nobody said, and the bill has no `dollars`.
    """
    times = {"queue": receipt.queue, "prefill": receipt.prefill, "decode": receipt.decode, "stalls": receipt.stalls}
    billed = to_seconds(receipt.billed)
    return {
        **{f"{name}_ms": 1e3 * to_seconds(time) for name, time in times.items()},
        "computed_tokens": receipt.computed,
        "cached_tokens": receipt.cached,
        "machine_seconds": billed,
        **({} if price is None else {"dollars": dollars(billed, price)}),
    }
