"""Adapters in the engine: one per request, loaded and unloaded while others run, and never another one's cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway import LLM
from headway.core.clock import VirtualClock
from headway.core.errors import BadInput
from headway.core.fields import Fields
from headway.core.request import SamplingParams
from headway.core.step import Capabilities, RowInit, StepPlan, Work
from headway.engine.loop import EngineLoop
from headway.engine.messages import Refusal, Submit
from headway.engine.options import EngineOptions
from headway.executor.adapters import AdapterTable
from headway.executor.model import ModelExecutor
from headway.model import llama
from headway.model.adapters import AdapterLimits, make_adaptable
from headway.model.family import Decoder
from headway.model.load import open_model
from headway.model.source import DEFAULT_MODEL
from headway.model.tensors import tensors_of
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend
from headway.ops.reference import ReferenceBackend
from headway.scheduling.scheduler import Scheduler
from headway.shape.families import FAMILIES
from headway.shape.model import KVGroup
from tests.adapter_files import write_random
from tests.engine.tiny import CONFIG, VOCAB, TinyModel, complete, drain, prompts, submit_all, tokens_of, weights
from tests.ops.native.harness import kernels

SPECS = tensors_of(FAMILIES["llama"], Fields(llama.config_json(CONFIG), "tiny", BadInput), CONFIG)
SHAPES = {
    spec.hf.removesuffix(".weight"): spec.shape for role, spec in SPECS.items() if spec.part in ("attention", "mlp")
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = tuple(range(1, 40))


def adapter(folder: Path, name: str, seed: int = 0) -> Path:
    return write_random(folder / f"{name}-{seed}", SHAPES, seed, size=0.3)  # type: ignore[arg-type]


def loop_of(backend: Backend, *, max_tokens: int = 256, count: int = 3) -> EngineLoop:
    """The tiny model with room for adapters."""
    decoder = Decoder(
        CONFIG,
        weights(),
        {role: spec.part for role, spec in SPECS.items()},
        partial(llama.build, CONFIG),
        SPECS,
        gguf=False,
    )
    prepared = {role: backend.prepare(weight) for role, weight in decoder.weights.items()}
    forward, adaptable = make_adaptable(backend, decoder, prepared, AdapterLimits(count, 4))
    table = AdapterTable(adaptable)
    limits = Capabilities(
        block_size=4, blocks=(400,), windows=(None,), max_rows=16, max_tokens_per_step=max_tokens, max_model_len=256
    )
    groups = (KVGroup("full", (0, 1), 2, 8, 8, dtype_bytes=backend.kv_dtype_bytes),)
    executor = ModelExecutor(backend, forward, groups, limits, table)
    scheduler = Scheduler(limits, key=b"test" * 8, verify=True)
    return EngineLoop(scheduler, executor, VirtualClock(), VOCAB, adapters=table)


def answer(loop: EngineLoop, adapter: str = "", tokens: tuple[int, ...] = PROMPT) -> tuple[list[int], int]:
    """(what is generated, prompt tokens that were cached)."""
    assert loop.submit(Submit("one", tokens, GREEDY, adapter=adapter)) is None
    deltas = drain(loop)
    return tokens_of(deltas), deltas[-1].cached


@pytest.fixture(params=kernels()[:1])
def kernel(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(threads=2, kernels=request.param)


def test_every_request_is_answered_as_if_its_adapter_were_alone(kernel: NativeBackend, tmp_path: Path) -> None:
    texts = prompts(12)
    names = ["", "a", "b", "c"]
    plain = complete(TinyModel(NativeBackend(threads=1)).loop(), texts, GREEDY)

    def alone(name: str) -> dict[str, list[int]]:
        loop = loop_of(NativeBackend(threads=1), max_tokens=16, count=1)
        if name:
            loop.load_adapter(name, adapter(tmp_path, name, ord(name)))
        for number, tokens in enumerate(texts):
            assert loop.submit(Submit(str(number), tokens, GREEDY, adapter=name)) is None
        by_id: dict[str, list[int]] = {}
        for delta in drain(loop):
            by_id.setdefault(delta.id, []).extend(delta.tokens)
        return by_id

    expected = {name: alone(name) for name in names}
    assert expected[""] == {id: tokens_of(deltas) for id, deltas in plain.items()}
    assert len({str(tokens) for tokens in expected.values()}) == len(names)
    together = loop_of(kernel)
    for name in names[1:]:
        together.load_adapter(name, adapter(tmp_path, name, ord(name)))
    for _ in ("cold", "warm"):
        for number, tokens in enumerate(texts):
            assert together.submit(Submit(str(number), tokens, GREEDY, adapter=names[number % 4])) is None
        got: dict[str, list[int]] = {}
        for delta in drain(together):
            got.setdefault(delta.id, []).extend(delta.tokens)
        assert got == {str(number): expected[names[number % 4]][str(number)] for number in range(len(texts))}


def test_adapters_share_no_cached_prompt_with_others_or_with_their_former_selves(tmp_path: Path) -> None:
    loop = loop_of(ReferenceBackend(poison=True))
    loop.load_adapter("a", adapter(tmp_path, "a", 1))
    loop.load_adapter("b", adapter(tmp_path, "b", 2))
    base, first, other = answer(loop), answer(loop, "a"), answer(loop, "b")
    assert base[1] == first[1] == other[1] == 0
    assert answer(loop, "a") == (first[0], 36)
    loop.unload_adapter("a")
    loop.load_adapter("a", adapter(tmp_path, "a", 3))
    changed, cached = answer(loop, "a")
    assert changed != first[0]
    assert cached == 0
    loop.unload_adapter("a")
    loop.load_adapter("a", adapter(tmp_path, "again", 1))
    assert answer(loop, "a") == (first[0], 36)  # the same numbers under the same name
    assert answer(loop) == (base[0], 36)


def test_requests_keep_the_adapter_they_began_with(tmp_path: Path) -> None:
    loop = loop_of(ReferenceBackend(poison=True), count=2)
    loop.load_adapter("a", adapter(tmp_path, "a", 1))
    expected = answer(loop, "a")[0]
    assert loop.submit(Submit("running", PROMPT, GREEDY, adapter="a")) is None
    deltas = [delta for _ in range(4) for delta in loop.turn()]
    loop.unload_adapter("a")
    refused = loop.submit(Submit("late", PROMPT, GREEDY, adapter="a"))
    assert refused == Refusal("late", "adapter: 'a' is not loaded; loaded: none", "invalid_value", 400)
    loop.load_adapter("a", adapter(tmp_path, "a", 2))
    with pytest.raises(BadInput, match=r"room for 2 adapters .*, taken by a, and 1 unloaded that requests still use"):
        loop.load_adapter("b", adapter(tmp_path, "b"))
    assert loop.adapters is not None
    assert loop.adapters.leaving
    assert loop.submit(Submit("new", PROMPT, GREEDY, adapter="a")) is None
    deltas += drain(loop)
    assert tokens_of([delta for delta in deltas if delta.id == "running"]) == expected
    assert tokens_of([delta for delta in deltas if delta.id == "new"]) != expected
    assert not loop.adapters.leaving
    loop.load_adapter("b", adapter(tmp_path, "b"))


def test_loading_while_others_run_changes_nothing_for_them(kernel: NativeBackend, tmp_path: Path) -> None:
    texts = prompts(8)
    expected = {id: tokens_of(deltas) for id, deltas in complete(TinyModel(kernel).loop(), texts, GREEDY).items()}
    loop = loop_of(kernel, count=2)
    submit_all(loop, texts, GREEDY)
    got: dict[str, list[int]] = {}
    for turn in range(40):
        if turn % 4 == 0 and turn < 24:  # two versions in turn, of which the former is still in use
            if turn:
                loop.unload_adapter("a")
            loop.load_adapter("a", adapter(tmp_path, "a", turn // 4 % 2))
            assert (
                loop.submit(Submit(f"a{turn}", PROMPT, SamplingParams(temperature=0.0, max_tokens=4), adapter="a"))
                is None
            )
        for delta in loop.turn():
            got.setdefault(delta.id, []).extend(delta.tokens)
    assert loop.idle
    assert {id: tokens for id, tokens in got.items() if not id.startswith("a")} == expected
    assert got["a0"] == got["a8"] == got["a16"] != got["a4"] == got["a12"] == got["a20"]


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    loop = loop_of(ReferenceBackend(poison=True), count=2)
    loop.load_adapter("a", adapter(tmp_path, "a"))
    for name, path, fault in [
        ("a", adapter(tmp_path, "a", 2), "'a' is loaded already"),
        ("", adapter(tmp_path, "b"), "is not a name"),
        ("x=y", adapter(tmp_path, "b"), "is not a name"),
        ("b", tmp_path / "missing", "no such folder"),
        ("b", write_random(tmp_path / "wide", SHAPES, rank=5), "rank 5, and room was made for 4"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(BadInput, match=fault):
            loop.load_adapter(name, path)
    with pytest.raises(BadInput, match="'b' is not loaded; loaded: a"):
        loop.unload_adapter("b")
    with pytest.raises(BadInput, match="takes no adapters; --max-loras"):
        TinyModel().loop().load_adapter("a", tmp_path)
    loop.load_adapter("b", adapter(tmp_path, "b"))
    first = answer(loop, "a")[0]
    with pytest.raises(BadInput, match="rank 5"):
        loop.load_adapter("a", tmp_path / "wide", replace=True)
    assert answer(loop, "a")[0] == first
    loop.load_adapter("a", adapter(tmp_path, "a", 2), replace=True)
    assert answer(loop, "a")[0] != first
    with pytest.raises(BadInput, match=r"there is room for 2 adapters \(--max-loras\), taken by a, b$"):
        loop.load_adapter("c", adapter(tmp_path, "c"))


def test_a_row_whose_adapter_is_not_here_fails_alone() -> None:
    executor, seeded = loop_of(ReferenceBackend(poison=True)).executor, SamplingParams(temperature=0.0, seed=1)
    rows = tuple(
        RowInit(id, (1, 2, 3), 3, seeded, blocks=((block,),), adapter=adapter)
        for block, (id, adapter) in enumerate([("x", "gone@0"), ("y", "")])
    )
    work = tuple(Work(row.id, 0, 3, logits=1, sample=True) for row in rows)
    executor.submit(StepPlan(0, rows, work))
    result = executor.collect(0)
    assert result.failed == {"x": "its adapter gone@0 is not loaded"}
    assert list(result.tokens) == ["y"]


DEMO = SamplingParams(temperature=0.0, max_tokens=8)
QUESTION = "The capital of France is"


@pytest.fixture(scope="module")
def demo_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random adapters for the built-in model."""
    decoder = open_model(DEFAULT_MODEL).decoder
    shapes = {
        spec.hf.removesuffix(".weight"): decoder.weights[role].shape
        for role, spec in decoder.specs.items()
        if spec.part in ("attention", "mlp")
    }
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_random(folder / name, shapes, seed, size=0.07, rank=8)  # type: ignore[arg-type]
        for seed, name in enumerate(("one", "two"))
    }


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_the_built_in_model_with_adapters(demo_adapters: dict[str, Path], tmp_path: Path) -> None:
    with LLM(max_model_len=256, max_loras=2, loras={"one": demo_adapters["one"]}) as llm:
        memory = llm.engine.memory
        assert memory.adapters > 2 * 4 * 16 * 30 * (8 * 576 + 2 * 192 + 3 * 1536)
        assert memory.room + memory.adapters == memory.usable - memory.weights - memory.activations - memory.reserve
        assert ("LoRA adapters", "one; room for 2 of rank up to 16") in llm.engine.lines()
        plain = llm.generate(QUESTION, DEMO)[0].text
        changed = llm.generate(QUESTION, DEMO, adapter="one")[0]
        assert changed.text != plain
        with pytest.raises(BadInput, match="'two' is not loaded; loaded: one"):
            llm.generate(QUESTION, DEMO, adapter="two")
        with pytest.raises(BadInput, match="no such folder"):
            llm.load_lora("two", tmp_path / "missing")
        llm.load_lora("two", demo_adapters["two"])
        assert llm.loras == ["one", "two"]
        assert llm.chat("Hello", DEMO, adapter="two").text != llm.chat("Hello", DEMO).text
        llm.unload_lora("one")
        assert llm.generate(QUESTION, DEMO)[0].text == plain
        llm.load_lora("one", demo_adapters["two"])
        assert llm.generate(QUESTION, DEMO, adapter="one")[0].text not in (plain, changed.text)
        llm.unload_lora("one")
        llm.load_lora("one", demo_adapters["one"])
        again = llm.generate(QUESTION, DEMO, adapter="one")[0]
        assert again.text == changed.text


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"lora": ("one",)}, "--lora: 'one' is not NAME=PATH"),
        ({"lora": ("one=a", "one=b")}, "--lora: 'one' is given twice"),
        ({"lora": ("one=a", "two=b"), "max_loras": 1}, "--max-loras: 1 are fewer than the 2"),
        ({"max_lora_rank": 0}, "--max-lora-rank"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(BadInput, match=fault):
        EngineOptions(**options)
