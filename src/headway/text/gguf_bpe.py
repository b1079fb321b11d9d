"""A `tokenizers.Tokenizer` from the header of a GGUF file that carries a GPT-2-style (byte-level) BPE.

GGUF names the rule that cuts text into words before merging (`tokenizer.ggml.pre`) instead of storing it; the wrong
rule gives plausible, wrong tokens, so an unknown name is refused. Rules are those of the original tokenizers:
GPT-2 (Radford et al. 2019), SmolLM and StarCoder (digits one by one), Llama 3, Qwen2, Mistral Nemo, GPT-4o.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headway.core.errors import ModelFileError, shown
from headway.text.source import TokenizerSource

DECODER = {"type": "ByteLevel"}

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type

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


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")

# Name -> (rule, whole words in the vocabulary skip the merges, Unicode NFC first).
_PRE = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_gpt2, False, False)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_digits, False, False)),
    **dict.fromkeys(_LLAMA3_NAMES, (lambda: _split(_LLAMA3), True, False)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (lambda: _split(_LLAMA3), False, False)),
    "qwen2": (lambda: _split(_QWEN2), False, True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), (lambda: _split(_QWEN2), False, False)),
    "tekken": (lambda: _split(_TEKKEN), True, False),
    **dict.fromkeys(("gpt-4o", "llama4"), (lambda: _split(_GPT4O), False, False)),
}


def build(source: TokenizerSource) -> Tokenizer:
    """The tokenizer that a GGUF header describes, without a rule for bos (that is `Tokenizer`'s).

    Raises:
        ModelFileError: a key is missing, of the wrong type or length, or names something unknown.
    """
    model = _get(source, "model", str)
    if model != "gpt2":
        _fail(source, f"tokenizer.ggml.model is {shown(model)}; only 'gpt2' (byte-level BPE) is supported")
    pre = _get(source, "pre", str)
    if pre not in _PRE:
        _fail(source, f"tokenizer.ggml.pre is {shown(pre)}; supported are {', '.join(sorted(_PRE))}")
    rule, ignore_merges, nfc = _PRE[pre]

    tokens, types = _strings(source, "tokens"), _get(source, "token_type", list)
    if len(types) != len(tokens):
        _fail(source, f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        _fail(source, "tokenizer.ggml.tokens names a token twice")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in _strings(source, "merges"))]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises plain Exception for a merge that does not join two tokens
        _fail(source, f"tokenizer.ggml.merges does not fit the tokens: {str(error)[:200]}")
    tokenizer.pre_tokenizer = rule()
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    return tokenizer


def adds_bos(source: TokenizerSource) -> bool:
    """Whether a plain text starts with bos: as the header says, else as Llama 3 does and the others do not."""
    return source.metadata["tokenizer.ggml.pre"] in _LLAMA3_NAMES if source.add_bos is None else source.add_bos


def unused_ids(source: TokenizerSource) -> frozenset[int]:
    """Ids that pad the vocabulary and stand for no text."""
    return frozenset(number for number, kind in enumerate(_get(source, "token_type", list)) if kind == _UNUSED)


def _added(tokens: Sequence[str], types: Sequence[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, its_kind in zip(tokens, types, strict=True)
        if its_kind == kind
    ]


def _strings(source: TokenizerSource, key: str) -> list[str]:
    values = _get(source, key, list)
    if set(map(type, values)) - {str}:
        _fail(source, f"tokenizer.ggml.{key} is not a list of strings")
    return values


def _get(source: TokenizerSource, key: str, kind: type) -> Any:
    value = source.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, kind):
        _fail(source, f"tokenizer.ggml.{key} is missing or not a {kind.__name__}")
    return value


def _fail(source: TokenizerSource, problem: str) -> NoReturn:
    raise ModelFileError(f"{source.path}: {problem}")
