"""Reader of safetensors files, single or sharded: tensors as views of the mapped files.

Layout (github.com/huggingface/safetensors): header length u64 little-endian | header JSON | data. The header maps each
tensor to {"dtype", "shape", "data_offsets": [begin, end)}; tensors fill the data without holes or overlaps. The file
is not trusted: sizes are held against the real file before anything is allocated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headway.core.errors import ModelFileError, shown
from headway.model.reading import MappedFile, Span, interrupted, parse_json_object, read_json
from headway.ops.weight import Weight
from headway.shape.formats import BY_DTYPE, stored_bytes

MAX_HEADER = 16 << 20  # bytes; room for 100 000 tensors. Parsed JSON takes many times its text
MAX_DIMENSIONS = 8

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_safetensors(path: Path) -> dict[str, Weight]:
    """Map one file -> tensors by name.

    Raises:
        ModelFileError: truncated, hostile, or of an unsupported dtype; names the tensor and the fault.
    """
    data = MappedFile(path)
    if len(data) < 8:
        raise ModelFileError(f"{path}: {len(data)} bytes are too few for a safetensors file; it is truncated")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        raise ModelFileError(f"{path}: a header of {length} bytes; at most {MAX_HEADER} are accepted")
    start = 8 + length
    if start > len(data):
        raise ModelFileError(f"{path}: the header ends at byte {start} but the file has {len(data)}; it is truncated")
    header = parse_json_object(data[8:start], f"{path}: the header")
    header.pop("__metadata__", None)

    spans = sorted(((*_span(path, name, entry), name) for name, entry in header.items()), key=lambda span: span[:2])
    tensors: dict[str, Weight] = {}
    filled = 0
    for begin, end, format, shape, name in spans:
        where = f"{path}: tensor {shown(name)}"
        if begin != filled:
            fault = "overlaps the tensor before it" if begin < filled else "leaves a hole before it"
            raise ModelFileError(f"{where}: begins at byte {begin} of the data, which {fault} (expected {filled})")
        if end > len(data) - start:
            raise ModelFileError(
                f"{where}: ends at byte {end} of the data, which has {len(data) - start}; the file may be truncated"
            )
        filled = end
        span = Span(data, start + begin, end - begin)
        tensors[name] = Weight(name, shape, format, span.data(), span)
    if filled != len(data) - start:
        raise ModelFileError(f"{path}: {len(data) - start - filled} bytes after the last tensor belong to none")
    return tensors


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """A header entry, checked on its own -> (begin, end, format, shape)."""
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{where}: its entry must hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BY_DTYPE:
        raise ModelFileError(f"{where}: dtype {shown(dtype)} is not supported; {', '.join(BY_DTYPE)} are")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS or 0 in shape:
        raise ModelFileError(f"{where}: shape {shown(shape)} is not a list of at most {MAX_DIMENSIONS} sizes above 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(f"{where}: data_offsets {shown(offsets)} are not [begin, end] with begin <= end")
    begin, end = offsets
    size = stored_bytes(BY_DTYPE[dtype].name, shape)
    if end - begin != size:
        raise ModelFileError(
            f"{where}: {dtype} of shape {shown(shape)} takes {size} bytes, its offsets span {end - begin}"
        )
    return begin, end, BY_DTYPE[dtype].name, tuple(shape)


def _naturals(value: Any) -> bool:
    """A list of integers from 0 to 2^63 - 1."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def holds_safetensors(folder: Path) -> bool:
    """Whether it is meant to be a Hugging Face folder with weights."""
    return os.path.lexists(folder / INDEX) or os.path.lexists(folder / SINGLE)


def read_folder(folder: Path) -> dict[str, Weight]:
    """All tensors of a Hugging Face folder: of the shards that its index names, and of no other file; without an index,
    of model.safetensors.

    Raises:
        ModelFileError: no safetensors there, a broken file, or an index that does not match its shards.
    """
    if not os.path.lexists(folder / INDEX):
        if not os.path.lexists(folder / SINGLE):
            raise ModelFileError(f"{folder}: holds neither {SINGLE} nor {INDEX}; other formats are not supported")
        return read_safetensors(folder / SINGLE)
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelFileError(f"{folder / INDEX}: weight_map must map tensor names to file names")
    tensors: dict[str, Weight] = {}
    files = sorted(set(weight_map.values()))
    for file in files:
        if "/" in file or "\\" in file or "\0" in file or file in ("", ".", ".."):
            raise ModelFileError(f"{folder / INDEX}: weight_map names {shown(file)}, which is not a file of the folder")
        if not os.path.lexists(folder / file):
            raise ModelFileError(
                f"{folder / INDEX}: weight_map names {shown(file)}, which is missing{interrupted(folder / file)}"
            )
    for file in files:
        for name, weight in read_safetensors(folder / file).items():
            if weight_map.get(name) != file:
                raise ModelFileError(f"{folder / file}: tensor {shown(name)}: the index does not place it in this file")
            tensors[name] = weight
    for name in weight_map.keys() - tensors.keys():
        raise ModelFileError(
            f"{folder / weight_map[name]}: tensor {shown(name)}: the index names it, the file lacks it"
        )
    return tensors
