"""`headway plan search` and `audit`: rankings that obey the targets, and verdicts that hold in court."""

from __future__ import annotations

import csv
import itertools
import json
import shlex
from pathlib import Path

import msgspec
import pytest

from headway.cli import main
from headway.core.errors import BadInput
from headway.plan import options
from headway.plan.answers_lists import Search
from headway.plan.audit import audit, fewest_bytes, judge
from headway.plan.estimates import served
from headway.plan.load import curves, most
from headway.plan.quotes import own_prices
from headway.plan.render import document
from headway.plan.search import Wanted, search
from headway.plan.traffic import Target, Traffic, from_trace
from headway.report.document import Grid, write_page
from headway.roofline.calibrate import calibration
from headway.roofline.hardware import find_hardware
from headway.roofline.profile import Profile, device_of
from headway.shape.catalogue import find_model
from tests.report.pages import self_contained

LLAMA = find_model("llama-3.1-8b")
H100, H200, B200, M4 = (find_hardware(name) for name in ("h100", "h200", "b200", "m4-max"))
TRAFFIC = Traffic(rate=5, input_tokens=2000, output_tokens=400)
TARGET = Target(ttft=1.0, tpot=0.03)


def ranked(wanted: Wanted, traffic: Traffic = TRAFFIC, target: Target = TARGET, model: str = "llama-3.1-8b") -> Search:
    return search(model, find_model(model), traffic, target, wanted)


def test_every_listed_deployment_meets_its_targets_and_the_cheapest_is_first() -> None:
    answer = ranked(Wanted((H100, H200, B200), ("stored", "fp8")))
    rows = answer.deployments
    assert [row.rank for row in rows] == list(range(1, len(rows) + 1))
    assert [row.usd_per_hour for row in rows] == sorted(row.usd_per_hour for row in rows)
    for row in rows:
        assert row.ttft_ms <= 1000 and row.tpot_ms <= 30
        assert row.goodput >= 5 and 0 < row.utilisation <= 1
        assert set(row.flags) == {"vllm", "sglang"}  # our own server computes on the CPU
        assert row.limited_by in ("memory", "tpot", "ttft", "throughput")
    assert answer.kind == "estimate"


def test_figures_say_whether_their_engine_was_measured_on_such_a_device() -> None:
    found = ranked(Wanted((H100, find_hardware("mi300x")), degrees=(1,)))
    rows = found.deployments
    basis = {row.hardware: row.basis for row in rows}
    assert basis == {"h100-sxm": "calibrated", "mi300x": "extrapolated"}
    table = next(part for part in document(found).parts if isinstance(part, Grid))
    assert [cells[2].startswith("~") for cells in table.rows] == [row.basis == "extrapolated" for row in rows]
    assert [line.split(" at ")[0] for line in found.assumptions[:2]] == ["h100-sxm", "mi300x"]


@pytest.mark.parametrize("precision", ["int8", "int4", "q4_k", "q8_0"])
def test_formats_nobody_measured_are_extrapolated(precision: str) -> None:
    rows = ranked(Wanted((H100,), (precision,), degrees=(1,), split=False)).deployments
    assert rows[0].precision == precision
    if precision != "int4":
        assert rows[0].basis == "extrapolated"


def test_the_bill_is_shared_without_remainder() -> None:
    for row in ranked(Wanted((H100,))).deployments:
        hourly = 3600 / 1e6 * TRAFFIC.rate
        paid = hourly * (2000 * row.usd_per_million_input + 400 * row.usd_per_million_output)
        assert paid == pytest.approx(row.usd_per_hour)


def test_more_traffic_needs_no_fewer_gpus_and_tighter_targets_none_the_less() -> None:
    wanted = Wanted((H100,), degrees=(1,), split=False)
    least = [
        ranked(wanted, msgspec.structs.replace(TRAFFIC, rate=rate)).deployments[0].total_gpus for rate in (1, 10, 50)
    ]
    assert least == sorted(least)
    loose = ranked(wanted, target=Target()).deployments[0].total_gpus
    assert loose <= ranked(wanted).deployments[0].total_gpus


