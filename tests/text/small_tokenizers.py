"""Small tokenizers of the kinds that checkpoints ship."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from headway.text.source import TokenizerSource

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, they're naïve!",
    "東京 🎉👍🏽 café Ünïcode Ω",
] * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TRICKY = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "1234567890 3.14159 1,000,000 ١٢٣ ⅔ x2y3",
    "tabs\tand\r\nCRLF\r\n\r\nand\n\n\nnewlines",
    "漢字仮名交じり文。한국어 עברית العربية ไทย",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 \u00e9 \ufb01 \u200b \ufeff",
    "I'M can't We'Ve it's I'd",
    "def f(x):\n    return x**2  # comment\n\tif a!=b: pass",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "a" * 300,
    "\x00\x01 control \x7f",
]


def train_byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's tokenizer.json: U+2581 for spaces, byte fallback, a space put before the text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Helowrdthqucki.,"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "H"), ("▁", "w"), ("h", "e"), ("l", "l"), ("▁H", "e"), ("▁", "▁"), ("▁", "t"), ("▁t", "he")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def hf_source(tokenizer: tokenizers.Tokenizer, folder: Path, **fields: object) -> TokenizerSource:
    tokenizer.save(str(folder / "tokenizer.json"))
    given = {"metadata": {}, "vocab_size": tokenizer.get_vocab_size() + 3, **fields}
    return TokenizerSource(kind="hf", path=folder, **given)  # type: ignore[arg-type]


def gguf_metadata(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, object]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def gguf_source(metadata: dict[str, object], **fields: object) -> TokenizerSource:
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else 0
    given = {"vocab_size": size, "bos_id": 1, "eos_ids": (2,), **fields}
    return TokenizerSource(kind="gguf", path=Path("model.gguf"), metadata=metadata, **given)  # type: ignore[arg-type]
