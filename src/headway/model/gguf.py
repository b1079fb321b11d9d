"""Reader of GGUF files: header, typed metadata, and tensors as views of the mapped file.

Layout (github.com/ggml-org/ggml, docs/gguf.md), little-endian:

    "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string | type u32 | value
    tensor:   name string | dimensions u32 | size of each, innermost first, u64 | type u32 | offset u64
    padding to general.alignment | tensor data

The file is not trusted. Every count is held against the bytes that are really left before anything is allocated,
and all arithmetic is on Python integers, which do not overflow.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import ModelFileError, shown
from headway.model.reading import MappedFile, Span
from headway.ops.weight import READABLE, Weight
from headway.shape.formats import BY_GGUF_TYPE, FORMATS, stored_bytes

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRING = 1 << 24  # bytes; a long chat template has 2**15
MAX_NAME = 1 << 10  # bytes of a key or a tensor's name
MAX_ELEMENTS = 1 << 23  # array elements in the whole header; the largest tokenizers have 2**20
MAX_DEPTH = 2  # arrays within arrays
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

SUPPORTED = ", ".join(sorted(name.upper() for name in READABLE))

# Metadata type number -> struct code of a scalar; strings and arrays are apart.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
LENGTH = struct.Struct("<Q")  # of a string


@dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file holds.

    Attributes:
        path: the file.
        metadata: header values by key, as int, float, bool, str, or lists of them.
        tensors: by name; shapes are row-major (out, in), the reverse of the file's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Weight]


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of one file and map its tensors; costs no memory for the tensors themselves.

    Raises:
        ModelFileError: truncated, hostile, or of an unsupported kind; names the key or tensor and the fault.
    """
    return _Reader(path).read()


def read_gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], str]]]:
    """(metadata, tensor name -> (row-major shape, format)) of a file whose tensors are not needed: any type is
    accepted, and the data behind the header may be missing.

    Raises:
        ModelFileError: the header is truncated or hostile.
    """
    return _Reader(path).read_header()


