"""The prefix cache on disk: what left memory, or the process, comes back; and what is wrong there is never served."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headway.cache.tier import Tier, TierKey
from headway.core.errors import BadInput
from headway.core.events import BlocksAwaited, BlocksLoaded, BlocksSaved, Event, EventLog, Preempted
from headway.core.request import SamplingParams
from headway.engine.event_file import EventWriter
from headway.engine.kv_files import BlockFiles, Damaged
from headway.engine.loop import EngineLoop
from headway.engine.messages import Cancel, Submit
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.roofline.fixed import FixedCosts
from headway.scheduling.invariants import check
from headway.simulate.replay import replay
from tests.engine.tiny import VOCAB, TinyModel, complete, drain, prompts, tokens_of

LARGE = 1 << 30
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=VOCAB)
PROMPT = tuple(range(30))  # 7 blocks of 4 tokens, and 2
needs_native = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


def _model(kind: str) -> TinyModel:
    return TinyModel(NativeBackend(1) if "native" in kind else None, window=9 if "window" in kind else None)


@pytest.fixture(scope="module", params=["reference", "window", pytest.param("native", marks=needs_native),
                                        pytest.param("native window", marks=needs_native)])  # fmt: skip
def model(request: pytest.FixtureRequest) -> TinyModel:
    return _model(request.param)


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return TinyModel()


class Engines:
    """Engines over one folder, one after another, each with what has happened in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self._open: list[EngineLoop] = []

    def __call__(self, tiny: TinyModel, limit: int = LARGE, identity: str = "this model", **options) -> EngineLoop:
        self.stop()
        files = BlockFiles(self.folder, identity, [tiny.backend.block_bytes(group, 4) for group in tiny.groups])
        self.tier = Tier(limit)
        files.fill(self.tier)
        self.events = []
        log = EventLog(self.events.append)
        self._open.append(tiny.loop(log=log, disk=(files, self.tier), **options))
        return self._open[-1]

    def stop(self) -> None:
        """Shut down whoever runs."""
        while self._open:
            self._open.pop().close()

    def of(self, kind: type) -> list:
        return [event for event in self.events if type(event) is kind]

    @property
    def loaded(self) -> int:
        return sum(len(event.blocks) for event in self.of(BlocksLoaded))

    def files(self) -> list[Path]:
        """Blocks on disk, the least recently used first."""
        return sorted(self.folder.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path / "kv")
    yield engines
    engines.stop()


def answer(loop: EngineLoop, prompt: tuple[int, ...] = PROMPT, **submit) -> tuple[list[int], list, int]:
    """Tokens, logprobs, and how many prompt tokens were cached."""
    assert loop.submit(Submit(id="it", tokens=prompt, params=GREEDY, **submit)) is None
    deltas = drain(loop)
    assert deltas[-1].finish is not None and deltas[-1].finish.reason == "length", deltas
    return tokens_of(deltas), [report for delta in deltas for report in delta.logprobs], deltas[0].cached


def settled(loop: EngineLoop) -> None:
    """All that is to be written is."""
    while loop._connector._waiting:  # type: ignore[union-attr]
        pass


def test_a_restarted_engine_answers_as_a_warm_one_to_the_bit(model: TinyModel, engines: Engines) -> None:
    loop = engines(model)
    cold = answer(loop)
    warm = answer(loop)
    assert (cold[2], warm[2]) == (0, 28)
    loop = engines(model)
    assert answer(loop) == warm
    assert engines.loaded and not any(event.failed for event in engines.of(BlocksLoaded))
    assert warm[0] == cold[0]
    if model.backend.deterministic:
        assert warm[1] == cold[1]


def test_what_memory_has_no_room_for_comes_back(model: TinyModel, engines: Engines) -> None:
    loop = engines(model, blocks=12)
    first = answer(loop)
    for start in (30, 31, 32):
        answer(loop, tuple(range(start, start + 30)))
    assert engines.of(BlocksSaved)
    assert answer(loop)[::2] == (first[0], 28) and engines.loaded


