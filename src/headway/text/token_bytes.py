"""From the decoder a tokenizer declares to the bytes each of its tokens stands for.

Text is the UTF-8 reading of the concatenated bytes of its tokens, so decoding token by token needs no look back.
Two ways of writing bytes as tokens cover what checkpoints ship:

* byte-level (GPT-2, Llama 3, Qwen, SmolLM): every byte is one printable character of the token;
* SentencePiece-like (Llama 2, Mistral, Gemma): U+2581 is a space, `<0x0A>` is a byte, the rest is itself, and one
  space at the very start of a text may be an artefact to strip.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from headway.core.errors import ModelFileError, shown

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenDecoder(msgspec.Struct, frozen=True):
    """How tokens of one tokenizer become bytes.

    Attributes:
        to_bytes: bytes of a token of the model's vocabulary.
        added: bytes of a token that is matched in text as it is: its own text, but for the sign for a space.
        strip: how many spaces to drop from the start of a whole text.
    """

    to_bytes: Callable[[str], bytes]
    added: Callable[[str], bytes]
    strip: int = 0


def byte_characters() -> dict[str, int]:
    """GPT-2's table: the printable character that stands for each byte.

    Printable bytes stand for themselves; the others, in order, are U+0100, U+0101, ...
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def token_decoder(spec: dict[str, Any] | None, where: str) -> TokenDecoder:
    """Read the `decoder` entry of a tokenizer.json.

    Args:
        spec: the entry; None if there is none.
        where: the file, for the error.

    Raises:
        ModelFileError: a step that gives tokens no bytes of their own (WordPiece, CTC, ...), or that looks across
            tokens; names it.
    """
    parts = spec.get("decoders") if spec and spec.get("type") == "Sequence" else [spec]
    if not isinstance(parts, list) or not all(part is None or isinstance(part, dict) for part in parts):
        raise ModelFileError(f"{where}: decoder {shown(spec)} is not a list of steps")
    kinds = [str(part.get("type")) if part else "none" for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level()
    steps: list[tuple[str, str] | None] = []
    strip, fused = 0, False
    for kind, part in zip(kinds, parts, strict=True):
        replaced = _replaced(kind, part)
        if replaced is not None and not fused:
            steps.append(replaced)
            strip += kind == "Metaspace" and part.get("prepend_scheme") != "never"
        elif kind == "ByteFallback" and not fused and None not in steps:
            steps.append(None)
        elif kind == "Strip" and fused and _leading_spaces(part):
            strip += part["start"]
        elif kind == "Fuse":
            fused = True
        else:
            order = (" after Fuse" if fused else " before Fuse") if kind in ("Replace", "Strip", "ByteFallback") else ""
            raise ModelFileError(
                f"{where}: decoder {shown(kind)[1:-1]}{order} is not supported; byte-level and SentencePiece ones are"
            )
    return _pieces(steps, strip)


def _replaced(kind: str, part: Any) -> tuple[str, str] | None:
    """What a step replaces by what in every token; None = it is no such step."""
    if kind == "Metaspace":
        pattern, content = part.get("replacement"), " "
    elif kind == "Replace" and isinstance(part.get("pattern"), dict):
        pattern, content = part["pattern"].get("String"), part.get("content")
    else:
        return None
    return (pattern, content) if pattern and isinstance(pattern, str) and isinstance(content, str) else None


def _leading_spaces(part: Any) -> bool:
    return part.get("content") == " " and part.get("stop") == 0 and type(part.get("start")) is int


def _byte_level() -> TokenDecoder:
    table = byte_characters()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([table[character] for character in token])
        except KeyError:  # not written in the byte alphabet: stands for itself
            return token.encode()

    return TokenDecoder(to_bytes, str.encode)


def _pieces(steps: list[tuple[str, str] | None], strip: int) -> TokenDecoder:
    """steps: what is replaced by what, in order; None = here a token that names a byte becomes it."""

    def to_bytes(token: str) -> bytes:
        for step in steps:
            if step is not None:
                token = token.replace(*step)
            elif byte := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(byte[1], 16)])
        return token.encode()

    return TokenDecoder(to_bytes, to_bytes, strip)
