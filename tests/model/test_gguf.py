"""The GGUF reader: right about good files, one clear sentence about bad ones."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.errors import ModelFileError
from headway.model.gguf import read_gguf


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int, dimensions: int | None = None) -> bytes:
    n = len(shape) if dimensions is None else dimensions
    return string(name) + struct.pack(f"<I{len(shape)}Q", n, *shape) + struct.pack("<IQ", kind, offset)


def file(
    entries: list[bytes] = (), tensors: list[bytes] = (), data: bytes = b"", version: int = 3,  # type: ignore[assignment]
    counts: tuple[int, int] | None = None, magic: bytes = b"GGUF",
) -> bytes:  # fmt: skip
    """A GGUF file from parts; counts: (tensors, keys) to claim instead of the true ones."""
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(entries))))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


GOOD = file(
    [
        entry("general.architecture", 8, string("llama")),
        entry("flag", 7, b"\x01"),
        entry("names", 9, array(8, 2, string("ab") + string("ç"))),
        entry("nested", 9, array(9, 2, array(4, 1, struct.pack("<I", 7)) + array(5, 2, struct.pack("<2i", -1, 2)))),
    ],
    [tensor("a", (32, 2), 8, 0), tensor("b", (5,), 0, 96)],
    bytes(range(68)) + bytes(28) + np.arange(5, dtype=np.float32).tobytes(),
)


@contextmanager
def little_memory(most: int = 8 << 20) -> Iterator[None]:
    """Nothing large is allocated inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def test_a_good_file_is_read(tmp_path: Path) -> None:
    result = read_gguf(write(tmp_path, GOOD))
    assert result.metadata == {
        "general.architecture": "llama", "flag": True, "names": ["ab", "ç"], "nested": [[7], [-1, 2]]
    }  # fmt: skip
    a, b = result.tensors["a"], result.tensors["b"]
    assert (a.shape, a.format, bytes(a.data)) == ((2, 32), "q8_0", bytes(range(68)))
    assert (b.shape, b.format, b.dequantise().tolist()) == ((5,), "f32", [0, 1, 2, 3, 4])


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    path = write(tmp_path, file([], [tensor("big", (1 << 22,), 0, 0)], bytes(4 << 22)))
    with little_memory(1 << 20):
        weight = read_gguf(path).tensors["big"]
        assert weight.dequantise().base is not None
    with pytest.raises(ValueError, match="read-only"):
        weight.data[0] = 1


