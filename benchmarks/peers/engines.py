"""The engines that benchmarks/cpu.py measures: which there are, where they are found, their processes from outside."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """Another engine on a checkpoint of the large shape.

    Attributes:
        engine: of `SCRIPTS` or `BUILDS`.
        checkpoint: of `checkpoints.checkpoint`; "" = the very file we compute from.
        bits: of its weights: "int4", "int8" or "bf16"; "" = those of the file.
        serves: its figures hold a scheduler and a sampler, so ours against it are the whole engine's.
    """

    engine: str
    checkpoint: str
    bits: str
    serves: bool = True


PEERS = {
    "llama.cpp": Peer("llama.cpp", "", "", serves=False),
    "llama.cpp build": Peer("llama.cpp-build", "", "", serves=False),
    "ik_llama.cpp": Peer("ik_llama.cpp", "", "", serves=False),
    "llama.cpp Q4_0": Peer("llama.cpp", "Q4_0", "int4", serves=False),
    "llama.cpp Q4_K_M": Peer("llama.cpp", "Q4_K_M", "int4", serves=False),
    "llama.cpp Q8_0": Peer("llama.cpp", "Q8_0", "int8", serves=False),
    "llama.cpp BF16": Peer("llama.cpp", "BF16", "bf16", serves=False),
    "openvino int4": Peer("openvino", "openvino-int4", "int4"),
    "openvino int8": Peer("openvino", "openvino-int8", "int8"),
    "vllm w8a8": Peer("vllm", "w8a8", "int8"),
    "vllm bf16": Peer("vllm", "bf16", "bf16"),
}

# Engine -> (module that must be there, script).
SCRIPTS = {
    "llama.cpp": ("llama_cpp", "with_llama_cpp.py"),
    "openvino": ("openvino_genai", "with_openvino.py"),
    "vllm": ("vllm", "with_vllm.py"),
}
BUILDS = ("llama.cpp-build", "ik_llama.cpp")  # `with_llama.cpp`, compiled for each: the program is the worker


def variable(engine: str) -> str:
    """Name of the environment variable that holds an engine's interpreter, or the program of a build."""
    return "HEADWAY_PEER_" + engine.upper().replace(".", "_").replace("-", "_")


def interpreter(engine: str, given: dict[str, str]) -> str | None:
    """The Python that has an engine: named on the command line, in the environment, or this one; None = not found. Of a
    build, the program itself."""
    named = given.get(engine) or os.environ.get(variable(engine))
    if named or engine in BUILDS:
        return named
    return sys.executable if importlib.util.find_spec(SCRIPTS[engine][0]) is not None else None


class EngineFailed(Exception):
    """An engine's process ended; says with what last words."""


class Engine:
    """An engine's process.

    Attributes:
        facts: what it said when it was ready.
        pid: of the process.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as chatter:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=chatter, text=True
            )
        self.pid = self._process.pid
        self.facts: dict[str, Any] = self._answer()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one command of `worker`'s protocol.

        Raises:
            EngineFailed: the process is gone.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says why
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            words = self._log.read_text(errors="replace").strip().splitlines()
            last = words[-1] if words else "nothing"
            raise EngineFailed(f"ended with {self._process.wait()}, saying: {last[:200]}")
        return json.loads(line)

    def close(self) -> None:
        """Let it end; idempotent."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def start_headway(path: Path, threads: int, weights: str, group: int | None, log: Path) -> Engine:
    script = HERE / "with_headway.py"
    return Engine([sys.executable, str(script), str(path), str(threads), weights, str(group or 0)], log)


def start_peer(name: str, path: Path, threads: int, given: dict[str, str], log: Path) -> Engine:
    """Start a peer on a checkpoint.

    Raises:
        EngineFailed: it is not installed, or did not get ready.
    """
    engine = PEERS[name].engine
    python = interpreter(engine, given)
    if python is None and engine in BUILDS:
        raise EngineFailed(f"not built: set {variable(engine)} to the program that peers/README.md builds")
    if python is None:
        raise EngineFailed(f"not installed: set {variable(engine)} to a Python that has {SCRIPTS[engine][0]}")
    script = [] if engine in BUILDS else [str(HERE / SCRIPTS[engine][1])]
    return Engine([python, *script, str(path), str(threads)], log)
