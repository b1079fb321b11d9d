"""`headway plan score FILE.csv`: predicts every measured run of a table and says how far off it was.

The table has the columns of AIConfigurator's silicon runs: one row per run, TTFT and TPOT as measured. What the table
leaves out is filled by the conventions below, each named and none of them fitted to a row's result.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.roofline.calibrate import Calibration, Estimate, Range, calibration
from headway.roofline.catalogue import find_model
from headway.roofline.deployment import Deployment
from headway.roofline.hardware import find_hardware

NEEDED = ("silicon_data_source", "backend", "model_path", "system", "precision", "mode", "isl", "osl", "tp_size",
          "silicon_ttft_ms", "silicon_tpot_ms")  # fmt: skip
RANDOM_LENGTHS = 0.9  # InferenceX draws lengths from 80-100 % of nominal
WIDE = 16  # GPUs: a wider latent-attention group than this attends data-parallel, whatever its row says
CROWDED = 30.0  # requests per GPU of a decode worker from which operators choose data-parallel attention
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")
WORKERS = {"trtllm": 4.0}  # decode workers where a disaggregated run does not say: recipes use several narrow ones


class Run(msgspec.Struct, frozen=True):
    """One row of the table: what was deployed, what was measured (seconds), and where the row came from.

    `doubt`: why no estimate can be made although there is a deployment; "" if one can.
    """

    row: int
    model: str
    system: str
    backend: str
    deployment: Deployment
    tpot: float
    ttft: float
    doubt: str = ""


class Skipped(msgspec.Struct, frozen=True):
    """A row that cannot be scored, and why."""

    row: int
    model: str
    system: str
    backend: str
    reason: str


def read_runs(path: Path) -> tuple[list[Run], list[Skipped]]:
    """Every row of the table as a deployment with its measurement, or as skipped with a reason.

    Raises:
        BadInput: the file is missing or lacks a column.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (table.fieldnames or ())]
            if missing:
                raise BadInput("FILE", f"{path} lacks the columns {', '.join(missing)}")
            rows = list(table)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("FILE", f"cannot read {path}: {error}") from error
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for number, row in enumerate(rows, start=2):  # the header is line 1
        where = (number, row["model_path"], row["system"], row["backend"])
        try:
            deployment = deployment_of(row)
            tpot, ttft = (_positive(row, f"silicon_{name}_ms") / 1e3 for name in ("tpot", "ttft"))
        except BadInput as error:
            skipped.append(Skipped(*where, reason=str(error)))
        else:
            runs.append(Run(*where, deployment=deployment, tpot=tpot, ttft=ttft, doubt=_doubt(row)))
    return runs, skipped


def _doubt(row: dict[str, str]) -> str:
    """A batch size is the most a replica may hold, not what it held: without a concurrency the load is not known."""
    return "" if _CONCURRENCY.search(row["silicon_data_source"]) else "the row does not say its concurrency"


