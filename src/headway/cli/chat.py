"""`headway chat`: talk to a model in the terminal, in this process or on a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

if TYPE_CHECKING:
    from headway.cli.terminal import AnswerCost
    from headway.client.chat import Client, Piece
    from headway.core.request import SamplingParams
    from headway.engine.llm import LLM, Message
    from headway.roofline.memory import MemoryPlan

    Say = Callable[[list[Message]], AnswerCost]  # prints the answer as it is made

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
HELP = """\
/reset   forget the conversation (also /clear)
/stats   what the last answer cost, and how much of the conversation was cached
/help    this list
/quit    leave (also /exit, /bye, Ctrl-D)
Ctrl-C stops an answer; Alt-Enter starts a new line; text of several lines can be pasted.
An answer has at most {most} tokens, or what is left of the context: --max-tokens sets it."""


@app.command()
@options.with_engine()
def chat(
    engine: EngineOptions,
    url: Annotated[str | None, typer.Option(help="Talk to this server instead of loading a model.")] = None,
    api_key_file: options.ApiKeyFile = None,
    system: Annotated[str | None, typer.Option(help="A system message to start from.")] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer; fewer where less is left of the context.")
    ] = 1024,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    adapter: options.Adapter = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.GrammarFile = None,
    stats: Annotated[bool, typer.Option("--stats", help="After every answer what /stats shows.")] = False,
) -> None:
    """Talk to a model; the history is kept, and each turn reuses the cache of the turns before.

    /help lists what can be said to the chat itself. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    from headway.cli.terminal import fetching, load_model
    from headway.core.errors import BadInput
    from headway.model.load import describe
    from headway.model.source import DEFAULT_MODEL

    bound = options.grammar(json_schema, regex, grammar)
    given = options.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    lora = options.adapter(engine, adapter)
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    if url is not None:
        from headway.client.chat import Client

        if engine != EngineOptions():
            raise BadInput("--url", "the server has loaded its model already; leave out MODEL and the engine's options")
        client = Client(url, options.api_key(api_key_file))
        model = client.models()[0]
        asked = {} if bound is None else {"structured_outputs": bound.as_json()}
        Conversation(model, _remote(client, {"model": model, **given, **asked}), start, max_tokens, stats).run()
        return
    with fetching() as progress:
        info = describe(engine.model or DEFAULT_MODEL, progress, engine.chat_template)
    if info.tokenizer.chat_template is None:
        raise BadInput(
            "MODEL",
            f"{info.name} has no chat template; complete texts with `headway generate --prompt`, or name one with "
            "--chat-template FILE",
        )
    with load_model(engine) as llm:
        say, memory = _local(llm, llm.params(**given, grammar=bound), lora), llm.engine.memory
        Conversation(lora or info.name, say, start, max_tokens, stats, memory).run()


def _local(llm: LLM, params: SamplingParams, adapter: str) -> Say:
    import msgspec

    from headway.cli.repetition import not_circling
    from headway.cli.terminal import AnswerCost, print_pieces

    def say(messages: list[Message]) -> AnswerCost:
        tokens = llm.engine.encode_chat(messages)
        room = max(1, llm.engine.max_model_len - len(tokens))
        limited = msgspec.structs.replace(params, max_tokens=min(params.max_tokens or room, room))
        with llm.stream(tokens, limited, adapter=adapter) as stream:
            print_pieces(not_circling(delta.text for delta in stream))
        return AnswerCost.of(stream.completion)

    return say


def _remote(client: Client, fields: dict[str, Any]) -> Say:
    from headway.cli.repetition import not_circling
    from headway.cli.terminal import AnswerCost, print_pieces

    def say(messages: list[Message]) -> AnswerCost:
        sent, times, pieces = time.perf_counter(), [], []

        def texts() -> Iterator[str]:
            for piece in _pieces(client, messages, fields):
                pieces.append(piece)
                if piece.text:
                    times.append(time.perf_counter() - sent)
                    yield piece.text

        text = print_pieces(not_circling(texts()))
        usage = next((piece.usage for piece in pieces if piece.usage), {})
        reason = next((piece.finish_reason for piece in pieces if piece.finish_reason), "abort")
        count = usage.get("completion_tokens", len(times))
        return AnswerCost(
            text=text,
            reason=reason,
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            tokens=count,
            ttft=times[0] if times else None,
            tpot=(times[-1] - times[0]) / (count - 1) if times and count > 1 else None,
        )

    return say


