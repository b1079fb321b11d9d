"""Faults that users reported of other engines' model and tokenizer files, each test named by the report's id."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from headway import LLM, SamplingParams
from headway.core.errors import BadInput, ModelFileError
from headway.engine.references import load_shape
from headway.model.load import describe
from headway.model.source import DEFAULT_MODEL, resolve
from headway.ops import native
from headway.serve.answer import Prompt, Query
from headway.serve.dialects.openai.completion_logprobs import CompletionLogprobs, joined
from headway.serve.dialects.openai.format import CompletionFormat
from headway.serve.logprobs import named_tokens
from headway.serve.model_text import ModelText
from headway.serve.text import PromptReader
from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer
from tests.model.test_checkpoint import change, tiny_gguf
from tests.serve.conftest import write_tiny_checkpoint
from tests.serve.test_parts import at
from tests.text.small_tokenizers import gguf_metadata, gguf_source, hf_source, train_byte_level

SMALL: dict[str, Any] = {"backend": "reference", "kv_cache_gib": 0.01}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_checkpoint(tmp_path)
    return tmp_path


def forced(token: int, **fields: Any) -> SamplingParams:
    """Nothing but `token` is generated."""
    return SamplingParams(temperature=0, max_tokens=4, logit_bias=((token, 100.0),), **fields)


def test_t2_010_every_end_token_that_any_file_names_ends_the_answer(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=20)
    change(folder / "generation_config.json", eos_token_id=[20, 21])
    change(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    named = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["<|im_end|>"]
    with LLM(folder, **SMALL) as llm:
        assert llm.engine.tokenizer.eos_ids == (20, 21, named)
        for token in (20, 21, named):
            (choice,) = llm.generate("the", forced(token))[0].choices
            assert (choice.finish.reason, choice.tokens, choice.text) == ("stop", [token], "")
            (choice,) = llm.generate("the", forced(token, ignore_eos=True))[0].choices
            assert (choice.finish.reason, len(choice.tokens)) == ("length", 4)
            (choice,) = llm.generate("the", forced(token, ignore_eos=True, stop_token_ids=(21,)))[0].choices
            assert choice.finish.reason == ("stop" if token == 21 else "length")


@pytest.mark.parametrize(("value", "ids"), [(21, (21, 20)), ([], (20,)), (None, (20,)), (..., (20,)), (20, (20,))])
def test_t2_010_ways_to_write_end_tokens(folder: Path, value: Any, ids: tuple[int, ...]) -> None:
    change(folder / "config.json", eos_token_id=20)
    change(folder / "generation_config.json", eos_token_id=value)
    change(folder / "tokenizer_config.json", eos_token=...)
    with LLM(folder, **SMALL) as llm:
        assert llm.engine.tokenizer.eos_ids == ids


@pytest.mark.parametrize("value", ["</s>", 10**6, [3, 10**6], -1, 2.0, True])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_t2_010_an_end_token_that_is_none_is_refused_by_name(folder: Path, file: str, value: Any) -> None:
    change(folder / file, eos_token_id=value)
    with pytest.raises(ModelFileError, match=f"{file}: eos_token_id: "):
        LLM(folder, **SMALL)


def test_requests_are_sampled_as_the_models_files_say_unless_they_say_otherwise(folder: Path) -> None:
    change(folder / "generation_config.json", temperature=3.0, top_k=1, top_p=None, max_length=20)

    def answers(llm: LLM, params: SamplingParams | None) -> int:
        """How many of four are different."""
        return len({completion.text for completion in llm.generate(["the"] * 4, params)})

    with LLM(folder, max_model_len=32, **SMALL) as llm:
        assert llm.params(temperature=0.5, top_p=None) == SamplingParams(temperature=0.5, top_k=1)
        assert ("sampling", "temperature 3.0, top_k 1, as generation_config.json says") in llm.engine.lines()
        assert answers(llm, None) == answers(llm, llm.params(max_tokens=8)) == 1
        assert answers(llm, llm.params(top_k=0)) == answers(llm, SamplingParams()) == 4
    with LLM(folder, max_model_len=32, generation_config="none", **SMALL) as llm:
        assert llm.params() == SamplingParams()
        assert "sampling" not in dict(llm.engine.lines())
    change(folder / "generation_config.json", do_sample=False)
    with LLM(folder, max_model_len=32, **SMALL) as llm:
        assert llm.params() == SamplingParams(temperature=0, top_k=1)


@pytest.mark.parametrize("value", [{"top_p": 7}, {"temperature": "hot"}, {"top_k": True}, {"min_p": 10**400}])
def test_a_sampling_default_out_of_range_is_refused_by_name(folder: Path, value: dict[str, Any]) -> None:
    change(folder / "generation_config.json", **value)
    (name,) = value
    with pytest.raises(ModelFileError, match=f"generation_config.json: {name}: .*; --generation-config none leaves"):
        LLM(folder, **SMALL)
    LLM(folder, generation_config="none", **SMALL).close()


def test_a_gguf_header_may_say_how_to_sample(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.25, "general.sampling.top_k": 5, "general.sampling.penalty_repeat": 1.5}
    stated = describe(tiny_gguf(tmp_path / "m.gguf", **keys)).sampling.values
    assert stated == {"temperature": 0.25, "top_k": 5, "repetition_penalty": 1.5}


BACKENDS = [
    {"backend": "reference"},
    pytest.param({"backend": "native"}, marks=pytest.mark.skipif(not native.available(), reason="not built")),
    pytest.param(
        {"backend": "native", "weights": "int4"}, marks=pytest.mark.skipif(not native.available(), reason="not built")
    ),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_t2_029_ids_that_pad_the_vocabulary_do_not_exist(tmp_path: Path, backend: dict[str, Any], tied: bool) -> None:
    names = train_byte_level().get_vocab_size()
    write_tiny_checkpoint(tmp_path, rows=names + 41)
    if tied:
        change(tmp_path / "config.json", tie_word_embeddings=True)
    with LLM(tmp_path, **SMALL | backend, pack_cache=False) as llm:
        params = SamplingParams(temperature=2, max_tokens=20, ignore_eos=True, logprobs=20, prompt_logprobs=20)
        seen: set[int] = set()
        for completion in llm.generate(["a", "the", "fox"] * 8, params):
            (choice,) = completion.choices
            seen |= set(choice.tokens) | {id for one in choice.logprobs for id, _ in one.top}
            seen |= {id for one in completion.prompt_logprobs for id, _ in one.top}
        assert len(seen) > names / 2 and max(seen) < names
        for wrong in ({"logit_bias": ((names, 100.0),)}, {"stop_token_ids": (names,)}):
            with pytest.raises(BadInput, match=f"token id {names} is not below"):
                llm.generate("a", SamplingParams(max_tokens=1, **wrong))
        with pytest.raises(BadInput, match=f"from 0 to {names - 1}"):
            llm.generate([[names + 5]], SamplingParams(max_tokens=1))
        assert llm.engine.tokenizer.decode([names, names + 40]) == ""


def test_t2_029_the_ids_that_pad_a_gguf_are_its_unused_ones_at_the_end() -> None:
    metadata = gguf_metadata(train_byte_level(), "gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD1]", "<tool>", "[PAD2]", "[PAD3]"]
    metadata["tokenizer.ggml.token_type"] += [5, 4, 5, 5]
    assert Tokenizer(gguf_source(metadata)).vocab_size == size + 2


def test_t2_029_a_name_without_a_row_is_refused_when_it_is_used(tmp_path: Path) -> None:
    tokenizer = train_byte_level()
    rows = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<extra>"])
    write_tiny_checkpoint(tmp_path, tokenizer, rows=rows)
    with LLM(tmp_path, **SMALL) as llm:
        llm.generate("fine", SamplingParams(max_tokens=1))
        with pytest.raises(BadInput, match="prompt: the model has no embedding for '<extra>'"):
            llm.generate("an <extra> word", SamplingParams(max_tokens=1))


def metaspace(*, prefix: bool = False) -> tokenizers.Tokenizer:
    """Whose tokens may span words; `prefix`: a start token is put before a text."""
    pieces = ["<unk>", "<s>", "</s>", "▁in▁the", "▁house", "▁", "▁x", "▁lead", "▁▁", "in", "x", "\n", "▁hello"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(pieces[:3])
    if prefix:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return tokenizer


IN_THE, HOUSE, MARK, X, LEAD = 3, 4, 5, 6, 7
SPANS = [([IN_THE, HOUSE], "in the house"), ([MARK, LEAD, X], " lead x"), ([1, IN_THE, X], "in the x"), ([MARK], "")]


@pytest.mark.parametrize(("ids", "text"), SPANS)
def test_t2_001_one_space_is_dropped_at_the_start_and_no_other(tmp_path: Path, ids: list[int], text: str) -> None:
    tokenizer = Tokenizer(hf_source(metaspace(), tmp_path))
    assert tokenizer.decode(ids) == text
    streamed = Detokenizer(tokenizer)
    assert "".join(map(streamed.push, ids)) + streamed.flush() == text
    after = Detokenizer(tokenizer, [HOUSE])
    assert "".join(map(after.push, ids)) + after.flush() == " " + text


def echoed(text: ModelText, prompt: Any) -> Prompt:
    """A prompt as an echo shows it."""
    query = Query(
        model="m", prompts=[prompt], params=SamplingParams(), echo=True, field="prompt", id_prefix="",
        format=partial(CompletionFormat, text, 0, False),
    )  # fmt: skip
    (read,) = PromptReader(text, 64, SamplingParams()).answer(query, "", 0).prompts
    return read


@pytest.mark.parametrize("prompt", [[IN_THE], [MARK, LEAD], [1], [1, IN_THE], [X], "x x"])
@pytest.mark.parametrize("decoder", ["Metaspace", "Strip"])
def test_t2_001_and_t2_016_offsets_are_those_of_the_text(tmp_path: Path, decoder: str, prompt: Any) -> None:
    tokenizer = metaspace(prefix=isinstance(prompt, str))
    if decoder == "Strip":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    write_tiny_checkpoint(tmp_path, tokenizer)
    text = ModelText(describe(tmp_path))
    read = echoed(text, prompt)
    made = [HOUSE, X]
    output = Detokenizer(Tokenizer(describe(tmp_path).tokenizer), read.tokens)
    whole = read.text + "".join(map(output.push, made)) + output.flush()
    lists = CompletionLogprobs(text, 0, text.strip_after(()))
    pieces = [
        lists.first(read.tokens[0], read.hidden),
        lists.piece(named_tokens(text, [at(id) for id in read.tokens[1:]])),
    ]
    pieces.append(lists.fork(text.strip_after(read.tokens)).piece(named_tokens(text, [at(id) for id in made])))
    named, offsets = joined(pieces)["tokens"], joined(pieces)["text_offset"]
    ends = [*offsets[1:], len(whole)]
    for number, (name, start, end) in enumerate(zip(named, offsets, ends, strict=True)):
        hidden = number == 0 and read.hidden
        assert whole[start:end] == "" if hidden else name.endswith(whole[start:end]) and end > start - 1
    assert ends[-1] == len(whole) and offsets == sorted(offsets)
    assert whole[offsets[-1] :] == " x"


def test_t2_016_a_start_token_that_the_client_wrote_is_part_of_the_text(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, metaspace(prefix=True))
    text = ModelText(describe(tmp_path))
    assert not echoed(text, "<s>in").hidden and echoed(text, "in").hidden


FUSED = [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([*FUSED, decoders.Replace("\n ", "\n"), decoders.Replace("\t ", "\t")], "Replace after Fuse"),
        ([decoders.Replace(tokenizers.Regex("a+"), "a")], "Replace before Fuse"),
        ([decoders.Metaspace(), decoders.Strip(" ", 1, 0)], "Strip before Fuse"),
        ([*FUSED, decoders.Strip(" ", 0, 1)], "Strip after Fuse"),
        ([*FUSED, decoders.ByteFallback()], "ByteFallback after Fuse"),
        ([*FUSED, decoders.Metaspace()], "Metaspace"),
        ([decoders.ByteLevel(), decoders.Fuse()], "ByteLevel"),
        ([decoders.Sequence(FUSED), decoders.Fuse()], "Sequence"),
    ],
)
def test_t2_003_a_decoder_that_looks_across_tokens_is_refused_by_name(
    tmp_path: Path, steps: list[Any], name: str
) -> None:
    tokenizer = metaspace()
    tokenizer.decoder = decoders.Sequence(steps)
    with pytest.raises(ModelFileError, match=f"decoder {name} is not supported"):
        Tokenizer(hf_source(tokenizer, tmp_path))


def test_t2_003_steps_within_tokens_are_done_in_their_order(tmp_path: Path) -> None:
    tokenizer = metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", "_"), decoders.Replace("_h", "!"), *FUSED[2:]])
    ids = [IN_THE, HOUSE, X]
    assert Tokenizer(hf_source(tokenizer, tmp_path)).decode(ids) == tokenizer.decode(ids) == "_in_the!ouse_x"


def test_t2_004_one_start_token_at_most_whoever_asks_for_it(tmp_path: Path) -> None:
    def ids(text: str, *, prefix: bool = False, **config: Any) -> list[int]:
        return Tokenizer(hf_source(metaspace(prefix=prefix), tmp_path, metadata=config, bos_id=1)).encode(text)

    assert ids("x") == ids("x", add_bos_token=False) == [MARK, 10]
    assert ids("x", add_bos_token=True) == ids("x", add_bos_token=True, bos_token="<s>") == [1, MARK, 10]
    # The post-processor decides where it says anything; nothing is put behind a text that is to be continued.
    assert ids("x", prefix=True) == ids("x", prefix=True, add_bos_token=False, add_eos_token=True) == [1, MARK, 10]


@pytest.mark.parametrize("add_bos", [True, False])
def test_t2_006_a_prompt_that_begins_with_the_start_tokens_text_gets_no_second_one(add_bos: bool) -> None:
    tokenizer = Tokenizer(gguf_source(gguf_metadata(train_byte_level(), "gpt-2"), bos_id=0, add_bos=add_bos))
    one, two = tokenizer.encode("Hello"), tokenizer.encode("<|endoftext|>Hello")
    assert (one[0] == 0) == add_bos and two == [0, *tokenizer.encode("Hello", add_special=False)]
    assert tokenizer.encode("<|endoftext|>", allow_special=False).count(0) == add_bos


def test_the_built_in_model_is_greedy_where_nobody_asks_otherwise_whatever_it_was_called_by() -> None:
    path = resolve(DEFAULT_MODEL)
    for model in (None, "demo", path):
        with LLM(model, max_model_len=64, max_rows=1, kv_cache_gib=0.05) as llm:
            assert (llm.params().temperature, llm.params().top_p) == (0.0, 1.0)
            assert llm.params(temperature=0.7).temperature == 0.7
            assert ("sampling", "temperature 0.0, best for the built-in model") in llm.engine.lines()
    assert load_shape("demo") == load_shape(str(path)), "plan and simulate know it by the same name"
