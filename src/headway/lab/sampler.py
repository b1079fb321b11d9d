"""A distribution on its way through the sampler (SPEC E2): the pipeline's own stages, and its own draws."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.core.request import SamplingParams
from headway.sampling.pipeline import draw
from headway.sampling.select import largest
from headway.sampling.trace import row_before, trace

WORDS = {  # the likeliest tokens of two made-up places in a text, and how likely
    "forced": ("The capital of France is", [" Paris", " the", " a", " located", " not", " called", " France", " one"],
               [0.93, 0.02, 0.008, 0.006, 0.004, 0.003, 0.003, 0.002]),
    "open": ("Once upon a time there was a", [" little", " young", " man", " king", " girl", " boy", " woman", " small",
             " poor", " very", " great", " beautiful", " prince", " dragon", " cat", " farmer"],
             [0.11, 0.10, 0.07, 0.07, 0.06, 0.055, 0.05, 0.04, 0.035, 0.03, 0.03, 0.025, 0.02, 0.02, 0.018, 0.015]),
}  # fmt: skip
TAIL = 4000  # tokens that share what is left, ever less likely
SHOWN = 16
DRAWS = 100
LONGEST = 2000  # characters of a text that is given


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is looked at.

    Attributes:
        place: "forced" or "open", made up; or "model": what the built-in model says after `text`.
    """

    place: str = "open"
    text: str = "The best way to learn is"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.place not in (*WORDS, "model"):
            raise BadInput("place", f"{self.place[:40]!r} is not one of {', '.join(WORDS)}, model")
        if self.place == "model" and not 1 <= len(self.text) <= LONGEST:
            raise BadInput("text", f"{len(self.text)} characters; accepted: 1 to {LONGEST}")


def answer(asked: Sampling) -> dict[str, Any]:
    """Probabilities of the likeliest tokens and of the rest, before and after every stage, and a hundred draws."""
    text, names, logits = place(asked)
    params = SamplingParams(
        temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p, seed=asked.seed
    )
    row = row_before((0,), 1, params)
    found = trace(logits, row, 1)
    drawn = np.array([draw(logits, row, position) for position in range(1, DRAWS + 1)])
    shown = [int(id) for id in largest(found.stages[0].probabilities, SHOWN)]
    stages = []
    for stage in found.stages:
        listed = [float(stage.probabilities[id]) for id in shown]
        stages.append(
            {"name": stage.name, "active": stage.active, "survivors": stage.survivors, "shares": listed,
             "tail": float(stage.probabilities.sum() - sum(listed)),
             "tail_survivors": stage.survivors - sum(share > 0 for share in listed)}
        )  # fmt: skip
    counts = [int((drawn == id).sum()) for id in shown]
    return {
        "text": text, "tokens": [names(id) for id in shown], "stages": stages, "draws": counts,
        "tail_draws": DRAWS - sum(counts), "token": names(found.token), "vocab": len(logits),
        "see": _see(stages, len(logits), counts, [names(id) for id in shown]),
    }  # fmt: skip


def place(asked: Sampling) -> tuple[str, Any, np.ndarray]:
    """(the text before, id -> token, float32 logits [vocab])."""
    if asked.place == "model":
        return asked.text, *_said_by_the_model(asked.text)
    text, words, shares = WORDS[asked.place]
    rest = 1.0 - sum(shares)
    falling = np.exp(-np.arange(TAIL) / (TAIL / 4))
    probabilities = np.concatenate([shares, rest * falling / falling.sum()])
    return text, lambda id: words[id] if id < len(words) else f"token {id}", np.log(probabilities).astype(np.float32)


@lru_cache(maxsize=1)
def _model() -> tuple[Any, Any]:
    from headway.model.load import open_model
    from headway.model.source import DEFAULT_MODEL, merges_folder
    from headway.text.tokenizer import Tokenizer

    opened = open_model(DEFAULT_MODEL)
    return opened, Tokenizer(opened.info.tokenizer, cache=merges_folder())


@lru_cache(maxsize=32)
def _said_by_the_model(text: str) -> tuple[Any, np.ndarray]:
    """The built-in model's logits after a text, by the reference backend."""
    from headway.engine.inspection import inspect

    opened, tokenizer = _model()
    seen = inspect(opened, tokenizer.encode(text), SamplingParams(seed=0), ())
    return lambda id: tokenizer.token_bytes(id, skip_special=False).decode(errors="replace"), seen.last_logits


def _see(stages: list[dict[str, Any]], vocab: int, counts: list[int], tokens: list[str]) -> str:
    first, last = stages[0], stages[-1]
    likeliest = f"{tokens[0].strip()!r} has {first['shares'][0]:.1%} of the model's distribution"
    now = f"and {last['shares'][0]:.1%} of the one drawn from"
    left = f"{last['survivors']:,} of {vocab:,} tokens are left"
    tail = f"the tail beyond the {len(tokens)} likeliest went from {first['tail']:.1%} to {last['tail']:.1%}"
    return f"{likeliest} {now}; {left}, {tail}. Of {DRAWS} draws {max(counts)} are the same token."
