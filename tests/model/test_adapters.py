"""A model with an adapter gives the logits of the model with the adapter merged into its weights; what is no plain LoRA
adapter of the model is refused by name."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headway.core.errors import BadInput, ModelFileError
from headway.model.adapter_file import read_adapter
from headway.model.adapters import Adaptable, AdapterLimits
from headway.model.load import open_model
from headway.ops.protocol import Backend
from headway.ops.reference import ReferenceBackend
from tests.model.adapters import ALL, merged, random_pairs, write_gguf, write_peft
from tests.model.checkpoints import VARIANTS, logits, make, prompt, to_gguf
from tests.model.mixtures import MIXTURES
from tests.model.paging import Bench
from tests.ops.native.harness import kernels

CLOSE = {"rtol": 0, "atol": 1e-3}
LIMITS = AdapterLimits(3, 8)
IDS = prompt(20)
UP = "model.layers.1.mlp.up_proj"


def bench(path: Path, backend: Backend | None = None) -> tuple[Bench, Adaptable]:
    backend = backend or ReferenceBackend(poison=True)
    model = open_model(path).prepare(backend, adapters=LIMITS)
    assert model.adaptable is not None
    return Bench(model, backend), model.adaptable


def put(adaptable: Adaptable, number: int, path: Path) -> None:
    file = read_adapter(path)
    adaptable.check(file)
    adaptable.put(number, adaptable.prepare(file))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("base")
    return folder, make(folder)


@pytest.mark.parametrize(
    "variant",
    [
        "grouped", "qwen3 biases", "mlp biases", "phi3", "gemma2", "granite", "gpt2", "gpt_neox", "cohere",
        "starcoder2", "exaone4", "glm4", "nemotron", "mixtral", "qwen2_moe", "deepseek_v3",
    ],
)  # fmt: skip
def test_logits_equal_those_of_merged_weights(tmp_path: Path, variant: str) -> None:
    theirs = make(tmp_path, **(VARIANTS | MIXTURES)[variant])
    runner, adaptable = bench(tmp_path)
    pairs = random_pairs(theirs, adaptable.names())
    assert pairs.keys() == {*adaptable.names()}
    put(adaptable, 2, write_peft(tmp_path / "adapter", pairs))
    expected = logits(merged(theirs, pairs, 2.0), IDS)
    assert np.abs(expected - logits(theirs, IDS)).max() > 0.1
    np.testing.assert_allclose(runner.step({"a": IDS}, adapters={"a": 2}), expected, **CLOSE)
    cut = [runner.step({"b": IDS[at : at + 3]}, adapters={"b": 2}) for at in range(0, len(IDS), 3)]
    np.testing.assert_allclose(np.concatenate(cut), expected, **CLOSE)
    np.testing.assert_allclose(runner.step({"c": IDS}), logits(theirs, IDS), **CLOSE)
    adaptable.clear(2)
    np.testing.assert_allclose(runner.step({"d": IDS}, adapters={"d": 2}), logits(theirs, IDS), **CLOSE)


def test_rows_of_three_adapters_and_none_share_a_step(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, theirs = base
    runner, adaptable = bench(folder)
    expected = {"none": theirs}
    for number, targets in enumerate((ALL, ("q_proj", "v_proj"), ("down_proj",)), 1):
        pairs = random_pairs(theirs, targets, seed=number)
        put(adaptable, number, write_peft(tmp_path / str(number), pairs))
        expected[f"adapter {number}"] = merged(theirs, pairs, 2.0)
    numbers = {f"adapter {number}": number for number in (1, 2, 3)}
    rows = {name: prompt(5 + at, seed=at) for at, name in enumerate(expected)}
    parts = np.split(runner.step(rows, adapters=numbers), np.cumsum([len(ids) for ids in rows.values()])[:-1])
    for (name, ids), part in zip(rows.items(), parts, strict=True):
        np.testing.assert_allclose(part, logits(expected[name], ids), **CLOSE, err_msg=name)


@pytest.mark.parametrize("kind", ["peft", "gguf"])
def test_a_gguf_base_takes_both_kinds_of_adapters(
    base: tuple[Path, PreTrainedModel], tmp_path: Path, kind: str
) -> None:
    folder, theirs = base
    to_gguf(folder, tmp_path / "base.gguf")
    pairs = random_pairs(theirs)
    runner, adaptable = bench(tmp_path / "base.gguf")
    path = (
        write_peft(tmp_path / "a", pairs) if kind == "peft" else write_gguf(tmp_path / "a.gguf", pairs, theirs.config)
    )
    put(adaptable, 1, path)
    np.testing.assert_allclose(
        runner.step({"a": IDS}, adapters={"a": 1}), logits(merged(theirs, pairs, 2.0), IDS), **CLOSE
    )


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"lora_alpha": 3}, lambda module: 3 / 4),
        ({"use_rslora": True}, lambda module: 8 / 2),
        ({"alpha_pattern": {"q_proj": 2}}, lambda module: (2 if module.endswith(".q_proj") else 8) / 4),
        ({"alpha_pattern": {f"^{re.escape(UP)}$": 2}}, lambda module: (2 if module == UP else 8) / 4),
        ({"alpha_pattern": {"_proj": 2, "proj": 3}}, lambda module: 8 / 4),
        ({"r": 5, "rank_pattern": {"layers.0.self_attn.k_proj": 4, **dict.fromkeys(ALL, 4)}}, lambda module: 8 / 4),
        ({"target_modules": "all-linear", "task_type": ...}, lambda module: 8 / 4),
        ({"target_modules": r".*\.(q|k)_proj", "unknown_to_us": None}, lambda module: 8 / 4),
    ],
)  # fmt: skip
def test_settings_say_how_much_is_added(
    base: tuple[Path, PreTrainedModel], tmp_path: Path, settings: dict[str, Any], scales: Callable[[str], float]
) -> None:
    pairs = random_pairs(base[1])
    file = read_adapter(write_peft(tmp_path / "a", pairs, **settings))
    assert {module: pair.scale for module, pair in file.pairs.items()} == {module: scales(module) for module in pairs}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", kernels()[:1])
def test_native_kernels_add_what_16_bit_files_hold(
    base: tuple[Path, PreTrainedModel], tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    from headway.ops.native.backend import NativeBackend

    folder, theirs = base
    pairs = {module: (a.to(dtype), b.to(dtype)) for module, (a, b) in random_pairs(theirs).items()}
    runner, adaptable = bench(folder, NativeBackend(threads=2, kernels=name, kv_dtype="f32"))
    put(adaptable, 1, write_peft(tmp_path / "a", pairs, dtype))
    expected = logits(merged(theirs, pairs, 2.0), IDS)
    together = runner.step({"a": IDS, "b": IDS[:7]}, adapters={"a": 1})
    np.testing.assert_allclose(together[: len(IDS)], expected, **CLOSE)
    plain = Bench(open_model(folder).prepare(backend := NativeBackend(2, kernels=name, kv_dtype="f32")), backend)
    np.testing.assert_array_equal(together[len(IDS) :], plain.step({"b": IDS[:7]}))


def test_the_digest_names_what_is_added(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    pairs = random_pairs(base[1])
    made = [
        write_peft(tmp_path / "a", pairs),
        write_peft(tmp_path / "b", pairs),
        write_peft(tmp_path / "c", pairs, lora_alpha=9),
    ]
    one, same, other = (read_adapter(path).digest for path in made)
    assert one == same != other


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"peft_type": "LOHA"}, "peft_type: 'LOHA' is not supported; LORA is"),
        ({"use_dora": True}, "use_dora: True is not supported"),
        ({"bias": "lora_only"}, "bias: 'lora_only' is not supported; none is"),
        ({"lora_bias": True}, "lora_bias: True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\] is not supported"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices: \[3\] is not supported"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' changes the base model"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"task_type": "SEQ_CLS"}, "task_type: 'SEQ_CLS' is not supported"),
        ({"r": 0}, "r: 0 is not an integer from 1"),
        ({"r": 3}, "its rank is 4, the config says 3"),
        ({"lora_alpha": -1}, "lora_alpha: -1 is not a positive number"),
        ({"lora_alpha": 1e308}, "alpha over rank is 2.5e.307; up to 10000 is accepted"),
        ({"target_modules": 5}, "target_modules: 5 is neither a list of names nor a pattern"),
        ({"target_modules": {"q_proj": 1}}, "is neither a list of names nor a pattern"),
        ({"target_modules": ["q_proj", 5]}, "is neither a list of names nor a pattern"),
        ({"alpha_pattern": {"(a+)+$": 2}}, r"\(a\+\)\+\$: is a regular expression"),
        ({"target_modules": ["q_proj"]}, "target_modules of the config does not name it"),
    ],
)
def test_settings_that_are_not_carried_out_are_refused(
    base: tuple[Path, PreTrainedModel], tmp_path: Path, settings: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ModelFileError, match=fault):
        read_adapter(write_peft(tmp_path / "a", random_pairs(base[1]), **settings))


KERNEL = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]
HEAD = "base_model.model.lm_head.lora_A.weight"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({Q.format("A"): None}, "one of its two matrices is missing"),
        ({Q.format("A"): torch.zeros(5, 64)}, r"\(5, 64\) and \(64, 4\) do not fit together"),
        ({Q.format("A"): torch.zeros(4, 60)}, r"does not fit the model's matrix \(64, 64\)"),
        ({Q.format("B"): torch.zeros(64, 4, dtype=torch.float64)}, "dtype 'F64' is not supported"),
        ({Q.format("B"): torch.full((64, 4), math.nan)}, "a weight is infinite or not a number"),
        ({Q.format("A").removeprefix("base_model.model."): torch.zeros(4, 64)}, "another one stands for the same"),
        ({HEAD: torch.zeros(4, 64), HEAD.replace("_A", "_B"): torch.zeros(160, 4)}, "'lm_head' is no linear layer"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 160)}, "only lora_A and lora_B"),
        ({Q.format("magnitude_vector"): torch.zeros(64)}, "only lora_A and lora_B"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    base: tuple[Path, PreTrainedModel], tmp_path: Path, change: dict[str, torch.Tensor | None], fault: str
) -> None:
    folder, theirs = base
    path = write_peft(tmp_path / "a", random_pairs(theirs), target_modules="all-linear")
    tensors = load_file(path / "adapter_model.safetensors") | change
    save_file({name: x for name, x in tensors.items() if x is not None}, path / "adapter_model.safetensors")
    _, adaptable = bench(folder)
    with pytest.raises(ModelFileError, match=fault):
        put(adaptable, 1, path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mapped pages are looked at beforehand on Linux")
@pytest.mark.skipif(KERNEL < [5, 14], reason="Linux says so since 5.14")
def test_a_file_that_is_cut_short_meanwhile_ends_nobody(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    path = write_peft(tmp_path / "a", random_pairs(base[1]))
    file = read_adapter(path)
    os.truncate(path / "adapter_model.safetensors", 4096)
    with pytest.raises(ModelFileError, match=r"adapter_model\.safetensors: cannot be read"):
        _ = file.digest


def test_what_is_no_adapter_is_refused(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, theirs = base
    pairs = random_pairs(theirs)
    with pytest.raises(BadInput, match="there is no such folder"):
        read_adapter(tmp_path / "missing")
    with pytest.raises(ModelFileError, match=r"holds no adapter_config\.json"):
        read_adapter(folder)
    to_gguf(folder, tmp_path / "base.gguf")
    with pytest.raises(ModelFileError, match="this is no LoRA adapter"):
        read_adapter(tmp_path / "base.gguf")
    pickled = write_peft(tmp_path / "pickled", pairs)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ModelFileError, match="pickled weights are not read"):
        read_adapter(pickled)
    _, adaptable = bench(folder)
    with pytest.raises(ModelFileError, match="fits a GGUF model only"):
        put(adaptable, 1, write_gguf(tmp_path / "a.gguf", pairs, theirs.config))
    with pytest.raises(BadInput, match="rank 9, and room was made for 8"):
        put(adaptable, 1, write_peft(tmp_path / "large", random_pairs(theirs, rank=9), r=9))
    empty = write_peft(tmp_path / "empty", {})
    with pytest.raises(ModelFileError, match="holds no LoRA tensors"):
        read_adapter(empty)
    (empty / "adapter_config.json").write_text(json.dumps({"r": 4}))
    with pytest.raises(ModelFileError, match="peft_type: is missing"):
        read_adapter(empty)