class _Reader:
    """A cursor over the mapped header."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map = MappedFile(path)
        self._size = len(self._map)
        self._at = 0
        self._where = "the header"  # what is being read, for errors
        self._elements = 0

    def read(self) -> GGUFFile:
        tensor_count, key_count = self._counts()
        metadata = self._metadata(key_count)
        alignment = self._alignment(metadata)
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        data_start = -(-self._at // alignment) * alignment
        return GGUFFile(self._path, metadata, self._tensors(entries, data_start, alignment))

    def read_header(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], str]]]:
        tensor_count, key_count = self._counts()
        metadata = self._metadata(key_count)
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        return metadata, {name: (shape, format) for name, shape, format, _ in entries}

    def _counts(self) -> tuple[int, int]:
        if self._map[:4] != b"GGUF":
            raise ModelFileError(f"{self._path}: not a GGUF file (it does not start with 'GGUF')")
        self._at = 4
        version = self._number("I")
        if version in (2 << 24, 3 << 24):
            raise ModelFileError(f"{self._path}: a big-endian GGUF file; only little-endian ones are supported")
        if version not in (2, 3):
            raise ModelFileError(f"{self._path}: GGUF version {version} is not supported; 2 and 3 are")
        tensors, keys = self._number("Q"), self._number("Q")
        # The least a tensor's or a key's entry takes: an empty name, a type, and the smallest value.
        self._check_count("tensor count", tensors, MAX_TENSORS, 8 + 4 + 4 + 8)
        self._check_count("metadata count", keys, MAX_KEYS, 8 + 4 + 1)
        return tensors, keys

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            self._where = f"metadata entry {index}"
            key = self._string(MAX_NAME)
            self._where = f"metadata key {shown(key)}"
            if not key:
                raise self._fault("the name is empty")
            if key in metadata:
                raise self._fault("is given twice")
            metadata[key] = self._value(self._number("I"), 0)
        return metadata

    def _value(self, kind: int, depth: int) -> Any:
        if kind in SCALARS:
            return self._scalars(kind, 1)[0]
        if kind == STRING:
            return self._string(MAX_STRING)
        if kind != ARRAY:
            raise self._fault(f"unknown value type {kind}")
        if depth == MAX_DEPTH:
            raise self._fault(f"arrays nested deeper than {MAX_DEPTH}")
        kind, count = self._number("I"), self._number("Q")
        if kind not in SCALARS and kind not in (STRING, ARRAY):
            raise self._fault(f"unknown array element type {kind}")
        least = struct.calcsize(SCALARS[kind]) if kind in SCALARS else 8 if kind == STRING else 12
        self._check_count("array length", count, MAX_ELEMENTS - self._elements, least)
        self._elements += count
        if kind in SCALARS:
            return self._scalars(kind, count)
        if kind == STRING:
            return self._strings(count)
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As `_string`, `count` times: vocabularies have hundreds of thousands."""
        texts, data, at, end, length_at = [], self._map.map, self._at, self._size - 8, LENGTH.unpack_from
        for _ in range(count):
            length = length_at(data, at)[0] if at <= end else MAX_STRING + 1
            raw = data[at + 8 : at + 8 + length] if length <= MAX_STRING else b""
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = ""
            if len(raw) != length or (raw and not text):  # let `_string` say what is wrong
                self._at = at
                text = self._string(MAX_STRING)
            texts.append(text)
            at += 8 + length
        self._at = at
        return texts

    def _scalars(self, kind: int, count: int) -> list[Any]:
        code = SCALARS[kind]
        raw = self._take(struct.calcsize(code) * count)
        if kind == BOOL and any(byte > 1 for byte in raw):
            raise self._fault("a boolean is neither 0 nor 1")
        return list(struct.unpack(f"<{count}{code}", raw))

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        valid = isinstance(alignment, int) and not isinstance(alignment, bool) and 8 <= alignment <= MAX_ALIGNMENT
        if not valid or alignment & (alignment - 1):
            raise ModelFileError(
                f"{self._path}: metadata key 'general.alignment': {shown(alignment)} is not a power of two from 8 to "
                f"{MAX_ALIGNMENT}"
            )
        return alignment

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], str, int]:
        """(name, row-major shape, format, offset in the data)."""
        self._where = "the tensor list"
        name = self._string(MAX_NAME)
        self._where = f"tensor {shown(name)}"
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._fault(f"{dimensions} dimensions; 1 to {MAX_DIMENSIONS} are accepted")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        if not all(0 < size < 2**63 for size in shape):
            raise self._fault(f"shape {shape} has a dimension that is not a positive 63-bit number")
        kind, offset = self._number("I"), self._number("Q")
        return name, shape, BY_GGUF_TYPE[kind].name if kind in BY_GGUF_TYPE else f"unknown type {kind}", offset

    def _tensors(
        self, entries: list[tuple[str, tuple[int, ...], str, int]], data_start: int, alignment: int
    ) -> dict[str, Weight]:
        tensors: dict[str, Weight] = {}
        last_name, last_end = "", 0
        for name, shape, format, offset in sorted(entries, key=lambda entry: entry[3]):
            self._where = f"tensor {shown(name)}"
            if format not in READABLE:
                known = format.upper() if format in FORMATS else format
                raise self._fault(f"stored as {known}; supported are {SUPPORTED}")
            if name in tensors:
                raise self._fault("is given twice")
            try:
                size = stored_bytes(format, shape)
            except ValueError as error:
                raise self._fault(str(error)) from None
            if offset % alignment:
                raise self._fault(f"its offset {offset} is not a multiple of the alignment {alignment}")
            if data_start + offset + size > self._size:
                raise self._fault(
                    f"ends at byte {data_start + offset + size} but the file has {self._size}; it may be truncated"
                )
            if offset < last_end:
                raise self._fault(f"overlaps tensor {shown(last_name)}")
            last_name, last_end = name, offset + size
            span = Span(self._map, data_start + offset, size)
            tensors[name] = Weight(name, shape, format, span.data(), span)
        return tensors

    def _string(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise self._fault(f"a string of {length} bytes; at most {most} are accepted")
        raw = self._take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._fault("a string is not valid UTF-8") from None

    def _number(self, code: str) -> int:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _check_count(self, what: str, count: int, most: int, least_bytes: int) -> None:
        left = self._size - self._at
        if count > most:
            raise self._fault(f"{what} {count} is more than the {most} accepted")
        if count * least_bytes > left:
            raise self._fault(f"{what} {count} cannot fit in the {left} bytes left; the file may be truncated")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise self._fault(f"needs {count} bytes where the file has {self._size - self._at} left; it is truncated")
        start, self._at = self._at, self._at + count
        return self._map[start : self._at]

    def _fault(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: {self._where}: {problem}")
