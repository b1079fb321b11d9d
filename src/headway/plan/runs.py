"""A table of measured runs as deployments: `plan score` predicts them, `benchmarks/fit_planner.py` fits on them.

The table has the columns of AIConfigurator's silicon runs: one row per run, TTFT and TPOT as measured. What the table
leaves out is filled by the conventions below, each named and none of them fitted to a row's result.
"""

from __future__ import annotations

import csv
import gzip
import re
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.plan.recipes import Described, Recipe, highest_load, narrowed, recipes
from headway.roofline.deployment import Deployment, Pool
from headway.roofline.hardware import find_hardware
from headway.shape.catalogue import find_model
from headway.shape.formats import MEASURED

NEEDED = ("silicon_data_source", "backend", "model_path", "system", "precision", "mode", "isl", "osl", "tp_size",
          "silicon_ttft_ms", "silicon_tpot_ms")  # fmt: skip
RANDOM_LENGTHS = 0.9  # InferenceX draws lengths from 80-100 % of nominal
WIDE = 16  # GPUs: a wider mixture than this attends data-parallel, whatever its row says
NARROW = 8  # GPUs of a decode worker with tensor-parallel attention
CROWDED = 30.0  # requests per GPU of a decode worker from which operators choose data-parallel attention
SPARSE = 8.0  # requests per GPU of a whole deployment below which its decode workers are several narrow ones
WORKERS = {"trtllm": 4.0}  # decode workers where a disaggregated run does not say: recipes use several narrow ones
BEYOND = 4  # times the highest load of any recipe of a run: what is said of more was not measured with it
DECODING = (2 / 3, 1 / 2)  # share of a deployment's GPUs that decode: short prompts, prompts over 4 times the output
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")


class PublicRun(msgspec.Struct, frozen=True):
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


def read_runs(path: Path) -> tuple[list[PublicRun], list[Skipped]]:
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
    runs: list[PublicRun] = []
    skipped: list[Skipped] = []
    for number, row in enumerate(rows, start=2):  # the header is line 1
        where = (number, row["model_path"], row["system"], row["backend"])
        try:
            deployment = deployment_of(row)
            tpot, ttft = (_positive(row, f"silicon_{name}_ms") / 1e3 for name in ("tpot", "ttft"))
        except BadInput as error:
            skipped.append(Skipped(*where, reason=str(error)))
        else:
            runs.append(PublicRun(*where, deployment=deployment, tpot=tpot, ttft=ttft, doubt=_doubt(row, deployment)))
    return runs, skipped


def _doubt(row: dict[str, str], deployment: Deployment) -> str:
    """A batch size is the most a replica may hold, not what it held: without a concurrency the load is not known. Nor
    is it where the public recipes of the same run never went near the one given."""
    concurrency = _CONCURRENCY.search(row["silicon_data_source"])
    if concurrency is None:
        return "the row does not say its concurrency"
    most = 0 if deployment.disaggregated else highest_load(_described(row, deployment))
    if most and int(concurrency[1]) > BEYOND * most:
        return f"the row says {concurrency[1]} requests in flight; public recipes of this run go to {most}"
    return ""


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
    own = source.startswith("source_file=/")  # the authors' own runs; all others are InferenceX exports
    precision = row["precision"].strip() or "bf16"
    if precision not in MEASURED:
        raise BadInput("precision", f"{precision!r}; accepted: blank (bf16), {', '.join(MEASURED)}")
    scale = 1.0 if own else RANDOM_LENGTHS
    blank = Deployment(
        shape, hardware, engine, 1.0, _positive(row, "isl") * scale, _positive(row, "osl") * scale,
        version=(row.get("backend_version") or "").strip(), precision=precision,
        cache_bytes=_cache_bytes(precision, engine, hardware.name, own), prefill=Pool() if apart else None,
    )  # fmt: skip
    load = _load(row, apart)
    found = [] if own else _recipes(row, blank)
    layouts, drafts = {recipe.layout for recipe in found}, {recipe.drafts for recipe in found}
    if len(layouts) == 1:
        workers, gpus, experts, data_parallel = layouts.pop()
        pool = Pool(gpus, gpus if data_parallel else 1, experts, workers)
    else:
        pool = _decode_pool(row, blank, load) if apart else _pool(row, "", blank)
    prompts = {recipe.prefill for recipe in found if apart}
    if not found:  # only these exports mix runs with and without drafts
        drafts = {0, -1} if shape.family == "deepseek_v3" and source.startswith("source_file=20") else {0}
    return msgspec.structs.replace(
        blank, gpus=pool.gpus, attention_dp=pool.attention_dp, expert_parallel=pool.expert_parallel,
        concurrency=max(1.0, load / pool.workers), drafts=drafts.pop() if len(drafts) == 1 else None,
        workers=pool.workers, prefill=_prefill_pool(row, blank, pool, prompts) if apart else None,
    )  # fmt: skip


def _described(row: dict[str, str], deployment: Deployment) -> Described:
    return Described(
        deployment.shape.name, deployment.hardware.name, deployment.engine, deployment.precision,
        int(_positive(row, "isl")), int(_positive(row, "osl")), deployment.disaggregated,
    )  # fmt: skip