def _number(row: dict[str, str], name: str, default: float) -> float:
    """A cell, `default` if blank or absent or 0 (which this table writes for "not applicable")."""
    text = (row.get(name) or "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError as error:
        raise BadInput(name, f"{text!r} is not a number") from error
    return value or default


def _positive(row: dict[str, str], name: str) -> float:
    value = _number(row, name, 0.0)
    if not 0 < value < np.inf:
        raise BadInput(name, f"{row.get(name)!r}; accepted: a number above 0")
    return value


def deployment_of(row: dict[str, str]) -> Deployment:
    """What a row deployed. Raises BadInput, naming the column, for what cannot be read or is not catalogued."""
    shape = find_model(row["model_path"], "model_path")
    hardware = find_hardware(row["system"], "system")
    engine, apart = row["backend"].strip().lower(), row["mode"].strip() == "disagg"
    source = row["silicon_data_source"]
    recorded = source.startswith("source_file=/")  # the authors' own runs; all others are InferenceX exports
    precision = row["precision"].strip() or "bf16"
    if precision not in ("bf16", "fp8", "fp4", "int4"):
        raise BadInput("precision", f"{precision!r}; accepted: blank (bf16), bf16, fp8, fp4, int4")
    gpus, attention_dp, expert_parallel = _layout(row, "decode_" if apart else "", shape.is_moe, shape.heads)
    concurrency, attention_dp = _concurrency(row, apart, gpus, attention_dp, shape.is_moe)
    scale = 1.0 if recorded else RANDOM_LENGTHS
    drafts = shape.family == "deepseek_v3" and source.startswith("source_file=20")
    return Deployment(
        shape, hardware, engine, concurrency, _positive(row, "isl") * scale, _positive(row, "osl") * scale,
        version=(row.get("backend_version") or "").strip(), precision=precision,
        cache_bytes=_cache_bytes(precision, engine, hardware.name, recorded),
        gpus=gpus, attention_dp=attention_dp, expert_parallel=expert_parallel, disaggregated=apart,
        prefill_gpus=_layout(row, "prefill_", shape.is_moe, shape.heads)[0] if apart else 0,
        speculation="unrecorded" if drafts else "off",
    )  # fmt: skip


def _layout(row: dict[str, str], side: str, moe: bool, heads: int) -> tuple[int, int, int]:
    """(GPUs, data-parallel attention groups, expert-parallel groups) of one replica.

    Exports count twice: a run on 8 GPUs with tp = 8 and ep = 8 is there as tp_size 64 with moe_tp 8 x moe_ep 8, and one
    on 2 GPUs with data-parallel attention as tp_size 2 with attention_dp 2. A product of two equal factors is one of
    them. A mixture split wider than its heads or than `WIDE` attends data-parallel.
    """
    tp, dp = _number(row, f"{side}tp_size", 1), _number(row, f"{side}attention_dp_size", 1)
    moe_tp, experts = _number(row, f"{side}moe_tp_size", 1), _number(row, f"{side}moe_ep_size", 1)
    if moe and moe_tp == experts > 1:
        gpus, dp = experts, (experts if dp > 1 else 1.0)
    elif tp == dp > 1:
        gpus = tp
    else:
        gpus = tp * dp
    if moe and dp == 1 and (gpus > WIDE or heads % gpus):
        dp = gpus
    return int(gpus), int(dp), int(min(experts, gpus))


def _concurrency(row: dict[str, str], apart: bool, gpus: int, attention_dp: int, moe: bool) -> tuple[float, int]:
    """(requests in flight on one replica, its data-parallel attention groups).

    Aggregated: batch size times attention groups, which is the concurrency of the source when there is one replica.
    Disaggregated: the source's concurrency over the decode workers. Where their number is not given, a crowded mixture
    is taken as one worker with data-parallel attention, any other as the engine's usual number of narrow ones.
    """
    if not apart:
        return _number(row, "batch_size", 0.0) * _number(row, "attention_dp_size", 1.0), attention_dp
    found = _CONCURRENCY.search(row["silicon_data_source"])
    workers = _number(row, "decode_num_workers", 0.0)
    if found is None:
        total = _number(row, "decode_batch_size", 0.0) * attention_dp * max(workers, 1.0)
    else:
        total = float(found[1])
    if not workers:
        if moe and attention_dp == 1 and total / gpus >= CROWDED:
            attention_dp = gpus
        workers = 1.0 if attention_dp > 1 else min(WORKERS.get(row["backend"], 1.0), max(total, 1.0))
    return max(1.0, total / workers) if total else 0.0, attention_dp


def _cache_bytes(precision: str, engine: str, device: str, recorded: bool) -> float:
    """Bytes per cached number, which the table does not say. The exports' recipes set an 8-bit cache for 8 and 4-bit
    checkpoints, SGLang's on Hopper excepted; an engine left to itself caches in the model's 16 bits."""
    if precision in ("bf16", "int4"):
        return 2.0
    hopper = device.startswith(("h100", "h200"))
    return 2.0 if (recorded and precision == "fp8") or (engine == "sglang" and hopper) else 1.0


def score(path: Path | str, known: Calibration | None = None) -> dict[str, Any]:
    """Errors of every prediction against a table of runs, in percent (shape of the answer: see `plan score --json`).

    Rows outside the validated region are abstained from: they count with their bound, and in `abstained`. Coverage is
    the share of the other rows inside their p10-p90 range. Rows that are no deployment at all are in `skipped`.
    """
    runs, skipped = read_runs(Path(path))
    model = known or calibration()
    estimates = model.predict_all([run.deployment for run in runs], [run.doubt for run in runs])
    kinds = {kind: [i for i, run in enumerate(runs) if run.deployment.kind == kind] for kind in ("dense", "moe")}
    result: dict[str, Any] = {
        metric: {kind: summary(metric, runs, estimates, rows) for kind, rows in kinds.items()}
        for metric in ("tpot", "ttft")
    }
    result["groups"] = _groups(runs, estimates)
    result["skipped"] = {"n": len(skipped), "reasons": _counted(entry.reason for entry in skipped)}
    result["abstained"] = {
        "n": sum(bool(estimate.reason) for estimate in estimates),
        "reasons": _counted(estimate.reason for estimate in estimates if estimate.reason),
    }
    return result


def summary(metric: str, runs: list[Run], estimates: list[Estimate], rows: list[int]) -> dict[str, Any]:
    """Errors of some rows in percent: mean and median of |predicted/measured - 1|, its signed mean, coverage."""
    if not rows:
        return {"n": 0, "mape": None, "median": None, "bias": None, "coverage": None, "abstained": 0.0}
    measured = np.array([getattr(runs[i], metric) for i in rows])
    ranges: list[Range | None] = [getattr(estimates[i], metric) for i in rows]
    bounds = [getattr(estimates[i], f"bound_{metric}") for i in rows]
    point = np.array([r.p50 if r else bound for r, bound in zip(ranges, bounds, strict=True)])
    error = point / measured - 1
    inside = [r.p10 <= value <= r.p90 for r, value in zip(ranges, measured, strict=True) if r]
    return {
        "n": len(rows),
        "mape": _percent(np.abs(error).mean()),
        "median": _percent(np.median(np.abs(error))),
        "bias": _percent(error.mean()),
        "coverage": _percent(np.mean(inside)) if inside else None,
        "abstained": _percent(1 - len(inside) / len(rows)),
    }


def _percent(share: float | np.floating) -> float:
    return round(100 * float(share), 2)


def _groups(runs: list[Run], estimates: list[Estimate]) -> list[dict[str, Any]]:
    """The same per (model, system, backend), with the kind and the TTFT error."""
    members: dict[tuple[str, str, str], list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault((run.model, run.system, run.backend), []).append(index)
    groups = []
    for (name, system, backend), rows in sorted(members.items()):
        first: dict[str, Any] = {"model": name, "system": system, "backend": backend}
        first["kind"] = runs[rows[0]].deployment.kind
        first |= summary("tpot", runs, estimates, rows)
        first["ttft_mape"] = summary("ttft", runs, estimates, rows)["mape"]
        groups.append(first)
    return groups


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
