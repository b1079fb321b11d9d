"""A server process around the scripted engine, and small clients that do no more than they say."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from headway.shape.config import tensors_of
from tests.text.small_tokenizers import train_byte_level

SERVER = str(Path(__file__).with_name("mock_server.py"))


class Server:
    """A running server process."""

    def __init__(self, options: dict[str, Any] | None = None, command: list[str] | None = None) -> None:
        command = command or [sys.executable, SERVER, json.dumps(options or {})]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self.port = 0
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            found = re.search(r"serving .* at http://[^/]*:(\d+)/v1", line)
            if found:
                self.port = int(found.group(1))
                break
        assert self.port, "\n".join(self.lines)
        self.url = f"http://127.0.0.1:{self.port}"
        self._client = self.client()  # for all threads, on connections that are kept

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, verify=False, **options)

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits, verify=False, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self._client.post(path, json=body, **options)

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self._client.get("/metrics").text)

    def wait_idle(self, seconds: float = 1.0) -> dict[str, float]:
        """The metrics once nothing runs or waits and no block is owned."""
        end = time.monotonic() + seconds
        while True:
            now = self.metrics()
            if not any(now[f"headway:{name}"] for name in ("requests_running", "requests_waiting", "kv_blocks_used")):
                return now
            assert time.monotonic() < end, {name: now[name] for name in now if "requests_" in name or "blocks" in name}
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def parse_metrics(text: str) -> dict[str, float]:
    """Name (with its labels, but the model's) -> value."""
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'model_name="[^"]*",?', "", name).replace("{}", "")
            values[name] = float(value)
    return values


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    server = Server({})
    yield server
    server.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Start servers with options of their own."""
    started: list[Server] = []

    def begin(**options: Any) -> Server:
        started.append(Server(options))
        return started[-1]

    yield begin
    for server in started:
        server.kill()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a whole stream; checks that [DONE] ends it."""
    blocks = [block for block in response.content.decode().split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_checkpoint(folder: Path, tokenizer: tokenizers.Tokenizer | None = None, rows: int = 0) -> None:
    """A two-layer random Llama as a Hugging Face folder.

    Args:
        tokenizer: default: a byte-level one.
        rows: of embedding and output matrix; default: as many as the tokenizer has names.
    """
    tokenizer = tokenizer or train_byte_level()
    size = rows or tokenizer.get_vocab_size()
    written = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {
        tensor.name: np.ones(tensor.shape) if len(tensor.shape) == 1 else rng.normal(0, 0.15, tensor.shape)
        for tensor in tensors_of(written)
    }
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(written))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`headway serve` on a two-layer random model with a byte-level tokenizer: nothing is faked."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder)
    command = [sys.executable, "-m", "headway", "serve", str(folder), "--port", "0", "--kv-cache-gib", "0.01"]
    server = Server(command=[*command, "--served-model-name", "tiny", "--max-rows", "16"])
    yield server
    server.kill()


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """`headway serve` on the built-in model: small, but it answers."""
    try:
        command = [sys.executable, "-m", "headway", "serve", "--port", "0", "--kv-cache-gib", "0.1"]
        server = Server(command=[*command, "--max-model-len", "2048"])
    except AssertionError as error:
        pytest.skip(f"not to be had here: {error}")
    yield server
    server.kill()
