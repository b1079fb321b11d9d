"""What a checkpoint says about its tokenizer, as the loaders hand it to `text`: data only, nothing parsed yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class TokenizerSource(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer of a checkpoint, unparsed.

    Attributes:
        kind: "hf" (a folder with tokenizer.json) or "gguf" (the header of a GGUF file).
        path: the folder (hf) or the file (gguf); for reading tokenizer.json, and for error messages.
        vocab_size: rows of the model's embedding. A tokenizer may name fewer tokens: see `Tokenizer.vocab_size`.
        metadata: hf: the whole of tokenizer_config.json ({} if there is none). gguf: every header key that starts
            with "tokenizer." (full key names): `tokenizer.ggml.model`, `.pre`, `.tokens` (list of str),
            `.token_type` (list of int), `.merges` (list of str "left right"), `.add_space_prefix`, ...
        chat_template: Jinja source of the default chat template; None if the checkpoint has none.
        bos_id: id put before a text; None if the checkpoint names none.
        eos_ids: ids that end a generation: those of generation_config.json and config.json, or the GGUF's eos, eot,
            eom and eos_token_ids; first = main one. `Tokenizer` adds those that only their text tells.
        add_bos: whether a plain (not templated) text starts with bos; None = not said (hf: tokenizer.json decides).
    """

    kind: str
    path: Path
    vocab_size: int
    metadata: dict[str, Any]
    chat_template: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None

    @property
    def tokenizer_json(self) -> Path:
        """The file tokenizer.json of an hf folder."""
        return self.path / "tokenizer.json"
