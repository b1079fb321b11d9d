"""`headway serve` and `headway top` as commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.bench.server import fold_events
from headway.core.events import Finished
from headway.engine.event_file import EventFileError, read_events, read_header
from headway.simulate.replay import Recording
from tests.serve.conftest import Server, write_tiny_checkpoint


def headway(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headway", *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached by others"),
        (["--api-key-file", "/nowhere"], "--api-key-file: cannot read"),
        (["--port", "99999"], "--port: 99999 is not an integer from 0 to 65535"),
        (["--max-queued", "0"], "--max-queued: 0 is not"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout: -1"),
        (["--ssl-certfile", "cert.pem"], "--ssl-certfile: no such option; TLS is a proxy's work, see docs/deploy.md"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    write_tiny_checkpoint(tmp_path)
    result = headway("serve", str(tmp_path), *arguments)
    assert result.returncode == 2
    assert sentence in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_port_in_use_and_a_model_that_is_none(server: Server, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    result = headway("serve", str(tmp_path), "--port", str(server.port))
    assert result.returncode == 2 and "cannot listen" in result.stderr
    result = headway("serve", str(tmp_path / "config.json"))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    result = headway("serve", str(tmp_path), "--port", "0", "--kv-cache-gib", "1e9")
    assert result.returncode == 2 and result.stdout == ""
    assert re.search(r"^headway serve: --kv-cache-gib: .*does not fit", result.stderr, re.MULTILINE)


@pytest.mark.parametrize("chats", [True, False])
def test_the_printed_command_asks_the_server_something(tmp_path: Path, chats: bool) -> None:
    """Reported t2-009."""
    write_tiny_checkpoint(tmp_path)
    if not chats:
        (tmp_path / "tokenizer_config.json").write_text("{}")
    command = [sys.executable, "-m", "headway", "serve", str(tmp_path), "--port", "0"]
    server = Server(command=command)
    try:
        assert server.process.stdout is not None
        lines = [server.process.stdout.readline() for _ in range(5 if chats else 6)]
        rest = "".join(lines)
        assert ("has no chat template" in rest) is not chats
        assert server.lines and max(map(len, [*server.lines, *lines])) <= 101  # memory, step times: paragraphs
        curl = rest[rest.index("try it: ") + len("try it: ") :]
        answer = subprocess.run(["sh", "-c", curl.replace("curl", "curl -s")], capture_output=True, text=True).stdout
        assert json.loads(answer)["choices"][0]["finish_reason"] in ("stop", "length")
    finally:
        server.process.terminate()
        server.process.wait()


def test_top_prints_a_reading(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "count", "max_tokens": 20})
    result = headway("top", "--url", server.url, "--once", "--interval", "0.1")
    assert result.returncode == 0
    for row in ("requests .* 0 running, 0 waiting", r"tokens/s", r"KV cache +\[\.{30}\] 0", "TTFT", "between tokens"):
        assert re.search(row, result.stdout), result.stdout
    result = headway("top", "--url", "http://127.0.0.1:1", "--once")
    assert result.returncode == 1 and "cannot reach" in result.stderr


def test_top_without_a_terminal_prints_one_reading_after_the_other(server: Server) -> None:
    command = [sys.executable, "-m", "headway", "top", "--url", server.url, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        titles = (line for line in process.stdout if "last" in line)
        assert [next(titles) for _ in range(3)]
        process.terminate()


def test_the_event_log_of_a_server_is_complete(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    log = tmp_path / "events"
    command = [sys.executable, "-m", "headway", "serve", str(tmp_path), "--port", "0", "--event-log", str(log)]
    server = Server(command=[*command, "--kv-cache-gib", "0.01"])
    server.post("/v1/completions", {"prompt": "the fox", "max_tokens": 5})
    assert server.stop() == 0
    assert any(isinstance(event, Finished) for event in read_events(log))


def test_a_disk_that_fills_costs_the_event_log_and_not_the_server(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    serve = f"{sys.executable} -m headway serve {tmp_path} --port 0 --kv-cache-gib 0.01 --event-log {tmp_path / 'log'}"
    server = Server(command=["sh", "-c", f"ulimit -f 16; exec {serve}"])
    for _ in range(100):
        response = server.post("/v1/completions", {"prompt": "the fox", "max_tokens": 50, "ignore_eos": True})
        assert response.status_code == 200
        if server.metrics()["headway:event_log_lost_total"] > 100:
            break
    else:
        raise AssertionError("the log never filled")
    assert server.stop() == 0
    assert server.process.stdout is not None
    output = server.process.stdout.read()
    assert output.count("the event log cannot be written: File too large") == 1
    assert "events were not written" in output
    assert list(read_events(tmp_path / "log")), "what is there ends with a whole step"


def test_a_large_event_log_begins_anew_between_requests(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "headway", "serve", str(tmp_path), "--port", "0", "--kv-cache-gib", "0.01"]
    server = Server(command=[*command, "--event-log", str(log), "--event-log-mib", "0.01"])
    for number in range(6):  # some 5 kB each: less than the log may hold, whatever the digits of its times
        server.post("/v1/completions", {"prompt": f"the fox {number}", "max_tokens": 8, "ignore_eos": True})
    assert server.stop() == 0
    old = list(read_events(tmp_path / "log.1"))
    assert sum(isinstance(event, Finished) for event in old) >= 1
    assert read_header(log).step > 0 and not read_header(log).midway


def test_an_event_log_is_bounded_among_requests_too(tmp_path: Path) -> None:
    """One request after the other is begun before the last has ended, so that there is never none."""
    write_tiny_checkpoint(tmp_path)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "headway", "serve", str(tmp_path), "--port", "0", "--kv-cache-gib", "0.01"]
    server = Server(command=[*command, "--event-log", str(log), "--event-log-mib", "0.02"])
    body = {"prompt": "the fox", "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        assert all(
            answer.status_code == 200 for answer in pool.map(lambda _: server.post("/v1/completions", body), range(6))
        )
    assert server.stop() == 0
    assert log.stat().st_size < 3 * 0.02 * 2**20 and (tmp_path / "log.1").stat().st_size < 3 * 0.02 * 2**20
    midway = next(path for path in (log, tmp_path / "log.1") if read_header(path).midway)
    assert read_header(midway).step > 0
    assert fold_events(read_events(midway)) is not None, "what it tells can be used"
    with pytest.raises(EventFileError, match="in the middle of requests"):
        Recording(midway)
