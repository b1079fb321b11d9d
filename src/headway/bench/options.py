"""What `headway bench` can be asked to send, and when. Light, so that `headway bench --help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headway.core.errors import BadInput
from headway.core.options import Option, Options
from headway.traffic.load import ARRIVALS, Load

if TYPE_CHECKING:
    from headway.bench.workload import Measure, WorkItem


class Workload(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to send: synthetic prompts, a data set, or a trace.

    Raises:
        BadInput: a value is not one that its option accepts, or two contradict each other.
    """

    requests: Annotated[int, Option("Requests to measure; of a trace, at most.", least=1)] = 100
    input_tokens: Annotated[int, Option("Tokens of synthetic prompts.", least=1)] = 256
    output_tokens: Annotated[int, Option("Limit on answers (max_tokens).", least=1)] = 64
    shared_prefix: Annotated[int, Option("Prompt tokens equal in all prompts.", least=0)] = 0
    warmup: Annotated[int, Option("Requests sent first and not counted.", least=0)] = 0
    dataset: Annotated[Path | None, Option("JSON lines with prompt or messages.")] = None
    trace: Annotated[Path | None, Option("Replay an Azure .csv or Mooncake .jsonl trace.")] = None
    speed: Annotated[float, Option("Replay the trace this many times faster.", above=0)] = 1.0
    length_scale: Annotated[float, Option("Multiply the trace's lengths.", above=0)] = 1.0
    seed: Annotated[int, Option("Of prompts and arrivals.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset and self.trace:
            raise BadInput("--dataset", "cannot be combined with --trace")
        if self.shared_prefix > self.input_tokens:
            raise BadInput("--shared-prefix", f"{self.shared_prefix} is more than --input-tokens {self.input_tokens}")

    def items(self, measure: Measure) -> list[WorkItem]:
        """The requests, warm-up first (a trace has its warm-up at its start)."""
        from headway.bench.dataset import read_dataset
        from headway.bench.workload import Prompts, WorkItem
        from headway.traffic.traces import read_trace, scaled

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


class LoadOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When requests are sent. Without a rate, a concurrency or a trace one is in flight at a time."""

    rate: Annotated[float | None, Option("Open loop: arrivals per second.", above=0)] = None
    arrival: Annotated[str, Option("How arrivals of --rate are spread.", ARRIVALS)] = "poisson"
    burstiness: Annotated[float, Option("Of gamma arrivals: 1 = Poisson, below 1 = bursts.", above=0)] = 1.0
    ramp_to: Annotated[float | None, Option("Let the rate grow linearly from --rate to this.", above=0)] = None
    concurrency: Annotated[int | None, Option("Closed loop: requests in flight.", least=1)] = None

    def load(self, trace: Path | None, seed: int) -> Load:
        """
        Raises:
            BadInput: two contradict each other.
        """
        rate = self.rate
        given = {
            "--rate": rate is not None,
            "--concurrency": self.concurrency is not None,
            "--trace": trace is not None,
        }
        chosen = [name for name, there in given.items() if there]
        if len(chosen) > 1:
            raise BadInput(chosen[1], f"cannot be combined with {chosen[0]}: each says when requests start")
        if self.burstiness != 1.0 and self.arrival != "gamma":
            raise BadInput("--burstiness", "needs --arrival gamma")
        if self.ramp_to is not None and rate is None:
            raise BadInput("--ramp-to", "needs --rate, where the ramp starts")
        if self.ramp_to is not None and self.arrival != "poisson":
            raise BadInput("--ramp-to", "has Poisson arrivals; leave --arrival out")
        if trace is not None:
            return Load("trace", seed=seed)
        if rate is None:
            return Load("closed", concurrency=self.concurrency or 1, seed=seed)
        kind = self.arrival if self.ramp_to is None else "ramp"
        return Load(kind, rate, self.ramp_to or 0.0, self.burstiness, seed=seed)
