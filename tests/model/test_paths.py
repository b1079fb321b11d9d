"""What lies where a model file should be: links, pipes, stand-ins, strangers; and what the model is called."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headway.core.errors import BadInput, ModelFileError
from headway.model.load import describe
from headway.model.safetensors import INDEX, SINGLE, read_folder
from headway.model.source import FetchError, resolve
from tests.model.checkpoints import make
from tests.model.test_checkpoint import change, tiny_gguf
from tests.serve.conftest import write_tiny_checkpoint

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", SINGLE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my-model"
    made.mkdir()
    write_tiny_checkpoint(made)
    (made / "generation_config.json").write_text("{}")
    return made


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja"])
def test_t2_031_a_link_that_leads_nowhere_is_no_missing_file(folder: Path, name: str) -> None:
    for target in ("gone", name):  # the second leads to itself
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with pytest.raises(ModelFileError, match=f"{name}: cannot be read: a link to {target}, which leads nowhere"):
            describe(folder)


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja"])
def test_t2_031_a_named_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelFileError, match=f"{name}: is not a regular file"):
        describe(folder)


def test_t2_031_a_pipe_or_a_broken_link_for_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.gguf")
    with pytest.raises(ModelFileError, match=r"p\.gguf: is not a regular file"):
        describe(tmp_path / "p.gguf")
    (tmp_path / "m.gguf").symlink_to("gone.gguf")
    with pytest.raises(BadInput, match=r"is a link to 'gone\.gguf', which leads nowhere"):
        describe(tmp_path / "m.gguf")


def test_t2_031_a_model_is_called_what_its_user_calls_it(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    assert describe(snapshot).name == "tiny"
    (tmp_path / "mine").symlink_to(snapshot)
    assert describe(f"{tmp_path}/mine/").name == "mine"
    blob = tiny_gguf(tmp_path / "d34db33f")
    (tmp_path / "tiny.gguf").symlink_to(blob)
    assert (describe(tmp_path / "tiny.gguf").name, describe(blob).name) == ("tiny", "d34db33f")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a Git LFS pointer"),
        ("\n <!DOCTYPE html><title>Sign in</title>", "an HTML page"),
        ("<html><body>404</body></html>", "an HTML page"),
    ],
)
def test_what_was_saved_in_a_files_place_is_named(folder: Path, name: str, content: str, what: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelFileError, match=f"{name}: {what}, not the file itself"):
        describe(folder)


@pytest.mark.parametrize("text", ["models/llama.gguf", "./nowhere", "nowhere", "org/nothing"])
def test_a_mistyped_path_is_told_that_nothing_is_there(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises((BadInput, FetchError), match=f"'{text}': there is no such file or folder"):
        resolve(text)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make(tmp_path, shard="40KB")
    return tmp_path


def numbers(folder: Path) -> dict[str, np.ndarray]:
    return {name: weight.dequantise().copy() for name, weight in read_folder(folder).items()}


def test_t2_030_the_index_says_which_files_count(sharded: Path) -> None:
    before = numbers(sharded)
    for stranger in (SINGLE, "consolidated.safetensors", "adapter_model.safetensors"):
        save_file({name: array + 1 for name, array in before.items()}, sharded / stranger)
    after = numbers(sharded)
    assert before.keys() == after.keys() and all((after[name] == before[name]).all() for name in before)
    (sharded / INDEX).unlink()
    assert all((array == before[name] + 1).all() for name, array in numbers(sharded).items())


def test_t2_030_a_missing_shard_is_named_and_no_other_file(sharded: Path) -> None:
    files = sorted(set(json.loads((sharded / INDEX).read_text())["weight_map"].values()))
    moved = load_file(sharded / files[-1])
    (sharded / files[-1]).unlink()
    save_file(moved | load_file(sharded / files[0]), sharded / files[0])
    with pytest.raises(ModelFileError, match=f"{INDEX}: weight_map names '{files[-1]}', which is missing"):
        describe(sharded)


@pytest.mark.parametrize("part", [0, 1])
def test_t2_027_a_part_of_a_split_gguf_says_which_parts_are_missing(tmp_path: Path, part: int) -> None:
    path = tiny_gguf(tmp_path / f"m-0000{part + 1}-of-00003.gguf", **{"split.count": 3, "split.no": part})
    with pytest.raises(ModelFileError, match=r"is a part of 3; missing beside it: m-0000\d-of-00003\.gguf, "):
        describe(path)


def test_more_heads_than_any_model_has_are_refused(folder: Path, tmp_path: Path) -> None:
    change(folder / "config.json", num_attention_heads=65536)
    with pytest.raises(ModelFileError, match="num_attention_heads: 65536 is not an integer from 1 to 4096"):
        describe(folder)
    with pytest.raises(ModelFileError, match=r"attention\.head_count: 65536 is not an integer from 1 to 4096"):
        describe(tiny_gguf(tmp_path / "m.gguf", **{"llama.attention.head_count": 65536}))


@pytest.mark.parametrize("claim", [2**32 - 1, 2**24 + 1])
def test_more_positions_than_any_model_has_are_refused(folder: Path, tmp_path: Path, claim: int) -> None:
    change(folder / "config.json", max_position_embeddings=claim)
    with pytest.raises(ModelFileError, match=f"max_position_embeddings: {claim} is not an integer from 1 to {2**24}"):
        describe(folder)
    with pytest.raises(ModelFileError, match=f"context_length: {claim} is not an integer from 1 to {2**24}"):
        describe(tiny_gguf(tmp_path / "m.gguf", **{"llama.context_length": claim}))
