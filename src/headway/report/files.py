"""Files a user asked for: what cannot be written is one sentence that names the option, before the work if possible."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import BadInput


def check_writable(path: Path | None, option: str) -> None:
    """Refuse now what `write` would refuse after the work: a folder, or a file in no folder that exists."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise BadInput(option, f"cannot write {path}: its folder does not exist or it is a folder")


def write(path: Path, option: str, text: str) -> None:
    """Write a text.

    Raises:
        BadInput: it cannot be written.
    """
    try:
        path.write_text(text, newline="")
    except OSError as error:
        raise BadInput(option, f"cannot write {path}: {error.strerror}") from None


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path, option: str = "--csv") -> None:
    """Rows as CSV; nested values are written as `key=value` pairs."""
    if not rows:
        raise BadInput(option, "the answer has no rows to write")
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _flat(value) for key, value in row.items()})
    write(path, option, out.getvalue())


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}={inner}" for key, inner in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else value
