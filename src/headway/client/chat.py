"""A small blocking client of a running server, for the terminal verbs: standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from headway.client.sse import EventParser, EventTooLong
from headway.core.errors import BadInput, HeadwayError

MAX_ANSWER = 64 << 20  # bytes of an answer that is read whole


class ServerError(HeadwayError):
    """The server cannot be reached, or answered with an error; its own sentence, and its code."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer; `finish_reason` and `usage` come with the last ones."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class Client:
    """Talks to one server.

    Args:
        url: with or without a trailing /v1.
        api_key: sent as a bearer token.
        timeout: seconds without a byte after which it gives up.

    Raises:
        BadInput: the URL is not one.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
            _ = parts.port
        except ValueError as error:
            raise BadInput("--url", f"{url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput("--url", f"{url!r} is not an http(s) URL")
        self._parts: SplitResult = parts
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout

    def models(self) -> list[str]:
        """Names of the models the server has."""
        return [model["id"] for model in self.about_models()]

    def about_models(self) -> list[dict[str, Any]]:
        """What the server tells of its models, each with its `id`."""
        return json.loads(self._get("/v1/models"))["data"]

    def metrics(self) -> str:
        """The Prometheus text."""
        return self._get("/metrics").decode()

    def stream_chat(self, messages: Sequence[dict[str, Any]], **fields: Any) -> Iterator[Piece]:
        """Answer a conversation, piece by piece. Closing the iterator early ends the request.

        Args:
            messages: of OpenAI's shape.
            fields: of the request body (model, temperature, max_tokens, ...).
        """
        body = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **fields}
        connection, response = self._request("POST", "/v1/chat/completions", json.dumps(body).encode())
        try:
            yield from _pieces(response)
        finally:
            connection.close()

    def _get(self, path: str) -> bytes:
        connection, response = self._request("GET", path)
        try:
            return response.read(MAX_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: the answer broke off: {error}") from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc.rpartition("@")[2], timeout=self._timeout)
        headers = {**self._headers, "accept": "*/*"}
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            connection.request(method, self._parts.path + path, body, headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            raise _error(response.status, response.read(1 << 20))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"cannot reach {self.url}: {getattr(error, 'strerror', None) or error}") from None
        except ServerError:
            connection.close()
            raise


def _error(status: int, body: bytes) -> ServerError:
    try:
        error = json.loads(body)["error"]
        return ServerError(f"the server answered {status}: {error['message']}", error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServerError(f"the server answered {status}")


def _pieces(response: http.client.HTTPResponse) -> Iterator[Piece]:
    for data in _events(response):
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(event["error"]["message"])
        for choice in event["choices"]:
            yield Piece(choice["delta"].get("content") or "", choice["finish_reason"])
        if event.get("usage"):
            yield Piece(usage=event["usage"])
    raise ServerError("the stream ended without [DONE]: the server is gone, or the connection was cut")


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    parser = EventParser()
    try:
        while data := response.read1(1 << 16):
            yield from parser.feed(data)
    except (OSError, http.client.HTTPException, EventTooLong) as error:
        raise ServerError(f"the connection broke: {error}") from None
    yield from parser.close()
