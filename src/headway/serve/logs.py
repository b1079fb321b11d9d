"""What the server writes about itself: log lines, a few of one kind a minute, and a line per request if wanted."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime

BURST = 10  # lines of one kind ...
WINDOW = 60.0  # ... in so many seconds; more are counted
ACCESS = ("off", "text", "json")
LEVELS = ("debug", "info", "warning", "error")
access = logging.getLogger("headway.access")


class RateLimit(logging.Filter):
    """Lets lines of one kind (one template of one logger) through `BURST` times per window, and says how many it held
    back with the next one. Access logs are complete."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # kind -> start of the window, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == access.name:
            return True
        kind, now = (record.name, str(record.msg)), time.monotonic()
        begin, lines = self._seen.get(kind, (now, 0))
        if now - begin > WINDOW:
            if lines > BURST:
                record.msg = f"{record.getMessage()} ({lines - BURST} more like it were not logged)"
                record.args = ()
            begin, lines = now, 0
        self._seen[kind] = (begin, lines + 1)
        return lines < BURST


def configure(level: str, access_log: str) -> None:
    """Set up logging of the whole process, to stderr, with times.

    Args:
        level: one of `LEVELS`.
        access_log: one of `ACCESS`.
    """
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    for handler in logging.root.handlers:
        handler.addFilter(RateLimit())
    access.setLevel(logging.INFO if access_log != "off" else logging.CRITICAL)
    if access_log == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(_JsonLine())
        access.addHandler(handler)
        access.propagate = False


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(record.args, dict)
        return json.dumps({"time": datetime.fromtimestamp(record.created, UTC).isoformat(), **record.args})


def log_access(peer: str, method: str, path: str, status: int, seconds: float, id: str) -> None:
    """One answered request; 499 = its client left before. No query, no body, no key."""
    if access.isEnabledFor(logging.INFO):
        fields = {"peer": peer, "method": method, "path": path[:200], "status": status, "seconds": round(seconds, 6)}
        access.info(
            "%(peer)s %(method)s %(path)r %(status)d %(seconds).3fs %(request_id)s", fields | {"request_id": id}
        )
