"""`headway chat`: talk to a model in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import options

if TYPE_CHECKING:
    from headway.core.request import SamplingParams
    from headway.engine.llm import LLM, Message

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="A system message to start from.")] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    seed: options.Seed = None,
    kv_cache_gib: options.KVCacheGiB = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    backend: options.Backend = "auto",
) -> None:
    """Talk to a model; the history is kept, and each turn reuses the cache of the turns before.

    /reset forgets the history, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer.
    """
    from headway.cli.terminal import load_model
    from headway.core.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    chosen: dict[str, Any] = {
        "kv_cache_gib": kv_cache_gib,
        "max_model_len": max_model_len,
        "threads": threads,
        "backend": backend,
    }
    with load_model(model, **chosen) as llm:
        _converse(llm, params, [{"role": "system", "content": system}] if system else [])


def _converse(llm: LLM, params: SamplingParams, start: list[Message]) -> None:
    from rich.prompt import Prompt

    from headway.cli.terminal import cost_table, print_stream, stderr
    from headway.core.errors import Rejected

    messages = list(start)
    while True:
        try:
            text = Prompt.ask("[bold]you[/bold]", console=stderr)
        except (EOFError, KeyboardInterrupt):
            return
        if text.strip() == "/quit":
            return
        if text.strip() == "/reset":
            messages = list(start)
            continue
        if not text.strip():
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            stream = llm.stream_chat(asked, params)
        except Rejected as error:  # the history outgrew the context: say so, keep what was there
            stderr.print(f"[red]{error}[/red] (/reset starts anew)")
            continue
        try:
            print_stream(stream)
        except KeyboardInterrupt:
            stderr.print("[dim](stopped)[/dim]")
        cost_table(llm, stream.completion)
        messages = [*asked, {"role": "assistant", "content": stream.completion.text}]
