"""Every refusal and failure a user can meet, each with one clear sentence and an HTTP status.

Raise the most exact class. The message names the field (or file), the value, and what is accepted; it never
holds a traceback. The command line prints it and exits with `exit_code`; the server answers with `status`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

MAX_SHOWN = 80  # characters of a value quoted in an error


def shown(value: object) -> str:
    """A value from a file, quoted for an error message: printable and short."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 4] + "...'"


class HeadwayError(Exception):
    """Base of every error meant for a user. `str(error)` is the whole sentence."""

    status = 500
    exit_code = 1


class BadInput(HeadwayError):
    """A field of a request or of a command is out of range.

    Attributes:
        field: the name as the user wrote it (`temperature`, `--kv-cache-gib`).
    """

    status = 400
    exit_code = 2

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def unknown_name(name: str, known: Iterable[str], whole: str) -> BadInput:
    """The refusal of a keyword that `whole` does not have, with the nearest that it has."""
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return BadInput(name, f"is not {whole}; {hint}")


class ModelFileError(HeadwayError):
    """A model file is truncated, hostile, or not what it says. Names file, tensor and fault."""

    status = 500
    exit_code = 2

    @classmethod
    def of(cls, place: str, problem: str) -> ModelFileError:
        return cls(f"{place}: {problem}")


class EngineDead(HeadwayError):
    """The engine loop ended; no request can be answered any more."""

    status = 503


class Reject(Enum):
    """Why the scheduler refused a request. Value = (code, HTTP status)."""

    EMPTY_PROMPT = ("empty_prompt", 400)
    CONTEXT_LENGTH = ("context_length_exceeded", 400)
    CACHE_TOO_SMALL = ("kv_cache_too_small", 400)
    DUPLICATE_ID = ("duplicate_id", 400)
    TTFT_UNREACHABLE = ("ttft_unreachable", 400)
    QUEUE_FULL = ("queue_full", 503)

    @property
    def code(self) -> str:
        return self.value[0]

    @property
    def status(self) -> int:
        return self.value[1]


class Rejected(HeadwayError):
    """The scheduler refused a request at once, because it could never be served (or not now: QUEUE_FULL).

    Attributes:
        retry_after: seconds after which it may be served; None = never, or unknown.
    """

    exit_code = 2

    def __init__(self, reason: Reject, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = reason.status
        self.retry_after = retry_after


def refusal(code: str, message: str) -> HeadwayError:
    """The error behind a (code, message) that crossed a process border: a `Rejected` by its reason's code, else a
    `BadInput`, whose message starts with its field."""
    for reason in Reject:
        if reason.code == code:
            return Rejected(reason, message)
    field, _, problem = message.partition(": ")
    return BadInput(field, problem)
