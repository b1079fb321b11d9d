"""`headway bench` as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from headway.cli import main, options
from headway.measure.probe import save_profile
from headway.roofline.profile import Profile
from tests.bench.mock import MockServer, Script

QUICK = ("--no-self-test", "--stall-timeout", "0.4", "--request-timeout", "1")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `headway bench ...`."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_json_contract(capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(Script(ttft=0.01, gap=0.001, chunks=10, cached=2)) as server:
        code, out, err = bench(capsys, "--url", server.url, "--rate", "40", "--requests", "40", "--json")
    found = json.loads(out)
    assert code == 0
    for name in ("ttft_ms", "tpot_ms", "itl_token_ms", "itl_chunk_ms", "e2e_ms"):
        stat = found[name]
        assert all(isinstance(stat[key], float) for key in ("mean", "p50", "p90", "p95"))
        assert isinstance(stat["p99"], float) or stat["reason"]
    assert found["ttft_ms"]["p99"] is None
    assert all(found["throughput"][name] > 0 for name in ("output", "input", "total"))
    assert found["failures"] == {}
    assert found["cached_tokens"]["total"] == 80
    assert found["client"]["ceiling"] > 0 and found["client"]["added_latency_ms"] > 0
    assert isinstance(found["client"]["valid"], bool)
    assert found["prompts"]["verified"] is True
    assert "slo" not in found and "goodput" not in found
    assert not err, "quiet by default"


def test_targets_bring_slo_and_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(Script(chunks=3)) as server:
        code, out, _ = bench(
            capsys,
            "--url",
            server.url,
            "--rate",
            "100",
            "--arrival",
            "constant",
            "--requests",
            "60",
            "--slo",
            "ttft=2s,tpot=500ms",
            "--json",
            *QUICK,
        )
    found = json.loads(out)
    assert code == 0
    assert found["slo"]["attainment"] == 1.0
    assert found["goodput"]["searched"] is False and found["goodput"]["rate"] == pytest.approx(100, rel=0.1)


def test_goodput_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    """An endpoint that never answers in time: the search goes down, ends, and says so."""
    with MockServer(Script(ttft=0.02, chunks=2)) as server:
        options = ("--rate", "3200", "--requests", "50", "--ttft-ms", "1", "--search", "--json")
        code, out, _ = bench(capsys, "--url", server.url, *options, *QUICK)
    found = json.loads(out)["goodput"]
    assert code == 0
    assert found["searched"] and found["rate"] is None and found["reason"]
    assert [trial["verdict"] for trial in found["trials"]] == ["fails"] * len(found["trials"])


@pytest.mark.parametrize("api", ["chat", "completions", "anthropic"])
def test_every_api(capsys: pytest.CaptureFixture[str], api: str) -> None:
    with MockServer(Script(chunks=5)) as server:
        code, out, _ = bench(capsys, "--url", server.url, "--api", api, "--requests", "3", "--json", *QUICK)
    found = json.loads(out)
    assert (code, found["requests"]["completed"], found["throughput"]["output_tokens"]) == (0, 3, 15)


@pytest.mark.parametrize(
    ("fault", "kind", "measured"),
    [
        ("hang", "hung", False),
        ("hang_mid", "hung", True),
        ("drip", "slow", True),
        ("half_close", "half_closed", True),
        ("status_500", "http_error", False),
        ("error_event", "error_event", True),
        ("bad_json", "malformed", True),
        ("usage_high", "wrong_usage", True),
        ("usage_low", "wrong_usage", True),
    ],
)
def test_against_any_fault_the_run_ends_says_what_happened_and_keeps_what_it_measured(
    capsys: pytest.CaptureFixture[str], fault: str, kind: str, measured: bool
) -> None:
    with MockServer(Script(gap=0.001, fault=fault)) as server:
        code, out, _ = bench(capsys, "--url", server.url, "--rate", "50", "--requests", "6", "--json", *QUICK)
    found = json.loads(out)
    assert code == 1, "nothing was completed"
    assert kind in found["failures"] and found["failure_messages"][kind]
    assert sum(found["failures"].values()) == 6
    assert (found["ttft_ms"]["mean"] is not None) is measured


def test_faults_among_good_answers_leave_the_good_ones_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """After the three requests of the first contact, every second answer breaks off."""
    faults = iter(["", "", "", *["", "half_close"] * 10])
    with MockServer(lambda _: Script(fault=next(faults))) as server:
        code, out, _ = bench(capsys, "--url", server.url, "--requests", "20", "--json", *QUICK)
    found = json.loads(out)
    assert code == 0
    assert found["failures"] == {"half_closed": 10}
    assert found["tpot_ms"]["n"] == 10 and found["ttft_ms"]["n"] == 20
    assert found["tails_with_failures"]["ttft_ms"]["p95"] == "inf"


@pytest.mark.parametrize("verb", [[], ["lengths"]])
def test_a_model_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str], verb: list[str]) -> None:
    with MockServer(Script(fault="status_404")) as server:
        code, out, err = bench(capsys, *verb, "--url", server.url, "--model", "nope")
    assert code == 1 and not out
    assert err.strip().splitlines()[-1] == "headway bench: HTTP status 404: the mock refuses"


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(Script()) as server:
        port = int(server.url.rpartition(":")[2])
    code, out, _ = bench(capsys, "--url", f"http://127.0.0.1:{port + 1 if port < 65535 else 1}", "--json", *QUICK)
    found = json.loads(out)
    assert code == 1
    assert found["failures"]["connect"] == 1 and found["failures"]["not_sent"] == 99
    assert "cannot connect" in found["stopped_early"]
    code, out, err = bench(capsys, "--url", f"http://127.0.0.1:{port + 1 if port < 65535 else 1}", *QUICK)
    assert code == 1 and out == "" and len(err.splitlines()) == 1 and "cannot connect to 127.0.0.1" in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--url"),
        (("--url", "nowhere"), "--url"),
        (("--url", "http://h", "--rate", "0"), "--rate"),
        (("--url", "http://h", "--rate", "nan"), "--rate"),
        (("--url", "http://h", "--rate", "x"), "--rate"),
        (("--url", "http://h", "--requests", "0"), "--requests"),
        (("--url", "http://h", "--input-tokens", "-1"), "--input-tokens"),
        (("--url", "http://h", "--rate", "1", "--concurrency", "2"), "--concurrency"),
        (("--url", "http://h", "--rate", "1", "--arrival", "bursty"), "--arrival"),
        (("--url", "http://h", "--rate", "1", "--burstiness", "0.5"), "--burstiness"),
        (("--url", "http://h", "--ramp-to", "5"), "--ramp-to"),
        (("--url", "http://h", "--slo", "ttft=soon"), "--slo"),
        (("--url", "http://h", "--slo", "ttft=1s", "--attainment", "1.5"), "--attainment"),
        (("--url", "http://h", "--search"), "--search"),
        (("--url", "http://h", "--as", "wrk"), "--as"),
        (("--url", "http://h", "--api", "grpc"), "--api"),
        (("--url", "http://h", "--stall-timeout", "0"), "--stall-timeout"),
        (("--url", "http://h", "--csv", "/no/such/folder/x.csv"), "--csv"),
        (("--url", "http://h", "--api-key-file", "/no/such/file"), "--api-key-file"),
        (("--url", "http://127.0.0.1:1", "--trace", "/no/such.csv", "--no-self-test"), "--trace"),
        (("--url", "http://h", "--event-log", "/no/such/log"), "--event-log"),
        (("--url", "http://h", "--tokenizer", "/no/such/folder"), "--tokenizer"),
        (("--url", "http://h", "--gpus", "0"), "--gpus"),
        (("--url", "http://h", "--resolution", "1"), "--resolution"),
        (("lengths", "--url", "http://h", "--plot", "curve.pdf"), "--plot"),
        (("--url", "http://h", "--hardware", "h100-sxm"), "--shape"),
        (("--url", "http://h", "--hardware", "abacus", "--shape", "llama-3.1-8b"), "--hardware"),
        (("--url", "http://h", "--speed", "0"), "--speed"),
        (("--url", "http://h", "--shared-prefix", "999", "--input-tokens", "9"), "--shared-prefix"),
        (("lengths", "--url", "http://h", "--sizes", "big"), "--sizes"),
        (("view", "/no/such/file", "--as", "vllm"), "RECORDS"),
    ],
)
def test_bad_input_exits_2_and_names_the_field(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], word: str
) -> None:
    code, out, err = bench(capsys, *arguments)
    assert code == 2
    assert word in err and "Traceback" not in err and not out


def test_files_and_views(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"run.{name}" for name in ("csv", "html", "records")}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    with MockServer(Script(chunks=5)) as server:
        code, out, _ = bench(capsys, "--url", server.url, "--requests", "4", "--as", "vllm", "--json", *options, *QUICK)
    assert code == 0 and all(path.stat().st_size > 0 for path in files.values())
    shown = json.loads(out)["as"]
    code, out, _ = bench(capsys, "view", str(files["records"]), "--as", "vllm")
    assert code == 0 and json.loads(out) == shown


def test_traces_are_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"timestamp": 100 * n, "input_length": 600, "output_length": 4, "hash_ids": [0, n + 1]} for n in range(5)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with MockServer(Script(chunks=4)) as server:
        code, out, _ = bench(capsys, "--url", server.url, "--trace", str(path), "--speed", "10", "--json", *QUICK)
        prompts = [body["messages"][0]["content"].split() for body in server.requests[3:]]
    found = json.loads(out)
    assert code == 0 and found["requests"]["completed"] == 5 and found["prompts"]["verified"]
    assert all(prompt[:512] == prompts[0][:512] for prompt in prompts)
    assert {body["max_tokens"] for body in server.requests[3:]} == {4}


def test_the_lengths_exercise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seen: set[str] = set()

    def prefix_cache(body: dict[str, Any]) -> Script:
        """Takes 0.1 ms per prompt token it has not seen."""
        text = body["messages"][0]["content"]
        size = len(text.split())
        hit = text in seen
        seen.add(text)
        return Script(ttft=0.0 if hit else size * 1e-4, gap=0.001, chunks=5, cached=size if hit else 0)

    with MockServer(prefix_cache) as server:
        options = ("--sizes", "50,500,2000", "--times", "2", "--plot", str(tmp_path / "l.svg"), "--json", "--verbose")
        code, out, err = bench(capsys, "lengths", "--url", server.url, *options)
    found = json.loads(out)
    assert code == 0 and (tmp_path / "l.svg").exists()
    ttft = [row["ttft_ms"] for row in found["lengths"]]
    assert ttft == sorted(ttft) and ttft[2] > 150
    assert [row["prompt_tokens"] for row in found["lengths"]] == [50, 500, 2000]
    first, second = found["twice"]["ttft_ms"]
    assert second < first / 2
    assert found["twice"]["cached_tokens"] == [0, 1993]
    assert "500 tokens" in err and "50 tokens" in err


@pytest.mark.parametrize("verb", [("--requests", "2"), ("lengths", "--sizes", "40", "--times", "1")])
def test_runs_repeat_their_prompts_only_with_the_seed_they_report(
    capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    """Equal prompts in a second run would measure the prefix cache that the first one filled."""
    quick = () if verb[0] == "lengths" else QUICK

    def run(*seed: str) -> tuple[int, list[str]]:
        with MockServer(Script(chunks=2)) as server:
            _, out, _ = bench(capsys, *verb, "--url", server.url, "--json", *seed, *quick)
            sent = [body["messages"][0]["content"] for body in server.requests[3:]]
        found = json.loads(out)
        return found["seed"] if verb[0] == "lengths" else found["workload"]["seed"], sent

    (first, prompts), (second, others) = run(), run()
    assert first != second and not set(prompts) & set(others)
    assert run("--seed", str(first)) == (first, prompts)


def test_a_search_never_sends_a_prompt_of_the_run_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(Script(ttft=0.02, chunks=2)) as server:
        options = ("--rate", "3200", "--requests", "20", "--ttft-ms", "1", "--search")
        bench(capsys, "--url", server.url, *options, *QUICK)
        sent = [body["messages"][0]["content"] for body in server.requests]
    run, search = set(sent[3:23]), set(sent[26:])  # each after the three requests of a first contact
    assert len(run) == 20 and search and not run & search


def test_without_matplotlib_plots_are_refused_before_the_run_and_pages_have_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / "x.html"
    with MockServer(Script()) as server:
        code, _, err = bench(capsys, "lengths", "--url", server.url, "--plot", str(tmp_path / "x.svg"))
        assert not server.requests
        assert code == 2 and "--plot: plots need matplotlib" in err and "pip install matplotlib" in err
        code, out, _ = bench(capsys, "--url", server.url, "--requests", "2", "--html", str(page), *QUICK)
    assert not code and "time to first token" in out and "plots need matplotlib" in page.read_text()


def test_this_machine_is_the_one_that_was_probed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    device = ("--hardware", "this-machine", "--shape", "llama-3.1-8b")
    code, _, err = bench(capsys, "--url", "http://h", *device)
    assert code == 2 and "--hardware" in err and "headway probe" in err
    save_profile(Profile("box", "2026-01-01", 2, 64e9, {"2": 18e9}, {"bf16": 1e11}), tmp_path / "profile.json")
    with MockServer(Script(chunks=3)) as server:
        code, out, _ = bench(capsys, "--url", server.url, "--requests", "2", *device, "--json", *QUICK)
    assert code == 0 and json.loads(out)["prediction"]["hardware"] == "box"


def test_the_terminal_table_and_what_verbose_adds(capsys: pytest.CaptureFixture[str]) -> None:
    with MockServer(Script(chunks=3)) as server:
        code, out, err = bench(capsys, "--url", server.url, "--requests", "2", "--verbose")
    assert code == 0 and "time to first token" in out and "2 of 2 completed" in out
    assert "this client: at least" in out and "client self-test" in err


def test_keys_come_from_a_file_or_the_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may be the server's own; a key that no header can carry is refused without being shown."""
    file = tmp_path / "keys.txt"
    file.write_text("# of the server\nsk-file\nsk-other\n")
    monkeypatch.setenv("HEADWAY_API_KEY", "sk-environment")
    assert options.api_key(file) == "sk-file" and options.api_key(None) == "sk-environment"
    monkeypatch.setenv("HEADWAY_API_KEY", "sk secret\n")
    code, _, err = bench(capsys, "--url", "http://h")
    assert code == 2 and "HEADWAY_API_KEY" in err and "secret" not in err
    monkeypatch.delenv("HEADWAY_API_KEY")
    assert options.api_key(None) is None


