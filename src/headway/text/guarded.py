"""A process for work on input that may be hostile: it is ended when it has used its time or memory.

The other side is a script, started with a socket's file descriptor, processor seconds per question and bytes of memory
as its first arguments. Messages on the socket are bytes: perhaps some to begin with, then questions, each with one
answer.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple


class Bounds(NamedTuple):
    """What a question may take.

    Attributes:
        cpu_seconds: of processor time.
        wall_seconds: for a machine so busy that the processor time takes this long.
        memory: bytes of the process.
    """

    cpu_seconds: float
    wall_seconds: float
    memory: int


class WorkerEnded(Exception):
    """The process gave no answer; `str()` says why, beginning with "it"."""


class GuardedProcess:
    """One worker process and the socket to it; started at once, in the background.

    Args:
        script: what it runs.
        arguments: of the script, after the three that this gives it.
        first: messages it gets before the first question.
    """

    def __init__(
        self, script: Path, limits: Bounds, arguments: Sequence[str] = (), first: Sequence[bytes] = ()
    ) -> None:
        self._limits = limits
        ours, theirs = socket.socketpair()
        bounds = (theirs.fileno(), limits.cpu_seconds, limits.memory)
        # -P keeps this folder off the module path; a process group of its own keeps Ctrl-C of a terminal away.
        command = [sys.executable, "-P", str(script), *map(str, bounds), *arguments]
        with theirs:
            self._child = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = Connection(os.dup(ours.fileno()))
        ours.close()
        self.end = weakref.finalize(self, _end, self._child, self._connection)
        self._unsent = list(first)

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def ask(self, question: bytes) -> bytes:
        """The worker's answer.

        Raises:
            WorkerEnded: it has none; the process is of no more use.
        """
        try:
            for message in (*self._unsent, question):
                self._connection.send_bytes(message)
            self._unsent = []
            if not self._connection.poll(self._limits.wall_seconds):
                raise WorkerEnded(f"it gives no answer within {self._limits.wall_seconds:g} s")
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            code = self._child.wait()
        if code == -signal.SIGPROF:
            raise WorkerEnded(f"it runs for more than {self._limits.cpu_seconds:g} s")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise WorkerEnded(f"its process ended ({how})")


def _end(child: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    child.kill()
    child.wait()
