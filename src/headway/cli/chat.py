"""`headway chat`: talk to a model in the terminal, in this process or on a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

if TYPE_CHECKING:
    from headway.client.chat import Client
    from headway.core.request import SamplingParams
    from headway.engine.llm import LLM, Message

    Say = Callable[[list[Message]], str]  # prints the answer as it is made, returns it

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@options.with_engine()
def chat(
    engine: EngineOptions,
    url: Annotated[str | None, typer.Option(help="Talk to this server instead of loading a model.")] = None,
    api_key_file: options.ApiKeyFile = None,
    system: Annotated[str | None, typer.Option(help="A system message to start from.")] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    seed: options.Seed = None,
) -> None:
    """Talk to a model; the history is kept, and each turn reuses the cache of the turns before.

    /reset forgets the history, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer.
    """
    from headway.cli.terminal import load_model
    from headway.core.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    if url is not None:
        from headway.client.chat import Client

        _converse(_remote(Client(url, options.api_key(api_key_file)), params), start)
        return
    with load_model(engine) as llm:
        _converse(_local(llm, params), start)


def _local(llm: LLM, params: SamplingParams) -> Say:
    from headway.cli.terminal import cost_table, print_pieces

    def say(messages: list[Message]) -> str:
        with llm.stream_chat(messages, params) as stream:
            print_pieces(delta.text for delta in stream)
        cost_table(llm, stream.completion)
        return stream.completion.text

    return say


def _remote(client: Client, params: SamplingParams) -> Say:
    from headway.cli.terminal import print_pieces

    model = client.models()[0]
    fields = {"model": model, "max_tokens": params.max_tokens, "temperature": params.temperature}
    if params.seed is not None:
        fields["seed"] = params.seed

    def say(messages: list[Message]) -> str:
        return print_pieces(piece.text for piece in client.stream_chat(messages, **fields))

    return say


def _converse(say: Say, start: list[Message]) -> None:
    from rich.markup import escape
    from rich.prompt import Prompt

    from headway.cli.terminal import stderr
    from headway.core.errors import HeadwayError

    messages = list(start)
    while True:
        try:
            text = Prompt.ask("[bold]you[/bold]", console=stderr).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(start)
        elif text:
            asked = [*messages, {"role": "user", "content": text}]
            try:
                messages = [*asked, {"role": "assistant", "content": say(asked)}]
            except HeadwayError as error:  # the history outgrew the context, say: keep what was there
                stderr.print(f"[red]{escape(str(error))}[/red] (/reset starts anew)", soft_wrap=True)
