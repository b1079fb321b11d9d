"""A run written down for machines: JSON, CSV, and raw records for later views."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.metrics.records import RequestRecord
from headway.metrics.run import Run
from headway.report.document import Document, write_page, write_plot
from headway.report.figures import check_plot
from headway.report.files import check_writable, write
from headway.traffic.load import Load

COLUMNS = (
    "index", "warmup", "intended_s", "sent_s", "ttft_ms", "ttfa_ms", "tpot_ms", "e2e_ms", "e2e_done_ms",
    "prompt_wanted", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "chunks", "finish_reason",
    "status", "failure", "message", "server_id",
)  # fmt: skip

Values = Callable[[RequestRecord], Sequence[object]]


def to_json(summary: dict[str, Any]) -> str:
    """One JSON object; numbers that are not finite would not be JSON and are refused."""
    return msgspec.json.format(msgspec.json.encode(_finite(summary)), indent=2).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a metric is not a finite number")
    return value


def to_csv(
    records: Sequence[RequestRecord],
    more: Sequence[str] = (),
    values: Values = lambda _: (),
) -> str:
    """One row per request; seconds count from the first intended start. `more`: further columns, and their `values`."""
    start = min((record.intended for record in records if record.sent), default=0)
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow((*COLUMNS, *more))
    for r in records:
        failure, message = (r.failure.kind.value, r.failure.message) if r.failure else ("", "")
        since = [(at - start) / 1e9 if at and start else "" for at in (r.intended, r.sent)]
        writer.writerow(
            [r.index, int(r.warmup), *since, r.ttft_ms, r.ttfa_ms, r.tpot_ms, r.e2e_ms, r.e2e_done_ms,
             r.prompt_wanted, r.prompt_tokens, r.cached_tokens, r.output_tokens, r.reasoning_tokens,
             len(r.token_events()), r.finish_reason, r.status, failure, message, r.server_id, *values(r)]
        )  # fmt: skip
    return out.getvalue()


@dataclass(frozen=True)
class Files:
    """Files that a run leaves behind; None = not wanted."""

    csv: Path | None = None
    html: Path | None = None
    records: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Refuse now what could not be written in the end."""
        for path, option in ((self.csv, "--csv"), (self.html, "--html"), (self.records, "--records")):
            check_writable(path, option)
        check_plot(self.plot)

    def write(
        self,
        document: Callable[[], Document],
        run: Run,
        api: str,
        command: str,
        more: Sequence[str] = (),
        values: Values = lambda _: (),
    ) -> None:
        """Write all of them.

        Args:
            document: makes that for people: the page, and the plot.
            command: what was typed, for the page.
            more, values: as of `to_csv`.
        """
        if self.csv is not None:
            write(self.csv, "--csv", to_csv(run.records, more, values))
        if self.records is not None:
            save_records(self.records, run, api)
        if self.plot is not None:
            write_plot(document(), self.plot)
        if self.html is not None:
            write_page(document(), self.html, command)


class Saved(msgspec.Struct):
    """A run on disk: what `headway bench view` reads."""

    api: str
    load_kind: str
    rate: float
    records: list[RequestRecord]


def save_records(path: Path, run: Run, api: str) -> None:
    write(path, "--records", msgspec.json.encode(Saved(api, run.load.kind, run.load.rate, run.records)).decode())


def load_records(path: Path) -> tuple[Run, str]:
    """The run and its API.

    Raises:
        BadInput: no such file, or it is not one of these.
    """
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except OSError as error:
        raise BadInput("RECORDS", f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BadInput("RECORDS", f"{path} was not written by `headway bench --records`: {error}") from None
    return Run(Load(saved.load_kind, saved.rate, saved.rate), saved.records), saved.api
