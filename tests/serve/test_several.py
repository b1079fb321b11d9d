"""Several models in one server: routed by the name in the request, each with its engine and its share of memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import ollama
import pytest

from headway.core.errors import BadInput
from headway.engine import several
from headway.engine.options import EngineOptions
from headway.engine.several import divided
from headway.model.load import ModelInfo, describe
from headway.roofline.hardware import GIB
from headway.roofline.memory import PROCESS
from tests.serve.conftest import Server, events, write_tiny_checkpoint
from tests.serve.test_adapters import adapter
from tests.serve.test_answers import CHAT, TEXT
from tests.serve.test_lifecycle import children

Start = Callable[..., Server]
BODY = {"prompt": "the quick brown fox", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models."""
    folder = tmp_path_factory.mktemp("several")
    made = (folder / "one", folder / "two")
    (folder / "adapters").mkdir()
    for path in made:
        path.mkdir()
        write_tiny_checkpoint(path)
    return made


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Iterator[Server]:
    """`headway serve` of two models, an adapter over the second."""
    lora = adapter(folders[1], folders[1].parent / "adapters" / "polite", 0)
    options = ["--port", "0", "--lora", f"two/polite={lora}", "--max-loras", "2", "--kv-cache-gib", "0.01"]
    options += ["--allow-lora-loading", str(lora.parent)]
    server = Server(command=[sys.executable, "-m", "headway", "serve", *map(str, folders), *options])
    yield server
    server.kill()


def test_requests_go_to_the_model_they_name(pair: Server) -> None:
    for name in ("one", "two", "polite"):
        answer = pair.post(TEXT, BODY | {"model": name}).json()
        assert answer["model"] == name and answer["usage"]["completion_tokens"]
    chat = {"model": "two", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert pair.post(CHAT, chat).json()["model"] == "two"
    now = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in _metrics(pair) if line[0] != "#"}
    assert now['headway:requests_total{model_name="one"}'] == 1
    assert now['headway:requests_total{model_name="two"}'] == 3
    assert now['vllm:num_requests_running{model_name="one"}'] == now['headway:requests_running{model_name="two"}'] == 0
    assert now['headway:http_requests_total{route="/v1/completions",status="200"}'] == 3


def test_the_text_of_metrics_keeps_samples_of_a_name_together(pair: Server) -> None:
    kinds = [line for line in _metrics(pair) if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)) and "# TYPE headway:up gauge" in kinds


def _metrics(server: Server) -> list[str]:
    return server.client().get("/metrics").text.splitlines()


def test_all_models_are_listed(pair: Server) -> None:
    listed = {one["id"]: one for one in pair.client().get("/v1/models").json()["data"]}
    assert list(listed) == ["one", "two", "polite"] and listed["polite"]["parent"] == "two"
    client = ollama.Client(host=pair.url)
    assert [one.model for one in client.list().models] == ["one", "two", "polite"]
    assert [one.model for one in client.ps().models] == ["one", "two", "polite"]
    assert client.generate("two:latest", "hi", options={"num_predict": 1}).model == "two"


def test_a_request_that_names_no_model_or_another_is_told_which_there_are(pair: Server) -> None:
    for path, body in ((TEXT, BODY), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        missing = pair.post(path, body)
        assert missing.status_code == 400 and missing.json()["error"]["param"] == "model"
        assert "say which; this server has 'one', 'two', 'polite'" in missing.json()["error"]["message"]
        assert pair.post(path, body | {"model": "three"}).status_code == 404
        assert pair.post(path, body | {"model": "two"}).status_code == 200


def test_adapters_are_loaded_over_the_model_that_is_named(pair: Server) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "more", "lora_path": "polite"}
    assert pair.post(load, body).json()["error"]["param"] == "model"
    assert pair.post(load, body | {"model": "one"}).json()["parent"] == "one"
    assert pair.post(TEXT, BODY | {"model": "more"}).json()["model"] == "more"
    for taken, word in (("two", "another model"), ("polite", "adapter of another")):
        refused = pair.post(load, body | {"model": "one", "lora_name": taken})
        assert refused.status_code == 400 and word in refused.json()["error"]["message"]
    refused = pair.post(load, body | {"model": "more"})
    assert "adapter itself" in refused.json()["error"]["message"]
    assert pair.post(unload, {"lora_name": "more"}).json()["deleted"]
    assert pair.post(TEXT, BODY | {"model": "more"}).status_code == 404


