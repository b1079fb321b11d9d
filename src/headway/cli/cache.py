"""`headway cache explain`: why one request could not reuse what was computed for another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def cache() -> None:
    """The prefix cache."""


@app.command()
def explain(
    first: Annotated[Path, typer.Argument(help="JSON of the earlier request, as it was sent to /v1/chat/completions.")],
    second: Annotated[Path, typer.Argument(help="JSON of the later one.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Whose tokenizer and template; default: the built-in model's."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per cache block.", min=1)] = 32,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say where two requests part, how many tokens are computed again because of it, and what to do."""
    import msgspec

    from headway.core.errors import BadInput
    from headway.core.request import SamplingParams
    from headway.model.load import open_model
    from headway.model.source import DEFAULT_MODEL
    from headway.report.document import Document, Grid, Text, show
    from headway.serve.decode import decoded
    from headway.serve.dialects.openai.bodies import PromptRequest
    from headway.serve.dialects.openai.explain import compared
    from headway.serve.errors import ApiError
    from headway.serve.model_text import ModelText
    from headway.serve.text import PromptReader

    def read(path: Path) -> PromptRequest:
        try:
            return decoded(path.read_bytes(), decoder)[0]
        except OSError as error:
            raise BadInput("FILE", f"cannot read {str(path)!r}: {error.strerror or error}") from None
        except ApiError as error:
            raise BadInput("FILE", f"{str(path)!r} is no request: {error}") from None

    decoder = msgspec.json.Decoder(PromptRequest)
    bodies = read(first), read(second)
    info = open_model(DEFAULT_MODEL if model is None else model).info
    reader = PromptReader(ModelText(info), info.context_length, SamplingParams())
    found = compared(*bodies, reader, block_size)
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    rows = [
        ["tokens of the first, of the second", f"{found.first}, {found.second}"],
        ["equal from the start", str(found.common)],
        ["reused (whole blocks)", str(found.reused)],
        ["computed again, though the same", str(found.lost)],
    ]
    parts: list[Text | Grid] = [Grid(["", "tokens"], rows)]
    if found.where:
        parts += [
            Text(f"they part in {found.where}"),
            Text(f"first   ...{found.before!r} {found.had!r}"),
            Text(f"second  ...{found.before!r} {found.has!r}"),
        ]
    show(Document("what the second request can reuse of the first", [*parts, Text(found.advice, "kind")]))
