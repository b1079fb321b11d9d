"""A GGUF header's tokenizer equals the tokenizer.json it was made from, token by token, for every family of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import tokenizers

from headway.model.gguf import read_gguf_header
from headway.model.load import describe
from headway.text.gguf_pieces import merge_pairs
from headway.text.source import TokenizerSource
from headway.text.tokenizer import Tokenizer
from tests.published import gemma, tekken, tokenizer_folder
from tests.text.small_tokenizers import TRICKY, gguf_source

NASTY = [
    *TRICKY,
    *(" " * n + "x" for n in (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 40, 70)),
    *("a" + "\n" * n for n in (1, 2, 3, 31, 32, 40)),
    "\t\t\tif x:\n\t\t\t\treturn {'a': [1, 2], \"b\": None}\r\n\r\n",
    " \n \t \r\n  \n\n x",
    "for (int i = 0; i < n; ++i) { a[i] += b->c(i) << 2; } // ok?\n#include <stdio.h>\n",
    "<table><thead><tr><td>1</td></tr></thead></table>",
    "they'RE I'LL we'd it'ſ 'tis ''s o'clock DON'T",
    "0 00 000 0000 1234567 3.14159e-10 0xFF １２３ ²³ ½ Ⅻ ٣٤٥ १२३",
    "Ａｂｃ ǅ ß ﬁ İi ẞ Ω≠Ω é≠é ḍ̇",
    "日本語のテキスト、漢字かな交じり。中文，没有空格！한국어도。𠮷野家 ｶﾀｶﾅ",
    "สวัสดีครับ नमस्ते مرحبا بالعالم שלום עולם ქართული አማርኛ",
    "👨‍👩‍👧‍👦🏳️‍🌈🇺🇳 ☃️ 𝕳𝖊𝖑𝖑𝖔 \U000e0041\U0010ffff\ue000 \u2028\u2029\u00a0\u3000\u200d",
    "\x00\x01\x1b[0m\x7f\x85 \ufeff \ufffd",
    "▁▁ ▁a▁ <0x0A> <unk> </s> <s>[INST] hi [/INST]</s>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos><mask><unused7>",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n</think><tool_call>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|return|>",
    "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>",
    "!!!???...,,,;;; -- __init__ @#$%^&*()[]{}|\\/~`+=<>\"' «» “” ‘’ … — ÷×",
    "a.b.c/d/e\\f https://example.org/?q=1&x=%20#frag foo@bar.com snake_case camelCase HTTPServer kebab-case",
    "word " * 60,
]


def mixtures(tokenizer: tokenizers.Tokenizer, count: int) -> list[str]:
    """Texts of random characters of many kinds, and of random tokens."""
    draw = random.Random(12)
    kinds = ["abcXYZ", " ", "  \t\n\r", "0123456789", ".,'!/-_<>", "éßΩжא", "中日かア한", "👍🏽\u200d\u0301", "▁'s'S"]
    texts = ["".join(draw.choice(draw.choice(kinds)) for _ in range(draw.randint(1, 60))) for _ in range(count)]
    size = tokenizer.get_vocab_size()
    return texts + [tokenizer.decode([draw.randrange(size) for _ in range(8)]) for _ in range(count)]


def described(name: str, **more: Any) -> dict[str, Any]:
    """A GGUF header for an original tokenizer, as llama.cpp's converter writes it."""
    file = json.loads((tokenizer_folder(name) / "tokenizer.json").read_text())
    vocab = dict(file["model"]["vocab"])
    types = dict.fromkeys(vocab, 1)
    for token in file["added_tokens"]:
        vocab[token["content"]] = token["id"]
        types[token["content"]] = 3 if token["special"] else 4
    for gap in set(range(max(vocab.values()))) - set(vocab.values()):
        vocab[f"[PAD{gap}]"] = gap
        types[f"[PAD{gap}]"] = 5
    tokens = sorted(vocab, key=vocab.__getitem__)
    header: dict[str, Any] = {"tokens": tokens, "token_type": [types[token] for token in tokens], **more}
    merges = file["model"]["merges"]
    if header["model"] == "gpt2":
        header["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return {f"tokenizer.ggml.{key}": value for key, value in header.items()}


def assert_same(ours: Tokenizer, theirs: tokenizers.Tokenizer) -> None:
    texts = NASTY + mixtures(theirs, 100)
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == ids, repr(text)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False), repr(text)
    if ours._built is None:  # those were excerpts of the vocabulary
        plain = [ours.encode(text, add_special=False, allow_special=False) for text in NASTY]
        ours.load()
        for text in texts:
            assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert plain == [ours.encode(text, add_special=False, allow_special=False) for text in NASTY]


def folder(name: str) -> Tokenizer:
    """The family's tokenizer as its makers publish it."""
    path = tokenizer_folder(name)
    config = json.loads((path / "tokenizer_config.json").read_text())
    return Tokenizer(TokenizerSource(kind="hf", path=path, vocab_size=2**20, metadata=config))


