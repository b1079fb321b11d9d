"""SentencePiece's BPE (Llama 2, Mistral, Gemma, Phi 3) as a tokenizer of the library, from a GGUF header.

A text starts with a space unless `add_space_prefix` is false, spaces become U+2581, and the two neighbours that make
the piece of the highest score are joined as long as any two make one; what is no piece falls back to its bytes. The
library joins by a list of pairs, the first of it first: here all pairs that make a piece, by its score, as the
`tokenizer.json` files of these models list them (made by transformers' converter).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

from headway.text.gguf_header import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Header

_SPACE = "▁"
_MOST_BEGINNINGS = 64  # of a piece that are pieces too, in the mean; Llama 2's have 3
_BEFORE_ALL = 0.0  # score of added pieces, which the file gives none; the others' are below


def build(header: Header) -> Tokenizer:
    """Arguments and errors as of `headway.text.gguf.build`."""
    pieces = _pieces(header)
    vocab = {piece: id for id, piece in enumerate(pieces)}
    scores = _scores(header)
    try:
        merges = _merges(vocab, scores)
    except _TooMany:
        raise header.fault("tokenizer.ggml.tokens begin with one another more than those of any tokenizer do") from None
    id = header.token_id("unknown")
    unknown = pieces[id] if id is not None and id < len(pieces) else next(iter(header.of_type(UNKNOWN)), None)
    bytes_known = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if unknown is None and not bytes_known:
        raise header.fault("tokenizer.ggml.tokens has neither a token for each byte nor one for what is unknown")
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_known))
    prefix = header.optional("add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    known = [piece for piece, kind in zip(pieces, header.types, strict=True) if kind == USER_DEFINED]
    header.add_to(tokenizer, header.of_type(CONTROL, UNKNOWN), known)
    return tokenizer


def adds_bos(header: Header) -> bool:
    """Where the file does not say."""
    return True


def _pieces(header: Header) -> list[str]:
    """The tokens, runs of spaces among the added ones written as pieces write them: those are found by joining."""
    given = set(header.tokens)
    pieces = []
    for token, kind in zip(header.tokens, header.types, strict=True):
        piece = token.replace(" ", _SPACE) if kind == USER_DEFINED else token
        pieces.append(token if piece in given else piece)
    return pieces


def _scores(header: Header) -> list[float]:
    scores = header.get("scores", list)
    if len(scores) != len(header.tokens):
        raise header.fault(f"tokenizer.ggml.scores has {len(scores)} entries for {len(header.tokens)} tokens")
    if set(map(type, scores)) - {float} or not all(map(math.isfinite, scores)):
        raise header.fault("tokenizer.ggml.scores is not a list of numbers")
    added = (CONTROL, USER_DEFINED, UNKNOWN, BYTE)
    return [_BEFORE_ALL if kind in added else score for score, kind in zip(scores, header.types, strict=True)]


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, by its score; of equal ones, those of the longest left part first."""
    pairs = _pairs(vocab)
    merges: list[tuple[str, str]] = []
    by_score = sorted(pairs, key=lambda piece: (-scores[vocab[piece]], vocab[piece]))
    for _, equals in itertools.groupby(by_score, key=lambda piece: scores[vocab[piece]]):
        together = [pair for piece in equals for pair in pairs[piece]]
        merges += sorted(together, key=lambda pair: (-len(pair[0]), -len(pair[1]))) if len(together) > 1 else together
    return merges


class _TooMany(Exception):
    """Pairs: their number grows with the square of the tokens', and their size with its cube."""


def _pairs(vocab: Mapping[str, int]) -> dict[str, list[tuple[str, str]]]:
    """Piece -> the pairs of pieces that make it, where any do."""
    pairs = {}
    left_over = _MOST_BEGINNINGS * (len(vocab) + 64)
    beginnings: list[str] = []  # pieces that the one looked at starts with, shortest first
    for piece in sorted(vocab):
        while beginnings and not piece.startswith(beginnings[-1]):
            beginnings.pop()
        left_over -= len(beginnings)
        if left_over < 0:
            raise _TooMany
        if made := [(left, right) for left in beginnings if (right := piece[len(left) :]) in vocab]:
            pairs[piece] = made
        beginnings.append(piece)
    return pairs
