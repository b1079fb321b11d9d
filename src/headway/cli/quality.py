"""`headway quality`: what rounding weights and cache costs, on the tails too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

if TYPE_CHECKING:
    from headway.measure.quality import Quality
    from headway.report.document import Document

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@options.with_engine("model", "backend", "weights", "group", "kv", "threads")
def quality(
    engine: EngineOptions,
    text: Annotated[Path, typer.Option("--text", help="File of UTF-8 text to read; - is stdin.")],
    against: Annotated[
        str,
        typer.Option(
            "--against",
            help="reference: float32 throughout, in numpy (four bytes per weight, and slow); native: the file's own "
            "weights in the kernels, with a bf16 cache.",
        ),
    ] = "reference",
    window: Annotated[
        int, typer.Option("--window", min=2, help="Tokens of context; the text is cut into such.")
    ] = 1024,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Read at most so many; default: all.")] = None,
    worst: Annotated[int, typer.Option("--worst", min=0, max=1000, help="Positions to show.")] = 20,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the distribution of divergences to this .png or .svg file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read a text through the model as it would be served and through a reference of the same file, and compare what
    they say about every token: perplexity, KL divergence (mean, 99th and 99.9th percentile), agreement of the likeliest
    token, and the worst positions with their text."""
    import sys

    from headway.cli.terminal import progress
    from headway.core.errors import BadInput
    from headway.engine.backends import make_backend
    from headway.engine.machine import usable_cores
    from headway.measure.quality import quality as compare
    from headway.report.document import show
    from headway.report.figures import check_plot, new_figure, save_figure

    if against not in ("reference", "native"):
        raise BadInput("--against", f"{against!r} is not one of reference, native")
    check_plot(plot)
    cores = engine.threads or usable_cores()
    tested = make_backend(engine.backend, cores, engine.weights, engine.group, engine.kv)
    reference = make_backend(against, cores)
    try:
        data = sys.stdin.buffer.read() if str(text) == "-" else text.read_bytes()
        read = data.decode()
    except OSError as error:
        raise BadInput("--text", f"{text} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadInput("--text", f"{text} is not UTF-8 at byte {error.start}") from None
    if not read.strip():
        raise BadInput("--text", f"{text} is empty; accepted: a text of at least two tokens")
    with progress() as report:
        found = compare(engine.model, tested, reference, read, window=window, tokens=tokens, worst=worst, report=report)
    if plot is not None:
        figure, axes = new_figure()
        draw(axes, found)
        save_figure(figure, plot)
    if json:
        import msgspec

        print(msgspec.json.encode(found).decode())
    else:
        show(_document(found))


def draw(axes: Any, found: Quality) -> None:
    """Share of tokens whose divergence is at least so large: a straight line to the right is a heavy tail."""
    ordered = sorted(found.kl, reverse=True)
    axes.loglog([max(kl, 1e-9) for kl in ordered], [(i + 1) / len(ordered) for i in range(len(ordered))], ".-")
    axes.set_xlabel("KL divergence of a token, nats")
    axes.set_ylabel("share of tokens with at least this much")
    axes.set_title(f"{found.model}: {found.tested}")


def _document(found: Quality) -> Document:
    from headway.report.document import Document, Grid

    change = found.perplexity / found.reference_perplexity - 1
    figures = [
        ["perplexity", f"{found.perplexity:.4f}", f"{found.reference_perplexity:.4f} in the reference, {change:+.2%}"],
        ["KL divergence, mean", f"{found.kl_mean:.5f}", "nats per token"],
        ["99th percentile", f"{found.kl_p99:.4f}", ""],
        ["99.9th percentile", f"{found.kl_p999:.4f}", f"at most {found.kl_most:.4f}"],
        ["same likeliest token", f"{found.top1:.2%}", f"of {found.tokens:,} tokens"],
        ["weights", f"{found.weight_bytes / 2**20:,.0f} MiB", f"cache {found.kv_bytes_per_token / 1024:.1f} KiB/token"],
    ]
    worst = [
        [
            f"{one.kl:.3f}", _end(repr(one.before)[1:-1], 34), _end(repr(one.token), 12),
            f"{one.probability:.3f} / {one.reference_probability:.3f}",
            f"{_end(repr(one.likeliest), 11)} / {_end(repr(one.reference_likeliest), 11)}",
        ]
        for one in found.worst
    ]  # fmt: skip
    head = ["KL", "text before", "token", "its probability", "likeliest"]
    title = f"where they differ most: {len(worst)} of {found.tokens:,} tokens, each as measured / in the reference"
    return Document(f"{found.model}, {found.tested}; against {found.reference}", [
        Grid(["", "measured", "remark"], figures, left=["remark"]),
        *([Grid(head, worst, title=title, left=head[1:3] + head[4:])] if worst else []),
    ])  # fmt: skip


def _end(text: str, most: int) -> str:
    """The last characters of a text: those that a table of 100 columns has room for."""
    return text if len(text) <= most else "…" + text[1 - most :]


if __name__ == "__main__":
    app()
