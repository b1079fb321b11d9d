"""An engine's place in a pool, from its options."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from headway.core.errors import BadInput
from headway.core.events import EventLog
from headway.engine.connector import Connectors, KVConnector
from headway.engine.kv_disk import LAYOUT
from headway.engine.options import EngineOptions
from headway.engine.transfer.peers import PeerConnector, PeerSetup
from headway.engine.transfer.ticket import host_port, read_secret
from headway.engine.transfer.wire import LAYOUT_BYTES
from headway.model.load import OpenModel
from headway.ops.protocol import Backend, CacheLayout
from headway.scheduling.scheduler import Scheduler

ANYWHERE = ("0.0.0.0", "::", "*")


def peer_setup(
    model: OpenModel, options: EngineOptions, backend: Backend, layout: CacheLayout
) -> PeerSetup | None:  # fmt: skip
    """None: it is in no pool.

    Raises:
        BadInput: the secret or the address cannot be used.
    """
    if options.kv_secret_file is None:
        return None
    secret = read_secret(options.kv_secret_file)
    listen = None
    if options.role != "decode":
        listen = host_port(options.kv_listen or "127.0.0.1:0", "--kv-listen")
        if listen[0] in ANYWHERE:
            raise BadInput("--kv-listen", f"{listen[0]} is no address that others could be told; name one of this host")
    how = options.weights, options.group, backend.name, backend.build, backend.kv_format
    identity = repr((LAYOUT, model.content(), *how, layout.block_size, layout.groups))
    sizes = [backend.block_bytes(group, layout.block_size) for group in layout.groups]
    digest = blake2b(identity.encode(), digest_size=LAYOUT_BYTES).digest()
    return PeerSetup(secret, digest, sizes, listen, pulls=options.role != "prefill")


def with_peers(
    disk: KVConnector | None, peers: PeerSetup, scheduler: Scheduler, backend: Backend, clock: Callable[[], int],
    log: EventLog,
) -> tuple[KVConnector, str]:  # fmt: skip
    """A connector to other engines, beside the tier on disk if there is one, and where it listens, "" = nowhere.

    Raises:
        BadInput: it cannot listen.
    """
    if disk is None:
        connector = PeerConnector(peers, scheduler, backend, clock, log)
        return connector, connector.address
    connector = PeerConnector(peers, scheduler, backend, clock, log, disk.save)
    return Connectors(disk, connector), connector.address
