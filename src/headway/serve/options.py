"""How a server is set up. Each option is declared once: the command line and the docs follow from here.

python -m headway.serve.options      prints the table of docs/serve.md
"""

from __future__ import annotations

import re
from typing import Annotated

from headway.core.clock import MAX_SECONDS
from headway.core.errors import BadInput
from headway.core.options import Option, Options, table
from headway.serve.logs import ACCESS, LEVELS
from headway.serve.quotas import MOST, Quota
from headway.text.tool_formats import BY_NAME


class ServeOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set-up of a server; the engine behind it has `EngineOptions`.

    Raises:
        BadInput: a value is not one that its option accepts.
    """

    host: Annotated[str, Option("Address to listen on. Other than loopback needs --api-key-file.")] = "127.0.0.1"
    port: Annotated[int, Option("Port; 0 = a free one.", least=0, most=65535)] = 8000
    uds: Annotated[
        str | None,
        Option("Listen on a Unix socket of this path, for this user only, instead of a port."),
    ] = None
    root_path: Annotated[
        str, Option("Path that a proxy puts before every route, such as /llm; requests without it are served too.")
    ] = ""
    api_key_file: Annotated[str | None, Option("File with the accepted API keys, one a line; default: no key.")] = None
    served_model_name: Annotated[
        tuple[str, ...], Option("Name clients use; default: the model's own. Of several models, given once for each.")
    ] = ()
    max_body_mib: Annotated[float, Option("Most MiB of one request.", above=0, most=1024)] = 8.0
    shutdown_timeout: Annotated[
        float, Option("Seconds running requests get after SIGTERM.", least=0, most=MAX_SECONDS)
    ] = 30.0
    stall_timeout: Annotated[
        float, Option("/health fails when a step takes longer, in seconds.", above=0, most=MAX_SECONDS)
    ] = 60.0
    cors_origin: Annotated[
        tuple[str, ...],
        Option("Origin of pages that may read answers, such as https://app.example; * = all. May be given again."),
    ] = ()
    allow_lora_loading: Annotated[
        str | None,
        Option(
            "Folder that LoRA adapters may be loaded from by POST /v1/load_lora_adapter; default: they may not. "
            "--max-loras makes room for them."
        ),
    ] = None
    requests_per_minute: Annotated[
        int | None,
        Option("Requests a minute of each key, if its line of the keys file says no other.", least=1, most=MOST),
    ] = None
    input_tokens_per_minute: Annotated[
        int | None, Option("Prompt tokens a minute of each key.", least=1, most=MOST)
    ] = None
    output_tokens_per_minute: Annotated[
        int | None, Option("Generated tokens a minute of each key.", least=1, most=MOST)
    ] = None
    max_concurrent: Annotated[int | None, Option("Requests of each key at once.", least=1, most=MOST)] = None
    share_cache: Annotated[
        bool,
        Option(
            "Keys share cached prefixes, and may learn of each other's prompts from times and cached_tokens; default: "
            "each key has its own, or shares that of the keys with the same cache=NAME in the keys file."
        ),
    ] = False
    tool_parser: Annotated[
        str | None,
        Option("How the model writes calls of tools; default: as its chat template tells.", choices=tuple(BY_NAME)),
    ] = None
    price: Annotated[
        float | None,
        Option(
            "Dollars per hour of this machine; receipts then tell costs. Several models share it in equal parts.",
            least=0,
            most=1e6,
        ),
    ] = None
    strict: Annotated[
        bool, Option("Refuse fields that this server does not know; default: they are left out, and a header says so.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            "OpenTelemetry: URL that takes a span per request, such as http://HOST:4318/v1/traces; default: none. "
            "Needs headway[otel]."
        ),
    ] = None
    access_log: Annotated[str, Option("A line per request on stderr.", ACCESS)] = "off"
    log_level: Annotated[str, Option("Least level of what is logged on stderr.", LEVELS)] = "info"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise BadInput("--root-path", f"{self.root_path[:80]!r} is no path such as /llm, without a / at its end")

    @property
    def quota(self) -> Quota:
        """What each key may use, if its line in the keys file does not say otherwise."""
        return Quota(
            self.requests_per_minute, self.input_tokens_per_minute, self.output_tokens_per_minute, self.max_concurrent
        )


if __name__ == "__main__":
    print(table(ServeOptions))