LYING = [
    (Script(chunks=40), [], "nothing"),
    (Script(chunks=40, per_chunk=3), ["3.00 output tokens per chunk"], "nothing"),
    (Script(chunks=40, per_chunk=3), [], "tokenizer"),  # it does hold three
    (Script(chunks=40, fault="usage_more"), ["completion_tokens of 3 of 3 answers", "180 by usage, 120"], "tokenizer"),
    (Script(chunks=40, fault="prompt_double"), ["prompt tokens per short common word"], "nothing"),
    (Script(chunks=40, fault="prompt_double"), ["prompt_tokens grows by 2.00"], "tokenizer"),
]


@pytest.mark.parametrize(
    ("script", "warning"),
    [
        (Script(chunks=40), "3 of 3 answers are shorter than asked for (mean 40 of 500 tokens; finish_reason stop)"),
        (Script(chunks=500, cached=190), "came from the prefix cache though every prompt is new"),
        (Script(chunks=500), ""),
    ],
    ids=["t2-052 answers that end early", "t2-050 prompts that were sent before", "as asked for"],
)
def test_a_run_of_another_workload_is_called_one(
    capsys: pytest.CaptureFixture[str], script: Script, warning: str
) -> None:
    with MockServer(script) as server:
        options = ("--requests", "3", "--input-tokens", "200", "--output-tokens", "500", "--json", *QUICK)
        code, out, _ = bench(capsys, "--url", server.url, *options)
    found = json.loads(out)
    assert code == 0 and warning in " ".join(found["warnings"]) and bool(warning) == bool(found["warnings"])


