"""Stop strings: what is shown is the text before the first completed one, for every cut; nothing is held in vain."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.text.output import OutputText
from headway.text.stop import StopMatcher
from headway.text.tokenizer import Tokenizer

texts = st.text("ab", max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def expected(pieces: list[str], stops: list[str], min_tokens: int = 0) -> tuple[str, str | None]:
    """By brute force: the shortest beginning of the text that ends in a stop string decides, the longest such one."""
    text = "".join(pieces)
    end_of = [0]
    for piece in pieces:
        end_of.append(end_of[-1] + len(piece))
    ignored = end_of[min(max(0, min_tokens - 1), len(pieces))]
    for end in range(ignored + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], min_tokens: int = 0) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops, min_tokens)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            break
    return [*shown, matcher.flush()], matcher


@given(st.lists(texts, max_size=12), stop_lists, st.integers(0, 6))
def test_equals_brute_force_on_the_whole_text_for_every_cut(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    shown, matcher = run(pieces, stops, min_tokens)
    assert ("".join(shown), matcher.matched) == expected(pieces, stops, min_tokens)


@given(texts, stop_lists, st.data())
def test_the_result_does_not_depend_on_the_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    one_by_one, whole = run(list(text), stops), run([text], stops)
    cut = run(pieces, stops)
    assert "".join(cut[0]) == "".join(one_by_one[0]) == "".join(whole[0])
    assert cut[1].matched == one_by_one[1].matched == whole[1].matched


@given(texts, stop_lists)
def test_only_a_live_beginning_of_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for length, character in enumerate(text, 1):
        shown += matcher.push(character)
        if matcher.matched is not None:
            return
        held = text[len(shown) : length]
        live = [n for n in range(length + 1) if any(stop.startswith(text[length - n : length]) for stop in stops)]
        assert len(held) == max(
            [n for n in live if not any(len(stop) == n for stop in stops if text[:length].endswith(stop))] or [0]
        )


CASES = [
    # pieces, stops, min_tokens, shown, matched
    (["Hello", " wor", "ld"], [" world"], 0, "Hello", " world"),
    (["Hello", " wor", "k"], [" world"], 0, "Hello work", None),
    (["a", "b", "c"], ["abc"], 0, "", "abc"),  # the whole answer
    (["xabc"], ["b", "abc"], 0, "xa", "b"),  # the earliest end wins
    (["xabc"], ["bc", "abc", "abc"], 0, "x", "abc"),  # of one end, the longest
    (["aab", "aab"], ["aabaaa"], 0, "aabaab", None),
    (["END", " text ", "END"], ["END"], 2, "END text ", "END"),
    (["END", "END"], ["END"], 1, "", "END"),
    (["E", "ND"], ["END"], 2, "", "END"),  # completed by a token that may end the text
    (["", "", "x"], ["x"], 3, "", "x"),  # tokens without text count
    (["ab"], [], 0, "ab", None),
    (["日", "本", "語"], ["本語"], 0, "日", "本語"),
]


@pytest.mark.parametrize(("pieces", "stops", "min_tokens", "shown", "matched"), CASES)
def test_cases(pieces: list[str], stops: list[str], min_tokens: int, shown: str, matched: str | None) -> None:
    pieces_shown, matcher = run(pieces, stops, min_tokens)
    assert ("".join(pieces_shown), matcher.matched) == (shown, matched)


def test_a_long_stop_string_that_never_comes_delays_nothing() -> None:
    matcher = StopMatcher(["=" * 1000])
    assert [matcher.push(piece) for piece in ["Hello", " ", "world"]] == ["Hello", " ", "world"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.text("ab é🎉", max_size=20), st.lists(st.text("ab é🎉", min_size=1, max_size=4), max_size=3), st.integers(0, 4)
)
def test_output_text_is_decoding_then_stopping(
    byte_level_tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int
) -> None:
    ids = byte_level_tokenizer.encode(text)
    output = OutputText(byte_level_tokenizer, [5, 6], stop=stops, stop_ids={2}, min_tokens=min_tokens)
    shown = ""
    for token in [*ids, 2]:
        shown += output.push(token)
        if output.matched is not None:
            break
    shown += output.flush()
    if min_tokens <= 1:
        assert (shown, output.matched) == expected([text], stops)
    else:
        assert text.startswith(shown)
        assert (output.matched is None) == (shown == text)


def test_the_text_of_a_stop_id_is_not_shown(byte_level_tokenizer: Tokenizer) -> None:
    first = byte_level_tokenizer.encode("fox")[0]
    output = OutputText(byte_level_tokenizer, [], stop_ids={first})
    assert output.push(first) + output.flush() == ""
