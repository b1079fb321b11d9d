"""Files of a model changed at random, of every kind: read, or refused in one sentence; nothing else comes out."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from headway.core.errors import HeadwayError, ModelFileError
from headway.model.load import FAMILIES, open_model
from headway.model.quantised import METHODS
from headway.model.safetensors import INDEX, SINGLE, read_folder
from headway.text.source import TokenizerSource
from headway.text.template import ChatTemplate
from headway.text.tokenizer import Tokenizer
from tests.model.checkpoints import make
from tests.text.small_tokenizers import gguf_metadata, gguf_source, make_sentencepiece, train_byte_level

quick = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.one_of(
    st.integers(-3, 200), st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**30]), st.floats(width=32)
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Nothing, or a refusal."""
    try:
        yield
    except HeadwayError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make(folder, num_hidden_layers=1)
    return folder


@functools.cache
def configs(folder: Path) -> dict[str, dict[str, Any]]:
    """A config of every family, and those of a quantised one."""
    llama = json.loads((folder / "config.json").read_text())
    known = {}
    for family in FAMILIES:
        try:
            known[family] = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
        except (ValueError, KeyError):  # a name that only GGUF files use
            continue
    for method in METHODS:
        known[method] = llama | {"quantization_config": {"quant_method": method, "bits": 4}}
    return known | {"llama": llama}


@quick
@given(data=st.data())
def test_config_json(folder: Path, data: st.DataObject) -> None:
    known = configs(folder)
    config = json.loads(json.dumps(known[data.draw(st.sampled_from(sorted(known)))]))
    for _ in range(data.draw(st.integers(1, 3))):
        inner = [config, *(value for value in config.values() if isinstance(value, dict) and value)]
        target = data.draw(st.sampled_from(inner)) if len(inner) > 1 else config
        target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    copy = folder.parent / f"{folder.name}-config"
    copy.mkdir(exist_ok=True)
    shutil.copy(folder / SINGLE, copy / SINGLE)
    (copy / "config.json").write_text(json.dumps(config))
    with one_sentence():
        open_model(copy)


@quick
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "model.norm.weight", "__metadata__", ""]),
        st.sampled_from([SINGLE, "../model.safetensors", "/etc/passwd", "..", "", ".", "no.safetensors", INDEX, "a\0b"])
        | JSON,
    )
    | JSON
)
def test_an_index(folder: Path, weight_map: Any) -> None:
    copy = folder.parent / f"{folder.name}-index"
    copy.mkdir(exist_ok=True)
    shutil.copy(folder / SINGLE, copy / SINGLE)
    (copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with one_sentence():
        read_folder(copy)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        ("missing", r"'two.safetensors', which is missing"),
        ("interrupted", r"which is missing \(its download was interrupted: two.safetensors.incomplete is there\)"),
        ("truncated", r"two.safetensors: tensor .*the file may be truncated"),
        ("duplicated", r"two.safetensors: tensor .*: the index does not place it in this file"),
        ("mis-shaped", r"tensor model.norm.weight: its shape is \(65,\), the config asks for \(64,\)"),
    ],
)
def test_shards(folder: Path, tmp_path: Path, break_it: str, sentence: str) -> None:
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    shutil.copy(folder / "config.json", tmp_path)
    if break_it == "mis-shaped":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].repeat(2)[:65]
    save_file({name: tensors[name] for name in names[:4]}, one)
    save_file({name: tensors[name] for name in names[4 if break_it != "duplicated" else 3 :]}, two)
    placed = {name: one.name if name in names[:4] else two.name for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    if break_it == "missing":
        two.unlink()
    elif break_it == "interrupted":
        two.rename(tmp_path / "two.safetensors.incomplete")
    elif break_it == "truncated":
        two.write_bytes(two.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=sentence):
        open_model(tmp_path)


LIBRARY = {"bytes": train_byte_level(), "pieces": make_sentencepiece()}


@quick
@given(data=st.data())
def test_tokenizer_json(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A field anywhere in the file becomes something else, or a few of its bytes do."""
    text = LIBRARY[data.draw(st.sampled_from(sorted(LIBRARY)))].to_str()
    if data.draw(st.booleans()):
        content = bytearray(text.encode())
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            content[at] = data.draw(st.integers(32, 126))
    else:
        file = json.loads(text)
        target = file
        while isinstance(below := target[data.draw(st.sampled_from(sorted(target)))], dict) and below:
            target = below
        target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
        content = bytearray(json.dumps(file).encode())
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content)
    with one_sentence():
        tokenizer = Tokenizer(TokenizerSource(kind="hf", path=folder, vocab_size=600, metadata={}))
        tokenizer.decode(tokenizer.encode("Hello <|im_end|> 東京\n"))


def pieces_metadata() -> dict[str, Any]:
    vocab = LIBRARY["pieces"].get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    own = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [-float(id) for id in range(len(tokens))]}
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


@quick
@given(data=st.data())
def test_the_tokenizer_of_a_gguf_header(data: st.DataObject) -> None:
    metadata = pieces_metadata() if data.draw(st.booleans()) else dict(gguf_metadata(LIBRARY["bytes"], "qwen2"))
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(sorted(metadata)))
        value = metadata[key]
        if isinstance(value, list) and value and data.draw(st.booleans()):
            value = list(value)
            value[data.draw(st.integers(0, len(value) - 1))] = data.draw(JSON)
            metadata[key] = value
        else:
            metadata[key] = data.draw(JSON)
    with one_sentence():
        tokenizer = Tokenizer(gguf_source(metadata, vocab_size=600))
        tokenizer.decode(tokenizer.encode("Hello <|im_end|> 東京\n"))
        tokenizer.template_tokens()


PIECES = [
    *("{{", "}}", "{%", "%}", "{#", " for m in messages ", " endfor ", " if ", " endif ", "messages", "[0]", "|", "a"),
    *("tojson", "raise_exception('x')", " set a = ", "'x' * 9", "namespace(b=1)", ".content", " macro f(x) ", "f", "("),
    *(" endmacro ", ")", "range(10**9)", "~", "\n", "é", "''.__class__", "cycler", "loop.index", " include 'x' "),
]


@settings(quick, max_examples=15)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_a_chat_template(source: str) -> None:
    template = ChatTemplate(source)
    try:
        with one_sentence():
            template.render([{"role": "user", "content": "hi"}])
    finally:
        template.close()
