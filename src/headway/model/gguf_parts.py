"""A GGUF model that is one file, or several: `NAME-00001-of-00003.gguf`, as llama-gguf-split cuts them.

The first part has the metadata, each its own tensors; any of them, or the folder they are in, stands for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headway.core.errors import ModelFileError, shown
from headway.model.gguf import GGUFFile, read_gguf, read_gguf_header
from headway.model.reading import interrupted

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.ASCII)

Tensor = TypeVar("Tensor")


def gguf_in(folder: Path) -> Path | None:
    """The one model in a folder of .gguf files: a file, or the first of its parts; image encoders are no models.

    Raises:
        ModelFileError: there are several models.
    """
    files = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith("mmproj")]
    models = {model_name(path): path for path in reversed(files)}
    if len(models) > 1:
        names = ", ".join(sorted(path.name for path in models.values())[:3])
        raise ModelFileError(f"{folder} has several models: {names}; name one")
    return next(iter(models.values()), None)


def model_name(path: Path) -> str:
    """What a file is called, without the number of its part."""
    part = _PART.fullmatch(path.stem)
    return part["name"] if part else path.stem


def parts_named(path: Path) -> list[Path]:
    """All parts of the model, by the name of one; itself if its name is not that of a part."""
    part = _PART.fullmatch(path.stem)
    if part is None:
        return [path]
    name, count = part["name"], part["count"]
    return [path.with_name(f"{name}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def read_model(path: Path) -> GGUFFile:
    """Read the headers of all parts of the model that a file belongs to, and map the tensors.

    Raises:
        ModelFileError: as `read_gguf`; a part is missing, given twice, or of another model.
    """

    def read(part: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        file = read_gguf(part)
        return file.metadata, file.tensors

    return GGUFFile(path, *_joined(path, read))


def read_model_header(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], str]]]:
    """The same of `read_gguf_header`."""
    return _joined(path, read_gguf_header)


def _joined(
    path: Path, read: Callable[[Path], tuple[Mapping[str, Any], Mapping[str, Tensor]]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata of the first part, tensors of all."""
    metadata, tensors = read(path)
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return dict(metadata), dict(tensors)
    if not isinstance(count, int):
        raise ModelFileError(f"{path}: split.count: {shown(count)} is not a number of parts")
    named = _PART.fullmatch(path.stem)
    if named is None or int(named["count"]) != count:
        raise ModelFileError(f"{path} is a part of {count}; parts must be called NAME-00001-of-{count:05}.gguf")
    parts = parts_named(path)
    if missing := [part.name + interrupted(part) for part in parts if not part.is_file()]:
        raise ModelFileError(f"{path} is a part of {count}; missing beside it: {', '.join(missing[:3])}")
    whole: dict[str, Tensor] = {}
    first: Mapping[str, Any] = {}
    for number, part in enumerate(parts):
        keys, own = (metadata, tensors) if part == path else read(part)
        if (keys.get("split.count"), keys.get("split.no")) != (count, number) or whole.keys() & own.keys():
            raise ModelFileError(f"{part} is not part {number + 1} of the same {count}")
        whole |= own
        first = first or keys
    if len(whole) != first.get("split.tensors.count", len(whole)):
        raise ModelFileError(f"{path}: its parts hold {len(whole)} tensors, not as many as the first says")
    return dict(first), whole
