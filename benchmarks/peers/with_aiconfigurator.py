"""AIConfigurator's own estimate of every aggregated run, for `benchmarks/aiconfigurator.py`.

    python with_aiconfigurator.py silicon_runs.csv OUT.csv.gz       in an environment with `pip install aiconfigurator`

`silicon_runs.csv` as its repository publishes it, with the columns that name quantised matrices. Each row is asked for
as its authors describe it: batch (their mapping of concurrency: per attention rank), parallelism, formats, lengths; of
the newest version of its engine that it has. Measured tables first; where they lack an
operation, its hybrid of tables and formulas.
"""

from __future__ import annotations

import csv
import functools
import gzip
import logging
import sys
import warnings
from typing import Any

logging.disable(logging.CRITICAL)
warnings.filterwarnings("ignore")
from aiconfigurator.cli.api import cli_estimate  # noqa: E402
from aiconfigurator.sdk import perf_database as shim  # noqa: E402
from aiconfigurator_core.sdk import perf_database as core  # noqa: E402

MODES = ("SILICON", "HYBRID")
KNOWN_AS = {  # where it has the model's shape under another name; formats are given anyway
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "zhipuai/GLM-5": "nvidia/GLM-5-NVFP4",
}
COLUMNS = ("row", "ttft_ms", "tpot_ms", "mode", "version", "reason")


def main() -> None:
    source, out = sys.argv[1:3]
    # It reads hundreds of descriptions anew for each estimate, which takes a hundred times as long as the estimate.
    for module, name in ((shim, "get_latest_database_version"), (core, "get_latest_database_version"),
                         (core, "get_supported_databases")):  # fmt: skip
        setattr(module, name, functools.cache(getattr(module, name)))
    with open(source, newline="") as file:
        rows = list(csv.DictReader(file))
    with gzip.open(out, "wt", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for number, row in enumerate(rows):  # the header is line 1
            if row["mode"] == "agg":
                writer.writerow({"row": number + 2, **estimate(row)})
                if number % 50 == 0:
                    print(number, len(rows), file=sys.stderr, flush=True)


def estimate(row: dict[str, str]) -> dict[str, Any]:
    """Its milliseconds, or why it has none."""
    reason = ""
    model = KNOWN_AS.get(row["model_path"], row["model_path"])
    for mode in MODES:
        try:
            found = cli_estimate(model, row["system"], database_mode=mode, **asked(row))
        except (Exception, SystemExit) as error:  # it raises whatever its tables lead to
            reason = reason or " ".join(f"{type(error).__name__}: {error}".split())[:120]
            continue
        return {
            "ttft_ms": f"{found.ttft:.6g}", "tpot_ms": f"{found.tpot:.6g}", "mode": mode,
            "version": found.backend_version,
        }  # fmt: skip
    return {"reason": reason}


def asked(row: dict[str, str]) -> dict[str, Any]:
    """The run as its table describes it."""
    whole = {
        "isl": "isl", "osl": "osl", "batch_size": "batch_size", "tp_size": "tp_size", "pp_size": "pp_size",
        "attention_dp_size": "attention_dp_size", "moe_tp_size": "moe_tp_size", "moe_ep_size": "moe_ep_size",
    }  # fmt: skip
    found: dict[str, Any] = {name: int(float(row[column])) for name, column in whole.items() if row.get(column)}
    found = {name: value for name, value in found.items() if value > 0}
    modes = {name: row[name] for name in ("gemm_quant_mode", "moe_quant_mode") if row.get(name)}
    return found | modes | {"backend_name": row["backend"]}


if __name__ == "__main__":
    main()
