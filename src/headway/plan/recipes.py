"""Public recipes of the measured runs: how a described run was really laid out, and whether it drafted.

`recipes.csv.gz` holds the recipes of InferenceX (SemiAnalysisAI, Apache-2.0): model, device, engine, precision, lengths
and concurrency -> decode workers, GPUs, expert and attention parallelism of one, draft tokens, image. A run is joined
by its description alone, never by what was measured; where several recipes fit one description, what they agree on is
known and the rest is not.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("recipes.csv.gz")
NAMES = {  # of the catalogue -> of the recipes
    "deepseek-r1": "dsr1", "deepseek-v3": "dsr1", "gpt-oss-120b": "gptoss", "minimax-m2.5": "minimaxm2.5",
    "kimi-k2.5": "kimik2.5", "glm-5": "glm5", "qwen3.5-397b-a17b": "qwen3.5",
}  # fmt: skip


class Recipe(msgspec.Struct, frozen=True):
    """One way a run was started: decode workers of `gpus` each, experts dealt to `expert_parallel` groups, sequences to
    one group of GPUs or to each (`data_parallel`); tokens drafted per step; GPUs in `total`, prompts' included."""

    workers: int
    gpus: int
    expert_parallel: int
    data_parallel: bool
    drafts: int
    total: int
    image: str

    @property
    def layout(self) -> tuple[int, int, int, bool]:
        return self.workers, self.gpus, self.expert_parallel, self.data_parallel


@cache
def _recipes() -> dict[tuple[str, ...], list[Recipe]]:
    found: dict[tuple[str, ...], list[Recipe]] = {}
    with gzip.open(FILE, "rt", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            keys = ("model", "hardware", "engine", "precision", "isl", "osl", "concurrency", "disaggregated")
            workers, gpus, experts, data, drafts = (
                int(row[name])
                for name in ("decode_workers", "decode_tp", "decode_ep", "decode_dp_attention", "draft_tokens")
            )
            gpus = max(gpus, experts)  # where nothing is tensor-parallel, experts say how many there are
            if data and gpus == 1:
                continue  # the blank twin of a recipe that says it
            prompts = int(row["prefill_workers"] or 0) * int(row["prefill_tp"] or 0)
            recipe = Recipe(workers, gpus, experts, bool(data), drafts, prompts + workers * gpus, row["image"])
            found.setdefault(tuple(row[key] for key in keys), []).append(recipe)
    return found


def recipes(
    model: str, hardware: str, engine: str, precision: str, prompt: int, output: int, concurrency: int, apart: bool
) -> list[Recipe]:
    """All that fit a description; names as the catalogue has them, lengths nominal."""
    key = (NAMES.get(model, ""), hardware, engine, precision, *map(str, (prompt, output, concurrency, int(apart))))
    return _recipes().get(key, [])


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
