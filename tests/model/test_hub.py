"""`org/name`: only what is needed is downloaded, once, and resumed; refusals say what to do. On a loopback server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import BadInput, HeadwayError
from headway.engine.references import load_shape
from headway.model.fetching import LEAST_BYTES, StallGuard, bytes_under
from headway.model.source import FetchError, resolve
from headway.shape.catalogue import find_model, model_config
from tests.model.hub import Hub, serving

SHARD = bytes(range(256)) * 400
SHARDED = {
    "README.md": b"# no",
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model-00001-of-00002.safetensors": SHARD,
    "model-00002-of-00002.safetensors": SHARD[::-1],
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "pytorch_model.bin": b"pickled",
    "onnx/model.onnx": b"no",
}
GGUFS = {
    "name-Q4_K_M.gguf": b"GGUF 4",
    "name-Q8_0-00001-of-00002.gguf": b"GGUF 8a",
    "name-Q8_0-00002-of-00002.gguf": b"GGUF 8b",
    "mmproj-name.gguf": b"GGUF eyes",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.repos = {"org/name": SHARDED, "org/name-GGUF": GGUFS, "org/old": {"pytorch_model.bin": b"pickled"}}
        yield hub


def test_only_the_files_that_are_read_are_downloaded_and_only_once(hub: Hub, tmp_path: Path) -> None:
    said: list[tuple[int, int | None]] = []
    folder = resolve("org/name", lambda what, done, total: said.append((done, total)))
    needed = {name for name in SHARDED if name.endswith((".json", ".safetensors"))}
    assert {path.name for path in folder.iterdir()} == set(hub.fetched()) == needed
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == SHARD[::-1]
    assert tmp_path / "hub" in folder.parents
    assert said and said[-1][1] == sum(len(SHARDED[name]) for name in needed)
    asked = len(hub.asked)
    assert resolve("org/name") == folder
    assert len(hub.asked) == asked  # not even asked for news


def test_a_revision_may_be_named(hub: Hub) -> None:
    assert resolve("org/name@v1") == resolve("org/name")
    with pytest.raises(BadInput, match="org/name has no revision 'v2'"):
        resolve("org/name@v2")


def test_an_interrupted_download_is_resumed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.model.hub.CHUNK", 1000)
    hub.cut = {"model-00001-of-00002.safetensors": 50_000}
    try:
        folder = resolve("org/name")  # the library itself may try again
    except HeadwayError:
        folder = resolve("org/name")
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == SHARD
    ranges = [range for _, path, range in hub.asked if path.endswith("00001-of-00002.safetensors") and range]
    assert ranges and ranges[-1].startswith("bytes=50000-")


def test_offline_the_cache_is_enough_if_it_is_complete(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve("org/name") == folder
    (folder / "model-00002-of-00002.safetensors").unlink()
    for commit in ((folder.parents[1] / "refs/main").read_bytes(), b"\xff", b"..", b"a\0b", b""):
        (folder.parents[1] / "refs/main").write_bytes(commit)
        with pytest.raises(FetchError, match=r"org/name is not complete in .*, and HF_HUB_OFFLINE is set"):
            resolve("org/name")


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("org/name-GGUF", "name-Q4_K_M.gguf"),
        ("org/name-GGUF:q4_k_m", "name-Q4_K_M.gguf"),
        ("org/name-GGUF:Q8_0", "name-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_one_gguf_of_several_is_chosen_in_all_its_parts(hub: Hub, source: str, file: str) -> None:
    path = resolve(source)
    assert path.name == file and path.read_bytes() == GGUFS[file]
    assert set(hub.fetched()) == {name for name in GGUFS if name.startswith(file[:10])}
    assert resolve(source) == path


def test_a_gguf_that_is_not_there_names_those_that_are(hub: Hub) -> None:
    with pytest.raises(BadInput, match=r"name one of its GGUF files, .*: name-Q4_K_M, name-Q8_0"):
        resolve("org/name-GGUF:Q2_K")
    with pytest.raises(BadInput, match="org/old holds neither safetensors nor GGUF files"):
        resolve("org/old")


def test_a_gated_model_says_what_to_do_and_a_token_opens_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = {"org/name"}
    with pytest.raises(FetchError, match=f"is gated: accept its terms at {hub.endpoint}/org/name, and "):
        resolve("org/name")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert resolve("org/name").is_dir()


def test_a_model_that_does_not_exist_and_a_hub_that_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="'org/none': there is no such file or folder, and no such model at http"):
        resolve("org/none")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(FetchError, match=r"there is no such file or folder, .* does not give it"):
        resolve("org/name")


def test_the_planner_takes_config_json_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = SHARDED | {"config.json": json.dumps(model_config("smollm2-135m")).encode()}
    hub.gated = {"org/name"}
    with pytest.raises(FetchError, match="is gated"):
        load_shape("org/name")
    monkeypatch.setenv("HF_TOKEN", "secret")
    shape = load_shape("org/name")
    assert shape.n_params == find_model("smollm2-135m").n_params and hub.fetched() == ["config.json"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_shape("org/name") == shape
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        load_shape("org/old")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(BadInput, match=r"org/name-GGUF has no config\.json"):
        load_shape("org/name-GGUF")
    resolve("org/name")  # what the planner left is no whole model
    assert "model-00002-of-00002.safetensors" in hub.fetched()


def test_what_is_counted_may_vanish_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads are watched while another process makes and removes folders among them."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "gone").write_bytes(b"12345")
    (tmp_path / "kept").write_bytes(b"123")
    scan = os.scandir

    def scanning(path: Any = ".") -> Any:
        if str(path) == str(tmp_path / "sub"):
            (tmp_path / "sub" / "gone").unlink(missing_ok=True)
            (tmp_path / "sub").rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", scanning)
    assert bytes_under(tmp_path) == 3
    assert bytes_under(tmp_path / "none") == 0


def test_a_hostile_hub_is_one_sentence_and_writes_nowhere_else(hub: Hub, tmp_path: Path) -> None:
    outside = {"../../../../evil.gguf": b"GGUF", "sub/../../evil.gguf": b"GGUF"}
    hub.repos["org/out"] = outside
    hub.repos["org/up"] = SHARDED | {"model.safetensors.index.json": b'{"weight_map": {"a": ".."}}'}
    hub.repos["org/deep"] = SHARDED | {"model.safetensors.index.json": b'{"weight_map": {"a": "../../x"}}'}
    for repo in ("org/out", "org/up", "org/deep"):
        with pytest.raises(HeadwayError):
            resolve(repo)
    assert not [path for path in tmp_path.rglob("*") if path.name in ("evil.gguf", "x")]
    hub.sizes = {"model.safetensors.index.json": 1 << 60}
    with pytest.raises(FetchError, match="has fewer free"):
        resolve("org/name")
    hub.sizes, hub.endless = {}, {"config.json"}
    with pytest.raises(FetchError, match=r"the hub sends more than the \d+ bytes that it says the file has"):
        resolve("org/name")
    hub.endless, hub.circles = set(), True
    with pytest.raises(FetchError, match="does not give it"):
        resolve("org/name")


def test_what_comes_too_slowly_is_given_up() -> None:
    """Enough in every window, or the download ends."""
    now = [0.0]
    guard = StallGuard("http://hub", lambda: now[0])

    def at(seconds: float, received: int) -> None:
        now[0] = seconds
        guard.check(received)

    for window in range(5):
        at(179 * window, LEAST_BYTES * window)
    at(800, 5)  # begun anew
    with pytest.raises(FetchError, match="http://hub sends too slowly: 10 bytes in the last 180 s; run this again"):
        at(179 * 4 + 181, 15)


def test_a_hub_that_drips_is_given_up_and_complete_files_are_kept(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.model.hub.CHUNK", 1000)
    monkeypatch.setattr("headway.model.fetching.STALL_SECONDS", 0.5)
    file = "model-00002-of-00002.safetensors"
    hub.drips = {file}
    with pytest.raises(FetchError, match=f"{hub.endpoint} sends too slowly: .* bytes in the last 0.5 s"):
        resolve("org/name")
    hub.drips = set()
    monkeypatch.setattr("headway.model.fetching.STALL_SECONDS", 180)
    assert (resolve("org/name") / file).read_bytes() == SHARD[::-1]
    assert hub.fetched().count("model-00001-of-00002.safetensors") == 1  # it was complete


def test_a_hub_that_never_says_what_it_has_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.model.fetching.STALL_SECONDS", 0.5)
    hub.slow_api = True
    with pytest.raises(FetchError, match=f"{hub.endpoint} sends too slowly: 0 bytes in the last 0.5 s"):
        resolve("org/name")