@pytest.mark.parametrize(("script", "findings", "by"), LYING)
def test_plausible_but_wrong_counts_are_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: Script, findings: list[str], by: str
) -> None:
    word_tokenizer(tmp_path / "tokenizer.json")
    checked = ("--tokenizer", str(tmp_path)) if by == "tokenizer" else ()
    with MockServer(script) as server:
        code, out, _ = bench(capsys, "--url", server.url, "--requests", "3", "--output-tokens", "256", "--json",
                             *checked, *QUICK)  # fmt: skip
    found = json.loads(out)
    assert code == 0 and found["requests"]["completed"] == 3
    text = " ".join(found["usage"]["findings"])
    assert all(finding in text for finding in findings) and bool(text) == bool(findings)
    assert set(found["usage"]["findings"]) <= set(found["warnings"])
    if checked:
        assert found["usage"]["output"]["checked"] == 3 and found["usage"]["prompt"]["checked"] == 6


def word_tokenizer(path: Path) -> None:
    """A token per word."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.decoder = tokenizers.decoders.ByteLevel()
    words.save(str(path))


def test_messages_are_sent_as_messages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": talk, "max_tokens": 7}))

    def sent(api: str) -> dict[str, Any]:
        with MockServer(Script(chunks=2)) as server:
            code, _, _ = bench(
                capsys, "--url", server.url, "--api", api, "--requests", "1", "--dataset", str(path), *QUICK
            )
            assert code == 0
            return server.requests[3]

    assert sent("chat")["messages"] == talk and sent("chat")["max_tokens"] == 7
    claude = sent("anthropic")
    assert claude["system"] == "Be brief." and claude["messages"] == talk[1:]
    with MockServer(Script()) as server:
        code, _, err = bench(capsys, "--url", server.url, "--api", "completions", "--dataset", str(path), *QUICK)
    assert code == 2 and "--dataset: has messages" in err


def test_it_is_a_light_import() -> None:
    """The verb's module loads neither numpy nor the client: `headway bench --help` is instant."""
    heavy = "{'numpy', 'torch', 'headway.bench.client'}"
    code = f"import sys, headway.cli.bench; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