def test_what_cannot_serve_is_listed_with_the_reason() -> None:
    answer = ranked(Wanted((H100, M4), degrees=(1, 3)), model="llama-3.1-70b")
    reasons = {row.name: row.reason for row in answer.rejected}
    assert reasons["1 x h100-sxm bf16 TP1"] == "the weights do not fit"
    assert reasons["3 x h100-sxm bf16"] == "64 heads cannot be split over 3 GPUs"
    assert "no peak" in reasons["m4-max"]
    assert answer.deployments == []
    tight = ranked(Wanted((H100,)), target=Target(tpot=0.0001))
    assert all("slower than the TPOT target" in row.reason for row in tight.rejected)


def test_budget_and_prices() -> None:
    rows = ranked(Wanted((H100, B200), budget=6.0)).deployments
    assert rows and all(row.usd_per_hour <= 6 for row in rows)
    priced = ranked(Wanted((H100,), degrees=(1,), prices={"h100-sxm": 1.0})).deployments[0]
    assert priced.usd_per_hour == priced.total_gpus
    assert all(row.usd_per_hour == 0 for row in ranked(Wanted((H100,), prices={"h100-sxm": 0.0})).deployments)


def test_our_own_server_is_offered_for_cpus() -> None:
    box = device_of(Profile("box", "2026-01-01", 32, 256e9, {"32": 400e9}, {"bf16": 2e13, "fp32": 4e12}))
    wanted = Wanted((box,), degrees=(1,), prices={"box": 1.0})
    rows = ranked(wanted, Traffic(rate=0.01, input_tokens=100, output_tokens=50), Target()).deployments
    assert rows and all(row.flags["headway"].startswith("headway serve ") for row in rows)


def test_a_split_deployment_is_run_by_commands_that_split() -> None:
    row = next(r for r in ranked(Wanted((H100,), degrees=(1,))).deployments if r.prefill_replicas)
    prefill, decode, proxy = row.flags["vllm"].split("\n")
    assert '"kv_role":"kv_producer"' in prefill and '"kv_role":"kv_consumer"' in decode
    assert proxy.count("prefill-") == row.prefill_replicas and proxy.count("decode-") == row.replicas
    config = shlex.split(decode)[-1]
    assert json.loads(config)["kv_connector"] == "NixlConnector"
    prefill, decode, router = row.flags["sglang"].split("\n")
    assert "--disaggregation-mode prefill" in prefill and "--disaggregation-mode decode" in decode
    assert "--pd-disaggregation" in router and router.count("http://") == row.prefill_replicas + row.replicas


def test_engines_are_set_up_for_the_goodput_printed_not_for_todays_traffic() -> None:
    row = ranked(Wanted((H100,), degrees=(1,), split=False), msgspec.structs.replace(TRAFFIC, rate=0.5)).deployments[0]
    assert row.goodput > 1 and row.rows > row.peak_batch
    assert f"--max-num-seqs {row.rows} " in row.flags["vllm"]
    assert f"--max-running-requests {row.rows} " in row.flags["sglang"]


def test_an_engine_is_started_by_its_own_commands() -> None:
    rows = ranked(Wanted((H100,), degrees=(1, 2), engine="trtllm")).deployments
    assert all(set(row.flags) == {"trtllm"} for row in rows)
    mixed = next(row for row in rows if not row.prefill_replicas).flags["trtllm"]
    assert "trtllm-serve " in mixed and "--max_batch_size" in mixed and "vllm" not in mixed
    split = next(row for row in rows if row.prefill_replicas)
    lines = split.flags["trtllm"].splitlines()
    assert lines[-1] == "trtllm-serve disaggregated -c pools.yaml"
    assert sum(line.startswith("trtllm-serve ") for line in lines) == 3
    assert sum(line.startswith('    - "') for line in lines) == split.replicas + split.prefill_replicas


