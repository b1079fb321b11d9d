"""How much time to first token does each client add? One mock of known timing, 200 requests/s, clients in turn.

    python benchmarks/clients.py --guidellm PATH/guidellm --aiperf PATH/aiperf [--rounds 3] [--json clients.json]

A client that is not given is left out. AIPerf wants a tokenizer: name one of the local hub cache in PEER_TOKENIZER.
Added = a client's TTFT less the median time the mock held requests back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headway.metrics.files import load_records
from headway.metrics.stats import percentile

RATE, REQUESTS, HELD_MS = 200, 400, 10.0
TOKENIZER = os.environ.get("PEER_TOKENIZER", "builtin")  # AIPerf needs one; offline: a hub id in the local hub cache
SCRIPT = {"ttft": HELD_MS / 1e3, "gap": 0.004, "chunks": 5}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def run(command: list[str]) -> None:
    done = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def ours(url: str, folder: Path) -> tuple[float, float, float]:
    """(p50, p99) of TTFT in ms, and the median time the mock really held requests back."""
    verb = [sys.executable, "-c", "from headway.cli import main; main()", "bench"]
    load = ["--rate", str(RATE), "--arrival", "constant", "--requests", str(REQUESTS), "--output-tokens", "64"]
    run([*verb, "--url", url, *load, "--input-tokens", "20", "--no-self-test", "--records", str(folder / "ours.json")])
    records = [record for record in load_records(folder / "ours.json")[0].records if record.completed]
    ttft = [value for record in records if (value := record.ttft_ms) is not None]
    held = [int((record.server_id or "mock-0").removeprefix("mock-")) / 1e6 for record in records]
    return percentile(ttft, 0.5), percentile(ttft, 0.99), statistics.median(held)


def guidellm(program: str, url: str, folder: Path) -> tuple[float, float]:
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"one two three {n}"}) for n in range(REQUESTS)))
    run([program, "run", "--backend", f"kind=openai_http,target={url},model=mock", "--disable-console-interactive",
         "--profile", f"kind=constant,rate={RATE}", "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={folder / 'guidellm.json'}"]
    )  # fmt: skip
    report = json.loads((folder / "guidellm.json").read_text())
    found = report["benchmarks"][0]["metrics"]["time_to_first_token_ms"]["successful"]["percentiles"]
    return found["p50"], found["p99"]


def aiperf(program: str, url: str, folder: Path) -> tuple[float, float]:
    run([program, "profile", "-m", "mock", "-u", url, "--endpoint-type", "chat", "--streaming",
         "--tokenizer", TOKENIZER, "--use-server-token-count", "--isl", "20", "--request-rate", str(RATE),
         "--arrival-pattern", "constant", "--request-count", str(REQUESTS),
         "--ui", "none", "--artifact-dir", str(folder / "aiperf")])  # fmt: skip
    report = next((folder / "aiperf").rglob("profile_export_aiperf.json"))
    found = json.loads(report.read_text())["time_to_first_token"]
    return found["p50"], found["p99"]


def compare(url: str, programs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Medians over rounds in which every client has its turn."""
    added: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(rounds):
            p50, p99, held = ours(url, Path(name))
            added.setdefault("headway", []).append((p50 - held, p99 - held))
            for tool, measure in programs.items():
                p50, p99 = measure(url, Path(name))
                added.setdefault(tool, []).append((p50 - held, p99 - held))
    return {
        tool: {
            f"added_{name}_ms": statistics.median(row[index] for row in rows)
            for index, name in enumerate(("p50", "p99"))
        }
        for tool, rows in added.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm")
    parser.add_argument("--aiperf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    programs: dict[str, Any] = {}
    for tool, measure in (("guidellm", guidellm), ("aiperf", aiperf)):
        if program := getattr(options, tool):
            programs[tool] = lambda url, folder, measure=measure, program=program: measure(program, url, folder)
    command = [sys.executable, "-m", "headway.bench.mock", json.dumps(SCRIPT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mock:
        assert mock.stdin is not None and mock.stdout is not None
        found = compare(f"http://127.0.0.1:{mock.stdout.readline().strip()}", programs, options.rounds)
        mock.stdin.close()
    for tool, row in found.items():
        print(f"{tool:10} added TTFT {row['added_p50_ms']:7.2f} ms p50, {row['added_p99_ms']:7.2f} ms p99")
    if options.json:
        load = os.getloadavg()[0]
        options.json.write_text(
            json.dumps({"rate": RATE, "requests": REQUESTS, "load_average": load, "clients": found}, indent=1)
        )


if __name__ == "__main__":
    main()
