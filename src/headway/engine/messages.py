"""What goes into the engine loop and what comes out, in process or across a process border. No arrays, no objects."""

from __future__ import annotations

import msgspec

from headway.core.receipts import Receipt
from headway.core.request import Finish, SamplingParams
from headway.core.step import TokenLogprobs

TRANSFER_HEADER = "x-headway-kv"


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Generate from `tokens`.

    Attributes:
        id: chosen by the caller, unique among live requests, without "#".
        arrival: when it was meant to arrive, ps of the loop's clock; None = when the loop first sees it.
        deadline: seconds after arrival at which it is aborted, above 0; None = never.
        adapter: the name of a LoRA adapter that is loaded; "" = none.
        namespace: of the cache, which requests of others do not share; None = the tenant.
        transfer: what a router says of the prompt's way between pools, as it signs it; "" = it has none.
        remote: another engine sends blocks of the prompt; found in `transfer`.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    arrival: int | None = None
    deadline: float | None = None
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    namespace: str | None = None
    transfer: str = ""
    remote: bool = False


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The caller no longer wants request `id`, all its choices. Idempotent."""

    id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Make a LoRA adapter known under a name; `replace`: instead of the one that has it, if one does."""

    id: str
    name: str
    path: str
    replace: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget a LoRA adapter; requests that have it go on with it to their end."""

    id: str
    name: str


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Say what the prefix cache has of a prompt now."""

    id: str
    tokens: tuple[int, ...]
    namespace: str = ""
    adapter: str = ""


class Look(msgspec.Struct, frozen=True, tag=True):
    """Say what the engine holds now."""

    id: str


Command = Submit | Cancel | LoadAdapter | UnloadAdapter | Explain | Look


class Delta(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """What one choice gained in one step.

    Attributes:
        id, choice: the request, and which of its n choices.
        at: clock time, ps.
        tokens: ids emitted.
        text: text that became certain (stop strings are held back, incomplete characters too).
        logprobs: one entry per token, if asked for.
        prompt_logprobs: entries for prompt tokens passed in this step, if asked for.
        pooled: with `finish`, of a prompt that is pooled: float32 numbers, little-endian.
        cached: prompt tokens that came from the prefix cache.
        finish: set on the last delta of the choice.
        receipt: with `finish`, what the choice took of the machine.
    """

    id: str
    choice: int
    at: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    cached: int = 0
    finish: Finish | None = None
    receipt: Receipt | None = None


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The request was not accepted; nothing more follows.

    Attributes:
        code, status: as in `core.errors.Reject`, or "invalid_value" and 400; see `core.errors.refusal`.
        retry_after: seconds after which it may be accepted; None = never, or unknown.
    """

    id: str
    message: str
    code: str
    status: int
    retry_after: float | None = None
