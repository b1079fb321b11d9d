"""Vectors and scores of whole texts: those of transformers, and the same bits however the step came about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headway import LLM, SamplingParams
from headway.core.errors import BadInput, HeadwayError
from headway.core.events import EventLog, Finished, FirstToken, Preempted
from headway.core.receipts import Receipts
from headway.engine.embedding import relevance
from headway.engine.messages import Submit
from headway.model.load import describe
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget
from tests.engine.tiny import TinyModel, complete, drain, prompts
from tests.text.small_tokenizers import train_byte_level

TEXTS = ["Hello, world", "def f(x):\n    return x**2", "naïve café " * 12]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip


def folder_of(folder: Path, kind: str, model_type: str, **changes: Any) -> transformers.PreTrainedModel:
    """A tiny random checkpoint with a byte-level tokenizer, written by transformers."""
    tokenizer = train_byte_level()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=tokenizer.get_vocab_size(), **{**SIZES, **changes}
    )
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return model


def hidden(model: transformers.PreTrainedModel, ids: list[int]) -> np.ndarray:
    """The hidden states after the last norm."""
    with torch.no_grad():
        base = getattr(model, model.base_model_prefix, model)
        return base(torch.tensor([ids])).last_hidden_state[0].numpy()


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("LlamaForCausalLM", "llama"), ("Qwen3ForCausalLM", "qwen3"), ("Qwen2Model", "qwen2"),
     ("Gemma2ForCausalLM", "gemma2"), ("GPTNeoXForCausalLM", "gpt_neox")],
)  # fmt: skip
def test_the_vectors_are_those_of_transformers(tmp_path: Path, kind: str, model_type: str) -> None:
    model = folder_of(tmp_path, kind, model_type)
    with LLM(tmp_path, backend="reference", kv_cache_gib=0.01) as llm:
        ids = [llm.engine.encode_whole(text) for text in TEXTS]
        states = [hidden(model, one) for one in ids]
        for pooling, want in (
            ("last", [one[-1] for one in states]),
            ("mean", [one.mean(0) for one in states]),
            ("cls", [one[0] for one in states]),
        ):
            got = llm.embed(TEXTS, pooling=pooling, normalise=False)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
            unit = llm.embed(ids, pooling=pooling)
            np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)
            np.testing.assert_allclose(unit, got / np.linalg.norm(got, axis=1, keepdims=True), rtol=1e-4, atol=1e-6)
        if kind == "Qwen2Model":  # no output matrix
            with pytest.raises(HeadwayError, match="cannot generate"):
                llm.generate("a", SamplingParams(max_tokens=1))


MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


def sentence_transformer(folder: Path, modules: list[tuple[str, str]], **pooling: Any) -> None:
    kinds = [
        {"idx": n, "type": f"sentence_transformers.models.{kind}", "path": path}
        for n, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(kinds))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))


def test_a_folder_says_how_it_pools(tmp_path: Path) -> None:
    folder_of(tmp_path, "Qwen3Model", "qwen3")
    sentence_transformer(tmp_path, MODULES, pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    with LLM(tmp_path, backend="reference", kv_cache_gib=0.01) as llm:
        own = llm.embed(TEXTS)
        np.testing.assert_array_equal(own, llm.embed(TEXTS, pooling="mean"))
        few = llm.embed(TEXTS, dimensions=8)
        assert few.shape == (3, 8)
        np.testing.assert_allclose(np.linalg.norm(few, axis=1), 1, rtol=1e-6)
        np.testing.assert_allclose(few, own[:, :8] / np.linalg.norm(own[:, :8], axis=1, keepdims=True), rtol=1e-5)
        with pytest.raises(BadInput, match="dimensions: 33 is not from 1 to 32"):
            llm.embed(TEXTS, dimensions=33)
    sentence_transformer(tmp_path, MODULES[:2], pooling_mode_lasttoken=True)
    assert (describe(tmp_path).pooling.pooling, describe(tmp_path).pooling.normalise) == ("last", False)


@pytest.mark.parametrize(
    ("modules", "pooling", "problem"),
    [
        (MODULES, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "one at a time"),
        ([*MODULES[:2], ("Dense", "2_Dense")], {"pooling_mode_mean_tokens": True}, "Dense"),
    ],
)
def test_what_cannot_be_made_is_said_when_it_is_asked_for(
    tmp_path: Path, modules: list[tuple[str, str]], pooling: dict[str, Any], problem: str
) -> None:
    folder_of(tmp_path, "LlamaForCausalLM", "llama")
    sentence_transformer(tmp_path, modules, **pooling)
    with LLM(tmp_path, backend="reference", kv_cache_gib=0.01) as llm:
        assert llm.generate("a", SamplingParams(max_tokens=2))[0].text is not None
        with pytest.raises(HeadwayError, match=problem):
            llm.embed("a")


@pytest.mark.parametrize("modules", ["{}", '[{"type": "x.Pooling", "path": "../elsewhere"}]', "[1]", "nonsense"])
def test_a_hostile_folder_is_one_sentence(tmp_path: Path, modules: str) -> None:
    folder_of(tmp_path, "LlamaForCausalLM", "llama")
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(HeadwayError, match=r"modules\.json|outside"):
        describe(tmp_path)


@pytest.mark.parametrize(("family", "labels"), [("Qwen2", 1), ("Llama", 2), ("Qwen3", 2)])
def test_a_classification_head_scores_as_in_transformers(tmp_path: Path, family: str, labels: int) -> None:
    model = folder_of(tmp_path, f"{family}ForSequenceClassification", family.lower(), num_labels=labels)
    with LLM(tmp_path, backend="reference", kv_cache_gib=0.01) as llm:
        ids = llm.engine.tokenizer.encode_whole("a query", "a document")
        (completion,) = [result for _, result in llm.as_completed([(0, ids, SamplingParams(pooling="score"))])]
        assert not isinstance(completion, HeadwayError)
        with torch.no_grad():
            want = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(np.frombuffer(completion.pooled, "<f4"), want, rtol=1e-4, atol=1e-4)
        p = 1 / (1 + np.exp(-want[0])) if labels == 1 else np.exp(want[1]) / np.exp(want).sum()
        assert relevance(completion.pooled, llm.engine.info.pooling) == pytest.approx(p, abs=1e-4)
        for ask in (lambda: llm.generate("a", SamplingParams(max_tokens=1)), lambda: llm.embed("a")):
            with pytest.raises(HeadwayError, match="made for scores"):
                ask()


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_the_same_bits_warm_beside_strangers_chunked_and_preempted(pooling: str, window: int | None) -> None:
    model, some, params = TinyModel(NativeBackend(threads=1), window), prompts(30), SamplingParams(pooling=pooling)

    def vectors(rounds: int = 1, strangers: bool = False, **loop: Any) -> dict[str, bytes]:
        running = model.loop(**loop)
        if strangers:
            for number, tokens in enumerate(prompts(20, seed=5)):
                generating = SamplingParams(temperature=0, max_tokens=9)
                assert running.submit(Submit(id=f"g{number}", tokens=tokens, params=generating)) is None
        runs = [complete(running, some, params) for _ in range(rounds)]
        return {id: deltas[-1].pooled for id, deltas in runs[-1].items() if not id.startswith("g")}

    alone = vectors(max_rows=1)
    assert all(len(one) == 4 * 32 for one in alone.values())
    assert vectors(rounds=2) == alone
    assert vectors(strangers=True) == alone
    assert vectors(budget=Budget(tokens=5)) == alone
    preempted: list[Preempted] = []
    log = EventLog(lambda event: preempted.append(event) if isinstance(event, Preempted) else None)
    assert vectors(strangers=True, blocks=26, log=log) == alone
    assert preempted


def test_a_prompt_that_is_pooled_is_an_ordinary_request() -> None:
    """It hits the cache where the last token is enough, is billed, emits nothing, and can be cancelled."""
    events: list[Any] = []
    receipts = Receipts(FixedCosts(step=1.0, token=1.0).parts, (None,))
    loop = TinyModel().loop(log=EventLog(events.append, receipts))
    tokens = tuple(range(40))
    assert loop.submit(Submit(id="a", tokens=tokens, params=SamplingParams(pooling="last"))) is None
    (first,) = drain(loop)
    assert first.finish is not None and first.finish.reason == "stop" and not first.tokens and not first.cached
    assert loop.submit(Submit(id="b", tokens=tokens, params=SamplingParams(pooling="last"))) is None
    (second,) = drain(loop)
    assert second.cached == 36
    np.testing.assert_allclose(np.frombuffer(second.pooled, "<f4"), np.frombuffer(first.pooled, "<f4"), rtol=1e-4)
    assert loop.submit(Submit(id="c", tokens=tokens, params=SamplingParams(pooling="mean"))) is None
    (third,) = drain(loop)
    assert third.cached == 0
    ended = [event for event in events if isinstance(event, Finished)]
    assert [(event.generated, event.cached) for event in ended] == [(0, 0), (0, 36), (0, 0)]
    assert not any(isinstance(event, FirstToken) for event in events)
    assert loop.submit(Submit(id="d", tokens=tokens * 4, params=SamplingParams(pooling="mean"))) is None
    loop.scheduler.cancel_request("d", loop.clock.now())
    assert [delta.finish and delta.finish.reason for delta in loop.turn()] == ["abort"]


def test_a_prompt_may_fill_the_context() -> None:
    loop = TinyModel().loop()
    assert loop.submit(Submit(id="a", tokens=(1,) * 256, params=SamplingParams(pooling="last"))) is None
    (delta,) = drain(loop)
    assert delta.pooled
    refused = loop.submit(Submit(id="a", tokens=(1,) * 257, params=SamplingParams(pooling="last")))
    assert refused is not None and "257 tokens are too many" in refused.message


@pytest.mark.parametrize("given", [{"n": 2}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"pooling": "max"}])
def test_nothing_that_generates_goes_with_pooling(given: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(given))):
        SamplingParams(**{"pooling": "last", **given})
