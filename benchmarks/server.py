"""What the HTTP server costs, next to the same engine in process.

    python benchmarks/server.py                          the built-in model, 32 streams
    python benchmarks/server.py --scripted               no model: the most the API process can carry
    python benchmarks/server.py --model F --streams N --tokens N
    python benchmarks/server.py --limits                 a key with limits and a price; each request wants its receipt
    python benchmarks/server.py --live                   and what a reader of /v1/live costs

Prints one JSON object: tokens/s in process and served, CPU of each process, CPU per SSE chunk (built, and sent), and
the event loop's lag and the slowest /health while texts of 600 kB arrive beside the streams. The client only reads
bytes; it parses nothing. On a machine that does other things, believe `server_cost_in_cpu` rather than `server_cost`,
and look at `api_waited_ms` first: how long the API process was ready to run and had no core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from headway.client.watch import parse  # noqa: E402
from headway.core.request import SamplingParams  # noqa: E402
from headway.engine.messages import Delta  # noqa: E402
from headway.serve.answer import Answer, Prompt, Query  # noqa: E402
from headway.serve.dialects.openai.format import ChatFormat  # noqa: E402

WORDS = "the quick brown fox jumps over a lazy dog while seventeen ships sail to distant harbours "
PROMPT = "Tell me a long story about a fox, number {}."
KEY = "sk-benchmark"
LIMITS = ["--requests-per-minute", "100000", "--input-tokens-per-minute", "100000000", "--output-tokens-per-minute",
          "100000000", "--max-concurrent", "1000"]  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_ms(pid: int) -> float:
    """Time a process was ready to run and waited for a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e6


def chunk_microseconds(rounds: int = 100_000) -> float:
    """CPU to turn one delta into one event."""
    query = Query(
        model="model", params=SamplingParams(), field="messages", id_prefix="chatcmpl-",
        format=partial(ChatFormat, None, None, True, None),  # type: ignore[arg-type]
    )  # fmt: skip
    answer = Answer(query, [(Prompt((1,)), 1)], "", 0)
    format, (choice,) = query.format(answer), answer.choices
    delta = Delta(id="a", choice=0, at=0, tokens=(1,), text=" story")
    begin = time.process_time()
    for _ in range(rounds):
        format.chunk(choice, answer.gain(choice, delta))
    return (time.process_time() - begin) / rounds * 1e6


