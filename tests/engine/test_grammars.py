"""Rows that are bound to a grammar: with every other feature, on both backends, through preemption."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from headway.core.events import EventLog, Preempted
from headway.core.grammar import Grammar
from headway.core.request import SamplingParams
from headway.core.thinking import Thinking
from headway.engine.messages import Delta, Refusal, Submit
from headway.executor.grammars import Grammars
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.text.grammar import GrammarChecker
from tests.engine.tiny import VOCAB, TinyModel, complete, drain, prompts, tokens_of

EOS = 0
PIECES = ["", *string.ascii_lowercase, *string.digits, *'{}[]":, \n', "ab", '{"', '":', "true", '"a"', "12"]


class Letters:
    """As much of a tokenizer as grammars look at: letters, digits, marks, a few longer tokens, and padding."""

    vocab_size = VOCAB
    special_ids = {"<|end|>": EOS}  # noqa: RUF012
    eos_ids = (EOS,)

    def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:
        return b"<|end|>" if id == EOS else PIECES[id].encode() if id < len(PIECES) else b""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [PIECES.index(character) for character in text]


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker({"<|end|>": EOS})
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(cast(Any, Letters()))
    yield grammars
    grammars.close()


@pytest.fixture(
    scope="module",
    params=["reference", pytest.param("native", marks=pytest.mark.skipif(bool(native.why_not()), reason="no kernels"))],
)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return TinyModel(NativeBackend(threads=2, kv_dtype="f32") if request.param == "native" else None)


def text_of(deltas: list[Delta]) -> str:
    return "".join(PIECES[token] if token < len(PIECES) else "?" for token in tokens_of(deltas))


PATTERN = r"[a-c]{3,6}[0-9]{2}(xy|z)"
COMBINED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_k": 5},
    {"top_p": 0.5, "min_p": 0.05},
    {"logprobs": 3, "n": 3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "temperature": 0.7},
    {"logit_bias": ((PIECES.index("a"), 50.0), (PIECES.index("w"), 100.0))},
    {"min_tokens": 30},  # more than the grammar allows: it ends where it must
    {"stop": (), "stop_token_ids": (PIECES.index("q"),)},
]


@pytest.mark.parametrize("fields", COMBINED, ids=lambda fields: " ".join(fields) or "plain")
def test_only_what_the_grammar_allows_is_drawn(
    model: TinyModel, grammars: Grammars, checker: GrammarChecker, fields: dict[str, Any]
) -> None:
    params = SamplingParams(**{"max_tokens": 60, "seed": 5, "grammar": checker.check(Grammar.regex(PATTERN)), **fields})
    runs = [complete(model.loop(grammars=grammars, eos_ids=(EOS,)), prompts(6), params) for _ in range(2)]
    for deltas in runs[0].values():
        for choice in range(params.n):
            own = [delta for delta in deltas if delta.choice == choice]
            assert re.fullmatch(PATTERN, text_of(own)), text_of(own)
            assert own[-1].finish is not None and own[-1].finish.matched == EOS
            if params.logprobs is not None:  # of the raw distribution, in which most of what is likely was forbidden
                assert all(len(one.top) == 3 for delta in own for one in delta.logprobs)
    assert {id: tokens_of(deltas) for id, deltas in runs[0].items()} == {
        id: tokens_of(deltas) for id, deltas in runs[1].items()
    }


def test_backends_agree(grammars: Grammars, checker: GrammarChecker) -> None:
    if native.why_not():
        pytest.skip("no kernels")
    params = SamplingParams(seed=9, max_tokens=40, grammar=checker.check(Grammar.regex("([a-m]{1,3} )*[n-z]")))
    texts = []
    for made in (TinyModel(), TinyModel(NativeBackend(threads=1, kv_dtype="f32"))):
        run = complete(made.loop(grammars=grammars, eos_ids=(EOS,)), prompts(4), params)
        texts.append({id: text_of(deltas) for id, deltas in run.items()})
    assert texts[0] == texts[1]


def test_neighbours_without_a_grammar_are_as_without_one(
    model: TinyModel, grammars: Grammars, checker: GrammarChecker
) -> None:
    free = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    alone = complete(model.loop(grammars=grammars, eos_ids=(EOS,)), prompts(3), free)
    loop = model.loop(grammars=grammars, eos_ids=(EOS,))
    bound = SamplingParams(seed=3, max_tokens=12, grammar=checker.check(Grammar.regex("[a-z]+")))
    for number, tokens in enumerate(prompts(3)):
        assert loop.submit(Submit(id=f"bound{number}", tokens=tokens, params=bound)) is None
        assert loop.submit(Submit(id=str(number), tokens=tokens, params=free)) is None
    deltas = drain(loop)
    for id, expected in alone.items():
        assert tokens_of([delta for delta in deltas if delta.id == id]) == tokens_of(expected)


def test_a_preempted_row_finds_its_place_again(model: TinyModel, grammars: Grammars, checker: GrammarChecker) -> None:
    pattern = "([a-f]{2}[0-9]){12}z"
    params = SamplingParams(seed=1, max_tokens=60, grammar=checker.check(Grammar.regex(pattern)))
    events: list[Any] = []
    loop = model.loop(grammars=grammars, eos_ids=(EOS,), blocks=40, log=EventLog(events.append))
    run = complete(loop, prompts(8), params)
    assert any(isinstance(event, Preempted) for event in events)
    calm = complete(model.loop(grammars=grammars, eos_ids=(EOS,)), prompts(8), params)
    for id, deltas in run.items():
        assert re.fullmatch(pattern, text_of(deltas))
        assert deltas[-1].finish == calm[id][-1].finish


def test_what_is_cut_says_so(model: TinyModel, grammars: Grammars, checker: GrammarChecker) -> None:
    params = SamplingParams(seed=1, max_tokens=5, grammar=checker.check(Grammar.regex("[a-z]{40}")))
    (deltas,) = complete(model.loop(grammars=grammars, eos_ids=(EOS,)), prompts(1), params).values()
    assert deltas[-1].finish is not None and deltas[-1].finish.reason == "length"


def test_an_engine_without_grammars_refuses_them(checker: GrammarChecker) -> None:
    params = SamplingParams(max_tokens=5, grammar=checker.check(Grammar.regex("a")))
    refused = TinyModel().loop().submit(Submit(id="a", tokens=(1,), params=params))
    assert isinstance(refused, Refusal) and refused.message.startswith("grammar: ")


def test_allowed_tokens_that_the_grammar_forbids_are_refused(
    model: TinyModel, grammars: Grammars, checker: GrammarChecker
) -> None:
    loop = model.loop(grammars=grammars, eos_ids=(EOS,))
    grammar = checker.check(Grammar.regex("ab[0-9]"))

    def submitted(*letters: str) -> Refusal | None:
        allowed = tuple(PIECES.index(letter) for letter in letters)
        return loop.submit(
            Submit(id="".join(letters), tokens=(1,), params=SamplingParams(grammar=grammar, allowed_token_ids=allowed))
        )

    refused = submitted("b", "7")
    assert isinstance(refused, Refusal) and refused.status == 400
    assert refused.message == "allowed_token_ids: none of these tokens begins a text that the grammar allows"
    assert submitted("a", "7") is None, "this one begins a text"
    (delta,) = (delta for delta in drain(loop) if delta.finish is not None)
    assert delta.finish is not None and delta.finish.reason == "error"
    assert "of the tokens in allowed_token_ids, none goes on" in str(delta.finish.matched)


THINKING = Thinking(end=(PIECES.index("}"),), forced=(PIECES.index(","), PIECES.index("}")), budget=6)


@pytest.mark.parametrize("opened", [True, False], ids=["opened by the prompt", "opened by the model"])
@pytest.mark.parametrize("blocks", [400, 40], ids=["calm", "preempted"])
def test_reasoning_ends_with_its_budget_and_the_grammar_begins(
    model: TinyModel, grammars: Grammars, checker: GrammarChecker, opened: bool, blocks: int
) -> None:
    start = PIECES.index("{")
    thinking = THINKING if opened else msgspec.structs.replace(THINKING, start=start)
    params = SamplingParams(
        seed=4, max_tokens=40, thinking=thinking, grammar=checker.check(Grammar.regex("([a-f]{2}[0-9]){6}z")),
        logit_bias=((start, 60.0),) if not opened else (), temperature=1.5,
    )  # fmt: skip
    for deltas in complete(model.loop(grammars=grammars, eos_ids=(EOS,), blocks=blocks), prompts(8), params).values():
        reasoning, closed, answer = text_of(deltas).partition("}")
        assert closed and re.fullmatch("([a-f]{2}[0-9]){6}z", answer), text_of(deltas)
        ids = tokens_of(deltas)
        at = ids.index(PIECES.index("}")) - (not opened)
        assert at <= 7 and (at < 7 or reasoning.endswith(","))
        assert deltas[-1].finish is not None and deltas[-1].finish.matched == EOS


def test_a_budget_alone_ends_reasoning(model: TinyModel, grammars: Grammars) -> None:
    params = SamplingParams(seed=4, max_tokens=20, temperature=0, thinking=THINKING)
    for deltas in complete(model.loop(grammars=grammars), prompts(4), params).values():
        assert "}" in text_of(deltas)[:16]


def test_a_grammar_that_makes_too_many_states_is_refused_in_one_sentence(
    grammars: Grammars, checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the last letters may be the one that the rest hangs on: nothing of it shows at the first token."""
    ahead = checker.check(Grammar.regex("([a-z]*a[a-z]{12}b|[a-z]*c[a-z]{14}d|[a-z]*e[a-z]{13}f)"))
    assert grammars.begin(ahead).result() is not None
    few = "headway.text.grammar_worker.STATES"
    monkeypatch.setattr(few, 20)
    fresh = Grammars(cast(Any, Letters()))
    loop = TinyModel().loop(grammars=fresh, eos_ids=(EOS,))
    params = SamplingParams(temperature=0, max_tokens=9, grammar=ahead)
    refused = loop.submit(Submit(id="0", tokens=(1, 2), params=params))
    assert isinstance(refused, Refusal) and refused.status == 400
    assert "more than the 20 states that one may have" in refused.message and "\n" not in refused.message
    plain = msgspec.structs.replace(params, grammar=checker.check(Grammar.regex("[a-c]{2}")))
    assert loop.submit(Submit(id="1", tokens=(1, 2), params=plain)) is None
    drain(loop)
    fresh.close()