def test_the_context_limit_printed_is_one_that_starts(tmp_path: Path) -> None:
    """reported t2-055: one request of 60,200 tokens needs 7.9 GB of cache, and an L4 has less beside the weights."""
    trace = tmp_path / "t.csv"
    times = [f"2023-11-16 18:{second // 60:02}:{second % 60:02}.0" for second in range(200)]
    lengths = ["1500,200"] * 199 + ["60000,200"]
    lines = [f"{time},{length}" for time, length in zip(times, lengths, strict=True)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    wanted, target = Wanted((find_hardware("l4"),), degrees=(1,), split=False), Target(20.0, 0.2)
    answer = ranked(wanted, from_trace(trace), target)
    assert answer.deployments == []
    assert "the longest request, 60200 tokens: its cache takes 7.9 GB" in answer.rejected[0].reason
    row = ranked(wanted, Traffic(0.0005, 100, 24000), Target()).deployments[0]
    assert 24100 <= row.max_model_len < 48200, "twice the mean does not fit: less is set"
    assert f"--max-model-len {row.max_model_len} " in row.flags["vllm"]


def test_no_deployment_is_a_failure_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["plan", "search", "--model", "llama-3.1-8b", "--hardware", "h100", "--rate", "5"]
    with pytest.raises(SystemExit) as stopped:
        main([*base, "--tpot-ms", "0.1"])
    assert stopped.value.code == 1
    printed = capsys.readouterr().out
    assert "No deployment of llama-3.1-8b meets the targets" in printed
    assert "slower than the TPOT target" in printed


def test_commands_of_our_own_server_are_accepted_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    box = device_of(Profile("box", "2026-01-01", 32, 256e9, {"32": 400e9}, {"bf16": 2e13, "fp32": 4e12}))
    wanted = Wanted((box,), degrees=(1,), prices={"box": 1.0})
    row = ranked(wanted, Traffic(rate=0.01, input_tokens=100, output_tokens=50), Target()).deployments[0]
    _, verb, model, *flags = shlex.split(row.flags["headway"])
    assert verb == "serve" and "/" in model
    with pytest.raises(SystemExit):
        main(["serve", "/nowhere", *flags])
    assert "no such option" not in (error := capsys.readouterr().err) and "/nowhere" in error


def test_latent_attention_is_also_tried_data_parallel() -> None:
    answer = ranked(Wanted((H200,), degrees=(8,), split=False), target=Target(), model="deepseek-v3")
    assert {row.attention_dp for row in answer.deployments} == {1, 8}
    flags = next(row.flags for row in answer.deployments if row.attention_dp == 8)
    assert "--enable-dp-attention" in flags["sglang"] and "--data-parallel-size 8" in flags["vllm"]
    assert "--enable-expert-parallel" in flags["vllm"]


def test_a_step_of_all_ranks_takes_the_tokens_that_were_planned() -> None:
    """vLLM's limits are those of one data-parallel rank, SGLang's those of the replica."""
    answer = ranked(Wanted((H200,), degrees=(8,), split=False), target=Target(), model="deepseek-v3")
    for row in answer.deployments:
        limits = {engine: dict(itertools.pairwise(shlex.split(line))) for engine, line in row.flags.items()}
        each = int(limits["vllm"]["--max-num-batched-tokens"])
        assert 0 <= each * row.attention_dp - max(row.chunk, row.rows) < row.attention_dp
        assert each >= int(limits["vllm"]["--max-num-seqs"])
        assert int(limits["sglang"]["--chunked-prefill-size"]) == row.chunk


def test_a_loaded_replica_obeys_little_and_slows_with_load() -> None:
    replica = curves([served(LLAMA, H100, "vllm", "bf16", 1, 1, 2000, 400)])[0]
    loads = [replica.at(rate, TRAFFIC, TARGET) for rate in (0.5, 2, 4)]
    assert [load.mean_tpot for load in loads] == sorted(load.mean_tpot for load in loads)
    assert [load.ttft for load in loads] == sorted(load.ttft for load in loads)
    assert loads[1].batch == pytest.approx(max(1, 2 * 400 * loads[1].mean_tpot), rel=0.05)
    assert {"tpot", "ttft", "throughput"} < set(replica.at(1000, TRAFFIC, TARGET).broken)


def test_speed_is_the_estimates_at_as_many_in_flight() -> None:
    deployment = served(LLAMA, H100, "vllm", "bf16", 1, 16, 2000, 400)
    replica, target = curves([deployment])[0], Target()
    estimate = calibration().predict(deployment).tpot
    flying = next(
        load for rate in (x / 100 for x in range(1, 2000)) if (load := replica.at(rate, TRAFFIC, target)).batch >= 15.5
    )
    assert estimate is not None and flying.mean_tpot == pytest.approx(estimate.p50, rel=0.1)


def test_prefix_hits_let_a_replica_carry_more() -> None:
    cold, warm = (
        most(lambda rate, one=one, traffic=traffic: one.at(rate, traffic, TARGET))[0]
        for hit in (0.0, 0.8)
        for traffic in [msgspec.structs.replace(TRAFFIC, cache_hit=hit)]
        for one in curves([msgspec.structs.replace(
            served(LLAMA, H100, "vllm", "bf16", 1, 1, 2000, 400), cached=2000.0 - traffic.fresh_tokens
        )])
    )  # fmt: skip
    assert warm > cold


def test_the_report_is_one_page(tmp_path: Path) -> None:
    write_page(document(ranked(Wanted((H100,)))), tmp_path / "page.html", "headway plan search")
    text = (tmp_path / "page.html").read_text()
    assert "svg" in self_contained(text).tags and "vllm serve" in text


def test_traces_give_rate_lengths_burstiness_and_hits(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,100,10\n2023-11-16 18:00:02.0,300,30\n"
        "2023-11-16 18:00:04.0,200,20\n"
    )
    traffic = from_trace(azure)
    assert (traffic.rate, traffic.input_tokens, traffic.output_tokens) == (0.5, 200, 20)
    assert (traffic.arrival_cv2, traffic.cache_hit, traffic.longest) == (0, 0, 330)
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 3]}\n'
        '{"timestamp": 6000, "input_length": 1024, "output_length": 5, "hash_ids": [4, 2]}\n'
    )
    assert from_trace(mooncake).cache_hit == pytest.approx(512 / 3072)
    assert from_trace(mooncake, rate=7).rate == 7


