"""What answers are to look like, as OpenAI's `response_format` and vLLM's `structured_outputs` and `guided_*` say."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.core.errors import BadInput, shown
from headway.core.grammar import Grammar

NEUTRAL = (None, {"type": "text"})
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


class Structured(msgspec.Struct, kw_only=True):
    """The fields of a body that bind its answer; at most one may be given."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def grammar(self) -> tuple[Grammar | None, str]:
        """What it asks for, and the name of the field that does.

        Raises:
            BadInput: a field is not what it should be, or two ask for something.
        """
        asked: dict[str, Grammar] = {}
        if self.response_format not in NEUTRAL:
            asked["response_format"] = response_format(self.response_format)
        if self.structured_outputs is not None:
            asked["structured_outputs"] = _structured_outputs(self.structured_outputs)
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                asked[f"guided_{kind}"] = _of_kind(kind, value, f"guided_{kind}")
        if len(asked) > 1:
            raise BadInput(list(asked)[1], f"not together with {next(iter(asked))}; give one of them")
        return next(((grammar, field) for field, grammar in asked.items()), (None, ""))


def response_format(value: Any) -> Grammar:
    """OpenAI's: {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name", "schema", "strict"}}. The
    schema is followed whether it is strict or not."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return _of_kind("json", value["schema"], "response_format") if "schema" in value else Grammar.json_object()
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, dict) or "schema" not in wrapped:
            raise BadInput("response_format", "its json_schema must be an object with the schema in its field schema")
        return _of_kind("json", wrapped["schema"], "response_format")
    raise BadInput("response_format", f"its type {shown(kind)} is not one of text, json_object, json_schema")


def flat_format(value: Any, field: str) -> Grammar | None:
    """As newer APIs say it: {"type": "json_schema", "schema": ...}, or json_object, or text (None).

    Args:
        field: what the API calls it.
    """
    if value in NEUTRAL:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return Grammar.json_object()
    if kind != "json_schema":
        raise BadInput(field, f"its type {shown(kind)} is not one of text, json_object, json_schema")
    if "schema" not in value:
        raise BadInput(field, "it must have the schema in its field schema")
    return _of_kind("json", value["schema"], field)


def named_or_schema(value: Any, field: str) -> Grammar | None:
    """As Ollama says it: "json" for any object, or a schema; "" is none."""
    if value in (None, ""):
        return None
    if value == "json":
        return Grammar.json_object()
    if not isinstance(value, dict):
        raise BadInput(field, f'{shown(value)} is neither "json" nor a JSON schema')
    return _of_kind("json", value, field)


def _structured_outputs(value: dict[str, Any]) -> Grammar:
    given = {kind: what for kind, what in value.items() if what not in (None, False)}
    unknown = given.keys() - set(_KINDS)
    if unknown:
        raise BadInput("structured_outputs", f"{shown(min(unknown))} is not one of {', '.join(_KINDS)}")
    if len(given) != 1:
        raise BadInput("structured_outputs", f"give one of {', '.join(_KINDS)}")
    ((kind, what),) = given.items()
    return _of_kind(kind, what, "structured_outputs")


def _of_kind(kind: str, value: Any, field: str) -> Grammar:
    accepted = {"json": (dict, str, bool), "choice": (list,), "json_object": (bool,)}.get(kind, (str,))
    if not isinstance(value, accepted):
        names = {dict: "a JSON schema", str: "a text", bool: "true", list: "a list of texts"}
        raise BadInput(field, f"{shown(value)} is not {' or '.join(names[one] for one in accepted)}")
    make: dict[str, Any] = {
        "json": Grammar.json_schema,
        "json_object": lambda _: Grammar.json_object(),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.ebnf,
    }
    try:
        return make[kind](value)
    except BadInput as error:
        raise BadInput(field, str(error).partition(": ")[2]) from None
