"""The engine's side of the border: commands in, turns out, blocks back within one step of a cancel."""

from __future__ import annotations

import itertools
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from headway.core.errors import BadInput, EngineDead
from headway.core.events import Finished
from headway.core.request import SamplingParams
from headway.engine import ipc, process
from headway.engine.ipc import Channel, Ready, Status, Stop, Turn, make_folder
from headway.engine.messages import Cancel, Delta, LoadAdapter, Refusal, Submit
from headway.engine.process import EngineHost, EventTray, Loaded, cache_status
from tests.serve.scripted import engine


def submit(id: str, prompt: str, **params: int) -> Submit:
    return Submit(id=id, tokens=tuple(prompt.encode()), params=SamplingParams(**params))


@pytest.mark.parametrize("turns", [0, 1, 3, 30])
@pytest.mark.parametrize("n", [1, 3])
def test_blocks_are_back_within_one_step_of_a_cancel(turns: int, n: int) -> None:
    """Queued (behind two that fill the rows), mid-prefill (2,000 tokens take four steps), decoding."""
    loop = engine(max_rows=4)
    for id in ("a", "b", "c"):
        assert loop.submit(submit(id, "count" + " " * 2000, n=n)) is None
    for _ in range(turns):
        loop.turn()
    for id in ("a", "b", "c", "c", "unknown"):
        loop.cancel(Cancel(id))
    loop.turn()
    assert cache_status(loop.scheduler.cache).used == 0
    assert loop.idle


def send_first(channel: Channel, command: Submit) -> None:
    """As soon as the other end is connected."""
    while True:
        try:
            return channel.send(command)
        except EngineDead:
            time.sleep(0.01)


def test_a_host_answers_refuses_cancels_and_stops(tmp_path: Path) -> None:
    api, inner = Channel(tmp_path, api=True), Channel(tmp_path, api=False)
    tray = EventTray()
    loop = engine(tray.fold, max_rows=4)
    ready = Ready("scripted", 4096, 260, 4)
    host = EngineHost(inner, Loaded(ready, loop, tray, lambda: cache_status(loop.scheduler.cache), loop.close))
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    send_first(api, submit("long", "count" + "x" * 9999))
    refusal = api.receive()
    assert isinstance(refusal, Turn) and isinstance(refusal.outputs[0], Refusal)
    assert refusal.outputs[0].code == "context_length_exceeded"
    api.send(submit("a", "say:hi"))
    text, events = "", []
    while not any(isinstance(event, Finished) for event in events):
        turn = api.receive()
        assert isinstance(turn, Turn)
        text += "".join(output.text for output in turn.outputs if isinstance(output, Delta))
        events += turn.events
    assert text == "hi"
    assert [event.names for event in events if isinstance(event, Finished)] == [()], "names stay inside"
    api.send(submit("b", "count"))
    assert isinstance(api.receive(), Turn)
    api.send(Cancel("b"))
    while not any(isinstance(event, Finished) for event in turn.events if turn.events) or turn.status.used:
        turn = api.receive()
        assert isinstance(turn, Turn)
    api.send(Stop())
    thread.join(5)
    assert not thread.is_alive()
    api.close()
    inner.close()


def test_a_host_settles_until_it_is_asked_and_does_its_chores_when_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "QUIET_SECONDS", 0.02)
    api, inner = Channel(tmp_path, api=True), Channel(tmp_path, api=False)
    settled, done = threading.Event(), threading.Event()

    def settling() -> Iterator[int]:
        settled.set()
        yield from itertools.count()

    tray = EventTray()
    loop = engine(tray.fold, max_rows=4)
    ready = Ready("scripted", 4096, 260, 4)
    loaded = Loaded(ready, loop, tray, Status, loop.close, settling=settling(), chores=(done.set,))
    thread = threading.Thread(target=EngineHost(inner, loaded).run, daemon=True)
    thread.start()
    assert settled.wait(60) and not done.is_set()
    send_first(api, submit("a", "say:hi"))
    while not any(isinstance(event, Finished) for event in api.receive().events):  # type: ignore[union-attr]
        pass
    assert done.wait(60)
    api.send(Stop())
    thread.join(60)
    assert not thread.is_alive()
    api.close()
    inner.close()


