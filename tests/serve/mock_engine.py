"""An engine process around the scripted model: `python mock_engine.py FOLDER`, options as JSON on stdin."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from headway.core.errors import ModelFileError
from headway.engine.ipc import Ready, Status
from headway.engine.process import EventTray, Loaded, cache_status, serve
from headway.scheduling.policies.priority import PRIORITY
from tests.serve.scripted import VOCAB, engine


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """Set-up of a scripted engine."""

    blocks: int = 1024
    max_rows: int = 32
    context: int = 4096
    seconds: float = 0.0
    broken: str = ""
    hang_seconds: float = 600.0
    max_wait: float | None = None
    policy: str = "chunked"


def start(line: bytes) -> Loaded:
    options = msgspec.json.decode(line, type=Options)
    if options.broken:
        raise ModelFileError(options.broken)
    tray = EventTray()
    loop = engine(
        tray.fold,
        blocks=options.blocks,
        max_rows=options.max_rows,
        context=options.context,
        seconds=options.seconds,
        max_wait=options.max_wait,
        policy=options.policy,
    )
    scheduler = loop.scheduler
    classes = options.policy == PRIORITY.name
    ready = Ready("scripted", scheduler.limits.max_model_len, VOCAB, options.max_rows, priorities=classes)

    def status() -> Status:
        return msgspec.structs.replace(cache_status(scheduler.cache), wait=scheduler.predicted_wait())

    return Loaded(ready, loop, tray, status, loop.close, hang_seconds=options.hang_seconds)


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), start))
