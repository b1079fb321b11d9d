"""`headway plan`: the JSON contract, files it writes, and one sentence with exit code 2 for bad input."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from datetime import datetime
from math import ceil, floor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headway.cli import main
from headway.cli.plan import VERBS
from headway.core.errors import ModelFileError
from headway.engine.references import load_shape
from headway.roofline.frontier import knee
from headway.roofline.hardware import find_hardware
from headway.roofline.replica import Replica, decode, deploy
from headway.roofline.speculation import verify_costs
from headway.roofline.step import StepTime, prefill_step
from headway.shape.catalogue import find_model
from tests.report.pages import self_contained

STEP = ["step", "--model", "llama-3.1-8b", "--hardware", "h100-sxm"]


def plan(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Standard output of `headway plan ...`, which must end with `code`."""
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert (stopped.value.code or 0) == code
    return capsys.readouterr().out


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan([*arguments, "--json"], capsys, code))
    return found


def test_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer([*STEP, "--batch", "64", "--context", "4096"], capsys)
    assert found["seconds"] == pytest.approx(0.01505, rel=1e-3)
    assert found["tokens_per_second"] == pytest.approx(4252, rel=1e-3)
    assert (found["binds"], found["kind"], found["largest_term"]) == ("memory", "bound", "kv")
    memory = found["terms"]["weights"] + found["terms"]["kv"]
    assert memory == pytest.approx(found["seconds"])
    assert answer([*STEP, "--batch", "512", "--context", "0"], capsys)["binds"] == "compute"


def test_step_divided_by_a_measured_share_is_called_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    bound = answer([*STEP], capsys)
    estimate = answer([*STEP, "--mbu", "0.8"], capsys)
    assert estimate["kind"] == "estimate"
    assert estimate["seconds"] == pytest.approx(bound["seconds"] / 0.8)
    said, shared = plan([*STEP], capsys), plan([*STEP, "--mbu", "0.8"], capsys)
    assert "BOUND: nothing can be faster" in said
    assert "ESTIMATE" in shared and "BOUND" not in shared


def test_exact_mode_reads_no_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    textbook, exact = answer([*STEP], capsys), answer([*STEP, "--mode", "exact"], capsys)
    assert exact["seconds"] < textbook["seconds"]
    assert exact["terms"]["head"] > 0


