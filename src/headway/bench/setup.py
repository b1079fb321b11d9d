"""What a `headway bench` is asked to do, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headway.bench.client import Endpoint, Timeouts
from headway.bench.options import Workload
from headway.bench.predict import Backing
from headway.bench.recount import Recount
from headway.core.errors import BadInput
from headway.metrics.summary import Targets
from headway.metrics.views import VIEWS
from headway.traffic.load import Load


@dataclass(frozen=True)
class BenchSetup:
    """What is measured, and how.

    Attributes:
        behind: what is behind the endpoint, for a prediction beside the measurement.
        recount: the model's tokenizer, to check the endpoint's counts.
        test: measure the client itself first.
        as_tool: also express the run as this tool would.
        event_log: our own server's, on this machine.
        search: search the goodput after the run, until `resolution` is reached; `gpus` are behind the endpoint.
    """

    endpoint: Endpoint
    load: Load
    workload: Workload
    targets: Targets | None = None
    limits: Timeouts = field(default_factory=Timeouts)
    behind: Backing | None = None
    recount: Recount | None = None
    test: bool = True
    as_tool: str | None = None
    event_log: Path | None = None
    search: bool = False
    resolution: float = 0.1
    gpus: int = 1

    def __post_init__(self) -> None:
        if self.as_tool is not None and self.as_tool not in VIEWS:
            raise BadInput("--as", f"{self.as_tool!r} is not one of {', '.join(VIEWS)}")
        if self.search and (self.targets is None or self.load.kind not in ("constant", "poisson", "gamma")):
            raise BadInput(
                "--search", "needs targets (--slo) and a first --rate of constant, poisson or gamma arrivals"
            )
        if self.gpus < 1:
            raise BadInput("--gpus", f"{self.gpus} is not an integer >= 1")
        if not 0 < self.resolution < 1:
            raise BadInput("--resolution", f"{self.resolution:g} is not between 0 and 1")
        if self.event_log is not None and not self.event_log.is_file():
            problem = f"no such file: {self.event_log}; start the server with `headway serve --event-log`"
            raise BadInput("--event-log", problem)
