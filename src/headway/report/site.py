"""Pages that a server of ours hands out: files of the package, read once, under a policy that lets a browser load
nothing from elsewhere, run no script but these files, and turn no text into markup."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

KIT = Path(__file__).parent / "kit"  # what all pages share: look, helpers, the two libraries (their licences inside)
POLICY = "; ".join([
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data: blob:", "connect-src 'self'",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    "trusted-types 'none'",
])  # fmt: skip
KINDS = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asks again, and is told that nothing has changed
}


@dataclass(frozen=True)
class _File:
    body: bytes
    kind: str
    tag: str


class Site:
    """The files of some folders under one path, those of the first folder before others of the same name."""

    def __init__(self, *folders: Path) -> None:
        found = {
            path.name: path
            for folder in reversed(folders)
            for path in sorted(folder.iterdir())
            if path.suffix in KINDS
        }  # fmt: skip
        self._files: Mapping[str, _File] = {name: _read(path) for name, path in found.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def response(self, request: Request, name: str) -> Response:
        """A file; KeyError if there is none of that name."""
        file = self._files[name]
        headers = {**HEADERS, "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.kind)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, KINDS[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
