"""LoRA adapters over HTTP: models of their own, loaded and unloaded by request where the operator lets them be."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.adapter_files import write_random
from tests.serve.conftest import Server, write_tiny_checkpoint

BODY = {"prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def adapter(model: Path, path: Path, seed: int, **settings: Any) -> Path:
    shapes = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in load_file(model / "model.safetensors").items()
        if "_proj" in name
    }
    return write_random(path, shapes, seed, size=0.5, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and adapters/{one,two,large}, and outside/."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("model", "adapters"):
        (folder / name).mkdir()
    write_tiny_checkpoint(folder / "model")
    for seed, name in enumerate(("adapters/one", "adapters/two", "outside")):
        adapter(folder / "model", folder / name, seed)
    adapter(folder / "model", folder / "adapters/large", 3, rank=17)
    (folder / "adapters/link").symlink_to(folder / "outside")
    (folder / "adapters/circle").symlink_to("circle")
    return folder


@pytest.fixture(scope="module")
def lora_server(folder: Path) -> Iterator[Server]:
    """With one adapter, and room for another."""
    options = ["--lora", f"one={folder / 'adapters/one'}", "--max-loras", "2"]
    options += ["--allow-lora-loading", str(folder / "adapters"), "--port", "0", "--kv-cache-gib", "0.01"]
    server = Server(command=[sys.executable, "-m", "headway", "serve", str(folder / "model"), *options])
    yield server
    server.kill()


def text(server: Server, model: str, **fields: Any) -> str:
    response = server.post("/v1/completions", BODY | {"model": model} | fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == model
    return str(body["choices"][0]["text"])


def names(server: Server) -> list[str]:
    return [entry["id"] for entry in server.client().get("/v1/models").json()["data"]]


def test_adapters_are_models_of_their_own(lora_server: Server) -> None:
    assert any(line == "LoRA adapters: one; room for 2 of rank up to 16" for line in lora_server.lines)
    base, one = lora_server.client().get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("model", None)
    assert (one["id"], one["parent"], one["root"]) == ("one", "model", "one")
    assert lora_server.client().get("/v1/models/one").json() == one
    assert text(lora_server, "model") == text(lora_server, "model")
    assert text(lora_server, "one") != text(lora_server, "model")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0, "stream": True}
    chunks = lora_server.post("/v1/chat/completions", chat | {"model": "one"}).text
    assert '"model":"one"' in chunks and '"model":"model"' not in chunks
    ollama = {"model": "one:latest", "prompt": "hi", "stream": False, "options": {"num_predict": 2}}
    assert lora_server.post("/api/generate", ollama).json()["model"] == "one"
    assert lora_server.post("/api/generate", {"model": "one", "stream": False}).json()["model"] == "one"
    tags = lora_server.client().get("/api/tags").json()["models"]
    assert [(tag["name"], tag["details"]["parent_model"]) for tag in tags] == [("model", ""), ("one", "model")]
    response = lora_server.post("/v1/completions", BODY | {"model": "two"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "model: this server has 'model', 'one'"
    before = lora_server.metrics()['headway:adapter_generation_tokens_total{adapter="one"}']
    text(lora_server, "one")
    after = lora_server.metrics()
    assert after['headway:adapter_generation_tokens_total{adapter="one"}'] == before + BODY["max_tokens"]
    assert 'headway:adapter_prompt_tokens_total{adapter="one"}' in after


def test_adapters_come_and_go(lora_server: Server, folder: Path) -> None:
    one = text(lora_server, "one")
    loaded = lora_server.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "two"})
    assert loaded.status_code == 200, loaded.text
    assert (loaded.json()["id"], loaded.json()["parent"]) == ("two", "model")
    assert names(lora_server) == ["model", "one", "two"]
    two = text(lora_server, "two")
    assert two != one == text(lora_server, "one")
    again = {"lora_name": "two", "lora_path": str(folder / "adapters/one")}
    refused = lora_server.post("/v1/load_lora_adapter", again)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400, "lora_name: 'two' is loaded already; unload it first",
    )  # fmt: skip
    assert lora_server.post("/v1/load_lora_adapter", again | {"load_inplace": True}).status_code == 200
    assert text(lora_server, "two") == one
    full = lora_server.post("/v1/load_lora_adapter", {"lora_name": "three", "lora_path": "one"})
    assert full.status_code == 400
    assert "room for 2 adapters (--max-loras), taken by one, two" in full.json()["error"]["message"]
    gone = lora_server.post("/v1/unload_lora_adapter", {"lora_name": "two"})
    assert gone.json() == {"id": "two", "object": "model", "deleted": True}
    assert lora_server.post("/v1/unload_lora_adapter", {"lora_name": "two"}).status_code == 404
    assert lora_server.post("/v1/completions", BODY | {"model": "two"}).status_code == 404
    assert names(lora_server) == ["model", "one"]


def test_running_answers_do_not_notice(lora_server: Server) -> None:
    long = {"max_tokens": 200}
    expected = {model: text(lora_server, model, **long) for model in ("model", "one")}
    got: list[tuple[str, str]] = []

    def ask(model: str) -> None:
        got.append((model, text(lora_server, model, **long)))

    threads = [threading.Thread(target=ask, args=(model,)) for model in ("model", "one") * 3]
    for thread in threads:
        thread.start()
    for _ in range(3):
        for route, body in (("load", {"lora_name": "two", "lora_path": "two"}), ("unload", {"lora_name": "two"})):
            assert lora_server.post(f"/v1/{route}_lora_adapter", body).status_code == 200
    for thread in threads:
        thread.join()
    assert len(got) == 6 and all(answer == expected[model] for model, answer in got)


@pytest.mark.parametrize(
    ("name", "path", "fault"),
    [
        *[
            ("x", path, "there is no such folder or file within the folder")
            for path in (
                "../outside",
                "link",
                "/etc",
                "/no/such",
                "../missing",
                "missing",
                "circle",
                "circle/../link",
                "a\0b",
                "a" * 5000,
            )
        ],
        ("x", ".", "holds no adapter_config.json"),
        ("x", "large", "--max-lora-rank: "),
        ("x\n", "two", "is not a name of up to 128"),
        ("model", "two", "'model' is the model itself"),
    ],
)
def test_what_clients_may_not_load(lora_server: Server, name: str, path: str, fault: str) -> None:
    response = lora_server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    assert response.status_code == 400
    assert fault in response.json()["error"]["message"]
    assert names(lora_server) == ["model", "one"]


def test_servers_load_nothing_on_request_by_default(server: Server) -> None:
    for route, body in (("load", {"lora_name": "x", "lora_path": "x"}), ("unload", {"lora_name": "x"})):
        response = server.post(f"/v1/{route}_lora_adapter", body)
        assert response.status_code == 403
        assert "--allow-lora-loading FOLDER" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--lora", "model=x"], "--lora: 'model' is the model itself"),
        (["--allow-lora-loading", "/"], "--allow-lora-loading: there is no room for adapters; --max-loras makes some"),
        (["--max-loras", "1", "--allow-lora-loading", "/no"], "--allow-lora-loading: '/no' is not a folder"),
        (["--lora", "a=/no"], "there is no such folder or file"),
    ],
)
def test_options_that_cannot_be_honoured(folder: Path, options: list[str], sentence: str) -> None:
    command = [sys.executable, "-m", "headway", "serve", str(folder / "model"), "--port", "0", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert sentence in result.stderr and "Traceback" not in result.stderr
