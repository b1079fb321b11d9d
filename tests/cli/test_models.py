"""`headway models`: local and known ones, what they take and do here, and nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.engine.profile import profile_path
from headway.measure.probe import save_profile
from headway.model.source import DEFAULT_MODEL, named_source
from headway.roofline.profile import Profile
from tests.model.checkpoints import make


def listed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, Any]]:
    with pytest.raises(SystemExit) as stopped:
        main(["models", "--json", *args])
    assert not stopped.value.code
    return {model["name"]: model for model in map(json.loads, capsys.readouterr().out.splitlines())}


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches without a model, and a hub that does not answer."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "headway"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


def test_known_models_have_size_format_and_whether_they_fit(capsys: pytest.CaptureFixture[str]) -> None:
    models = listed(capsys)
    demo, small, large = (models[name] for name in ("demo", "qwen3-0.6b", "llama-3.1-405b"))
    assert not demo["here"] and not small["here"]
    assert (small["source"], small["format"], small["fits"]) == ("Qwen/Qwen3-0.6B", "bf16", True)
    assert large["fits"] is False and large["bytes"] > 4e11
    assert small["tokens_per_second"] is None and small["label"] == ""
    assert "deepseek-v3.1-nvfp4" not in models  # refused when it is loaded
    assert set(listed(capsys, "qwen3-0.6")) == {"qwen3-0.6b"}


def test_a_measured_machine_says_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    profile_path().parent.mkdir(parents=True)
    rates = {"int8": 2e11, "bf16": 1e11, "fp32": 5e10}
    save_profile(Profile("box", "2026-01-01", 2, 64e9, {"2": 20e9}, rates), profile_path())
    small = listed(capsys)["qwen3-0.6b"]
    assert small["label"] == "bound"
    assert small["tokens_per_second"] == pytest.approx(20e9 / small["bytes"], rel=0.5)  # memory binds


def test_models_of_the_hub_cache_come_first(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = empty / "hub" / "models--org--tiny"
    make(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    first = next(iter(listed(capsys).values()))
    assert (first["name"], first["here"], first["fits"]) == ("org/tiny", True, True)
    with pytest.raises(SystemExit):
        main(["models", "tiny"])
    assert "org/tiny" in capsys.readouterr().out


def test_what_can_be_downloaded_is_named_whole_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["models"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and "tokens/s" not in lines[0]  # nothing was measured
    assert "…" not in "".join(lines) and any("HuggingFaceTB/SmolLM2-135M-Instruct " in line for line in lines)


def test_short_names() -> None:
    assert named_source("demo") == DEFAULT_MODEL
    assert named_source("llama-3.1-8b") == "meta-llama/Llama-3.1-8B-Instruct"
    assert named_source("Qwen3-4B") == "Qwen/Qwen3-4B"
    assert named_source("Qwen/Qwen3-4B") is named_source("nonsense") is None


def test_a_word_that_no_model_has_is_answered_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["models", "zzz"])
    shown = capsys.readouterr()
    assert stopped.value.code == 1 and not shown.out and "no model has 'zzz' in its name" in shown.err
