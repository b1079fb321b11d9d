"""Options that several verbs share, defined once; those of the engine are made from `EngineOptions`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headway.engine.options import Option

API_KEY = "HEADWAY_API_KEY"

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0 = greedy; default: the model's own, else 1.")]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="File with the server's API key; default: the environment's HEADWAY_API_KEY.")
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer; default: a random one.")]


def with_engine(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a verb that takes `engine: EngineOptions`: its fields of these names (default: all) become options."""

    from headway.engine.options import EngineOptions, declared

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        chosen = [option for name, option in declared().items() if not names or name in names]
        own = [one for one in inspect.signature(verb, eval_str=True).parameters.values() if one.name != "engine"]

        @functools.wraps(verb)
        def run(**given: Any) -> None:
            engine = EngineOptions.of({option.name: given.pop(option.name) for option in chosen})
            verb(**given, engine=engine)

        made = [*map(_parameter, chosen), *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own)]
        made.sort(key=lambda one: one.name != "model")
        run.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in made}
        return run

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    """As typer reads it. What the option accepts is checked by `EngineOptions`, for all who set one."""
    metavar = "|".join(map(str, option.choices)) or None
    made: Any = typer.Option(help=option.help, metavar=metavar, rich_help_panel="Engine")
    if option.name == "model":
        made = typer.Argument(help=option.help)
    annotation: Any = Annotated[option.annotation, made]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=annotation)


def sampling(**given: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given; None = was not.

    Raises:
        BadInput: a value is out of range, which is said before a model is loaded.
    """
    from headway.core.request import SamplingParams

    stated = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**stated)
    return stated


def api_key(file: Path | None) -> str | None:
    """The key a client sends: the first of `file`, which may be the server's own, else of the environment.

    There is no option that takes the key itself: other users of the machine can read command lines.

    Raises:
        BadInput: the file cannot be read or holds no key, or the key is none that a header may carry.
    """
    from headway.serve.auth import check_key, read_keys

    if file is not None:
        return read_keys(file)[0]
    key = os.environ.get(API_KEY)
    if key:
        check_key(key, API_KEY, API_KEY)
    return key or None
