"""`headway demo`: one question, the built-in model, and what the answer cost."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
QUESTION = "What is the capital of France, and what is it known for?"


@app.command()
@options.with_engine("threads", "backend")
def demo(
    engine: EngineOptions,
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    max_tokens: options.MaxTokens = 96,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
) -> None:
    """Answer one question with the built-in model, streaming, and print TTFT, TPOT, tokens/s and cache use."""
    from rich.markup import escape

    from headway.cli.terminal import AnswerCost, cost_table, load_model, print_pieces, step

    given = options.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with load_model(engine) as llm:
        step(f"[bold]{escape(question)}[/bold]")
        with llm.stream_chat(question, llm.params(**given)) as stream:
            print_pieces(delta.text for delta in stream)
        cost_table(AnswerCost.of(stream.completion), llm.engine.memory)