def _recipes(row: dict[str, str], blank: Deployment) -> list[Recipe]:
    """The recipes that fit a row's description best: all of them, or those with its release and layout."""
    concurrency = _CONCURRENCY.search(row["silicon_data_source"])
    if concurrency is None:
        return []
    found = recipes(_described(row, blank), int(concurrency[1]))
    side = "decode_" if blank.disaggregated else ""
    pool, whole = _pool(row, side, blank), int(_number(row, f"{side}tp_size", 1))
    if not blank.disaggregated:  # its GPUs are what the row says for sure
        found = [recipe for recipe in found if recipe.gpus == pool.gpus]
    workers = int(_number(row, "decode_num_workers", 0.0))
    return narrowed(
        found, blank.version, lambda one: one.gpus == pool.gpus, lambda one: one.total == whole,
        lambda one: one.expert_parallel == pool.expert_parallel,
        lambda one: one.data_parallel == (pool.attention_dp > 1), lambda one: one.workers == workers,
    )  # fmt: skip


def _load(row: dict[str, str], apart: bool) -> float:
    """Requests in flight. Aggregated: batch size times attention groups, which is the source's concurrency when there
    is one replica. Disaggregated: the source's concurrency, else the most its decode workers may hold."""
    if not apart:
        return _positive(row, "batch_size") * _number(row, "attention_dp_size", 1.0)
    found = _CONCURRENCY.search(row["silicon_data_source"])
    if found is not None:
        return float(found[1])
    workers = _number(row, "decode_num_workers", 1.0) * _number(row, "decode_attention_dp_size", 1.0)
    return _positive(row, "decode_batch_size") * workers


def _pool(row: dict[str, str], side: str, blank: Deployment) -> Pool:
    """The replica a row describes.

    Exports count twice: a run on 8 GPUs with tp = 8 and ep = 8 is there as tp_size 64 with moe_tp 8 x moe_ep 8, and one
    on 2 GPUs with data-parallel attention as tp_size 2 with attention_dp 2. A product of two equal factors is one of
    them. A mixture split wider than its heads or than `WIDE` attends data-parallel.
    """
    moe, heads = blank.shape.is_moe, blank.shape.heads
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
    return Pool(int(gpus), int(dp), int(min(experts, gpus)))


def _decode_pool(row: dict[str, str], blank: Deployment, load: float) -> Pool:
    """The decode workers of a disaggregated run.

    Where their number is not given, neither is the kind of attention, and the layout may be blank (one GPU) or that of
    the whole deployment (both sides equally wide). Then a crowded mixture is taken as one worker with data-parallel
    attention, any other as the engine's usual number of narrow workers.
    """
    pool = _pool(row, "decode_", blank)
    workers = _number(row, "decode_num_workers", 0.0)
    if workers:
        return msgspec.structs.replace(pool, workers=workers)
    usual = min(WORKERS.get(blank.engine, 1.0), load)
    if not blank.shape.is_moe:
        return msgspec.structs.replace(pool, workers=usual)
    whole = pool.gpus if pool.gpus > WIDE and _pool(row, "prefill_", blank) == pool else 0
    if whole and usual > 1 and load / whole < SPARSE:
        return Pool(NARROW, 1, pool.expert_parallel, min(load, max(1, (whole - NARROW // 2) // NARROW)))
    if whole:
        share = DECODING[blank.prompt > 4 * blank.output]
        gpus = max(NARROW, int(whole * share) // NARROW * NARROW)
        return Pool(gpus, gpus, gpus)
    if pool.gpus == 1:
        pool = Pool(_smallest(blank), 1, 1)
    if pool.attention_dp == 1 and load / pool.gpus >= CROWDED:
        pool = msgspec.structs.replace(pool, attention_dp=pool.gpus)
    return msgspec.structs.replace(pool, workers=1.0 if pool.attention_dp > 1 else usual)


def _prefill_pool(row: dict[str, str], blank: Deployment, decode: Pool, found: set[tuple[int, int, int, bool]]) -> Pool:
    """The prefill workers of a disaggregated run: of its recipes, or its own; else so many of the
    usual size that they are never what limits."""
    if len(found) == 1:
        count, gpus, experts, data_parallel = found.pop()
        return Pool(gpus, gpus if data_parallel else 1, experts, count)
    if workers := _number(row, "prefill_num_workers", 0.0):
        return msgspec.structs.replace(_pool(row, "prefill_", blank), workers=workers)
    return Pool(min(decode.gpus, NARROW), workers=float("inf"))


def _smallest(blank: Deployment) -> int:
    """Fewest GPUs, a power of two, that hold the weights."""
    gpus = 1
    while gpus < WIDE and not msgspec.structs.replace(blank, gpus=gpus).fits:
        gpus *= 2
    return gpus


def _cache_bytes(precision: str, engine: str, device: str, own: bool) -> float:
    """Bytes per cached number, which the table does not say. The exports' recipes set an 8-bit cache for 8 and 4-bit
    checkpoints, SGLang's on Hopper excepted; an engine left to itself caches in the model's 16 bits."""
    if precision in ("bf16", "int4"):
        return 2.0
    hopper = device.startswith(("h100", "h200"))
    return 2.0 if (own and precision == "fp8") or (engine == "sglang" and hopper) else 1.0
