"""Text to token ids and back, for one checkpoint."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from headway.core.errors import BadInput, ModelFileError, shown
from headway.text import gguf
from headway.text.excerpt import Excerpts
from headway.text.gguf_header import Header
from headway.text.literal import Encoder, of_library
from headway.text.source import TokenizerSource
from headway.text.token_bytes import token_decoder

_SHORT_TEXT = 2048  # characters, for which an excerpt of the vocabulary is made ...
_SHORT_TEXTS = 1 << 14  # ... as long as they are no more than so many together
RERANK = "tokenizer.chat_template.rerank"  # of a GGUF: a text around {query} and {document}
_QUERY, _DOCUMENT = "\ue000", "\ue001"


class Tokenizer:
    """A checkpoint's tokenizer. Encoding may be called from several threads.

    Attributes:
        source: what the checkpoint says about it.
        vocab_size: every id is below: rows of the model's embedding, without those at the end that stand for no token.
        prefix: ids put in front of a plain text: bos, if anything.
        suffix: ids put behind a text that is complete.
        eos_ids: ids that end a generation, whichever of the checkpoint's files names them.
        special_ids: control tokens by their text, such as "<|im_end|>".
    """

    def __init__(self, source: TokenizerSource, aside: Executor | None = None, cache: Path | None = None) -> None:
        """Read tokenizer.json, or a GGUF header. What encoding needs is built of a header by `load`, or with the first
        long text, or when many short ones came: an excerpt does for those, and whoever only decodes waits for neither.

        Args:
            aside: threads that do the long part of encoding, which needs no Python; None = the caller's.
            cache: folder to keep in what takes long to work out, for the next start; None = nowhere.

        Raises:
            ModelFileError: the file is missing, damaged, or of an unsupported kind.
        """
        self.source = source
        self._aside = aside
        self._cache = cache
        self._header = Header(source) if source.kind == "gguf" else None
        self._building = threading.Lock()
        self._built: Encoder | None = None
        self._short = _SHORT_TEXTS
        if self._header is None:
            self._read, decoder = _read(source)
            self._built = Encoder(self._read, aside)
            added = self._read.get_added_tokens_decoder()
        else:
            decoder = msgspec.json.decode(gguf.decoder(self._header).__getstate__())
            added = gguf.added(self._header)
        self.prefix, self.suffix = self._hf_ends() if self._header is None else self._gguf_ends(self._header)
        unused = frozenset() if self._header is None else gguf.unused_ids(self._header)
        self.vocab_size = self._named(source.vocab_size, unused)
        if not self.vocab_size:
            raise ModelFileError(f"{source.path}: the tokenizer names none of the model's {source.vocab_size} tokens")
        self._decoder = token_decoder(decoder, str(source.path))
        self.special_ids = {token.content: number for number, token in added.items() if token.special}
        self._specials = frozenset(self.special_ids.values())
        self.eos_ids = self._end_ids()
        # Few, so that most texts are soon known to name none.
        self._special_starts = {name[:2] for name in self.special_ids}
        self._bytes = {number: self._decoder.added(token.content) for number, token in added.items()}
        self._bytes |= dict.fromkeys(unused, b"")
        self._noted: dict[bool, dict[int, str]] = {False: {}, True: {}}

    def load(self) -> None:
        """Build now what encoding any text needs.

        Raises:
            ModelFileError: the file's merges are damaged.
        """
        _ = self._whole().literal

    def _whole(self) -> Encoder:
        with self._building:
            if self._built is None:
                assert self._header is not None
                self._built = Encoder(gguf.build(self._header, self._cache), self._aside)
                self.__dict__.pop("_excerpts", None)
        return self._built

    @cached_property
    def _excerpts(self) -> Excerpts | None:
        return None if self._header is None else Excerpts(self._header, gguf.cutter(self._header))

    def _encoder(self, text: str) -> Encoder:
        """What encodes this text, names of control tokens in it read as such or not."""
        if self._built is None and len(text) <= _SHORT_TEXT and self._short >= 0 and self._excerpts is not None:
            self._short -= len(text)
            excerpt = self._excerpts.of(text)
            if excerpt is not None:
                header, ids = excerpt
                return Encoder(gguf.build(header, None), ids=ids)
        return self._whole()

    def _text(self, id: int) -> str | None:
        """How the vocabulary writes a token; None = it has no such."""
        if self._header is None:
            return self._read.id_to_token(id)
        return self._header.tokens[id] if id < len(self._header.tokens) else None

    def parting(self, other: Tokenizer) -> str | None:
        """Where another tokenizer has another token, in words; None if both have the same tokens by the same ids."""
        for id in range(min(self.vocab_size, other.vocab_size)):
            ours, theirs = self._text(id), other._text(id)
            if ours != theirs:
                return f"token {id} is {shown(theirs)} there and {shown(ours)} here"
        if self.vocab_size != other.vocab_size:
            return f"it has {other.vocab_size} tokens there and {self.vocab_size} here"
        return None

    def _named(self, rows: int, unused: Collection[int]) -> int:
        """Ids below `rows`, which is a claim, up to the last that stands for a token."""
        if self._header is not None:
            rows = min(rows, len(self._header.tokens))
        elif rows > self._read.get_vocab_size():
            rows = min(rows, 1 + max(self._read.get_vocab().values(), default=-1))
        while rows and (rows - 1 in unused or self._text(rows - 1) is None):
            rows -= 1
        return rows

    def _gguf_ends(self, header: Header) -> tuple[list[int], list[int]]:
        bos, stated = self.source.bos_id, self.source.add_bos
        adds_eos = self.source.metadata.get("tokenizer.ggml.add_eos_token") is True
        prefix = [bos] if bos is not None and (gguf.adds_bos(header) if stated is None else stated) else []
        return prefix, list(self.source.eos_ids[:1]) if adds_eos else []

    def _hf_ends(self) -> tuple[list[int], list[int]]:
        """What the post-processor of tokenizer.json puts before and behind a text; if that is nothing, bos and eos
        where tokenizer_config.json says `add_bos_token`, `add_eos_token`."""
        marked = self._probe("a")
        before = [id for id, _ in itertools.takewhile(lambda pair: pair[1], marked)]
        behind = [id for id, _ in itertools.takewhile(lambda pair: pair[1], reversed(marked))][::-1]
        return before or self._stated_end("bos", self.source.bos_id), behind or self._stated_end("eos", None)

    def _stated_end(self, which: str, known: int | None) -> list[int]:
        if self.source.metadata.get(f"add_{which}_token") is not True:
            return []
        named = self.template_tokens().get(f"{which}_token")
        id = known if named is None else self._read.token_to_id(named)
        return [] if id is None else [id]

    def _probe(self, text: str, pair: str | None = None) -> list[tuple[int, int]]:
        """(id, whether the post-processor put it there) of a text, or of two."""
        try:
            probe = self._read.encode(text, pair)
        except BaseException as error:
            if not of_library(error):
                raise
            raise ModelFileError(f"{self.source.tokenizer_json}: cannot encode ({_first_line(error)})") from None
        return list(zip(probe.ids, probe.special_tokens_mask, strict=True))

    def _end_ids(self) -> tuple[int, ...]:
        """The source's, the `eos_token` of tokenizer_config.json, and those of a GGUF that their text tells."""
        if self._header is not None:
            more = gguf.end_ids(self._header)
        else:
            text = self.template_tokens().get("eos_token")
            id = None if text is None else self._read.token_to_id(text)
            more = () if id is None else (id,)
        return tuple(dict.fromkeys((*self.source.eos_ids, *(id for id in more if id < self.vocab_size))))

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: put `prefix` before a plain text, unless it names bos itself; off for the output of a chat
                template, which writes its own.
            allow_special: read "<|im_end|>" and the like as control tokens; off for text that must stay plain text.

        Raises:
            BadInput: the text names a control token of the tokenizer that the model has no embedding for, or is not
                Unicode: half of a surrogate pair, which is how Python holds bytes that it cannot read.
        """
        encoder = self._encoder(text)
        ids = encoder.encode(text) if allow_special else encoder.encode_literal(text)
        if add_special and (not self.prefix or ids[:1] != self.prefix[-1:]):
            ids = self.prefix + ids
        return self._embedded(ids)

    def encode_whole(self, *texts: str) -> list[int]:
        """Token ids of a text that is complete, as models read it that answer with a vector; or of two texts, in which
        nothing is read as a control token, as models read them that answer with a score. Errors as of `encode`."""
        if len(texts) == 1:
            return self.encode(texts[0]) + self.suffix
        template = self.source.metadata.get(RERANK)
        if isinstance(template, str) and "{query}" in template and "{document}" in template:
            text = template.replace("{query}", _QUERY, 1).replace("{document}", _DOCUMENT, 1)
            return self.encode_around(text, dict(zip((_QUERY, _DOCUMENT), texts, strict=True)))
        parts = [self.encode(text, add_special=False, allow_special=False) for text in texts]
        if self._header is not None:
            return [*self.prefix, *itertools.chain(*parts), *self.suffix]
        inner = self._probe("a", "a")[len(self.prefix) :]
        between = [id for id, added in inner[: len(inner) - len(self.suffix)] if added]
        return [*self.prefix, *parts[0], *between, *parts[1], *self.suffix]

    def special_named(self, texts: Iterable[str]) -> list[str]:
        """The control tokens that any of `texts` names, the longest first."""
        found: set[str] = set()
        for text in texts:
            if any(start[0] in text and start in text for start in self._special_starts):
                found |= {name for name in self.special_ids if name in text}
        return sorted(found, key=len, reverse=True)

    def encode_around(self, text: str, plain: Mapping[str, str]) -> list[int]:
        """Token ids of a chat template's text in which control tokens are such, but for the characters in `plain`:
        each stands for a text that is only text, whatever it looks like.

        Raises:
            BadInput: as `encode`.
        """
        said = text
        for character, words in plain.items():
            said = said.replace(character, words)
        return self._embedded(self._encoder(said).encode_around(text, plain))

    def _embedded(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self.vocab_size:
            raise BadInput("prompt", f"the model has no embedding for {shown(self._text(max(ids)))}")
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """The text that `ids` stand for; bytes that are not UTF-8 become U+FFFD.

        Args:
            skip_special: leave control tokens out.
            at_start: the ids start a text, so the space that SentencePiece-like tokenizers put there is dropped.
        """
        text = b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids).decode(errors="replace")
        strip = self._decoder.strip if at_start else 0
        return text[min(strip, len(text) - len(text.lstrip(" "))) :]

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """The bytes one id stands for: perhaps part of a character. Ids that pad the vocabulary stand for none."""
        if skip_special and token in self._specials:
            return b""
        known = self._bytes.get(token)
        if known is None:
            text = self._text(token) if 0 <= token < self.vocab_size else None
            known = b"" if text is None else self._decoder.to_bytes(text)
            self._bytes[token] = known
        return known

    def whole_texts(self, skip_special: bool) -> dict[int, str]:
        """Texts of ids that stand for whole characters, as far as somebody noted them."""
        return self._noted[skip_special]

    def longest(self) -> int:
        """Bytes of the longest token."""
        if self._header is None:
            tokens = [(id, text) for text, id in self._read.get_vocab().items() if id < self.vocab_size]
        else:
            tokens = list(enumerate(self._header.tokens[: self.vocab_size]))
        longest = 0
        for id, text in tokens:
            # A character has four bytes at most, and no way of writing bytes is shorter than they are.
            if 4 * len(text) > longest and len(text.encode()) > longest:
                longest = max(longest, len(self.token_bytes(id, skip_special=False)))
        return longest

    def template_tokens(self) -> dict[str, str]:
        """What a chat template may write by name: bos_token, eos_token, pad_token, unk_token, where there are any."""
        names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        find = self._hf_token if self._header is None else self._gguf_token
        return {name: text for name, kind in names.items() if (text := find(name, kind)) is not None}

    def _gguf_token(self, name: str, kind: str) -> str | None:
        id = None if self._header is None else self._header.token_id(kind)
        return None if id is None else self._text(id)

    def _hf_token(self, name: str, kind: str) -> str | None:
        """In tokenizer_config.json a token is its text, or an object with it."""
        entry = self.source.metadata.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if entry is not None and not isinstance(text, str):
            where = self.source.path / "tokenizer_config.json"
            raise ModelFileError(f"{where}: {name}: {shown(entry)} is neither a text nor an object with its content")
        return text

    def strip_after(self, prompt: Sequence[int]) -> int:
        """How many spaces at the start of what follows `prompt` are not part of the text: those that SentencePiece-like
        tokenizers put there, unless the prompt has text already."""
        return 0 if any(self.token_bytes(token) for token in prompt) else self._decoder.strip


class _Described(msgspec.Struct):
    """The part of a tokenizer.json that is looked at here."""

    decoder: dict[str, Any] | None = None


def _read(source: TokenizerSource) -> tuple[tokenizers.Tokenizer, dict[str, Any] | None]:
    """The tokenizer of a folder, and its decoder as described in the file."""
    path = source.tokenizer_json
    try:
        data = path.read_bytes()
        decoder = msgspec.json.decode(data, type=_Described).decoder
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:
        if not of_library(error):
            raise
        raise ModelFileError(f"{path}: not a readable tokenizer ({_first_line(error)})") from None
    tokenizer.no_truncation()  # settings of somebody's training run, saved along
    tokenizer.no_padding()
    return tokenizer, decoder


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
