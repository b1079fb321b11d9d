"""Files in TOML that somebody gave us: read as far as such a file goes, whatever it says of its size."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from headway.core.errors import BadInput

MOST_BYTES = 1 << 20


def read_toml(path: Path, field: str) -> dict[str, Any]:
    """
    Args:
        field: the option that names the file.

    Raises:
        BadInput: it cannot be read, or is no TOML.
    """
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise BadInput(field, f"{path} is larger than {MOST_BYTES} bytes")
        return tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise BadInput(field, f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits and arrays as deep, too
        raise BadInput(field, f"{path} is no TOML, cannot read it: {error}") from None
