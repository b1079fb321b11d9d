"""SentencePiece's BPE (Llama 2, Mistral, Gemma, Phi 3) as a tokenizer of the library, from a GGUF header.

A text starts with a space unless `add_space_prefix` is false, spaces become U+2581, and the two neighbours that make
the piece of the highest score are joined as long as any two make one; what is no piece falls back to its bytes. The
library joins by a list of pairs, the first of it first: here all pairs that make a piece, by its score, as the
`tokenizer.json` files of these models list them (made by transformers' converter).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from headway.text.gguf_header import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Header
from headway.text.merge_cache import kept

_SPACE = "▁"
_MOST_BEGINNINGS = 64  # of a piece that are pieces too, in the mean; Llama 2's have 3
_BEFORE_ALL = 0.0  # score of added pieces, which the file gives none; the others' are below


def build(header: Header, cache: Path | None) -> Tokenizer:
    """Arguments and errors as of `headway.text.gguf.build`."""
    pieces = _pieces(header)
    vocab = {piece: id for id, piece in enumerate(pieces)}
    scores = _scores(header)
    try:
        left, right = kept(cache, pieces, scores, partial(merge_pairs, vocab, scores)).T.tolist()
    except TooMany:
        raise header.fault("tokenizer.ggml.tokens begin with one another more than those of any tokenizer do") from None
    merges = list(zip(map(pieces.__getitem__, left), map(pieces.__getitem__, right), strict=True))
    id = header.token_id("unknown")
    unknown = pieces[id] if id is not None and id < len(pieces) else next(iter(header.of_type(UNKNOWN)), None)
    bytes_known = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if unknown is None and not bytes_known:
        raise header.fault("tokenizer.ggml.tokens has neither a token for each byte nor one for what is unknown")
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_known))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if _prefix(header) else spaces
    tokenizer.decoder = decoder(header)
    return tokenizer


class Cutter:
    """As of `headway.text.excerpt.Cutter`."""

    def __init__(self, header: Header) -> None:
        self.pieces: Sequence[str] = _pieces(header)
        self.lead = _SPACE if _prefix(header) else ""
        self._scores = _scores(header)
        self._unknown = header.token_id("unknown")
        self.always = [id for id, _, kind in header.marked if kind in (UNKNOWN, BYTE)]
        if self._unknown is not None and self._unknown < len(self.pieces):
            self.always.append(self._unknown)

    def written(self, text: str) -> str | None:
        return text.replace(" ", _SPACE)

    def keys(self, ids: Mapping[int, int]) -> dict[str, Any]:
        return {
            "tokens": [self.pieces[id] for id in ids],
            "scores": [self._scores[id] for id in ids],
            "unknown_token_id": None if self._unknown is None else ids.get(self._unknown),
        }


def decoder(header: Header) -> decoders.Decoder:
    """As of `headway.text.gguf.decoder`."""
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if _prefix(header) else steps)


def _prefix(header: Header) -> bool:
    return header.optional("add_space_prefix", bool, True)


def added(header: Header) -> dict[int, AddedToken]:
    """As of `headway.text.gguf.added`."""
    pieces = _pieces(header)
    return header.added(lambda id: pieces[id], special=(CONTROL, UNKNOWN))


def adds_bos(header: Header) -> bool:
    """Where the file does not say."""
    return True


def _pieces(header: Header) -> list[str]:
    """The tokens, runs of spaces among the added ones written as pieces write them: those are found by joining."""
    pieces = list(header.tokens)
    given = set(pieces)
    for id, token, kind in header.marked:
        if kind == USER_DEFINED and (piece := token.replace(" ", _SPACE)) not in given:
            pieces[id] = piece
    return pieces


def _scores(header: Header) -> list[float]:
    scores = header.get("scores", list)
    if len(scores) != len(header.tokens):
        raise header.fault(f"tokenizer.ggml.scores has {len(scores)} entries for {len(header.tokens)} tokens")
    if set(map(type, scores)) - {float} or not all(map(math.isfinite, scores)):
        raise header.fault("tokenizer.ggml.scores is not a list of numbers")
    scores = list(scores)
    for id, _, kind in header.marked:
        if kind in (CONTROL, USER_DEFINED, UNKNOWN, BYTE):
            scores[id] = _BEFORE_ALL
    return scores


class TooMany(Exception):
    """Pairs: their number grows with the square of the tokens', and their size with its cube."""


def merge_pairs(vocab: Mapping[str, int], scores: Sequence[float]) -> np.ndarray:
    """Ids of all pairs of pieces that make a piece, by its score: int32 [merges, 2]. Of equal ones, those of the
    longest left part first, then of the longest right part, then of the first piece.

    Raises:
        TooMany: pieces begin with one another without end.
    """
    lefts: list[int] = []
    rights: list[int] = []
    made: list[int] = []
    left_over = _MOST_BEGINNINGS * (len(vocab) + 1024)  # few may all begin with one another: a run of spaces
    beginnings: list[tuple[str, int, int]] = []  # pieces that the one looked at starts with: itself, length, id
    for piece in sorted(vocab):
        while beginnings and not piece.startswith(beginnings[-1][0]):
            beginnings.pop()
        left_over -= len(beginnings)
        if left_over < 0:
            raise TooMany
        id = vocab[piece]
        for _, length, left in beginnings:
            right = vocab.get(piece[length:])
            if right is not None:
                lefts.append(left)
                rights.append(right)
                made.append(id)
        beginnings.append((piece, len(piece), id))
    pairs, whole = np.array([lefts, rights], np.int32), np.array(made, np.int32)
    lengths = np.zeros(len(scores), np.int32)
    lengths[list(vocab.values())] = [len(piece) for piece in vocab]
    left, right = lengths[pairs]
    return pairs.T[np.lexsort((whole, -right, -left, -np.array(scores)[whole]))]
