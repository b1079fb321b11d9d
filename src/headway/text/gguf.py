"""A `tokenizers.Tokenizer` from the header of a GGUF file, equal token by token to the one it was made from."""

from __future__ import annotations

from tokenizers import Tokenizer

from headway.core.errors import shown
from headway.text import gguf_pieces, gguf_words
from headway.text.gguf_header import CONTROL, UNUSED, Header
from headway.text.source import TokenizerSource

_KINDS = {"gpt2": gguf_words, "llama": gguf_pieces}  # tokenizer.ggml.model

# Control tokens that end a turn or a text in every model that has them. Files often name only one of theirs.
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|return|>",
    "<|call|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip


def build(source: TokenizerSource) -> Tokenizer:
    """The tokenizer that a GGUF header describes, without a rule for bos (that is `Tokenizer`'s).

    Raises:
        ModelFileError: a key is missing, of the wrong type or length, or names something unknown.
    """
    header = Header(source)
    model = header.get("model", str)
    if model not in _KINDS:
        raise header.fault(
            f"tokenizer.ggml.model is {shown(model)}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    return _KINDS[model].build(header)


def adds_bos(source: TokenizerSource) -> bool:
    """Whether a plain text starts with bos: as the header says, else as the original tokenizers of its kind do."""
    if source.add_bos is not None:
        return source.add_bos
    header = Header(source)
    return _KINDS[header.get("model", str)].adds_bos(header)


def unused_ids(source: TokenizerSource) -> frozenset[int]:
    """Ids that pad the vocabulary and stand for no text."""
    return frozenset(id for id, kind in enumerate(Header(source).types) if kind == UNUSED)


def end_ids(source: TokenizerSource) -> tuple[int, ...]:
    """Ids that end a generation, known by their text."""
    header = Header(source)
    control = {token for token in header.of_type(CONTROL) if token in _ENDS}
    return tuple(id for id, token in enumerate(header.tokens) if token in control)
