"""`headway inspect`: a model at work on one prompt, with everything in sight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

if TYPE_CHECKING:
    from headway.engine.inspection import Inspection
    from headway.report.document import Document, Part
    from headway.text.tokenizer import Tokenizer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
SHOWN = 4  # numbers of an embedding row, in text


@app.command()
@options.with_engine("model")
def inspect(
    ctx: typer.Context,
    engine: EngineOptions,
    prompt: Annotated[str, typer.Option(help="The text.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate after it.", min=0)] = 4,
    position: Annotated[
        int | None, typer.Option(help="Whose attention to show; -1 = the prompt's last token, which is the default.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Show the heads of this layer; default: the last one.")] = None,
    top: Annotated[int, typer.Option(help="Likeliest tokens to show of each distribution.", min=1, max=64)] = 8,
    temperature: options.Temperature = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 = off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that have this much; 1 = off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop what is so much less likely than the likeliest.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that opens offline.")] = None,
) -> None:
    """Tokens with ids and bytes, embedding rows, attention by layer and head, the cache after each step, and the next
    token's distribution through every stage of sampling. Computed by the readable backend, numpy in float32."""
    import sys

    import msgspec

    from headway.cli.command import command_line
    from headway.cli.terminal import fetching
    from headway.core.errors import BadInput
    from headway.engine.engine import default_params
    from headway.engine.inspection import inspect as look
    from headway.model.load import open_model
    from headway.model.source import DEFAULT_MODEL, merges_folder
    from headway.report.document import show, write_page
    from headway.report.files import check_writable
    from headway.text.tokenizer import Tokenizer

    check_writable(html, "--html")
    given = options.sampling(
        max_tokens=max_tokens or None, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    with fetching() as progress:
        opened = open_model(engine.model or DEFAULT_MODEL, progress)
    layers = opened.info.config.layers
    if layer is not None and not 0 <= layer < layers:
        raise BadInput("--layer", f"{layer} is none of the {layers}, which are counted from 0")
    tokenizer = Tokenizer(opened.info.tokenizer, cache=merges_folder())
    params = default_params(engine, opened.info).but(given)
    params = msgspec.structs.replace(params, max_tokens=max_tokens or None)
    seen = look(opened, tokenizer.encode(prompt), params, tokenizer.eos_ids, position, top)
    if json:
        sys.stdout.write(msgspec.json.encode(everything(seen, tokenizer)).decode() + "\n")
    document = document_of(seen, tokenizer, opened.info.name, layer)
    if html is not None:
        write_page(document, html, command_line(ctx))
    if not json:
        show(document)


def everything(seen: Inspection, tokenizer: Tokenizer) -> dict[str, object]:
    """All that was seen, as JSON has it."""
    return {
        "prompt_len": seen.prompt_len,
        "tokens": [
            {"position": at, "id": id, "text": _text(tokenizer, id), "bytes": list(_bytes(tokenizer, id))}
            for at, id in enumerate(seen.tokens)
        ],
        "embedding": [row.tolist() for row in seen.embedding],
        "attention": {
            "position": seen.watched,
            "layers": {str(layer): weights.tolist() for layer, weights in sorted(seen.attention.items())},
        },
        "cache": [
            {"computed": one.computed, "cached": one.cached, "blocks": one.blocks, "bytes": one.bytes}
            for one in seen.growth
        ],
        "distributions": [
            {
                "position": at + 1,
                "drawn": drawn,
                "stages": [
                    {"name": one.name, "active": one.active, "survivors": one.survivors, "top": one.top}
                    for one in stages
                ],
            }
            for at, (stages, drawn) in enumerate(zip(seen.stages, seen.drawn, strict=True))
        ],
    }


def document_of(seen: Inspection, tokenizer: Tokenizer, model: str, layer: int | None) -> Document:
    """The same, to be read: in a terminal what was generated, on a page every position."""
    from headway.report.document import Document, Grid, Heat

    names = [_text(tokenizer, id) for id in seen.tokens]
    width = max(row.size for row in seen.embedding)
    tokens = Grid(
        ("position", "id", "token", "bytes", f"embedding row, {SHOWN} of {width}"),
        [
            (str(at), str(id), repr(names[at]), _bytes(tokenizer, id).hex(" "),
             " ".join(f"{number:+.3f}" for number in seen.embedding[at][:SHOWN]) if at < len(seen.embedding) else "")
            for at, id in enumerate(seen.tokens)
        ],
        "Tokens", left=("token", "bytes"),
    )  # fmt: skip
    columns = [repr(name)[1:-1] for name in names[: seen.watched + 1]]
    chosen = max(seen.attention) if layer is None else layer
    means = [(f"layer {number}", weights.mean(axis=0)) for number, weights in sorted(seen.attention.items())]
    heads = [(f"head {number}", weights) for number, weights in enumerate(seen.attention[chosen])]
    whose = f"position {seen.watched}, {names[seen.watched]!r}"
    growth = Grid(
        ("step", "computed", "cached", "blocks", "kB"),
        [
            (str(step), str(one.computed), str(one.cached), str(one.blocks), f"{one.bytes / 1e3:.1f}")
            for step, one in enumerate(seen.growth)
        ],
        "The cache after each step",
    )
    parts: list[Part] = [
        tokens,
        Heat(f"What {whose} attends to, mean of the heads", columns, [(name, row.tolist()) for name, row in means]),
        Heat(f"Its heads in layer {chosen}", columns, [(name, row.tolist()) for name, row in heads]),
        growth,
        *[_distribution(seen, at, tokenizer) for at in range(seen.prompt_len - 1, len(seen.stages))],
    ]
    before = [_distribution(seen, at, tokenizer) for at in range(seen.prompt_len - 1)]
    return Document(f"{model} at work on {seen.prompt_len} tokens", parts, before)


def _distribution(seen: Inspection, at: int, tokenizer: Tokenizer) -> Part:
    """The next token's distribution: a row per likely token, a column per stage that does something."""
    from headway.report.document import Grid

    stages = [stage for stage in seen.stages[at] if stage.active]
    ids = list(dict.fromkeys(id for stage in stages for id, _ in stage.top))[: len(stages[0].top)]
    after = _text(tokenizer, seen.tokens[at])
    rows = []
    for id in ids:
        shares = [dict(stage.top).get(id) for stage in stages]
        mark = "drawn" if id == seen.drawn[at] else ""
        rows.append((repr(_text(tokenizer, id)), *("" if one is None else f"{one:.2%}" for one in shares), mark))
    left = tuple(f"{stage.survivors} left" for stage in stages)
    return Grid(
        ("token", *(stage.name.replace("_", "-") for stage in stages), "taken"),
        [*rows, ("", *left, "")],
        f"What follows position {at}, {after!r}",
    )


def _bytes(tokenizer: Tokenizer, id: int) -> bytes:
    return tokenizer.token_bytes(id, skip_special=False)


def _text(tokenizer: Tokenizer, id: int) -> str:
    return _bytes(tokenizer, id).decode(errors="replace")
