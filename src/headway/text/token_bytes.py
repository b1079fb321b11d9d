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

from headway.core.errors import ModelFileError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenDecoder(msgspec.Struct, frozen=True):
    """How tokens of one tokenizer become bytes.

    Attributes:
        to_bytes: bytes of a token of the model's vocabulary (added tokens stand for their own text).
        strip: how many spaces to drop from the start of a whole text.
    """

    to_bytes: Callable[[str], bytes]
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
        ModelFileError: a decoder that has no bytes per token (WordPiece, CTC, ...).
    """
    parts = spec["decoders"] if spec and spec["type"] == "Sequence" else [spec]
    kinds = [part["type"] if part else None for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level()
    replaced: list[tuple[str, str]] = []
    fallback, strip = False, 0
    for kind, part in zip(kinds, parts, strict=True):
        if kind == "Replace" and "String" in part["pattern"]:
            replaced.append((part["pattern"]["String"], part["content"]))
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Strip" and part["content"] == " " and part["stop"] == 0:
            strip = part["start"]
        elif kind == "Metaspace":
            replaced.append((part["replacement"], " "))
            strip = 0 if part.get("prepend_scheme") == "never" else 1
        elif kind != "Fuse":
            raise ModelFileError(
                f"{where}: decoder {kind or 'none'} is not supported; byte-level and SentencePiece ones are"
            )
    return _pieces(replaced, fallback, strip)


def _byte_level() -> TokenDecoder:
    table = byte_characters()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([table[character] for character in token])
        except KeyError:  # not written in the byte alphabet: stands for itself
            return token.encode()

    return TokenDecoder(to_bytes)


def _pieces(replaced: list[tuple[str, str]], fallback: bool, strip: int) -> TokenDecoder:
    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        for pattern, content in replaced:
            token = token.replace(pattern, content)
        return token.encode()

    return TokenDecoder(to_bytes, strip)
