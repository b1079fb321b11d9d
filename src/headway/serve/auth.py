"""Who may ask: API keys, kept and compared as SHA-256 digests in constant time, and the Host rule without keys."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from headway.core.errors import BadInput
from headway.serve.errors import ApiError
from headway.serve.quotas import Quota, read_quota

MAX_KEY = 512  # bytes
HASHED = "sha256:"
CACHE = "cache="
_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")

Headers = Sequence[tuple[bytes, bytes]]


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first header called `name` (lower case); None if there is none."""
    return next((value for key, value in headers if key == name), None)


class Key(NamedTuple):
    """A line of a keys file: what a caller must show, or only its digest, what it may use, and whose cached prefixes it
    shares: those of all keys with the same name there; "" = as the server's other keys do."""

    text: str
    digest: bytes
    quota: Quota
    cache: str = ""


def read_keys(path: Path) -> list[Key]:
    """Keys of a file: one a line, as it is or as `sha256:` and 64 hex digits, then its limits if it has any of its own
    (`requests=60 input_tokens=100000 output_tokens=20000 concurrent=4`) and `cache=NAME`, a cache that it shares
    with the other keys that name it. Empty lines do not count, nor what follows a
    # that begins a line or a word.

    Raises:
        BadInput: the file cannot be read, holds no key, or a line is none.
    """
    try:
        lines = [re.split(r"(?:^|\s)#", line)[0].split() for line in path.read_text().splitlines()]
    except OSError as error:
        raise BadInput("--api-key-file", f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput("--api-key-file", f"{str(path)!r} is no text") from None
    keys = [words for words in lines if words]
    if not keys:
        raise BadInput("--api-key-file", f"{str(path)!r} holds no key; write one key a line")
    return [_key(text, limits, number) for number, (text, *limits) in enumerate(keys, 1)]


def _key(text: str, limits: list[str], number: int) -> Key:
    check_key(text, "--api-key-file", f"key {number}")
    caches = [word.removeprefix(CACHE) for word in limits if word.startswith(CACHE)]
    quota = read_quota([word for word in limits if not word.startswith(CACHE)])
    if len(caches) > 1 or any(not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) for name in caches):
        raise BadInput("--api-key-file", f"key {number}: {CACHE}NAME stands once, a NAME of letters, digits, . _ and -")
    cache = caches[0] if caches else ""
    if not text.startswith(HASHED):
        return Key(text, hashlib.sha256(text.encode()).digest(), quota, cache)
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text[len(HASHED) :]):
        raise BadInput("--api-key-file", f"key {number} begins with {HASHED} and must go on with 64 hex digits")
    return Key("", bytes.fromhex(text[len(HASHED) :]), quota, cache)


def check_key(key: str, field: str, what: str) -> None:
    """Refuse a key that no header may carry, without showing it."""
    if len(key.encode(errors="replace")) > MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(field, f"{what} must be up to {MAX_KEY} printable ASCII characters, no blanks")


class Keys:
    """The accepted keys. Empty = the server is open (only allowed on a loopback address).

    Args:
        share: keys that name no cache share one, and may learn of each other's prompts; else each has its own.

    Attributes:
        quotas: what each may use, by tenant.
    """

    def __init__(self, keys: Iterable[Key] = (), share: bool = False) -> None:
        keys = list(keys)
        quotas: dict[bytes, Quota] = {}
        for number, key in enumerate(keys, 1):
            if key.digest in quotas:
                raise BadInput("--api-key-file", f"key {number} stands in it before")
            quotas[key.digest] = key.quota
        self._digests = list(quotas)
        self.quotas = {_tenant(digest): quota for digest, quota in quotas.items()}
        self._caches = {_tenant(key.digest): CACHE + key.cache for key in keys if key.cache or share}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Headers) -> str:
        """Who asks: the name of the caller's key.

        Raises:
            ApiError: 401, no key or a wrong one.
        """
        if not self._digests:
            return ""
        given = _given_key(headers)
        digest = hashlib.sha256(given[: MAX_KEY + 1]).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them: no early exit
        if not given or not any(matches):
            problem = (
                "the API key is wrong" if given else "give an API key: Authorization: Bearer KEY, or x-api-key: KEY"
            )
            raise ApiError(401, problem, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return _tenant(digest)

    def namespace(self, tenant: str) -> str:
        """The cache namespace of a key: requests of different ones never share cached prefixes."""
        return self._caches.get(tenant, tenant)


def _tenant(digest: bytes) -> str:
    """The name a key goes by in logs, metrics and the cache."""
    return digest.hex()[:16]


def _given_key(headers: Headers) -> bytes:
    bearer = header(headers, b"authorization") or b""
    if bearer[:7].lower() == b"bearer ":
        return bearer[7:].strip()
    return (header(headers, b"x-api-key") or b"").strip()


def is_loopback(host: str) -> bool:
    """Whether a listening address can only be reached from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def check_host(headers: Headers, open_to_all: bool, trusted_origin: bool = False) -> None:
    """Refuse odd Host headers; without keys also foreign names, which a web page could point at this machine.

    Args:
        open_to_all: no key is asked for.
        trusted_origin: the page that asks is one that `--cors-origin` names.

    Raises:
        ApiError: 400 (not a host name) or 403 (not a loopback name, or a page of another site).
    """
    host = header(headers, b"host")
    if host is not None and not _HOST.fullmatch(host):
        raise ApiError(400, "the Host header is not a host name", param="host", code="invalid_host")
    if not open_to_all:
        return
    if host is not None and not is_loopback(_name(host)):
        raise ApiError(
            403, "without API keys the server only answers to localhost; see --api-key-file", code="foreign_host"
        )
    origin = header(headers, b"origin")
    if origin is not None and not trusted_origin and not is_loopback(_name(origin.partition(b"://")[2])):
        raise ApiError(
            403,
            "without API keys the server does not answer pages of other sites; see --cors-origin",
            code="foreign_origin",
        )


def _name(host: bytes) -> str:
    """Host name of `name:port` or `[v6]:port`."""
    text = host.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
