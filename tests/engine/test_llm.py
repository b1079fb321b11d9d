"""The Python API under rough handling: Ctrl-C, several threads, abandoned requests, failures, and wrong arguments."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.core.errors import BadInput, EngineDead, HeadwayError, Rejected
from headway.engine.event_file import EventFileError, EventWriter
from headway.engine.interrupt import uninterrupted

FACT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=3)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SMALL: dict[str, Any] = {"max_model_len": 512, "max_rows": 4, "kv_cache_gib": 0.1}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SMALL) as llm:
        yield llm


def assert_healthy(llm: LLM) -> None:
    """It answers, and when all is done nobody owns a block."""
    assert llm.generate(FACT, GREEDY)[0].text.startswith(" Paris")
    while not llm.engine.loop.idle:
        llm.turn()
    pool = llm.engine.loop.scheduler.cache.pools[0]
    assert pool.available == pool.size


def during(llm: LLM, monkeypatch: pytest.MonkeyPatch, what: str, do: Callable[[], None]) -> None:
    """Call `do` whenever the executor begins a step ("submit") or the scheduler takes one in ("commit")."""
    owner: Any = llm.engine.loop.executor if what == "submit" else llm.engine.loop.scheduler
    plain = getattr(owner, what)

    def wrapped(*args: Any) -> Any:
        do()
        return plain(*args)

    monkeypatch.setattr(owner, what, wrapped)


def test_a_vote_ends_when_it_is_decided(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=1, temperature=0.5)
    vote = llm.vote(FACT, params, n=4, regex=r"\w+")
    assert vote.votes.total() <= 4 and vote.answer in vote.votes
    sure = llm.vote(FACT, SamplingParams(max_tokens=4, temperature=0), n=4, regex="^ (Paris)")
    assert sure.answer == "Paris" and sure.votes.total() >= 3
    with pytest.raises(BadInput, match="one of regex and json_path"):
        llm.vote(FACT)
    assert_healthy(llm)


@pytest.mark.parametrize("moment", ["submit", "commit"])
def test_ctrl_c_ends_the_answer_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), llm.stream(FACT, LONG) as stream:
        during(llm, patch, moment, lambda: signal.raise_signal(signal.SIGINT))
        next(stream)
    assert stream.completion.choices[0].finish.reason == "abort"
    assert_healthy(llm)


def test_ctrl_c_waits_only_where_it_has_to() -> None:
    order = []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        order.append("the rest of the block")
    assert order and signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("abandon", ["drop", "cycle", "close"])
def test_a_request_nobody_holds_is_cancelled(llm: LLM, abandon: str) -> None:
    stream = llm.stream(FACT, LONG)
    next(stream)
    if abandon == "close":
        stream.close()
    elif abandon == "cycle":
        stream.completion.me = stream  # type: ignore[attr-defined]
    del stream
    gc.collect()
    assert_healthy(llm)
    assert llm.engine.loop.idle


def test_garbage_is_collected_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(FACT, LONG)
    next(stream)
    stream.me = stream  # type: ignore[attr-defined]
    del stream
    with monkeypatch.context() as patch:
        during(llm, patch, "submit", gc.collect)  # would wait for the lock of this very step
        assert_healthy(llm)


def test_an_iteration_left_early_cancels_the_rest(llm: LLM) -> None:
    for _ in llm.as_completed((number, FACT, LONG if number else GREEDY) for number in range(8)):
        break
    assert_healthy(llm)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stop_string_in_the_last_token_is_a_stop(llm: LLM, n: int) -> None:
    whole = llm.generate(FACT, GREEDY)[0].text
    stopped = SamplingParams(temperature=0, max_tokens=3, n=n, stop=(whole[-2:], whole))
    for choice in llm.generate(FACT, stopped)[0].choices:
        assert (choice.text, choice.finish.matched, len(choice.tokens)) == ("", whole, 3)


def test_threads_share_the_engine(llm: LLM) -> None:
    prompts = [f"Count from {number} to ten:" for number in range(8)]
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]
    answers: dict[str, str] = {}

    def ask(prompt: str) -> None:
        answers[prompt] = "".join(delta.text for delta in llm.stream(prompt, GREEDY))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[prompt] for prompt in prompts] == alone


def test_a_stream_misses_nothing_that_another_thread_computes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LLM.submit

    def submit_and_turn(*args: Any) -> Any:
        completion = plain(*args)
        llm.turn()  # as another thread may, before the stream is even made
        return completion

    monkeypatch.setattr(LLM, "submit", submit_and_turn)
    stream = llm.stream(FACT, GREEDY)
    assert "".join(delta.text for delta in stream) == stream.completion.text


def test_more_prompts_than_the_queue_holds_wait_for_room() -> None:
    with LLM(**SMALL, max_queued=3) as llm:
        assert len(llm.generate([FACT] * 20, GREEDY)) == 20
        assert len(llm.generate([FACT] * 5, SamplingParams(max_tokens=2, n=3))) == 5
        with pytest.raises(Rejected, match="of at most 3"):
            llm.generate(FACT, SamplingParams(max_tokens=2, n=4))


def test_a_failed_step_costs_its_rows_and_no_more(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        during(llm, patch, "submit", fail)
        (completion,) = llm.generate(FACT, SamplingParams(n=2, max_tokens=4))
    assert [choice.finish.reason for choice in completion.choices] == ["error", "error"]
    assert_healthy(llm)


def test_what_breaks_the_loop_ends_the_engine_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**SMALL) as llm:
        stream = llm.stream(FACT, LONG)
        monkeypatch.setattr(llm.engine.loop.scheduler, "commit", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(EngineDead, match="the engine broke: ZeroDivisionError"):
                next(stream)
        with pytest.raises(EngineDead):
            list(llm.as_completed([("a", FACT, GREEDY)]))  # not an error of this request, so not its result
        stream.close()


def test_a_closed_llm_says_so() -> None:
    llm = LLM(**SMALL)
    stream = llm.stream(FACT, LONG)
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: next(stream), lambda: llm.generate(FACT), lambda: llm.chat("Hi")):
        with pytest.raises(EngineDead, match="closed"):
            use()
    stream.close()


def test_a_plain_prompt_is_not_continued_without_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.engine.llm.DEFAULT_MAX_TOKENS", 3)
    assert [len(one.choices[0].tokens) for one in llm.generate([FACT, FACT])] == [3, 3]
    longer = SamplingParams(temperature=0, min_tokens=5)
    assert len(llm.generate(FACT, longer)[0].choices[0].tokens) == 5
    with llm.stream(FACT) as stream:
        assert sum(len(delta.tokens) for delta in stream) == 3
    given = [(1, FACT, GREEDY), (2, FACT, SamplingParams(temperature=0))]
    results = dict(llm.as_completed(given))
    assert len(results[2].choices[0].tokens) == 3  # type: ignore[union-attr]
    nearly_full = llm.engine.encode("a " * (llm.engine.max_model_len - 2))[: llm.engine.max_model_len - 2]
    assert len(llm.generate(nearly_full)[0].choices[0].tokens) <= 2
    assert len(llm.chat("Count from one to five.", SamplingParams(temperature=0)).choices[0].tokens) > 3


def test_a_batch_shows_how_far_it_is(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(FACT, GREEDY)
    assert capfd.readouterr().err == "", "no terminal"
    llm.generate([FACT, FACT], GREEDY, show_progress=True)
    assert "2/2" in capfd.readouterr().err


def test_an_event_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(EventFileError, match=r"no/log: the event log cannot be written: No such file"):
        LLM(**SMALL, event_log=str(tmp_path / "no" / "log"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_a_recorded_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = LLM(**SMALL, event_log=str(tmp_path / "log"))
    subscribers = llm.engine.loop.scheduler.state.log._subscribers
    (writer,) = (one for one in subscribers if isinstance(one, EventWriter))
    monkeypatch.setattr(writer, "_file", Path("/dev/full").open("wb"))  # noqa: SIM115  closed by the writer
    for _ in range(2):
        with pytest.raises(HeadwayError, match="the event log cannot be written: No space left"):
            llm.generate(FACT, GREEDY)
    with pytest.raises(EventFileError):
        llm.close()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda llm: llm.generate(None), "prompts: give a text"),
        (lambda llm: llm.generate([FACT, 5]), "prompt: give a text, or a list of token ids"),
        (lambda llm: llm.generate([True]), "prompt: give a text, or a list of token ids"),
        (lambda llm: llm.generate([[1.5]]), "prompt: give a text, or a list of token ids"),
        (lambda llm: llm.generate(b"text"), "prompt: give a text, or a list of token ids"),
        (lambda llm: llm.generate([{"role": "user"}]), "prompt: give a text, or a list of token ids"),
        (lambda llm: llm.generate("\ud800"), "prompt: holds half of a surrogate pair"),
        (lambda llm: llm.generate(FACT, {"max_tokens": 3}), "params: dict is not SamplingParams"),
        (lambda llm: llm.generate(FACT, [None]), "params: NoneType is not SamplingParams"),
        (lambda llm: llm.generate(FACT, [GREEDY, GREEDY]), "params: 2 given for 1 prompts"),
        (lambda llm: llm.chat(5), "messages: give a text, or a list of"),
        (lambda llm: llm.chat({"role": "user", "content": "x"}), "messages: give a text, or a list of"),
    ],
)
def test_a_wrong_argument_is_one_sentence(llm: LLM, call: Callable[[LLM], object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        call(llm)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"threads": "2"}, "threads"),
        ({"kv_cache_gib": float("inf")}, "--kv-cache-gib: inf is not a number above 0"),
        ({"kv_cache_gib": 1e300}, r"--kv-cache-gib: 1e\+300 does not fit: at most"),
        ({"max_step_tokens": 10**7}, r"--kv-cache-gib: .* for a step's activations"),
        ({"max_step_tokens": 10**9}, "--max-step-tokens: 1000000000 is not an integer from 1 to 1e.07"),
        ({"max_queued_tokens": -5}, "--max-queued-tokens: -5 is not an integer >= 1"),
        ({"model": ""}, "holds neither a config.json nor a .gguf file"),
        ({"model": Path("no") / "such" / "model"}, "no/such/model"),
        ({"model": "~nobody-of-this-name/model"}, "~nobody-of-this-name/model"),
    ],
)
def test_an_option_out_of_range_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HeadwayError, match=sentence):
        LLM(**options)


def test_a_dropped_stream_is_cancelled_while_its_prompt_is_being_computed(llm: LLM) -> None:
    """It has no delta yet by which anyone could notice."""
    scheduler = llm.engine.loop.scheduler
    stream = llm.stream(list(range(1000, 1400)), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    llm.engine.loop.turn()
    assert scheduler.running == 1
    del stream
    gc.collect()
    llm.turn()
    assert scheduler.running == scheduler.waiting == 0
    assert_healthy(llm)