def test_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["capacity", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--context", "4096"]
    assert answer(base, capsys)["batch"] == 119
    found = answer([*base, "--tpot-ms", "12"], capsys)
    assert (found["batch"], found["limited_by"]) == (44, "tpot-memory")
    assert answer([*base, "--model", "llama-3.1-405b"], capsys, 1)["limited_by"] == "nothing fits"
    beacon = ["--model", "llama-3.1-405b", "--gpus", "8", "--precision", "fp8", "--kv", "fp8", "--context", "8192"]
    assert answer([*base, *beacon], capsys)["batch"] == pytest.approx(110, rel=0.02)


def test_tensor_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["tp", "--model", "llama-3.1-70b", "--hardware", "h100-sxm", "--degrees", "1,2,4,8"]
    two = answer([*base, "--link-latency-us", "2"], capsys)
    assert two["seconds"]["8"] == pytest.approx(0.00976, rel=3e-3)
    assert two["best_degree"] == 8
    assert two["best_degree_continuous"] == pytest.approx(8.1, rel=0.01)
    five = answer([*base, "--link-latency-us", "5"], capsys)
    assert five["best_degree"] == 4 and five["seconds"]["8"] > five["seconds"]["4"]


def test_frontier(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = ["frontier", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--context", "4096"]
    rows, plot = tmp_path / "points.csv", tmp_path / "curve.svg"
    found = answer([*base, "--csv", str(rows), "--plot", str(plot)], capsys)
    assert found["ceiling"] == pytest.approx(6240, rel=1e-3)
    assert found["knee"] == pytest.approx(295, rel=2e-3)
    assert 400 < found["critical_context"] < 440
    keys = {"batch", "tokens_per_second_per_user", "tokens_per_second_per_gpu", "fits"}
    assert all(keys <= point.keys() for point in found["points"])
    assert len(list(csv.DictReader(rows.open()))) == len(found["points"])
    assert plot.read_text().lstrip().startswith("<?xml")
    mixture = ["frontier", "--model", "deepseek-v3", "--hardware", "h100", "--precision", "bf16"]
    assert answer(mixture, capsys)["knee"] == pytest.approx(5400, rel=0.02)


def test_cost(capsys: pytest.CaptureFixture[str]) -> None:
    node = ["cost", "--model", "llama-3.1-70b", "--hardware", "h100-sxm", "--gpus", "8", "--batch", "185"]
    found = answer([*node, "--context", "8192", "--price", "2"], capsys)
    assert found["usd_per_million_output"] == pytest.approx(0.57, rel=0.01)
    assert found["usd_per_million_input"] == pytest.approx(0.16, rel=0.02)
    dated = answer([*node, "--context", "8192"], capsys)
    assert "2026" in dated["price_source"]
    reduced = answer([*node, "--context", "8192", "--price", "2", "--all-reduce", "ring"], capsys)
    assert reduced["usd_per_million_output"] == pytest.approx(0.72, rel=0.02)


def test_cost_table_alone_is_the_first_texts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["batch"]: row for row in answer(["cost", "--table"], capsys)["rows"]}
    for batch, dollars in {1: 100.75, 8: 12.59, 64: 1.57, 256: 0.39}.items():
        assert rows[batch]["usd_per_million_output"] == pytest.approx(dollars, rel=0.015)
        assert rows[batch]["usd_per_million_input"] == pytest.approx(1.35, rel=0.005)
        assert rows[batch]["fits"] == (batch < 256)
    assert rows[256]["kv_gb"] == pytest.approx(541, rel=0.01)
    text = plan(["cost", "--table"], capsys)
    assert "NO: 541 GB of 234" in text and "$/M in: estimate at 50% MFU" in text


def test_a_price_of_input_is_a_bound_only_at_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["cost", *STEP[1:], "--price", "2"]
    assert "output, bound" in plan(base, capsys) and "input, estimate at 50% MFU" in plan(base, capsys)
    assert "50% MFU" in answer(base, capsys)["notes"][0]
    assert "input, bound" in plan([*base, "--mfu", "1"], capsys)
    assert answer([*base, "--mfu", "1"], capsys)["notes"] == []


def test_ratio_and_levers(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", "llama-3.1-8b", "--hardware", "h100-sxm"]
    assert answer(["ratio", *common], capsys)["ratio"] == pytest.approx(7.2, rel=0.01)
    table = answer(["levers", *common], capsys)["levers"]
    assert {"weights", "kv", "prefill", "steps per token"} <= {row["term"] for row in table}


def test_explain_says_what_binds_and_what_would_then(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    base = ["explain", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--tpot-ms", "30", "--html", str(page)]
    found = answer(base, capsys)
    assert (found["capacity"], found["limited_by"], found["largest_term"]) == (119, "memory", "kv")
    changes = {row["change"]: row for row in found["sensitivities"]}
    assert changes["8-bit KV cache"]["batch"] == pytest.approx(2, rel=0.02)
    assert changes["arithmetic +10 %"]["throughput"] == pytest.approx(1)
    assert "svg" in self_contained(page.read_text()).tags


def test_a_model_that_does_not_fit_is_explained_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(["explain", "--model", "deepseek-v3", "--hardware", "h100-sxm"], capsys)
    assert "0 sequences, limited by nothing fits" in text and "One change at a time" not in text


def test_plots_without_matplotlib_are_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "frontier", *STEP[1:], "--plot", str(tmp_path / "curve.svg")])
    assert stopped.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_gguf_header_and_a_folder_are_models_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer(["step", "--model", str(tmp_path), "--hardware", "h100"], capsys)
    assert found["terms"]["kv"] == pytest.approx(2 * 2 * 16 * 2 * 2 * 4096 / 3.35e12)


def split_gguf(folder: Path, parts: int = 3) -> list[Path]:
    """A small model in one file and in parts, of which the first holds no tensors."""
    sizes = {"token_embd.weight": (256, 64), "blk.0.attn_q.weight": (64, 64), "blk.0.ffn_up.weight": (128, 64)}
    written = []
    for number in range(-1, parts):  # -1: the whole
        name = "whole" if number < 0 else f"m-{number + 1:05}-of-{parts:05}"
        writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama")
        if number >= 0:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
        if number <= 0:
            writer.add_block_count(1)
            writer.add_context_length(128)
            writer.add_embedding_length(64)
            writer.add_head_count(4)
        for index, (tensor, size) in enumerate(sizes.items()):
            if number < 0 or index % (parts - 1) + 1 == number:
                writer.add_tensor(tensor, np.zeros(size, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        written.append(folder / f"{name}.gguf")
    return written


def test_any_part_of_a_split_gguf_stands_for_the_whole(tmp_path: Path) -> None:
    """reported t2-027"""
    whole, *parts = split_gguf(tmp_path)
    for part in parts:
        assert load_shape(str(part)).n_params == load_shape(str(whole)).n_params > 0
        assert load_shape(str(part)).name == "m"
    with pytest.raises(ModelFileError, match=r"several models: m-00001-of-00003\.gguf, whole\.gguf; name one"):
        load_shape(str(tmp_path))
    whole.rename(tmp_path / "mmproj-m.gguf")
    assert load_shape(str(tmp_path)) == load_shape(str(parts[1]))


def test_parts_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    """reported t2-027"""
    _, first, second, third = split_gguf(tmp_path)
    third.rename(tmp_path / "away")
    with pytest.raises(ModelFileError, match=r"missing beside it: m-00003-of-00003\.gguf"):
        load_shape(str(first))
    third.write_bytes(second.read_bytes())
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003\.gguf is not part 3 of the same 3"):
        load_shape(str(first))
    other = second.rename(tmp_path / "other.gguf")
    with pytest.raises(ModelFileError, match=r"is a part of 3; parts must be called NAME-00001-of-00003"):
        load_shape(str(other))


def test_every_answer_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    levers = " ".join(plan(["levers", *STEP[1:]], capsys).split())
    assert "accepted with 80% (--acceptance) and costs 5% of a step (--draft-cost)" in levers
    assert "if 80% are accepted" in levers
    cost = " ".join(plan(["cost", *STEP[1:]], capsys).split())
    assert "per GPU-hour (on-demand), typical of $1.99 to $5.00 seen by 2026-05 (--price, --price-basis)" in cost
    for verb in ("step", "prefill", "frontier", "capacity", "tp", "ratio", "explain", "estimate"):
        found = answer([verb, *STEP[1:]], capsys)["assumptions"]
        assert any("3.35 TB/s" in line and "2026-11-29" in line for line in found), verb
        assert "assumed:" in plan([verb, *STEP[1:]], capsys)


def test_what_does_not_fit_says_how_many_gpus_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--model", "llama-3.1-405b", "--hardware", "h100-sxm"]
    found = answer(["capacity", *large], capsys, 1)
    assert found["gpus_needed"] == 16  # 812 GB of weights; 128 heads split in powers of two
    assert answer(["capacity", *large, "--gpus", "16"], capsys)["batch"] > 0
    text = plan(["capacity", *large], capsys, 1)
    assert "needs 16 GPUs" in text and "-7" not in text
    step = plan(["step", *large], capsys).splitlines()
    assert step[2] == "does not fit: needs 16 GPUs", "before any figure"


def test_contexts_that_the_model_was_not_made_for_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("step", "frontier", "capacity", "tp", "cost"):
        notes = answer([verb, *STEP[1:], "--context", "200000"], capsys)["notes"]
        assert "200,000 tokens are beyond the 131,072 the model was made for" in notes, verb
    assert answer(["prefill", *STEP[1:], "--input-tokens", "131072"], capsys)["notes"] == []


def test_prefill_says_from_what_length_attention_is_most_of_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["prefill", *STEP[1:]], capsys)["attention_overtakes"] == pytest.approx(61_266, rel=1e-3)
    assert "prompts from 61,266 tokens on are more work in attention" in plan(["prefill", *STEP[1:]], capsys)


def test_levers_refilled_are_what_explain_counts(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["--model", "llama-3.1-70b", "--hardware", "h100", "--gpus", "4"]
    levers = answer(["levers", *many, "--input-tokens", "4096", "--output-tokens", "1"], capsys)["levers"]
    filled = {row["name"]: row["filled"] for row in levers}
    explained = answer(["explain", *many], capsys)["sensitivities"]
    gains = {row["change"]: row["throughput"] for row in explained}
    pairs = {"weights in fp8": "8-bit weights", "cache in 8 bits": "8-bit KV cache", "twice the GPUs": "twice the GPUs"}
    for lever, change in pairs.items():
        assert filled[lever] == pytest.approx(gains[change], rel=0.01)


@pytest.mark.parametrize("verb", ["levers", "search", "audit"])
def test_tables_fit_80_columns(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "claims.csv").write_text(
        "gpu,model,quant,batch,tok_s_out\nRTX 4090,llama-3.1-8b,Q8_0,1,400\nRTX 4090,llama-3.1-70b,bf16,1,1\n"
    )
    arguments = {
        "levers": STEP[1:], "search": [*STEP[1:], "--rate", "5"], "audit": [str(tmp_path / "claims.csv")],
    }[verb]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    text = plan([verb, *arguments], capsys, int(verb == "audit"))
    table = text.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert all(len(line) <= 80 for line in table)
    if verb == "audit":
        assert "2 claims, 2 could be checked, 1 is impossible as labelled" in text
        assert "1 do not fit in the memory of their devices" in text
    else:  # no row needs a second line: its figures stand on every line
        assert all(any(letter.isdigit() for letter in line[30:]) for line in table[2:])


def test_parts_of_a_step_that_are_nothing_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "all reduce" not in plan(STEP, capsys)
    assert "all reduce" in plan([*STEP, "--gpus", "2", "--all-reduce", "ring"], capsys)
    served = plan([*STEP, "--gpus", "2", "--all-reduce", "served"], capsys)
    assert "all reduce" in served and "as measured in engines' captured graphs" in served


def test_textbook_mode_says_where_its_division_of_the_cache_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """reported t2-055: a latent cache is held whole by every GPU, and eight heads are not divided by sixteen."""
    latent = ["capacity", "--model", "deepseek-v3", "--hardware", "h200", "--gpus", "8"]
    assert "every GPU holds its latent cache" in plan(latent, capsys)
    wide = ["capacity", "--model", "llama-3.1-70b", "--hardware", "h100", "--gpus", "16"]
    assert "every GPU holds some of its 8 KV heads" in " ".join(plan(wide, capsys).split())
    for fine in ([*latent, "--mode", "exact"], [*wide, "--gpus", "8"]):
        assert "every GPU holds" not in plan(fine, capsys)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_its_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan([verb, "--help"], capsys)
    assert VERBS[verb].help.split(":")[0].split(",")[0] in " ".join(text.split()) and "--json" in text


def test_verbs_are_listed_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(f"  {verb} " in plan(["--help"], capsys) for verb in VERBS)
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "guess"])
    assert stopped.value.code == 2 and "'guess' is not a verb; choose from models" in capsys.readouterr().err


def test_score_of_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with gzip.open(Path(__file__).parents[2] / "benchmarks" / "data" / "silicon_runs.csv.gz", "rt") as file:
        few = [next(file) for _ in range(40)]
    (tmp_path / "runs.csv").write_text("".join(few))
    found = answer(["score", str(tmp_path / "runs.csv")], capsys)
    counted = sum(kind["n"] for kind in found["tpot"].values()) + found["skipped"]["n"]
    assert counted == 39 and found["groups"][0]["mape"] > 0
    assert "mean error" in plan(["score", str(tmp_path / "runs.csv")], capsys)


def test_models_and_devices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["models", "deepseek"], capsys)["models"]
    assert all("deepseek" in entry["name"] for entry in found)
    assert next(m for m in found if m["name"] == "deepseek-v3")["active_parameters"] == pytest.approx(37e9, rel=0.03)
    device = next(d for d in answer(["hardware"], capsys)["devices"] if d["name"] == "h100-sxm")
    assert device["price"]["on-demand"]["date"] == "2026-05" and device["bandwidth"] == 3.35e12
    assert "$2.95 on-demand 2026-05" in plan(["hardware", "h100"], capsys)
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "models", "nonesuch"])
    assert stopped.value.code == 1


