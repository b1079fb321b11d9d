"""The safetensors reader: right about good files, one clear sentence about bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headway.core.errors import ModelFileError
from headway.model.safetensors import read_folder, read_safetensors
from tests.model.test_gguf import little_memory


def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


GOOD = file({"__metadata__": {"format": "pt"}, "a": entry(0, 8), "b": entry(8, 16, [2, 2], "BF16")}, bytes(range(16)))


def write(tmp_path: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_files_of_the_safetensors_package_are_read_alike(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "half": np.array([[1.5, -2]], np.float16)}
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    tensors = read_safetensors(tmp_path / "model.safetensors")
    assert tensors.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(tensors[name].dequantise(), values)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    tensors = read_safetensors(write(tmp_path, GOOD))
    assert {name: (weight.shape, weight.format, bytes(weight.data)) for name, weight in tensors.items()} == {
        "a": ((2,), "f32", bytes(range(8))),
        "b": ((2, 2), "bf16", bytes(range(8, 16))),
    }


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "seven bytes": (bytes(7), "truncated"),
    "a header of 2^63 bytes": (file({}, length=1 << 63), "9223372036854775808"),
    "a header of 2^27 bytes": (file({}, length=1 << 27), "at most 16777216"),
    "a header past the end": (file({}, length=1000), "truncated"),
    "not JSON": (file(b"{nonsense}"), "not valid JSON"),
    "not UTF-8": (file(b'{"\xff": 1}'), "not valid JSON"),
    "not an object": (file([1]), "must be a JSON object"),
    "deep nesting": (file(b"[" * 200_000), "nested too deeply"),
    "a tensor twice": (file(b'{"a": {}, "a": {}}'), "'a' is given twice"),
    "a number of 10000 digits": (file(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "an entry that is no object": (file({"a": 5}), "'a': its entry"),
    "a field missing": (file({"a": {"dtype": "F32", "shape": [1]}}), "'a': its entry"),
    "a field too many": (file({"a": entry(0, 4) | {"x": 1}}, bytes(4)), "'a': its entry"),
    "an integer tensor": (file({"a": entry(0, 2, [1], "I16")}, bytes(2)), "'a': dtype 'I16' is not supported"),
    "a dtype that is a list": (file({"a": entry(0, 4, [1], ["F32"])}, bytes(4)), "'a': dtype"),
    "a negative size": (file({"a": entry(0, 4, [-1])}, bytes(4)), "'a': shape"),
    "a size of zero": (file({"a": entry(0, 0, [0])}), "'a': shape"),
    "a size that is true": (file({"a": entry(0, 4, [True])}, bytes(4)), "'a': shape"),
    "a size that is a float": (file({"a": entry(0, 4, [1.0])}, bytes(4)), "'a': shape"),
    "a size of 2^64": (file({"a": entry(0, 4, [1 << 64])}, bytes(4)), "'a': shape"),
    "100 dimensions": (file({"a": entry(0, 4, [1] * 100)}, bytes(4)), "'a': shape"),
    "a product beyond 2^64": (file({"a": entry(0, 4, [1 << 40, 1 << 40])}, bytes(4)), "'a': F32 of shape"),
    "a product that wraps": (file({"a": entry(0, 0, [1 << 32, 1 << 32])}), "'a': F32 of shape"),
    "offsets turned around": (file({"a": entry(8, 4, [1])}, bytes(8)), "'a': data_offsets"),
    "three offsets": (file({"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}}, bytes(8)), "'a': data_offsets"),
    "negative offsets": (file({"a": entry(-4, 0, [1])}, bytes(4)), "'a': data_offsets"),
    "out of bounds": (file({"a": entry(0, 8)}, bytes(7)), "'a': ends at byte 8"),
    "out of bounds at 2^62": (file({"a": entry(0, 1 << 62, [1 << 60])}, bytes(8)), "'a': ends at byte"),
    "a hole": (file({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "'b': begins at byte 8"),
    "a hole at the start": (file({"a": entry(4, 8)}, bytes(8)), "'a': begins at byte 4"),
    "an overlap": (file({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'b': begins at byte 4"),
    "data left over": (file({"a": entry(0, 4)}, bytes(9)), "5 bytes after the last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_bad_file_gets_one_sentence_with_its_name_and_fault(tmp_path: Path, case: str) -> None:
    content, fault = HOSTILE[case]
    path = write(tmp_path, content)
    with little_memory(), pytest.raises(ModelFileError) as error:
        read_safetensors(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and fault in message and "\n" not in message and len(message) < 500


def test_truncated_anywhere_it_is_refused(tmp_path: Path) -> None:
    for end in range(len(GOOD)):
        with pytest.raises(ModelFileError):
            read_safetensors(write(tmp_path, GOOD[:end]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_with_bytes_changed_it_is_read_or_refused(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD)
    for at, byte in changes:
        content[at] = byte
    with little_memory():
        try:
            tensors = read_safetensors(write(tmp_path, bytes(content)))
        except ModelFileError:
            return
    for weight in tensors.values():
        assert weight.dequantise().shape == weight.shape


def shards(tmp_path: Path, weight_map: Any, files: dict[str, list[str]]) -> Path:
    for name, tensors in files.items():
        header = {tensor: entry(4 * n, 4 * n + 4) for n, tensor in enumerate(tensors)}
        write(tmp_path, file(header, bytes(4 * len(tensors))), name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    folder = shards(tmp_path, {"a": "1", "b": "1", "c": "2"}, {"1": ["a", "b"], "2": ["c"]})
    assert read_folder(folder).keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("weight_map", "files", "fault"),
    [
        ({"a": "1", "b": "2"}, {"1": ["a"]}, "weight_map names '2', which is missing"),
        ({"a": "1", "b": "1"}, {"1": ["a"]}, "'b': the index names it"),
        ({"a": "1"}, {"1": ["a", "b"]}, "'b': the index does not place it"),
        ({"a": "1", "b": "2"}, {"1": ["a", "b"], "2": ["b"]}, "'b': the index does not place it"),
        ({"a": "../1"}, {"1": ["a"]}, "not a file of the folder"),
        ({"a": "/etc/passwd"}, {}, "not a file of the folder"),
        ({"a": ".."}, {}, "not a file of the folder"),
        ({"a": "x\0y"}, {}, "not a file of the folder"),
        ({"a": 1}, {}, "weight_map"),
        ([], {}, "weight_map"),
    ],
)
def test_an_index_that_does_not_match_is_refused(
    tmp_path: Path, weight_map: Any, files: dict[str, list[str]], fault: str
) -> None:
    with pytest.raises(ModelFileError, match=fault):
        read_folder(shards(tmp_path, weight_map, files))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor"):
        read_folder(tmp_path)
