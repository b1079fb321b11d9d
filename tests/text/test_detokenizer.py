"""Streamed text put together is the whole text, for every sequence of tokens and every cut."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer

shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
REPLACEMENT = "\ufffd"


@pytest.fixture(params=["byte_level", "sentencepiece"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(kind: str, request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(f"{kind}_tokenizer")


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special=skip_special)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@shared
@given(st.lists(st.integers(0, 520), max_size=40), st.booleans())
def test_pieces_are_the_whole_text_of_any_ids(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> None:
    """Random ids hold invalid bytes, split characters, control tokens and ids without text."""
    ids = [token % tokenizer.vocab_size for token in ids]
    pieces = stream(tokenizer, ids, [], skip_special)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)


@shared
@given(st.lists(st.integers(0, 520), max_size=30), st.booleans())
def test_decoding_equals_the_tokenizers_library(
    byte_level: tokenizers.Tokenizer, byte_level_tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    ids = [token % byte_level.get_vocab_size() for token in ids]
    assert byte_level_tokenizer.decode(ids, skip_special=skip_special) == byte_level.decode(ids, skip_special)


@shared
@given(st.text(alphabet="He lowrd th\n.éß漢🎉👍🏽\u2581", max_size=30))
def test_sentencepiece_decoding_equals_the_tokenizers_library(
    sentencepiece: tokenizers.Tokenizer, sentencepiece_tokenizer: Tokenizer, text: str
) -> None:
    ids = sentencepiece.encode(text).ids
    assert sentencepiece_tokenizer.decode(ids) == sentencepiece.decode(ids)


@shared
@given(st.text(max_size=30), st.data())
@example(text="🎉🎉", data=None)
def test_continuing_after_any_prompt_repeats_nothing_and_loses_nothing(
    tokenizer: Tokenizer, text: str, data: st.DataObject | None
) -> None:
    ids = tokenizer.encode(text, add_special=False)
    cuts = range(len(ids) + 1) if data is None else [data.draw(st.integers(0, len(ids)))]
    for cut in cuts:
        prompt, rest = ids[:cut], ids[cut:]
        pieces = "".join(stream(tokenizer, rest, prompt))
        whole = tokenizer.decode(ids)
        assert whole.endswith(pieces)
        shown = tokenizer.decode(prompt)
        # Only a character that the prompt left incomplete is completed, and so appears with what follows.
        assert whole[: len(whole) - len(pieces)] == shown.rstrip(REPLACEMENT) or shown + pieces == whole


@shared
@given(st.text(max_size=30))
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    if REPLACEMENT in text:
        return
    pieces = stream(tokenizer, tokenizer.encode(text, add_special=False), [])
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == ""


def test_an_incomplete_end_is_shown_only_by_flush(byte_level_tokenizer: Tokenizer) -> None:
    half = byte_level_tokenizer.encode("ab\U0001f980")[:-1]
    *pieces, end = stream(byte_level_tokenizer, half, [])
    assert ("".join(pieces), end) == ("ab", REPLACEMENT)


def test_a_replacement_character_of_the_model_is_text_like_any_other(byte_level_tokenizer: Tokenizer) -> None:
    pieces = stream(byte_level_tokenizer, byte_level_tokenizer.encode(REPLACEMENT), [])
    assert "".join(pieces[:-1]) == REPLACEMENT


def test_invalid_bytes_do_not_hold_text_back(byte_level_tokenizer: Tokenizer, byte_level: tokenizers.Tokenizer) -> None:
    lead = byte_level.token_to_id("ð")  # byte 0xF0 opens a character of four bytes
    detokenizer = Detokenizer(byte_level_tokenizer)
    shown = [detokenizer.push(token) for token in [lead, lead, *byte_level_tokenizer.encode("!")]]
    assert shown == ["", REPLACEMENT, REPLACEMENT + "!"]


def test_the_leading_space_is_dropped_only_at_the_start_of_a_text(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = sentencepiece_tokenizer.encode("He", add_special=False)
    assert "".join(stream(sentencepiece_tokenizer, ids, [])) == "He"
    assert "".join(stream(sentencepiece_tokenizer, ids, [1])) == "He"
    assert "".join(stream(sentencepiece_tokenizer, ids, [1, *ids])) == " He"
    assert sentencepiece_tokenizer.decode(ids, at_start=False) == " He"


def test_control_tokens_within_a_character_do_not_break_it(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("\U0001f980")
    assert "".join(stream(byte_level_tokenizer, [ids[0], 2, *ids[1:], 2], [])) == "\U0001f980"