def test_what_is_compiled_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What requests follow stays; beyond the bound others are forgotten, and then no more are taken."""
    grammars = Grammars(cast(Any, Letters()))
    some = [checker.check(Grammar.regex(f"{letter}{{2}}")) for letter in "abcdef"]
    monkeypatch.setattr("headway.executor.grammars.MOST", 4)
    loop = TinyModel().loop(grammars=grammars, eos_ids=(EOS,))
    params = [SamplingParams(temperature=0, max_tokens=9, grammar=grammar) for grammar in some]
    for number, one in enumerate(params[:4]):
        assert loop.submit(Submit(id=str(number), tokens=(1, 2), params=one)) is None
    refused = loop.submit(Submit(id="4", tokens=(1, 2), params=params[4]))
    assert isinstance(refused, Refusal) and refused.status == 503 and "grammars of other requests" in refused.message
    assert loop.submit(Submit(id="5", tokens=(1, 2), params=params[0])) is None  # followed already
    drain(loop)
    assert loop.submit(Submit(id="6", tokens=(1, 2), params=params[4])) is None
    monkeypatch.setattr("headway.executor.grammars.ROOM", 1000)
    never = loop.submit(Submit(id="7", tokens=(1, 2), params=params[5]))
    assert isinstance(never, Refusal) and never.status == 400 and "for all" in never.message
    drain(loop)
    grammars.close()
