"""What a router tells the two engines of a prompt's way, in one header, signed with the secret of the pools.

    x-headway-kv: send TICKET SIGNATURE             compute the prompt, keep its blocks for who brings the ticket
    x-headway-kv: pull TICKET HOST:PORT SIGNATURE   ask for them there

A client that knows no secret can neither read caches nor have a server connect to an address of its choice.
"""

from __future__ import annotations

import hmac
import re
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from headway.core.errors import BadInput
from headway.engine.messages import TRANSFER_HEADER

TICKET_BYTES = 16
LEAST_SECRET, MOST_SECRET = 16, 4096  # bytes
_TICKET = re.compile(r"[0-9a-f]{32}")


class Way(NamedTuple):
    """One half of a prompt's way. `source`: where the decode engine finds the blocks; "" = this engine is to send."""

    ticket: bytes
    source: str = ""


def signed(way: Way, secret: bytes) -> str:
    """As the header has it."""
    text = f"pull {way.ticket.hex()} {way.source}" if way.source else f"send {way.ticket.hex()}"
    return f"{text} {_signature(text, secret)}"


def read(text: str, secret: bytes) -> Way:
    """
    Raises:
        BadInput: it is not one that somebody with the secret has written.
    """
    said, _, signature = text.rpartition(" ")
    words = said.split(" ")
    shaped = (len(words) == 2 and words[0] == "send") or (len(words) == 3 and words[0] == "pull" and words[2])
    if not shaped or not hmac.compare_digest(signature.encode(), _signature(said, secret).encode()):
        raise BadInput(TRANSFER_HEADER, "it is not signed with the secret of this server's pool")
    if not _TICKET.fullmatch(words[1]):
        raise BadInput(TRANSFER_HEADER, "its ticket is not 32 hexadecimal digits")
    return Way(bytes.fromhex(words[1]), words[2] if len(words) == 3 else "")


def _signature(text: str, secret: bytes) -> str:
    return blake2b(text.encode(), key=derived(secret, "ticket"), digest_size=16).hexdigest()


def derived(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose."""
    return blake2b(secret, digest_size=32, person=purpose.encode()).digest()


def read_secret(path: str) -> bytes:
    """The secret in a file that nobody else can read.

    Raises:
        BadInput: there is none.
    """
    file = Path(path).expanduser()
    try:
        if file.stat().st_mode & 0o077:
            raise BadInput("--kv-secret-file", f"{file} can be read by others; chmod 600 it")
        with file.open("rb") as opened:
            secret = opened.read(MOST_SECRET + 1).strip()
    except OSError as error:
        raise BadInput("--kv-secret-file", f"{file}: {error.strerror or error}") from None
    if not LEAST_SECRET <= len(secret) <= MOST_SECRET:
        raise BadInput("--kv-secret-file", f"{file} holds {len(secret)} bytes, not {LEAST_SECRET} to {MOST_SECRET}")
    return secret


def host_port(text: str, flag: str) -> tuple[str, int]:
    """
    Raises:
        BadInput: it is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise BadInput(flag, f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
