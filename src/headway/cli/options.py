"""Options that several verbs share, defined once; sets of options (`EngineOptions`) become options of a verb."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.core.options import Option, Options, declared

if TYPE_CHECKING:
    from headway.core.grammar import Grammar
    from headway.engine.options import EngineOptions

API_KEY = "HEADWAY_API_KEY"
WIDEST = 16  # characters of choices that stand in a column of their own, so that names and help have room

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0 = greedy; default: the model's own, else 1.")]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="File with the server's API key; default: the environment's HEADWAY_API_KEY.")
]
Adapter = Annotated[
    str | None, typer.Option(help="Name of the --lora that answers; default: the only one that is given, if one is.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Time every step twice, not six times: quicker, and less certain.")
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer; default: a random one.")]

JsonSchema = Annotated[Path | None, typer.Option(help="The answer is JSON that is valid by the schema in this file.")]
Regex = Annotated[str | None, typer.Option(help="The answer matches all of this regular expression.")]
GrammarFile = Annotated[Path | None, typer.Option(help="The answer follows the Lark or GBNF grammar in this file.")]


def grammar(json_schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    """What the answer is to look like; None = as the model likes.

    Raises:
        BadInput: two are given, or a file cannot be read.
    """
    from headway.core.errors import BadInput
    from headway.core.grammar import Grammar

    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    asked = [(name, one) for name, one in given.items() if one is not None]
    if not asked:
        return None
    (option, value), *more = asked
    if more:
        raise BadInput(more[0][0], f"not together with {option}; give one of them")
    try:
        source = value.read_text() if isinstance(value, Path) else value
        if option == "--json-schema":
            json.loads(source)
        return {"--json-schema": Grammar.json_schema, "--regex": Grammar.regex, "--grammar": Grammar.ebnf}[option](
            source
        )
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadInput(option, f"{value} cannot be read: {why}") from None
    except ValueError as error:
        raise BadInput(option, f"{value} is no JSON: {error}") from None
    except BadInput as error:
        raise BadInput(option, str(error).partition(": ")[2]) from None


def with_options(
    parameter: str, kind: type[Options], *names: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a verb that takes `parameter`, a set of options: its fields of these names (default: all) become
    options of the verb."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        chosen = [option for name, option in declared(kind).items() if not names or name in names]
        own = [one for one in inspect.signature(verb, eval_str=True).parameters.values() if one.name != parameter]

        @functools.wraps(verb)
        def run(**given: Any) -> None:
            values = {option.name: given.pop(option.name) for option in chosen}
            texts = {option.name: tuple(values[option.name] or ()) for option in chosen if option.kind is tuple}
            verb(**given, **{parameter: kind.of(values | texts)})

        panel = parameter.capitalize()
        made = [
            *(_parameter(option, panel) for option in chosen),
            *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own),
        ]
        made.sort(key=lambda one: one.name != "model")
        run.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in made}
        return run

    return decorate


def with_engine(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a verb that takes `engine: EngineOptions`: its fields of these names (default: all) become options."""
    from headway.engine.options import EngineOptions

    return with_options("engine", EngineOptions, *names)


def _parameter(option: Option, panel: str) -> inspect.Parameter:
    """As typer reads it. What the option accepts is checked by its set, for all who set one."""
    choices = [str(choice) for choice in option.choices]
    metavar, help = "|".join(choices) or None, option.help
    if metavar and len(metavar) > WIDEST:
        metavar = None
        help += "" if all(choice in help for choice in choices) else f" One of {', '.join(choices)}."
    flags = (option.flag,) if option.kind is bool and not option.default else ()  # nobody need say no to that
    made: Any = typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=option.panel or panel)
    if option.name == "model":
        made = typer.Argument(help=option.help)
    default = None if option.kind is tuple else option.default
    annotation: Any = Annotated[option.annotation, made]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def adapter(engine: EngineOptions, name: str | None) -> str:
    """The LoRA adapter that a verb of one model answers with; "" = none.

    Raises:
        BadInput: there is none of that name, or several and no name.
    """
    from headway.core.errors import BadInput

    loras = engine.loras
    if name is None and len(loras) > 1:
        raise BadInput("--adapter", f"is needed to choose among {', '.join(loras)}")
    if name is not None and name not in loras:
        raise BadInput("--adapter", f"{name!r} is not among those that --lora names: {', '.join(loras) or 'none'}")
    return name or next(iter(loras), "")


def sampling(**given: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given; None = was not.

    Raises:
        BadInput: a value is out of range, which is said before a model is loaded.
    """
    from headway.core.errors import BadInput
    from headway.core.request import SamplingParams

    stated = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**stated)
    except BadInput as error:
        raise BadInput(f"--{error.field.replace('_', '-')}", str(error).removeprefix(f"{error.field}: ")) from None
    return stated


def numbers(text: str, field: str, kind: type) -> list[Any]:
    """Numbers from "1,2,4"."""
    from headway.core.errors import BadInput

    try:
        return [kind(part) for part in text.split(",")] if text else []
    except ValueError:
        accepted = "whole numbers with commas, like 1,2,4,8" if kind is int else "numbers with commas, like 1.8,2.5,3.0"
        raise BadInput(field, f"{text!r}; accepted: {accepted}") from None


def api_key(file: Path | None) -> str | None:
    """The key a client sends: the first of `file`, which may be the server's own, else of the environment.

    There is no option that takes the key itself: other users of the machine can read command lines.

    Raises:
        BadInput: the file cannot be read or holds no key, or the key is none that a header may carry.
    """
    from headway.core.errors import BadInput
    from headway.serve.auth import check_key, read_keys

    if file is not None:
        first = read_keys(file)[0].text
        if not first:
            raise BadInput(
                "--api-key-file", f"the first key of {str(file)!r} is a digest; a client needs the key itself"
            )
        return first
    key = os.environ.get(API_KEY)
    if key:
        check_key(key, API_KEY, API_KEY)
    return key or None
