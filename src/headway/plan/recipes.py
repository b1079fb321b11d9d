"""Public recipes of the measured runs: how a described run was really laid out, and whether it drafted.

`recipes.csv.gz` holds the recipes of InferenceX (SemiAnalysisAI, Apache-2.0): model, device, engine, precision, lengths
and concurrency -> decode and prefill workers, GPUs, expert and attention parallelism of one, draft tokens, image. A
run is joined by its description alone, never by what was measured; where several recipes fit one description, what they
agree on is known and the rest is not.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

FILE = Path(__file__).with_name("recipes.csv.gz")
NAMES = {  # of the catalogue -> of the recipes
    "deepseek-r1": "dsr1", "deepseek-v3": "dsr1", "gpt-oss-120b": "gptoss", "minimax-m2.5": "minimaxm2.5",
    "kimi-k2.5": "kimik2.5", "glm-5": "glm5", "qwen3.5-397b-a17b": "qwen3.5",
}  # fmt: skip


class Recipe(msgspec.Struct, frozen=True):
    """One way a run was started: decode workers of `gpus` each, experts dealt to `expert_parallel` groups, sequences to
    one group of GPUs or to each (`data_parallel`); the same of the `prefill` workers, if there are any; tokens drafted
    per step."""

    workers: int
    gpus: int
    expert_parallel: int
    data_parallel: bool
    prefill: tuple[int, int, int, bool]
    drafts: int
    image: str

    @property
    def layout(self) -> tuple[int, int, int, bool]:
        return self.workers, self.gpus, self.expert_parallel, self.data_parallel

    @property
    def total(self) -> int:
        return self.workers * self.gpus + self.prefill[0] * self.prefill[1]


class Described(NamedTuple):
    """What a run and a recipe both say, the load left out: a model of the catalogue, nominal lengths; `apart`:
    disaggregated."""

    model: str
    hardware: str
    engine: str
    precision: str
    prompt: int
    output: int
    apart: bool


@cache
def _recipes() -> dict[Described, dict[int, list[Recipe]]]:
    """Description -> requests in flight -> recipes."""
    found: dict[Described, dict[int, list[Recipe]]] = {}
    with gzip.open(FILE, "rt", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            decode, prefill = _layout(row, "decode"), _layout(row, "prefill")
            if decode[3] and decode[1] == 1:
                continue  # the blank twin of a recipe that says it
            recipe = Recipe(*decode, prefill, int(row["draft_tokens"]), row["image"])
            run = Described(
                row["model"].removesuffix(f"-{row['precision']}"), row["hardware"], row["engine"], row["precision"],
                int(row["isl"]), int(row["osl"]), row["disaggregated"] == "1",
            )  # fmt: skip
            same = found.setdefault(run, {})
            same.setdefault(int(row["concurrency"]), []).append(recipe)
    return found


def _layout(row: dict[str, str], side: str) -> tuple[int, int, int, bool]:
    """Workers, GPUs and expert-parallel groups of one, data-parallel attention; zeros where there is no such side."""
    workers, gpus, experts, data = (int(row[f"{side}_{name}"] or 0) for name in ("workers", "tp", "ep", "dp_attention"))
    return workers, max(gpus, experts), experts, bool(data)  # where nothing is tensor-parallel, experts say how many


def recipes(run: Described, concurrency: int) -> list[Recipe]:
    """All that fit a description at a load."""
    return _loads(run).get(concurrency, [])


def highest_load(run: Described) -> int:
    """Most requests in flight of any recipe that fits a description; 0 if none does."""
    return max(_loads(run), default=0)


def _loads(run: Described) -> dict[int, list[Recipe]]:
    return _recipes().get(run._replace(model=NAMES.get(run.model, "")), {})


def narrowed(found: Sequence[Recipe], version: str, *known: Callable[[Recipe], bool]) -> list[Recipe]:
    """Those that also fit what else a run says, each statement in turn, as long as any does."""
    image = re.compile(rf"(?<![\d.])v?{re.escape(version)}(?!\d)")
    tests = [*known]
    if version:
        tests.insert(0, lambda recipe: image.search(recipe.image) is not None)
    kept = list(found)
    for test in tests:
        kept = [recipe for recipe in kept if test(recipe)] or kept
    return kept
