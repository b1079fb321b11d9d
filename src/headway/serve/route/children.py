"""Replicas of one's own: servers on Unix sockets, started anew with back-off when they end, stopped together."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a replica is started again; doubled each time
LIVED = 60.0  # seconds after which an end is not counted with those before
WITH_PARENT = "HEADWAY_END_WITH_PARENT"  # set: a server ends when its standard input does
FATAL = 2  # exit code of a server whose options or model are at fault


def end_with_parent() -> None:
    """In a server that a router has started: end when that is gone, however it went. It holds the end of stdin."""

    def watch() -> None:
        while os.read(0, 1 << 16):
            pass
        os._exit(1)

    if os.environ.pop(WITH_PARENT, None):
        threading.Thread(target=watch, daemon=True).start()


class Children:
    """Servers, each by its command, to which `--uds PATH` is added.

    Attributes:
        urls: where they listen.
        code: of one whose options or model are at fault; 0 = none is.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = [list(command) for command in commands]
        self._folder = Path(tempfile.mkdtemp(prefix="headway-"))
        self._paths = [self._folder / f"replica-{number}.sock" for number in range(len(self._commands))]
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = False
        self.code = 0
        self.urls = [f"unix:{path}" for path in self._paths]

    async def watch(self, say: Callable[[str], None]) -> None:
        """Keep them all running, for ever."""
        await asyncio.gather(*(self._keep(number, say) for number in range(len(self._paths))))

    async def _keep(self, number: int, say: Callable[[str], None]) -> None:
        pause = FIRST_PAUSE
        while not self._stopping:
            begun = time.monotonic()
            process = self._processes[number] = await asyncio.create_subprocess_exec(
                *self._commands[number], "--uds", str(self._paths[number]), stdout=asyncio.subprocess.DEVNULL,
                stdin=asyncio.subprocess.PIPE, start_new_session=True, env=os.environ | {WITH_PARENT: "1"},
            )  # fmt: skip
            code = await process.wait()
            if self._stopping:
                return
            if code == FATAL:
                self.code = code
                say(f"replica {number} cannot be started (exit code {code}); its reason stands above")
                signal.raise_signal(signal.SIGTERM)
                return
            pause = FIRST_PAUSE if time.monotonic() - begun > LIVED else pause
            say(f"replica {number} has ended (exit code {code}); it is started again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def stop(self, seconds: float) -> None:
        """End them: asked first, killed if they take longer."""
        self._stopping = True
        running = [process for process in self._processes.values() if process.returncode is None]
        for process in running:
            with suppress(ProcessLookupError):
                process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds + 5.0):
                await asyncio.gather(*(process.wait() for process in running))
        self.kill()

    def kill(self) -> None:
        """End them now, and clear up."""
        self._stopping = True
        for process in self._processes.values():
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
