"""The OpenAPI document, made from the structs that decode the bodies: it says what the code does."""

from __future__ import annotations

from typing import Any

import msgspec

import headway
from headway.serve.dialects import DIALECTS

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_BUSY = {
    "description": "Loading, full, or shutting down.",
    "headers": {"Retry-After": {"required": True, "schema": {"type": "string"}}},
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def document() -> bytes:
    """The document as JSON."""
    endpoints = [endpoint for dialect in DIALECTS for endpoint in dialect.endpoints]
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        if endpoint.body is None:
            paths[path] = _get(endpoint.summary, parameter=path.partition("{")[2].rstrip("}"))
        else:
            paths[path] = _post(endpoint.summary, schema_of[endpoint.body], endpoint.stream_type)
    paths |= {
        "/": _get(
            "The chat page for browsers; else says that the server runs. Needs no key.",
            kind="text/plain",
            open_to_all=True,
        ),
        "/health": _get("Liveness: the engine steps on. Needs no key.", open_to_all=True),
        "/ready": _get("Readiness: requests are accepted. Needs no key.", open_to_all=True),
        "/metrics": _get("Prometheus metrics.", kind="text/plain"),
        "/v1/live": _get("What an engine holds now; as server-sent events, from now on."),
        "/version": _get("Version of the server."),
    }
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Headway", "version": headway.__version__},
            "paths": paths,
            "components": {"schemas": {**components, "Error": _ERROR}, "securitySchemes": security},
            "security": [{"key": []}, {}],
        }
    )


def _error(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


def _responses(kinds: dict[str, Any], errors: dict[str, str]) -> dict[str, Any]:
    failures = {status: _error(text) for status, text in errors.items()}
    return {"200": {"description": "The answer.", "content": kinds}, **failures, "503": _BUSY}


def _post(summary: str, schema: dict[str, Any], stream_type: str) -> dict[str, Any]:
    kinds: dict[str, Any] = {"application/json": {}}
    if stream_type:
        kinds[stream_type] = {"schema": {"type": "string"}}
    errors = {
        "400": "A field is wrong, unknown, or not supported.",
        "401": "No key, or a wrong one.",
        "403": "A foreign host or page.",
        "404": "No such model.",
        "408": "The body came too slowly.",
        "413": "The body is too large.",
        "415": "The body is not JSON.",
        "429": "The key has used up a limit.",
        "431": "The headers are too large.",
        "500": "A fault of the server.",
    }
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": _responses(kinds, errors)}}


def _get(
    summary: str, parameter: str = "", kind: str = "application/json", open_to_all: bool = False
) -> dict[str, Any]:
    errors = {"401": "No key, or a wrong one.", "403": "A foreign host or page.", "404": "No such thing."}
    get: dict[str, Any] = {"summary": summary, "responses": _responses({kind: {}}, errors)}
    if parameter:
        get["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    if open_to_all:
        get["security"] = []
    return {"get": get}