def llama2() -> dict[str, Any]:
    """SentencePiece's scores are the order in which its pieces were learnt; those of spaces alone come last."""
    metadata = described("llama2", model="llama")
    metadata["tokenizer.ggml.token_type"][:259] = [2, 3, 3, *[6] * 256]
    metadata["tokenizer.ggml.scores"] = [
        0.0 if id < 259 else -1e9 if len(token) > 1 and set(token) == {"▁"} else 259.0 - id
        for id, token in enumerate(metadata["tokenizer.ggml.tokens"])
    ]
    return metadata | {"tokenizer.ggml.unknown_token_id": 0}


def test_joining_by_scores_is_the_original_list_of_merges() -> None:
    metadata = llama2()
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: id for id, token in enumerate(tokens)}
    file = json.loads((tokenizer_folder("llama2") / "tokenizer.json").read_text())
    merges = [f"{tokens[a]} {tokens[b]}" for a, b in merge_pairs(vocab, metadata["tokenizer.ggml.scores"])]
    assert len(merges) == len(file["model"]["merges"])
    assert set(merges) == set(file["model"]["merges"])


def byte_level(name: str, pre: str) -> Tokenizer:
    return Tokenizer(gguf_source(described(name, model="gpt2", pre=pre)))


def gemma_3() -> Tokenizer:
    """Of the real file."""
    return Tokenizer(gguf_source(read_gguf_header(gemma())[0], bos_id=2, eos_ids=(1,), add_bos=True))


FAMILIES = {
    "qwen3": (lambda: byte_level("qwen3", "qwen2"), None, "<|im_end|>"),
    "llama2": (lambda: Tokenizer(gguf_source(llama2())), "<s>", "</s>"),
    "llama3_1": (lambda: byte_level("llama3_1", "llama-bpe"), "<|begin_of_text|>", "<|eot_id|>"),
    "gemma3": (gemma_3, "<bos>", "<end_of_turn>"),
    "gptoss": (lambda: byte_level("gptoss", "gpt-4o"), None, "<|return|>"),
    "gpt35turbo": (lambda: byte_level("gpt35turbo", "dbrx"), None, "<|endoftext|>"),  # OLMo 2's and Phi 4's rule
    "deepseek_v3": (
        lambda: byte_level("deepseek_v3", "deepseek-v3"), "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    ),
}  # fmt: skip


LARGE = {"gptoss", "llama3_1", "gpt35turbo"}  # their rules differ little from the others', their merges are many


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in FAMILIES])
def test_folder_and_header_of_a_family(name: str) -> None:
    build, bos, end = FAMILIES[name]
    from_folder = folder(name)
    original = from_folder._whole().tokenizer
    assert from_folder.prefix == ([] if bos is None else [original.token_to_id(bos)])
    assert from_folder.eos_ids == (original.token_to_id(end),)
    assert_same(from_folder, original)
    from_header = build()
    assert_same(from_header, original)
    assert original.token_to_id(end) in from_header.eos_ids  # of Gemma's header, which names <eos> alone, too


def test_what_a_gguf_header_tells_of_added_tokens_is_what_the_library_makes_of_it() -> None:
    """Decoding needs no tokenizer of the library: it is built with the first text."""
    source = describe(gemma()).tokenizer
    lazy, built = Tokenizer(source), Tokenizer(source)
    ends = [lazy.vocab_size - 1, *range(0, lazy.vocab_size, 997)]
    decoded = [(lazy.token_bytes(id), lazy.token_bytes(id, skip_special=False)) for id in ends]
    assert lazy._built is None, "nothing has asked for ids"
    built.load()
    library = built._whole().tokenizer.get_added_tokens_decoder()
    assert built.special_ids == {token.content: id for id, token in library.items() if token.special}
    assert decoded == [(built.token_bytes(id), built.token_bytes(id, skip_special=False)) for id in ends]
    assert all(built._text(id) == built._whole().tokenizer.id_to_token(id) for id in ends)
    assert built.longest() == max(len(built.token_bytes(id, skip_special=False)) for id in range(built.vocab_size))


def test_tekken_cuts_text_as_its_makers_do() -> None:
    """Their files have ranks instead of merges: a word that is a token is one, and so it is here."""
    original = json.loads(tekken().read_text())["config"]["pattern"]
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(original), "isolated")
    header = {"model": "gpt2", "pre": "tekken", "tokens": ["a"], "token_type": [1], "merges": []}
    ours = Tokenizer(gguf_source({f"tokenizer.ggml.{key}": value for key, value in header.items()}))._whole().tokenizer
    assert ours.model.ignore_merges
    for text in NASTY:
        spans = [span for _, span in words.pre_tokenize_str(text)]
        assert [span for _, span in ours.pre_tokenizer.pre_tokenize_str(text)] == spans, repr(text)
