"""A run: what a load, sent or simulated, left behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.metrics.records import RequestRecord
from headway.traffic.load import Load


@dataclass
class Run:
    """What a load left behind.

    Attributes:
        records: one per item, in order.
        loop_lag_ms: how late the event loop was at each look during the run.
        cpu_share: CPU seconds of this process per second of the run.
        chunks_per_second: events received per second.
        gave_up: why the run was stopped early; "" = it was not.
    """

    load: Load
    records: list[RequestRecord]
    loop_lag_ms: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    chunks_per_second: float = 0.0
    gave_up: str = ""
