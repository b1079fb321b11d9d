"""GPT-2-style (byte-level) BPE as a tokenizer of the library, from a GGUF header.

GGUF names the rule that cuts text into words before merging (`tokenizer.ggml.pre`) instead of storing it; the wrong
rule gives plausible, wrong tokens, so an unknown name is refused. Rules are those of the original tokenizers:
GPT-2 (Radford et al. 2019), SmolLM and StarCoder (digits one by one), Falcon, DeepSeek, Llama 3, Qwen2, Mistral Nemo,
GPT-4o. Families share them: OLMo 2 and Phi 4 have dbrx's, Granite 3 refact's, SmolLM3 smaug's, gpt-oss GPT-4o's.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headway.core.errors import shown
from headway.text.gguf_header import CONTROL, Header
from headway.text.token_bytes import byte_characters

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


# DeepSeek. The first generation's tell letters of alphabets with cases from others by listing them.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "\U00010400-\U0001044f𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN = "[一-龥ࠀ-一가-\ud7ff]+"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_3 = (
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)

Step = pre_tokenizers.PreTokenizer


def _cut(pattern: str) -> Step:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _digits() -> Step:
    return pre_tokenizers.Digits(individual_digits=True)


def _bytes(gpt2_rule: bool = False) -> Step:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_rule)


class _Rule(NamedTuple):
    """steps: how text is cut into words. whole: words in the vocabulary skip the merges. nfc: characters are composed
    first. bos: a plain text starts with it."""

    steps: Callable[[], list[Step]]
    whole: bool = False
    nfc: bool = False
    bos: bool = False


_LLAMA_3_RULE = _Rule(lambda: [_cut(_LLAMA3), _bytes()], whole=True, bos=True)
_CL100K_RULE = _Rule(lambda: [_cut(_LLAMA3), _bytes()])
_QWEN_RULE = _Rule(lambda: [_cut(_QWEN2), _bytes()])
_GPT2_RULE = _Rule(lambda: [_bytes(gpt2_rule=True)])
_DIGITS_RULE = _Rule(lambda: [_digits(), _bytes(gpt2_rule=True)])
_GPT4O_RULE = _Rule(lambda: [_cut(_GPT4O), _bytes()], whole=True)
_PRE = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2_RULE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS_RULE),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA_3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K_RULE),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), _QWEN_RULE),
    "qwen2": _QWEN_RULE._replace(nfc=True),
    "tekken": _Rule(lambda: [_cut(_TEKKEN), _bytes()], whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O_RULE),
    "falcon": _Rule(lambda: [
        pre_tokenizers.Punctuation("contiguous"), _bytes(gpt2_rule=True), pre_tokenizers.Digits(False),
        _cut("[0-9][0-9][0-9]"),
    ]),
    "deepseek-llm": _Rule(lambda: [
        _cut(r"[\r\n]"), _cut(rf"\s?[{_CASED_LETTERS}]+"), _cut(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), _cut(r"\s+$"),
        _cut(_HAN), _digits(), _bytes(),
    ]),
    "deepseek-coder": _Rule(lambda: [
        _cut(r"[\r\n]"), _cut(r"\s?\p{L}+"), _cut(r"\s?\p{P}+"), _cut(_HAN), _digits(), _bytes(),
    ]),
    "deepseek-v3": _Rule(lambda: [
        _cut(r"\p{N}{1,3}"), _cut("[一-龥\u3040-ゟ゠-ヿ]+"), _cut(_DEEPSEEK_3), _bytes(),
    ]),
}  # fmt: skip


def build(header: Header, cache: Path | None) -> Tokenizer:
    """Arguments and errors as of `headway.text.gguf.build`."""
    rule = _rule(header)
    vocab = {token: id for id, token in enumerate(header.tokens)}
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in header.strings("merges"))]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole))
    except Exception as error:  # the library raises plain Exception for a merge that does not join two tokens
        raise _misfit(header, str(error)[:200]) from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rule.steps())
    tokenizer.decoder = decoder(header)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


class Cutter:
    """As of `headway.text.excerpt.Cutter`."""

    always: Collection[int] = ()
    lead = ""

    def __init__(self, header: Header) -> None:
        self.pieces: Sequence[str] = header.tokens
        self._composed = _rule(header).nfc
        known = set(self.pieces)
        self._ranks = {line: rank for rank, line in enumerate(header.strings("merges"))}
        for line in self._ranks:
            left, _, right = line.partition(" ")
            if left not in known or right not in known or left + right not in known:
                raise _misfit(header, shown(line))
        self._letters = {byte: letter for letter, byte in byte_characters().items()}

    def written(self, text: str) -> str | None:
        if self._composed and not unicodedata.is_normalized("NFC", text):
            return None  # what is composed with what depends on where control tokens cut the text
        return "".join(map(self._letters.__getitem__, text.encode(errors="surrogatepass")))

    def keys(self, ids: Mapping[int, int]) -> dict[str, Any]:
        found = {
            line: rank
            for piece in map(self.pieces.__getitem__, ids)
            for cut in range(1, len(piece))
            if (rank := self._ranks.get(line := f"{piece[:cut]} {piece[cut:]}")) is not None
        }
        return {"merges": sorted(found, key=found.__getitem__)}


def _misfit(header: Header, problem: str) -> Exception:
    return header.fault(f"tokenizer.ggml.merges does not fit the tokens: {problem}")


def decoder(header: Header) -> decoders.Decoder:
    """As of `headway.text.gguf.decoder`."""
    return decoders.ByteLevel()


def added(header: Header) -> dict[int, AddedToken]:
    """As of `headway.text.gguf.added`."""
    return header.added(header.tokens.__getitem__, special=(CONTROL,))


def adds_bos(header: Header) -> bool:
    """Where the file does not say."""
    return _rule(header).bos


def _rule(header: Header) -> _Rule:
    pre = header.get("pre", str)
    if pre not in _PRE:
        raise header.fault(f"tokenizer.ggml.pre is {shown(pre)}; supported are {', '.join(sorted(_PRE))}")
    return _PRE[pre]
