"""Blocks from one engine to another: the answer is that of one engine, whatever happens on the way."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from headway.core.errors import BadInput
from headway.core.events import BlocksLoaded, BlocksSent, Event, EventLog, Finished
from headway.core.request import SamplingParams
from headway.engine.loop import EngineLoop
from headway.engine.messages import Cancel, Delta, Refusal, Submit
from headway.engine.transfer import take
from headway.engine.transfer.outbox import Outbox
from headway.engine.transfer.peers import PeerConnector, PeerSetup
from headway.engine.transfer.ticket import Way, read, signed
from headway.engine.transfer.wire import Broken, FrameKind, Wire, greet
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.scheduling.budget import Budget
from headway.scheduling.invariants import check
from tests.engine.tiny import VOCAB, TinyModel, tokens_of

SECRET = b"a secret of the pool"
LAYOUT = b"layout".ljust(16)
PROMPT = tuple(range(61))  # 15 blocks of 4 tokens, and 1
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=6, logprobs=VOCAB)
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=VOCAB)
needs_native = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
Both = tuple[EngineLoop, EngineLoop]


def _model(kind: str) -> TinyModel:
    return TinyModel(NativeBackend(1) if "native" in kind else None, window=9 if "window" in kind else None)


@pytest.fixture(scope="module", params=["reference", "window", pytest.param("native", marks=needs_native),
                                        pytest.param("native window", marks=needs_native)])  # fmt: skip
def models(request: pytest.FixtureRequest) -> tuple[TinyModel, TinyModel]:
    return _model(request.param), _model(request.param)


@pytest.fixture(scope="module")
def tiny() -> tuple[TinyModel, TinyModel]:
    return TinyModel(), TinyModel()


class Pools:
    """A prefill engine and a decode engine, and what has happened in each."""

    def __init__(self) -> None:
        self._open: list[EngineLoop] = []
        self.events: tuple[list[Event], list[Event]] = ([], [])

    def __call__(
        self, models: tuple[TinyModel, TinyModel], outbox: Outbox | None = None, layout: bytes = LAYOUT,
        secret: bytes = SECRET, **options,
    ) -> Both:  # fmt: skip
        self.stop()
        self.events = [], []
        loops = []
        for index, model in enumerate(models):
            sizes = [model.backend.block_bytes(group, 4) for group in model.groups]
            setup = PeerSetup(SECRET, LAYOUT, sizes, pulls=index == 1)
            if index == 0:
                setup = replace(setup, listen=("127.0.0.1", 0), outbox=outbox or Outbox())
            else:
                setup = replace(setup, layout=layout, secret=secret)
            loops.append(model.loop(log=EventLog(self.events[index].append), peers=setup, **options))
        self._open += loops
        return loops[0], loops[1]

    def stop(self) -> None:
        while self._open:
            self._open.pop().close()

    def of(self, index: int, kind: type) -> list:
        return [event for event in self.events[index] if type(event) is kind]

    @property
    def loaded(self) -> int:
        return sum(len(event.blocks) for event in self.of(1, BlocksLoaded))

    @property
    def recomputed(self) -> int:
        return sum(event.recomputed for event in self.of(1, BlocksLoaded))


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.stop()


def peers(loop: EngineLoop) -> PeerConnector:
    assert isinstance(loop._connector, PeerConnector)
    return loop._connector


def begin(loops: Both, tokens: tuple[int, ...] = PROMPT, params: SamplingParams = GREEDY, id: str = "it",
          source: str | None = None, **submit) -> None:  # fmt: skip
    """What a router sends to both."""
    ticket = secrets.token_bytes(16)
    source = peers(loops[0]).address if source is None else source
    for loop, way in zip(loops, (Way(ticket), Way(ticket, source)), strict=True):
        header = signed(way, peers(loop)._setup.secret)
        refused = loop.submit(Submit(id=id, tokens=tokens, params=params, transfer=header, **submit))
        assert refused is None, refused


def finish(*loops: EngineLoop) -> list[list[Delta]]:
    """Turn all of them until nothing is left to do -> their deltas."""
    deltas: list[list[Delta]] = [[] for _ in loops]
    while not all(loop.idle for loop in loops):
        for loop, own in zip(loops, deltas, strict=True):
            if not loop.idle:
                own += loop.turn()
                check(loop.scheduler)
    return deltas


def until(true: Callable[[], bool]) -> None:
    """Other threads have come so far."""
    while not true():
        threading.Event().wait(0.001)


def alone(model: TinyModel, tokens: tuple[int, ...], params: SamplingParams, **options) -> tuple[list, list]:
    loop = model.loop(**options)
    assert loop.submit(Submit(id="it", tokens=tokens, params=params)) is None
    (deltas,) = finish(loop)
    return told(deltas)


def told(deltas: list[Delta]) -> tuple[list, list]:
    return tokens_of(deltas), [report for delta in deltas for report in delta.logprobs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("budget", [Budget(), Budget(tokens=8)], ids=["whole", "chunked"])
def test_two_engines_answer_as_one(models, pools: Pools, params: SamplingParams, budget: Budget) -> None:
    expected = alone(models[0], PROMPT, params, budget=budget)
    loops = pools(models, budget=budget)
    begin(loops, params=params)
    prefill, decode = finish(*loops)
    assert tokens_of(prefill)[:1] == expected[0][:1] and len(tokens_of(prefill)) == 1
    assert tokens_of(decode) == expected[0]
    if models[0].backend.deterministic:
        assert told(decode) == expected
    assert decode[0].cached == 60 and pools.recomputed == 0
    assert pools.of(0, BlocksSent) == [] or pools.of(0, BlocksSent)[0].problem == ""
    assert len(peers(loops[0])._outbox) == 0 and peers(loops[0])._outbox.held == 0


def test_only_what_the_other_lacks_is_sent(tiny, pools: Pools) -> None:
    loops = pools(tiny)
    begin(loops, PROMPT[:30])
    finish(*loops)
    assert pools.loaded == 7
    begin(loops)
    _, decode = finish(*loops)
    assert pools.loaded == 15 and decode[0].cached == 60
    begin(loops)  # all is there
    _, decode = finish(*loops)
    assert pools.loaded == 15 and decode[0].cached == 60 and len(decode) == 6


def test_blocks_go_while_later_chunks_are_computed(tiny, pools: Pools) -> None:
    prefill, decode = loops = pools(tiny, budget=Budget(tokens=4))
    begin(loops)
    while not pools.loaded:
        if prefill.scheduler.state.rows["it"].request.computed < 40:
            prefill.turn()
        decode.turn()
    assert prefill.scheduler.state.rows["it"].request.computed <= 40
    assert finish(*loops)[1][0].cached == 60


def test_choices_share_what_has_come(tiny, pools: Pools) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=4, n=3)
    loops = pools(tiny)
    begin(loops, params=params)
    decode = finish(*loops)[1]
    one = TinyModel().loop()
    one.submit(Submit(id="it", tokens=PROMPT, params=params))
    expected = finish(one)[0]
    for choice in range(3):
        own = [delta for delta in decode if delta.choice == choice]
        assert tokens_of(own) == tokens_of([delta for delta in expected if delta.choice == choice])


def test_through_shared_memory_and_through_the_socket(tiny, pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, shared = [], []
    pulls = []
    own = take.Pull.__init__

    def noting(self, *args, **kwargs) -> None:
        pulls.append(self)
        own(self, *args, **kwargs)

    monkeypatch.setattr(take.Pull, "__init__", noting)
    for loopback in (take.LOOPBACK, ()):
        monkeypatch.setattr(take, "LOOPBACK", loopback)
        loops = pools(tiny)
        begin(loops)
        answers.append(told(finish(*loops)[1]))
        shared.append(pulls[-1].shared)
        assert pools.recomputed == 0 and pools.loaded == 15
    assert answers[0] == answers[1] and shared == [True, False]


def test_tenants_get_nothing_of_each_other(tiny, pools: Pools) -> None:
    prefill, decode = loops = pools(tiny)
    ticket = secrets.token_bytes(16)
    source = peers(prefill).address
    for loop, way, tenant in ((prefill, Way(ticket), "one"), (decode, Way(ticket, source), "other")):
        header = signed(way, SECRET)
        loop.submit(Submit(id="it", tokens=PROMPT, params=GREEDY, transfer=header, tenant=tenant))
    assert told(finish(*loops)[1]) == alone(TinyModel(), PROMPT, GREEDY)
    assert pools.loaded == 0 and pools.recomputed == 60


# What goes wrong: the answer is the same, computed on the decode engine


def _nobody_there(loops: Both) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        source = f"127.0.0.1:{closed.getsockname()[1]}"
    begin(loops, source=source)


def _no_request_with_the_ticket(loops: Both) -> None:
    header = signed(Way(secrets.token_bytes(16), peers(loops[0]).address), SECRET)
    loops[1].submit(Submit(id="it", tokens=PROMPT, params=GREEDY, transfer=header))


def _prefill_cancelled(loops: Both) -> None:
    begin(loops)
    loops[0].turn()
    loops[0].cancel(Cancel("it"))


def _prefill_gone(loops: Both) -> None:
    begin(loops)
    loops[0].turn()
    loops[0].cancel(Cancel("it"))
    peers(loops[0])._giver.close()  # type: ignore[union-attr]


def _evicted_for_others(loops: Both) -> None:
    begin(loops)
    peers(loops[0])._outbox._most = 1


@pytest.mark.parametrize(
    "failing", [_nobody_there, _no_request_with_the_ticket, _prefill_cancelled, _prefill_gone, _evicted_for_others]
)
def test_a_failed_transfer_is_computed_anew(
    tiny, pools: Pools, failing: Callable[[Both], None], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("headway.engine.transfer.give.OPEN_SECONDS", 0.05)
    expected = alone(TinyModel(), PROMPT, GREEDY, budget=Budget(tokens=8))
    loops = pools(tiny, Outbox(lease=1.0), budget=Budget(tokens=8))
    failing(loops)
    assert told(finish(*loops)[1]) == expected
    last = pools.of(1, BlocksLoaded)[-1]
    assert last.failed and last.last and last.recomputed == 60 - 4 * pools.loaded > 0
    outbox = peers(loops[0])._outbox
    until(lambda: outbox.expire() or not len(outbox))  # at the end of the lease, if nobody has come for it


@pytest.mark.parametrize("other", [{"layout": b"other".ljust(16)}, {"secret": b"another secret of its own"}])
def test_strangers_and_other_models_get_nothing(tiny, pools: Pools, other: dict[str, bytes]) -> None:
    expected = alone(TinyModel(), PROMPT, GREEDY)
    loops = pools(tiny, **other)
    begin(loops)
    assert told(finish(*loops)[1]) == expected
    assert pools.loaded == 0 and pools.recomputed == 60


def test_a_late_transfer_is_given_up(tiny, pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.engine.transfer.peers.UNKNOWN_PATIENCE", 0.1)
    expected = alone(TinyModel(), PROMPT, GREEDY)
    prefill, decode = loops = pools(tiny)
    begin(loops)  # and the prefill engine does not turn
    (deltas,) = finish(decode)
    assert told(deltas) == expected and pools.recomputed == 60
    until(lambda: bool(peers(prefill)._outbox._orphans))
    finish(prefill)
    assert pools.of(0, Finished)[0].reason == "abort"  # nobody wants it any more


def test_who_is_cancelled_frees_both(tiny, pools: Pools) -> None:
    prefill, decode = loops = pools(tiny, budget=Budget(tokens=4))
    begin(loops)
    prefill.turn()
    decode.turn()
    decode.cancel(Cancel("it"))
    decode.turn()
    until(lambda: bool(peers(prefill)._outbox._orphans))
    finish(prefill)
    assert pools.of(0, Finished)[0].reason == "abort" and pools.of(1, Finished)[0].reason == "abort"
    assert not peers(prefill)._sending and not peers(decode)._pulls
    for loop in loops:
        assert loop.scheduler.cache.pools[0].available == loop.scheduler.cache.pools[0].size


def test_a_lease_that_nobody_renews_runs_out(tiny, pools: Pools) -> None:
    outbox = Outbox(lease=0.01)
    prefill, _ = pools(tiny, outbox)
    prefill.submit(Submit(id="it", tokens=PROMPT, params=GREEDY, transfer=signed(Way(b"t" * 16), SECRET)))
    finish(prefill)
    until(lambda: not len(outbox))  # the door looks after it
    assert outbox.held == 0


@pytest.mark.parametrize("place", [0, 5, 6, 25, 60, -1])
def test_a_changed_frame_ends_the_connection(place: int) -> None:
    ours, theirs = socket.socketpair()
    wires: list[Wire] = []
    thread = threading.Thread(target=lambda: wires.append(greet(theirs, SECRET, LAYOUT, False, 4096)))
    thread.start()
    asking = greet(ours, SECRET, LAYOUT, True, 4096)
    thread.join()
    middle, end = socket.socketpair()
    asking._sock = middle
    asking.send(FrameKind.ASK, b"x" * 60)
    middle.close()
    frame = bytearray(end.recv(4096))
    frame[place] ^= 1
    ours.sendall(frame)
    ours.close()
    with pytest.raises(Broken):
        wires[0].receive()
    theirs.close()


def test_a_length_is_a_claim() -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(ours, b"k" * 32, True, 1000)
    theirs.sendall(b"\x03" + (0xFFFFFFFF).to_bytes(4, "little") + b"s" * 16)
    with pytest.raises(Broken, match="none that is expected"):
        wire.receive()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "header",
    ["", "send", "send " + "a" * 32, "pull " + "a" * 32 + " host:1 " + "b" * 32, "push " + "a" * 32 + " x",
     signed(Way(b"t" * 16), b"some other secret")],
)  # fmt: skip
def test_what_is_not_signed_is_refused(tiny, pools: Pools, header: str) -> None:
    with pytest.raises(BadInput, match="x-headway-kv"):
        read(header, SECRET)
    if header:
        answer = pools(tiny)[1].submit(Submit(id="it", tokens=PROMPT, params=GREEDY, transfer=header))
        assert isinstance(answer, Refusal) and answer.status == 400


def test_who_is_in_no_pool_says_so(tiny) -> None:
    answer = TinyModel().loop().submit(Submit(id="it", tokens=PROMPT, params=GREEDY, transfer="send x y"))
    assert isinstance(answer, Refusal) and "in no pool" in answer.message


@pytest.mark.parametrize("way", [Way(b"t" * 16), Way(b"t" * 16, "10.0.0.1:4711"), Way(b"t" * 16, "[::1]:1")])
def test_what_a_router_writes_is_read(way: Way) -> None:
    assert read(signed(way, SECRET), SECRET) == way