def test_the_folder_is_private_and_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(BadInput, match="TMPDIR"):
        make_folder()
    assert not list(long.iterdir())


def test_sending_to_nobody_raises_and_never_blocks(tmp_path: Path) -> None:
    channel = Channel(tmp_path, api=True)
    with pytest.raises(EngineDead):
        channel.send(Stop())
    channel.close()


def test_a_message_above_the_cap_never_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_MESSAGE", 1000)
    api, inner = Channel(tmp_path, api=True), Channel(tmp_path, api=False)
    assert inner.poll(0.2) is False
    api.send(submit("large", "x" * 2000))
    assert inner.poll(0.5) is False
    api.close()
    inner.close()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa4Evil", b"cos\nsystem\n(S'true'\ntR.", b"\x80"])
def test_what_is_no_message_is_an_error(data: bytes, tmp_path: Path) -> None:
    channel = Channel(tmp_path, api=True)
    context = zmq.Context.instance()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(f"ipc://{tmp_path}/reports")
    stranger.send(data)
    with pytest.raises(msgspec.DecodeError):
        channel.receive()
    stranger.close()
    channel.close()


def test_a_report_survives_the_border() -> None:
    ready = Ready("m", 10, 20, 3, notes=("a: 1",), status=Status(1, 2, 3, 4))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=ipc.Report) == ready


@pytest.mark.parametrize("deadline", [float("inf"), float("nan"), -1.0, 1e300])
def test_a_deadline_that_is_none_is_refused(deadline: float) -> None:
    loop = engine()
    message = Submit(id="a", tokens=(1, 2), params=SamplingParams(), deadline=deadline)
    refused = loop.submit(message)
    assert refused is not None and refused.message.startswith("deadline: ") and loop.idle


class Queue:
    """A channel on which everything has come already."""

    def __init__(self, *commands: Submit | Stop) -> None:
        self._commands = list(commands)

    def take(self) -> Submit | Stop | None:
        return self._commands.pop(0) if self._commands else None

    receive = take


def test_between_two_steps_a_bounded_number_of_commands_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait while prompts are hashed."""
    monkeypatch.setattr(process, "MOST_COMMANDS", 3)
    monkeypatch.setattr(process, "MOST_TOKENS", 100)
    small = [submit(f"small{number}", "say:x") for number in range(5)]
    large = [submit(f"large{number}", "say:" + "x" * 60, n=2) for number in range(2)]
    loop = engine(max_rows=4)
    loaded = Loaded(Ready("scripted", 4096, 260, 4), loop, EventTray(), Status, loop.close)
    host = EngineHost(Queue(*small, *large, Stop()), loaded)  # type: ignore[arg-type]
    read = [len(list(host._commands(pause=False))) for _ in range(4)]
    assert read == [3, 3, 1, 1], "at most three, and none after a large one"


def test_whatever_loading_an_adapter_raises_is_told_to_who_asked_and_the_engine_goes_on() -> None:
    class Fragile:
        """An engine that trips over an adapter's file as nobody foresaw."""

        def load_adapter(self, name: str, path: Path, replace: bool) -> None:
            raise ZeroDivisionError("of a number in a file")

        def adapter_paths(self) -> dict[str, str]:
            return {}

    told: list[Any] = []
    loaded = Loaded(Ready("scripted", 4096, 260, 4), Fragile(), EventTray(), Status, lambda: None)  # type: ignore[arg-type]
    host = EngineHost(SimpleNamespace(send=told.append), loaded)  # type: ignore[arg-type]
    host._obey(LoadAdapter("load-1", "polite", "/nowhere"), [])
    (answer,) = told
    assert answer.problem == "lora: ZeroDivisionError: of a number in a file"
