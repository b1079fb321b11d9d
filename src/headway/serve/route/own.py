"""`headway serve MODEL --replicas N`: servers of one's own behind a router, as one tree of processes."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

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
    engine: EngineOptions, server: ServeOptions, models: Sequence[str], count: int, say: Callable[[str], None],
    prefill: int = 0,
) -> int:  # fmt: skip
    """Serve until a signal -> exit code.

    Args:
        count: replicas. prefill: how many of them compute prompts for the others, which answer.

    Raises:
        BadInput: an option is at fault.
    """
    if not 1 <= count <= MOST_REPLICAS:
        raise BadInput("--replicas", f"{count} is not a whole number from 1 to {MOST_REPLICAS}")
    if not 0 <= prefill < count:
        raise BadInput("--prefill", f"{prefill} of {count} replicas leave none that answers")
    if engine.kv_secret_file is not None:
        raise BadInput("--kv-secret-file", "replicas of one's own have a secret of their own; leave it out")
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
        server, host=own.host, port=own.port, uds=None, root_path=own.root_path, cors_origin=own.cors_origin,
        requests_per_minute=None, max_concurrent=None,
    )  # fmt: skip
    outer = RouteOptions(
        host=server.host, port=server.port, uds=server.uds, root_path=server.root_path, cors_origin=server.cors_origin,
        requests_per_minute=server.requests_per_minute, max_concurrent=server.max_concurrent,
        api_key_file=server.api_key_file, share_cache=server.share_cache, max_body_mib=server.max_body_mib,
        shutdown_timeout=server.shutdown_timeout, access_log=server.access_log, log_level=server.log_level,
    )  # fmt: skip
    with ExitStack() as closing:
        if prefill:
            secret = _secret(closing)
            each, outer = replace(each, kv_secret_file=secret), replace(outer, kv_secret_file=secret)
        command = [sys.executable, "-m", "headway", "serve", *models]
        pooled = [replace(each, role=role) if prefill else each for role in ("prefill", "decode")]
        commands = [[*command, *one.words(), *inner.words()] for one in pooled]
        children = Children([commands[number >= prefill] for number in range(count)])
        closing.callback(children.kill)
        return run(outer, children.urls, say, children)


def _secret(closing: ExitStack) -> str:
    """A file with a secret that goes when this does."""
    folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="headway-"))  # of mode 0700
    path = Path(folder) / "kv-secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return str(path)
