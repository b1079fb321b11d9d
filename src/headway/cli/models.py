"""`headway models`: what can be named, what is here, and what each would do on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def models(
    word: Annotated[str, typer.Argument(help="List only models whose name or source has this in it.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List models on this machine and those that can be downloaded by name: size, format, whether it fits in the memory
    that is free, and tokens per second of one request, predicted from what `headway probe` measured. Nothing is
    downloaded."""
    import msgspec
    from rich.table import Column, Table

    from headway.cli.terminal import note, stdout
    from headway.engine.known_models import known_models
    from headway.roofline.hardware import GIB

    found = [model for model in known_models() if word.lower() in f"{model.name} {model.source}".lower()]
    if not found:
        note(f"no model has {word!r} in its name or source; without it all are listed")
        raise typer.Exit(1)
    if json:
        for model in found:
            print(msgspec.json.encode(model).decode())
        return
    predicted = any(model.tokens_per_second is not None for model in found)
    table = Table("model", Column(overflow="fold"), "format", "GiB", "fits", box=None, pad_edge=False)
    if predicted:
        table.add_column("tokens/s")
    for model in found:
        rate = "" if model.tokens_per_second is None else f"{model.tokens_per_second:.0f}"
        table.add_row(
            model.name,
            "here" if model.here else model.source,
            model.format,
            f"{model.bytes / GIB:.2f}",
            "yes" if model.fits else "no",
            *([f"at most {rate}" if model.label == "bound" else rate] if predicted else []),
        )
    stdout.print(table)
    if not predicted:
        note("`headway probe` measures this machine; then tokens per second are predicted")