def _pieces(client: Client, messages: list[Message], fields: dict[str, Any]) -> Iterator[Piece]:
    """An answer of at most `max_tokens`, or of what is left of the context if that is less: asked for without a limit,
    a server gives just that."""
    from headway.core.errors import HeadwayError

    try:
        yield from client.stream_chat(messages, **fields)
    except HeadwayError as error:  # before the first piece
        if not _is_full(error):
            raise
        yield from client.stream_chat(messages, **{name: fields[name] for name in fields if name != "max_tokens"})


@dataclass
class Conversation:
    """What is said to and by a model, line by line from the terminal or a pipe."""

    model: str
    say: Say  # prints an answer as it is made
    start: list[Message]
    most: int  # tokens of an answer
    always_stats: bool = False
    memory: MemoryPlan | None = None  # of a model in this process
    messages: list[Message] = field(default_factory=list)
    last: AnswerCost | None = None

    def run(self) -> None:
        """Until the user leaves."""
        from headway.cli.lines import Lines
        from headway.cli.terminal import note

        self.messages = list(self.start)
        lines = Lines("chat_history", ("/help", "/quit", "/reset", "/stats"))
        if lines.interactive:
            note(f"{self.model}. Type a message; /help lists what else can be typed.")
        for line in lines:
            text = line.strip()
            word = text.partition(" ")[0]
            if word in ("/quit", "/exit", "/bye"):
                return
            if word.startswith("/") and word.count("/") == 1:
                self._command(word)
            elif text:
                self._ask(text)

    def _command(self, word: str) -> None:
        from headway.cli.terminal import note

        if word in ("/reset", "/clear"):
            self.messages, self.last = list(self.start), None
            note("(the conversation is forgotten)")
        elif word == "/stats":
            self._show_stats()
        elif word in ("/help", "/?"):
            note(HELP.format(most=self.most))
        else:
            note(f"{word} is no command; /help lists them")

    def _ask(self, text: str) -> None:
        """One turn. Where the context is full, the oldest turns are left out, and the user is told."""
        from headway.cli.terminal import complain, note
        from headway.core.errors import HeadwayError

        question = {"role": "user", "content": text}
        history = self.messages[len(self.start) :]
        dropped = 0
        while True:
            asked = [*self.start, *history[2 * dropped :], question]
            try:
                answer = self.say(asked)
                break
            except HeadwayError as error:
                if not _is_full(error) or 2 * dropped == len(history):
                    complain(f"{error} (/reset starts anew)")  # what was said before stays
                    return
                dropped += 1
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        self.last = answer
        if dropped:
            note(f"(the context is full: from here on without the {dropped} oldest turn{'s' if dropped > 1 else ''})")
        if answer.reason == "length":
            full = answer.tokens < self.most
            note("(cut: the context is full)" if full else f"(cut after {self.most} tokens; --max-tokens allows more)")
        if self.always_stats:
            self._show_stats()

    def _show_stats(self) -> None:
        from headway.cli.terminal import cost_table, note

        if self.last is None:
            note("(nothing was answered yet)")
        else:
            cost_table(self.last, self.memory)


def _is_full(error: Exception) -> bool:
    """Whether the conversation has outgrown the context."""
    from headway.client.chat import ServerError
    from headway.core.errors import Reject, Rejected

    if isinstance(error, ServerError):
        return error.code == Reject.CONTEXT_LENGTH.code
    return isinstance(error, Rejected) and error.reason is Reject.CONTEXT_LENGTH