@pytest.mark.parametrize("verb", ["step", "frontier", "tp", "cost", "levers", "explain", "models", "hardware"])
def test_answers_fit_80_columns_and_pipes_carry_no_colours(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """reported t2-036"""
    monkeypatch.setenv("COLUMNS", "80")
    text = plan([verb, *(STEP[1:] if verb not in ("models", "hardware") else [])], capsys)
    lines = [line for line in text.splitlines() if "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in line]
    assert (lines and all(len(line) <= 80 for line in lines)) or verb == "step"
    assert "\x1b" not in text and "\r" not in text and "\N{HORIZONTAL ELLIPSIS}" not in text


def test_a_page_names_its_date_command_and_assumptions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    plan(["explain", *STEP[1:], "--tpot-ms", "30", "--html", str(page)], capsys)
    text = page.read_text()
    command = f"headway plan explain --model llama-3.1-8b --hardware h100-sxm --tpot-ms 30 --html {page}"
    assert f"<pre>{command}</pre>" in text and f"{datetime.now():%Y-}" in text
    assert "data-sheet peaks" in text and "dotted: more than the 119 sequences" in text


BAD = {
    "degree that splits no heads": (["tp", *STEP[1:], "--degrees", "3"], "--degrees: 3"),
    "degrees that are words": (["tp", *STEP[1:], "--degrees", "two"], "--degrees: 'two'"),
    "device": (["step", "-m", "llama-3.1-8b", "--hardware", "h999"], "--hardware: 'h999'"),
    "no device": (["step", "-m", "llama-3.1-8b"], "--hardware: missing"),
    "model": (["step", "-m", "nothing", "--hardware", "h100"], "--model: 'nothing'"),
    "no model": (["step", "--hardware", "h100"], "--model: missing"),
    "batch": ([*STEP, "--batch", "-1"], "--batch: -1"),
    "no number": ([*STEP, "--batch", "x"], "--batch: 'x'; accepted: a whole number"),
    "no value": ([*STEP, "--batch"], "--batch: a value is missing"),
    "misspelt": ([*STEP, "--contxt", "5"], "--contxt: no such option; did you mean --context?"),
    "misspelt verb": (["leevers"], "'leevers' is not a verb; did you mean levers?"),
    "no file": (["audit"], "FILE: missing"),
    "slo": (["search", *STEP[1:], "--rate", "2", "--slo", "ttft=2"], "--slo: 'ttft=2'; accepted: ttft=1s, tpot=50ms"),
    "zero batch": ([*STEP, "--batch", "0"], "--batch: 0"),
    "context": ([*STEP, "--context", "-5"], "--context: -5"),
    "exact context": ([*STEP, "--context", "-5", "--mode", "exact"], "--context: -5"),
    "exact heads": ([*STEP, "--gpus", "3", "--mode", "exact"], "--gpus: 3 does not divide the 32 attention heads"),
    "gpus": ([*STEP, "--gpus", "0"], "--gpus: 0"),
    "gpus that split no heads": ([*STEP, "--gpus", "3"], "--gpus: 3 does not divide the 32 attention heads"),
    "not a number": ([*STEP, "--link-latency-us", "nan"], "--link-latency-us: nan"),
    "reserve": (["capacity", *STEP[1:], "--reserve-gb", "nan"], "--reserve-gb: nan"),
    "draft cost": (["levers", *STEP[1:], "--draft-cost", "-1"], "--draft-cost: -1"),
    "search degrees": (["search", *STEP[1:], "--rate", "2", "--degrees", "0"], "--degrees: 0"),
    "engine": (["estimate", *STEP[1:], "--engine", "foo"], "--engine: 'foo'"),
    "table price": (["cost", "--table", "--price", "-1"], "--price: -1"),
    "precision": ([*STEP, "--precision", "fp3"], "--precision: 'fp3'"),
    "cache": ([*STEP, "--kv", "fp3"], "--kv: 'fp3'"),
    "math": ([*STEP, "--math", "fp4"], "--math: 'fp4'"),
    "mode": ([*STEP, "--mode", "guess"], "--mode: 'guess'"),
    "mbu": ([*STEP, "--mbu", "1.5"], "--mbu: 1.5"),
    "peak": ([*STEP, "--peak-tflops", "-1"], "--peak-tflops"),
    "latency": (["tp", "-m", "llama-3.1-8b", "--hardware", "h100", "--link-latency-us", "-1"], "--link-latency-us: -1"),
    "no link": ([*STEP[:-1], "m4-max", "--all-reduce", "ring"], "--link-gbs: m4-max has no catalogued link"),
    "all-reduce": ([*STEP, "--all-reduce", "tree"], "--all-reduce: 'tree'; accepted: ring, one-shot, served"),
    "served without links": ([*STEP[:-1], "m4-max", "--all-reduce", "served"], "--all-reduce: 'served': m4-max has no"),
    "served and a link": (
        [*STEP, "--all-reduce", "served", "--link-gbs", "5"], "leave out --link-latency-us and --link-gbs",
    ),
    "target": (["capacity", *STEP[1:], "--tpot-ms", "-3"], "--tpot-ms: -3"),
    "capacity context": (["capacity", *STEP[1:], "--context", "0"], "--context: 0"),
    "price": (["cost", *STEP[1:], "--price", "-2"], "--price: -2"),
    "no price": (["cost", *STEP[1:-1], "m4-max"], "--price: no price is catalogued for m4-max"),
    "nothing to price": (["cost", "-m", "llama-3.1-405b", "--hardware", "h100"], "--batch: no batch is possible"),
    "utilisation": (["cost", *STEP[1:], "--utilisation", "0"], "--utilisation: 0"),
    "hits": (["cost", *STEP[1:], "--cache-hit", "2"], "--cache-hit: 2"),
    "frontier batches": (["frontier", *STEP[1:], "--batches", "0,1"], "--batch: 0"),
    "plot": (["frontier", *STEP[1:], "--plot", "curve.pdf"], "--plot: curve.pdf"),
    "ratio without a peak": (["ratio", *STEP[1:-1], "m4-max"], "--peak-tflops"),
    "prompts without a peak": (["prefill", *STEP[1:-1], "m4-max"], "--peak-tflops: no peak is catalogued for m4-max"),
    "whose predictions": (["score", "nowhere.csv", "--model", "guess"], "--model: 'guess'; accepted: estimate, search"),
    "their price": (["cost", *STEP[1:-1], "m4-max", "--price", "1"], "--peak-tflops: no peak is catalogued"),
    "folder": (["step", "-m", ".", "--hardware", "h100"], "--model: . has no config.json"),
    "curve": (["levers", *STEP[1:], "--acceptance-curve", "a,b"], "--acceptance-curve: 'a,b'"),
    "audit": (["audit", "nowhere.csv"], "FILE: cannot read nowhere.csv"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_that_names_the_field(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, sentence = BAD[name]
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert sentence in printed.err
    assert printed.err.count("\n") == 1 and printed.out == ""


def test_a_config_that_is_not_a_language_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "step", "--model", str(tmp_path), "--hardware", "h100"])
    assert stopped.value.code == 2
    assert "config.json: model_type: 'vit' is not a language model" in capsys.readouterr().err


def test_a_verb_refuses_a_mode_it_does_not_compute(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "cost", "--table", *STEP[1:], "--mode", "exact"])
    assert stopped.value.code == 2
    assert "--mode: 'exact'; accepted by this verb: textbook" in capsys.readouterr().err


EXACT = {  # verb -> a figure of its answer that is a step or a prefill of StepTime
    "frontier": (["--batches", "64"], lambda found: found["points"][0]["seconds"]),
    "cost": (["--batch", "64"], lambda found: found["seconds"]),
    "explain": (["--batch", "64"], lambda found: found["seconds"]),
    "levers": (["--batch", "64", "--input-tokens", "4095", "--output-tokens", "2"],
               lambda found: found["levers"][0]["seconds_before"]),
}  # fmt: skip


@pytest.mark.parametrize("verb", EXACT)
def test_exact_mode_has_the_schedulers_step_in_every_verb(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    """The same step as `plan step --mode exact`, which is `StepTime`; the textbook's is longer here."""
    options, read = EXACT[verb]
    deployment = [*STEP[1:], "--mode", "exact"]
    step = answer(["step", *deployment, "--batch", "64", "--context", "4096"], capsys)["seconds"]
    found = answer([verb, *deployment, *options], capsys)
    assert found["mode"] == "exact" and read(found) == pytest.approx(step)
    assert read(answer([verb, *STEP[1:], *options], capsys)) > 1.02 * step


def test_exact_prefill_is_a_step_that_is_all_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    model = StepTime(find_model("llama-3.1-8b"), find_hardware("h100-sxm"))
    whole = ["prefill", *STEP[1:], "--mode", "exact", "--input-tokens", "1000", "--cached-tokens", "200"]
    bound = answer([*whole, "--mfu", "1"], capsys)
    assert bound["seconds"] == pytest.approx(model.predict(prefill_step(model.shape, 800, 200)))
    assert answer([*whole, "--mfu", "0.5"], capsys)["seconds"] == pytest.approx(2 * bound["seconds"])


def test_the_ratio_names_its_mfu_and_in_exact_mode_its_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(["ratio", *STEP[1:]], capsys)
    assert "ESTIMATE" in text and "50% of the peak (MFU, assumed; --mfu)" in text
    assert "the bound" in plan(["ratio", *STEP[1:], "--mfu", "1"], capsys)
    exact = answer(["ratio", *STEP[1:], "--mode", "exact", "--input-tokens", "500"], capsys)
    priced = answer(["cost", *STEP[1:], "--mode", "exact", "--batch", "64", "--input-tokens", "500"], capsys)
    assert exact["ratio"] == pytest.approx(priced["ratio"])
    with pytest.raises(SystemExit):
        main(["plan", "ratio", *STEP[1:], "--input-tokens", "500"])
    assert "--input-tokens: the textbook ratio has no prompt length" in capsys.readouterr().err


def test_exact_mode_leaves_out_what_cannot_be_split(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight key/value heads and 32 query heads have no layout on 64 GPUs."""
    many = [*STEP[1:], "--gpus", "32", "--mode", "exact"]
    changes = [row["change"] for row in answer(["explain", *many], capsys)["sensitivities"]]
    assert "twice the GPUs" not in changes and "arithmetic +10 %" in changes
    assert "twice the GPUs" not in [row["name"] for row in answer(["levers", *many], capsys)["levers"]]


def exact_replica() -> Replica:
    return deploy(find_model("llama-3.1-8b"), find_hardware("h100-sxm"), mode=Replica)


def test_speculation_is_priced_as_a_step_over_all_positions() -> None:
    model = exact_replica().step_time()
    plain, drafted = (verify_costs(model, 64, 4096, 4)[k] for k in (0, 4))
    assert plain == 1
    assert plain < drafted < 1.05 * plain, "memory-bound: four more positions are nearly free"
    assert verify_costs(model, 512, 1, 4)[4] > 2, "compute-bound: not"


def test_the_exact_knee_is_where_a_step_without_caches_turns() -> None:
    replica = exact_replica()
    corner = knee(replica)
    assert corner is not None
    assert [decode(replica, batch, 0).binds for batch in (floor(corner), ceil(corner))] == ["memory", "compute"]


def test_exact_capacity_counts_what_the_scheduler_counts(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["capacity", *STEP[1:], "--tpot-ms", "12"]
    textbook, exact = answer(base, capsys), answer([*base, "--mode", "exact"], capsys)
    assert exact["tpot_memory_batch"] > textbook["tpot_memory_batch"]  # no embedding is streamed
    assert exact["seconds"] <= 0.012
    latent = ["--model", "deepseek-v3", "--hardware", "h200", "--gpus", "8"]
    split, whole = answer([*base, *latent], capsys), answer([*base, *latent, "--mode", "exact"], capsys)
    assert whole["memory_batch"] < split["memory_batch"] / 7  # every GPU holds all of a latent cache


def test_a_mixed_step_costs_less_than_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    base = [*STEP, "--mode", "calibrated", "--batch", "64"]
    alone, mixed = answer(base, capsys)["seconds"], answer([*base, "--chunk", "512"], capsys)
    assert alone < mixed["seconds"] and mixed["terms"]["prefill_attention"] > 0
    with pytest.raises(SystemExit):
        main(["plan", *STEP, "--chunk", "512"])
    assert "--chunk: textbook mode has no mixed steps" in capsys.readouterr().err


def test_exact_tensor_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["tp", "--model", "llama-3.1-70b", "--hardware", "h100-sxm", "--degrees", "1,8"]
    textbook, exact = answer(base, capsys)["seconds"], answer([*base, "--mode", "exact"], capsys)["seconds"]
    assert all(0.9 * textbook[degree] < exact[degree] < textbook[degree] for degree in ("1", "8"))


def test_peaks_given_by_hand_count_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("textbook", "exact"):
        base = [*STEP, "--mode", mode, "--batch", "512", "--context", "0"]
        slow = answer([*base, "--peak-tflops", "100"], capsys)
        assert slow["binds"] == "compute" and slow["terms"]["arithmetic"] > 0.05


def test_calibrated_steps_abstain_where_nothing_was_measured_and_only_served_requests_have_a_range(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer([*STEP, "--mode", "calibrated"], capsys)
    assert found["kind"] == "estimate" and not {"p10", "p90"} & found.keys()
    assert found["seconds"] > answer([*STEP, "--mode", "exact"], capsys)["seconds"]
    away = answer([*STEP, "--hardware", "a100", "--mode", "calibrated"], capsys)
    assert away["kind"] == "bound" and "abstains" in away["notes"][0]
    served = answer(["estimate", *STEP[1:], "--concurrency", "32"], capsys)
    assert served["tpot"]["p10"] < served["tpot"]["p50"] < served["tpot"]["p90"]


def test_a_re_upload_is_planned_as_what_its_name_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["step", "-m", "nvidia/Llama-3.1-8B-Instruct-FP8", "--hardware", "h100"], capsys)
    assert (found["model"], found["precision"]) == ("llama-3.1-8b", "fp8")
    assert any("llama-3.1-8b in fp8 weights, by its name" in note for note in found["notes"])


def test_activations_in_8_bits_are_multiplied_in_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    weights, both = (answer([*STEP, "--precision", name], capsys)["math"] for name in ("int8", "w8a8"))
    assert (weights, both) == ("bf16", "int8")


def test_throughput_of_served_requests_counts_their_wait(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--concurrency", "64", "--input-tokens", "8000", "--output-tokens", "128", "--gpus", "4"]
    served = ["estimate", "-m", "llama-3.1-70b", "--precision", "fp8", "--hardware", "h100-sxm", *lengths]
    found = answer(served, capsys)
    request = found["ttft"]["p50"] + 128 * found["tpot"]["p50"]
    assert found["tokens_per_second"] == pytest.approx(64 * 128 / request)
    assert found["tokens_per_second"] < 0.95 * 64 / found["tpot"]["p50"]


@pytest.mark.parametrize("verb", ["step", "prefill", "frontier", "capacity", "cost", "ratio", "explain", "estimate"])
@pytest.mark.parametrize("spread", [
    ["--gpus", "16", "--attention-dp", "16", "--expert-parallel", "16"], ["--gpus", "16", "--pipeline", "2"],
    ["--gpus", "144", "--attention-dp", "144", "--expert-parallel", "144"],
])  # fmt: skip
def test_deepseek_is_planned_over_nodes(verb: str, spread: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answer([verb, "--model", "deepseek-r1", "--hardware", "h100-sxm", *spread], capsys)
    assert found["mode"] == ("calibrated" if verb == "estimate" else "exact")
    assert any("nodes of 8, with 50 GB/s" in note for note in found["notes"])


@pytest.mark.parametrize("verb", [["estimate", "--concurrency", "4"], ["step"], ["cost"]])
def test_more_devices_than_anybody_has_are_refused_at_once(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *verb, *STEP[1:], "--gpus", "10000000000"])
    assert stopped.value.code == 2
    assert "10000000000 is not a whole number from 1 to 65536" in capsys.readouterr().err
