"""openai-node, the client of most programs in JavaScript, against the running server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from headway.model.source import cache_folder
from tests.serve.conftest import Server

VERSION = "6.49.0"


@pytest.fixture(scope="module")
def package() -> Path:
    """The package, fetched once; tests are skipped where it cannot be."""
    folder = cache_folder() / "tests" / f"openai-node-{VERSION}"
    found = folder / "node_modules" / "openai"
    if not (found / "index.mjs").is_file():
        if not shutil.which("npm"):
            pytest.skip("npm is not here")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", str(folder), f"openai@{VERSION}"]
        if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode:
            pytest.skip("openai-node is not to be had here")
    return found


def test_it_talks_streams_and_leaves(package: Path, server: Server) -> None:
    script = Path(__file__).with_name("openai_client.mjs")
    command = ["node", str(script), str(package), f"{server.url}/v1", "scripted"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["whole"] == found["streamed"] == found["helper"] == "Hällo 🙂"
    assert found["vector"] == pytest.approx([x / (3**2 + 97**2 + 99**2) ** 0.5 for x in (3, 97, 99)])
    assert found["tokens"] == len("Hällo 🙂".encode()) and found["usage"] > found["tokens"]
    assert (found["completion"], found["response"]) == ("abc", "ok")
    assert found["events"] == ["response.created", "response.completed"]
    assert found["models"] == ["scripted"]
    assert found["error"] == ["NotFoundError", 404, "model_not_found", "model"]
    server.wait_idle(5)