def test_what_each_model_gets_is_said_at_the_start(pair: Server) -> None:
    for name in ("one", "two"):
        assert any(line.startswith(f"{name}: KV cache: 0.01 GiB") for line in pair.lines)
    (serving,) = (line for line in pair.lines if line.startswith("serving"))
    assert re.search(r"serving one, two at http://\S+/v1 \(context 1024 tokens, 1024 tokens\)", serving)


def test_the_printed_command_names_a_model(start: Start) -> None:
    server = start(engines={"a 'b'": {}, "c": {}})
    assert server.client().get("/ready").status_code == server.client().get("/health").status_code == 200
    assert server.process.stdout is not None
    example = "".join(server.process.stdout.readline() for _ in range(6))  # of a body of three fields, a line each
    curl = example[example.index("curl") :].replace("curl", "curl -s")
    answer = subprocess.run(["sh", "-c", curl], capture_output=True, text=True).stdout
    assert '"model":"a \'b\'"' in answer and server.stop() == 0


def test_when_one_of_several_engines_dies_the_other_models_go_on(start: Start) -> None:
    server = start(engines={"a": {"seconds": 0.02}, "b": {"seconds": 0.02}})
    streams = {}

    def stream(name: str) -> None:
        streams[name] = server.post(TEXT, {"model": name, "prompt": "count", "max_tokens": 60, "stream": True})

    threads = [threading.Thread(target=stream, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    while server.metrics()["headway:requests_running"] < 1 or len(children(server)) < 2:
        time.sleep(0.01)
    time.sleep(0.1)
    assert server.post(TEXT, {"model": "a", "prompt": "exit"}).status_code == 503
    for thread in threads:
        thread.join()
    assert events(streams["a"])[-1]["error"]["code"] == "engine_dead"
    assert len(events(streams["b"])) == 61, "it did not notice"
    with server.client() as client:
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "dead", "whoever watches starts it anew"
        assert client.get("/ready").status_code == 200
        late = client.post(TEXT, json={"model": "a", "prompt": "say:x"})
        assert late.status_code == 503 and late.json()["error"]["code"] == "engine_dead" and late.headers["retry-after"]
        assert client.post(TEXT, json={"model": "b", "prompt": "say:x"}).json()["choices"][0]["text"] == "x"
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "b"]
        up = [line for line in client.get("/metrics").text.splitlines() if line.startswith("headway:up")]
        assert up == ['headway:up{model_name="a"} 0.0', 'headway:up{model_name="b"} 1.0']
    assert server.stop() == 1
    assert server.process.stdout is not None
    assert (
        "the engine of a has stopped: the engine process ended with code 9; the other" in server.process.stdout.read()
    )


def test_when_the_last_engine_dies_the_server_ends(start: Start) -> None:
    server = start(engines={"a": {}, "b": {}})
    for pid in children(server):
        os.kill(pid, signal.SIGKILL)
    assert server.process.wait(10) == 1


def test_a_signal_drains_all_models(start: Start) -> None:
    server = start(engines={"a": {"seconds": 0.03}, "b": {"seconds": 0.03}})
    answers: dict[str, httpx.Response] = {}

    def run(name: str) -> None:
        answers[name] = server.post(TEXT, {"model": name, "prompt": "count", "max_tokens": 30})

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    while sum("requests_running" in line and line.endswith(" 1") for line in _metrics(server)) < 4:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert {server.post(TEXT, {"model": name, "prompt": "late"}).status_code for name in "ab"} == {503}
    for thread in threads:
        thread.join()
    assert [answers[name].json()["usage"]["completion_tokens"] for name in "ab"] == [30, 30]
    assert server.process.wait(10) == 0


def test_a_model_that_cannot_be_loaded_is_named_and_ends_the_start() -> None:
    with pytest.raises(AssertionError, match=r"b: model.gguf: tensor 'x' is cut off"):
        Server({"engines": {"a": {}, "b": {"broken": "model.gguf: tensor 'x' is cut off"}}})


@pytest.fixture
def infos(folders: tuple[Path, Path]) -> dict[str, ModelInfo]:
    return {path.name: describe(path) for path in folders}


def test_memory_and_threads_are_divided(infos: dict[str, ModelInfo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "free_memory", lambda: int(8 * GIB))
    monkeypatch.setattr(several, "usable_cores", lambda: 5)
    made = divided(EngineOptions(), infos)
    assert [one.threads for one in made.values()] == [2, 2]
    assert sum(one.memory_gib or 0 for one in made.values()) == pytest.approx(8)
    assert [one.model for one in made.values()] == [str(info.path) for info in infos.values()]
    larger = {"one": infos["one"], "two": replace(infos["two"], weight_bytes=int(2 * GIB))}
    one, two = divided(EngineOptions(memory_gib=6, threads=3), larger).values()
    assert (one.threads, two.threads) == (3, 3)
    small = infos["one"].weight_bytes / GIB
    left = 6 - (2 + small + 2 * PROCESS / GIB)
    assert one.memory_gib == pytest.approx(small + PROCESS / GIB + left / 2)
    assert two.memory_gib == pytest.approx(2 + PROCESS / GIB + left / 2)
    disks = [one.kv_disk_gib for one in divided(EngineOptions(kv_disk="folder"), infos).values()]
    assert disks == [5.0, 5.0]
    drafted = divided(EngineOptions(memory_gib=6, draft="two"), infos, infos["two"])
    left = 6 - sum(info.weight_bytes + infos["two"].weight_bytes + PROCESS for info in infos.values()) / GIB
    for name, info in infos.items():
        need = (info.weight_bytes + infos["two"].weight_bytes + PROCESS) / GIB
        assert drafted[name].memory_gib == pytest.approx(need + left / 2)
    alone = {"two": infos["two"]}
    assert divided(EngineOptions(), alone)["two"] == EngineOptions(model=str(infos["two"].path))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"memory_gib": 0.5}, "model: weights and processes of one, two take 0.69 GiB together; 0.50 may be used"),
        ({"memory_gib": 2, "kv_cache_gib": 1}, "model: weights, caches and processes of one, two take 2.69 GiB"),
        ({"event_log": "log"}, "--event-log: it is one model's, and several are given"),
        ({"chat_template": "file"}, "--chat-template: it is one model's"),
        ({"lora": ("fr=path",)}, "--lora: 'fr' does not say which model it is over: MODEL/NAME=PATH, of one, two"),
        ({"lora": ("one/two=path",)}, "--lora: 'two' is the name of another model or adapter"),
        ({"lora": ("one/a=path", "two/a=path")}, "--lora: 'a' is the name of another"),
    ],
)
def test_what_cannot_be_of_several_is_refused(
    infos: dict[str, ModelInfo], options: dict[str, object], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several, "free_memory", lambda: int(8 * GIB))
    with pytest.raises(BadInput, match=re.escape(sentence)):
        divided(EngineOptions.of(options), infos)


def test_draft_models_take_memory_too(infos: dict[str, ModelInfo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "free_memory", lambda: int(8 * GIB))
    large = replace(infos["one"], weight_bytes=int(4 * GIB))
    sentence = "model: weights, draft models and processes of one, two take 8.69 GiB together; 8.00 may be used"
    with pytest.raises(BadInput, match=re.escape(sentence)):
        divided(EngineOptions(draft="one"), infos, large)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "model: two are called 'one'; --served-model-name, once for each, tells them apart"),
        (["--served-model-name", "a"], "--served-model-name: 1 names for 2 models"),
        (["--served-model-name", "a", "--served-model-name", "a"], "model: two are called 'a'"),
    ],
)
def test_names_tell_models_apart(folders: tuple[Path, Path], arguments: list[str], sentence: str) -> None:
    command = [sys.executable, "-m", "headway", "serve", str(folders[0]), str(folders[0]), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and sentence in result.stderr and result.stdout == ""
