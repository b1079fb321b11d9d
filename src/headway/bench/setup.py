"""What a `headway bench` is asked to do, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headway.bench.client import Endpoint, Timeouts
from headway.bench.dataset import read_dataset
from headway.bench.predict import Backing
from headway.bench.recount import Recount
from headway.bench.workload import Measure, Prompts, WorkItem
from headway.core.errors import BadInput
from headway.metrics.summary import Targets
from headway.metrics.views import VIEWS
from headway.traffic.load import Load
from headway.traffic.traces import read_trace, scaled


@dataclass(frozen=True)
class Workload:
    """What to send: synthetic prompts, a data set, or a trace.

    Attributes:
        requests: how many are measured; for a trace, at most.
        input_tokens, output_tokens: lengths of synthetic prompts and limit on their answers.
        shared_prefix: prompt tokens equal in all synthetic prompts.
        warmup: requests sent before and excluded.
        dataset, trace: files.
        speed: how many times faster the trace is replayed.
        length_scale: factor on the trace's lengths.
    """

    requests: int = 100
    input_tokens: int = 256
    output_tokens: int = 64
    shared_prefix: int = 0
    warmup: int = 0
    dataset: Path | None = None
    trace: Path | None = None
    speed: float = 1.0
    length_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("requests", 1),
            ("input_tokens", 1),
            ("output_tokens", 1),
            ("shared_prefix", 0),
            ("warmup", 0),
        ):
            if getattr(self, name) < low:
                raise BadInput(f"--{name.replace('_', '-')}", f"{getattr(self, name)} is not an integer >= {low}")
        for name in ("speed", "length_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"--{name.replace('_', '-')}", f"{getattr(self, name)} is not a number above 0")
        if self.dataset and self.trace:
            raise BadInput("--dataset", "cannot be combined with --trace")
        if self.shared_prefix > self.input_tokens:
            raise BadInput("--shared-prefix", f"{self.shared_prefix} is more than --input-tokens {self.input_tokens}")

    def items(self, measure: Measure) -> list[WorkItem]:
        """The requests, warm-up first (a trace has its warm-up at its start)."""
        count = self.requests + self.warmup
        prompts = Prompts(measure, self.seed)
        if self.trace is not None:
            rows = scaled(read_trace(self.trace, count, self.seed), self.speed, self.length_scale)
            return [
                WorkItem(prompts.of_trace(index, row), row.output_tokens, row.input_tokens, row.at)
                for index, row in enumerate(rows)
            ]
        if self.dataset is not None:
            items = read_dataset(self.dataset, count, self.output_tokens)
            return [items[index % len(items)] for index in range(count)]
        size = self.input_tokens
        return [
            WorkItem(
                prompts.after_prefix(index, size, self.shared_prefix)
                if self.shared_prefix
                else prompts.unique(index, size),
                self.output_tokens,
                size,
            )
            for index in range(count)
        ]


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
