"""Errors as answers, whatever their dialect: a status, a bounded and sanitised sentence, and the field to blame.

A client's mistake is never a 5xx: SDKs resend those. A 503 always carries Retry-After.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.responses import Response

from headway.core.errors import BadInput, EngineDead, HeadwayError, Rejected

MAX_MESSAGE = 1000  # characters
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_PATH = re.compile(r"(?<![\w.:/#])/(?!v1/)[\w.+-]+(?:/[\w.+-]+)+")
_AT = re.compile(r" - at `\$\.?([^`]*)`")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_NAME = re.compile(r"^\w+")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class ApiError(HeadwayError):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        param: the field to blame, as the client wrote it; None if there is none.
        code: a short machine-readable word (`context_length_exceeded`); None if there is none.
        retry_after: seconds until trying again makes sense; always set with 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = 1 if status == 503 and retry_after is None else retry_after
        self.headers = headers or {}

    def response(self, body: object) -> Response:
        """The answer; `body` is the error as a dialect spells it."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return Response(msgspec.json.encode(body), self.status, headers, "application/json")


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text` without control characters, memory addresses and file paths, and no longer than `limit` characters."""
    text = _CONTROL.sub(" ", text[: 4 * limit])
    text = _PATH.sub("(path)", _ADDRESS.sub("(address)", text))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def from_headway(error: HeadwayError, names: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """The API's form of an error of the layers below. `names`: what its clients call their fields."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInput):
        field = _NAME.sub(lambda found: names.get(found[0], found[0]), error.field, count=1)
        return ApiError(400, field + str(error).removeprefix(error.field), param=field, code="invalid_value")
    if isinstance(error, Rejected):
        return ApiError(error.status, str(error), code=error.reason.code)
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has stopped", code="engine_dead", retry_after=10)
    return ApiError(error.status if error.status < 500 else 500, str(error))


def from_msgspec(error: msgspec.DecodeError) -> ApiError:
    """A body that is not JSON, or whose fields have the wrong names or types. Never repeats the body."""
    text = str(error)
    at = _AT.search(text)
    where = at.group(1) if at else ""
    text = text.replace(at.group(0), "") if at else text
    for pattern, code, problem in (
        (_UNKNOWN, "unknown_field", "this server does not know the field; leave it out"),
        (_MISSING, "missing_field", "the field is required"),
    ):
        name = pattern.search(text)
        if name:
            param = f"{where}.{name.group(1)}" if where else name.group(1)
            return ApiError(400, f"{clean(param, 200)}: {problem}", param=param, code=code)
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {text}", code="invalid_json")
    return ApiError(400, f"{where}: {text}" if where else f"the body: {text}", param=where or None, code="invalid_type")