def test_files_of_the_gguf_package_are_read_alike(tmp_path: Path) -> None:
    """Every scalar type, arrays, and every supported tensor type, tensors bit for bit."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    scalars: dict[str, Any] = {
        "uint8": 250, "int8": -7, "uint16": 65000, "int16": -30000, "uint32": 4_000_000_000, "int32": -5,
        "uint64": 2**63 + 5, "int64": -(2**60), "float32": 0.5, "float64": 1e-300, "bool": False, "string": "ħ\n",
    }  # fmt: skip
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.array", [1, 2, 3])
    writer.add_array("x.words", ["a", "", "ü"])
    types = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")]
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    for kind in types:
        writer.add_tensor(kind.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    mine, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {key: mine.metadata[f"x.{key}"] for key in scalars} == scalars
    assert mine.metadata["x.array"] == [1, 2, 3] and mine.metadata["x.words"] == ["a", "", "ü"]
    assert mine.tensors.keys() == {kind.name for kind in types}
    for other in theirs.tensors:
        expected = gguf.quants.dequantize(other.data, other.tensor_type)
        np.testing.assert_array_equal(
            mine.tensors[other.name].dequantise().view(np.uint32), expected.view(np.uint32), err_msg=other.name
        )


HUGE = 1 << 63
DATA = bytes(256)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not a GGUF": (b"PK\x03\x04" + bytes(60), "not a GGUF"),
    "only a magic": (b"GGUF", "truncated"),
    "old version": (file(version=1), "version 1"),
    "future version": (file(version=4), "version 4"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "2^63 tensors": (file(counts=(HUGE, 0)), "tensor count"),
    "2^64-1 keys": (file(counts=(0, 2**64 - 1)), "metadata count"),
    "more keys than bytes": (file(counts=(0, 60_000)), "metadata count 60000 cannot fit"),
    "more tensors than bytes": (file(counts=(1000, 0)), "tensor count 1000 cannot fit"),
    "a key of 2^63 bytes": (file([struct.pack("<Q", HUGE) + bytes(9)]), "9223372036854775808"),
    "a value of 2^40 bytes": (file([entry("k", 8, struct.pack("<Q", 1 << 40))]), "'k'"),
    "a value past the end": (file([entry("k", 8, struct.pack("<Q", 1000))]), "truncated"),
    "an array of 2^63": (file([entry("k", 9, array(4, HUGE))]), "array length"),
    "an array whose bytes overflow 2^64": (file([entry("k", 9, array(10, 1 << 61))]), "array length"),
    "an array past the end": (file([entry("k", 9, array(10, 1000))]), "'k': array length 1000 cannot fit"),
    "strings past the end": (file([entry("k", 9, array(8, 1000))]), "'k': array length 1000 cannot fit"),
    "deep arrays": (file([entry("k", 9, array(9, 1) * 50 + array(0, 1, b"x"))]), "nested"),
    "unknown value type": (file([entry("k", 13, bytes(8))]), "'k': unknown value type 13"),
    "unknown element type": (file([entry("k", 9, array(99, 1, bytes(8)))]), "'k': unknown array element type 99"),
    "a boolean of 2": (file([entry("k", 7, b"\x02")]), "boolean"),
    "invalid UTF-8": (file([entry("k", 8, string(b"\xff\xfe"))]), "UTF-8"),
    "a key twice": (file([entry("k", 0, b"1"), entry("k", 0, b"2")]), "'k': is given twice"),
    "an empty key": (file([entry("", 0, b"1")]), "empty"),
    "alignment 0": (file([entry("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment"),
    "alignment 24": (file([entry("general.alignment", 4, struct.pack("<I", 24))]), "power of two"),
    "alignment a string": (file([entry("general.alignment", 8, string("32"))]), "general.alignment"),
    "alignment 2^31": (file([entry("general.alignment", 4, struct.pack("<I", 1 << 31))]), "general.alignment"),
    "0 dimensions": (file([], [tensor("t", (), 0, 0)], DATA), "'t': 0 dimensions"),
    "2^32-1 dimensions": (file([], [tensor("t", (4,), 0, 0, 2**32 - 1)], DATA), "'t': 4294967295 dimensions"),
    "a dimension of 0": (file([], [tensor("t", (4, 0), 0, 0)], DATA), "'t': shape"),
    "a negative dimension": (file([], [tensor("t", (2**64 - 1,), 0, 0)], DATA), "'t': shape"),
    "a product beyond 2^64": (file([], [tensor("t", (1 << 40, 1 << 40), 0, 0)], DATA), "'t': ends at byte"),
    "a product that wraps to 0": (file([], [tensor("t", (1 << 32, 1 << 32), 0, 0)], DATA), "'t': ends at byte"),
    "an offset beyond the end": (file([], [tensor("t", (4,), 0, 1 << 62)], DATA), "'t': ends at byte"),
    "an offset that wraps": (file([], [tensor("t", (4,), 0, 2**64 - 32)], DATA), "'t': ends at byte"),
    "a misaligned offset": (file([], [tensor("t", (4,), 0, 4)], DATA), "'t': its offset 4"),
    "a broken block": (file([], [tensor("t", (33, 2), 8, 0)], DATA), "'t': rows of 33"),
    "a type not read": (file([], [tensor("t", (256,), 16, 0)], DATA), "'t': stored as IQ2_XXS; supported are"),
    "an unknown type": (file([], [tensor("t", (256,), 77, 0)], DATA), "'t': stored as unknown type 77"),
    "a tensor twice": (file([], [tensor("t", (4,), 0, 0), tensor("t", (4,), 0, 32)], DATA), "'t': is given twice"),
    "overlap": (file([], [tensor("t", (16,), 0, 0), tensor("u", (4,), 0, 32)], DATA), "'u': overlaps tensor 't'"),
    "a short file": (file([], [tensor("t", (64,), 0, 0)], DATA[:-1]), "'t': ends at byte"),
    "a very long name": (file([], [tensor("t" * 2000, (4,), 0, 0)], DATA), "2000 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_bad_file_gets_one_sentence_with_its_name_and_fault(tmp_path: Path, case: str) -> None:
    content, fault = HOSTILE[case]
    path = write(tmp_path, content)
    with little_memory(), pytest.raises(ModelFileError) as error:
        read_gguf(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and fault in message and "\n" not in message and len(message) < 500


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be read"):
            read_gguf(path)


def test_truncated_anywhere_it_is_refused(tmp_path: Path) -> None:
    for end in range(len(GOOD)):
        with pytest.raises(ModelFileError):
            read_gguf(write(tmp_path, GOOD[:end]))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_with_bytes_changed_it_is_read_or_refused(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD)
    for at, byte in changes:
        content[at] = byte
    path = write(tmp_path, bytes(content))
    with little_memory():
        try:
            result = read_gguf(path)
        except ModelFileError:
            return
    for weight in result.tensors.values():
        with np.errstate(all="ignore"):
            assert weight.dequantise().shape == weight.shape


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_noise_behind_the_magic_is_refused(tmp_path: Path, noise: bytes) -> None:
    """Random counts are almost never honest; whatever happens, nothing but ModelFileError comes out."""
    with little_memory():
        try:
            read_gguf(write(tmp_path, b"GGUF\x03\0\0\0" + noise))
        except ModelFileError:
            return