def test_single_targets_win_over_those_of_the_list() -> None:
    target = options.target(None, 20, "ttft=1s,tpot=50ms", 95)
    assert (target.ttft, target.tpot, target.share) == (1.0, 0.02, 0.95)


BAD = {
    "--slo": lambda: options.target(None, None, "e2e=1s", 99),
    "--rate": lambda: options.traffic(None, None, 1, 1, None),
    "--prices": lambda: own_prices("h100-sxm=cheap"), "--hardware": lambda: options.devices("h100,h999"),
    "--percentile": lambda: ranked(Wanted((H100,)), target=Target(share=1.0)),
    "--cache-hit": lambda: ranked(Wanted((H100,)), msgspec.structs.replace(TRAFFIC, cache_hit=1.0)),
    "--input-tokens": lambda: ranked(Wanted((H100,)), msgspec.structs.replace(TRAFFIC, input_tokens=0)),
    "--tpot-ms": lambda: ranked(Wanted((H100,)), target=Target(tpot=-1)),
    "--budget": lambda: ranked(Wanted((H100,), budget=0)),
}  # fmt: skip


@pytest.mark.parametrize("field", BAD)
def test_impossible_wishes_are_refused(field: str) -> None:
    with pytest.raises(BadInput, match=field):
        BAD[field]()


