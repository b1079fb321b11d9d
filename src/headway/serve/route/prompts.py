"""What of a request's body decides where it goes: its text in blocks, how long that is, and whose session it is.

No tokenizer is needed: a conversation that goes on begins with the same bytes of JSON. Blocks of `BLOCK_BYTES` bytes
stand for about `BLOCK_TOKENS` tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.cache.hashing import BlockHasher
from headway.routing.request import RoutedRequest

BLOCK_BYTES, BLOCK_TOKENS = 128, 32
BEFORE = ("tools", "system", "instructions")  # what templates put before the conversation
PROMPTS = ("messages", "prompt", "input", "query")
SESSIONS = ("prompt_cache_key", "session_id", "user")
SPLIT = ("/chat/completions", "/completions", "/messages", "/api/chat", "/api/generate")  # in both pools
SESSION_HEADER = b"x-session-id"


class PromptNames:
    """Names blocks of texts under a secret of this process: they are compared with each other only."""

    def __init__(self) -> None:
        self._hasher = BlockHasher(BLOCK_TOKENS, secrets.token_bytes(32))

    def request(
        self, id: str, body: bytes, namespace: str, session: str, deadline: int | None, reads_blocks: bool,
        path: str = "",
    ) -> RoutedRequest:  # fmt: skip
        """What the router is told of a body.

        Args:
            namespace: requests of different ones share no cache.
            session: of a header; "" = look into the body.
            reads_blocks: names are needed.
            path: route of the request.
        """
        fields = _fields(body)
        text = _text(fields)
        names: Sequence[bytes] = ()
        if reads_blocks and text:
            root = self._hasher.root(namespace, str(fields.get("model", "")))
            names = self._hasher.chain_bytes(root, text, BLOCK_BYTES)
        tokens = max(1, len(text) * BLOCK_TOKENS // BLOCK_BYTES)
        named = (fields.get(name) for name in SESSIONS)
        session = session or next((one for one in named if isinstance(one, str)), "")
        splits = path.removeprefix("/v1") in SPLIT and _splits(fields)
        return RoutedRequest(id, tokens, names, BLOCK_TOKENS, session=session, deadline=deadline, splits=splits)


def _splits(fields: Mapping[str, Any]) -> bool:
    """One prompt, of which no position is asked for but the last."""
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
    return not (several or fields.get("echo") or fields.get("prompt_logprobs") is not None)


def _fields(body: bytes) -> Mapping[str, Any]:
    """The body's fields; none where it is no JSON object: what is wrong with it the replica says."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _text(fields: Mapping[str, Any]) -> bytes:
    """What a prompt begins with comes first. A list that goes on begins with the same bytes, but for its last one."""
    parts = [msgspec.json.encode(fields[name]) for name in BEFORE if name in fields]
    parts += [msgspec.json.encode(fields[name])[:-1] for name in PROMPTS if name in fields]
    return b"".join(parts)
