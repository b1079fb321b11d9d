"""Our server and llama-cpp-python's, same file, same workloads, measured by `headway bench` from the outside.

    python benchmarks/serving.py MODEL.gguf [--rates 0.5,1,2] [--seconds 40] [--trace azure_conv.csv] [--resume]

Poisson at several rates, then the Azure conversation trace's shape with its lengths scaled down. One server runs at a
time, the order alternates from one workload to the next, and every run carries its client's self-test.
llama-cpp-python's stream has no usage, so there a chunk is counted as a token.

Requests arrive for --seconds in every workload (the trace is sped up or slowed down to that), and each may take as long
again before it has failed, so a run ends. Results are written to benchmarks/serving.json after every run; --resume
keeps those of the same workload, model and day that are there and makes what is missing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.traffic.traces import read_trace

RESULT = Path(__file__).with_name("serving.json")
HEADWAY = [sys.executable, "-c", "from headway.cli import main; main()"]
KEPT = ("requests", "ttft_ms", "tpot_ms", "itl_token_ms", "e2e_ms", "throughput", "cached_tokens", "failures", "slo",
        "load", "prompts", "client", "warnings")  # fmt: skip


def servers(model: Path, context: int) -> dict[str, list[str]]:
    """Command of each server that is installed; the port is appended."""
    found = {"headway": [*HEADWAY, "serve", str(model), "--max-model-len", str(context), "--port"]}
    if importlib.util.find_spec("llama_cpp"):
        found["llama-cpp-python"] = [sys.executable, "-m", "llama_cpp.server", "--model", str(model),
                                     "--n_ctx", str(context),
                                     "--interrupt_requests", "false",  # else a newcomer ends whoever runs
                                     "--port"]  # fmt: skip
    return found


@contextmanager
def serving(command: list[str], patience: float = 180.0) -> Iterator[str]:
    """A server on a free port, ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + patience
            while not ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[0]} did not start")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/v1/models", timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


def workloads(options: argparse.Namespace) -> dict[str, list[str]]:
    """Options of `headway bench` by workload."""
    limits = ["--slo", "ttft=2s,tpot=100ms", "--request-timeout", str(max(30, options.seconds))]
    found = {}
    for rate in options.rates.split(","):
        count = max(10, round(float(rate) * options.seconds))
        shape = ["--rate", rate, "--requests", str(count), "--input-tokens", "256", "--output-tokens", "64"]
        found[f"poisson {rate}/s"] = [*shape, *limits]
    if options.trace:
        rows = read_trace(options.trace, options.trace_requests)
        speed = max(1e-3, (rows[-1].at - rows[0].at) / options.seconds)
        shape = ["--length-scale", str(options.length_scale), "--speed", f"{speed:.4g}", "--requests", str(len(rows))]
        found["azure conversation, scaled"] = ["--trace", str(options.trace), *shape, *limits]
    return found


def measure(url: str, arguments: list[str], name: str) -> dict[str, Any]:
    counting = ["--count-chunks"] if name != "headway" else []
    command = [*HEADWAY, "bench", "--url", url, "--json", *arguments, *counting]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 2:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    return {key: found[key] for key in KEPT if key in found}


def row(workload: str, name: str, found: dict[str, Any]) -> str:
    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:,.1f}"

    figures = (found["ttft_ms"]["p50"], found["ttft_ms"]["p90"], found["tpot_ms"]["p50"], found["throughput"]["output"])
    done = f"{found['requests']['completed']}/{found['requests']['total']}"
    share = found["slo"]["attainment"]
    return f"| {workload} | {name} | {' | '.join(map(cell, figures))} | {cell(100 * (share or 0))} | {done} |"


def kept(about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results of an earlier run of the same model on the same day, by workload and server."""
    if not RESULT.is_file():
        return {}
    before = json.loads(RESULT.read_text())
    same = all(before.get(key) == about[key] for key in ("model", "date", "cores"))
    return before["workloads"] if same else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rates", default="0.5,1,2")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--trace-requests", type=int, default=40)
    parser.add_argument("--length-scale", type=float, default=0.2)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    about = {"model": options.model.name, "date": datetime.date.today().isoformat(), "cores": os.cpu_count()}
    results = kept(about) if options.resume else {}
    print(
        "| workload | server | TTFT p50 ms | TTFT p90 ms | TPOT p50 ms | output tokens/s | targets met % | completed |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for number, (workload, arguments) in enumerate(workloads(options).items()):
        known = list(servers(options.model, options.context).items())
        for name, command in known if number % 2 == 0 else reversed(known):
            found = results.get(workload, {}).get(name)
            shown = [Path(word).name if word == str(options.trace) else word for word in arguments]
            if found is None or found["arguments"] != shown:
                load = os.getloadavg()[0]
                with serving(command) as url:
                    found = {"arguments": shown, "load_average": load} | measure(url, arguments, name)
                results.setdefault(workload, {})[name] = found
                RESULT.write_text(json.dumps(about | {"workloads": results}, indent=1) + "\n")
            print(row(workload, name, found), flush=True)


if __name__ == "__main__":
    main()
