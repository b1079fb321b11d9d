"""A server in a process of its own, what it holds, and how quickly its /health answers."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

HEADWAY = [sys.executable, "-c", "from headway.cli import main; main()"]
PULSE = 0.05  # seconds between two questions for its health


class Live:
    """A running `headway serve`.

    Attributes:
        host, port: where it listens.
        process: of its HTTP half; the engine is its child.
    """

    def __init__(self, *options: str) -> None:
        command = [*HEADWAY, "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"serving .* at (http://\S+)/v1", line):
                address = urlsplit(found.group(1))
                self.host, self.port = address.hostname or "", address.port or 0
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def metrics(self) -> dict[str, float]:
        """Values of `headway:` names without labels of their own."""
        text = self.get("/metrics")
        found = re.findall(r'^headway:(\w+)\{model_name="[^"]*"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def resident(self) -> int:
        """Bytes in memory of both processes, swapped ones included."""
        return sum(
            1024 * int(size)
            for process in self._processes()
            for size in re.findall(r"^(?:VmRSS|VmSwap):\s+(\d+)", Path(f"/proc/{process}/status").read_text(), re.M)
        )

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def _processes(self) -> list[int]:
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return [own, *map(int, children)]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def live(*options: str) -> Iterator[Live]:
    server = Live(*options)
    try:
        yield server
    finally:
        server.stop()


class Pulse:
    """Asks a server for its health all the time, on one connection, from this process."""

    def __init__(self, server: Live) -> None:
        self._server = server
        self._taken: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=30)
        while not self._end.is_set():
            begin = time.perf_counter()
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except OSError:
                connection.close()
            self._taken.append(time.perf_counter() - begin)
            time.sleep(PULSE)

    def take(self) -> dict[str, float]:
        """p50, p99 and longest answer in ms, since the last call."""
        taken, self._taken = self._taken, []
        if not taken:
            return {}
        middle, late = np.quantile(taken, (0.5, 0.99)) * 1e3
        return {"p50_ms": round(float(middle), 1), "p99_ms": round(float(late), 1),
                "longest_ms": round(max(taken) * 1e3, 1), "asked": len(taken)}  # fmt: skip

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