# --- audit ----------------------------------------------------------------------------------------------------------

ROW = {"gpu": "RTX 4090", "model": "llama-3.1-8b", "quant": "Q8_0", "batch": "1", "tok_s_out": "100"}
CLAIMS: list[tuple[str, dict[str, str], str]] = [
    ("possible", {}, ""),
    ("faster than memory", {"tok_s_out": "200"}, "times the memory bandwidth (MBU > 1)"),
    ("explained by drafts", {"tok_s_out": "200", "spec": "True"}, ""),
    ("beyond any drafts", {"tok_s_out": "5000", "mtp": "True"}, "drafts do not reach that"),
    ("fair in a batch", {"tok_s_out": "2000", "batch": "32"}, ""),
    ("more cards, more bandwidth", {"tok_s_out": "200", "gpu_count": "2"}, ""),
    ("prefill beyond the peak", {"tok_s_prefill": "90000"}, "times the dense peak (MFU > 1)"),
    ("sparse peak", {"gpu": "l40s", "peak_tflops": "1466"}, "is the sparse figure; the dense one is 733"),
    (
        "prompts counted as output",
        {"gpu": "h100", "quant": "bf16", "batch": "8", "tpot_ms": "10", "ttft_ms": "0", "prompt_tokens": "1000",
         "output_tokens": "500", "tok_s_out": "2400"}, "prompt and output tokens were both counted",
    ),
    (
        "contradicts its latencies",
        {"gpu": "h100", "quant": "bf16", "batch": "8", "tpot_ms": "10", "output_tokens": "500", "tok_s_out": "4000"},
        "times what its own TTFT and TPOT give",
    ),
    ("negative", {"tok_s_out": "-5"}, "tok_s is negative"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "flag"), [case[1:] for case in CLAIMS], ids=[case[0] for case in CLAIMS])
def test_claims(change: dict[str, str], flag: str) -> None:
    verdict = judge(2, ROW | change)
    assert verdict.unchecked == ""
    assert (flag in " ".join(verdict.flags)) if flag else verdict.flags == ()


UNCHECKED = [
    ({"gpu": "abacus"}, "not catalogued"), ({"model": "mystery"}, "neither a size"), ({"quant": "secret"}, "not known"),
    ({"tok_s_out": ""}, "no decode speed"), ({"batch": ""}, "without a batch"), ({"gpu": ""}, "no device named"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), UNCHECKED)
def test_what_cannot_be_judged_is_said_not_called_fine(change: dict[str, str], reason: str) -> None:
    verdict = judge(2, ROW | change)
    assert reason in verdict.unchecked and verdict.flags == ()


def test_stated_sizes_are_read_in_the_claims_favour() -> None:
    row = ROW | {"model": "unheard of", "params_b": "30", "active_b": "3", "gpu": "h100", "quant": "Q8_0"}
    fastest = 3.35e12 / (2.5e9 * 34 / 32)  # a rounded 3 may be 2.5
    assert judge(2, row | {"tok_s_out": str(fastest * 0.99)}).flags == ()
    assert judge(2, row | {"tok_s_out": str(fastest * 1.01)}).flags != ()


def test_formats() -> None:
    names = {"UD-Q4_K_XL": 144 / 256, "Q8_0": 34 / 32, "fp16": 2.0, "NVFP4": 0.5, "IQ4_XS": 136 / 256, "FP8": 1.0}
    assert {name: fewest_bytes(name) for name in names} == names
    assert fewest_bytes("MQ4") is None


def test_a_file_is_counted_whole(tmp_path: Path) -> None:
    path = tmp_path / "claims.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows([ROW, ROW | {"tok_s_out": "400"}, ROW | {"gpu": "abacus"}])
    found = audit(path)
    assert (found.rows, found.checked, found.flagged) == (3, 2, 1)
    assert found.claims[0].row == 3
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="no column for hardware"):
        audit(path)


