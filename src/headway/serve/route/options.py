"""How a router is set up.

python -m headway.serve.route.options      prints the table of docs/route.md
"""

from __future__ import annotations

from typing import Annotated

from headway.core.clock import MAX_SECONDS
from headway.core.options import Option, Options, declared, table
from headway.routing.policies import ROUTING
from headway.routing.pools import LEAST_TOKENS
from headway.serve.options import ServeOptions
from headway.serve.quotas import Quota

_OF_SERVER = declared(ServeOptions)
OURS = ServeOptions()


class RouteOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set-up of a router.

    Raises:
        BadInput: a value is not one that its option accepts.
    """

    policy: Annotated[
        str,
        Option(
            "Who gets a request: prefix (soonest first token, by what each has cached and in hand), session, "
            "least-loaded, round-robin or power-of-two.",
            choices=tuple(ROUTING),
        ),
    ] = "prefix"
    most_in_flight: Annotated[
        int, Option("Requests that a replica has at once; the others wait at the router.", least=1, most=1 << 20)
    ] = 256
    max_waiting: Annotated[
        int, Option("Requests that may wait at the router; more are refused.", least=1, most=1 << 20)
    ] = 4096
    kv_secret_file: Annotated[
        str | None,
        Option(
            "File with the secret of the replicas' pools: prompts are computed by those with --role prefill. Default: "
            "all answer alike."
        ),
    ] = None
    split_from: Annotated[
        int,
        Option(
            "Tokens of a prompt, beside those cached, from which the prefill pool computes it.", least=1, most=1 << 30
        ),
    ] = LEAST_TOKENS
    host: Annotated[str, _OF_SERVER["host"]] = OURS.host
    port: Annotated[int, _OF_SERVER["port"]] = OURS.port
    uds: Annotated[str | None, _OF_SERVER["uds"]] = None
    root_path: Annotated[str, _OF_SERVER["root_path"]] = ""
    api_key_file: Annotated[
        str | None,
        Option(
            "File with the accepted API keys, one a line; default: no key. They are passed on, so the replicas must "
            "accept them too."
        ),
    ] = None
    requests_per_minute: Annotated[int | None, _OF_SERVER["requests_per_minute"]] = None
    max_concurrent: Annotated[int | None, _OF_SERVER["max_concurrent"]] = None
    share_cache: Annotated[
        bool, Option("Replicas share cached prefixes among keys, so the router takes equal prompts for equal.")
    ] = False
    max_body_mib: Annotated[float, _OF_SERVER["max_body_mib"]] = OURS.max_body_mib
    shutdown_timeout: Annotated[
        float, Option("Seconds running requests get after SIGTERM.", least=0, most=MAX_SECONDS)
    ] = OURS.shutdown_timeout
    cors_origin: Annotated[tuple[str, ...], _OF_SERVER["cors_origin"]] = ()
    access_log: Annotated[str, _OF_SERVER["access_log"]] = OURS.access_log
    log_level: Annotated[str, _OF_SERVER["log_level"]] = OURS.log_level

    @property
    def quota(self) -> Quota:
        """What each key may ask of all replicas together, if its line in the keys file does not say otherwise."""
        return Quota(requests=self.requests_per_minute, concurrent=self.max_concurrent)


if __name__ == "__main__":
    print(table(RouteOptions))
