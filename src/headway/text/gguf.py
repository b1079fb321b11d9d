"""A `tokenizers.Tokenizer` from the header of a GGUF file, equal token by token to the one it was made from."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from headway.core.errors import shown
from headway.text import gguf_pieces, gguf_words
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
    model = header.get("model", str)
    if model not in _KINDS:
        raise header.fault(
            f"tokenizer.ggml.model is {shown(model)}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    return _KINDS[model].build(header, cache)


def adds_bos(header: Header) -> bool:
    """Whether a plain text starts with bos, where the file does not say: as the original tokenizers of its kind do."""
    return _KINDS[header.get("model", str)].adds_bos(header)


def unused_ids(header: Header) -> frozenset[int]:
    """Ids that pad the vocabulary and stand for no text."""
    return frozenset(id for id, _, kind in header.marked if kind == UNUSED)


def end_ids(header: Header) -> tuple[int, ...]:
    """Ids that end a generation, known by their text."""
    return tuple(id for id, token, kind in header.marked if kind == CONTROL and token in _ENDS)
