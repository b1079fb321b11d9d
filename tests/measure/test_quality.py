"""What rounding costs: none against itself, more the coarser it is, and the worst places are named as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.cli import main
from headway.core.errors import BadInput
from headway.measure.quality import Quality, quality
from headway.model.load import open_model
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend
from headway.ops.reference import ReferenceBackend
from headway.text.tokenizer import Tokenizer
from tests.serve.conftest import write_tiny_checkpoint

needs_native = pytest.mark.skipif(not native.available(), reason="the compiled module is missing")
TEXT = "A cache holds what was computed. " * 6 + "Ein Schritt liest alle Gewichte, einmal. " * 5
WINDOW = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("quality")
    write_tiny_checkpoint(made)
    return made


def compared(folder: Path, tested: Backend, **options: int) -> Quality:
    return quality(str(folder), tested, ReferenceBackend(), TEXT, **{"window": WINDOW, **options})


def test_the_reference_differs_from_itself_in_nothing_and_its_perplexity_is_transformers(folder: Path) -> None:
    found = compared(folder, ReferenceBackend())
    assert found.kl_most == 0 and found.top1 == 1 and found.perplexity == found.reference_perplexity
    ids = Tokenizer(open_model(str(folder)).info.tokenizer).encode(TEXT)
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for start in range(0, len(ids) - 1, WINDOW):
        part = torch.tensor(ids[start : start + WINDOW])
        with torch.no_grad():
            said = model(part[None]).logits[0, :-1].log_softmax(-1)
        losses += (-said[torch.arange(len(part) - 1), part[1:]]).tolist()
    assert found.tokens == len(losses) == len(found.kl)
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


@needs_native
def test_the_coarser_the_numbers_the_larger_the_divergence(folder: Path) -> None:
    exact = compared(folder, NativeBackend(1, kv_dtype="f32"))
    cached = compared(folder, NativeBackend(1, kv_dtype="int8"))
    coarse = compared(folder, NativeBackend(1, weights="int4"))
    assert exact.kl_mean < 1e-6 < cached.kl_mean < coarse.kl_mean
    assert cached.kl_mean < 0.01 and cached.kl_mean <= cached.kl_p99 <= cached.kl_p999 <= cached.kl_most
    assert cached.kv_bytes_per_token == 2 * 2 * 2 * (16 + 2)  # layers, keys and values, heads; numbers, scale
    assert exact.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert coarse.weight_bytes < exact.weight_bytes and "int4/32" in coarse.tested and "int8" in cached.tested


@needs_native
def test_the_worst_positions_are_named_with_their_text(folder: Path) -> None:
    found = compared(folder, NativeBackend(1, weights="int4"), worst=5)
    assert [one.kl for one in found.worst] == sorted(found.kl, reverse=True)[:5]
    tokenizer = Tokenizer(open_model(str(folder)).info.tokenizer)
    ids = tokenizer.encode(TEXT)
    for one in found.worst:
        assert one.token == tokenizer.decode([ids[one.index]])
        assert tokenizer.decode(ids[: one.index]).endswith(one.before)
        assert 0 <= one.probability <= 1 and one.index % WINDOW != 0


def test_a_text_of_one_token_predicts_nothing(folder: Path) -> None:
    with pytest.raises(BadInput, match="--text"):
        quality(str(folder), ReferenceBackend(), ReferenceBackend(), "A")


@pytest.mark.parametrize(("name", "problem"), [("none", "cannot be read: No such file"), ("empty", "is empty")])
def test_a_text_that_cannot_be_read_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(SystemExit) as end:
        main(["quality", str(tmp_path), "--text", str(tmp_path / name), "--against", "reference"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "--text: " in error and problem in error


@needs_native
def test_the_verb_prints_a_table_and_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    command = ["quality", str(folder), "--text", str(file), "--weights", "int8", "--kv", "int8", "--worst", "3"]
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main([*command, *extra])
        assert not end.value.code
    table, _, figures = capsys.readouterr().out.rpartition('{"model"')
    assert "99.9th percentile" in table and "where they differ most: 3 of " in table
    assert max(map(len, table.splitlines())) <= 100
    assert len(json.loads('{"model"' + figures)["worst"]) == 3