def in_process(model: str | None, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens/s of `LLM.generate`, and the CPU seconds it took."""
    from headway.engine.llm import LLM

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    prompts = [PROMPT.format(number) for number in range(streams)]
    with LLM(model, max_model_len=2048) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        begin, cpu = time.perf_counter(), time.process_time()
        llm.generate(prompts, params)
        return streams * tokens / (time.perf_counter() - begin), time.process_time() - cpu


class Served:
    """A server process and its engine.

    Args:
        limits: with a key that has limits of every kind, and a price for receipts.
    """

    def __init__(self, model: str | None, scripted: bool, limits: bool = False) -> None:
        self._head = f"authorization: Bearer {KEY}\r\nx-headway-receipt: 1\r\n" if limits else ""
        command = [sys.executable, str(ROOT / "tests/serve/mock_server.py"), "{}"]
        if not scripted:
            command = [sys.executable, "-m", "headway", "serve", *([model] if model else []), "--port", "0"]
            command += ["--max-model-len", "2048"]
        if limits:
            keys = Path(tempfile.mkdtemp()) / "keys"
            keys.write_text(f"{KEY}\n")
            command += ["--api-key-file", str(keys), "--price", "2.5", *LIMITS]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"http://[^/]*:(\d+)/v1", line)
            if found:
                self.port = int(found.group(1))
                break
        out = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout
        self.engine = int(out.split()[0])

    def post(self, body: dict[str, Any]) -> socket.socket:
        """Send a completion request; its answer is not read here."""
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + self._head
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def get(self, path: str) -> bytes:
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if self._head:
            asked.add_header("authorization", f"Bearer {KEY}")
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read()

    def streams(self, streams: int, tokens: int) -> tuple[float, int]:
        """Seconds until all streams have ended, and how many events they held."""
        body = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        begin = time.perf_counter()
        open_ones = [self.post({**body, "prompt": PROMPT.format(number)}) for number in range(streams)]
        events = 0
        with selectors.DefaultSelector() as selector:
            for connection in open_ones:
                selector.register(connection, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    piece = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    events += piece.count(b"data: ")
                    if not piece:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
        return time.perf_counter() - begin, events

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Somebody reads /v1/live meanwhile."""
        head = f"GET /v1/live HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n{self._head}\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(head.encode())

            def read() -> None:
                with suppress(OSError):
                    while connection.recv(1 << 16):
                        pass

            reader = threading.Thread(target=read)
            reader.start()
            yield
            connection.shutdown(socket.SHUT_RDWR)
            reader.join()

    def cost(self, streams: int, tokens: int) -> dict[str, float]:
        """Of a round of streams: CPU seconds of the processes, events, and tokens/s."""
        before = cpu_seconds(self.process.pid), cpu_seconds(self.engine), time.process_time()
        seconds, events = self.streams(streams, tokens)
        api, engine = cpu_seconds(self.process.pid) - before[0], cpu_seconds(self.engine) - before[1]
        return {
            "served_tokens_per_s": streams * tokens / seconds, "events": events, "api_cpu_s": api,
            "api_cpu_us_per_event": api / events * 1e6, "engine_cpu_s": engine,
            "client_cpu_s": time.process_time() - before[2], "wall_s": seconds,
        }  # fmt: skip

    def cost_of_live(self, streams: int, tokens: int, rounds: int) -> dict[str, float]:
        """Shares that a reader of /v1/live adds to the CPU time of both processes and takes of tokens/s: medians of
        pairs of rounds."""
        cpu, rate = [], []
        for number in range(rounds):
            found = {}
            for watched in (False, True) if number % 2 else (True, False):
                with self.watched() if watched else nullcontext():
                    found[watched] = self.cost(streams, tokens)
            spent = {which: one["api_cpu_s"] + one["engine_cpu_s"] for which, one in found.items()}
            cpu.append(spent[True] / spent[False] - 1)
            rate.append(1 - found[True]["served_tokens_per_s"] / found[False]["served_tokens_per_s"])
        return {"live_cost_in_cpu": median(cpu), "live_cost": median(rate)}

    def lag_under_large_prompts(self, streams: int, seconds: float = 10.0) -> dict[str, float]:
        """p99 bucket of the loop's lag and the slowest /health while streams run and two clients send texts of 600 kB:
        too long for the context, which is known only once they are tokenised."""
        waited = waited_ms(self.process.pid)
        before = parse(self.get("/metrics").decode(), 0)
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                connection = self.post({"prompt": WORDS * (600_000 // len(WORDS)), "max_tokens": 1})
                while connection.recv(1 << 16):
                    pass

        def stream() -> None:
            while not stop.is_set():
                self.streams(streams, 64)

        threads = [threading.Thread(target=work) for work in (send, send, stream)]
        for thread in threads:
            thread.start()
        slowest, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.monotonic()
            self.get("/health")
            slowest = max(slowest, time.monotonic() - begin)
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        after = parse(self.get("/metrics").decode(), 1)
        name = "headway:event_loop_lag_seconds"
        counts = {le: count - before.buckets[name][le] for le, count in after.buckets[name].items()}
        total = max(counts.values())
        p99 = min(le for le, count in counts.items() if count >= 0.99 * total)
        return {
            "loop_lag_p99_at_most_ms": p99 * 1000,
            "loop_lag_samples": total,
            "health_slowest_ms": slowest * 1000,
            "api_waited_ms": waited_ms(self.process.pid) - waited,
            "lag_seconds": seconds,
        }

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model")
    arguments.add_argument("--scripted", action="store_true")
    arguments.add_argument("--streams", type=int, default=32)
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--limits", action="store_true")
    arguments.add_argument("--live", type=int, nargs="?", const=5, default=0, help="rounds with and without")
    given = arguments.parse_args()
    report: dict[str, Any] = {"streams": given.streams, "tokens": given.tokens, "chunk_us": chunk_microseconds()}
    if not given.scripted:
        rate, cpu = in_process(given.model, given.streams, given.tokens)
        report |= {"in_process_tokens_per_s": rate, "in_process_cpu_s": cpu}
    server = Served(given.model, given.scripted, given.limits)
    try:
        server.streams(given.streams, 2)
        report |= server.cost(given.streams, given.tokens)
        if "in_process_tokens_per_s" in report:
            report["server_cost"] = 1 - report["served_tokens_per_s"] / report["in_process_tokens_per_s"]
            report["server_cost_in_cpu"] = (report["api_cpu_s"] + report["engine_cpu_s"]) / report[
                "in_process_cpu_s"
            ] - 1
        if given.live:
            report |= server.cost_of_live(given.streams, given.tokens, given.live)
        report |= server.lag_under_large_prompts(given.streams)
    finally:
        server.close()
    print(json.dumps({name: round(value, 3) for name, value in report.items()}, indent=1))


if __name__ == "__main__":
    main()
