"""The process in which a chat template runs. Started by `template.ChatTemplate` as a script, never imported.

A template comes with the model file, so it is somebody else's program: it may loop, allocate, or try to get out. Here
it runs in Jinja's immutable sandbox, inside a process that the system ends when it has used its processor time or
memory, and that holds nothing but one conversation.

Arguments: file descriptor of a socket, processor seconds per rendering, bytes of memory, characters of output.
Messages on the socket are MessagePack: first the template's source, then one dict of variables per rendering, each
answered by (outcome, text, line): "ok" with the text; "refused" with what the template said through raise_exception;
"fault" with what went wrong. Line 0 means unknown.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

Answer = tuple[str, str, int]


class TemplateFault(Exception):
    """The template called raise_exception."""


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names like __html__, which would be called outside the sandbox's checks."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **fields).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant wrote, for training; here it just renders."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates may use: the same names, with the same meaning, as in transformers."""
    jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    jinja.filters["tojson"] = to_json
    jinja.globals["namespace"] = Namespace
    jinja.globals["raise_exception"] = raise_exception
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys; prompts want neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise TemplateFault(str(message))


def render(template: jinja2.Template, variables: dict[str, Any], most: int) -> Answer:
    """Render, or say why not."""
    chunks, length = [], 0
    for chunk in template.generate(variables):
        chunks.append(chunk)
        length += len(chunk)
        if length > most:
            return "fault", f"it writes more than {most} characters", 0
    return "ok", "".join(chunks), 0


def guarded(work: Callable[[], Answer]) -> Answer:
    """Any error of a template becomes an answer."""
    try:
        return work()
    except TemplateFault as refusal:
        return "refused", str(refusal)[:500], line_of(refusal.__traceback__)
    except jinja2.TemplateSyntaxError as error:
        return "fault", str(error.message)[:500], error.lineno
    except RecursionError as error:
        return "fault", "it is nested too deeply", line_of(error.__traceback__)
    except MemoryError as error:
        return "fault", "it needs more memory than a template may have", line_of(error.__traceback__)
    except Exception as error:  # a template is a program: it can raise anything
        return "fault", f"{str(error)[:500] or type(error).__name__}", line_of(error.__traceback__)


def line_of(traceback: TracebackType | None) -> int:
    """The innermost line of the template in a traceback (Jinja rewrites it to name template lines)."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def serve(connection: Connection, seconds: float, most: int) -> None:
    """Answer until the other side goes away."""
    source = connection.recv_bytes().decode()
    compiled: jinja2.Template | None = None

    def work() -> Answer:
        nonlocal compiled
        if compiled is None:
            compiled = environment().from_string(source)
        return render(compiled, variables, most)

    while True:
        try:
            variables = msgspec.msgpack.decode(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        answer = guarded(work)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(msgspec.msgpack.encode(answer))


def main() -> None:
    descriptor, seconds, memory, most = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the system does not enforce it; the time limit bounds memory too
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    serve(Connection(int(descriptor)), float(seconds), int(most))


if __name__ == "__main__":
    main()
