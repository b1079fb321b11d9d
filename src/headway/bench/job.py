"""One `headway bench`: what is asked for, checked before anything is sent, then run, then written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from headway.bench import report
from headway.bench.client import Endpoint, Limits
from headway.bench.document import document
from headway.bench.load import Load, Progress
from headway.bench.measure import Measured, Workload, measure, search_goodput
from headway.bench.metrics import Targets
from headway.bench.predict import Machine, predict
from headway.bench.recount import Recount
from headway.bench.views import VIEWS
from headway.core.errors import BadInput
from headway.report import files
from headway.report.document import write_page
from headway.report.figures import need_plots


@dataclass(frozen=True)
class Outputs:
    """Files a run leaves behind; None = not wanted."""

    csv: Path | None = None
    html: Path | None = None
    records: Path | None = None

    def check(self) -> None:
        """Refuse now what could not be written after the run."""
        for path, option in ((self.csv, "--csv"), (self.html, "--html"), (self.records, "--records")):
            files.check_writable(path, option)
        if self.html is not None:
            need_plots("--html")

    def write(self, measured: Measured, command: str) -> None:
        """`command`: what was typed, for the page."""
        if self.csv is not None:
            files.write(self.csv, "--csv", report.to_csv(measured.run.records, measured.sides))
        if self.records is not None:
            report.save_records(self.records, measured.run, measured.endpoint.api)
        if self.html is not None:
            write_page(document(measured.summary, measured.run), self.html, command)


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Attributes:
        machine: what is behind the endpoint, for a prediction beside the measurement.
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
    limits: Limits = field(default_factory=Limits)
    machine: Machine | None = None
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


async def run_job(job: Job, announce: Callable[[str], None], progress: Progress | None = None) -> Measured:
    """Measure, predict, search: as far as asked for. See `measure`."""
    measured = await measure(
        job.endpoint, job.load, job.workload, targets=job.targets, limits=job.limits, test=job.test,
        as_tool=job.as_tool, event_log=job.event_log, recount=job.recount, announce=announce, progress=progress,
    )  # fmt: skip
    summary = measured.summary
    if job.machine is not None:
        summary["prediction"] = predict(measured.run, summary, job.machine)
    if job.search and job.targets is not None:
        endpoint = replace(job.endpoint, model=summary["model"])
        summary["goodput"] = await search_goodput(
            endpoint, job.load, job.workload, job.targets, limits=job.limits, resolution=job.resolution, gpus=job.gpus,
            announce=announce, progress=progress,
        )  # fmt: skip
    return measured
