"""The built-in model: every tensor bit-equal to the `gguf` package's, every continuation equal to transformers'."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.model.gguf import read_gguf
from headway.model.load import describe, load
from headway.model.source import DEFAULT_MODEL, resolve
from headway.ops.reference import ReferenceBackend
from tests.model.paging import Bench

# Cut into tokens by "/", so that this test needs no tokenizer.
PROMPTS = (
    "The/ capital/ of/ France/ is",
    "def/ fib/onacci/(/n/):/\n/   ",
    "Once/ upon/ a/ time/,/ in/ a/ small/ village/ by/ the/ sea/,",
    "<|im_start|>/user/\n/Why/ is/ the/ sky/ blue/?/<|im_end|>/\n/<|im_start|>/ass/istant/\n",
    "Water/ bo/ils/ at/ /1/0/0/ degrees/ Celsius/./ The/ three/ states/ of/ matter/ are/ solid/,/ liquid/ and",
)
NEW_TOKENS = 16
DECODED = 3  # of them, in steps of their own


def token_ids(text: str, vocabulary: dict[str, int]) -> list[int]:
    return [vocabulary[piece.replace(" ", "Ġ").replace("\n", "Ċ")] for piece in text.split("/")]


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve(DEFAULT_MODEL)


def test_it_is_described_from_its_header(path: Path) -> None:
    info = describe(path)
    assert (info.config.layers, info.vocab_size, info.context_length) == (30, 49152, 8192)
    assert (info.parameters, info.formats, info.tokenizer.eos_ids) == (
        134_515_008,
        {"q8_0": 1, "q4_1": 210, "f32": 61},
        (2,),
    )
    assert info.tokenizer.chat_template is not None and info.tokenizer.add_bos is False


def test_every_tensor_is_bit_equal_to_the_gguf_package(path: Path) -> None:
    mine, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert mine.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        same = np.array_equal(mine.tensors[tensor.name].dequantise().view(np.uint32), expected.view(np.uint32))
        assert same, tensor.name
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert mine.metadata[name] == field.contents(), name


def test_greedy_continuations_equal_transformers_on_the_same_file(path: Path) -> None:
    backend = ReferenceBackend(poison=True)
    model = load(path, backend)
    vocabulary = {token: id for id, token in enumerate(model.info.tokenizer.metadata["tokenizer.ggml.tokens"])}
    texts = {str(row): token_ids(text, vocabulary) for row, text in enumerate(PROMPTS)}
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # go on after the end
    whole = {}
    for row, ids in texts.items():
        with torch.no_grad():
            asked = torch.tensor([ids])
            made = theirs.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=NEW_TOKENS, do_sample=False
            )
        whole[row] = made[0].tolist()

    # Each token is liked best after the ones before it: most of them in one step, the last ones as a server decodes.
    bench = Bench(model, backend, blocks=16, block_size=32)
    picked = bench.step({row: ids[:-DECODED] for row, ids in whole.items()}).argmax(axis=1).tolist()
    for row, ids in whole.items():
        best, picked = picked[: len(ids) - DECODED], picked[len(ids) - DECODED :]
        assert best[len(texts[row]) - 1 :] == ids[len(texts[row]) : len(ids) - DECODED + 1]
    for left in range(DECODED, 1, -1):
        picked = bench.step({row: [ids[-left]] for row, ids in whole.items()}, "last").argmax(axis=1).tolist()
        assert picked == [ids[-left + 1] for ids in whole.values()]
