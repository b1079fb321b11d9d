"""Hold the all-reduce presets against measured tables and print the error of each.

    python benchmarks/collectives.py DATA_FOLDER [--markdown docs/collectives.md]

DATA_FOLDER holds `apex_*_all_reduce.csv` (nccl-tests, KiB and us; APEX, MIT) and `vidur_*_all_reduce.csv` (eager torch
calls, bytes and ms; Vidur, MIT). Runs over more than one machine are left out: a replica here is one scale-up group.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from headway.roofline.collectives import US, AllReduce, Fastest, measured_one_shot, measured_ring, usable
from headway.roofline.hardware import Link

SMALL = 512 << 10  # bytes up to which NCCL takes its low-latency path in these tables


class Point(NamedTuple):
    preset: str
    machine: str
    gpus: int
    message: float
    seconds: float


def link_of(machine: str, gpus: int) -> Link:
    """The link between `gpus` GPUs of a machine; in the pairwise ones NVLink joins two, and four go over PCIe."""
    name, gigabytes = {
        "apex_H100-SXM-80GB": ("NVLink4", 450), "apex_H200-SXM-141GB": ("NVLink4", 450),
        "vidur_h100_dgx": ("NVLink4", 450), "vidur_a100_dgx": ("NVLink3", 300),
        "vidur_a100_pairwise_nvlink": ("NVLink3", 300) if gpus == 2 else ("PCIe4", 32),
        "vidur_h100_pairwise_nvlink": ("NVLink4 bridge", 300) if gpus == 2 else ("PCIe5", 64),
        "apex_V100-PCIE-16GB": ("PCIe3", 16),
    }[machine]  # fmt: skip
    return Link(name, gigabytes * 1e9, gpus)


def read(folder: Path) -> Iterator[Point]:
    """Every all-reduce of one machine, in bytes and seconds, under the preset it should follow."""
    for path in sorted(folder.glob("*_all_reduce.csv")):
        machine = path.name.removesuffix("_all_reduce.csv")
        with path.open() as file:
            for row in csv.DictReader(file):
                if machine.startswith("apex"):
                    message, seconds = float(row["size(kb)"]) * 1024, float(row["time(us)"]) * 1e-6
                    gpus, one_machine = int(row["num_gpus_per_node"]), row["num_nodes"] == "1"
                    preset = "one-shot" if message <= SMALL else "ring"
                else:
                    message, seconds = float(row["size"]), float(row["time_stats.all_reduce.median"]) * 1e-3
                    gpus, one_machine = int(row["num_workers"]), row["num_workers"] == row["devices_per_node"]
                    preset = "eager"
                if one_machine and message > 0:
                    yield Point(preset, machine, gpus, message, seconds)


def measured_eager(link: Link) -> AllReduce:
    """A ring called from eager Python, one launch per call: the host's path hides small messages."""
    return AllReduce("ring", 0.7 * usable(link), floor=12 * US, per_gpu=1.5 * US, host=40 * US)


def preset_of(name: str, link: Link) -> AllReduce | Fastest:
    made: dict[str, Callable[[Link], AllReduce]] = {
        "ring": measured_ring, "one-shot": measured_one_shot, "eager": measured_eager,
    }  # fmt: skip
    return made[name](link)


def errors(points: list[Point]) -> dict[tuple[str, str, int], list[float]]:
    """Relative error of every point, by preset, machine and GPUs."""
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for point in points:
        predicted = preset_of(point.preset, link_of(point.machine, point.gpus)).seconds(point.message, point.gpus)
        found[(point.preset, point.machine, point.gpus)].append(predicted / point.seconds - 1)
    return found


def table(found: dict[tuple[str, str, int], list[float]]) -> str:
    """Markdown: one line per machine and GPU count, then one per preset."""
    lines = ["| preset | machine | GPUs | points | median error | bias |", "|---|---|---|---|---|---|"]

    def line(preset: str, machine: str, gpus: str, values: list[float]) -> str:
        size = median(abs(value) for value in values)
        return f"| {preset} | {machine} | {gpus} | {len(values)} | {size:.1%} | {median(values):+.1%} |"

    for (preset, machine, gpus), values in sorted(found.items()):
        lines.append(line(preset, machine, str(gpus), values))
    for preset in ("one-shot", "ring", "eager"):
        values = [value for key, group in found.items() if key[0] == preset for value in group]
        lines.append(line(f"**{preset}**", "all", "all", values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table between its markers in this file")
    arguments = parser.parse_args()
    result = table(errors(list(read(arguments.folder))))
    print(result)
    if arguments.markdown:
        text = arguments.markdown.read_text()
        start, end = "<!-- table -->\n", "\n<!-- end -->"
        head, rest = text.split(start, 1)
        arguments.markdown.write_text(head + start + result + end + rest.split(end, 1)[1])


if __name__ == "__main__":
    main()
