"""A `tokenizers.Tokenizer` from the header of a GGUF file, equal token by token to the one it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Decoder

from headway.core.errors import shown
from headway.text import gguf_pieces, gguf_words
from headway.text.excerpt import Cutter
from headway.text.gguf_header import CONTROL, UNUSED, Header

_KINDS = {"gpt2": gguf_words, "llama": gguf_pieces}  # tokenizer.ggml.model

# Control tokens that end a turn or a text in every model that has them. Files often name only one of theirs.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|return|>",
    "<|call|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip


def build(header: Header, cache: Path | None) -> Tokenizer:
    """The tokenizer that a GGUF header describes, without a rule for bos (that is `Tokenizer`'s).

    Args:
        cache: folder to keep merges in that the header only implies; None = nowhere.

    Raises:
        ModelFileError: a key is missing, of the wrong type or length, or names something unknown.
    """
    tokenizer = _kind(header).build(header, cache)
    tokens = added(header).values()
    tokenizer.add_special_tokens([token for token in tokens if token.special])
    tokenizer.add_tokens([token for token in tokens if not token.special])
    return tokenizer


def cutter(header: Header) -> Cutter:
    """What cuts headers for single texts out of this one. Raises as `build`."""
    return _kind(header).Cutter(header)


def decoder(header: Header) -> Decoder:
    """How the tokens of its vocabulary become text."""
    return _kind(header).decoder(header)


def added(header: Header) -> dict[int, AddedToken]:
    """Control tokens, and words that are never split, by id."""
    return _kind(header).added(header)


def adds_bos(header: Header) -> bool:
    """Whether a plain text starts with bos, where the file does not say: as the original tokenizers of its kind do."""
    return _kind(header).adds_bos(header)


def _kind(header: Header) -> Any:
    model = header.get("model", str)
    if model not in _KINDS:
        raise header.fault(
            f"tokenizer.ggml.model is {shown(model)}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    return _KINDS[model]


def unused_ids(header: Header) -> frozenset[int]:
    """Ids that pad the vocabulary and stand for no text."""
    return frozenset(id for id, _, kind in header.marked if kind == UNUSED)


def end_ids(header: Header) -> tuple[int, ...]:
    """Ids that end a generation, known by their text."""
    return tuple(id for id, token, kind in header.marked if kind == CONTROL and token in _ENDS)
