"""The `headway` command: one file per verb, imported only when it is used, so that `headway --help` is instant."""

from __future__ import annotations

import importlib
import io
import os
import sys

# verb -> (module in headway.cli, one line of help). A module has `app`, a typer app.
VERBS = {
    "demo": "Answer one question with the built-in model, and show what it cost.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Serve a model over HTTP, as OpenAI's API does.",
    "route": "Route requests to replicas of a server.",
    "top": "Watch a running server.",
    "models": "List models: those here, those known by name, and what they would do here.",
    "generate": "Complete prompts, from the command line or a file.",
    "inspect": "Show a model at work on one prompt: tokens, attention, cache, every distribution.",
    "doctor": "Say what this machine has, and how fast a model should run on it.",
    "plan": "Size and price a deployment from first principles.",
    "lab": "Move by hand what planner, simulator and sampler compute, in a browser.",
    "simulate": "Play traffic through the scheduler that serves, in virtual time.",
    "probe": "Measure this machine: bandwidth and arithmetic rates.",
    "receipts": "Say who used the machine, from the event log of a server.",
    "cache": "Explain why a request did not reuse what was computed for another.",
    "quality": "Measure what rounding a model's weights and cache costs, token by token of a text.",
    "calibrate": "Fit this machine's step times to what a server did.",
    "bench": "Measure a live endpoint.",
}


def main(argv: list[str] | None = None) -> None:
    """Run one verb. A user's mistake is one sentence on stderr and exit code 2; never a traceback."""
    args = sys.argv[1:] if argv is None else argv
    name = f"headway {args[0]}" if args and args[0] in VERBS else "headway"
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open as long as the program runs
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what the terminal cannot show is spelled out
    try:
        code = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read this has read enough
        code = _muted()
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {file}{error.strerror or error}", file=sys.stderr)
        code = _muted()
    except MemoryError:
        print(f"{name}: there is not enough memory; see `headway doctor`", file=sys.stderr)
        code = 1
    sys.exit(code)


def usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    return f"usage: headway VERB [options]      (headway VERB --help for its options)\n\n{verbs}"


def _muted() -> int:
    """Send what stdout still holds nowhere, for there is no other place for it. -> the exit code"""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from headway import __version__

        print(f"headway {__version__}")
        return 0
    if args[0] not in VERBS:
        print(f"headway: {args[0]!r} is not a verb; choose from {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return _run_verb(args[0], args[1:])


def _run_verb(verb: str, args: list[str]) -> int:
    from headway.cli.command import start
    from headway.core.errors import HeadwayError

    app = importlib.import_module(f"headway.cli.{verb}").app
    try:
        return start(app, args, verb, VERBS)
    except HeadwayError as error:
        print(f"headway {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
