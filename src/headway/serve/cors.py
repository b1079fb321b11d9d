"""Answers that pages of other sites may read: the origins that `--cors-origin` names, and no others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.serve.auth import Headers, header

_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,1000}")


class Cors:
    """
    Args:
        origins: "https://app.example" and the like; "*" = all. Empty = none.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._origins = {origin.rstrip("/").encode() for origin in origins}

    def allowed(self, headers: Headers) -> bytes | None:
        """The origin of a request that comes from a page which may read the answer; None = another, or no page."""
        origin = header(headers, b"origin")
        return origin if origin is not None and {origin, b"*"} & self._origins else None

    @staticmethod
    def headers(origin: bytes) -> list[tuple[bytes, bytes]]:
        """What such an answer has, an error too."""
        exposed = b"x-request-id, retry-after"
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", exposed),
            (b"vary", b"origin"),
        ]

    @staticmethod
    def preflight(method: str, headers: Headers) -> list[tuple[bytes, bytes]] | None:
        """The answer to a browser that asks first, which it does without a key; None = it does not ask."""
        if method != "OPTIONS" or header(headers, b"access-control-request-method") is None:
            return None
        wanted = header(headers, b"access-control-request-headers") or b""
        names = wanted if _NAMES.fullmatch(wanted) else b"authorization, content-type"
        methods = (b"access-control-allow-methods", b"GET, POST")
        return [methods, (b"access-control-allow-headers", names), (b"access-control-max-age", b"600")]