def test_only_what_goes_on_beyond_memory_is_read(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    loop = engines(tiny)
    answer(loop, PROMPT[:13])
    assert engines.loaded == 3
    answer(loop)
    assert engines.loaded == 7


def test_nothing_is_written_twice(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    engines.stop()
    before = {path: path.read_bytes() for path in engines.files()}
    inodes = {path.stat().st_ino for path in engines.files()}
    answer(engines(tiny))
    engines.stop()
    assert {path.stat().st_ino for path in engines.files()} == inodes
    assert {path: path.read_bytes() for path in engines.files()} == before


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a bit of the block": lambda path, other: _flip(path, -1),
    "a bit of the checksum": lambda path, other: _flip(path, 9),
    "a bit of the name": lambda path, other: _flip(path, 25),
    "a bit of the group": lambda path, other: _flip(path, 40),
    "another kind of file": lambda path, other: _flip(path, 0),
    "torn": lambda path, other: os.truncate(path, path.stat().st_size // 2),
    "torn, and zeros": lambda path, other: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path, other: os.truncate(path, 0),
    "too long": lambda path, other: os.truncate(path, path.stat().st_size + 1),
    "another block": lambda path, other: path.write_bytes(other.read_bytes()),
    "gone": lambda path, other: path.unlink(),
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
    "a folder with something in it": lambda path, other: (path.unlink(), (path / "somebody's").mkdir(parents=True)),
}


@pytest.mark.parametrize("while_running", [False, True], ids=["before the start", "while it runs"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_block_is_computed_and_never_served(
    tiny: TinyModel, engines: Engines, damage: Callable[[Path, Path], object], while_running: bool
) -> None:
    loop = engines(tiny)
    cold = answer(loop)
    third = engines._open[0].scheduler.cache.hasher.chain(loop.scheduler.cache.hasher.root("", ""), PROMPT)[2]
    engines.stop()
    (path,) = engines.folder.glob(f"*/{third.hex()}-0.kv")
    other = next(file for file in engines.files() if file != path)
    if not while_running:
        damage(path, other)
    loop = engines(tiny)
    if while_running:
        damage(path, other)
    tokens, _, cached = answer(loop)
    assert tokens == cold[0] and cached == 8  # the blocks before it
    assert TierKey(third, 0) not in engines.tier or not while_running
    assert answer(loop)[2] == 28
    engines.stop()
    if damage is DAMAGES["a folder with something in it"]:
        assert (path / "somebody's").is_dir()  # what is not ours stays
    else:
        assert answer(engines(tiny))[2] == 28  # it was written anew


def test_what_a_crash_left_is_cleared_away(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    engines.stop()
    torn = engines.files()[0].with_name(".partial-x")
    torn.write_bytes(b"half")
    engines(tiny)
    assert not torn.exists()


@pytest.mark.parametrize("blocks", [0, 1, 5, 12])
def test_the_folder_never_holds_more_than_it_may(tiny: TinyModel, engines: Engines, blocks: int) -> None:
    loop = engines(tiny, blocks=24)
    answer(loop)
    engines.stop()
    size = engines.files()[0].stat().st_size
    limit = blocks * size + size // 2
    loop = engines(tiny, limit=limit, blocks=24)
    for start in range(20):
        answer(loop, tuple(range(start, start + 30)))
        settled(loop)
        assert engines.tier.bytes <= limit
    engines.stop()
    assert sum(path.stat().st_size for path in engines.files()) <= limit
    assert len(engines.files()) == blocks


def test_of_too_much_the_latest_used_is_kept(tiny: TinyModel, engines: Engines) -> None:
    loop = engines(tiny)
    answer(loop, tuple(range(5, 35)))
    answer(loop)
    engines.stop()
    size = engines.files()[0].stat().st_size
    loop = engines(tiny, limit=7 * size)
    assert answer(loop)[2] == 28 and answer(loop, tuple(range(5, 35)))[2] == 0
    engines.stop()
    assert len(engines.files()) == 7


def test_tenants_and_adapters_share_nothing(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny), tenant="one")
    loop = engines(tiny)
    assert answer(loop, tenant="two")[2] == 0 and answer(loop)[2] == 0 and not engines.loaded
    assert answer(loop, tenant="one")[2] == 28
    hasher = loop.scheduler.cache.hasher
    assert (
        len({hasher.root("one", ""), hasher.root("", "one"), hasher.root("one", "a@1"), hasher.root("one", "a@2")}) == 4
    )


def test_names_mean_nothing_under_another_key(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    engines.stop()
    (engines.folder / "key").unlink()
    loop = engines(tiny)
    assert answer(loop)[2] == 0 and not engines.loaded


def test_another_model_begins_anew_and_takes_the_place_of_the_first(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    engines.stop()
    size = engines.files()[0].stat().st_size
    loop = engines(tiny, identity="another model", limit=10 * size)
    assert answer(loop)[2] == 0 and not engines.loaded
    assert len(engines.files()) == 8  # both are known, and there is room for one of them
    engines.stop()
    assert len(list(engines.folder.iterdir())) == 2 and len(engines.files()) == 8


def test_another_models_blocks_stay_while_there_is_room(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    answer(engines(tiny, identity="another model"))
    assert answer(engines(tiny))[2] == 28


def test_engines_of_a_model_over_one_folder_keep_apart(tiny: TinyModel, engines: Engines) -> None:
    """As replicas do. Each has what one of them left."""
    sizes = [tiny.backend.block_bytes(group, 4) for group in tiny.groups]
    answer(engines(tiny))
    second = BlockFiles(engines.folder, "this model", sizes)
    first_tier, second_tier = engines.tier, Tier(LARGE)
    second.fill(second_tier)
    assert second_tier.bytes == 0  # the other's is in use, and counted by it
    second.write(TierKey(b"n" * 16, 0), np.zeros(sizes[0], np.uint8))
    engines.stop()
    assert len({path.parent for path in engines.files()}) == 2 and first_tier.blocks == 8
    third = BlockFiles(engines.folder, "this model", sizes)
    third_tier = Tier(LARGE)
    third.fill(third_tier)
    assert third_tier.blocks == 8 and third_tier.bytes == first_tier.bytes
    second.close()
    third.close()


def test_only_the_owner_can_read_key_and_blocks(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    engines.stop()
    for path in (engines.folder, *engines.folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("spoil", [lambda key: key.chmod(0o644), lambda key: key.write_bytes(b"short")])
def test_a_key_that_others_read_or_that_is_none_is_refused(
    tiny: TinyModel, engines: Engines, spoil: Callable[[Path], object]
) -> None:
    engines(tiny)
    engines.stop()
    spoil(engines.folder / "key")
    with pytest.raises(BadInput, match=r"--kv-disk: .*key is not 32 bytes of a key that only its owner can read"):
        engines(tiny)


def test_a_folder_that_is_a_file_is_refused(tiny: TinyModel, engines: Engines) -> None:
    engines.folder.write_text("")
    with pytest.raises(BadInput, match=r"--kv-disk: .*kv: File exists"):
        engines(tiny)


def test_a_full_disk_keeps_what_it_holds_and_the_engine_serves_on(
    tiny: TinyModel, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, room = BlockFiles.write, [5]

    def fill(files: BlockFiles, key: TierKey, data: np.ndarray) -> None:
        if len(engines.files()) >= room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(files, key, data)

    monkeypatch.setattr(BlockFiles, "write", fill)
    loop = engines(tiny, blocks=24)
    answers = []
    for start in [*range(12), *range(12)]:
        answers.append(answer(loop, tuple(range(start, start + 30)))[0])
        settled(loop)
    assert answers[:12] == answers[12:]
    assert sum(event.failed for event in engines.of(BlocksSaved)) > 0
    assert 0 < len(engines.files()) <= 5 and "the disk is full" in caplog.text
    room[0] = 100  # the files of the tier are still the bound: others may need the rest
    answer(loop, tuple(range(20, 50)))
    assert len(engines.files()) <= 6


def test_a_disk_that_fails_is_left_alone(
    tiny: TinyModel, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def fail(files: BlockFiles, key: TierKey, data: np.ndarray) -> None:
        tries.append(key)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(BlockFiles, "write", fail)
    loop = engines(tiny, blocks=12)
    first = answer(loop)[0]
    for start in (30, 31, 32, 33):
        answer(loop, tuple(range(start, start + 30)))
        settled(loop)
    seen = len(tries)
    assert seen and caplog.text.count("are not kept any more") == 1
    assert answer(loop)[0] == first and len(tries) == seen


def test_an_interrupted_write_leaves_nothing(
    tiny: TinyModel, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    answer(engines(tiny))
    engines.stop()
    assert [path.name for path in engines.folder.glob("*/*")] == ["lock"]


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, "model", [16, 24])
    key, data = TierKey(b"n" * 16, 1), np.arange(24, dtype=np.uint8)
    files.write(key, data)
    assert files.read(key).tobytes() == data.tobytes()
    with pytest.raises(FileNotFoundError):
        files.read(TierKey(b"n" * 16, 0))
    (path,) = tmp_path.glob("*/*.kv")
    path.rename(path.with_name(path.name.replace("-1.kv", "-0.kv")))
    with pytest.raises(Damaged):
        files.read(TierKey(b"n" * 16, 0))
    files.close()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_who_leaves_while_blocks_are_loaded_leaves_nothing(
    tiny: TinyModel, engines: Engines, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("headway.engine.kv_disk.PIECE", 1)  # a block at a time
    monkeypatch.setattr("headway.engine.kv_disk.ALONE", 0.0)
    answer(engines(tiny))
    loop = engines(tiny)
    loop.submit(Submit(id="gone", tokens=PROMPT, params=GREEDY, deadline=1.0 if how == "deadline" else None))
    loop.turn()
    loop.turn()
    assert [len(event.blocks) for event in engines.of(BlocksLoaded)] == [1, 1]
    check(loop.scheduler)
    if how == "cancel":
        loop.cancel(Cancel("gone"))
    else:
        loop.clock.advance_to(2 * 10**12)  # type: ignore[attr-defined]
    deltas = loop.turn() + drain(loop)
    assert [delta.finish and delta.finish.reason for delta in deltas] == ["abort"] and engines.loaded < 7
    check(loop.scheduler)
    assert answer(loop)[2] == 28 and engines.loaded == 7


def test_others_stream_while_blocks_are_loaded(
    tiny: TinyModel, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.engine.kv_disk.PIECE", 1)
    monkeypatch.setattr("headway.engine.kv_disk.BESIDE", 0.0)
    answer(engines(tiny))
    loop = engines(tiny)
    loop.submit(Submit(id="streams", tokens=(40, 41), params=SamplingParams(temperature=0, max_tokens=20)))
    loop.turn()
    loop.submit(Submit(id="loads", tokens=PROMPT, params=GREEDY))
    for loaded in range(1, 7):
        assert [delta.id for delta in loop.turn()] == ["streams"] and engines.loaded == loaded
    assert {delta.id for delta in loop.turn()} == {"streams", "loads"}


def test_prompts_that_come_together_are_read_once(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    loop = engines(tiny)
    answers = complete(loop, [PROMPT] * 4, GREEDY)
    assert len({tuple(tokens_of(deltas)) for deltas in answers.values()}) == 1
    assert {deltas[0].cached for deltas in answers.values()} == {28} and engines.loaded == 7


def test_choices_share_what_was_loaded(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    loop = engines(tiny)
    loop.submit(Submit(id="n", tokens=PROMPT, params=SamplingParams(temperature=1.0, seed=1, max_tokens=4, n=3)))
    assert sum(delta.finish is not None for delta in drain(loop)) == 3 and engines.loaded == 7
    check(loop.scheduler)


def test_logprobs_of_the_prompt_need_all_of_it(tiny: TinyModel, engines: Engines) -> None:
    answer(engines(tiny))
    loop = engines(tiny)
    loop.submit(Submit(id="p", tokens=PROMPT, params=SamplingParams(max_tokens=1, prompt_logprobs=1)))
    drain(loop)
    assert not engines.of(BlocksAwaited)


@pytest.mark.parametrize(("token", "loads"), [(1.0, True), (1e-12, False)])
def test_what_is_computed_sooner_is_not_loaded(tiny: TinyModel, engines: Engines, token: float, loads: bool) -> None:
    answer(engines(tiny))
    loop = engines(tiny, model=FixedCosts(token=token))
    answer(loop)
    assert bool(engines.loaded) == loads


@pytest.mark.parametrize("kind", ["reference", "window"])
def test_in_any_traffic_the_laws_hold_and_answers_are_the_same(kind: str, engines: Engines, tmp_path: Path) -> None:
    """Pools so small that blocks come and go all the time, rows are preempted, some leave; then the recording of it is
    replayed."""
    model, rng = _model(kind), np.random.default_rng(3)
    params = SamplingParams(temperature=0, max_tokens=8)
    traffic = [prompts(60, seed=2)[int(number)] for number in rng.integers(0, 60, 150)]
    alone = model.loop(max_rows=1)
    expected = [tokens_of(deltas) for deltas in complete(alone, traffic, params).values()]
    loop = engines(model, blocks=36, max_rows=6, limit=90 * 600)
    answers: dict[str, list[int]] = {}
    with EventWriter(tmp_path / "events", loop.scheduler.header()) as writer:
        loop.scheduler._log.subscribe(writer)  # type: ignore[union-attr]
        waiting = list(enumerate(traffic))
        while waiting or not loop.idle:
            for number, tokens in waiting[: int(rng.integers(0, 3))]:
                assert loop.submit(Submit(id=str(number), tokens=tokens, params=params)) is None
                waiting.pop(0)
            if rng.random() < 0.02 and loop.scheduler.state.rows:
                loop.cancel(Cancel(next(iter(loop.scheduler.state.rows))))
            for delta in loop.turn():
                answers.setdefault(delta.id, []).extend(delta.tokens)
            check(loop.scheduler)
    assert engines.loaded > 20 and engines.of(Preempted) and engines.of(BlocksSaved)
    for id, tokens in answers.items():
        assert tokens == expected[int(id)][: len(tokens)], id
    outcome = replay(tmp_path / "events")
    assert outcome.difference is None and outcome.steps > 50