def test_replicas_are_larger_than_a_node_only_where_a_node_does_not_hold_the_weights() -> None:
    rows = ranked(Wanted((H100,), most=99), model="deepseek-r1", target=Target(ttft=3.0, tpot=0.08)).deployments
    assert {row.gpus for row in rows} == {16} and {row.nodes for row in rows} == {2}
    assert {row.pipeline for row in rows} > {1} and {row.attention_dp for row in rows} > {1}
    assert max(row.gpus for row in ranked(Wanted((H100,), most=99)).deployments) <= 8
    asked = ranked(Wanted((find_hardware("rtx-4090"),), degrees=(16,)))
    assert asked.rejected[0].reason == "links join 8 of these devices at most"


def test_engines_are_told_how_a_replica_is_spread_over_nodes() -> None:
    rows = ranked(Wanted((H100,), most=99, split=False), model="deepseek-r1", target=Target()).deployments
    staged = next(row for row in rows if row.pipeline == 2)
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2" in staged.flags["vllm"]
    assert "--tp 8 --pp-size 2 --nnodes 2 --node-rank $NODE_RANK" in staged.flags["sglang"]
    groups = next(row for row in rows if row.attention_dp == 16)
    assert "--tensor-parallel-size 1 --data-parallel-size 16 --enable-expert-parallel" in groups.flags["vllm"]
    assert "--data-parallel-size-local 8" in groups.flags["vllm"]
    assert "--tp 16 --enable-dp-attention --dp 16 --ep-size 16" in groups.flags["sglang"]


def test_prefill_pools_have_a_degree_and_hardware_of_their_own() -> None:
    busy, target = msgspec.structs.replace(TRAFFIC, rate=20.0), Target(ttft=2.0, tpot=0.04)
    same = ranked(Wanted((H100,), most=99), busy, target, "llama-3.1-70b").deployments
    uneven = next(row for row in same if row.prefill and row.prefill.gpus != row.gpus)
    assert uneven.total_gpus == uneven.replicas * uneven.gpus + uneven.prefill_replicas * uneven.prefill.gpus
    prefill, decode, _ = uneven.flags["vllm"].split("\n")
    assert f"--tensor-parallel-size {uneven.prefill.gpus} " in prefill and "kv_producer" in prefill
    assert f"--tensor-parallel-size {uneven.gpus} " in decode and "kv_consumer" in decode
    other = ranked(Wanted((H100,), most=99, prefill_hardware=(B200,)), busy, target, "llama-3.1-70b").deployments
    splits = [row for row in other if row.prefill]
    assert splits and {row.prefill.hardware for row in splits if row.prefill} == {"b200-sxm"}
    assert {row.hardware for row in other} == {"h100-sxm"}
    price = {name: find_hardware(name).price["on-demand"].typical for name in ("h100", "b200")}
    for row in splits:
        assert row.prefill is not None
        decodes, prefills = row.replicas * row.gpus, row.prefill_replicas * row.prefill.gpus
        assert row.usd_per_hour == pytest.approx(decodes * price["h100"] + prefills * price["b200"])


def test_a_claim_beyond_its_device_is_shown_beside_the_most_that_is_possible(tmp_path: Path) -> None:
    path = tmp_path / "claims.csv"
    path.write_text("model,gpu,gpu_count,quant,batch,tok_s_out\nllama-3.1-8b,h100,1,bf16,1,2000\n")
    found = audit(path)
    (claim,) = found.claims
    assert claim.claimed == 2000 and claim.possible == pytest.approx(2000 / claim.mbu)
    row = {"model": "llama-3.1-8b", "gpu": "h100", "gpu_count": "1", "quant": "bf16", "batch": "1"}
    assert judge(2, row | {"tok_s_out": str(0.999 * claim.possible)}).flags == ()
    write_page(document(found), tmp_path / "page.html", "headway plan audit claims.csv")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "claimed 2,000 tok/s, at most" in page
