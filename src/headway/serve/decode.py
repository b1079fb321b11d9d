"""Bodies to structs, and what becomes of fields that this server does not know.

Clients gain fields every month that mean nothing to most servers. So one that is not known is left out, and named in a
header of the answer, unless the server is strict; `null` means "not given", whether a field is known or not. A field
that is known, and would change the answer, is never left out: the dialects refuse it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headway.serve.errors import ApiError, from_msgspec
from headway.serve.limits import check_json

IGNORED_HEADER = b"x-headway-ignored"
MOST_NESTED = 16  # unknown fields within others: each costs another look at the body
MOST_NAMED = 16
_UNKNOWN = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")


def decoded(raw: bytes, decoder: msgspec.json.Decoder[Any], strict: bool = False) -> tuple[Any, list[str]]:
    """A body, and the fields that were left out.

    Raises:
        ApiError: the body is at fault.
    """
    check_json(raw)
    try:
        try:
            return decoder.decode(raw), []
        except msgspec.ValidationError as error:
            if _UNKNOWN.search(str(error)) is None:
                raise
            return _known(msgspec.json.decode(raw), decoder, strict)
    except msgspec.DecodeError as error:
        raise from_msgspec(error) from None
    except RecursionError:
        raise ApiError(400, "the body nests too deep", code="too_deep") from None


def _known(body: Any, decoder: msgspec.json.Decoder[Any], strict: bool) -> tuple[Any, list[str]]:
    left_out = []
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
        if not strict:
            left_out = sorted(body.keys() - set(decoder.type.__struct_encode_fields__))
            body = {name: value for name, value in body.items() if name not in left_out}
    for _ in range(MOST_NESTED):
        try:
            return decoder.decode(msgspec.json.encode(body)), left_out
        except msgspec.ValidationError as error:
            found = _UNKNOWN.search(str(error))
            if strict or found is None or not _drop(body, found.group(1), found.group(2) or ""):
                raise
            left_out.append(f"{found.group(2)}.{found.group(1)}")
    return decoder.decode(msgspec.json.encode(body)), left_out


def _drop(body: Any, name: str, path: str) -> bool:
    """Take field `name` out of the object at `path`, in which `[...]` stands for a place that is not told."""
    for key, index in _STEP.findall(path):
        try:
            body = body[int(index)] if index else body[key]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(body, dict) and body.pop(name, body) is not body


def ignored_header(names: list[str]) -> list[tuple[bytes, bytes]]:
    """The header that names the fields that were left out."""
    if not names:
        return []
    named = [name if _NAME.fullmatch(name) else "(a name that no header may have)" for name in names[:MOST_NAMED]]
    more = [f"(and {len(names) - MOST_NAMED} more)"] if len(names) > MOST_NAMED else []
    return [(IGNORED_HEADER, ", ".join([*named, *more]).encode())]
