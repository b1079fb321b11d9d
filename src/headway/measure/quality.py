"""What rounding a model's weights and cache costs, token by token of a text: KL divergence to the same model computed
without it, perplexity of both, and the places where they differ most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.model.load import Model, load
from headway.model.source import DEFAULT_MODEL, Progress
from headway.ops.protocol import Backend, CacheLayout, StepBatch
from headway.text.tokenizer import Tokenizer

BLOCK = 32
CHUNK = 128  # tokens computed at once
MOST_LOGITS = 1 << 23  # of a chunk, so that a wide vocabulary does not fill the memory
AROUND = 12  # tokens of the text shown before a position


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """One token of the text, and what the two computations say should come there.

    Attributes:
        index: of the token in the text. before: the text that leads to it. token: its own text.
        kl: divergence of the distributions for it, in nats.
        probability, reference_probability: of the token. likeliest, reference_likeliest: what would be chosen.
    """

    index: int
    before: str
    token: str
    kl: float
    probability: float
    reference_probability: float
    likeliest: str
    reference_likeliest: str


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """A model under test beside its reference, over one text.

    Attributes:
        tokens: that were predicted: all but the first of each window.
        perplexity, reference_perplexity: exp of the mean negative log-probability of the text's tokens.
        kl_mean, kl_p99, kl_p999, kl_most: KL(reference, tested) per token, in nats.
        top1: share of tokens at which both would choose the same.
        weight_bytes, kv_bytes_per_token: what the tested model takes.
        worst: the positions of largest divergence, the worst first.
        kl: of every predicted token, in the order of the text.
    """

    model: str
    tested: str
    reference: str
    tokens: int
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_p99: float
    kl_p999: float
    kl_most: float
    top1: float
    weight_bytes: int
    kv_bytes_per_token: float
    worst: list[Position]
    kl: list[float]


class Scored:
    """A loaded model that says the logits of a text, chunk after chunk.

    Args:
        model: prepared on `backend`, whose cache is allocated here.
        window: most tokens of context.
    """

    def __init__(self, model: Model, backend: Backend, window: int) -> None:
        groups = model.shape.groups
        self.model = model
        self._blocks = -(-window // BLOCK)
        backend.allocate(CacheLayout(groups, (self._blocks,) * len(groups), BLOCK))
        self._program = backend.compile(model.forward)

    def logits(self, ids: Sequence[int], first: int) -> np.ndarray:
        """float32 [len(ids), vocab] of ids at positions from `first` on, whose predecessors have been computed."""
        return self._program.run(StepBatch.alone(ids, first, self._blocks, len(self.model.shape.groups))).rows


def quality(
    source: str | None,
    tested: Backend,
    reference: Backend,
    text: str,
    *,
    window: int = 1024,
    tokens: int | None = None,
    worst: int = 20,
    report: Progress = lambda what, done, total: None,
) -> Quality:
    """Read the text through both, in windows of so many tokens, and compare the distributions for every token.

    Args:
        tested, reference: backends without a model.
        tokens: of the text that are read at most; None = all.
        worst: positions that are named.

    Raises:
        BadInput: the text is too short.
        ModelFileError: the model cannot be read.
    """
    report("loading the model", 0, None)
    models = [load(source or DEFAULT_MODEL, backend) for backend in (tested, reference)]
    tokenizer = Tokenizer(models[0].info.tokenizer)
    ids = tokenizer.encode(text)[:tokens]
    window = min(window, models[0].info.context_length)
    if len(ids) < 2 or window < 2:
        raise BadInput("--text", f"{len(ids)} tokens in windows of {window}; at least 2 are needed to predict one")
    mine, theirs = (Scored(*pair, window) for pair in zip(models, (tested, reference), strict=True))
    read = []
    for start, first, end in _chunks(len(ids), window, models[0].shape.vocab):
        report("reading the text", end, len(ids))
        logits = [one.logits(ids[first:end], first - start) for one in (mine, theirs)]
        targets = np.array(ids[first + 1 : end + 1])
        read.append(_Read.of(first + 1, targets, *logits))
    kl = np.concatenate([one.kl for one in read])
    p99, p999 = np.percentile(kl, [99, 99.9])
    found = [one.position(i, tokenizer, ids) for one in read for i in np.argsort(-one.kl)[:worst]]
    return Quality(
        model=models[0].info.name,
        tested=_named(models[0], tested),
        reference=_named(models[1], reference),
        tokens=len(kl),
        perplexity=float(np.exp(-np.concatenate([one.given[0] for one in read]).mean())),
        reference_perplexity=float(np.exp(-np.concatenate([one.given[1] for one in read]).mean())),
        kl_mean=float(kl.mean()),
        kl_p99=float(p99),
        kl_p999=float(p999),
        kl_most=float(kl.max()),
        top1=float(np.concatenate([one.chosen[0] == one.chosen[1] for one in read]).mean()),
        weight_bytes=tested.weight_bytes,
        kv_bytes_per_token=sum(tested.block_bytes(group, BLOCK) for group in models[0].shape.groups) / BLOCK,
        worst=sorted(found, key=lambda one: -one.kl)[:worst],
        kl=kl.tolist(),
    )


@dataclass(frozen=True)
class _Read:
    """Some neighbouring tokens as both computations saw them; pairs are (tested, reference).

    Attributes:
        first: index of the first of them in the text.
        kl: [n]. given: log-probabilities [n] of the tokens. chosen: the likeliest tokens [n].
    """

    first: int
    kl: np.ndarray
    given: tuple[np.ndarray, np.ndarray]
    chosen: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, first: int, targets: np.ndarray, tested: np.ndarray, reference: np.ndarray) -> Self:
        """Logits [n, vocab] -> their comparison for the n tokens that came."""
        mine, theirs = _log_softmax(tested), _log_softmax(reference)
        kl = (np.exp(theirs) * (theirs - mine)).sum(axis=-1)
        at = np.arange(len(targets))
        return cls(first, kl, (mine[at, targets], theirs[at, targets]), (mine.argmax(-1), theirs.argmax(-1)))

    def position(self, i: int, tokenizer: Tokenizer, ids: Sequence[int]) -> Position:
        index = self.first + int(i)
        likeliest = [tokenizer.decode([int(chosen[i])], skip_special=False) for chosen in self.chosen]
        return Position(
            index=index,
            before=tokenizer.decode(ids[max(0, index - AROUND) : index], skip_special=False),
            token=tokenizer.decode([ids[index]], skip_special=False),
            kl=float(self.kl[i]),
            probability=float(np.exp(self.given[0][i])),
            reference_probability=float(np.exp(self.given[1][i])),
            likeliest=likeliest[0],
            reference_likeliest=likeliest[1],
        )


def _chunks(tokens: int, window: int, vocab: int) -> Iterator[tuple[int, int, int]]:
    """(start of the window, first, end): the last token of a window predicts nothing."""
    size = max(1, min(CHUNK, MOST_LOGITS // vocab))
    for start in range(0, tokens - 1, window):
        last = min(start + window, tokens) - 1
        for first in range(start, last, size):
            yield start, first, min(first + size, last)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _named(model: Model, backend: Backend) -> str:
    return f"{backend.name}: weights {backend.held_as(model.shape.weight_format)}, cache {backend.kv_format}"
