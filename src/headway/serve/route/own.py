"""`headway serve MODEL --replicas N`: servers of one's own behind a router, as one tree of processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from headway.core.errors import BadInput
from headway.engine.machine import free_memory, usable_cores
from headway.engine.options import EngineOptions
from headway.roofline.hardware import GIB
from headway.serve.options import ServeOptions
from headway.serve.route.children import Children
from headway.serve.route.life import run
from headway.serve.route.options import RouteOptions

MOST_REPLICAS = 256


def serve_replicas(
    engine: EngineOptions, server: ServeOptions, models: Sequence[str], count: int, say: Callable[[str], None]
) -> int:
    """Serve until a signal -> exit code.

    Raises:
        BadInput: an option is at fault.
    """
    if not 1 <= count <= MOST_REPLICAS:
        raise BadInput("--replicas", f"{count} is not a whole number from 1 to {MOST_REPLICAS}")
    for flag, value in (("--event-log", engine.event_log), ("--allow-lora-loading", server.allow_lora_loading)):
        if value is not None:
            raise BadInput(flag, "it is one server's, and --replicas makes several")
    each = replace(
        engine, model=EngineOptions().model, threads=engine.threads or max(1, usable_cores() // count),
        memory_gib=(engine.memory_gib or free_memory() / GIB) / count,
        kv_disk_gib=None if engine.kv_disk is None else engine.disk_gib / count,
    )  # fmt: skip
    own = ServeOptions()
    inner = replace(
        server, host=own.host, port=own.port, uds=None, root_path=own.root_path, cors_origin=own.cors_origin
    )  # fmt: skip
    outer = RouteOptions(
        host=server.host, port=server.port, uds=server.uds, root_path=server.root_path, cors_origin=server.cors_origin,
        api_key_file=server.api_key_file, share_cache=server.share_cache, max_body_mib=server.max_body_mib,
        shutdown_timeout=server.shutdown_timeout, access_log=server.access_log, log_level=server.log_level,
    )  # fmt: skip
    command = [sys.executable, "-m", "headway", "serve", *models, *each.words(), *inner.words()]
    children = Children(command, count)
    try:
        return run(outer, children.urls, say, children)
    finally:
        children.kill()
