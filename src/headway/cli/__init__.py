"""The `headway` command: one file per verb, imported only when it is used, so that `headway --help` is instant."""

from __future__ import annotations

import importlib
import sys

# verb -> (module in headway.cli, one line of help). A module has `app`, a typer app.
VERBS = {
    "demo": "Answer one question with the built-in model, and show what it cost.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Serve a model over HTTP, as OpenAI's API does.",
    "top": "Watch a running server.",
    "generate": "Complete prompts, from the command line or a file.",
    "doctor": "Say what this machine has, and how fast a model should run on it.",
    "plan": "Size and price a deployment from first principles.",
    "probe": "Measure this machine: bandwidth and arithmetic rates.",
    "bench": "Measure a live endpoint.",
}


def main(argv: list[str] | None = None) -> None:
    """Run one verb. A user's mistake is one sentence on stderr and exit code 2; never a traceback."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if args else 2)
    if args[0] == "--version":
        from headway import __version__

        print(f"headway {__version__}")
        return
    if args[0] not in VERBS:
        print(f"headway: {args[0]!r} is not a verb; choose from {', '.join(VERBS)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(_run(args[0], args[1:]))


def usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    return f"usage: headway VERB [options]      (headway VERB --help for its options)\n\n{verbs}"


def _run(verb: str, args: list[str]) -> int:
    from headway.core.errors import HeadwayError

    app = importlib.import_module(f"headway.cli.{verb}").app
    try:
        app(args=args, prog_name=f"headway {verb}")
    except HeadwayError as error:
        print(f"headway {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0
